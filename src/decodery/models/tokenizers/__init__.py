"""Tokenizers, chat templates and vocabularies."""
