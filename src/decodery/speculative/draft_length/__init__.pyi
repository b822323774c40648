# Written by tools/method_index.py.
from .base import Budget as Budget
from .confidence import Confidence as Confidence
from .fixed import Fixed as Fixed
from .goodput import Goodput as Goodput
from .hardware import Hardware as Hardware
from .memory import MemoryBound as MemoryBound
from .base import Outlook as Outlook
from .base import Policy as Policy
from .specdec_pp import SpecDecPP as SpecDecPP
