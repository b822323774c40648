"""PyTorch's threads across a fork: real processes, as web servers and `multiprocessing` make them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys, threading
import numpy as np, torch
from decodery.models.batch import Batch, Segment
from decodery.core.threads import one_thread
from decodery.testing.models import tiny_transformer

models = [tiny_transformer(hidden_size=256, vocab_size=4096, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]

def logits():
    return [each.forward(Batch([Segment.chunk(np.arange(64), each.new_cache())])).logits for each in models]

expected = logits()
entered, leave = threading.Event(), threading.Event()

def inside():
    with one_thread():
        entered.set()
        leave.wait()

other = threading.Thread(target=inside)
other.start()
entered.wait()
child = os.fork()
if child == 0:
    right = all(map(torch.equal, logits(), expected)) and torch.get_num_threads() == 2
    os._exit(0 if right else 3)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
leave.set()
other.join()
assert all(map(torch.equal, logits(), expected))
sys.exit(status)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_passes_rows_like_its_parent() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, timeout=120)
    assert done.returncode == 0
