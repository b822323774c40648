"""All drafters that change the order of drafting, beside draft-model and plain decoding, on one pair after another.

    OMP_NUM_THREADS=1 python benchmarks/draft/joint.py --work DIR [PAIR ...] [--questions 4] [--new 32] [--timed]

PAIR: `smollm2-int8` and `smollm2-int4`, the embedded model and the draft that comes with it, on questions of Spec-Bench
(DECODERY_DATA) of up to 400 characters; `chain`, the solver of chained sums that comes along; `hybrid`, a model with
a Mamba-2 layer, and `sharing`, one whose Mamba-2 layers share a block as Zamba2's do, all with what
benchmarks/draft/small.py has trained in DIR, on sums nobody has learned from. A drafter whose model is not in DIR is
left out: DIR/smollm2-nested and DIR/smollm2-deer are those of `decodery train nested` and `decodery train deer` for
smollm2. Every drafter decodes greedily, and at temperature 1 under the rule `rejection`.

Counts: tokens per pass of the target, its rows per pass, passes of the draft model per token, and the share of drafts
accepted; greedily, how many texts are plain decoding's. --timed adds milliseconds per token, texts one at a time, the
best of two rounds: to be run on a machine that does nothing else. What a draft's pass takes is steps.py's to say.
Writes benchmarks/results/draft-joint.json after every drafter; what is there is not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import small

import decodery
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.loaders.load import load
from decodery.models.protocol import LanguageModel
from decodery.models.torch.transformer import Transformer
from decodery.sampling import Sampler
from decodery.speculative.drafters.deer import Deer
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.drafters.easyspec import EasySpec
from decodery.speculative.drafters.hierarchical import Hierarchical
from decodery.speculative.drafters.nested import Nested
from decodery.speculative.drafters.ngram import NGram
from decodery.speculative.drafters.pearl import Pearl
from decodery.step.drafter import Drafter
from decodery.step.sequence import Sequence

sys.path.insert(0, str(Path(__file__).parents[1]))
from decodery_benchmarks import solvers
from decodery_benchmarks.puzzles import drawn
from decodery_benchmarks.puzzles.alphabet import encoded
from decodery_benchmarks.results import begun_result, write_result

RESULTS = Path(__file__).parents[1] / "results" / "draft-joint.json"
DATA = Path(os.environ.get("DECODERY_DATA", Path(__file__).parents[3] / "shared" / "data"))
NGRAMS = NGram(tree_policy="eagle-2(nodes=30,width=10,depth=3)", scope="request")
LAWS = {"greedy": (0.0, "coupled"), "temperature 1": (1.0, "rejection")}

Drafters = dict[str, Drafter | None]
Pair = tuple[LanguageModel, list[list[int]], Drafters]


def orders(draft: LanguageModel | str, deep: LanguageModel | str | None, work: Path, prefix: str = "") -> Drafters:
    """draft: what drafts by itself; deep: one of several layers, for those that change how layers are gone through."""
    found: Drafters = {
        "plain": None,
        "draft-model, 4": DraftModel(draft, length=4),
        "draft-model, tree of 12": DraftModel(draft, tree_policy="eagle-2(nodes=12,width=4,depth=4)"),
        "pearl, 4": Pearl(draft, length=4),
        "hierarchical, 6": Hierarchical(DraftModel(draft), NGRAMS, length=6),
    }
    if deep is not None:
        found["draft-model of several layers, 4"] = DraftModel(deep, length=4)
        found["easyspec of the same, 2 layers at a time, 4"] = EasySpec(deep, layers=2, length=4)
    if (work / f"{prefix}nested" / "model.json").is_file():
        found["nested, 4"] = Nested(str(work / f"{prefix}nested"), sure=(0.6,), length=4)
    if (work / f"{prefix}nested-last" / "model.json").is_file():
        for leave in small.EXITS:
            for name, how in (("nested", "learned as well"), ("nested-last", "learned after the last alone")):
                model = exiting(str(work / f"{prefix}{name}"))
                found[f"nested, left after {leave} of 3 layers, {how}, 4"] = Nested(model, exits=(leave,), length=4)
    if (folder := work / f"{prefix}deer" / "model.json").is_file():
        name = str(folder.parent)
        found["draft-model by the network of deer, 4"] = DraftModel(name, length=4)
        found["draft-model by the network of deer, 8"] = DraftModel(name, length=8)
        found["deer, 4"] = Deer(name, length=4)
        found["deer, 8"] = Deer(name, length=8)
        found["deer, 8, leftovers drafted again"] = Deer(name, length=8, reuse=True)
    if (folder := work / f"{prefix}deer-first" / "model.json").is_file():
        found["deer of the first stage alone, 8"] = Deer(str(folder.parent), length=8)
    return found


def exiting(folder: str) -> Transformer:
    """A draft that can be left after each of its layers, whether that was learned or not."""
    model = load(folder).model
    assert isinstance(model, Transformer)
    return Transformer(replace(model.config, exits=small.EXITS), model.weights)


def smollm2(dtype: str, options: argparse.Namespace) -> Pair:
    lm = decodery.load("smollm2", dtype=dtype)
    lines = (DATA / "spec_bench_dev.jsonl").read_text("utf-8").splitlines()
    short = [text for line in lines if len(text := json.loads(line)["turns"][0]) <= 400]
    prompts = [lm.encode(text) for text in short[:: len(short) // options.questions][: options.questions]]
    deep = options.work / "smollm2-nested"
    found = orders("smollm2-draft", str(deep) if (deep / "model.json").is_file() else None, options.work, "smollm2-")
    return lm.model, prompts, found


def sums(count: int) -> list[list[int]]:
    return [encoded(prompt) for prompt in islice(drawn(small.PUZZLE, "test"), count)]


def chain(options: argparse.Namespace) -> Pair:
    target, clone = solvers.load_model(small.TARGET).model, solvers.load_model(small.TARGET).model
    return target, sums(4 * options.questions), orders(str(options.work / "draft"), clone, options.work)


def hybrid(options: argparse.Namespace, name: str = "hybrid") -> Pair:
    """Trees against chains of as many nodes and of as many levels."""
    target, draft = (small.pair(options.work, name) for name in (name, "recurrent"))
    found: Drafters = {"plain": None}
    found |= {f"chain of {length}": DraftModel(draft, length=length) for length in (4, 12)}
    found["tree of 12, 3 wide, 4 deep"] = DraftModel(draft, tree_policy="eagle-2(nodes=12,width=3,depth=4)")
    return target, sums(4 * options.questions), found


PAIRS: dict[str, Callable[[argparse.Namespace], Pair]] = {
    "smollm2-int8": lambda options: smollm2("int8", options),
    "smollm2-int4": lambda options: smollm2("int4", options),
    "chain": chain,
    "hybrid": hybrid,
    "sharing": partial(hybrid, name="sharing"),
}


def requests(prompts: list[list[int]], drafter: Drafter | None, law: str, new: int) -> list[Request]:
    temperature, rule = LAWS[law]
    sampler = Sampler.from_settings(temperature=temperature)
    return [
        Request(prompt, sampler=sampler, drafter=drafter, acceptance_rule=rule, max_new_tokens=new, seed=number)
        for number, prompt in enumerate(prompts)
    ]


def written(
    model: LanguageModel, prompts: list[list[int]], drafter: Drafter | None, law: str, new: int
) -> list[Sequence]:
    engine = Engine(model)
    seqs = [engine.submit(request) for request in requests(prompts, drafter, law, new)]
    engine.run(seqs)
    return seqs


def counted(model: LanguageModel, prompts: list[list[int]], drafter: Drafter | None, law: str, new: int) -> Any:
    seqs = written(model, prompts, drafter, law, new)
    steps = [step for seq in seqs for step in seq.trace.decoding]
    tokens, nodes = sum(step.emitted for step in steps), sum(step.nodes for step in steps)
    drafts = sum(seq.trace.ledger.passes.get("draft", 0) for seq in seqs)
    found: dict[str, Any] = {
        "tokens_per_pass": round(tokens / len(steps), 3),
        "rows_per_pass": round(sum(step.rows for step in steps) / len(steps), 2),
        "draft_passes_per_token": round(drafts / tokens, 3),
        "drafts_accepted": round(sum(step.accepted for step in steps) / nodes, 4) if nodes else None,
    }
    if law == "greedy" and drafter is not None:
        plain = written(model, prompts, None, law, new)
        found["texts_as_plain"] = sum(seq.tokens == own.tokens for seq, own in zip(seqs, plain, strict=True))
    if nodes and getattr(drafter, "tree_policy", None) is None:
        # How often a chain's token at a depth was right where all before it were, for as deep as there are enough.
        depths = range(1, 9)
        reached = [sum(step.nodes >= depth and step.accepted >= depth - 1 for step in steps) for depth in depths]
        right = [sum(step.accepted >= depth for step in steps) for depth in depths]
        found["right_by_depth"] = [round(a / b, 3) for a, b in zip(right, reached, strict=True) if b >= 20]
    return found


def timed(model: LanguageModel, prompts: list[list[int]], drafter: Drafter | None, law: str, new: int) -> float:
    best = float("inf")
    for _ in range(2):
        tokens, begin = 0, perf_counter()
        for request in requests(prompts, drafter, law, new):
            engine = Engine(model)
            seq = engine.submit(request)
            engine.run([seq])
            tokens += len(seq.generated)
        best = min(best, (perf_counter() - begin) / tokens)
    return round(1e3 * best, 3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("pairs", nargs="*", choices=[[], *PAIRS], metavar="PAIR", help=", ".join(PAIRS))
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=4)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--timed", action="store_true")
    options = parser.parse_args()
    found: dict[str, Any] = begun_result(RESULTS)
    for name in options.pairs or PAIRS:
        model, prompts, drafters = PAIRS[name](options)
        new = 64 if name in ("chain", "hybrid", "sharing") else options.new
        own = found["rows"].setdefault(name, {})
        about = {"prompts": len(prompts), "new_tokens": new}
        if own.get("about", about) != about:
            sys.exit(f"{RESULTS} has other questions of {name}: repeat their settings, or remove that part")
        own["about"] = about
        for law in LAWS:
            for each, drafter in drafters.items():
                row = own.setdefault(law, {}).setdefault(each, {})
                if "tokens_per_pass" not in row:
                    row |= counted(model, prompts, drafter, law, new)
                if options.timed and "milliseconds_per_token" not in row:
                    row["milliseconds_per_token"] = timed(model, prompts, drafter, law, new)
                found["command"] = f"OMP_NUM_THREADS=1 {shlex.join(['python', *sys.argv])}"
                write_result(RESULTS, found)
                print(name, law, each, json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
