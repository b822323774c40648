"""Drafters, one per file, and what combines them."""

from .combine import first, fuse, switch

__all__ = ["first", "fuse", "switch"]
