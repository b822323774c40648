# Written by tools/method_index.py.
from .confidence import Confidence as Confidence
from .fixed import Fixed as Fixed
from .goodput import Goodput as Goodput
from .hardware import Hardware as Hardware
from .memory import MemoryBound as MemoryBound
from .specdec_pp import SpecDecPP as SpecDecPP
