"""What copies of a small model learn back of what their form takes, beside what rounding and pruning alone leave.

    OMP_NUM_THREADS=1 python benchmarks/copies.py [NAME ...]

The original is tiny-1M-chain. It writes 400 solutions, of which every twentieth is held out; copies
of it in another form learn from the others for 200 steps of 8 texts. Of each copy, on texts held out: cross-entropy
against the original in nats, acceptance, the mean of sum min(p, q), and agreement, the share of tokens that both find
most likely; on 12 other puzzles, greedily, tokens per pass of the original with the copy drafting four at a time. bits:
per weight of the linear layers, by the report's count. One seed. Nothing is timed.

Weights of one of eight values (jlcm) and Fisher weights (lq-lora) are found on 32 of the texts.

The copy of 2 bits is tuned, too, to say what the original says: S2FT (one head and 3 % of the channels of each layer)
and LoRA of rank 7 on the same matrices have about as many numbers to learn; those are not among the bits.

Ternary models from random weights ("scratch"): 2 layers, 300 steps of 16 puzzles, loss on solutions held out.

Writes benchmarks/results/copies.json; what is there already is not measured again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from decodery.compression.base import reported, transformed
from decodery.compression.lq_lora import LQLoRA
from decodery.core.registry import resolve
from decodery.llm.llm import LLM
from decodery.models.loaders.adapters import tuned
from decodery.models.torch.side_by_side import predicted
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Kept
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.training.adapter import LoRARemaking, S2FTRemaking, train_adapter
from decodery.training.bitnet import TernaryRemaking
from decodery.training.corpus import Corpus
from decodery.training.cut import parameters
from decodery.training.data import write_texts
from decodery.training.kind import Run
from decodery.training.loop import TrainingPlan, train
from decodery.training.lq_lora import LowRankRemaking
from decodery.training.nm_sparsity import SparseRemaking
from decodery.training.remade import CopyRecipe, Remade, Remaking, learn
from decodery.training.training_batch import judged, training_batch
from decodery_benchmarks import solvers
from decodery_benchmarks.puzzles.base import drawn
from decodery_benchmarks.puzzles.chain import Chain
from decodery_benchmarks.results import begun_result, write_result
from decodery_benchmarks.training.puzzle_model import TransformerShape, random_transformer
from decodery_benchmarks.training.puzzle_model import training_batch as puzzles_of

ROOT = Path(__file__).parents[1]
TEXTS, STEPS, BATCH, HELD, DRAFTED = 400, 200, 8, 12, 4
READ = 32
"""Texts that what is calibrated reads."""
UNTRAINED: dict[str, str] = {
    "2 bits in blocks of 32": "int4:bits=2",
    "ternary, median": "bitnet",
    "ternary, mean": "bitnet:measure=mean",
    "2:4": "nm-sparsity",
    "1:8": "nm-sparsity:n=1,m=8",
    "2 bits and rank 4": "lq-lora:bits=2,rank=4",
    "3 bits in blocks of 32": "int4:bits=3",
    "3 bits, normal": "lq-lora:rank=0",
    "3 bits and rank 4": "lq-lora:rank=4",
    "3 bits on average and rank 4": "lq-lora:rank=4,budget=3.28125",
    "3 bits on average and rank 4, fisher": "lq-lora:rank=4,budget=3.28125,fisher=true",
    "eight values, k-means": "jlcm:steps=0",
    "eight values, learned": "jlcm",
    "eight values, learned by the plain gradient": "jlcm:proximal=false",
}
TRAINED: dict[str, tuple[Remaking, float]] = {
    "ternary, median, trained": (TernaryRemaking(), 1e-3),
    "ternary, median, trained without a ramp": (TernaryRemaking(ramp=0.0), 1e-3),
    "ternary, mean, trained": (TernaryRemaking("mean"), 1e-3),
    "2:4, linear": (SparseRemaking(), 1e-3),
    "1:8, linear": (SparseRemaking(1, 8), 1e-3),
    "1:8, linear, straight": (SparseRemaking(1, 8, straight=True), 1e-3),
    "1:8, exponential": (SparseRemaking(1, 8, "exponential"), 1e-3),
    "1:8, structure": (SparseRemaking(1, 8, "structure"), 1e-3),
    "1:8, sr-ste": (SparseRemaking(1, 8, "sr-ste"), 1e-3),
    "2 bits and rank 4, trained": (LowRankRemaking(LQLoRA(bits=2, rank=4)), 1e-3),
}
ADAPTED = {
    "2 bits in blocks of 32, s2ft": ("int4:bits=2", "s2ft", 1e-3),
    "2 bits in blocks of 32, lora": ("int4:bits=2", "lora", 1e-3),
}
SCRATCH: dict[str, tuple[int, TernaryRemaking | None]] = {
    "floating point, width 64": (64, None),
    "ternary, median, width 64": (64, TernaryRemaking(ramp=0.0)),
    "ternary, mean, width 64": (64, TernaryRemaking("mean", ramp=0.0)),
    "ternary, median, width 128": (128, TernaryRemaking(ramp=0.0)),
}


class Bench:
    """The original, its texts, and what copies are judged by."""

    def __init__(self, folder: Path) -> None:
        self.lm: LLM = solvers.load("tiny-1M-chain")
        assert isinstance(self.lm.model, Transformer)
        self.model = self.lm.model
        self.loaded = solvers.load_model("tiny-1M-chain")
        prompts = [self.lm.encode(each, apply_chat_template=False) for each in islice(drawn(Chain(), "train"), TEXTS)]
        self.corpus: Corpus = write_texts(self.loaded, prompts, folder / "text", max_new_tokens=Chain().length, top=20)
        learned, held = self.corpus.split()
        self.read = [np.asarray(self.corpus[number].tokens) for number in learned[:READ]]
        every = np.arange(self.model.vocab_size)
        ids = torch.from_numpy(every)
        self.held = training_batch([self.corpus[number] for number in held], Kept(ids, ids), every)
        self.prompts = list(islice(drawn(Chain(), "test"), HELD))

    def judged(self, copy: Transformer) -> dict[str, float]:
        drafter = DraftModel(copy, length=DRAFTED)
        found = self.lm.generate(
            self.prompts, apply_chat_template=False, drafter=drafter, max_new_tokens=Chain().length
        )
        passes = sum(each.trace.tokens for each in found) / sum(each.trace.passes for each in found)
        return judged(copy, self.held) | {"tokens per pass": passes}

    def untrained(self, spec: str) -> dict[str, Any]:
        transform = resolve("compression", spec)
        copy, report = transformed(self.model, [transform], self.read if transform.reads else [])
        return {"bits": report.bits, **self.judged(copy)}

    def trained(self, remaking: Remaking, lr: float, folder: Path) -> dict[str, Any]:
        remade, recipe = Remade(self.model, remaking), CopyRecipe(STEPS, BATCH, lr)
        learn(remade, self.loaded, self.corpus, folder, remaking, recipe, lambda *_: None)
        change = remade.change()
        return {"bits": reported(self.model, [("", change)]).bits, **self.judged(change.model)}

    def adapted(self, spec: str, kind: str, lr: float, folder: Path) -> dict[str, Any]:
        copy, report = transformed(self.model, [resolve("compression", spec)])
        loaded = replace(self.loaded, model=copy)
        tuning = S2FTRemaking(copy.config) if kind == "s2ft" else LoRARemaking(7, layers=("output", "down"))
        found = train_adapter(Run(loaded, folder, (CopyRecipe(STEPS, BATCH, lr),)), self.corpus, tuning)
        about = {"bits": report.bits, "tuned": found.facts["parameters"]}
        return about | self.judged(tuned(copy, found))


def scratch(width: int, remaking: TernaryRemaking | None, folder: Path) -> dict[str, Any]:
    """Loss on solutions held out."""
    model = random_transformer(TransformerShape(width, 2, 4, 2 * width, 256), 0)
    if remaking is None:
        learning = parameters(model)
    else:
        # The shadows of the linear layers learn, beside the table of embedding and head.
        remade = Remade(model, remaking)
        model = remade.model
        learning = {"embedding": model.weights.embedding.requires_grad_(True), **remade.parameters}

    def loss(step: int) -> torch.Tensor:
        tokens, taught = puzzles_of(Chain(), 16, step, 0)
        logits = predicted(model, tokens[:, :-1])
        return cross_entropy(logits.flatten(0, 1), taught[:, 1:].flatten(), ignore_index=-1)

    def validate() -> dict[str, float]:
        with torch.no_grad():
            return {"loss": float(sum(loss(10**6 + step) for step in range(4)) / 4)}

    plan = TrainingPlan(300, lr=2e-3, weight_decay=0.0, validate_every=100)
    return {"loss": train(learning, loss, plan, folder, validate=validate, metric="loss").best}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="rows to measure; all of them where none is named")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "copies.json")
    parser.add_argument(
        "--work", type=Path, help="where trainings are kept, to go on from; a folder of its own if none"
    )
    args = parser.parse_args()
    results = begun_result(args.out)
    results |= {"command": "python benchmarks/copies.py", "texts": TEXTS, "steps": STEPS}
    with TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        bench = Bench(work)
        every = [*UNTRAINED, *TRAINED, *ADAPTED, *SCRATCH]
        for name in args.names or every:
            known = results["summary"].setdefault("scratch", {}) if name in SCRATCH else results["rows"]
            if name in known:
                continue
            folder = work / str(every.index(name))
            if name in UNTRAINED:
                row = bench.untrained(UNTRAINED[name])
            elif name in TRAINED:
                row = bench.trained(*TRAINED[name], folder)
            elif name in ADAPTED:
                row = bench.adapted(*ADAPTED[name], folder)
            else:
                row = scratch(*SCRATCH[name], folder)
            known[name] = row
            write_result(args.out, results)
            shutil.rmtree(folder, ignore_errors=True)
            print(name, json.dumps(row), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
