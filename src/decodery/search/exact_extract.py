"""Exact-extract: the most probable span of a passage as the answer, exactly."""

from __future__ import annotations

import heapq
import re
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from decodery.core.errors import PromptError, SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Segment
from decodery.models.loaders.store import Progress, silent
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.step.draft_tree import DraftTree
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence

from .base import Branches, Search, choose

_WORDS = 256
"""The longest answer that is looked for as an answer would spell it; longer ones count as the passage spells them."""


@register(
    "exact-extract",
    paper="How Optimal is Greedy Decoding for Extractive Question Answering? (2022)",
    guarantee="the span returned has the highest probability of all spans",
    texts=("passage",),
)
@dataclass(frozen=True)
class ExactExtract(Search):
    """Finds the most likely span of a passage as the whole answer, end token included.

    Spans that begin alike share their rows (a trie), and what is already less likely than the best whole answer is not
    followed: the published way scores all spans. Spans are as long as max_new_tokens allows. Ties: the span that begins
    first, then the shorter. Score: its log-probability.

    Attributes:
        passage: Token ids, of which every span is a candidate, or a text; empty for the prompt itself. A text's spans
            are candidates as they are spelt in the passage and, from the beginning of every word, as an answer that
            begins there would be spelt.
        beginnings: Further texts as token ids, of which the beginnings are candidates.
        end: Ids of which any may end an answer, the request's end tokens where empty; no span holds one, nor one of
            `excluded`: special tokens, where the passage is the prompt.
        excluded: Token ids that no span holds.
        normalised: Divide log-probabilities by the number of tokens, end included.
        rows: Rows of a pass.
    """

    passage: str | tuple[int, ...] = ()
    beginnings: tuple[tuple[int, ...], ...] = ()
    end: tuple[int, ...] = ()
    excluded: tuple[int, ...] = ()
    normalised: bool = False
    rows: int = 64

    requirements = Requirements(rows=True, trees=True, alone=True, greedy=True, law=True, plain=True, ends=True)

    def __post_init__(self) -> None:
        if not isinstance(self.rows, int) or self.rows < 1:
            raise SettingsError(f"exact-extract needs rows >= 1, not {self.rows!r}")

    def bind(self, tokenizer: Tokenizer) -> ExactExtract:
        if self.passage in ("", ()):
            return replace(self, excluded=(*self.excluded, *sorted(tokenizer.special_ids)))
        if not isinstance(self.passage, str):
            return self
        text = self.passage
        words = list(re.finditer(r"\S+", text))
        lasts = [*words[_WORDS - 1 :], *words[-1:] * _WORDS]
        begun = (
            tuple(tokenizer.encode(text[first.start() : last.end()], special=False))
            for first, last in zip(words, lasts, strict=False)
        )
        whole = tuple(tokenizer.encode(text, special=False))
        return replace(self, passage=whole, beginnings=(*self.beginnings, *begun))

    def find(self, engine: Engine, request: Request, progress: Progress = silent) -> ForwardCoroutine[list[Sequence]]:
        branches = Branches(engine, request, self)
        seq = branches.root
        ends = np.array(self.end or sorted(seq.request.eos_ids), dtype=np.int64)
        self._check(request, seq, ends)
        apart = np.union1d(ends, self.excluded)
        trie = _Trie(self._texts(seq), ends, apart, seq.request.max_new_tokens - 1, self.normalised)
        trie.settle(0, (yield from branches.score([seq]))[0])
        while (tree := trie.pick(self.rows)) is not None:
            segment = Segment(seq.cache.next_position - 1 + tree.depths[1:], tree.tokens[1:], cache=seq.cache)
            segment.mask = tree.ancestor_mask()[1:, 1:]
            (scored,) = yield from branches.ask([segment])
            seq.cache.keep([])
            trie.take(tree, scored.logits)
            progress("exact-extract", len(trie.settled), len(trie.settled) + len(trie.open))
        if trie.best is None:
            raise PromptError("the passage holds no span to extract: give a longer one")
        seq.score = -trie.best[0]
        yield from self._write(branches, [*trie.path(trie.best[3]), int(ends[trie.best[4]])])
        return branches.finish([seq])

    def _write(self, branches: Branches, answer: list[int]) -> ForwardCoroutine[None]:
        """Append the answer, read in one more pass, as the loop would have."""
        seq = branches.root
        seq.cache.truncate(len(seq.tokens) - 1)
        segment = Segment.chunk([seq.last_token, *answer[:-1]], seq.cache)
        (scored,) = yield from branches.ask([segment])
        seq.cache.keep(range(len(answer)))
        for token, row in zip(answer, scored.logits, strict=True):
            choose(seq, token, row)
        seq.finish_reason, seq.stopped_by = "stop", answer[-1]

    def _texts(self, seq: Sequence) -> list[tuple[np.ndarray, bool]]:
        """Token ids of all texts, and whether spans may begin anywhere in them."""
        passage = seq.tokens if self.passage in ("", ()) else self.passage
        assert not isinstance(passage, str), "bind was not called"
        texts = [(passage, True), *((text, False) for text in self.beginnings)]
        return [(np.asarray(text, dtype=np.int64), anywhere) for text, anywhere in texts if len(text)]

    def _check(self, request: Request, seq: Sequence, ends: np.ndarray) -> None:
        if len(ends) == 0:
            raise SettingsError("exact-extract needs a token that ends an answer: set end, or let EOS count")
        if seq.request.max_new_tokens < 2:
            raise SettingsError("exact-extract needs room for a token and its end: set max_new_tokens to 2 or more")
        ids = [*ends.tolist(), *(int(token) for text, _ in self._texts(seq) for token in text)]
        if not 0 <= min(ids) <= max(ids) < seq.request.vocab_size:
            raise PromptError(f"the passage has token ids outside the model's vocabulary of {seq.request.vocab_size}")


@dataclass(slots=True)
class _SpanNode:
    """A beginning of spans. places: where each occurrence of it goes on; limits: where that must end. loss: -log P."""

    token: int
    parent: int
    depth: int
    loss: float
    places: np.ndarray
    limits: np.ndarray


@dataclass
class _Trie:
    """All candidates, made as far as they may still win.

    apart: ids that no span holds. open: (loss, node) of nodes not scored yet, a heap. settled: scored nodes. best:
    score to be smallest (negative log-probability), first place, depth, node and number of the most likely end of the
    best whole answer so far.
    """

    texts: list[tuple[np.ndarray, bool]]
    ends: np.ndarray
    apart: np.ndarray
    longest: int
    normalised: bool
    nodes: list[_SpanNode] = field(default_factory=list)
    open: list[tuple[float, int]] = field(default_factory=list)
    children: dict[tuple[int, int], int] = field(default_factory=dict)
    settled: set[int] = field(default_factory=set)
    best: tuple[float, int, int, int, int] | None = None

    def __post_init__(self) -> None:
        self.source = np.concatenate([np.empty(0, np.int64), *(tokens for tokens, _ in self.texts)])
        borders = np.cumsum([0, *(len(tokens) for tokens, _ in self.texts)])
        starts = [
            np.arange(begin, end if anywhere else begin + 1)
            for begin, end, (_, anywhere) in zip(borders, borders[1:], self.texts, strict=False)
        ]
        places = np.concatenate([np.empty(0, np.int64), *starts])
        # A span goes on to the end of its text, or to the next token kept apart, which may be its first.
        ended = np.append(np.flatnonzero(np.isin(self.source, self.apart)), len(self.source))
        limits = np.minimum(
            borders[np.searchsorted(borders, places, side="right")], ended[np.searchsorted(ended, places)]
        )
        self.nodes.append(_SpanNode(-1, -1, 0, 0.0, places, np.minimum(limits, places + self.longest)))

    def settle(self, node: int, logits: torch.Tensor) -> None:
        """Take in what the model says after `node`: [vocab] logits."""
        self.settled.add(node)
        here = self.nodes[node]
        losses = -logits.double().log_softmax(dim=-1).cpu().numpy()
        if here.depth:
            ending = losses[self.ends]
            total = here.loss - float(np.logaddexp.reduce(-ending))
            score = total / (here.depth + 1) if self.normalised else total
            answer = (score, int(here.places.min()) - here.depth, here.depth, node, int(ending.argmin()))
            self.best = answer if self.best is None else min(self.best, answer)
        alive = here.places < here.limits
        places, limits = here.places[alive], here.limits[alive]
        tokens = self.source[places]
        for token in np.unique(tokens).tolist():
            same = tokens == token
            child = _SpanNode(
                token, node, here.depth + 1, here.loss + float(losses[token]), places[same] + 1, limits[same]
            )
            if self._may_win(child):
                heapq.heappush(self.open, (child.loss, len(self.nodes)))
                self.children[node, token] = len(self.nodes)
                self.nodes.append(child)

    def pick(self, rows: int) -> DraftTree | None:
        """What to score next: about `rows` of the most likely nodes with those above them.

        Where only one token can follow, what follows is scored along, twice as deep at most.
        """
        rows_of = {0: 0}
        tokens, parents, chosen = [-1], [-1], list[int]()
        while self.open and (not chosen or len(tokens) <= rows):
            node = heapq.heappop(self.open)[1]
            if node in self.settled or not self._may_win(self.nodes[node]):
                continue
            chosen.append(node)
            for each in self._missing(node, rows_of):
                rows_of[each] = len(tokens)
                tokens.append(self.nodes[each].token)
                parents.append(rows_of[self.nodes[each].parent])
        for node in chosen:
            last = rows_of[node]
            for token in self._only(self.nodes[node], min(max(3, self.nodes[node].depth), rows + 1 - len(tokens))):
                tokens.append(token)
                parents.append(last)
                last = len(tokens) - 1
        return DraftTree(np.array(tokens), np.array(parents)) if chosen else None

    def take(self, tree: DraftTree, logits: torch.Tensor) -> None:
        """Take in the rows of a picked tree, its root left out: [rows, vocab] logits."""
        nodes: list[int | None] = [0]
        for row in range(1, len(tree)):
            parent = nodes[tree.parents[row]]
            node = None if parent is None else self.children.get((parent, int(tree.tokens[row])))
            nodes.append(node)
            if node is not None and node not in self.settled and self._may_win(self.nodes[node]):
                self.settle(node, logits[row - 1])

    def path(self, node: int) -> list[int]:
        tokens = []
        while node:
            tokens.append(self.nodes[node].token)
            node = self.nodes[node].parent
        return tokens[::-1]

    def _missing(self, node: int, rows_of: dict[int, int]) -> list[int]:
        """`node` and those above it that have no row yet, top down."""
        missing = []
        while node not in rows_of:
            missing.append(node)
            node = self.nodes[node].parent
        return missing[::-1]

    def _only(self, node: _SpanNode, most: int) -> list[int]:
        """Tokens that follow all occurrences of `node` alike, up to `most`."""
        places, limits, tokens = node.places, node.limits, list[int]()
        while len(tokens) < most:
            places, limits = places[places < limits], limits[places < limits]
            following = np.unique(self.source[places])
            if len(following) != 1:
                break
            tokens.append(int(following[0]))
            places = places + 1
        return tokens

    def _may_win(self, node: _SpanNode) -> bool:
        """Losses only grow along a path, so no answer that begins like this one can do better than this bound."""
        if self.best is None:
            return True
        if not self.normalised:
            return node.loss <= self.best[0]
        deepest = node.depth + int((node.limits - node.places).max())
        return node.loss / (deepest + 1) <= self.best[0]
