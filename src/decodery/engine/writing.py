"""What models that write whole texts by themselves have in common, and how such texts grow and end."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from typing import Any, NoReturn

import torch

from decodery.core.errors import DecoderyError, UnsupportedModel
from decodery.core.trace import Step
from decodery.models.batch import Batch, Scores
from decodery.models.cache.cache import KVCache
from decodery.models.config import ModelConfig
from decodery.models.hooks import Tap
from decodery.models.layer_plan import WHOLE, LayerPlan
from decodery.models.protocol import Capabilities
from decodery.models.tokenizers.pieces import MOST_PIECES, Pieces, nothing_read, unseen
from decodery.step.forward_request import ForwardCoroutine, off_loop
from decodery.step.segment_end import SegmentEnd
from decodery.step.sequence import FinishReason, Sequence, TokenLogprob


class WholeTexts:
    """A model that gives texts and nothing else of itself.

    Args:
        name: What it goes by.
        logprobs: Whether it tells the log-probabilities of tokens.
        continues: Whether it goes on from the middle of a text.
        pieces: What its tokens are; a table of its own by default.
    """

    device, dtype, vocab_size, fingerprint = torch.device("cpu"), torch.float32, MOST_PIECES, ""

    def __init__(self, name: str, *, logprobs: bool, continues: bool = False, pieces: Pieces | None = None) -> None:
        self.name = name
        self.pieces = Pieces() if pieces is None else pieces
        self.config: ModelConfig = unseen(name)
        self.capabilities = Capabilities(trees=False, rows=False, logprobs=logprobs, continues=continues)

    def new_cache(self) -> KVCache:
        return nothing_read()

    def forward(self, batch: Batch, *, taps: Ordered[Tap] = (), layer_plan: LayerPlan = WHOLE) -> Scores:
        self.refuse("scores no rows")

    def refuse(self, why: str) -> NoReturn:
        joint = "" if why.endswith(" or") else ":"
        raise UnsupportedModel(
            f"{self.name} writes whole texts and {why}{joint} load the model here with decodery.load"
        )

    def grow(self, seq: Sequence, pieces: Ordered[str], logprobs: Ordered[TokenLogprob] = ()) -> ForwardCoroutine[bool]:
        """Append pieces of text up to the first stop, or to the end of the text's segment.

        A piece that is no token is cut where the segment ends, so that a segment does not depend on how a stream is
        cut.

        Args:
            logprobs: Log-probabilities of the pieces, where they are known: such pieces are tokens.

        Returns:
            Whether the text has ended by one, or is too long.
        """
        if isinstance(seq.segment_end, SegmentEnd) and seq.segment_end.asks:
            return (yield from off_loop(lambda: self._grow(seq, pieces, logprobs)))
        return self._grow(seq, pieces, logprobs)

    def _grow(self, seq: Sequence, pieces: Ordered[str], logprobs: Ordered[TokenLogprob]) -> bool:
        before = seq.position
        for number, piece in enumerate(pieces):
            if seq.remaining <= 0:
                seq.finish_reason = "length"
                break
            if seq.segment_end is not None and number >= len(logprobs):
                piece = _within(seq, piece, seq.segment_end, self.pieces)
            seq.tokens.append(self.pieces.id_of(piece))
            if number < len(logprobs):
                seq.token_logprobs.append(logprobs[number])
            if seq.text is not None and (found := seq.text.push(seq.last_token)) is not None:
                seq.finish_reason, seq.stopped_by = "stop", found
                break
            if seq.segment_end is not None and seq.segment_end(seq):
                seq.finish_reason = "length" if seq.remaining <= 0 else None
                break
        if seq.position > before:
            seq.trace.steps.append(Step(emitted=seq.position - before))
        return seq.finished


def _within(seq: Sequence, piece: str, ends: Callable[[Sequence], bool], pieces: Pieces) -> str:
    """The beginning of a piece with which a segment ends; all of it where the segment goes on."""
    length, text = len(seq.tokens), seq.text
    # Nothing of it ends a segment that is over by its length: then all of the piece stays.
    for size in (len(piece), *range(len(piece))):
        seq.tokens.append(pieces.id_of(piece[:size]))
        if text is not None:
            seq.text = text.fork()
            seq.text.push(seq.last_token)
        ended = ends(seq)
        del seq.tokens[length:]
        seq.text = text
        if ended and size < len(piece):
            return piece[:size] or piece
        if not ended and size == len(piece):
            break
    return piece


def end(seq: Sequence, reason: FinishReason) -> None:
    """A text is over."""
    if not seq.finished:
        seq.finish_reason = reason


def cut(seq: Sequence, error: DecoderyError) -> None:
    """Whoever wrote a text went away: what there is of it stays, and without any the text has failed."""
    if seq.finished:
        return
    seq.complete = False
    if seq.position:
        seq.finish_reason = "cancelled"
    else:
        seq.fail(error)


def own(seq: Sequence, name: str) -> Any:
    """What a model keeps of a text it has begun, None before it has.

    Raises:
        UnsupportedModel: For forks of one, where the model cannot go on from the middle of a text.
    """
    state = seq.states.get(seq.request.model)
    if state is None and seq.position and not seq.request.model.capabilities.continues:
        raise UnsupportedModel(f"{name} cannot go on from the middle of a text: load the model here with decodery.load")
    return state


def keep(seq: Sequence, state: Any) -> None:
    """Note what a model keeps of a text; forks do not get it."""
    seq.states[seq.request.model] = state
