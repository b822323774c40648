"""Inference-time searches: several texts are followed for one answer."""

from .beam import Beam
from .contrastive_search import ContrastiveSearch
from .coupling import Coupling, Reading
from .diverse_beam import DiverseBeam
from .exact_extract import ExactExtract

__all__ = ["Beam", "ContrastiveSearch", "Coupling", "DiverseBeam", "ExactExtract", "Reading"]
