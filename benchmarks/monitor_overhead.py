"""Tokens per second under monitors, as ratios to none in the same run, plain and drafting.

    python benchmarks/monitor_overhead.py [--rounds 3] [--prompts 8] [--out benchmarks/results/monitor-overhead.json]

Best on a machine that does nothing else. The built-in questions, greedily, 96 tokens each. Every question is asked in
all settings in turn, in an order that turns, too; every ratio is the median over rounds. The probe has random weights:
what it costs is that of any linear probe. Texts under monitors that only read are compared with those without, and a
difference ends the run.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from time import perf_counter
from typing import Any

import torch

import decodery
from decodery.bench.workloads import questions
from decodery.monitors.probe import Probe
from decodery_benchmarks.results import write_result

ONE = ("confidence:measure=worst",)
FIVE = (*ONE, "confidence:measure=mean", "confidence:measure=first", "confidence:measure=entropy", "context-awareness")
WATCHED: dict[str, tuple[str, ...]] = {
    "none": (),
    "confidence": ONE,
    "truthprint": ("truthprint:probe={probe},threshold=2",),
    "five, one of attention": FIVE,
}
SETTINGS = [(drafter, name) for drafter in (None, "auto") for name in WATCHED]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    lm = decodery.load("smollm2")
    asked = [question.turns[0] for question in questions("built-in", most=given.prompts)]
    lm.generate(asked[0], max_new_tokens=8)
    probe = Path(mkdtemp(), Probe.FILE)
    draws = torch.Generator().manual_seed(0)
    weight = torch.randn(lm.model.config.hidden_size, generator=draws, dtype=torch.float32, device="cpu")
    Probe.from_tensors({"weight": weight, "bias": torch.zeros(1)}, site="resid_post.15").save(probe)
    rates: dict[tuple[Any, Any], list[float]] = {setting: [] for setting in SETTINGS}
    texts: dict[str, list[int]] = {}
    for number in range(given.rounds):
        taken = {setting: [0, 0.0] for setting in SETTINGS}
        for turn, prompt in enumerate(asked, number):
            for drafter, name in SETTINGS[turn % len(SETTINGS) :] + SETTINGS[: turn % len(SETTINGS)]:
                monitors = [each.format(probe=probe.parent) for each in WATCHED[name]]
                # Else an answer that was written before would come from memory.
                lm.reset_memory()
                begin = perf_counter()
                output = lm.generate(prompt, max_new_tokens=96, drafter=drafter, monitor=monitors)
                taken[drafter, name][1] += perf_counter() - begin
                taken[drafter, name][0] += len(output.tokens)
                if texts.setdefault(prompt, output.tokens) != output.tokens:
                    raise SystemExit(f"{monitors} with {drafter} changed the answer to {prompt!r}")
        for setting, (tokens, seconds) in taken.items():
            rates[setting].append(tokens / seconds)
    rows = []
    for drafter, name in SETTINGS:
        against = [own / none for own, none in zip(rates[drafter, name], rates[drafter, "none"], strict=True)]
        rate = round(median(rates[drafter, name]), 1)
        row = {
            "drafter": drafter,
            "monitors": name,
            "tokens per second": rate,
            "ratio": round(median(against), 3),
        }
        rows.append(row)
        print(row)
    if given.out:
        found = {"model": lm.name, "prompts": len(asked), "rounds": given.rounds, "memory": "fresh", "rows": rows}
        write_result(given.out, found)


if __name__ == "__main__":
    main()
