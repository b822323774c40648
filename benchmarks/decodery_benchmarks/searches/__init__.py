"""Searches on puzzles: what they find against what they spend, with reward models of known quality."""
