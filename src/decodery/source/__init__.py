"""Logit sources, one per file: what a text is scored by in place of one model in one context."""

from .controlled_decoding import ControlledDecoding
from .dola import DoLa
from .entropy_adaptive import EntropyAdaptive
from .guidance import Guidance
from .partial_attention import PartialAttention, PartialWeights
from .sven import SVEN
from .transfer_q import TransferQ
from .uscd import USCD
from .value import LinearValue, TextReward

__all__ = [
    "SVEN",
    "USCD",
    "ControlledDecoding",
    "DoLa",
    "EntropyAdaptive",
    "Guidance",
    "LinearValue",
    "PartialAttention",
    "PartialWeights",
    "TextReward",
    "TransferQ",
]
