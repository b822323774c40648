"""Work at fixed shapes that a CUDA device replays as one graph, and what of it a thread keeps."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

R = TypeVar("R")
S = TypeVar("S", bound=Hashable)
P = TypeVar("P")

_MOST_SHAPES = 48
_STEP = 64
"""Beyond so many rows, shapes are multiples of it, and no powers of two."""


class Capture(Protocol):
    """Work that a device has recorded."""

    def replay(self) -> None:
        """Do it once more, at the same addresses."""


@dataclass(frozen=True)
class Memory:
    """What all graphs of a thread share.

    Attributes:
        pool: Memory of their intermediate results.
        stream: They are captured on it. PyTorch keeps what was freed for the stream that had it, so that many streams
            would keep as many times what a pass takes.
    """

    pool: Any
    stream: torch.cuda.Stream


class Captured(Generic[R]):
    """Work that reads and writes at the same addresses each time.

    Args:
        shape: What it was made for.
        device: Where it runs.
        memory: None where nothing is captured.
    """

    def __init__(self, shape: Hashable, device: torch.device, memory: Memory | None) -> None:
        self.shape, self.device, self.memory = shape, device, memory
        self.capture: Capture | None = None
        self.result: R | None = None

    def replay(self, run: Callable[[], R]) -> R:
        """What `run` returns, by one launch; the first call captures it."""
        if self.memory is None:
            return run()
        if self.capture is None:
            self.capture = self._captured(run, self.memory)
        self.capture.replay()
        assert self.result is not None
        return self.result

    def _captured(self, run: Callable[[], R], memory: Memory) -> Capture:
        pool, stream = memory.pool, memory.stream
        with torch.cuda.device(self.device):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                # Libraries set themselves up at their first call. Running twice does no harm: it writes the same.
                run()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self.result = run()
        return graph


class Shapes(threading.local, Generic[S, P]):
    """What a thread has captured by shape: what one thread writes its inputs to, no other may run.

    Attributes:
        held: By shape, the least recently used first.
        fixed: What all of it reads where it lies.
        memory: What its graphs share, None off CUDA.
    """

    def __init__(self) -> None:
        self.held: OrderedDict[S, P] = OrderedDict()
        self.fixed: Hashable = None
        self.memory: Memory | None = None
        self._stream: torch.cuda.Stream | None = None
        self._results: dict[int, torch.Tensor] = {}

    def renew(self, fixed: Hashable, device: torch.device) -> None:
        """Forget all graphs; those that follow share other memory.

        Args:
            fixed: What they read where it lies.
            device: Where they run.
        """
        self.held.clear()
        if device.type == "cuda":
            self._stream = self._stream or torch.cuda.Stream(device)
            # Sharing memory, graphs reuse each other's intermediate results: they never run at the same time.
            self.memory = Memory(torch.cuda.graph_pool_handle(), self._stream)
        self.fixed = fixed

    def result(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """[rows, width] that passes of all shapes write to: by powers of two, memory for so many rows."""
        # What a graph returns stays its own as long as it lives: large vocabularies would fill the device.
        room = 1 << (rows - 1).bit_length()
        if room not in self._results:
            self._results[room] = torch.empty(room, width, dtype=dtype, device=device)
        return self._results[room][:rows]

    def at(self, shape: S, make: Callable[[], P]) -> P:
        """What there is for a shape, made where there is nothing."""
        if shape not in self.held:
            while len(self.held) >= _MOST_SHAPES:
                self.held.popitem(last=False)
            self.held[shape] = make()
        self.held.move_to_end(shape)
        return self.held[shape]


def bucket(number: int) -> int:
    """So many rows or texts as a shape has room for, where there are `number`."""
    return 1 << (number - 1).bit_length() if number <= _STEP else -(-number // _STEP) * _STEP
