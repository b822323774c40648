# Written by docs/generate.py.
from .superposed import Superposition as Superposition
