"""Local agreement: what several chunks in a row lead to alike is committed."""

from __future__ import annotations

from dataclasses import dataclass

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.step.forward_request import ForwardCoroutine

from .base import SimultaneousPolicy, SourceStream, agreed


@register(
    "local-agreement",
    paper="Low-Latency Sequence-to-Sequence Speech Recognition and Translation by Partial Hypothesis Selection (2020)",
    guarantee="what is committed never changes, and may differ from what the whole source leads to",
)
@dataclass(frozen=True)
class LocalAgreement(SimultaneousPolicy):
    """Commits what the texts after the last `n` chunks begin with alike.

    The rest is decoded anew after every chunk. The text after a chunk is greedy decoding's after what is committed,
    found by verifying the earlier one in one pass.

    Attributes:
        n: Texts that must agree; with 1 all that is written is committed at once.
    """

    n: int = 2

    def __post_init__(self) -> None:
        if self.n < 1:
            raise SettingsError(f"local-agreement needs n of at least 1, not {self.n}")

    def hear(self, stream: SourceStream) -> ForwardCoroutine[None]:
        logits = yield from stream.verify(stream.committed)
        yield from stream.extend(logits, stream.limit)
        earlier: list[list[int]] = [*(stream.state or []), list(stream.written)][-self.n :]
        stream.state = earlier
        if len(earlier) == self.n:
            stream.commit(min(agreed(each, stream.written) for each in earlier))
