"""The laws of exact decoding, as checks any method can be run through."""

from .caches import check_cache
from .constraints import check_constraint
from .drafters import Garbage, Oracle
from .laws import (
    LawBroken,
    check_batch,
    check_distribution,
    check_identical,
    check_state,
    decode,
    enumerate_law,
)
from .models import TableModel, tiny_transformer, to_int8
from .regex import ReferenceRegex
from .searches import check_search
from .statistics import chi_square

__all__ = [
    "Garbage",
    "LawBroken",
    "Oracle",
    "ReferenceRegex",
    "TableModel",
    "check_batch",
    "check_cache",
    "check_constraint",
    "check_distribution",
    "check_identical",
    "check_search",
    "check_state",
    "chi_square",
    "decode",
    "enumerate_law",
    "tiny_transformer",
    "to_int8",
]
