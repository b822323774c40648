"""Wait-k: one token of text per token of the source, k tokens late."""

from __future__ import annotations

from dataclasses import dataclass

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.step.forward_request import ForwardCoroutine

from .base import SimultaneousPolicy, SourceStream


@register(
    "wait-k",
    paper="STACL: Simultaneous Translation with Implicit Anticipation and Controllable Latency (2019)",
    guarantee="what is written is committed at once, and may differ from what the whole source leads to",
)
@dataclass(frozen=True)
class WaitK(SimultaneousPolicy):
    """Writes one token for each of the source after its first `k`, and commits it at once.

    Where the model would wait, it does; when the source ends, the text is written to its end. The model need not have
    been trained for a fixed lag, and the simplest of the baselines is what it is.

    Attributes:
        k: Tokens of the source before the first one is written.
    """

    k: int = 3

    def __post_init__(self) -> None:
        if self.k < 0:
            raise SettingsError(f"wait-k needs k of at least 0, not {self.k}")

    def hear(self, stream: SourceStream) -> ForwardCoroutine[None]:
        most = stream.limit if stream.ended else len(stream.source) - self.k
        if len(stream.written) < most:
            logits = yield from stream.reread(0)
            yield from stream.extend(logits[-1], most)
        stream.commit(len(stream.written))
