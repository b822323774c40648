"""Train the drafts that `benchmarks/bench.py sweep` compares: one shape on more and more text, and larger and larger
ones.

    OMP_NUM_THREADS=1 python benchmarks/draft/sweep_drafts.py --texts DIR --out DIR [AXIS ...] [-m smollm2]
        [--epochs 0.0625 0.125 0.25 0.5 1 2] [--inner 96 192 384 768 1536] [--half 0.5] [--window 128]

--texts: texts that the model has written, as `decodery train draft` leaves them. AXIS is `data` (a draft of the largest
size but one learns from a part of the texts up to all of them several times, --epochs) or `size` (feed-forward parts of
so many inner units, --inner, the texts --half times each). Every draft has one layer and begins as part of the target;
drafts that are finished are left as they are, and one that was interrupted goes on. Prints, for every axis, what
`python benchmarks/bench.py sweep` takes: FOLDER=AMOUNT, tokens learned from or weights of the layer and the head. For
tiny-1M-chain, --questions FILE writes sums that nobody has learned from in the form of Spec-Bench's questions.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import islice
from pathlib import Path

from decodery.models.loaders.description import Description
from decodery.models.loaders.drafts import DESCRIPTION
from decodery.models.loaders.store import terminal_progress
from decodery.training.corpus import Corpus
from decodery.training.cut import DraftShape
from decodery.training.draft import train_draft

sys.path.insert(0, str(Path(__file__).parents[1]))
from decodery_benchmarks import solvers
from decodery_benchmarks.puzzles import drawn, puzzle


def weights(folder: Path) -> int:
    """Weights of the linear layers of a draft, the head included, which is its embedding too."""
    config = Description.read(folder / DESCRIPTION).config
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layer = config.hidden_size * (heads + 3 * config.intermediate_size)
    return config.num_layers * layer + config.kept_tokens * config.hidden_size


def write_questions(path: Path, count: int = 16) -> None:
    """Sums as questions of Spec-Bench."""
    prompts = islice(drawn(puzzle("chain"), "test"), count)
    rows = [{"question_id": number, "category": "sums", "turns": [each]} for number, each in enumerate(prompts)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("axes", nargs="*", choices=[[], "data", "size"], metavar="AXIS")
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=float, nargs="+", default=[0.0625, 0.125, 0.25, 0.5, 1.0, 2.0])
    parser.add_argument("--inner", type=int, nargs="+", default=[96, 192, 384, 768, 1536])
    parser.add_argument("--half", type=float, default=0.5)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--questions", type=Path)
    options = parser.parse_args()
    if options.questions is not None:
        write_questions(options.questions)
    loaded, corpus = solvers.load_model(options.model, dtype="int8"), Corpus(options.texts)
    learned, _ = corpus.split()
    tokens = sum(len(corpus[number].tokens) - corpus[number].written for number in learned)
    for axis in options.axes or ("data", "size"):
        pairs = []
        for value in options.epochs if axis == "data" else options.inner:
            folder = options.out / f"{axis}-{value:g}"
            epochs, inner = (value, options.inner[-2]) if axis == "data" else (options.half, int(value))
            shape = DraftShape(inner=inner, window=options.window)
            if not (folder / DESCRIPTION).is_file():
                with terminal_progress(counts=True) as progress:
                    train_draft(loaded, corpus, folder, shape=shape, epochs=epochs, progress=progress)
            pairs.append(f"{folder}={round(epochs * tokens) if axis == 'data' else weights(folder)}")
            print(pairs[-1], flush=True)
        print(f"--sweep {','.join(pairs)}", flush=True)


if __name__ == "__main__":
    main()
