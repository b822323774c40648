# Written by tools/method_index.py.
from . import continuous as continuous
from .awrs import AWRS as AWRS
from .adadec import AdaDec as AdaDec
from .cntp import CNTP as CNTP
from .coupled import Coupled as Coupled
from .judge import Judge as Judge
from .k_seq import KSeq as KSeq
from .lexical_unit import LexicalUnit as LexicalUnit
from .rapid import Rapid as Rapid
from .recursive_rejection import RecursiveRejection as RecursiveRejection
from .rejection import Rejection as Rejection
from .tolerance import Tolerance as Tolerance
from .typical import Typical as Typical
