"""Train a small part for every head and self-speculator of the embedded model, minutes each, for heads.py to time.

    OMP_NUM_THREADS=1 python benchmarks/draft/small_heads.py --work DIR [NAME ...] [--texts 96] [--new 64] [--epochs 4]
        [--steps 40]

NAMEs: kinds of heads, ppd, hidden-transfer and swift, by default all of them. The model writes the texts once; heads
learn from them `epochs` times and speak 2048 tokens, ppd and hidden-transfer take `steps` steps of one text, and swift
tries 40 sets of sublayers. What is finished is left as it is; what was interrupted goes on. Processor seconds of every
training, its reading of the texts included, are kept beside it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from time import process_time

from decodery.draft.heads.drafter import head_named
from decodery.model.load import LoadedModel, load
from decodery.model.protocol import LanguageModel
from decodery.model.store import Progress, terminal_progress
from decodery.train.card import CARD
from decodery.train.corpus import Corpus
from decodery.train.data import built_in_prompts, write_texts
from decodery.train.head import TOP, HeadRecipe, train_head
from decodery.train.hidden_transfer import TransferRecipe, train_transfer
from decodery.train.ppd import PPDRecipe, train_ppd
from decodery.train.swift import SkipRecipe, find_skips

HEADS = (
    "medusa", "hydra", "clover", "chimera", "eagle", "eagle-3", "fspad", "falcon", "longspec", "kangaroo",
)  # fmt: skip
OTHERS = {"ppd": "ppd", "hidden-transfer": "transfer", "swift": "skip"}
"""The setting that names what was trained."""
SECONDS = "seconds.json"


def spec(work: Path, name: str) -> str:
    """How a drafter is named that uses what was trained: chains of three, rows of eight inside of the model's pass."""
    setting, shape = OTHERS.get(name, "head"), "length=3" if name == "kangaroo" else "growth=none,length=3"
    return f"{name}:{setting}={work / name},{'length=8' if name in ('ppd', 'hidden-transfer') else shape}"


def ready(work: Path) -> list[str]:
    """The names of what is finished."""
    return [name for name in (*HEADS, *OTHERS) if (work / name / CARD).is_file() and (work / name / SECONDS).is_file()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", choices=[[], *HEADS, *OTHERS], metavar="NAME")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=96)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--epochs", type=float, default=4.0)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    target, learning = load("smollm2"), list[LanguageModel]()

    def floating() -> LanguageModel:
        if not learning:
            learning.append(load("smollm2", dtype="float32").model)
        return learning[0]

    def make(name: str, texts: Corpus, out: Path, progress: Progress) -> None:
        if name == "swift":
            find_skips(target, texts, out, recipe=SkipRecipe(proposals=40, texts=8), progress=progress)
        elif name == "ppd":
            train_ppd(target, floating(), texts, out, recipe=PPDRecipe(steps=options.steps), progress=progress)
        elif name == "hidden-transfer":
            train_transfer(
                target, floating(), texts, out, recipe=TransferRecipe(steps=options.steps), progress=progress
            )
        else:
            kind, shape = head_named(name)
            recipe = HeadRecipe(outputs=2048, epochs=options.epochs, lr=1e-3)
            train_head(target, kind, texts, out, shape=shape, recipe=recipe, progress=progress)

    with terminal_progress(counts=True) as progress:
        texts = corpus(target, options.work, options.texts, options.new, progress)
        for name in options.names or (*HEADS, *OTHERS):
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
