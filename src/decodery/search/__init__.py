"""Inference-time searches: several texts are followed for one answer."""

from .beam import Beam
from .contrastive_search import ContrastiveSearch
from .controlled_blocks import ControlledBlocks
from .coupling import Coupling, Reading
from .diverse_beam import DiverseBeam
from .exact_extract import ExactExtract
from .potential import Potential, TextPotential
from .smc import SMC, Posterior

__all__ = [
    "SMC",
    "Beam",
    "ContrastiveSearch",
    "ControlledBlocks",
    "Coupling",
    "DiverseBeam",
    "ExactExtract",
    "Posterior",
    "Potential",
    "Reading",
    "TextPotential",
]
