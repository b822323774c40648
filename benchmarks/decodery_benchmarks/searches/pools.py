"""What is drawn of one puzzle: a pool of samples with what rewards say of each, and searches that are run anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from decodery.core.registry import resolve
from decodery.core.requirements import Requirements
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.llm.llm import LLM
from decodery.models.loaders.store import Progress, silent
from decodery.search.answers import AnswerExtractor
from decodery.search.base import Search
from decodery.search.estimators import best_of, distinct_of, pass_at, voted
from decodery.search.pool import TextPool, scored
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.scorer import Scorer, log_scores
from decodery.step.sequence import Sequence
from decodery_benchmarks.puzzles import Puzzle

from .rewards import reward
from .settings import GREEDY, SCORED, Cell, SearchSettings

_SPARE = 8
"""Tokens that a text may be longer than any solution."""
_NEVER = float(1 << 30)


@dataclass(frozen=True)
class Sampling(Search):
    """Draws n texts and returns all, in the order they were drawn. said: what each of `scorers` says of them."""

    n: int
    scorers: Mapping[str, Scorer]
    said: dict[str, list[float | None]] = field(default_factory=dict)

    @property
    def requirements(self) -> Requirements:
        return Requirements(taps=tuple({tap for scorer in self.scorers.values() for tap in scorer.requirements.taps}))

    def find(self, engine: Engine, request: Request, progress: Progress = silent) -> ForwardCoroutine[list[Sequence]]:
        pool = TextPool(engine, request, self, self.n)
        yield from pool.write(progress)
        for name, scorer in self.scorers.items():
            scorer.fits(pool.texts[0].request.model)
            said = yield from scored(scorer, pool.texts)
            weights = log_scores(
                scorer,
                torch.tensor([-_NEVER if each is None else each for each in said], dtype=torch.float32, device="cpu"),
            ).exp()
            self.said[name] = weights.tolist() if scorer.log else said
        return pool.finish(pool.texts)


def sampled(lm: LLM, settings: SearchSettings, prompt: str, number: int) -> dict[str, Any]:
    """The pool of puzzle `number`: what is kept of it in a file."""
    asked = settings.asked
    specs = {name: reward(name, asked) for name in settings.rewards}
    scorers = {name: resolve("scorer", spec).bind(lm.tokenizer) for name, spec in specs.items()}
    search = Sampling(settings.pool, scorers)
    request = lm.request(lm.encode(prompt, apply_chat_template=False), **_writing(settings, number))
    outputs = [lm.output(seq) for seq in search.run(lm.engine(), request)]
    texts = [output.text for output in outputs]
    ended = [output.finish_reason == "stop" for output in outputs]
    return {
        "kind": "pool",
        "puzzle": number,
        "prompt": prompt,
        "texts": texts,
        "right": [int(end and asked.verify(prompt, text)) for text, end in zip(texts, ended, strict=True)],
        "answers": AnswerExtractor(pattern=asked.pattern).of(texts),
        "lengths": [len(output.tokens) for output in outputs],
        "ended": [int(end) for end in ended],
        "scores": search.said,
    }


def run(lm: LLM, settings: SearchSettings, cell: Cell, prompt: str, number: int) -> dict[str, Any]:
    """A search on puzzle `number`, or greedy decoding where the method is `GREEDY`."""
    method, judged, budget = cell
    writing = _writing(settings, number)
    if method == GREEDY:
        greedy = lm.generate(prompt, **writing | {"temperature": 0.0})
        assert not isinstance(greedy, list)
        best = greedy
    else:
        best = lm.search(prompt, settings.search(method, budget, judged), **writing)[0]
    right = best.finish_reason == "stop" and settings.asked.verify(prompt, best.text)
    ledger = best.trace.ledger
    return {
        "kind": "run",
        "puzzle": number,
        "method": method,
        "reward": judged,
        "n": budget,
        "text": best.text,
        "right": int(right),
        "tokens": ledger.tokens,
        "scorer_calls": ledger.scorer_calls,
        "depth": ledger.depth,
    }


def estimated(pool: dict[str, Any], method: str, judged: str, n: int) -> dict[str, float]:
    """What a method makes, on average, of n samples of a pool: right, and what that costs, as `run` says.

    judged: the reward, by its name.
    """
    right, lengths, scores = pool["right"], pool["lengths"], pool["scores"].get(judged)
    found = {
        "tokens": n * sum(lengths) / len(lengths),
        "scorer_calls": 0.0,
        "depth": best_of(n, lengths, lengths),
    }
    if method == "pass@n":
        found["right"] = pass_at(n, sum(right), len(right))
    elif method == "best-of-n":
        found["right"] = best_of(n, scores, right)
    elif method == "first-finish":
        counts = zip(lengths, pool["ended"], pool["answers"], strict=True)
        races = [-float(length) if end and answer is not None else -_NEVER for length, end, answer in counts]
        found["right"], found["depth"] = best_of(n, races, right), best_of(n, races, lengths)
        # All are written for as long as the one that ends first.
        found["tokens"] = n * found["depth"]
    else:
        found["right"] = voted(n, pool["answers"], right, scores if method == "weighted-vote" else None)
    if method in SCORED:
        found["scorer_calls"] = distinct_of(n, pool["texts"])
    return found


def best_within(pool: dict[str, Any], judged: str, tokens: float) -> float:
    """How often best-of-n is right that writes as many tokens, between integers n in proportion; at most all."""
    lengths = pool["lengths"]
    n = min(max(tokens * len(lengths) / sum(lengths), 1.0), float(len(lengths)))
    below = int(n)
    above = min(below + 1, len(lengths))
    share = n - below
    low, high = (estimated(pool, "best-of-n", judged, each)["right"] for each in (below, above))
    return (1 - share) * low + share * high


def _writing(settings: SearchSettings, number: int) -> dict[str, Any]:
    """How texts of puzzle `number` are written: no two puzzles share a seed."""
    puzzle: Puzzle = settings.asked
    seed = (settings.seed + number * (1 << 20)) & ((1 << 64) - 1)
    return {
        "temperature": settings.temperature,
        "max_new_tokens": puzzle.length + _SPARE,
        "apply_chat_template": False,
        "drafter": None,
        "seed": seed,
    }
