# Written by tools/method_index.py.
from .density_ratio import DensityRatio as DensityRatio
