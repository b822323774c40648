"""A second model, or the same one with another context, reading along with a text and with drafts of what follows."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ..core.ask import Asking, score
from ..core.tree import TokenTree
from ..errors import VocabularyMismatch
from ..model.batch import Segment
from ..model.cache import KVCache
from ..model.protocol import Reader

_CHUNK = 512


@dataclass(slots=True)
class Follower:
    """What `model` has read of a text, and of the drafts below its last token.

    tokens: the text that its cache holds; logits: [1, vocab] after the last of them, None where not known. settled: how
    many of `tokens` were the text the last time, which is not looked at again. rows: tentative rows of the cache by the
    row above (-1: the end of the text) and the token; spare: logits [vocab] of rows nobody has asked for yet.
    hidden: [hidden], the last layer's state of the newest row, where `tapped`. slots: see `Sequence`.
    """

    model: Reader
    cache: KVCache
    tokens: list[int] = field(default_factory=list)
    logits: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    tapped: bool = False
    slots: int | None = None
    settled: int = 0
    rows: dict[tuple[int, int], int] = field(default_factory=dict)
    spare: dict[int, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def begin(cls, model: Reader, vocab_size: int, *, tapped: bool = False, slots: int | None = None) -> Follower:
        """Nothing read yet.

        Raises VocabularyMismatch unless the model has `vocab_size` tokens.
        """
        if model.vocab_size != vocab_size:
            raise VocabularyMismatch(
                f"the draft model has {model.vocab_size} tokens and the target {vocab_size}: "
                "draft with a model that shares the target's tokenizer"
            )
        reading = cls(model, model.new_cache(), tapped=tapped, slots=slots)
        reading.forget()
        return reading

    def text(self, tokens: list[int]) -> Asking[torch.Tensor]:
        """The logits [1, vocab] after `tokens`, which are text; drafts that departed from them are forgotten."""
        self._agree(tokens)
        self._take(tokens)
        while self.logits is None:
            chunk = tokens[len(self.tokens) : len(self.tokens) + _CHUNK]
            final = len(self.tokens) + len(chunk) == len(tokens)
            segment = Segment.chunk(np.asarray(chunk), self.cache, logit_rows=[len(chunk) - 1] if final else [])
            logits = yield from self._read(segment)
            self.cache.keep(range(len(chunk)))
            self.tokens += chunk
            if final:
                self.logits = logits
        self.settled = len(self.tokens)
        return self.logits

    def after(self, text: list[int], tree: TokenTree, nodes: Ordered[int]) -> Asking[torch.Tensor]:
        """The logits [k, vocab] after `nodes` of a tree below the end of `text`: each node is read once."""
        root = yield from self.text(text)
        if list(nodes) == [0]:
            return root
        place, fresh = self._places(tree, nodes)
        found = torch.empty(0)
        if len(fresh):
            first = len(self.rows) - len(fresh)
            mask = np.zeros((len(fresh), len(self.rows)), dtype=bool)
            fed = np.flatnonzero(place >= 0)
            mask[:, place[fed]] = tree.ancestor_mask()[fresh][:, fed]
            positions = self.cache.next_position + tree.depths[fresh] - 1
            segment = Segment(positions, tree.tokens[fresh], mask=mask, cache=self.cache, stays=first)
            try:
                found = yield from self._read(segment)
            except BaseException:
                # What was to be read has not been.
                self.rows = {key: row for key, row in self.rows.items() if row < first}
                raise
            wanted = place[list(nodes)]
            if np.array_equal(wanted, first + np.arange(len(fresh))):
                return found
            self.spare.update((first + row, logits) for row, logits in enumerate(found))
        return torch.stack([root[0] if node == 0 else self.spare.pop(int(place[node])) for node in nodes])

    def __deepcopy__(self, memo: dict[int, object]) -> Follower:
        twin = replace(self, cache=self.cache.fork(), tokens=list(self.tokens))
        # Tentative rows do not follow a fork.
        twin._clear()
        return twin

    def forget(self) -> None:
        """Give back the cache's memory: all is read again where it is needed."""
        self.cache, self.tokens, self.settled = self.model.new_cache(), [], 0
        if self.slots is not None:
            self.cache.provide(self.slots)
        self._clear()

    def _places(self, tree: TokenTree, nodes: Ordered[int]) -> tuple[np.ndarray, list[int]]:
        """The row [n] of every node that is read with `nodes`, -1 for others, and the nodes that get a row now."""
        known = self._known(tree)
        if any(known.get(node, -1) >= 0 and known[node] not in self.spare for node in nodes):
            # What a row said has been told, and is not kept: its path is read again, parents before children.
            self.rows, self.spare = {}, {}
        place, fresh = np.full(len(tree), -1), []
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        for node in sorted({above for each in nodes for above in tree.path(each)}):
            key = (int(place[parents[node]]), tokens[node])
            if key not in self.rows:
                self.rows[key] = len(self.rows)
                fresh.append(node)
            place[node] = self.rows[key]
        return place, fresh

    def _known(self, tree: TokenTree) -> dict[int, int]:
        """The row of every node of a tree that has one; -1 for the root."""
        known = {0: -1}
        for node, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
            if parent in known and (row := self.rows.get((known[parent], token))) is not None:
                known[node] = row
        return known

    def _read(self, segment: Segment) -> Asking[torch.Tensor]:
        last = self.model.config.num_layers
        scored = yield from score(self.model, segment, (last,) if self.tapped else (), "draft")
        if self.tapped:
            self.hidden = scored.hidden[last][-1]
        return scored.logits

    def _agree(self, tokens: list[int]) -> None:
        """Forget what of the text is no longer text."""
        shared, end = min(self.settled, len(tokens)), min(len(self.tokens), len(tokens))
        while shared < end and self.tokens[shared] == tokens[shared]:
            shared += 1
        if shared < len(self.tokens):
            self._cut(shared)

    def _take(self, tokens: list[int]) -> None:
        """Let drafts that became text count as read, and forget the others once the text has grown."""
        if len(tokens) > len(self.tokens):
            path: list[int] = []
            # Of the last token the logits are needed too, so that it is read again.
            for token in tokens[len(self.tokens) : -1]:
                row = self.rows.get((path[-1] if path else -1, token))
                if row is None:
                    break
                path.append(row)
            self.cache.keep(path)
            self.tokens += tokens[len(self.tokens) : len(self.tokens) + len(path)]
            self._clear()
        elif self.logits is None:
            self._cut(len(tokens) - 1)

    def _cut(self, length: int) -> None:
        self.cache.truncate(length)
        del self.tokens[length:]
        self.settled = min(self.settled, length)
        self._clear()

    def _clear(self) -> None:
        self.rows, self.spare = {}, {}
        self.logits = self.hidden = None
