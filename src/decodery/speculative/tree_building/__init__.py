"""How a tree is made from what is remembered: one way per file."""
