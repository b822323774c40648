"""Searches compared on own problems: accuracy against tokens."""
