"""Inference-time searches: several texts are followed for one answer."""

from .beam import Beam
from .contrastive_search import ContrastiveSearch
from .controlled_blocks import ControlledBlocks
from .coupling import Coupling, Reading
from .diverse_beam import DiverseBeam
from .exact_extract import ExactExtract
from .pg_td import PGTD
from .potential import Potential, TextPotential
from .program_tests import ProgramTests
from .smc import SMC, Posterior

__all__ = [
    "PGTD",
    "SMC",
    "Beam",
    "ContrastiveSearch",
    "ControlledBlocks",
    "Coupling",
    "DiverseBeam",
    "ExactExtract",
    "Posterior",
    "Potential",
    "ProgramTests",
    "Reading",
    "TextPotential",
]
