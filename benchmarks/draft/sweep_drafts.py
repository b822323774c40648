"""Train the drafts that `decodery bench --sweep` compares: one shape on more and more text, and more and more layers.

    OMP_NUM_THREADS=1 python benchmarks/draft/sweep_drafts.py --texts DIR --out DIR [AXIS ...]

--texts: texts that smollm2 has written, as `decodery train draft` leaves them. AXIS is `data` (the shipped draft's
shape learns from a sixteenth of the texts up to all of them twice) or `size` (feed-forward parts of 96 to 1536 inner
units, half of the texts each). Every draft begins as a part of the target; drafts that are finished are left as they
are, and one that was interrupted goes on. Prints, for every axis, what `decodery bench --sweep` takes: FOLDER=AMOUNT,
tokens learned from or weights of the layers and the head.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from decodery.model.description import Description
from decodery.model.drafts import DESCRIPTION
from decodery.model.load import load
from decodery.model.store import terminal_progress
from decodery.train.card import CARD
from decodery.train.corpus import Corpus
from decodery.train.cut import Shape
from decodery.train.draft import train_draft

EPOCHS = (0.0625, 0.125, 0.25, 0.5, 1.0, 2.0)
INNER = (96, 192, 384, 768, 1536)


def weights(folder: Path) -> int:
    """Weights of the linear layers of a draft, the head included, which is its embedding too."""
    config = Description.read(folder / DESCRIPTION).config
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layer = config.hidden_size * (heads + 3 * config.intermediate_size)
    return config.num_layers * layer + config.kept_tokens * config.hidden_size


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("axes", nargs="*", choices=[[], "data", "size"], metavar="AXIS")
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    loaded, corpus = load("smollm2", dtype="int8"), Corpus(options.texts)
    learned, _ = corpus.split()
    tokens = sum(len(corpus[number].tokens) - corpus[number].written for number in learned)
    for axis in options.axes or ("data", "size"):
        pairs = []
        for value in EPOCHS if axis == "data" else INNER:
            folder = options.out / f"{axis}-{value:g}"
            epochs, shape = (value, Shape()) if axis == "data" else (0.5, Shape(inner=int(value)))
            if not (folder / CARD).is_file():
                with terminal_progress(counts=True) as progress:
                    train_draft(loaded, corpus, folder, shape=shape, epochs=epochs, progress=progress)
            pairs.append(f"{folder}={round(epochs * tokens) if axis == 'data' else weights(folder)}")
            print(pairs[-1], flush=True)
        print(f"--sweep {','.join(pairs)}", flush=True)


if __name__ == "__main__":
    main()
