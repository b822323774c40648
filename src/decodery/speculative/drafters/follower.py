"""A second model, or the same one with another context, reading along with a text and with drafts of what follows."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from decodery.models.batch import Segment
from decodery.models.cache.cache import KVCache
from decodery.models.layer_plan import WHOLE, LayerPlan
from decodery.models.protocol import Reader
from decodery.models.tokenizers.vocabularies import fitted
from decodery.models.torch.paged_rows import serves, windows_of
from decodery.step.draft_tree import DraftTree
from decodery.step.forward_request import ForwardCoroutine, score
from decodery.step.level_choice import choose_next
from decodery.step.look_ahead import Ahead, Look
from decodery.step.wanted import RowChoices, Wanted, row_choices_of

from .rows import TreeRows

_CHUNK = 512


@dataclass(slots=True)
class Follower:
    """What `model` has read of a text, and of the drafts below its last token.

    Attributes:
        tokens: The text that its cache holds.
        logits: [1, vocab] after the last of them, None where not known.
        hidden: [hidden], the last layer's state of the newest row, where `tapped`.
        slots: See `Sequence`.
        layer_plan: The layers that drafts pass through; what they leave there counts as read once they are text only
            where `kept`, else the text is read again, all the way.
        drafts: What it has read below them.
        ranks: How many of the most likely tokens after a node were asked for at most.
        row_choices: What is known on the host of the nodes that were asked for last.
    """

    model: Reader
    cache: KVCache
    tokens: list[int] = field(default_factory=list)
    logits: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    tapped: bool = False
    slots: int | None = None
    layer_plan: LayerPlan = WHOLE
    kept: bool = True
    drafts: TreeRows = field(default_factory=TreeRows)
    ranks: int = 0
    row_choices: RowChoices | None = None

    @classmethod
    def begin(cls, model: Reader, target: Reader, *, tapped: bool = False, slots: int | None = None) -> Follower:
        """Nothing read yet.

        Raises:
            VocabularyMismatch: Unless the tokens of both models are the same, padding aside.
        """
        reading = cls(fitted(model, target), model.new_cache(), tapped=tapped, slots=slots)
        reading.forget()
        return reading

    def length(self, tokens: list[int]) -> int:
        """How many tokens of the model a text has."""
        return len(tokens)

    def unread(self, tokens: list[int]) -> int:
        """How many tokens it would read to predict after `tokens`, whose beginning it has read."""
        held = len(self.tokens)
        return len(tokens) - held - (len(self.drafts.path(tokens[held:-1])) if self.kept else 0)

    def text(self, tokens: list[int], wanted: Wanted | Look | None = None) -> ForwardCoroutine[torch.Tensor]:
        """The logits [1, vocab] after `tokens`, which are text; drafts that departed from them are forgotten.

        Args:
            tokens: The text.
            wanted: What is to be known of what follows it, or how to go on from there.
        """
        self._agree(tokens)
        self._take(tokens)
        while self.logits is None:
            chunk = tokens[len(self.tokens) : len(self.tokens) + _CHUNK]
            final = len(self.tokens) + len(chunk) == len(tokens)
            segment = Segment.chunk(np.asarray(chunk), self.cache, logit_rows=[len(chunk) - 1] if final else [])
            logits = yield from self._read(segment, WHOLE, wanted if final else None)
            self.cache.keep(range(len(chunk)))
            self.tokens += chunk
            if final:
                self.logits = logits
        return self.logits

    def after(
        self, text: list[int], tree: DraftTree, nodes: Ordered[int], wanted: Wanted | None = None
    ) -> ForwardCoroutine[torch.Tensor]:
        """The logits [k, vocab] after `nodes` of a tree below the end of `text`: each node is read once.

        Args:
            text: The text.
            tree: Below its end.
            nodes: Of it.
            wanted: What is to be known of them on the host, see `row_choices`.
        """
        self.row_choices, of_root = None, list(nodes) == [0]
        root = yield from self.text(text, wanted if of_root else None)
        if of_root:
            return root
        newest = None

        def read(segment: Segment) -> ForwardCoroutine[torch.Tensor]:
            nonlocal newest
            newest = yield from self._read(segment, self.layer_plan, wanted)
            return newest

        found = yield from self.drafts.after(self.cache, tree, nodes, read, root[0])
        if found is not newest:
            # Other rows, or in another order.
            self.row_choices = None
        return found

    def drawn(self, text: list[int], wanted: Ordered[Wanted]) -> ForwardCoroutine[list[int]]:
        """The tokens that follow a text, each chosen after those before it, by one copy of all.

        Args:
            text: The text.
            wanted: Of each row in turn, for models with `Capabilities.chosen`. What of it stays on the device is read
                there by the next pass.

        Returns:
            One for each row, -1 where its largest logit is no finite number, and of what follows that nothing is known.
        """
        self.row_choices, before = None, list[torch.Tensor]()
        root, last = (yield from self.text(text, wanted[0])), len(wanted) - 1
        if self.row_choices is None:
            (self.row_choices,) = row_choices_of(root, [0, 1], wanted[:1])
        self.drafts.clear()
        for row, own in enumerate(wanted[1:]):
            assert self.row_choices is not None and self.row_choices.there is not None
            before.append(self.row_choices.there)
            positions, unknown = np.array([self.cache.next_position + row]), np.zeros(1, dtype=np.int64)
            segment = Segment(positions, unknown, cache=self.cache, retained=row, chosen=before[-1])
            told = replace(own, before=() if row + 1 < last else tuple(before))
            yield from self._read(segment, self.layer_plan, told)
        assert self.row_choices is not None
        tokens = self.row_choices.picks
        for row, token in enumerate(tokens[:last]):
            self.drafts.rows[row - 1, token] = row
        return tokens

    def sees(self, levels: int) -> bool:
        """Whether rows of so many levels can be chosen on the model's device, with what each of them sees."""
        model, windows = self.model, windows_of(self.model.config)
        if not model.capabilities.visible or not model.capabilities.chosen or self.tapped:
            return False
        # All rows lie within every window.
        near = all(window is None or window > levels for window in windows)
        # A policy may begin with rows that are yet to come.
        one = Segment(np.zeros(1, dtype=np.int64), cache=self.cache)
        return near and self.cache.policy is None and serves(one, model.config)

    def ahead(self, text: list[int], look: Look) -> ForwardCoroutine[Ahead]:
        """What follows a text and the nodes below it that are chosen on the device, by one copy of all levels.

        Args:
            text: The text.
            look: How it looks ahead, for models with `Capabilities.visible`.
        """
        root = yield from self.text(text, look)
        if not look.levels:
            choose_next([(look, root)])
        self.row_choices = None
        self.drafts.clear()
        logits, read = list[torch.Tensor](), 0
        while not look.last:
            rows = look.rows
            assert rows is not None
            # The text's end is no row.
            depth, count = len(look.levels) - 1, len(rows.tokens)
            positions, unknown = np.full(count, self.cache.next_position + depth), np.zeros(count, dtype=np.int64)
            segment = Segment(
                positions, unknown, cache=self.cache, retained=read, chosen=rows.tokens, visible=rows.seen
            )
            logits.append((yield from self._read(segment, self.layer_plan, look)))
            read += count
        self.drafts.hold(ahead := look.ahead(), logits)
        return ahead

    def __deepcopy__(self, memo: dict[int, object]) -> Follower:
        clone = replace(self, cache=self.cache.fork(), tokens=list(self.tokens), drafts=TreeRows())
        # Tentative rows do not follow a fork.
        clone._clear()
        return clone

    @property
    def begun(self) -> bool:
        """Whether it has read anything."""
        return bool(self.tokens)

    def more_for(self, tokens: int) -> int:
        """Bytes that the cache has yet to take for a text of so many tokens, as far as the model reads it."""
        return self.cache.more_for(min(tokens, self.model.config.max_positions))

    def forget(self) -> None:
        """Give back the cache's memory: all is read again where it is needed."""
        self.cache, self.tokens = self.model.new_cache(), []
        if self.slots is not None:
            self.cache.provide(self.slots)
        self._clear()

    def _read(
        self, segment: Segment, layer_plan: LayerPlan, wanted: Wanted | Look | None
    ) -> ForwardCoroutine[torch.Tensor]:
        last, asked = self.model.config.num_layers, len(segment if segment.logit_rows is None else segment.logit_rows)
        if isinstance(wanted, Wanted) and len(wanted.keys) != asked:
            # Nodes above those that are asked for may be read with them.
            wanted = None
        taps = (last,) if self.tapped else ()
        scored = yield from score(self.model, segment, taps, "draft", layer_plan, wanted=wanted)
        self.row_choices = scored.row_choices
        if self.tapped:
            self.hidden = scored.hidden[last][-1]
        return scored.logits

    def _agree(self, tokens: list[int]) -> None:
        """Forget what of the text is no longer text."""
        known = shared(tokens, self.tokens)
        if known < len(self.tokens):
            self._cut(known)

    def _take(self, tokens: list[int]) -> None:
        """Let drafts that became text count as read, and forget the others once the text has grown."""
        if len(tokens) > len(self.tokens):
            # Of the last token the logits are needed too, so that it is read again.
            path = self.drafts.path(tokens[len(self.tokens) : -1]) if self.kept else []
            self.cache.keep(path)
            self.tokens += tokens[len(self.tokens) : len(self.tokens) + len(path)]
            self._clear()
        elif self.logits is None:
            self._cut(len(tokens) - 1)

    def _cut(self, length: int) -> None:
        self.cache.truncate(length)
        del self.tokens[length:]
        self._clear()

    def _clear(self) -> None:
        self.drafts.clear()
        self.logits = self.hidden = None


def shared(left: list[int], right: list[int]) -> int:
    """How many tokens two texts begin with alike."""
    most = min(len(left), len(right))
    if left[:most] == right[:most]:
        return most
    return next(place for place, (one, other) in enumerate(zip(left, right, strict=False)) if one != other)
