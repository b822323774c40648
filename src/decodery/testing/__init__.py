"""The invariants of exact decoding, as checks for any method."""

from .caches import check_cache
from .constraints import check_constraint
from .denoisers import OracleDenoiser
from .distributions import check_distribution, enumerate_law
from .doubles import Tabular, TabularReward, best_of_law
from .drafters import Garbage, Oracle, OracleChain
from .laws import check_batch, check_identical
from .models import TableModel, tiny_transformer, to_int8
from .policies import check_cache_policy
from .predictions import check_predictions
from .processors import check_logits_processor
from .regex import ReferenceRegex
from .running import LawBroken, decode
from .scorers import check_scorer
from .searches import check_search
from .states import check_state
from .statistics import chi_square

__all__ = [
    "Garbage",
    "LawBroken",
    "Oracle",
    "OracleChain",
    "OracleDenoiser",
    "ReferenceRegex",
    "TableModel",
    "Tabular",
    "TabularReward",
    "best_of_law",
    "check_batch",
    "check_cache",
    "check_cache_policy",
    "check_constraint",
    "check_distribution",
    "check_identical",
    "check_logits_processor",
    "check_predictions",
    "check_scorer",
    "check_search",
    "check_state",
    "chi_square",
    "decode",
    "enumerate_law",
    "tiny_transformer",
    "to_int8",
]
