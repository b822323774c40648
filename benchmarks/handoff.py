"""What a text is worth to the larger model when that writes a share of it: its beginning, its end, or pieces by chance.

    python benchmarks/handoff.py [--questions 26] [--new 64] [--out benchmarks/results/search-handoff.json]

The embedded model and the draft that comes with it write answers to questions of Spec-Bench (DECODERY_DATA), as many of
every category, greedily and without an end. Reported is the mean negative log-likelihood, in nats per token, of each
answer under the larger model, with the standard error over questions. If the early tokens matter most, a share is worth
more at the beginning than at the end, and by chance in between. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent / "draft"))
from heads import questions

import decodery
from decodery.core.noise import mix
from decodery.model.batch import Batch, Segment
from decodery.search.phase_handoff import PhaseHandoff
from decodery.search.steps import Node

RESULTS = Path(__file__).parent / "results"
BLOCK = 8


@dataclass(frozen=True)
class Interleaved(PhaseHandoff):
    """Blocks of tokens, of which the model writes those that chance gives it."""

    chosen: tuple[int, ...] = ()

    def _by_model(self, node: Node) -> bool:
        return node.depth in self.chosen


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
    prompts = [lm.encode(each["turns"][0]) for each in questions(options.questions)]
    runs: dict[str, dict[str, float]] = {}
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        found: dict[str, list[float]] = {}
        for number, prompt in enumerate(prompts):
            request = lm.request(prompt, max_new_tokens=options.new, ignore_eos=True, drafter=None)
            for name, search in searches(share, options.new, number).items():
                (seq,) = search.run(lm.engine(), replace(request, search=search))
                assert len(seq.generated) == options.new
                found.setdefault(name, []).append(likelihood(lm.model, prompt, seq.generated))
        for name, values in found.items():
            error = statistics.stdev(values) / len(values) ** 0.5
            runs[f"{name} {share:g}"] = {
                "share": share,
                "nats": round(statistics.mean(values), 4),
                "standard error": round(error, 4),
            }
            print(name, share, runs[f"{name} {share:g}"], flush=True)
    result = {"command": shlex.join(["python", *sys.argv]), "questions": len(prompts), "tokens": options.new, **runs}
    options.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
