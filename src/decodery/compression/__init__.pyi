# Written by tools/method_index.py.
from .bitnet import BitNet as BitNet
from .evopress import EvoPress as EvoPress
from .ffn_split import FFNSplit as FFNSplit
from .fp4 import FP4 as FP4
from .int4 import Int4 as Int4
from .int8 import Int8 as Int8
from .jlcm import JLCM as JLCM
from .lq_lora import LQLoRA as LQLoRA
from .mc_moe import MCMoE as MCMoE
from .base import ModelCompression as ModelCompression
from .nm_sparsity import NMSparsity as NMSparsity
from .base import Report as Report
from .s2ft import S2FT as S2FT
from .base import Size as Size
from .slicegpt import SliceGPT as SliceGPT
from .base import transformed as transformed
