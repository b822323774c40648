"""Memory by the page: where weights, pages and states lie."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from decodery.core.mapped_memory import anonymous

HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells what it was asked for")
def test_memory_is_private_and_asks_for_huge_pages() -> None:
    """Shared memory gets none on most systems, whatever it asks for."""
    memory = anonymous(8 << 20)
    begin = np.frombuffer(memory, dtype=np.uint8).ctypes.data
    parts = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    bounds = {part: [int(each, 16) for each in part.split()[0].split("-")] for part in parts if part}
    (own,) = (part for part, (first, last) in bounds.items() if first <= begin < last)
    assert own.split()[1] == "rw-p"
    assert not HUGE.exists() or re.search(r"^VmFlags:.*\bhg\b", own, re.MULTILINE)
