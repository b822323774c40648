"""Train a small head of every kind for the embedded model, a minute or so each, for heads.py to time.

    OMP_NUM_THREADS=1 python benchmarks/draft/small_heads.py --work DIR [NAME ...] [--texts 96] [--new 64] [--epochs 4]

NAMEs: kinds of heads, and swift, by default all of them. The model writes the texts once; heads learn from them
`epochs` times and speak 2048 tokens, and swift tries 40 sets of sublayers. What is finished is left as it is; what was
interrupted goes on. Processor seconds of every training, its reading of the texts included, are kept beside it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from time import process_time

from decodery.models.loaders.load import LoadedModel, load
from decodery.models.loaders.store import Progress, terminal_progress
from decodery.speculative.heads.drafter import head_named
from decodery.training.corpus import Corpus
from decodery.training.data import built_in_prompts, write_texts
from decodery.training.head import TOP, HeadRecipe, train_head
from decodery.training.kind import Run
from decodery.training.swift import SkipRecipe, find_skips

NAMES = (
    "swift", "medusa", "hydra", "eagle-3", "kangaroo", "clover", "eagle", "fspad", "chimera", "falcon", "longspec",
)  # fmt: skip
SECONDS = "seconds.json"


def spec(work: Path, name: str) -> str:
    """How a drafter is named that uses what was trained, for chains of three tokens."""
    setting = "skip" if name == "swift" else "head"
    return f"{name}:{setting}={work / name},{'' if name == 'kangaroo' else 'tree_policy=none,'}length=3"


def ready(work: Path) -> list[str]:
    """The names of what is finished."""
    return [name for name in NAMES if (work / name / SECONDS).is_file()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", choices=[[], *NAMES], metavar="NAME")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=96)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--epochs", type=float, default=4.0)
    options = parser.parse_args()
    target = load("smollm2")

    def make(name: str, texts: Corpus, out: Path, progress: Progress) -> None:
        if name == "swift":
            find_skips(Run(target, out, (SkipRecipe(proposals=40, read=8),), progress=progress), texts)
        else:
            kind, shape = head_named(name)
            recipe = HeadRecipe(outputs=2048, epochs=options.epochs, lr=1e-3)
            train_head(Run(target, out, (recipe,), progress=progress), kind, texts, shape=shape)

    with terminal_progress(counts=True) as progress:
        texts = corpus(target, options.work, options.texts, options.new, progress)
        for name in options.names or NAMES:
            if name not in ready(options.work):
                timed(options.work / name, lambda out, name=name: make(name, texts, out, progress))
            print(f"{name} is ready", flush=True)


def corpus(target: LoadedModel, work: Path, count: int, new: int, progress: Progress) -> Corpus:
    prompts = built_in_prompts(target, count)
    return write_texts(target, prompts, work / "texts", max_new_tokens=new, top=TOP, progress=progress)


def timed(out: Path, make: Callable[[Path], None]) -> None:
    """Note what making something took, all runs that it was made in together."""
    path, begin = out / SECONDS, process_time()
    before = json.loads(path.read_text("utf-8")) if path.is_file() else 0.0
    try:
        make(out)
    finally:
        if out.is_dir():
            path.write_text(json.dumps(before + process_time() - begin), "utf-8")


if __name__ == "__main__":
    main()
