# Written by docs/generate.py.
from .base import Candidates as Candidates
from .corrupted import Corrupted as Corrupted
from .infalign import InfAlign as InfAlign
from .llm_judge import LLMJudge as LLMJudge
from .length_normalised import LengthNormalised as LengthNormalised
from .value_head import LinearValue as LinearValue
from .log_probability import LogProbability as LogProbability
from .product import Product as Product
from .program_tests import ProgramTests as ProgramTests
from .base import Scorer as Scorer
from .self_evaluation import SelfEvaluation as SelfEvaluation
from .text import TextScore as TextScore
from .value_head import ValueHead as ValueHead
from .base import judge as judge
from .base import log_scores as log_scores
from .infalign import transform as transform
from .infalign import win_rate as win_rate
