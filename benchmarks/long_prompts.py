"""A trace for `serve_peers.py --trace`: people who write with a server while long prompts arrive.

    python benchmarks/long_prompts.py --out runs/long-prompts.jsonl

Every line is an arrival with a short question and an answer of --max-new-tokens; every --every seconds one comes whose
prompt is a stretch of --long tokens of this package's documents, from somewhere else in them each time.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from decodery.bench.load.arrivals import CHARACTERS
from decodery.bench.workloads import documents, questions


def arrivals(seconds: float, rate: float, every: float, long: int, answer: int, seed: int) -> list[dict[str, object]]:
    """The lines of the trace. rate: short questions per second on average; long: tokens of a long prompt."""
    rng = np.random.default_rng(seed)
    asked = [question.turns[0] for question in questions("built-in", None)]
    text, size = "\n".join(documents().values()), int(long * CHARACTERS)
    text *= 2 + size // len(text)
    short = np.cumsum(rng.exponential(1 / rate, int(seconds * rate)))
    found: list[dict[str, object]] = [
        {"at": round(float(at), 3), "prompt": asked[number % len(asked)], "max_tokens": answer}
        for number, at in enumerate(short)
    ]
    for at in np.arange(every, seconds, every):
        begin = int(rng.integers(len(text) - size))
        prompt = f"Summarise this: {text[begin : begin + size]}"
        found.append({"at": float(at), "prompt": prompt, "max_tokens": answer // 4})
    return sorted(found, key=lambda line: float(str(line["at"])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--rate", type=float, default=0.5, help="short questions per second")
    parser.add_argument("--every", type=float, default=15.0, help="seconds between long prompts")
    parser.add_argument("--long", type=int, default=3000, help="their tokens, about")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    lines = arrivals(options.seconds, options.rate, options.every, options.long, options.max_new_tokens, options.seed)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
