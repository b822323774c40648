# Written by tools/method_index.py.
from .actqkv import ActQKV as ActQKV
from .coprocessor import Coprocessor as Coprocessor
from .d2o import D2O as D2O
from .dapq import DapQ as DapQ
from .double_sparsity import DoubleSparsity as DoubleSparsity
from .expected_attention import ExpectedAttention as ExpectedAttention
from .h2o import H2O as H2O
from .lserve import LServe as LServe
from .localist import Localist as Localist
from .meta_soft import MetaSoft as MetaSoft
from .pyramid_kv import PyramidKV as PyramidKV
from .quantized import Quantized as Quantized
from .quest import Quest as Quest
from .snapkv import SnapKV as SnapKV
from .streaming_llm import StreamingLLM as StreamingLLM
from .tova import TOVA as TOVA
from .write_gate import WriteGate as WriteGate
