"""What constraints cost without masks, and what sequential Monte Carlo finds that masks do not.

    python benchmarks/smc.py [GROUP ...] [--timed] [--tokens 64] [--out benchmarks/results]

Groups are checks, posterior, reward and lookahead; every one writes smc-GROUP.json. Only --timed measures time, for the
group checks, and wants a quiet machine; all else is counted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from time import perf_counter
from typing import Any

import numpy as np
import torch

import decodery as dc
from decodery.constraints import Checker, ConstraintSpec, JSONSchema
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.extend import Candidates, Scorer
from decodery.sampling import Sampler
from decodery.sampling.constraint import Constrained, Constraint
from decodery.search.smc import SMC
from decodery.testing import TableModel, decode
from decodery_benchmarks.results import write_result
from groups import parser

PLAIN = Sampler.from_settings(temperature=1.0)
PROMPTS = (
    "Give me a JSON object that describes a book.",
    "Write a JSON array of three small numbers.",
    "A JSON object with the name and age of a sailor, please.",
    "Answer in JSON: what is the capital of Norway?",
    "List two fruits as a JSON array of strings.",
    "Describe today's weather as JSON.",
)
WORDS = ("true", "false", "null")
NUMBER_ENDS = (".", "e", "E", "e+", "e-", "E+", "E-")


def begins_json(text: str) -> bool:
    """Whether JSON without escapes can begin so: what is wrong with it is wrong at its end only."""
    if len(text) - len(text.lstrip()) > 2 or "\\" in text:
        return False
    try:
        json.loads(text, parse_constant=_refused)
    except json.JSONDecodeError as error:
        rest, value = text[error.pos :], error.msg == "Expecting value"
        number = text[error.pos - 1 : error.pos].isdigit() and rest in NUMBER_ENDS
        word = value and (rest == "-" or any(each.startswith(rest) for each in WORDS))
        return not rest.strip() or "Unterminated string" in error.msg or number or word
    except ValueError:
        return False
    return True


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refused)
    except ValueError:
        return False
    return True


def _refused(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def checks(options: argparse.Namespace) -> dict[str, Any]:
    """Checks per token of the rule awrs on JSON, of a vocabulary that a mask decides on in full."""
    lm = dc.load("smollm2")
    languages: dict[str, ConstraintSpec] = {
        "any JSON, by the engine": JSONSchema({"type": ["object", "array", "string", "number", "boolean", "null"]}),
        "any JSON, by a function": Checker(begins_json, is_json),
    }
    found: dict[str, Any] = {"vocabulary": lm.model.vocab_size}
    for name, language in languages.items():
        for temperature in (0.0, 1.0):
            settings = {"temperature": temperature, "max_new_tokens": options.tokens, "constraint": language}
            settings |= {"drafter": None}
            tried = _timed(lm, settings | {"acceptance_rule": "awrs"})
            counts: Counter[str] = Counter()
            for output in tried[1]:
                counts.update({**output.trace.ledger.counts, "tokens": len(output.tokens)})
            row = {key: round(counts[key] / counts["tokens"], 3) for key in ("checks", "rejections")}
            if options.timed:
                row["ms per token"] = round(tried[0] / counts["tokens"] * 1e3, 2)
                if isinstance(language, JSONSchema):
                    seconds, outputs = _timed(lm, settings)
                    assert [out.tokens for out in outputs] == [out.tokens for out in tried[1]]
                else:
                    # A mask asks about every token: one text is enough to see what that costs.
                    masked = language.compile(lm.vocabulary)
                    processors = Sampler.from_settings(temperature=temperature).processors
                    request = lm.request(lm.encode(PROMPTS[0]), drafter=None, max_new_tokens=4)
                    request = replace(request, sampler=Sampler((Constrained(masked), *processors)))
                    begin, engine = perf_counter(), lm.engine()
                    seq = engine.submit(request)
                    engine.run([seq])
                    seconds, outputs = perf_counter() - begin, [lm.output(seq)]
                row["ms per token with a mask"] = round(seconds / sum(len(out.tokens) for out in outputs) * 1e3, 2)
            found[f"{name}, temperature {temperature:g}"] = row
            print(name, temperature, row, flush=True)
    return found


def _timed(lm: Any, settings: dict[str, Any]) -> tuple[float, list[dc.Output]]:
    begin = perf_counter()
    outputs = [lm.generate(prompt, seed=number, **settings) for number, prompt in enumerate(PROMPTS)]
    return perf_counter() - begin, outputs


class Brackets(Constraint):
    """Balanced brackets of at most `most` signs. ids: 0 the end, 1 and 2 the brackets, 3 never.

    A state is the depth and what is left; (-1, 0) after the end.
    """

    def __init__(self, most: int) -> None:
        self.most = most

    def init(self, prompt: Sequence[int]) -> tuple[int, int]:
        return 0, self.most

    def allowed(self, state: tuple[int, int]) -> np.ndarray:
        depth, left = state
        return np.array([depth <= 0, depth >= 0 and depth < left, depth > 0, False])

    def advance(self, state: tuple[int, int], token: int) -> tuple[int, int]:
        return (-1, 0) if token == 0 else (state[0] + (1 if token == 1 else -1), state[1] - 1)

    def is_complete(self, state: tuple[int, int]) -> bool:
        return state[0] <= 0


def posterior(options: argparse.Namespace) -> dict[str, Any]:
    """Balanced brackets of at most 8 signs over four random models of 4 tokens: distance of the law of an answer from
    the model's law over whole texts given the grammar, as total variation and KL in nats."""
    laws: dict[str, list[tuple[float, float]]] = {}
    for seed in range(4):
        model, brackets = TableModel(4, order=2, seed=seed, spread=2.0), Brackets(8)
        exact, masked = _brackets(model, brackets)
        laws.setdefault("mask", []).append(_apart(masked, exact))
        sampler = Sampler((Constrained(brackets), *PLAIN.processors))
        for particles, runs in ((1, 640), (4, 160), (16, 40), (64, 10), (64, 40)):
            law: Counter[tuple[int, ...]] = Counter()
            for run in range(runs):
                request = Request([3], sampler=sampler, seed=1000 * run, max_new_tokens=9, eos_ids=(0,))
                found = SMC(particles).posterior(Engine(model), request)
                for seq, weight in zip(found.sequences, np.exp(found.log_weights), strict=True):
                    law[tuple(seq.generated)] += weight / runs
            name = f"smc:particles={particles}, {runs} runs"
            laws.setdefault(name, []).append(_apart(law, exact))
        print(seed, {name: np.round(np.mean(each, axis=0), 4).tolist() for name, each in laws.items()}, flush=True)
    return {
        name: dict(zip(("total variation", "KL"), np.round(np.mean(each, axis=0), 4).tolist(), strict=True))
        for name, each in laws.items()
    }


def _brackets(model: TableModel, brackets: Brackets) -> tuple[dict[tuple[int, ...], float], ...]:
    """By text: the model's law given the grammar, and the law that a mask gives."""
    whole: dict[tuple[int, ...], float] = {}
    masked: dict[tuple[int, ...], float] = {}

    def walk(text: tuple[int, ...], state: tuple[int, int], p: float, q: float) -> None:
        if text and text[-1] == 0:
            whole[text], masked[text] = p, q
            return
        law = model.logits([3, *text]).softmax(-1).numpy()
        allowed = brackets.allowed(state)
        for token in np.flatnonzero(allowed).tolist():
            after = brackets.advance(state, token)
            walk((*text, token), after, p * law[token], q * law[token] / law[allowed].sum())

    walk((), brackets.init(()), 1.0, 1.0)
    total = sum(whole.values())
    return {text: p / total for text, p in whole.items()}, masked


def _apart(law: dict[tuple[int, ...], float], exact: dict[tuple[int, ...], float]) -> tuple[float, float]:
    assert set(law) <= set(exact)
    variation = 0.5 * sum(abs(law.get(text, 0.0) - p) for text, p in exact.items())
    return variation, sum(p * math.log(p / exact[text]) for text, p in law.items() if p > 0)


class Sum(Scorer):
    """Log-weight -strength * |sum - goal|; of a beginning, by what is missing beyond what usually follows."""

    def __init__(self, goal: int, strength: float) -> None:
        self.goal = goal
        self.strength = strength

    @property
    def log(self) -> bool:
        return True

    def prefix(self, output: Sequence[int]) -> float:
        # A token adds two on average, and some ten come.
        return -self.strength * abs(_sum(output) - self.goal * min(1, len(output) / 10)) / 2

    def score(self, candidates: Candidates) -> torch.Tensor:
        found = [
            -self.strength * abs(_sum(output) - self.goal) if finished else self.prefix(output)
            for output, finished in zip(candidates.outputs, candidates.finished, strict=True)
        ]
        return torch.tensor(found, dtype=torch.float64)


def _sum(tokens: Sequence[int]) -> int:
    return sum(token - 1 for token in tokens)


GOAL, SIGNS, RUNS = 25, 10, 80


class Digits(TableModel):
    """Tokens 1 to 6 are the digits 0 to 5, small ones likelier; no token ends a text, which are all SIGNS long."""

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        favour = torch.tensor([-torch.inf, 1.6, 1.2, 0.8, 0.4, 0.0, -0.4], dtype=torch.float64)
        return super().logits(tokens) + favour


def reward(options: argparse.Namespace) -> dict[str, Any]:
    """Ten digits whose sum is to be 25, where a sample's is 15 or so: share of 80 seeds for which a text reached it,
    against as many samples as the same tokens pay for."""
    model = Digits(7, order=1, seed=2, spread=0.7)
    settings = {"sampler": PLAIN, "max_new_tokens": SIGNS}
    found: dict[str, Any] = {}
    searches = {
        "smc, 8 particles": SMC(8, 2, potential=Sum(GOAL, 1.0), moves=0),
        "smc, 16 particles": SMC(16, 2, potential=Sum(GOAL, 1.0), moves=0),
        "smc, 8 particles, moves": SMC(8, 2, potential=Sum(GOAL, 1.0), moves=2),
        "smc, 8 particles, lookahead": SMC(8, 2, potential=Sum(GOAL, 1.0), moves=0, lookahead=2, rollout_temperature=1),
    }
    for name, search in searches.items():
        hits = best = tokens = 0
        for seed in range(RUNS):
            request = Request([1], seed=100_000 * seed, **settings)
            run = search.posterior(Engine(model), request)
            rows = run.sequences[0].trace.rows + 1
            hits += any(_sum(seq.generated) == GOAL for seq in run.sequences)
            samples = decode(model, [[1]], seeds=range(1000 * seed, 1000 * seed + rows // SIGNS), **settings)
            best += any(_sum(seq.generated) == GOAL for seq in samples)
            tokens += rows
        found[name] = {"reached": hits / RUNS, "best of n": best / RUNS, "tokens": round(tokens / RUNS, 1)}
        print(name, found[name], flush=True)
    return found


def lookahead(options: argparse.Namespace) -> dict[str, Any]:
    """Standard deviation of the log-normaliser over 80 runs, at equal particles and at equal tokens; the same ten
    digits, and a potential of whole texts alone."""
    model = Digits(7, order=1, seed=2, spread=0.7)
    exact = _log_normaliser(model)
    searches = {"prefix-only, 8 particles": SMC(8, 2, potential=Whole(GOAL, 1.0), moves=0)}
    for rollouts, temperature in ((1, 1.0), (2, 1.0), (2, 0.5)):
        name = f"lookahead={rollouts} at temperature {temperature:g}, 8 particles"
        searches[name] = replace(
            searches["prefix-only, 8 particles"], lookahead=rollouts, rollout_temperature=temperature
        )
    searches["prefix-only, 56 particles"] = SMC(56, 2, potential=Whole(GOAL, 1.0), moves=0)
    found: dict[str, Any] = {"exact": round(exact, 3)}
    for name, search in searches.items():
        values, rows = [], 0
        for seed in range(RUNS):
            request = Request([1], sampler=PLAIN, seed=100_000 * seed, max_new_tokens=SIGNS)
            run = search.posterior(Engine(model), request)
            values.append(run.log_normaliser)
            rows += run.sequences[0].trace.rows
        error = np.array(values) - exact
        found[name] = {
            "standard deviation": round(float(np.std(values)), 3),
            "mean": round(float(np.mean(values)), 3),
            "mean of the normaliser over the exact one": round(float(np.exp(error).mean()), 3),
            "tokens": round(rows / RUNS, 1),
        }
        print(name, found[name], flush=True)
    return found


class Whole(Sum):
    """The same of whole texts; beginnings tell nothing."""

    def prefix(self, output: Sequence[int]) -> float:
        return 0.0


def _log_normaliser(model: Digits) -> float:
    """Log of the mean of exp(-|sum - GOAL|) over the model's texts, by dynamic programming over token and sum."""

    @cache
    def law(token: int) -> tuple[float, ...]:
        return tuple(model.logits([token]).softmax(-1).tolist())

    reached = {(1, 0): 1.0}
    for _ in range(SIGNS):
        after: dict[tuple[int, int], float] = {}
        for ((token, total), p), following in itertools.product(reached.items(), range(1, 7)):
            key = (following, total + following - 1)
            after[key] = after.get(key, 0.0) + p * law(token)[following]
        reached = after
    return math.log(sum(p * math.exp(-abs(total - GOAL)) for (_, total), p in reached.items()))


GROUPS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "checks": checks,
    "posterior": posterior,
    "reward": reward,
    "lookahead": lookahead,
}


def main() -> None:
    arguments = parser(__doc__, GROUPS)
    arguments.add_argument("--timed", action="store_true", help="also measure times, in the group checks")
    arguments.add_argument("--tokens", type=int, default=64)
    options = arguments.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.groups or GROUPS:
        command = f"python benchmarks/smc.py {name}"
        if name == "checks":
            command += f" --tokens {options.tokens}" + " --timed" * options.timed
        about = " ".join((GROUPS[name].__doc__ or "").split())
        found = GROUPS[name](options)
        write_result(options.out / f"smc-{name}.json", {"command": command, "about": about}, figures=found)


if __name__ == "__main__":
    main()
