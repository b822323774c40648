"""Inference-time searches: several texts are followed for one answer."""

from .beam import Beam
from .diverse_beam import DiverseBeam

__all__ = ["Beam", "DiverseBeam"]
