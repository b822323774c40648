"""Tokens per pass and rows per token of the drafters with stores, as their papers' claims ask for them.

    python benchmarks/draft/figures.py [GROUP ...] [--every 6] [--tokens 64] [--out benchmarks/results]

Prompts come from Spec-Bench (DECODERY_DATA), the model is the embedded one at its own precision. Nothing is timed, so
that the machine's load does not matter. Every group writes draft-GROUP.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import decodery as dc
from decodery.speculative.drafters import router
from decodery.speculative.drafters.aded import ADED
from decodery.speculative.drafters.copyspec import CopySpec
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.speculative.drafters.rest import REST
from decodery.speculative.drafters.stand import STAND
from decodery.speculative.drafters.suffix_automaton import SuffixAutomaton
from decodery.speculative.drafters.suffix_tree import SuffixTree
from decodery.speculative.drafters.token_recycling import TokenRecycling
from decodery.step.drafter import Drafter
from decodery.training.datastore import build_datastore

sys.path.insert(0, str(Path(__file__).parents[1]))
from decodery_benchmarks.results import write_result

DATA = Path(os.environ.get("DECODERY_DATA", Path(__file__).parents[3] / "shared" / "data"))
GROUNDED = {"summarization", "rag", "translation"}


class Bench:
    """One loaded model and the prompts."""

    def __init__(self, every: int, tokens: int) -> None:
        self.lm = dc.load("smollm2")
        self.tokens = tokens
        lines = (DATA / "spec_bench_dev.jsonl").read_text("utf-8").splitlines()
        self.questions = [json.loads(line) for line in lines][::every]

    def run(self, drafter: Drafter, prompts: Iterable[Any], **settings: Any) -> list[dc.Output]:
        """One text per prompt, one after another, with the memory as it is."""
        settings = {"max_new_tokens": self.tokens, "seed": 1, **settings}
        return [self.lm.generate(prompt, drafter=drafter, **settings) for prompt in prompts]

    def fresh(self, drafter: Drafter, **settings: Any) -> dict[str, Any]:
        """All questions, beginning with an empty memory."""
        self.lm.reset_memory()
        return self.again(drafter, **settings)

    def again(self, drafter: Drafter, **settings: Any) -> dict[str, Any]:
        """All questions, remembering what was learned before."""
        outputs = self.run(drafter, (question["turns"][0] for question in self.questions), **settings)
        grounded = [question["category"] in GROUNDED for question in self.questions]
        parts = {
            "grounded": figures(out for out, is_grounded in zip(outputs, grounded, strict=True) if is_grounded),
            "open": figures(out for out, is_grounded in zip(outputs, grounded, strict=True) if not is_grounded),
        }
        return {**figures(outputs), **parts}


def figures(outputs: Iterable[dc.Output]) -> dict[str, float]:
    traces = [out.trace for out in outputs]
    passes, tokens = sum(trace.passes for trace in traces), sum(trace.tokens for trace in traces)
    rows = sum(trace.rows for trace in traces)
    return {"tokens_per_pass": round(tokens / passes, 3), "rows_per_token": round(rows / tokens, 2), "passes": passes}


def overview(bench: Bench) -> dict[str, Any]:
    """Every drafter with its published defaults within the engine's 64 nodes, greedy and sampled."""
    drafters: dict[str, Drafter] = {
        "prompt-lookup": PromptLookup(),
        "token-recycling": TokenRecycling(),
        "token-recycling:nodes=16": TokenRecycling(nodes=16),
        "aded": ADED(),
        "stand:scope=process": STAND(scope="process"),
        "copyspec": CopySpec(),
        "suffix-automaton": SuffixAutomaton(),
        "suffix-tree": SuffixTree(),
        "switch(suffix-automaton, token-recycling:nodes=16)": router(SuffixAutomaton(), TokenRecycling(nodes=16)),
    }
    found: dict[str, Any] = {}
    for name, drafter in drafters.items():
        found[name] = {str(t): bench.fresh(drafter, temperature=t) for t in (0.0, 0.7)}
        print(name, found[name]["0.0"], flush=True)
    return found


def token_recycling(bench: Bench) -> dict[str, Any]:
    """Budgets; a memory that begins empty or warm, with the prompt's rows and without."""
    budgets = {nodes: bench.fresh(TokenRecycling(nodes=nodes)) for nodes in (8, 16, 32, 60)}
    starts: dict[str, Any] = {}
    for seeded in (False, True):
        drafter = TokenRecycling(nodes=16, seed_from_prompt=seeded)
        each = bench.fresh(TokenRecycling(nodes=16, seed_from_prompt=seeded, scope="request"))
        starts["prompt rows" if seeded else "no prompt rows"] = {
            "every request anew": each,
            "first time": bench.fresh(drafter),
            "second time": bench.again(drafter),
        }
    return {"nodes": budgets, "memory": starts}


def copyspec(bench: Bench) -> dict[str, Any]:
    """How many tokens must match; the second turn of a chat, which often revises the first."""
    gammas = {gamma: bench.fresh(CopySpec(gamma=gamma)) for gamma in (2, 3, 5)}
    first, second = [], []
    for question in bench.questions:
        if len(question["turns"]) < 2:
            continue
        chat = [{"role": "user", "content": question["turns"][0]}]
        first += bench.run(CopySpec(), [chat])
        chat += [{"role": "assistant", "content": first[-1].text}]
        second += bench.run(CopySpec(), [[*chat, {"role": "user", "content": question["turns"][1]}]])
    return {"gamma": gammas, "turn 1": figures(first), "turn 2": figures(second)}


def suffix(bench: Bench) -> dict[str, Any]:
    """Against prompt lookup with the same cap; a family of requests, the first against the tenth."""
    capped = {
        "prompt-lookup": bench.fresh(PromptLookup(length=10)),
        "suffix-automaton": bench.fresh(SuffixAutomaton(length=10)),
        "suffix-tree": bench.fresh(SuffixTree(nodes=10)),
    }
    bench.lm.reset_memory()
    family = [
        f"List three facts about the number {number} as JSON with the keys a, b and c." for number in range(20, 30)
    ]
    runs = bench.run(SuffixTree(), family)
    return {"cap 10": capped, "family": [figures([run])["tokens_per_pass"] for run in runs]}


def trajectories(bench: Bench) -> dict[str, Any]:
    """Eight sampled texts per prompt: how much the later ones gain from the first."""
    found: dict[str, Any] = {}
    prompts = [question["turns"][0] for question in bench.questions][::4]
    for name, drafter in {"stand": STAND(), "token-recycling": TokenRecycling(scope="problem")}.items():
        bench.lm.reset_memory()
        runs = [bench.run(drafter, prompts, temperature=0.7, seed=seed) for seed in range(8)]
        found[name] = [figures(run)["tokens_per_pass"] for run in runs]
    return found


def datastores(bench: Bench) -> dict[str, Any]:
    """A datastore of GSM8K solutions, for mathematical questions and for all others."""
    rows = [json.loads(line) for line in (DATA / "gsm8k_train_1000.jsonl").read_text("utf-8").splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "gsm8k.txt"
        text.write_text("\n".join(f"{row['question']}\n{row['answer']}" for row in rows), "utf-8")
        store = Path(folder) / "store"
        vocab = bench.lm.model.vocab_size
        size = build_datastore([text], store, tokenizer=bench.lm.tokenizer, vocab_size=vocab)
        drafters: dict[str, Drafter] = {
            "rest": REST(str(store)),
            "suffix-automaton": SuffixAutomaton(),
            "suffix-automaton with datastore": SuffixAutomaton(datastore=str(store)),
            "aded": ADED(),
            **{f"aded with datastore, {n} simulations": ADED(str(store), simulations=n) for n in (20, 50, 150)},
        }
        found: dict[str, Any] = {"tokens": size}
        for name, drafter in drafters.items():
            found[name] = {}
            for domain in (True, False):
                bench.lm.reset_memory()
                chosen = [q["turns"][0] for q in bench.questions if (q["category"] == "math_reasoning") == domain]
                found[name]["math" if domain else "other"] = figures(bench.run(drafter, chosen))
    return found


GROUPS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "overview": overview,
    "token-recycling": token_recycling,
    "copyspec": copyspec,
    "suffix": suffix,
    "trajectories": trajectories,
    "datastores": datastores,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("groups", nargs="*", choices=[[], *GROUPS], metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--every", type=int, default=6, help="take every so many questions")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    options = parser.parse_args()
    bench = Bench(options.every, options.tokens)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.groups or GROUPS:
        settings = {"questions": len(bench.questions), "every": options.every, "new_tokens": options.tokens}
        found = GROUPS[name](bench)
        about = {"settings": settings, "about": GROUPS[name].__doc__}
        write_result(options.out / f"draft-{name}.json", about, figures=found)
        print(name, json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
