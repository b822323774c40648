# Written by tools/method_index.py.
from .des_seq import DESSeq as DESSeq
from .des_vote import DESVote as DESVote
from .base import ExpertSharing as ExpertSharing
