# Written by tools/method_index.py.
from .dkv import DKV as DKV
from .dkv_greedy import DKVGreedy as DKVGreedy
from .base import DiffusionCache as DiffusionCache
from .dual import Dual as Dual
from .base import Kept as Kept
from .base import Plan as Plan
from .prefix import Prefix as Prefix
from .window import Window as Window
