"""What a text is worth to the larger model when that writes a share of it: beginning, end, by chance, by difficulty.

    python benchmarks/handoff.py [--questions 26] [--new 64] [--out benchmarks/results/search-handoff.json]

The embedded model and the draft that comes with it write answers to questions of Spec-Bench (DECODERY_DATA), as many of
every category, greedily and without an end. Reported is the mean negative log-likelihood, in nats per token, of each
answer under the larger model, with the standard error over questions. If the early tokens matter most, a share is worth
more at the beginning than at the end, and by chance in between. By difficulty it writes from where the draft has lost
its way until it is sure itself; its share then is what comes of it. What is in the results file of as many questions
and tokens is not measured again. Nothing is timed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent / "draft"))
from heads import questions

import decodery
from decodery.core.noise import mix
from decodery.models.batch import Batch, Segment
from decodery.search.phase_handoff import PhaseHandoff
from decodery.search.step_nodes import Node
from decodery_benchmarks.results import begun_result, write_result

RESULTS = Path(__file__).parent / "results"
BLOCK = 8
LIMITS = ((2.0, 0.5), (1.5, 0.5), (1.0, 0.5), (0.5, 0.25))
"""Nats: the draft's own entropy above which the larger model takes over, and its own below which it gives back."""


@dataclass(frozen=True)
class Interleaved(PhaseHandoff):
    """Blocks of tokens, of which the model writes those that chance gives it."""

    chosen: tuple[int, ...] = ()

    def _by_model(self, node: Node) -> bool:
        return node.depth in self.chosen


@dataclass(frozen=True)
class Noted(PhaseHandoff):
    """Notes who begins to write where."""

    begun: list[tuple[int, bool]] = field(default_factory=list, compare=False)

    def _by_model(self, node: Node) -> bool:
        own = super()._by_model(node)
        self.begun.append((len(node.seq.generated), own))
        return own

    def share(self, new: int) -> float:
        """The model's share of the `new` tokens that came of it."""
        ends = [start for start, _ in self.begun[1:]] + [new]
        return sum(end - start for (start, own), end in zip(self.begun, ends, strict=True) if own) / new


def searches(share: float, new: int, number: int) -> dict[str, PhaseHandoff]:
    """By name: the searches in which the model writes this share of the text."""
    own, blocks = round(share * new), new // BLOCK
    if own in (0, new):
        return {"all" if own else "none": PhaseHandoff(rounds=1, begins="model" if own else "second")}
    order = sorted(range(blocks), key=lambda block: mix(number, block))
    return {
        "beginning": PhaseHandoff(step_tokens=own),
        "end": PhaseHandoff(step_tokens=new - own, begins="second"),
        "by chance": Interleaved(step_tokens=BLOCK, rounds=blocks, chosen=tuple(order[: round(share * blocks)])),
    }


def likelihood(model: Any, prompt: list[int], output: list[int]) -> float:
    """Mean negative log-likelihood of an answer, in nats per token."""
    tokens = [*prompt, *output]
    rows = list(range(len(prompt) - 1, len(tokens) - 1))
    scores = model.forward(Batch([Segment.chunk(tokens, model.new_cache(), logit_rows=rows)]))
    laws = scores.logits.double().log_softmax(dim=-1)
    return float(-laws.gather(1, torch.tensor(output)[:, None]).mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--questions", type=int, default=26)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--out", type=Path, default=RESULTS / "search-handoff.json")
    options = parser.parse_args()
    lm = decodery.load("smollm2")
    prompts = [lm.encode(each["turns"][0]) for each in questions(options.questions, 0)]
    about = {"questions": len(prompts), "tokens": options.new}
    known = begun_result(options.out)
    runs: dict[str, Any] = known["rows"] if about == known["settings"] else {}

    def nats(number: int, search: PhaseHandoff) -> float:
        request = lm.request(prompts[number], max_new_tokens=options.new, ignore_eos=True, drafter=None)
        (seq,) = search.run(lm.engine(), replace(request, search=search))
        assert len(seq.generated) == options.new
        return likelihood(lm.model, prompts[number], seq.generated)

    def note(name: str, share: float, values: list[float]) -> None:
        error = statistics.stdev(values) / len(values) ** 0.5
        runs[name] = {
            "share": round(share, 4),
            "nats": round(statistics.mean(values), 4),
            "standard error": round(error, 4),
        }
        print(name, runs[name], flush=True)
        write_result(options.out, {"settings": about, "rows": runs})

    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        for place in searches(share, options.new, 0):
            if (name := f"{place} {share:g}") not in runs:
                every = range(len(prompts))
                note(name, share, [nats(each, searches(share, options.new, each)[place]) for each in every])
    for above, below in LIMITS:
        if (name := f"difficulty {above:g}/{below:g}") not in runs:
            noted = [
                Noted(step_tokens=options.new, rounds=options.new, begins="second", above=above, below=below)
                for _ in prompts
            ]
            values = [nats(number, search) for number, search in enumerate(noted)]
            note(name, statistics.mean(search.share(options.new) for search in noted), values)


if __name__ == "__main__":
    main()
