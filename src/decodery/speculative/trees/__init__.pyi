# Written by tools/method_index.py.
from .caterpillar import Caterpillar as Caterpillar
from .dyspec import DySpec as DySpec
from .eagle_2 import EAGLE2 as EAGLE2
from .fixed_tree import FixedTree as FixedTree
from .k_chains import KChains as KChains
from .rsd_c import RSDC as RSDC
from .rsd_s import RSDS as RSDS
from .clover import Selection as Selection
from .sequoia import Sequoia as Sequoia
from .specinfer import SpecInfer as SpecInfer
