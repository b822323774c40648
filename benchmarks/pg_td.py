"""How many small programs are found within how many passes: PG-TD against sampling and filtering by the same tests.

    python benchmarks/pg_td.py [--most 200] [--passes 200] [--out benchmarks/results]

40 functions of one line, which the embedded model writes after `return`, without a chat template. Each has three public
tests, which choose, and others that tell whether the chosen program is right. Samples are drawn one after another until
one passes the public tests; both may take the same number of passes, the prompt's not counted. Nothing is timed, so
that the machine's load does not matter. Every result is written into pg-td.json when it is there; the next call goes on
from there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import decodery as dc
from decodery.models.loaders.store import terminal_progress
from decodery.scorers import ProgramTests
from decodery.scorers.sandbox import Sandbox
from decodery.search import PGTD
from decodery.search.base import Branches
from decodery.search.pg_td import Programs, Tree
from decodery.step.forward_request import ForwardCoroutine, run_sync
from decodery.step.sequence import Sequence
from decodery_benchmarks.results import begun_result, write_result

STOP = "\n"
PUBLIC = 3
GRID = (10, 25, 50, 100, 200)


@dataclass(frozen=True)
class Problem:
    """signature: of the function. says: its docstring. answer: what it must give. inputs: of the tests."""

    signature: str
    says: str
    answer: Callable[..., Any]
    inputs: tuple[tuple[Any, ...], ...]

    @property
    def head(self) -> str:
        return f'def {self.signature}:\n    """{self.says}"""\n    return'

    def tests(self, hidden: bool) -> tuple[str, ...]:
        name = self.signature.partition("(")[0]
        chosen = self.inputs[PUBLIC:] if hidden else self.inputs[:PUBLIC]
        return tuple(f"assert {name}({', '.join(map(repr, given))}) == {self.answer(*given)!r}" for given in chosen)


def _ints(*values: int) -> tuple[tuple[int], ...]:
    return tuple((value,) for value in values)


_PAIRS = ((2, 3), (7, 1), (0, 5), (4, 4), (9, 2), (1, 8))
_LISTS = (([3, 1, 2],), ([5, 5],), ([-1, 4, 0, 2],), ([9],), ([2, 7, 1, 8],), ([6, -3, 6],))
_WORDS = (("level",), ("Apple",), ("a b",), ("Noon",), ("xyz",), ("banana split",))
PROBLEMS = (
    Problem("add(a, b)", "Return the sum of a and b.", lambda a, b: a + b, _PAIRS),
    Problem("difference(a, b)", "Return how far a and b are apart.", lambda a, b: abs(a - b), _PAIRS),
    Problem("twice_plus(a, b)", "Return two times a, plus b.", lambda a, b: 2 * a + b, _PAIRS),
    Problem("product_minus_one(a, b)", "Return a times b, minus 1.", lambda a, b: a * b - 1, _PAIRS),
    Problem("mean(a, b)", "Return the mean of a and b.", lambda a, b: (a + b) / 2, _PAIRS),
    Problem("sum_of_squares(a, b)", "Return the square of a plus the square of b.", lambda a, b: a * a + b * b, _PAIRS),
    Problem("square_of_sum(a, b)", "Return the square of a + b.", lambda a, b: (a + b) ** 2, _PAIRS),
    Problem("perimeter(a, b)", "Return the perimeter of a rectangle.", lambda a, b: 2 * (a + b), _PAIRS),
    Problem("smaller(a, b)", "Return the smaller of a and b.", min, _PAIRS),
    Problem("is_multiple(a, b)", "Return whether b is a multiple of a + 1.", lambda a, b: b % (a + 1) == 0, _PAIRS),
    Problem("last_digit(n)", "Return the last digit of n.", lambda n: n % 10, _ints(13, 7, 250, 1999, 0, 88)),
    Problem(
        "tens_digit(n)", "Return the digit before the last one of n.", lambda n: n // 10 % 10, _ints(13, 7, 250, 99)
    ),
    Problem("is_even(n)", "Return True if n is even.", lambda n: n % 2 == 0, _ints(2, 3, 0, 11, 18)),
    Problem("is_odd(n)", "Return True if n is odd.", lambda n: n % 2 == 1, _ints(2, 3, 0, 11, 18)),
    Problem("half_up(n)", "Return half of n, rounded up.", lambda n: (n + 1) // 2, _ints(3, 4, 7, 0, 1, 10)),
    Problem("triangle(n)", "Return 1 + 2 + ... + n.", lambda n: n * (n + 1) // 2, _ints(3, 4, 10, 0, 1, 7)),
    Problem(
        "sum_of_digits(n)", "Return the sum of the digits of n.", lambda n: sum(map(int, str(n))), _ints(13, 7, 250, 99)
    ),
    Problem("digits(n)", "Return how many digits n has.", lambda n: len(str(n)), _ints(13, 7, 250, 99, 1000)),
    Problem(
        "fahrenheit(c)", "Turn degrees Celsius into Fahrenheit.", lambda c: c * 9 / 5 + 32, _ints(0, 100, 25, -40, 10)
    ),
    Problem("minutes(h)", "Return how many minutes h hours have.", lambda h: 60 * h, _ints(1, 2, 0, 5, 24)),
    Problem(
        "clamp(n)", "Return n, but at least 0 and at most 10.", lambda n: max(0, min(10, n)), _ints(-4, 5, 12, 10, 0)
    ),
    Problem(
        "sign(n)",
        "Return 1, 0 or -1 for positive, zero or negative n.",
        lambda n: (n > 0) - (n < 0),
        _ints(4, 0, -2, 9),
    ),
    Problem("cube(n)", "Return n to the power of three.", lambda n: n**3, _ints(2, 3, -1, 5)),
    Problem("total(values)", "Return the sum of the values.", sum, _LISTS),
    Problem("largest(values)", "Return the largest value.", max, _LISTS),
    Problem("spread(values)", "Return the largest minus the smallest value.", lambda v: max(v) - min(v), _LISTS),
    Problem("ends(values)", "Return the first plus the last value.", lambda v: v[0] + v[-1], _LISTS),
    Problem("descending(values)", "Return the values, largest first.", lambda v: sorted(v, reverse=True), _LISTS),
    Problem("doubled(values)", "Return a list with every value doubled.", lambda v: [2 * x for x in v], _LISTS),
    Problem("evens(values)", "Return the even values only.", lambda v: [x for x in v if x % 2 == 0], _LISTS),
    Problem("distinct(values)", "Return how many different values there are.", lambda v: len(set(v)), _LISTS),
    Problem("squares(values)", "Return the sum of the squares of the values.", lambda v: sum(x * x for x in v), _LISTS),
    Problem("positive(values)", "Return how many values are above zero.", lambda v: sum(x > 0 for x in v), _LISTS),
    Problem("backwards(text)", "Return the text backwards.", lambda t: t[::-1], _WORDS),
    Problem("shout(text)", "Return the text in capitals with an exclamation mark.", lambda t: t.upper() + "!", _WORDS),
    Problem(
        "vowels(text)", "Return how many vowels the text has.", lambda t: sum(c in "aeiouAEIOU" for c in t), _WORDS
    ),
    Problem(
        "is_palindrome(text)",
        "Return whether the text reads the same backwards, whatever the case.",
        lambda t: t.lower() == t.lower()[::-1],
        _WORDS,
    ),
    Problem("initial(text)", "Return the first letter of the text as a capital.", lambda t: t[0].upper(), _WORDS),
    Problem("without_blanks(text)", "Return the text without blanks.", lambda t: t.replace(" ", ""), _WORDS),
    Problem(
        "ends_alike(text)",
        "Return whether the first and the last letter are the same.",
        lambda t: t[0] == t[-1],
        _WORDS,
    ),
)


def planned(lm: dc.LLM, problem: Problem, box: Sandbox, passes: int, tokens: int) -> dict[str, Any]:
    """What PG-TD finds: passes until a program passes the public tests (None if none does), and whether it is right."""
    reward = ProgramTests(tests=problem.tests(hidden=False), head=problem.head, sandbox=box)
    request = lm.request(
        lm.encode(problem.head, apply_chat_template=False),
        apply_chat_template=False,
        drafter=None,
        max_new_tokens=tokens,
        stop=STOP,
    )
    settings = PGTD(reward, budget=passes)
    branches = Branches(lm.engine(), request, settings)
    programs = Programs(settings, branches)
    best, tree = run_sync(_searched(settings, programs, passes))
    assert best.text is not None
    counts = {"programs": len(programs.rewards), "rollouts": len(tree.rollouts), "completions": programs.completions}
    return _outcome(problem, box, best.text.text, best.score == 1, branches.root.trace.passes) | counts


def _searched(settings: PGTD, programs: Programs, passes: int) -> ForwardCoroutine[tuple[Sequence, Tree]]:
    """The best program of a search that ends after so many passes, and the tree."""
    yield from programs.begin()
    tree = Tree(settings, programs, (yield from programs.edges(())))
    while not tree.done and programs.branches.root.trace.passes < passes:
        yield from tree.rollout()
    (best,) = programs.finish(tree.rollouts)
    return best, tree


def sampled(
    lm: dc.LLM, problem: Problem, box: Sandbox, passes: int, tokens: int, seed: int, temperature: float
) -> dict[str, Any]:
    """The same for samples, of which the first that passes the public tests is taken."""
    reward = ProgramTests(tests=problem.tests(hidden=False), head=problem.head, sandbox=box)
    spent, count, best, score = 0, 0, "", -1.0
    while spent < passes and score < 1:
        output = lm.generate(
            problem.head, apply_chat_template=False, drafter=None, max_new_tokens=tokens, stop=STOP,
            temperature=temperature, seed=1000 * seed + count,
        )  # fmt: skip
        spent, count = spent + output.trace.passes, count + 1
        if (found := reward.verdict(output.text).share) > score:
            best, score = output.text, found
    return _outcome(problem, box, best, score == 1, spent) | {"programs": count}


def _outcome(problem: Problem, box: Sandbox, text: str, passed: bool, passes: int) -> dict[str, Any]:
    right = (
        passed
        and ProgramTests(tests=problem.tests(hidden=True), head=problem.head, sandbox=box).verdict(text).share == 1
    )
    return {"passes": passes if passed else None, "spent": passes, "right": right, "text": text}


SETTINGS: dict[str, Callable[..., dict[str, Any]]] = {
    "pg-td": planned,
    **{
        f"samples, temperature {temperature:g}, seed {seed}": lambda *given, t=temperature, s=seed: sampled(
            *given, seed=s, temperature=t
        )
        for temperature in (0.4, 0.8)
        for seed in (1, 2)
    },
}


def figures(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """By setting: how many of the problems that all settings have tried are solved within so many passes, rightly."""
    tried = [problem.signature for problem in PROBLEMS]
    tried = [name for name in tried if all(f"{setting}: {name}" in runs for setting in SETTINGS)]
    found: dict[str, Any] = {}
    for setting in SETTINGS:
        done = [runs[f"{setting}: {name}"] for name in tried]
        solved = {str(most): sum(run["right"] and run["passes"] <= most for run in done) for most in GRID}
        found[setting] = {
            "problems": len(done),
            "solved": solved,
            "public": sum(run["passes"] is not None for run in done),
            "programs": sum(run["programs"] for run in done),
            "rollouts": sum(run.get("rollouts", run["programs"]) for run in done),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--most", type=int, default=200, help="runs to add in this call")
    parser.add_argument("--passes", type=int, default=GRID[-1])
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    path = options.out / "pg-td.json"
    runs = begun_result(path).get("runs", {})
    jobs = {
        f"{setting}: {problem.signature}": (run, problem) for problem in PROBLEMS for setting, run in SETTINGS.items()
    }
    missing = [key for key in jobs if key not in runs][: options.most]
    lm, box = dc.load("smollm2"), Sandbox(seconds=2.0)
    with terminal_progress(counts=True) as progress:
        for count, key in enumerate(missing):
            run, problem = jobs[key]
            runs[key] = run(lm, problem, box, options.passes, options.tokens)
            result = {
                "command": "python benchmarks/pg_td.py",
                "settings": {"model": lm.name, "new_tokens": options.tokens, "passes": options.passes},
                "runs": runs,
            }
            options.out.mkdir(parents=True, exist_ok=True)
            write_result(path, result, summary=["runs"], figures=figures(runs))
            progress("runs", count + 1, len(missing))
    print(json.dumps(figures(runs), indent=1))


if __name__ == "__main__":
    main()
