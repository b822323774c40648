"""The invariant of a cache: after any operations, it equals a new cache that has read the same tokens."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from decodery.models.batch import Batch, Segment
from decodery.models.cache.cache import KVCache, Snapshot
from decodery.models.layer_plan import WHOLE, LayerPlan
from decodery.models.protocol import LanguageModel

from .laws import LawBroken

_MOST_TOKENS = 60
_MOST_FORKS = 4


def check_cache(
    model: LanguageModel, *, programs: int = 6, steps: int = 14, seed: int = 0, tolerance: float = 1e-9
) -> float:
    """Check that the caches of `model`, of any kind with the interface of `KVCache`, keep exact states.

    Random programs feed trees in one pass or several, through all layers or a part of them at a time, keep paths,
    truncate, fork, take snapshots and restore them. After every step, every cache and its forks must score rows as a
    model does that reads all of its tokens in one pass.

    Args:
        model: The model whose caches are checked.
        programs: Number of random programs.
        steps: Number of steps in each program.
        seed: Seed of the programs.
        tolerance: Maximum absolute difference of logits.

    Returns:
        The largest absolute difference of logits.

    Raises:
        LawBroken: After a step whose difference is above `tolerance`.
    """
    worst = 0.0
    for program in range(programs):
        family = _Family(model, np.random.default_rng([seed, program]))
        for step in range(steps):
            what = family.step()
            found = family.distance()
            worst = max(worst, found)
            if not found <= tolerance:
                raise LawBroken(
                    f"program {program}, step {step}: after {what} a cache is {found:.2e} away from a fresh one"
                )
    return worst


class _Text:
    """A cache, the tokens it should hold, and marks with how many tokens there were at each."""

    def __init__(self, cache: KVCache, tokens: list[int], marks: list[tuple[Snapshot, int]]) -> None:
        self.cache, self.tokens, self.marks = cache, tokens, marks

    def cut(self, n: int) -> None:
        del self.tokens[n:]
        self.marks = [(snapshot, length) for snapshot, length in self.marks if length <= n]


class _Family:
    def __init__(self, model: LanguageModel, random: np.random.Generator) -> None:
        self.model, self.random = model, random
        self.texts = [_Text(model.new_cache(), [], [])]

    def step(self) -> str:
        """Do something at random to one of the texts; returns what."""
        text = self.texts[self.random.integers(len(self.texts))]
        moves = [self._grow] * 4 + [self._truncate, self._fork, self._drop, self._mark, self._rewind]
        return moves[self.random.integers(len(moves))](text)

    def distance(self) -> float:
        return max(_distance(self.model, text.cache, text.tokens) for text in self.texts)

    def _grow(self, text: _Text) -> str:
        if len(text.tokens) > _MOST_TOKENS:
            return self._truncate(text)
        n = int(self.random.integers(1, 9))
        chain = self.random.random() < 0.3
        parents = [node - 1 if chain else int(self.random.integers(-1, node)) for node in range(n)]
        mask = np.eye(n, dtype=bool)
        for node, parent in enumerate(parents):
            if parent >= 0:
                mask[node] |= mask[parent]
        positions = text.cache.next_position + mask.sum(axis=1) - 1
        tokens = self.random.integers(self.model.vocab_size, size=n)
        cuts = [0, *sorted({*self.random.integers(1, n, 2).tolist()} if n > 1 else ()), n]
        lower, upper = self._routes()
        states = []
        for retained, stop in pairwise(cuts):
            if self.random.random() < 0.3:  # rows that do not stay
                others = self.random.integers(self.model.vocab_size, size=n)[:2]
                self._pass(Segment(positions[:2], others, cache=text.cache, retained=retained), lower)
            rows = slice(retained, stop)
            part = Segment(positions[rows], tokens[rows], mask=mask[rows, :stop], cache=text.cache, retained=retained)
            states.append(self._pass(part, lower))
        if upper is not None:
            self._pass(Segment(positions, states=torch.cat(states), mask=mask, cache=text.cache), upper)
        leaf = int(self.random.integers(-1, n))
        path = [] if leaf < 0 else np.flatnonzero(mask[leaf]).tolist()
        text.cache.keep(path)
        text.tokens += tokens[path].tolist()
        above = "" if upper is None else f", and together from layer {len(lower.layers or ())} on"
        return f"keeping {path} of a tree with the parents {parents}, fed in {len(cuts) - 1} passes{above}"

    def _routes(self) -> tuple[LayerPlan, LayerPlan | None]:
        """Through all layers, or where the model can do so at times in two pieces."""
        layers = self.model.config.num_layers
        if not self.model.capabilities.layer_plans or layers < 2 or self.random.random() < 0.7:
            return WHOLE, None
        parted = int(self.random.integers(1, layers))
        return LayerPlan(tuple(range(parted))), LayerPlan(tuple(range(parted, layers)))

    def _pass(self, segment: Segment, layer_plan: LayerPlan) -> torch.Tensor:
        """Feed rows; returns what they leave the route with, if it ends early."""
        segment.logit_rows = []
        taps = () if layer_plan == WHOLE else (f"resid_post.{(layer_plan.layers or ())[-1]}",)
        scores = self.model.forward(Batch([segment]), taps=taps, layer_plan=layer_plan)
        return scores.hidden[taps[0]] if taps else torch.empty(0, dtype=torch.float32, device="cpu")

    def _truncate(self, text: _Text) -> str:
        n = int(self.random.integers(len(text.tokens) // 2, len(text.tokens) + 1))
        text.cache.truncate(n)
        text.cut(n)
        return f"truncating to {n} tokens"

    def _fork(self, text: _Text) -> str:
        if len(self.texts) < _MOST_FORKS:
            self.texts.append(_Text(text.cache.fork(), text.tokens.copy(), text.marks.copy()))
        return "forking"

    def _drop(self, text: _Text) -> str:
        if len(self.texts) > 1:
            self.texts.remove(text)
        return "dropping a fork"

    def _mark(self, text: _Text) -> str:
        text.marks.append((text.cache.snapshot(), len(text.tokens)))
        return "marking"

    def _rewind(self, text: _Text) -> str:
        if text.marks:
            snapshot, length = text.marks[self.random.integers(len(text.marks))]
            text.cache.restore(snapshot)
            text.cut(length)
        return f"rewinding to {len(text.tokens)} tokens"


def _distance(model: LanguageModel, cache: KVCache, tokens: list[int]) -> float:
    """Largest difference between the logits of two more rows, and those of all tokens in one pass."""
    n = len(tokens)
    if cache.next_position != n:
        raise LawBroken(f"a cache of {n} tokens says that the next position is {cache.next_position}")
    probe = [1 % model.vocab_size, 0]
    known = model.forward(Batch([Segment.chunk(probe, cache)])).logits
    cache.keep([])
    whole = Segment.chunk([*tokens, *probe], model.new_cache(), logit_rows=[n, n + 1])
    return float((known - model.forward(Batch([whole])).logits).abs().max())
