# Written by tools/method_index.py.
from .data import Corpus as Corpus
from .data import TrainingText as TrainingText
from .data import built_in_prompts as built_in_prompts
from .data import cut_files as cut_files
from .data import read_prompts as read_prompts
from .data import write_texts as write_texts
