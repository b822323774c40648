# Written by docs/generate.py.
from .beam import Beam as Beam
from .best_of_n import BestOfN as BestOfN
from .base import Branches as Branches
from .contrastive_search import ContrastiveSearch as ContrastiveSearch
from .controlled_blocks import ControlledBlocks as ControlledBlocks
from .coupling import Coupling as Coupling
from .diverse_beam import DiverseBeam as DiverseBeam
from .exact_extract import ExactExtract as ExactExtract
from .feature_vote import FeatureVote as FeatureVote
from .first_finish import FirstFinish as FirstFinish
from .pg_td import PGTD as PGTD
from .smc import Posterior as Posterior
from .coupling import Reading as Reading
from .smc import SMC as SMC
from .base import Search as Search
from .self_consistency import SelfConsistency as SelfConsistency
from .weighted_vote import WeightedVote as WeightedVote
