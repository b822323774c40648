"""Lookahead: n-grams harvested from the model's own parallel guesses."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.noise import mix
from decodery.core.registry import register
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter, VerificationFeedback
from decodery.step.sequence import Sequence

Gram = tuple[int, ...]


@dataclass(slots=True)
class _State:
    """levels[0]: guesses after the last token, which is column 0; levels[l][i]: column i, l steps further.

    made_up: level and column of tokens that no pass predicted, below level 0. pool: by first token, the rest of the
    n-grams that began with it, newest last.
    """

    levels: list[list[int]]
    random: np.random.Generator
    prompt: list[int]
    made_up: set[tuple[int, int]] = field(default_factory=set)
    pool: dict[int, dict[Gram, None]] = field(default_factory=dict)

    def column(self, number: int) -> list[int]:
        """The path from below the root to the last level of a column."""
        return self.levels[0][:number] + [level[number] for level in self.levels[1:]]

    @property
    def columns(self) -> int:
        return len(self.levels[0]) + 1

    def remember(self, first: int, rest: Gram, most: int) -> None:
        known = self.pool.setdefault(first, {})
        known.pop(rest, None)
        known[rest] = None
        if len(known) > most:
            del known[next(iter(known))]


@register(
    "lookahead",
    paper="Break the Sequential Dependency of LLM Inference Using Lookahead Decoding (2024)",
    lossless=True,
    slower=True,
)
@dataclass(frozen=True)
class Lookahead(Drafter):
    """Runs a window of guesses ahead of the text and drafts the n-grams it has seen them turn into.

    The window is a tree: level 0 is a chain below the last token, level l of column i hangs below level l - 1 of that
    column. So every row sees and stands where the published mask puts it, verification n-grams share rows with the
    window and with each other, and a window row that guessed right is accepted like any other. After a pass the most
    likely tokens after the last level become the new last level and the others move down one. As published, the first
    levels fill during the first N - 2 passes, and an end of text among the guesses gives way to a prompt token. So does
    what a pass could not predict because the budget left its row out, the later columns first; an n-gram with such a
    token is not kept. Scope: the request; memory: at most `window` n-grams per pass and `grams` per first token.
    Source: hao-ai-lab/LookaheadDecoding (2024), whose read-me sets (W, N, G) = (7, 5, 7).

    Attributes:
        window: Columns W.
        ngram: Tokens N of an n-gram, so N - 1 levels.
        grams: Most n-grams kept, and drafted, per first token.
    """

    window: int = 7
    ngram: int = 5
    grams: int = 7

    def __post_init__(self) -> None:
        if self.window < 1 or self.ngram < 2 or self.grams < 1:
            raise SettingsError("lookahead needs window >= 1, ngram >= 2 and grams >= 1")

    def largest(self) -> int:
        return (self.window + self.grams) * (self.ngram - 1) - 1

    def start(self, seq: Sequence) -> _State:
        random = np.random.default_rng(mix(seq.request.seed, len(seq.tokens)))
        prompt = list(seq.tokens)
        guesses = random.choice(prompt, self.window + self.ngram - 3).tolist()
        return _State([guesses], random, prompt)

    def propose(self, seq: Sequence, budget: Budget) -> DraftTree:
        state: _State = seq.states[self]
        paths = [list(gram) for gram in reversed(state.pool.get(seq.last_token, {}))]
        paths += [state.column(number) for number in range(state.columns)]
        return DraftTree.from_paths(seq.last_token, (path[: budget.depth] for path in paths), budget.nodes)

    def observe(self, seq: Sequence, seen: VerificationFeedback) -> None:
        state: _State = seq.states[self]
        levels, last = state.levels, self._predictions(state, seen)
        if len(levels) < self.ngram - 1:
            # The last token takes the place of the first column, so that all columns count one less.
            state.levels = [level[1:] for level in levels]
            state.made_up = {(level, column - 1) for level, column in state.made_up if column}
            state.levels.append(self._level(state, seq, last[1:], len(levels)))
            return
        broken = {column for _, column in state.made_up}
        for number, following in enumerate(last):
            if following is not None and number not in broken:
                first = levels[0][number - 1] if number else int(seen.tree.tokens[0])
                state.remember(first, (*(level[number] for level in levels[1:]), following), self.grams)
        state.made_up = {(level - 1, column) for level, column in state.made_up if level > 1}
        below = [*levels[1:], self._level(state, seq, last, len(levels) - 1)]
        state.levels = [below[0][1:], *below[1:]]

    def _predictions(self, state: _State, seen: VerificationFeedback) -> list[int | None]:
        """The most likely token after the last level of every column; None where the row was not fed."""
        nodes = [_find(seen.tree, state.column(number)) for number in range(state.columns)]
        fed = iter(seen.most_likely([node for node in nodes if node is not None]))
        return [None if node is None else next(fed) for node in nodes]

    def _level(self, state: _State, seq: Sequence, tokens: list[int | None], number: int) -> list[int]:
        """Level `number` of `tokens`, with prompt tokens for unknown ones and ends of text, which nothing follows."""
        level = []
        for column, token in enumerate(tokens):
            if token is None or token in seq.request.eos_ids:
                token = int(state.random.choice(state.prompt))
                if number:
                    state.made_up.add((number, column))
            level.append(token)
        return level


def _find(tree: DraftTree, path: list[int]) -> int | None:
    """The node that `path` leads to from the root, None where the tree has no such path."""
    node: int | None = 0
    for token in path:
        if node is None:
            return None
        node = tree.child(node, token)
    return node
