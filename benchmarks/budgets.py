"""What budget policies buy: drafts thrown away against target passes, and tokens per pass against bytes.

    python benchmarks/budgets.py [GROUP ...] --head DIR [--draft smollm2-draft] [--every 30] [--tokens 48]

Prompts come from Spec-Bench (DECODERY_DATA), the target is the embedded model at its own precision; DIR is what
`decodery train acceptance --out DIR` made. Nothing is timed, so that the machine's load does not matter. Writes
benchmarks/results/budgets.json after every setting; what is in it already, with the same settings, is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import decodery as dc
from decodery.engine.request import Request
from decodery.models.batch import Batch, Segment
from decodery.speculative.draft_length.confidence import Confidence
from decodery.speculative.draft_length.fixed import Fixed
from decodery.speculative.draft_length.goodput import Goodput
from decodery.speculative.draft_length.memory import MemoryBound, held
from decodery.speculative.draft_length.specdec_pp import SpecDecPP
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.drafters.token_recycling import TokenRecycling
from decodery.speculative.trees.eagle_2 import EAGLE2
from decodery.step.draft_length_policy import Budget, DraftLengthPolicy
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter, VerificationFeedback
from decodery.step.drafter_memory import Memory
from decodery.step.part_states import PartStates
from decodery.step.pass_cost import CostCurve
from decodery.testing.tensors import TensorBytes
from decodery_benchmarks.results import begun_result, write_result

DATA = Path(os.environ.get("DECODERY_DATA", Path(__file__).parents[2] / "shared" / "data"))
OUT = Path(__file__).parent / "results" / "budgets.json"
LONGEST = 20
NODES = 64
"""The largest draft whose bytes are compared."""


@dataclass
class Bench:
    """The model, its draft and the prompts, and what has been measured: once() makes a figure that is not there yet."""

    lm: dc.LLM
    draft: str
    head: str
    prompts: list[str]
    tokens: int
    result: dict[str, Any]
    group: str = ""

    def once(self, make: Callable[[], Any], *names: str) -> Any:
        """The figure called `names` within the group; it is written as soon as it is made."""
        *outer, last = names
        found = self.result["summary"][self.group]["figures"]
        for name in outer:
            found = found.setdefault(name, {})
        if last not in found:
            found[last] = make()
            write_result(OUT, self.result)
            print(*names, found[last], flush=True)
        return found[last]

    def run(self, budget: DraftLengthPolicy, **settings: Any) -> list[dc.Output]:
        drafter = DraftModel(self.draft, length=LONGEST)
        settings = {"max_new_tokens": self.tokens, "seed": 1, "drafter": drafter, "draft_length": budget, **settings}
        return [self.lm.generate(prompt, **settings) for prompt in self.prompts]


def counts(outputs: Iterable[dc.Output]) -> dict[str, float]:
    """Drafted tokens thrown away, and target passes, per emitted token; tokens per pass."""
    steps = [step for out in outputs for step in out.trace.decoding]
    emitted = sum(step.emitted for step in steps)
    return {
        "discarded": round(sum(step.nodes - step.accepted for step in steps) / emitted, 4),
        "passes": round(len(steps) / emitted, 4),
        "drafted": round(sum(step.nodes for step in steps) / len(steps), 3),
        "tokens_per_pass": round(emitted / len(steps), 3),
    }


def pareto(bench: Bench) -> None:
    """Discarded drafts and target passes per emitted token, by policy and setting; below: fixed lengths as a curve."""
    families: dict[str, dict[str, DraftLengthPolicy]] = {
        "fixed": {f"{gamma}": Fixed(gamma) for gamma in range(1, 11)},
        "specdec++": {f"{h}": SpecDecPP(bench.head, h, longest=LONGEST) for h in (0.1, 0.3, 0.5, 0.7, 0.9)},
        "confidence, probability": {f"{p}": Confidence(p, longest=LONGEST) for p in (0.2, 0.3, 0.4, 0.5, 0.6, 0.8)},
        "confidence, entropy": {f"{h}": Confidence(None, h, longest=LONGEST) for h in (0.5, 1.0, 1.5, 2.0, 2.5, 3.5)},
    }
    for name, settings in {
        "greedy": {"temperature": 0.0},
        "temperature 1, rejection": {"temperature": 1.0, "acceptance_rule": "rejection"},
    }.items():
        runs = {
            family: {
                setting: bench.once(lambda: counts(bench.run(policy, **settings)), name, family, setting)  # noqa: B023
                for setting, policy in policies.items()
            }
            for family, policies in families.items()
        }
        curve = [(point["discarded"], point["passes"]) for point in runs["fixed"].values()]
        below = {family: sum(_below(curve, point) for point in points.values()) for family, points in runs.items()}
        bench.once(lambda: below, name, "below")  # noqa: B023


def _below(curve: list[tuple[float, float]], point: dict[str, float]) -> bool:
    """Whether a setting needs no more passes than a mixture of fixed lengths that discards as much."""
    xs, ys = zip((0.0, 1.0), *sorted(curve), strict=True)
    return bool(point["passes"] <= np.interp(point["discarded"], xs, ys) + 1e-9)


def memory(bench: Bench) -> None:
    """The largest bytes of keys, values and vocabulary rows of any prompt, and tokens per pass, by allowed bytes.

    Drafts of up to 64 nodes; shares are of what these need beyond plain decoding.
    """
    drafters = {
        "draft-model, eagle-2": DraftModel(bench.draft, tree_policy=EAGLE2(nodes=NODES)),
        "token-recycling": TokenRecycling(nodes=NODES, scope="request"),
    }
    shares = {"unbounded": None, "100 %": 1.0, "50 %": 0.5, "35 %": 0.35, "20 %": 0.2, "10 %": 0.1, "0 %": 0.0}
    for name, drafter in drafters.items():
        for label, share in shares.items():
            bench.once(lambda: _within(bench, drafter, share), name, label)  # noqa: B023


def _within(bench: Bench, drafter: Drafter, share: float | None) -> dict[str, Any]:
    """What decoding holds and gains where it may hold this share; None: whatever it wants."""
    lm, peaks, allowed, outputs = bench.lm, [], [], []
    for prompt in bench.prompts:
        bound = None if share is None else MemoryBound(_allowed(bench, lm.encode(prompt), drafter, share) / 2**20)
        with TensorBytes(partial(_counted, lm.model.vocab_size)) as tensors:
            outputs.append(lm.generate(prompt, max_new_tokens=bench.tokens, drafter=drafter, draft_length=bound))
        peaks.append(tensors.peak)
        allowed.append(None if bound is None else bound.mib * 2**20)
        assert allowed[-1] is None or peaks[-1] <= allowed[-1]
    return {
        "peak_mib": round(max(peaks) / 2**20, 2),
        "allowed_mib": None if share is None else round(max(allowed) / 2**20, 2),
        "nodes": max(step.nodes for out in outputs for step in out.trace.decoding),
        "tokens_per_pass": counts(outputs)["tokens_per_pass"],
    }


def _counted(vocab: int, tensor: Any) -> bool:
    return tensor.ndim == 5 or (tensor.ndim > 0 and tensor.shape[-1] == vocab)


def _allowed(bench: Bench, tokens: list[int], drafter: Drafter, share: float) -> int:
    """Bytes that a text needs without drafts, and that share of what 64 drafted tokens need besides."""
    request: Request = bench.lm.request(tokens, max_new_tokens=bench.tokens, drafter=drafter)
    seq = bench.lm.engine().open(request)
    plain, most = held(seq, 0), held(seq, NODES)
    return int(plain + share * (most - plain)) + 1


def serving(bench: Bench) -> None:
    """Mean latency of a simulated server, by load: each fixed length, and goodput, relative to the best fixed length.

    Requests of 100 tokens arrive at random, and each accepts drafted tokens with a chance of its own between 0.3 and
    0.9. Passes take what `benchmarks/results/passes.json` says for int8; drafting a token, a tenth of a pass over one
    row. Load: the share of what plain decoding can serve in passes over 16 rows.
    """
    recorded = json.loads((OUT.parent / "passes.json").read_text("utf-8"))["rows"]
    times = {row["rows"]: row["ms"] / 1e3 for row in recorded if row["precision"] == "int8"}
    curve = CostCurve(tuple(sorted(times)), tuple(times[rows] for rows in sorted(times)))
    seconds = np.array([curve.seconds(max(rows, 1)) for rows in range(2048)])
    for load in (0.1, 0.3, 0.6, 0.9, 1.2):
        bench.once(lambda: _latencies(load * 16 / seconds[16] / _LENGTH, seconds), f"{load}")  # noqa: B023


def _latencies(rate: float, seconds: np.ndarray) -> dict[str, float]:
    latency = {f"fixed {k}": _latency(Fixed(k), rate, seconds) for k in range(7)}
    best = min(latency.values())
    latency |= {f"goodput, each {each}": _latency(Goodput(each), rate, seconds) for each in ("request", "batch")}
    return {name: round(float(value / best), 4) for name, value in latency.items()}


_LENGTH = 100


def _latency(policy: DraftLengthPolicy, rate: float, seconds: np.ndarray, requests: int = 300) -> float:
    """Mean seconds from a request's arrival to its last token, with all requests in one batch."""
    random = np.random.default_rng(0)
    arrivals = random.exponential(1 / rate, requests).cumsum()
    chances = random.uniform(0.3, 0.9, requests)
    memory, draft = Memory(), seconds[1] / 10
    now, total, waiting, batch = 0.0, 0.0, 0, []
    while waiting < requests or batch:
        if not batch:
            now = max(now, arrivals[waiting])
        while waiting < requests and arrivals[waiting] <= now:
            bound = SimpleNamespace(drafter=None, memory=memory, draft_length=policy)
            request = SimpleNamespace(number=waiting, position=1, request=bound, states=PartStates())
            request.states[policy] = policy.start(request)
            batch.append(request)
            waiting += 1
        limit = Budget(64, 64, len(batch), lambda: seconds)
        lengths = [policy.bound(request, limit, batch).nodes for request in batch]
        now += seconds[len(batch) + sum(lengths)] + draft * sum(lengths)
        for request, length in zip(list(batch), lengths, strict=True):
            chance = chances[request.number]
            accepted = min(int(random.geometric(1 - chance)) - 1, length)
            tree, path = DraftTree.chain(0, [0] * length), list(range(1, accepted + 1))
            seen = VerificationFeedback(tree, torch.empty(0), {}, path, [0] * (accepted + 1), start=0)
            policy.observe(request, seen, draft * length)
            request.position += accepted + 1
            if request.position > _LENGTH:
                total += now - arrivals[request.number]
                batch.remove(request)
    return total / requests


GROUPS: dict[str, Callable[[Bench], None]] = {"pareto": pareto, "memory": memory, "serving": serving}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("groups", nargs="*", choices=[[], *GROUPS], metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--every", type=int, default=30, help="take every so many questions")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--draft", default="smollm2-draft")
    parser.add_argument("--head", default="head", help="the folder of a trained acceptance head")
    options = parser.parse_args()
    lines = (DATA / "spec_bench_dev.jsonl").read_text("utf-8").splitlines()
    prompts = [json.loads(line)["turns"][0] for line in lines][:: options.every]
    result = begun_result(OUT)
    bench = Bench(dc.load("smollm2"), options.draft, options.head, prompts, options.tokens, result)
    # The tokens it finds most likely tell one draft model from another that has its name.
    draft = dc.load(options.draft).model
    most_likely = draft.forward(Batch([Segment.chunk(range(16), draft.new_cache())])).logits.argmax(dim=-1).tolist()
    shared = {"draft": options.draft, "every": options.every, "tokens": options.tokens, "most_likely": most_likely}
    for name in options.groups or GROUPS:
        settings = shared | ({"head": SpecDecPP(options.head).trained.facts} if name == "pareto" else {})
        if result.get(name, {}).get("settings") != settings:
            result["summary"][name] = {"settings": settings, "about": GROUPS[name].__doc__, "figures": {}}
        bench.group = name
        GROUPS[name](bench)


if __name__ == "__main__":
    main()
