"""HAMburger: a text is written in groups of tokens, and the model reads each group as one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

import numpy as np
import torch

from decodery.core.errors import SettingMissing, SettingsError, UnsupportedModel
from decodery.core.ledger import count
from decodery.core.registry import register
from decodery.core.requirements import Provides, Requirements
from decodery.models.batch import Segment
from decodery.models.cache.cache import KVCache, Snapshot
from decodery.models.hooks import Tap
from decodery.models.layer_plan import LayerPlan
from decodery.models.protocol import LanguageModel, OpenModel, Reader
from decodery.models.trained.micro_steps import MicroSteps
from decodery.step.forward_request import ForwardCoroutine, ForwardRequest, ForwardResult, OfOneModel
from decodery.step.logits_source import LogitsSource

_TRAIN = "train some with decodery train hamburger -m MODEL --out DIR, and name them, as in hamburger:micro=DIR"


@register(
    "hamburger",
    paper="HAMburger: Accelerating LLM Inference via Token Smashing (2025)",
    guarantee="lossy: tokens after the first of a group are a small decoder's; the model's distribution if "
    "confidence is above 1",
    requirements=("trained parts",),
)
@dataclass(frozen=True)
class Hamburger(LogitsSource):
    """Writes a group of tokens after each row of the model, and reads the group as one row.

    The prompt is read token by token. A group takes the position of its last token and leaves keys and values once, so
    that the output takes one slot per group. The small decoder's tokens are not verified. Drafts, trees and batches
    give the text of plain decoding under this source. How a token is read depends on the state after the one before
    it, so rows of a path are scored one after the other, and drafts save no time. The cost counts the groups as
    `groups`, and their tokens as `rows`.

    Attributes:
        micro: `MicroSteps`, or the file or folder that `decodery train hamburger` wrote. It has a small decoder, which
            writes the tokens of a group after the first one; a classifier of where a group ends; and a merger of the
            group's embeddings into one row.
        confidence: Probability, from the classifier, with which a group must continue to get another token. The paper
            evaluates 0.8 and 0.9. Above 1 every group has one token, which is the model's plain distribution.
    """

    micro: MicroSteps | str | None = None
    confidence: float = 0.9

    requirements = Requirements(layer_plans=True, states=True, parts=True)
    provides = Provides()

    def __post_init__(self) -> None:
        if self.micro is None:
            raise SettingMissing(f"hamburger needs trained parts: {_TRAIN}")
        if not self.confidence >= 0:
            raise SettingsError("hamburger: confidence must be at least 0")

    def over(self, model: LanguageModel, prompt: Sequence[int]) -> Reader:
        return Smashed(cast(OpenModel, model), MicroSteps.load(self.micro).at(model), self.confidence, len(prompt))


@dataclass(frozen=True, eq=False, slots=True)
class Place:
    """The state after a token.

    Attributes:
        taps: [k, hidden] hidden states of the last group's row.
        written: Embeddings [hidden] of the tokens since then.
        closes: Whether the next token ends their group.
    """

    taps: torch.Tensor
    written: tuple[torch.Tensor, ...]
    closes: bool


@dataclass(slots=True)
class Noted:
    """A row of the passes in progress.

    Attributes:
        written: Whether it is after the prompt.
        slot: Its tentative slot, -1 where it has none.
        place: The state after it; None where it is not known yet, and within a prompt.
    """

    position: int
    written: bool
    slot: int = -1
    place: Place | None = None


class GroupCache(KVCache):
    """A cache with a slot per prompt token and per group, and the state after each output token.

    Attributes:
        noted: The tentative rows, in the order of the text's segments.
        noted_slots: Number of their slots.
    """

    def __init__(self, *shape: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(*shape, dtype=dtype, device=device)
        self.behind: dict[int, Place] = {}
        self.noted: list[Noted] = []
        self.noted_slots = 0

    @property
    def plain(self) -> bool:
        """See `KVCache.plain`.

        Groups have fewer slots than tokens; reading their tokens again makes the same slots.
        """
        return True

    def open(self, positions: np.ndarray, retained: int, prompt_length: int) -> None:
        """Add rows at these positions after the first `retained` tentative ones."""
        if retained == 0:
            self.noted_slots = 0
        del self.noted[retained:]
        self.noted += [Noted(position, position >= prompt_length) for position in positions.tolist()]

    def keep(self, rows: Sequence[int], layers: Sequence[int] | None = None) -> None:
        picked = [self.noted[row] for row in rows]
        self.noted, self.noted_slots = [], 0
        super().keep([each.slot for each in picked if each.slot >= 0], layers)
        for each in picked:
            self.next_position = each.position + 1
            if each.place is not None:
                self.behind[each.position] = each.place
            if each.written:
                count("rows")
                count("groups", each.slot >= 0)

    def truncate(self, n: int) -> None:
        super().truncate(n)
        self._forget_places()

    def restore(self, snapshot: Snapshot) -> None:
        super().restore(snapshot)
        self._forget_places()

    def fork(self) -> Self:
        clone = super().fork()
        clone.behind, clone.noted, clone.noted_slots = dict(self.behind), [], 0
        return clone

    def _forget_places(self) -> None:
        self.behind = {position: place for position, place in self.behind.items() if position < self.next_position}
        self.noted, self.noted_slots = [], 0


@dataclass(frozen=True)
class Smashed(OfOneModel):
    """A model whose texts are read in groups after their prompt, as in `Hamburger`."""

    model: OpenModel
    parts: MicroSteps
    confidence: float
    prompt_length: int = field(compare=False)

    def new_cache(self) -> GroupCache:
        config = self.config
        shape = config.num_layers, config.num_kv_heads, config.head_dim
        return GroupCache(*shape, dtype=self.dtype, device=self.device)

    def compose(self, segment: Segment, taps: Sequence[Tap] = (), role: str = "") -> ForwardCoroutine[ForwardResult]:
        """See `Composed`; each row is scored by the model or by the small decoder."""
        if segment.tokens is None or segment.interventions or taps:
            raise UnsupportedModel("rows of a text that is written in groups can be neither looked into nor changed")
        return (yield from _Walk(self, segment, role).run())

    def closes(self, said: torch.Tensor, behind: int) -> bool:
        """Whether the token that a row [hidden] predicts ends its group, of which `behind` tokens are written."""
        if behind + 1 >= self.parts.most:
            return True
        # Row by row, so that the result does not depend on other rows of the pass.
        return 1 - float(self.parts.ends(said[None]).sigmoid()) < self.confidence


class _Walk:
    """The run of one segment, in rounds: a row is scored as soon as the state before it is known."""

    def __init__(self, source: Smashed, segment: Segment, role: str) -> None:
        assert segment.tokens is not None
        self.source, self.segment, self.role = source, segment, role
        self.cache, self.retained = cast(GroupCache, segment.cache), segment.retained
        self.tokens, self.positions = segment.tokens, segment.positions
        self.cache.open(self.positions, self.retained, source.prompt_length)
        rows = range(len(segment)) if segment.logit_rows is None else segment.logit_rows
        self.rows = [int(row) for row in rows]
        self.wanted = frozenset(self.rows)
        self.logits: dict[int, torch.Tensor] = {}
        # In a chain, each row follows the one before it.
        self.seen = None if segment.mask is None and not self.retained else segment.seen()

    def run(self) -> ForwardCoroutine[ForwardResult]:
        """Score all rows, and return the logits of the requested ones."""
        prompt = self.positions < self.source.prompt_length
        waiting = np.flatnonzero(~prompt).tolist()
        if prompt.any():
            rows = np.flatnonzero(prompt)
            (scored,) = yield [self._reading(rows, {"tokens": self.tokens[rows]})]
            self._left(rows, scored)
        while waiting:
            places = {row: place for row in waiting if (place := self._place(row)) is not None}
            yield from self._round(places)
            waiting = [row for row in waiting if row not in places]
        if not self.rows:
            return ForwardResult(torch.empty(0, self.source.vocab_size, dtype=torch.float32, device="cpu"))
        return ForwardResult(torch.stack([self.logits[row] for row in self.rows]))

    def _place(self, row: int) -> Place | None:
        """The state before a row, None where it is not known yet."""
        if self.seen is None:
            before = row - 1
        else:
            before = int(np.flatnonzero(self.seen[row, : self.retained + row]).max(initial=-1))
        return self.cache.noted[before].place if before >= 0 else self.cache.behind[int(self.positions[row]) - 1]

    def _round(self, places: dict[int, Place]) -> ForwardCoroutine[None]:
        """Score rows with these states: the model those that end a group, the small decoder the others."""
        ends = np.array([row for row, place in places.items() if place.closes], dtype=np.int64)
        said = {row: self._say(row, place) for row, place in places.items() if not place.closes}
        asked = [row for row in said if row in self.wanted]
        requests = []
        if len(ends):
            requests.append(self._reading(ends, {"states": self._merged(ends, places)}))
        if asked:
            states = torch.stack([said[row] for row in asked])
            requests.append(
                ForwardRequest(
                    self.source.model, Segment(self.positions[asked], states=states), (), "head", LayerPlan(())
                )
            )
        if not requests:
            return
        answers = iter((yield requests))
        if len(ends):
            self._left(ends, next(answers))
        if asked:
            self.logits |= zip(asked, next(answers).logits, strict=True)

    def _reading(self, rows: np.ndarray, entering: dict[str, Any]) -> ForwardRequest:
        """A request for rows of the model, each of which takes a slot."""
        source, cache, mask = self.source, self.cache, None
        first, m = cache.noted_slots, len(rows)
        for slot, row in enumerate(rows.tolist(), first):
            cache.noted[self.retained + row].slot = slot
        cache.noted_slots = first + m
        if self.seen is not None:
            slots = np.array([each.slot for each in cache.noted])
            mask = np.zeros((m, first + m), dtype=bool)
            mask[:, slots[slots >= 0]] = self.seen[rows][:, slots >= 0]
        wanted = [place for place, row in enumerate(rows.tolist()) if row in self.wanted]
        segment = Segment(self.positions[rows], **entering, mask=mask, cache=cache, logit_rows=wanted, retained=first)
        return ForwardRequest(source.model, segment, source.parts.taps, self.role)

    @torch.no_grad()
    def _left(self, rows: np.ndarray, scored: ForwardResult) -> None:
        """Store the logits of rows that the model has read, and the states after output rows and the prompt."""
        source = self.source
        self.logits |= zip([row for row in rows.tolist() if row in self.wanted], scored.logits, strict=True)
        *inner, last = (scored.hidden[tap] for tap in source.parts.taps)
        for place in np.flatnonzero(self.positions[rows] >= source.prompt_length - 1).tolist():
            said = source.model.final_norm(last[place : place + 1])[0]
            taps = torch.stack([*(each[place] for each in inner), said]).to(source.parts.dtype)
            noted = self.cache.noted[self.retained + int(rows[place])]
            noted.place = Place(taps, (), source.closes(taps[-1], 0))

    @torch.no_grad()
    def _say(self, row: int, place: Place) -> torch.Tensor:
        """[hidden] output of the small decoder for a row, before the model's final norm."""
        source, written = self.source, (*place.written, self._embedded(row))
        found = source.parts.spoken(place.taps[None], torch.stack(written)[None])[0, -1].to(source.dtype)
        closes = source.closes(source.model.final_norm(found[None])[0].to(source.parts.dtype), len(written))
        self.cache.noted[self.retained + row].place = Place(place.taps, written, closes)
        return found

    @torch.no_grad()
    def _merged(self, rows: np.ndarray, places: dict[int, Place]) -> torch.Tensor:
        """[m, hidden] merged embeddings of the groups that end with these rows."""
        # Group by group, so that the result does not depend on other rows of the pass.
        groups = [torch.stack([*places[row].written, self._embedded(row)]) for row in rows.tolist()]
        return torch.cat(
            [
                self.source.parts.merged(each[None], torch.tensor([len(each)], dtype=torch.int64, device="cpu"))
                for each in groups
            ]
        )

    def _embedded(self, row: int) -> torch.Tensor:
        """[hidden]"""
        ids = torch.tensor([int(self.tokens[row])], dtype=torch.int64, device=self.source.device)
        return self.source.model.embed_tokens(ids)[0].to(self.source.parts.dtype)
