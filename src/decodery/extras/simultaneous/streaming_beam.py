"""Streaming beam search: several texts at once, each cut and scored anew after every chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.trace import Step
from decodery.models.batch import Segment
from decodery.models.cache.cache import KVCache
from decodery.models.tokenizers.vocabularies import excluded
from decodery.step.forward_request import ForwardCoroutine, score_all

from .base import SimultaneousPolicy, SourceStream, agreed


@dataclass
class _Beam:
    """One text. score: sum of its tokens' log-probabilities with all of the source in view that has come.

    following: [vocab] log-probabilities of what comes next. waits: the model would wait here.
    """

    written: list[int]
    cache: KVCache
    score: float = 0.0
    following: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float32, device="cpu"))
    waits: bool = False


@register(
    "streaming-beam",
    paper="CarelessWhisper: Turning Whisper into a Causal Streaming Model (2025)",
    guarantee="what is committed never changes, and may differ from what the whole source leads to",
)
@dataclass(frozen=True)
class StreamingBeam(SimultaneousPolicy):
    """Follows `width` texts; after every chunk, cuts each at the first recent token that is unlikely.

    What all texts begin with is committed but for the last `lookback` tokens. Cost: a pass over all texts after every
    chunk, and one for each token that they grow by.

    Attributes:
        width: Texts that are followed.
        lookback: How many tokens of a text, after what is committed, are asked again: one that is not among the `width`
            most likely any more ends its text there. Scores are those of all tokens with the newest source in view, so
            that texts of different lengths and ages are compared as they are now.
        all: Go on until every text waits, not the first one alone.
        cap: Tokens written per chunk at most.
    """

    width: int = 5
    lookback: int = 2
    all: bool = False
    cap: int = 56

    def __post_init__(self) -> None:
        if self.width < 1 or self.lookback < 0 or self.cap < 1:
            raise SettingsError("streaming-beam needs width and cap of at least 1, and lookback of at least 0")

    def hear(self, stream: SourceStream) -> ForwardCoroutine[None]:
        beams: list[_Beam] = stream.state or [_Beam([], stream.cache.fork())]
        yield from self._anew(stream, beams)
        for _ in range(self.cap):
            beams = self._grown(stream, beams)
            opened = [beam for beam in beams if not beam.waits]
            if not opened or (len(opened) < len(beams) and not self.all):
                break
            yield from _read(stream, opened)
        # What others grew by has not been read where one waits: it is read with the next chunk.
        best = max([beam for beam in beams if beam.waits] or beams, key=lambda beam: beam.score)
        stream.written, stream.state = list(best.written), beams
        common = min(agreed(beam.written, best.written) for beam in beams)
        stream.commit(max(common - self.lookback, stream.committed))

    def _anew(self, stream: SourceStream, beams: list[_Beam]) -> ForwardCoroutine[None]:
        """Score all texts with what has come in view, and cut them where they have become unlikely."""
        rows = [[stream.model.config.start_id, *beam.written] for beam in beams]
        for beam in beams:
            beam.cache.truncate(0)
            beam.cache.memory = stream.cache.memory
        segments = [Segment.chunk(each, beam.cache) for each, beam in zip(rows, beams, strict=True)]
        found = yield from score_all(stream.model, segments)
        stream.trace.steps.append(Step(rows=sum(map(len, rows))))
        for beam, scored in zip(beams, found, strict=True):
            beam.cache.keep(range(len(beam.written) + 1))
            laws = excluded(stream.model, scored.logits).double().log_softmax(dim=-1)
            for place in range(max(len(beam.written) - self.lookback, stream.committed), len(beam.written)):
                likely = laws[place].topk(min(self.width, laws.shape[1])).indices
                if beam.written[place] not in likely:
                    del beam.written[place:]
                    beam.cache.truncate(place + 1)
                    break
            tokens = torch.tensor(beam.written, dtype=torch.int64, device="cpu")
            beam.score = float(laws[: len(tokens)].gather(1, tokens[:, None]).sum())
            beam.following, beam.waits = laws[len(tokens)], False
        unlike = {tuple(beam.written): beam for beam in reversed(beams)}
        beams[:] = list(unlike.values())

    def _grown(self, stream: SourceStream, beams: Sequence[_Beam]) -> list[_Beam]:
        """The best of all texts with one token more, and of those that wait."""
        found: list[tuple[float, int, int | None]] = []
        for number, beam in enumerate(beams):
            if beam.waits or len(beam.written) >= stream.limit:
                found.append((beam.score, number, None))
                continue
            best = beam.following.topk(min(self.width + 1, len(beam.following)))
            for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                found.append((beam.score + value, number, None if token in stream.eos_ids else token))
        found.sort(key=lambda each: (-each[0], each[1]))
        grown, kept = list[_Beam](), set[tuple[int, ...]]()
        for total, number, token in found:
            beam = beams[number]
            written = beam.written if token is None else [*beam.written, token]
            if tuple(written) in kept:
                continue
            kept.add(tuple(written))
            grown.append(_Beam(list(written), beam.cache.fork(), total, beam.following, waits=token is None))
            if len(grown) == self.width:
                break
        return grown


def _read(stream: SourceStream, beams: Sequence[_Beam]) -> ForwardCoroutine[None]:
    """Read the last token of each of these texts."""
    segments = [Segment.chunk(beam.written[-1:], beam.cache) for beam in beams]
    found = yield from score_all(stream.model, segments)
    stream.trace.steps.append(Step(rows=len(beams)))
    for beam, scored in zip(beams, found, strict=True):
        beam.cache.keep([0])
        beam.following = excluded(stream.model, scored.logits)[-1].double().log_softmax(dim=-1)
