"""Tokens per pass and acceptance of every growth policy at equal node budgets.

    python benchmarks/growth.py DRAFTER [--every 10] [--tokens 48] [--nodes 8,16,32,64] [--out benchmarks/results]
    python benchmarks/growth.py DRAFTER --acceptance [--every 10] [--tokens 48]

DRAFTER is one that can expand: "draft-model" (the one that comes with the package), "draft-model:model=NAME", "ngram".
Prompts come from Spec-Bench (DECODERY_DATA), the target is the embedded model at its own precision. Nothing is timed,
so that the load of the machine does not matter. Writes growth-NAME.json after every setting; what is in it already, of
the same draft model, is not run again. --acceptance measures and prints how often the child of each rank was the
accepted one, and nothing else: the defaults of sequoia are those of draft-model at temperature 0 with --every 8.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import decodery as dc
from decodery.models.batch import Batch, Scores, Segment
from decodery.models.protocol import LanguageModel
from decodery.speculative.trees.sequoia import acceptance_by_rank
from decodery.step.tree_drafter import TreeDrafter, expanding
from decodery_benchmarks.results import begun_result, write_result

DATA = Path(os.environ.get("DECODERY_DATA", Path(__file__).parents[2] / "shared" / "data"))
BRANCHING = {8: "2/1/1/1", 16: "4/1/1/1", 32: "4/2/1/1", 64: "4/3/1/1/1/1"}
"""8, 16, 28 and 64 nodes."""
CHAINS = {8: "k=2,length=4", 16: "k=4,length=4", 32: "k=8,length=4", 64: "k=8,length=8"}
BEAMS = {8: "width=2,depth=4", 16: "width=4,depth=4", 32: "width=6,depth=5", 64: "width=10,depth=6"}
CALIBRATION = "rsd-c:branching=12"
RUNS = [("0", "coupled"), ("0.7", "coupled"), ("0.7", "recursive-rejection"), ("0.7", "k-seq")]
"""Temperature and rule. At temperature 0 all rules take the same drafts."""
LEFT_OUT = {
    # Their siblings are point masses, of which the rule accepts what the coupled rule does.
    "recursive-rejection": {"fixed-tree", "eagle-2"},
    # It wants independent draws.
    "k-seq": {"fixed-tree", "eagle-2", "sequoia", "dyspec", "dyspec, by level", "rsd-c", "rsd-s"},
}


def policies(nodes: int, rates: str) -> dict[str, str | None]:
    """Texts of the policies at a node budget; None is a chain."""
    return {
        "chain": None,
        "fixed-tree": f"fixed-tree:branching={BRANCHING[nodes]}",
        "specinfer": f"specinfer:expansion={BRANCHING[nodes]}",
        "k-chains": f"k-chains:{CHAINS[nodes]}",
        "sequoia": f"sequoia:nodes={nodes},acceptance={rates}",
        "eagle-2": f"eagle-2:nodes={nodes}",
        "dyspec": f"dyspec:nodes={nodes}",
        "dyspec, by level": f"dyspec:nodes={nodes},threshold={1 / nodes}",
        "rsd-c": f"rsd-c:branching={BRANCHING[nodes]}",
        "rsd-s": f"rsd-s:{BEAMS[nodes]}",
    }


class Bench:
    """The target, the prompts, and what the draft model is fed."""

    def __init__(self, drafter: TreeDrafter, every: int, tokens: int) -> None:
        self.lm = dc.load("smollm2")
        self.drafter = drafter
        self.tokens = tokens
        lines = (DATA / "spec_bench_dev.jsonl").read_text("utf-8").splitlines()
        self.prompts = [json.loads(line)["turns"][0] for line in lines][::every]

    def run(self, growth: str | None, nodes: int, temperature: str, rule: str) -> tuple[list[dc.Output], list[int]]:
        """One text per prompt, beginning with an empty memory, and the draft model's passes and rows."""
        self.lm.reset_memory()
        chain = {"tree_policy": None, "length": min(nodes, 16)}
        drafter = dataclasses.replace(self.drafter, **(chain if growth is None else {"tree_policy": growth}))
        settings = {
            "max_new_tokens": self.tokens,
            "temperature": float(temperature),
            "acceptance_rule": rule,
            "seed": 1,
        }
        with counted(drafter.auxiliary_models(self.lm.model)) as fed:
            outputs = [self.lm.generate(prompt, drafter=drafter, **settings) for prompt in self.prompts]
        return outputs, fed


def most_likely(models: Iterable[LanguageModel]) -> list[int]:
    """What tells one draft model from another: the token it finds most likely after each of the first 16."""
    batches = ((model, Batch([Segment.chunk(range(16), model.new_cache())])) for model in models)
    return [token for model, batch in batches for token in model.forward(batch).logits.argmax(dim=-1).tolist()]


@contextmanager
def counted(models: Iterable[LanguageModel]) -> Iterator[list[int]]:
    """Passes and rows of a draft model in the meantime, those that begin to read a prompt left out."""
    fed = [0, 0]
    model = next(iter(models), None)
    if model is None:
        yield fed
        return
    forward = model.forward

    def counting(batch: Batch, **settings: Any) -> Scores:
        cache = batch.segments[0].cache
        if cache is not None and cache.next_position > 0:
            fed[0] += 1
            fed[1] += batch.rows
        return forward(batch, **settings)

    model.forward = counting  # type: ignore[method-assign]
    try:
        yield fed
    finally:
        model.forward = forward  # type: ignore[method-assign]


def acceptance(bench: Bench, temperature: str, rule: str) -> list[float]:
    """How often the first, second, ... child of a node was the accepted one, of trees that are wide enough."""
    outputs, _ = bench.run(CALIBRATION, 12, temperature, rule)
    rates = acceptance_by_rank((out.trace for out in outputs), width=12)
    return [round(rate, 4) for rate in rates if rate >= 0.00005]


def figures(outputs: list[dc.Output], fed: list[int]) -> dict[str, float]:
    """tokens_per_pass: emitted by target pass, bonus included. acceptance: how often one of a visited node's children
    was accepted. used: share of the drafted nodes that became text. Draft passes and rows are per target pass."""
    steps = [step for out in outputs for step in out.trace.decoding]
    choices = [rank >= 0 for step in steps for rank, _ in step.choices]
    return {
        "tokens_per_pass": round(sum(step.emitted for step in steps) / len(steps), 3),
        "acceptance": round(sum(choices) / max(len(choices), 1), 3),
        "nodes": round(sum(step.nodes for step in steps) / len(steps), 2),
        "used": round(sum(step.accepted for step in steps) / max(sum(step.nodes for step in steps), 1), 3),
        "draft_passes": round(fed[0] / len(steps), 2),
        "draft_rows": round(fed[1] / len(steps), 2),
        "passes": len(steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter")
    parser.add_argument("--acceptance", action="store_true", help="measure acceptance by rank alone, and print it")
    parser.add_argument("--every", type=int, default=10, help="take every n-th question")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--nodes", default="8,16,32,64")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    bench = Bench(expanding(options.drafter, "this benchmark"), options.every, options.tokens)
    if options.acceptance:
        for temperature, rule in RUNS[:2]:
            print(temperature, rule, acceptance(bench, temperature, rule), flush=True)
        return
    path = options.out / f"growth-{re.sub(r'^.*=|[^a-z0-9]+$', '', options.drafter.lower()).replace('/', '-')}.json"
    settings = {
        "drafter": options.drafter,
        "every": options.every,
        "tokens": options.tokens,
        "most_likely": most_likely(bench.drafter.auxiliary_models(bench.lm.model)),
    }
    before = begun_result(path)
    same = before["settings"] == settings
    result = before if same else {"settings": settings, "summary": {"acceptance": {}}, "rows": {}}
    rates_of = result["summary"]["acceptance"]
    for temperature, rule in RUNS:
        name = f"{temperature} {rule}"
        if name not in rates_of and "sequoia" not in LEFT_OUT.get(rule, ()):
            rates_of[name] = acceptance(bench, temperature, rule)
        rates = "/".join(map(str, rates_of.get(name, ())))
        for nodes in map(int, options.nodes.split(",")):
            for policy, growth in policies(nodes, rates).items():
                if policy in LEFT_OUT.get(rule, ()):
                    continue
                found = result["rows"].setdefault(name, {}).setdefault(policy, {})
                if str(nodes) not in found:
                    found[str(nodes)] = figures(*bench.run(growth, nodes, temperature, rule))
                    write_result(path, result)
                    print(name, policy, nodes, found[str(nodes)], flush=True)


if __name__ == "__main__":
    main()
