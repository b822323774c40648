"""DEER: a small diffusion model drafts a whole block in one pass, and the target verifies it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from decodery.core.errors import SettingMissing, SettingsError, UnsupportedModel
from decodery.core.registry import register
from decodery.core.requirements import Provides
from decodery.models.batch import Segment
from decodery.models.cache.cache import KVCache
from decodery.models.loaders.named import Precision, named
from decodery.models.protocol import LanguageModel, Reader
from decodery.models.tokenizers.vocabularies import fitted
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter, VerificationFeedback
from decodery.step.forward_request import ForwardCoroutine, ForwardRequest
from decodery.step.sequence import Sequence

from .follower import shared
from .writing import Writing

_CHUNK = 512
_MADE = "train one with `decodery train deer -m MODEL --out DIR`, and name it, as in deer:model=DIR"


@dataclass(slots=True)
class BlockReading:
    """What a block drafter has read of a text, and what of its last draft was not verified.

    Attributes:
        mask: The token that stands for one not written yet; the one after it ends a block.
        length: Tokens of a block.
        tokens: The text that the cache holds.
        spare: (token, what it was drawn from, None where no rule asks) for places from `at` on, in order.
    """

    model: LanguageModel
    mask: int
    length: int
    slots: int | None = None
    cache: KVCache = field(init=False)
    tokens: list[int] = field(default_factory=list)
    spare: list[tuple[int, torch.Tensor | None]] = field(default_factory=list)
    at: int = 0

    def __post_init__(self) -> None:
        self.forget()

    def __deepcopy__(self, memo: dict[int, object]) -> BlockReading:
        clone = BlockReading(self.model, self.mask, self.length, self.slots, spare=list(self.spare), at=self.at)
        clone.cache, clone.tokens = self.cache.fork(), list(self.tokens)
        return clone

    def forget(self) -> None:
        """Give back the cache's memory: all is read again where it is needed."""
        self.cache, self.tokens = self.model.new_cache(), []
        if self.slots is not None:
            self.cache.provide(self.slots)

    def block(self, tokens: list[int], length: int) -> ForwardCoroutine[torch.Tensor]:
        """The logits [length, vocab] of the places after `tokens`, each without a word about the others."""
        # The row of the last token says what comes next; it is read again, with the block.
        kept = min(shared(tokens, self.tokens), len(tokens) - 1)
        self.cache.truncate(kept)
        del self.tokens[kept:]
        while len(tokens) - len(self.tokens) > _CHUNK:
            chunk = tokens[len(self.tokens) : len(self.tokens) + _CHUNK]
            yield [ForwardRequest(self.model, Segment.chunk(chunk, self.cache, []), role="draft")]
            self.cache.keep(range(_CHUNK))
            self.tokens += chunk
        fresh = tokens[len(self.tokens) :]
        segment = block_segment(fresh, length, self.mask, self.cache)
        (scored,) = yield [ForwardRequest(self.model, segment, role="draft")]
        self.cache.keep(range(len(fresh)))
        self.tokens += fresh
        logits = scored.logits.clone()
        logits[:, self.mask : self.mask + 2] = -torch.inf
        return logits


def block_segment(fresh: list[int], length: int, mask: int, cache: KVCache) -> Segment:
    """The newest tokens of a text, and after them a block that is not written yet.

    Rows of the text see what is before them, as ever, so that their keys and values stay true. Those of the block see
    the text and all of the block: length - 1 times `mask`, and the token that says where the block ends. As the row of
    a token says what follows it, the first place is said by the text's last row.
    """
    known, rows = len(fresh), len(fresh) + length
    seen = np.tri(rows, dtype=bool)
    seen[known:, known:] = True
    ids = np.asarray([*fresh, *[mask] * (length - 1), mask + 1], dtype=np.int64)
    positions = np.arange(cache.next_position, cache.next_position + rows)
    return Segment(positions, ids, mask=seen, cache=cache, logit_rows=range(known - 1, rows - 1))


@register(
    "deer",
    paper="DEER: Draft with Diffusion, Verify with Autoregressive Models (2025)",
    lossless=True,
    requirements=("a block drafter, made by decodery train deer",),
)
@dataclass(frozen=True)
class Deer(Drafter):
    """Drafts a whole block in one pass of a small diffusion model, every token apart from the others.

    A token's guess does not suffer from wrong ones before it, and cannot go by them either: where the text could go on
    in several ways, later tokens belong to all of these at once. One denoising step, as published. The published model
    reads the whole text both ways in every pass; here rows of the text see what is before them, and rows of the block
    see everything, so that what was read of the text stays. Scope: the request; memory: one more cache, and a
    distribution per token that was not verified. Source: the paper; its code could not be had.

    Attributes:
        model: A block drafter made by `decodery train deer`, for any target with its vocabulary.
        length: Tokens of a draft; None: as many as it was trained for (published: 32).
        reuse: What of a draft was not verified, because a token before it was wrong, is the next draft, without a pass;
            what it was drawn from goes along, so that it is tested as it was drawn.
        dtype: As in `draft-model`.
    """

    model: LanguageModel | str | None = None
    length: int | None = None
    reuse: bool = False
    dtype: Precision = "auto"

    provides = Provides(drafts=("sampled",))

    def __post_init__(self) -> None:
        if self.length is not None and self.length < 1:
            raise SettingsError(f"deer needs length >= 1, not {self.length}")
        if self.model is None:
            raise SettingMissing(f"deer has no block drafter: {_MADE}")

    def largest(self) -> int | None:
        return self.length

    def auxiliary_models(self, target: Reader) -> tuple[Reader, ...]:
        return (self._own(),)

    def held_rows(self, nodes: int) -> int:
        return 2 * nodes + 3

    def start(self, seq: Sequence) -> BlockReading:
        config = self._own().config
        if not config.causal or config.mask_id is None or config.mask_id + 1 >= config.vocab_size:
            raise SettingsError(f"this model drafts no blocks: {_MADE}")
        length = self.length or config.block_length
        if length is None:
            raise SettingsError("this model does not say how long its blocks are: name a length, as in deer:length=8")
        model = fitted(self._own(), seq.request.model)
        if not model.capabilities.trees:
            raise UnsupportedModel(f"the rows of this model cannot see what stands after them: {_MADE}")
        return BlockReading(model, config.mask_id, length, seq.request.slots)

    def propose(self, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        reading: BlockReading = seq.states[self]
        room = reading.model.config.max_positions - len(seq.tokens)
        most = min(reading.length, budget.nodes, budget.depth, room)
        if most < 1:
            return DraftTree.root(seq.last_token)
        if self.reuse and reading.spare and reading.at == len(seq.tokens):
            del reading.spare[most:]
            laws = {place: law for place, (_, law) in enumerate(reading.spare) if law is not None}
            drafted = [token for token, _ in reading.spare]
            return DraftTree.chain(seq.last_token, drafted, origin="sampled", distributions=laws)
        logits = yield from reading.block(seq.tokens, most)
        writing = Writing(seq)
        for row in logits:
            if writing.ended:
                break
            writing.draw(row)
        chain, reading.at = writing.chain, len(seq.tokens)
        reading.spare = [(token, chain.distributions.get(place)) for place, token in enumerate(writing.drafted)]
        return chain

    def observe(self, seq: Sequence, seen: VerificationFeedback) -> None:
        reading: BlockReading = seq.states[self]
        # The token in place of a wrong one takes its place, too.
        del reading.spare[: len(seen.emitted)]
        reading.at += len(seen.emitted)

    def more_for(self, seq: Sequence, tokens: int) -> int:
        reading: BlockReading = seq.states[self]
        return reading.cache.more_for(tokens)

    def forget(self, seq: Sequence) -> None:
        reading: BlockReading = seq.states[self]
        reading.forget()

    def _own(self) -> LanguageModel:
        assert self.model is not None
        return named(self.model, self.dtype)
