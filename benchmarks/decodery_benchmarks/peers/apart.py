"""A peer in a process of its own: its threads, its allocator and its imports are not ours, nor ours its."""

from __future__ import annotations

import multiprocessing
import signal
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from weakref import finalize

from decodery.core.errors import DecoderyError

from . import open_peer
from .base import Order, Peer, Told, UnavailableError


@dataclass
class Apart(Peer):
    """Hands every prompt to the process that holds the program, which takes the times itself.

    Waiting threads of one program would otherwise hold the cores that the next one is measured on.
    """

    pipe: Connection = field(kw_only=True)
    process: SpawnProcess = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        finalize(self, _end, self.pipe, self.process)

    def generate(self, prompt: list[int], max_new_tokens: int, seed: int) -> Told:
        """Raises DecoderyError where the program fails, or its process is gone."""
        try:
            self.pipe.send((prompt, max_new_tokens, seed))
            told: Told | str = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise DecoderyError(f"the process of {self.name} ended while it was measured: leave it out") from error
        if isinstance(told, str):
            raise DecoderyError(f"{self.name} failed ({told}): leave it out")
        return told


def open_apart(order: Order) -> Apart:
    """The peer ready to decode; raises UnavailableError, in one sentence, if it is missing or cannot run this."""
    context = multiprocessing.get_context("spawn")
    pipe, far = context.Pipe()
    process = context.Process(target=_serve, args=(far, order), daemon=True)
    process.start()
    far.close()
    try:
        dtype, refusal = pipe.recv()
    except EOFError:
        dtype, refusal = "", f"the process of {order.name} ended before it was ready"
    if refusal:
        _end(pipe, process)
        raise UnavailableError(refusal)
    return Apart(order, dtype, pipe=pipe, process=process)


def _serve(pipe: Connection, order: Order) -> None:
    """What the process does: open the peer, then decode prompt after prompt until the pipe is closed."""
    import torch

    # Ctrl-C reaches every process of the terminal; the one that measures decides what is done about it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(order.threads)
    try:
        peer = open_peer(order)
    except UnavailableError as reason:
        pipe.send(("", str(reason)))
        return
    pipe.send((peer.dtype, ""))
    with suppress(EOFError):
        while True:
            prompt, max_new_tokens, seed = pipe.recv()
            try:
                told: Told | str = peer.generate(prompt, max_new_tokens, seed)
            except Exception as error:
                told = f"{type(error).__name__}: {error}"
            pipe.send(told)


def _end(pipe: Connection, process: SpawnProcess) -> None:
    pipe.close()
    process.join(timeout=5)
    if process.is_alive():
        process.kill()
