"""Inference-time searches: several texts are followed for one answer."""

from .beam import Beam
from .contrastive_search import ContrastiveSearch
from .controlled_blocks import ControlledBlocks
from .coupling import Coupling, Reading
from .diverse_beam import DiverseBeam
from .exact_extract import ExactExtract

__all__ = ["Beam", "ContrastiveSearch", "ControlledBlocks", "Coupling", "DiverseBeam", "ExactExtract", "Reading"]
