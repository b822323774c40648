"""Re-decoding: after every chunk the text is what greedy decoding makes of all that has come."""

from __future__ import annotations

from dataclasses import dataclass

from decodery.core.registry import register
from decodery.step.forward_request import ForwardCoroutine

from .base import SimultaneousPolicy, SourceStream


@register(
    "re-decode",
    paper="CarelessWhisper: Turning Whisper into a Causal Streaming Model (2025)",
    guarantee="after every chunk the text is greedy decoding of the source so far; nothing is committed before the end",
    lossless=True,
)
@dataclass(frozen=True)
class Redecode(SimultaneousPolicy):
    """Verifies the text so far as a draft after every chunk, and commits nothing before the source ends.

    One pass tells how far the earlier text is still what the model writes, and greedy decoding goes on from there: as
    many passes as there are new tokens and one, in place of one for every token. The lossless member of the family;
    what it shows in between may be taken back.
    """

    def hear(self, stream: SourceStream) -> ForwardCoroutine[None]:
        logits = yield from stream.verify(0)
        yield from stream.extend(logits, stream.limit)
