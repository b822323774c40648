"""What cache policies leave of associative recall, on a small model that was trained to do nothing else.

    python benchmarks/cache_recall.py --out benchmarks/results/cache-recall.json

As `python benchmarks/bench.py long-context` asks it, with pages, blocks and windows that fit a text of 48 tokens: 24
pairs of one of 8 letters and its figure, and at the end a letter that stood there before. The model (2 layers of 4
heads) is trained here, in a minute. `known`: the letter is part of the prompt that is compressed; `unknown`: it comes
after. Even distances and the oracle, which keeps the newest pair of that letter, are the bounds. Nothing is timed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from decodery.llm.resolve_settings import resolve_cache_policy
from decodery.models.loaders.store import terminal_progress
from decodery_benchmarks.long_context.bounds import Oracle, Uniform
from decodery_benchmarks.long_context.recall import Recall
from decodery_benchmarks.long_context.settings import ORACLE, UNIFORM
from decodery_benchmarks.results import write_result

BUDGETS = (0.25, 0.5, 0.75)
POLICIES = (
    *("streaming-llm:sinks=2", "h2o", "tova", "d2o:dense=0,sinks=2", "snapkv:window=4,kernel=1"),
    *("pyramid-kv:window=4,kernel=1", "expected-attention:future=8,sinks=2", "quest:page=2,dense_layers=0,least=1"),
    "actqkv:block=2,window=4,sinks=2,representatives=1",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, dict[str, dict[str, list[int]]]] = {}
    with terminal_progress(counts=True) as progress:
        recall = Recall(arguments.seed, progress)
        for policy in (UNIFORM, ORACLE, *POLICIES):
            name, _, rest = policy.partition(":")
            for budget in BUDGETS:
                bounds = {UNIFORM: Uniform(budget), ORACLE: Oracle(budget)}
                spec = f"{name}:budget={budget}" + (f",{rest}" if rest else "")
                kv = bounds[name] if name in bounds else resolve_cache_policy(spec)
                found.setdefault(policy, {})[str(budget)] = recall.of(kv)
            print(policy, found[policy], flush=True)
    command = "python benchmarks/cache_recall.py --out benchmarks/results/cache-recall.json"
    write_result(arguments.out, {"command": command, "seed": arguments.seed, "rows": found})


if __name__ == "__main__":
    main()
