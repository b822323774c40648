"""What drafting in other orders brings on the embedded model: levels, layers side by side, nested depths, blocks.

    OMP_NUM_THREADS=1 python benchmarks/draft/orders.py [GROUP ...] [--questions 8] [--new 48] [--nested DIR]
        [--deer DIR] [--texts DIR] [--epochs 0.6]

Prompts are questions of Spec-Bench (DECODERY_DATA) of up to 400 characters, evenly spread, decoded greedily as one
batch. Nothing is timed. Of every drafter: tokens per pass of the target; passes and rows of the draft model per pass of
the target; of what was drafted, the share that became text, and of texts of 96 tokens and more the same by 32 places
each, where a cache that goes wrong little by little would show. nested, deer: folders of `decodery train nested` and
`decodery train deer`; where there is none, one is trained for `epochs` on texts that the model has written for another
part, as `decodery train head` leaves them. Every group writes benchmarks/results/draft-orders-GROUP.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import decodery
from decodery.llm.llm import LLM, Output
from decodery.models.loaders.drafts import DESCRIPTION
from decodery.models.loaders.load import load
from decodery.models.loaders.store import terminal_progress
from decodery.speculative.drafters.deer import Deer
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.drafters.easyspec import EasySpec
from decodery.speculative.drafters.hierarchical import Hierarchical
from decodery.speculative.drafters.nested import Nested
from decodery.step.drafter import Drafter
from decodery.training.corpus import Corpus
from decodery.training.cut import DraftShape
from decodery.training.deer import DeerRecipe, train_deer
from decodery.training.draft import train_draft
from decodery.training.kind import Run

sys.path.insert(0, str(Path(__file__).parents[1]))
from decodery_benchmarks.results import write_result

EXITS = (1, 2, 4)
RESULTS = Path(__file__).parents[1] / "results"
DATA = Path(os.environ.get("DECODERY_DATA", Path(__file__).parents[3] / "shared" / "data"))


def hierarchical(options: argparse.Namespace) -> dict[str, Any]:
    """N-grams draft for the shipped draft model, which drafts for the target in 4 bits."""
    target, chain = decodery.load("smollm2", dtype="int4"), "ngram:length=3"
    drafters: dict[str, Drafter] = {}
    for length in (4, 6):
        drafters[f"draft-model, length {length}"] = DraftModel(length=length)
        drafters[f"hierarchical, length {length}"] = Hierarchical(length=length)
        drafters[f"hierarchical, length {length}, n-gram chains of 3"] = Hierarchical(inner=chain, length=length)
    return measured(target, drafters, options)


def easyspec(options: argparse.Namespace) -> dict[str, Any]:
    """The target drafts for itself, several of its layers at a time, so that every wrong draft is theirs."""
    target, clone = decodery.load("smollm2", dtype="int8"), decodery.load("smollm2", dtype="int8")
    drafters: dict[str, Drafter] = {}
    middle = target.model.config.num_layers - 2
    for layers in (1, 2, 3, 4, 6, middle):
        for calibrate in (True, False)[: 1 if layers in (1, middle) else 2]:
            name = f"{layers} layers at a time{'' if calibrate else ', not calibrated'}"
            drafters[name] = EasySpec(clone.model, layers=layers, calibrate=calibrate, length=4)
    return measured(target, drafters, options)


def nested(options: argparse.Namespace) -> dict[str, Any]:
    """One draft with exits: each of them alone, and one chosen per token."""
    target, folder = decodery.load("smollm2", dtype="int8"), str(options.nested)
    if not options.nested.exists():
        train(options)
    exits = decodery.load(folder).model.config.exits
    drafters: dict[str, Drafter] = {f"{leave} layers": Nested(folder, exits=(leave,)) for leave in exits}
    for sure in (0.4, 0.6, 0.8):
        drafters[f"as many as it takes to be {sure} sure"] = Nested(folder, sure=(sure,))
    corpus = Corpus(options.texts)
    made = f"trained for {options.epochs:g} epochs on {len(corpus)} texts of the model's own"
    return {"trained": made, **measured(target, drafters, options)}


def train(options: argparse.Namespace) -> None:
    """What `decodery train nested` does after writing texts, with texts that are there."""
    loaded, corpus = load("smollm2", dtype="int8"), Corpus(options.texts)
    shape = DraftShape(max(EXITS), 768, exits=EXITS)
    with terminal_progress() as progress:
        train_draft(loaded, corpus, options.nested, shape=shape, epochs=options.epochs, progress=progress)


def deer(options: argparse.Namespace) -> dict[str, Any]:
    """Blocks in one pass, and the same network as a draft model, which takes a pass for every token."""
    target, folder = decodery.load("smollm2", dtype="int8"), str(options.deer)
    corpus, parts = Corpus(options.texts), DeerRecipe(epochs=0.75 * options.epochs, refining=0.25 * options.epochs)
    if not (options.deer / DESCRIPTION).is_file():
        with terminal_progress() as progress:
            shape = DraftShape(2, tokens=3072)
            train_deer(
                Run(load("smollm2", dtype="int8"), options.deer, (parts,), progress=progress), corpus, shape=shape
            )
    drafters: dict[str, Drafter] = {"the same network, token by token, 4": DraftModel(folder, length=4)}
    for length in (4, 8):
        for reuse in (False, True):
            name = f"blocks of {length}{', leftovers drafted again' if reuse else ''}"
            drafters[name] = Deer(folder, length=length, reuse=reuse)
    made = f"trained for {options.epochs:g} epochs on {len(corpus)} texts of the model's own"
    return {"trained": made, **measured(target, drafters, options)}


GROUPS = {each.__name__: each for each in (hierarchical, easyspec, nested, deer)}


def measured(lm: LLM, drafters: dict[str, Drafter], options: argparse.Namespace) -> dict[str, Any]:
    lines = (DATA / "spec_bench_dev.jsonl").read_text("utf-8").splitlines()
    short = [text for line in lines if len(text := json.loads(line)["turns"][0]) <= 400]
    prompts = short[:: len(short) // options.questions][: options.questions]
    plain = [output.tokens for output in lm.generate(prompts, max_new_tokens=options.new, drafter=None)]
    found: dict[str, Any] = {}
    for name, drafter in drafters.items():
        lm.reset_memory()
        outputs = lm.generate(prompts, max_new_tokens=options.new, drafter=drafter)
        steps = [step for output in outputs for step in output.trace.decoding]
        ledgers = [output.trace.ledger for output in outputs]
        counts = [ledger.counts for ledger in ledgers]
        layers, tokens = sum(each.get("draft layers", 0) for each in counts), sum(step.emitted for step in steps)
        found[name] = {
            "tokens_per_pass": round(tokens / len(steps), 3),
            "draft_passes_per_pass": round(sum(ledger.passes["draft"] for ledger in ledgers) / len(steps), 3),
            "drafted_per_pass": round(sum(step.nodes for step in steps) / len(steps), 3),
            "drafts_accepted": round(sum(step.accepted for step in steps) / sum(step.nodes for step in steps), 4),
            **({"accepted_by_32": by_place(outputs, 32)} if options.new >= 96 else {}),
            **({"draft_layers_per_token": round(layers / tokens, 2)} if layers else {}),
            "texts_as_plain": sum(output.tokens == text for output, text in zip(outputs, plain, strict=True)),
        }
        print(name, json.dumps(found[name]), flush=True)
    return {"prompts": len(prompts), "rows": found}


def by_place(outputs: list[Output], width: int) -> list[float]:
    """The share of drafts accepted that began among the first `width` tokens of a text, the next, ..."""
    found: dict[int, tuple[int, int]] = {}
    for output in outputs:
        place = 0
        for step in output.trace.decoding:
            accepted, nodes = found.get(place // width, (0, 0))
            found[place // width] = (accepted + step.accepted, nodes + step.nodes)
            place += step.emitted
    return [round(accepted / nodes, 4) for _, (accepted, nodes) in sorted(found.items()) if nodes]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("groups", nargs="*", choices=[[], *GROUPS], metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--nested", type=Path, default=Path("nested-draft"))
    parser.add_argument("--deer", type=Path, default=Path("deer-draft"))
    parser.add_argument("--texts", type=Path, default=Path("texts"))
    parser.add_argument("--epochs", type=float, default=0.6)
    options = parser.parse_args()
    command = f"OMP_NUM_THREADS=1 {shlex.join(['python', *sys.argv])}"
    for name in options.groups or GROUPS:
        about = {"command": command, "about": GROUPS[name].__doc__, "new_tokens": options.new}
        found = {**about, **GROUPS[name](options)}
        path = RESULTS / f"draft-orders-{name}.json"
        write_result(path, found)


if __name__ == "__main__":
    main()
