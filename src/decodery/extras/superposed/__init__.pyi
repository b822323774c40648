# Written by tools/method_index.py.
from .superposed import Draft as Draft
from .ngrams import NGrams as NGrams
from .superposed import Superposition as Superposition
from .ngrams import load_ngrams as load_ngrams
