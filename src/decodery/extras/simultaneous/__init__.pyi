# Written by tools/method_index.py.
from .local_agreement import LocalAgreement as LocalAgreement
from .redecode import Redecode as Redecode
from .base import SimultaneousPolicy as SimultaneousPolicy
from .base import SourceStream as SourceStream
from .stability import Stability as Stability
from .base import StreamOutput as StreamOutput
from .streaming_beam import StreamingBeam as StreamingBeam
from .wait_k import WaitK as WaitK
