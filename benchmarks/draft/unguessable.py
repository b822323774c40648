"""What `auto` costs where nothing can be guessed: texts drawn at a high temperature after prompts of random tokens.

    python benchmarks/draft/unguessable.py [--texts 24] [--new 96] [--temperature 2]

Plain decoding and `auto` write the same texts in turn. Writes benchmarks/results/draft-unguessable.json. Timed: run it
on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import decodery

sys.path.insert(0, str(Path(__file__).parents[1]))
from decodery_benchmarks.intervals import interval
from decodery_benchmarks.results import write_result

RESULTS = Path(__file__).parents[1] / "results"
SUMMARY = ("ratio", "interval", "plain_ms_per_token", "drafted_per_pass", "accepted_per_pass")


def decode_seconds(output: decodery.Output) -> float:
    """Seconds of all passes but those that read the prompt."""
    steps = [step for step in output.trace.steps if not step.prefill]
    return sum(step.propose + step.score + step.choose + step.commit for step in steps)


def ratio(plain: np.ndarray, other: np.ndarray, axis: int = -1) -> np.ndarray:
    """Of summed times."""
    return other.sum(axis=axis) / plain.sum(axis=axis)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=2.0)
    options = parser.parse_args()
    lm = decodery.load("smollm2")
    generator = np.random.default_rng(0)
    seconds: dict[str, list[float]] = {"none": [], "auto": []}
    passes = drafted = accepted = 0
    for number in range(-2, options.texts):
        prompt = lm.tokenizer.decode(generator.integers(1000, lm.model.vocab_size, size=32).tolist())
        texts = []
        # Who goes first alternates; the first two texts only warm up.
        for name in list(seconds)[:: 1 if number % 2 else -1]:
            drafter = None if name == "none" else name
            settings: dict[str, Any] = {"temperature": options.temperature, "seed": number % 2**64, "ignore_eos": True}
            output = lm.generate(
                prompt, apply_chat_template=False, max_new_tokens=options.new, drafter=drafter, **settings
            )
            texts.append(output.tokens)
            if number >= 0:
                seconds[name].append(decode_seconds(output))
                if drafter:
                    steps = [step for step in output.trace.steps if not step.prefill]
                    passes += len(steps)
                    drafted += sum(step.nodes for step in steps)
                    accepted += sum(step.accepted for step in steps)
        assert texts[0] == texts[1]
    plain, auto = (np.array(each) for each in seconds.values())
    found = {
        "texts": options.texts,
        "new_tokens": options.new,
        "temperature": options.temperature,
        "ratio": round(float(auto.sum() / plain.sum()), 4),
        "interval": interval(plain, auto, statistic=ratio),
        "plain_ms_per_token": round(1000 * float(plain.sum()) / (options.texts * options.new), 3),
        "drafted_per_pass": round(drafted / passes, 4),
        "accepted_per_pass": round(accepted / passes, 4),
    }
    write_result(RESULTS / "draft-unguessable.json", found, summary=SUMMARY)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
