# Written by docs/generate.py.
from .confidence import Confidence as Confidence
from .factcheckmate import FactCheckmate as FactCheckmate
from .los import LOS as LOS
from .los import LOSHead as LOSHead
from .base import Monitor as Monitor
from .probe import Probe as Probe
from .base import Prompt as Prompt
from .recorder import Recorder as Recorder
from .base import Rollback as Rollback
from .base import Row as Row
from .factcheckmate import Shift as Shift
from .signature import Signature as Signature
from .base import Stop as Stop
from .threshold import Threshold as Threshold
from .truthprint import TruthPrInt as TruthPrInt
