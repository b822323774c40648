"""Texts as bits under a language model's own predictions, and back."""
