# Written by tools/method_index.py.
from .calm import CALM as CALM
from .controlled_decoding import ControlledDecoding as ControlledDecoding
from .dola import DoLa as DoLa
from .entropy_adaptive import EntropyAdaptive as EntropyAdaptive
from .ftp import FTP as FTP
from .guidance import Guidance as Guidance
from .hamburger import Hamburger as Hamburger
from .partial_attention import PartialAttention as PartialAttention
from .partial_attention import PartialWeights as PartialWeights
from .prefix_lm import PrefixLM as PrefixLM
from .sec import SEC as SEC
from .sven import SVEN as SVEN
from .transfer_q import TransferQ as TransferQ
from .adapter import Tuned as Tuned
from .uscd import USCD as USCD
from .uscd import without_examples as without_examples
