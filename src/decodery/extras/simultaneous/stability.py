"""Stability: the last few tokens are asked again after every chunk, and stay while they look no worse."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.step.forward_request import ForwardCoroutine

from .base import SimultaneousPolicy, SourceStream


@register(
    "stability",
    paper="CarelessWhisper: Turning Whisper into a Causal Streaming Model (2025)",
    guarantee="what is committed never changes, and may differ from what the whole source leads to",
)
@dataclass(frozen=True)
class Stability(SimultaneousPolicy):
    """Reads the last few tokens again after every chunk, and cuts the text at the first unlikely one.

    Cost: a pass over lookback + 1 rows and one for each new token, however long the text is.

    Attributes:
        lookback: How many tokens are asked again; those before them are committed, and their keys and values stay as
            they were read, with less of the source in view. A token stays where it is still the most likely, or where
            its logit has not fallen since the last chunk.
        cap: Tokens written per chunk at most.
    """

    lookback: int = 2
    cap: int = 56

    def __post_init__(self) -> None:
        if self.lookback < 0 or self.cap < 1:
            raise SettingsError("stability needs lookback of at least 0 and cap of at least 1")

    def hear(self, stream: SourceStream) -> ForwardCoroutine[None]:
        first = max(len(stream.written) - self.lookback, stream.committed)
        logits, before = (yield from stream.reread(first)), stream.state or {}
        said = dict[int, float]()
        for place, row in enumerate(logits[:-1], start=first):
            token = stream.written[place]
            said[place] = float(row[token])
            # What was not asked before has nothing to have fallen from.
            if int(row.argmax()) != token and said[place] < before.get(place, -torch.inf):
                stream.cut(place)
                break
        following: torch.Tensor | None = logits[len(stream.written) - first]
        for place in range(len(stream.written), len(stream.written) + self.cap):
            assert following is not None
            said[place] = float(following.max())
            following = yield from stream.step(following)
            if following is None:
                break
        stream.state = said
        stream.commit(max(len(stream.written) - self.lookback, stream.committed))
