"""Files that lie: what is sound, how it is mutated, and how every kind is read."""
