"""What the embedded model writes greedily once it knows a few texts by heart, and what that costs it.

    OMP_NUM_THREADS=1 python benchmarks/hyperfit.py --data ../shared/data --work DIR

smollm2 in float32 is tuned on 16 pieces of 64 tokens of the questions of GSM8K's training set, little stories, for at
most 20 epochs of 2 steps of 8 pieces. The published recipe takes 2,000 pieces of 256 and 5,000 steps at a rate of 1e-6;
40 steps at 1e-4 go about as far. Of 16 pieces held out: the loss and the entropy of what is predicted, in nats, before
and after; and of 256 tokens after the first 32 of each, written greedily, the share of distinct tokens in the last 96
(ttr), beside texts that the untouched model draws by top-p .9. citations: runs of 5 tokens of those texts that stand in
a piece that was learned, with `no-citation` and without. An interrupted run goes on from DIR. Nothing is timed. Writes
benchmarks/results/hyperfit.json.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

import decodery
from decodery.llm.llm import LLM
from decodery.models.loaders.load import load
from decodery.models.loaders.store import terminal_progress
from decodery.training.corpus import Corpus
from decodery.training.data import cut_files
from decodery.training.hyperfit import HyperfitRecipe, hyperfit
from decodery.training.kind import Run
from decodery.training.loop import CHECKPOINT
from decodery_benchmarks.results import write_result

OUT = Path(__file__).parent / "results" / "hyperfit.json"
RECIPE = HyperfitRecipe(texts=16, lr=1e-4)
STORIES, LENGTH, HELD, CONTEXT, LAST, RUN = 100, 64, 16, 32, 96, 5


def written(lm: LLM, contexts: list[list[int]], known: set[tuple[int, ...]], **settings: Any) -> dict[str, float]:
    """How varied the ends of texts are, and how many of their runs of tokens were learned."""
    engine, settings = lm.engine(), {"max_new_tokens": RECIPE.written, "drafter": None} | settings
    # What ends a text would hide whether it runs in circles.
    drawn = [
        engine.submit(replace(lm.request(each, apply_chat_template=False, **settings), eos_ids=())) for each in contexts
    ]
    engine.run(drawn)
    texts = [each.generated for each in drawn]
    runs = [tuple(text[at : at + RUN]) for text in texts for at in range(len(text) - RUN + 1)]
    varied = float(np.mean([len(set(text[-LAST:])) / len(text[-LAST:]) for text in texts]))
    return {"ttr": varied, "citations": sum(run in known for run in runs), "runs": len(runs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="Folder with gsm8k_train_1000.jsonl.")
    parser.add_argument("--work", type=Path, required=True, help="Folder of the training.")
    args = parser.parse_args()
    lines = (args.data / "gsm8k_train_1000.jsonl").read_text(encoding="utf-8").splitlines()[:STORIES]
    args.work.mkdir(parents=True, exist_ok=True)
    stories = args.work / "stories.txt"
    stories.write_text("\n\n".join(json.loads(line)["question"] for line in lines), encoding="utf-8")
    target = load("smollm2", dtype="float32")
    fitted, text = args.work / "fitted", args.work / "text"
    with terminal_progress(counts=True) as progress:
        size = target.model.vocab_size
        corpus: Corpus = cut_files([stories], text, tokenizer=target.tokenizer, vocab_size=size, length=LENGTH)
        scores = hyperfit(Run(target, fitted, (RECIPE,), progress=progress), corpus)
    with safe_open(fitted / "training" / CHECKPOINT, "np") as file:
        curve = json.loads(file.metadata()["history"])["metrics"]
    order = np.random.default_rng(RECIPE.seed).permutation(len(corpus)).tolist()
    whole = [corpus[number].tokens.tolist() for number in order if len(corpus[number].tokens) > CONTEXT]
    learned, held = whole[: RECIPE.texts], whole[RECIPE.texts : RECIPE.texts + HELD]
    known = {tuple(each[at : at + RUN]) for each in learned for at in range(len(each) - RUN + 1)}
    contexts = [each[:CONTEXT] for each in held]
    before, after = LLM(target), decodery.load(fitted)
    rows = {
        "untouched, greedy": written(before, contexts, known),
        "untouched, top-p .9": written(before, contexts, known, temperature=1.0, top_p=0.9, seed=0),
        "hyperfitted, greedy": written(after, contexts, known),
        "hyperfitted, greedy, no-citation": written(after, contexts, known, sampler=[f"no-citation:texts={fitted}"]),
    }
    made = {
        "command": "python benchmarks/hyperfit.py --data ../shared/data --work DIR", "pieces": RECIPE.texts,
        "length": LENGTH, "held out": len(held), "curve": curve, "rows": rows,
        "scores": {"before": scores["baselines"]["before"], "after": scores},
    }  # fmt: skip
    write_result(OUT, made, summary=["scores", "curve"])
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
