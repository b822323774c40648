"""Experiments, puzzles and drivers of other programs: what measures decodery and is not part of it."""
