# Written by docs/generate.py.
from .density_ratio import DensityRatio as DensityRatio
