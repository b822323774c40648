"""What cache policies take in memory and time, as shares of the full cache's.

    python benchmarks/policy_speed.py --out benchmarks/results/policy-speed.json

The embedded model in int8 with one thread reads a text once; every policy goes on from a fork of it, reads the prompt's
last tokens and writes some more. Steps of all of them take turns in one process, and the mean time of each counts, what
policies evict or round now and then included: CPU time of the thread, so that other processes disturb it less. Bytes
are those of pages allocated, with what policies hold beside them, after the last step. What `h2o`, `tova` and `d2o`
score is what those last tokens of the prompt pay.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import decodery
from decodery.core.registry import resolve
from decodery.kv_cache.double_sparsity import DoubleSparsity
from decodery.models.batch import Batch, Segment
from decodery.models.cache.account import resident
from decodery.models.cache.attention_policy import AttentionPolicy
from decodery.models.cache.cache import KVCache
from decodery.models.protocol import LanguageModel
from decodery.models.trained.key_channels import KeyChannels
from decodery.step.cache_policy import CachePolicy
from decodery_benchmarks.results import begun_result, write_result

POLICIES = (
    *("quest:budget=0.25", "double-sparsity:budget=0.25", "snapkv:budget=0.25", "streaming-llm:budget=0.25"),
    *("pyramid-kv:budget=0.25", "h2o:budget=0.25", "tova:budget=0.25", "quantized", "quantized:bits=4", "localist"),
    *("d2o:budget=0.25", "d2o:budget=0.1"),
)
LAST = 64
TEXTS = Path(__file__).parent.parent / "docs"
COMMAND = "python benchmarks/policy_speed.py --out benchmarks/results/policy-speed.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--steps", type=int, default=33)
    parser.add_argument("--kv-dtypes", nargs="*", default=["auto", "int8"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    known: dict[str, Any] = begun_result(options.out)
    known["command"], known["model"], known["tokens"] = COMMAND, "smollm2, int8", options.tokens
    for kv_dtype in options.kv_dtypes:
        known["rows"][kv_dtype] = measured(kv_dtype, options.tokens, options.steps)
        write_result(options.out, known, summary=[])


@torch.no_grad()
def measured(kv_dtype: str, tokens: int, steps: int) -> dict[str, dict[str, float]]:
    """By policy: milliseconds a step, MiB, and both as shares of the full cache's."""
    lm = decodery.load("smollm2", dtype="int8", kv_dtype=kv_dtype)
    pages = "\n".join(path.read_text(encoding="utf-8") for path in sorted(TEXTS.glob("*.md")))
    text = lm.tokenizer.encode(pages)[: tokens + steps]
    model = lm.model
    full = model.new_cache()
    read(model, full, text[: tokens - LAST])
    channels = spread(model, full)
    policies: dict[str, CachePolicy | None] = {"full": None}
    for name in POLICIES:
        calibrated = name.startswith("double-sparsity")
        policies[name] = DoubleSparsity(0.25, calibration=channels) if calibrated else resolve("cache-policy", name)
    caches: dict[str, KVCache] = {}
    for name, policy in policies.items():
        caches[name] = full.fork()
        caches[name].policy = None if policy is None else state(policy, model, tokens)
        read(model, caches[name], text[tokens - LAST : tokens])
    del full
    times: dict[str, list[float]] = {name: [] for name in caches}
    for step in range(steps):
        for name, cache in caches.items():
            begin = time.thread_time()
            read(model, cache, text[tokens + step : tokens + step + 1])
            times[name].append(time.thread_time() - begin)
    seconds, found = {name: fmean(each) for name, each in times.items()}, {}
    for name, cache in caches.items():
        size = resident([cache])
        found[name] = {
            "ms": round(seconds[name] * 1e3, 2),
            "MiB": round(size / 2**20, 1),
            "time": round(seconds[name] / seconds["full"], 2),
            "memory": round(size / resident([caches["full"]]), 2),
        }
        print(kv_dtype, name, json.dumps(found[name]), flush=True)
    return found


def state(policy: CachePolicy, model: LanguageModel, prompt: int) -> AttentionPolicy:
    """What a policy remembers of a text that is read up to the last tokens of its prompt."""
    return policy.state(model, prompt)


def read(model: LanguageModel, cache: KVCache, tokens: list[int]) -> None:
    for first in range(0, len(tokens), 512):
        part = tokens[first : first + 512]
        model.forward(Batch([Segment.chunk(part, cache, logit_rows=[])]))
        cache.keep(range(len(part)))


def spread(model: LanguageModel, cache: KVCache) -> KeyChannels:
    """Channels in the order of how much keys differ in them: no calibration, but one that costs the same."""
    layers = [
        cache.view(layer)[0].float().var(dim=1).argsort(dim=-1, descending=True) for layer in range(len(cache.lengths))
    ]
    return KeyChannels(torch.stack(layers))


if __name__ == "__main__":
    main()
