"""The invariants of scorers: a score does not depend on other candidates or on earlier calls."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

import numpy as np
import torch

from decodery.core.ledger import Ledger, charged
from decodery.engine.engine import Engine
from decodery.models.batch import Batch, Segment
from decodery.models.cache.cache import KVCache
from decodery.models.protocol import LanguageModel
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.scorer import Candidates, Scorer, judge

from .models import Counted
from .running import LawBroken


def check_scorer(
    scorer: Scorer,
    model: LanguageModel,
    texts: Ordered[tuple[Ordered[int], Ordered[int]]],
    *,
    tolerance: float = 1e-9,
) -> None:
    """Check that a score depends only on the prompt and the candidate.

    Candidates are scored together, again, one by one and in another order, as prefixes and as finished texts, with and
    without caches of the model. All scores must be equal, within `tolerance` where the scorer runs a model. They must
    be within the scorer's bounds, the caches must not change, and the ledger must count the cost.

    Args:
        scorer: The scorer under test.
        model: The model that it runs.
        texts: Prompts and outputs; those of one prompt are scored together.
        tolerance: Maximum difference of scores where the scorer runs a model.

    Raises:
        LawBroken: If an invariant does not hold, or all candidates have the same score, so that it was not tested.
    """
    trial, seen = _Trial(scorer, model, tolerance), list[float]()
    for prompt in dict.fromkeys(tuple(prompt) for prompt, _ in texts):
        outputs = [list(output) for own, output in texts if tuple(own) == prompt]
        for finished in (True, False):
            if scorer.answers if finished else scorer.prefixes:
                seen += trial.run(list(prompt), outputs, finished).tolist()
    if len(set(seen)) < 2:
        raise LawBroken(f"{scorer} finds all candidates worth the same, so nothing was put to the test")


class _Trial:
    """The checks of one scorer with one model."""

    def __init__(self, scorer: Scorer, model: LanguageModel, tolerance: float) -> None:
        self.scorer, self.model, self.tolerance = scorer, model, tolerance

    def run(self, prompt: list[int], outputs: list[list[int]], finished: bool) -> torch.Tensor:
        """Scores [m] of the candidates."""
        whole = self._candidates(prompt, outputs, finished)
        before = [(cache.next_position, self._after(cache)) for cache in whole.states or ()]
        expected = self._score(whole)
        least, most = self.scorer.bounds
        if not all(least <= value <= most or value == -np.inf for value in expected.tolist()):
            raise LawBroken(f"{self.scorer} gave {expected.tolist()}, and its bounds are {least} and {most}")
        self._same(expected, self._score(whole), "called again: it has a state, or draws at random")
        n = len(outputs)
        alone = torch.cat([self._score(whole.of([number])) for number in reversed(range(n))]).flip(0)
        self._same(expected, alone, "scored alone: a score hangs on its candidate only")
        order = np.random.default_rng(0).permutation(n).tolist()
        self._same(expected[order], self._score(whole.of(order)), "in another order: a score hangs on its candidate")
        fresh = Candidates(prompt, outputs, whole.finished, whole.hidden, model=whole.model)
        self._same(expected, self._score(fresh), "read anew: what was read before may save work, and nothing else")
        for cache, (position, logits) in zip(whole.states or (), before, strict=True):
            if cache.next_position != position or not torch.equal(self._after(cache), logits):
                raise LawBroken(f"{self.scorer} changes what was read of a candidate: work on a fork of it")
        if (prompt, outputs) != (whole.prompt, whole.outputs):
            raise LawBroken(f"{self.scorer} changes the tokens it is given")
        return expected

    def _candidates(self, prompt: list[int], outputs: list[list[int]], finished: bool) -> Candidates:
        caches, hidden = [], []
        for output in outputs:
            cache = self.model.new_cache()
            chunk = Segment.chunk([*prompt, *output], cache)
            taps = list(self.scorer.requirements.taps)
            scores = self.model.forward(Batch([chunk]), taps=taps)
            hidden.append({tap: scores.hidden[tap][-1] for tap in taps})
            cache.keep(range(len(chunk)))
            caches.append(cache)
        states = {tap: torch.stack([each[tap] for each in hidden]) for tap in self.scorer.requirements.taps}
        given = list(prompt), [list(output) for output in outputs], [finished] * len(outputs)
        return Candidates(*given, states, model=self.model, states=caches)

    def _score(self, candidates: Candidates) -> torch.Tensor:
        """Scores, computed by an engine whose ledger must have the cost."""
        counted = Counted(self.model)
        own = Candidates(
            candidates.prompt,
            candidates.outputs,
            candidates.finished,
            candidates.hidden,
            model=counted,
            states=candidates.states,
        )
        found, ledger = Engine(counted).finish(self._judged(own))
        # Only passes of the writing model: those of the scorer's own model have another name in the ledger.
        spent = ledger.passes.get("model", 0), ledger.rows.get("model", 0), ledger.scorer_calls
        if spent != (len(counted.rows), sum(counted.rows), len(candidates)):
            raise LawBroken(
                f"{self.scorer} judged {len(candidates)} candidates in passes of {counted.rows} rows, and the ledger "
                f"says {spent[2]}, {spent[0]} and {spent[1]}: yield asks, and leave passes to the engine"
            )
        return found.double().cpu()

    def _judged(self, candidates: Candidates) -> ForwardCoroutine[tuple[torch.Tensor, Ledger]]:
        found = yield from judge(self.scorer, candidates)
        return found, charged()

    def _after(self, cache: KVCache) -> torch.Tensor:
        """The model's logits for a probe token after the content of a cache."""
        fork = cache.fork()
        return self.model.forward(Batch([Segment.chunk([1], fork)])).logits

    def _same(self, expected: torch.Tensor, found: torch.Tensor, when: str) -> None:
        apart = expected != found
        if bool(((expected - found).abs()[apart] > self.tolerance).any()):
            raise LawBroken(f"{self.scorer} gives {found.tolist()} for {expected.tolist()} when {when}")
