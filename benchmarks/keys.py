"""Whether a memory after frozen keys keeps what it learned of one kind of text while it reads another.

    OMP_NUM_THREADS=1 python benchmarks/keys.py

The states of smollm2 (bfloat16) on a stream of three parts: source code of this package, prose of benchmarks/texts, and
the same kind of code again, other files. Read token by token, `discrete-key-value` guesses the next but one token from
the state before the next one, and learns it afterwards; so does a linear layer on as many numbers, over fixed random
features of the same states, whose outputs become logits by the same readout. Of each, by parts of 250 tokens: the share
of tokens guessed, which is what a draft of one token adds to the tokens of a pass. Keys are frozen on docs/, which the
stream does not hold; rates are those of a few that guess most in a stream of its own. Nothing is timed. Writes
benchmarks/results/keys.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

import decodery
from decodery.llm.llm import LLM
from decodery.models.batch import Batch, Segment
from decodery.models.torch.transformer import Transformer
from decodery.speculative.stores.bottleneck import KeySet, Values
from decodery.training.kv_bottleneck import KeyRecipe, learn_keys
from decodery_benchmarks.results import write_result

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "results" / "keys.json"
PART, PIECE = 250, 125
RATES = (0.3, 1.0, 3.0)
CODE = ("cli/generate.py", "models/torch/rope.py"), ("models/batch.py", "models/cache/cache.py")
RECIPE = KeyRecipe(keys=256)
Part = tuple[torch.Tensor, list[int]]


def cut(lm: LLM, files: list[Path], count: int) -> list[list[int]]:
    """Pieces of files, so many tokens in all."""
    tokens = [token for file in files for token in lm.tokenizer.encode(file.read_text(encoding="utf-8"), special=False)]
    return [tokens[at : at + PIECE] for at in range(0, count, PIECE)]


@torch.no_grad()
def read(model: Transformer, texts: list[list[int]]) -> Part:
    """States [n, width], and the next but one token of each."""
    states, labels = [], list[int]()
    for text in texts:
        segment = Segment(np.arange(len(text)), np.asarray(text), logit_rows=[])
        states.append(model.forward(Batch([segment]), taps=(-1,)).hidden[-1][:-2].float())
        labels += text[2:]
    return torch.cat(states), labels


class Linear:
    """Logits by a linear layer over fixed random features of states, learned one token after the other."""

    def __init__(self, keys: KeySet, lr: float, numbers: int) -> None:
        chance = torch.Generator().manual_seed(0)
        self.keys, self.lr = keys, lr
        count = numbers // len(keys.readout)
        spread = keys.projections.flatten(0, 1)
        self.features = torch.randn(count, len(spread), generator=chance) / len(spread) ** 0.5
        self.weight = torch.zeros(len(keys.readout), count)

    def seen(self, states: torch.Tensor) -> torch.Tensor:
        rows = self.keys.projected(states).flatten(1) @ self.features.T
        rows = rows.relu()
        return rows / rows.norm(dim=1, keepdim=True)

    def step(self, row: torch.Tensor, token: int) -> bool:
        law = (self.weight @ row @ self.keys.readout).softmax(dim=0)
        right = int(law.argmax()) == token
        law[token] -= 1.0
        self.weight -= self.lr * torch.outer(self.keys.readout @ law, row)
        return right


def guessed(keys: KeySet, stream: list[Part], lr: float, linear: bool) -> list[list[float]]:
    """Shares of tokens guessed, by part and piece of it."""
    values = Values(keys, 1, lr)
    layer = Linear(keys, lr, values.data.numel())
    found = []
    for states, labels in stream:
        rows = layer.seen(states) if linear else keys.codes(states)
        right = []
        for row, token in zip(rows, labels, strict=True):
            if linear:
                right.append(layer.step(row, token))
            else:
                right.append(int(values.logits(0, row).argmax()) == token)
                values.learn(0, row, token)
        count = max(1, round(len(right) / PART))
        found.append([round(float(np.mean(each)), 4) for each in np.array_split(np.array(right), count)])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1000, help="of each part")
    args = parser.parse_args()
    lm = decodery.load("smollm2", dtype="bfloat16")
    model, source = lm.model, ROOT / "src" / "decodery"
    assert isinstance(model, Transformer)
    keys = learn_keys(model, cut(lm, [ROOT / "docs" / "supported-models.md"], 2000), recipe=RECIPE)
    prose = sorted((ROOT / "benchmarks" / "texts").glob("*.txt"))
    first, again = ([source / each for each in files] for files in CODE)
    texts = [cut(lm, files, args.tokens) for files in (first, prose, again)]
    stream = [read(model, each) for each in texts]
    tuning = [read(model, cut(lm, [source / "engine" / "engine.py"], args.tokens // 2))]
    rows: dict[str, Any] = {}
    for name, linear in (("frozen keys", False), ("linear layer", True)):
        worth = {lr: float(np.mean(guessed(keys, tuning, lr, linear)[0])) for lr in RATES}
        best = max(worth, key=lambda lr: worth[lr])
        code, between, later = guessed(keys, stream, best, linear)
        rows[name] = {"lr": best, "code": code, "prose": between, "code again": later}
        print(name, rows[name], flush=True)
    made = {"command": "python benchmarks/keys.py", "tokens": args.tokens, "part": PART, "rows": rows}
    write_result(OUT, made)


if __name__ == "__main__":
    main()
