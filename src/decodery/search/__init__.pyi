# Written by docs/generate.py.
from .beam import Beam as Beam
from .base import Branches as Branches
from .contrastive_search import ContrastiveSearch as ContrastiveSearch
from .controlled_blocks import ControlledBlocks as ControlledBlocks
from .coupling import Coupling as Coupling
from .diverse_beam import DiverseBeam as DiverseBeam
from .exact_extract import ExactExtract as ExactExtract
from .pg_td import PGTD as PGTD
from .smc import Posterior as Posterior
from .coupling import Reading as Reading
from .smc import SMC as SMC
from .base import Search as Search
