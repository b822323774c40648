"""From logits to the distribution that is sampled: warps, one per file, and the sampler that orders them."""

from .base import Context, Stage, Warp
from .dry import DRY
from .epsilon import Epsilon
from .eta import Eta
from .frequency_penalty import FrequencyPenalty
from .logit_bias import LogitBias
from .min_new_tokens import MinNewTokens
from .min_p import MinP
from .mirostat import Mirostat
from .momentum import Momentum
from .no_repeat_ngram import NoRepeatNGram
from .presence_penalty import PresencePenalty
from .repetition_penalty import RepetitionPenalty
from .sampler import ORDERS, Sampler
from .temperature import Temperature
from .top_h import TopH
from .top_k import TopK
from .top_p import TopP
from .typical import Typical
from .xtc import XTC

__all__ = [
    "DRY",
    "ORDERS",
    "XTC",
    "Context",
    "Epsilon",
    "Eta",
    "FrequencyPenalty",
    "LogitBias",
    "MinNewTokens",
    "MinP",
    "Mirostat",
    "Momentum",
    "NoRepeatNGram",
    "PresencePenalty",
    "RepetitionPenalty",
    "Sampler",
    "Stage",
    "Temperature",
    "TopH",
    "TopK",
    "TopP",
    "Typical",
    "Warp",
]
