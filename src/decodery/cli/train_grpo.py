"""`decodery train grpo`, whose rewards are those of `decodery search-bench`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from decodery.bench.searches.problems import read_problems
from decodery.models.loaders.adapters import Adapter
from decodery.scorers.sandbox import Sandbox
from decodery.search.answers import AnswerExtractor
from decodery.training.adapter import LoRARemaking
from decodery.training.grpo import GRPORecipe, train_grpo
from decodery.training.kind import ARGUMENT, Data, Run, kind, option


@dataclass(frozen=True)
class Rewarded(Data):
    """Problems, and how answers are rewarded.

    Attributes:
        answer: Where answers stand in a text.
    """

    problems: Path = option(Path(), "The file of problems.", **ARGUMENT)
    prompt: str = option("{question}", "The prompt of a problem.")
    answer: Literal["auto", "number", "marked", "whole", "choice", "quantity"] = "auto"
    pattern: str | None = option(None, "A regular expression of answers in its place.")


@kind(
    "The adapter is ready: --logits-source adapter:file={out}",
    (Rewarded(), GRPORecipe(), LoRARemaking()),
    "problems.jsonl -m MODEL --out adapter",
    model="to tune",
    file=Adapter.FILE,
    without=("masked",),
)
def _grpo(run: Run) -> dict[str, Any]:
    """Train a LoRA adapter of MODEL on PROBLEMS: its own texts are rewarded for right answers (GRPO).

    PROBLEMS is a file as `decodery search-bench` takes it: a `question` and its `answer`, or a `prompt` and
    `tests`. One problem in ten is held out."""
    given, sandbox = run.of(Rewarded), Sandbox(seconds=3.0)
    found, answers = read_problems(given.problems), AnswerExtractor(given.answer, given.pattern or "")

    def reward(number: int, texts: Sequence[Any]) -> list[float]:
        return [float(found[number].right(seq.text.text, answers, sandbox)) for seq in texts]

    rewarded = [given.answer, given.pattern, [asdict(each) for each in found]]
    return train_grpo(run, [given.prompt.replace("{question}", each.question) for each in found], reward, rewarded)
