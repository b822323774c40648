"""What transformations cost and keep: drift on held-out text, and how good a drafter of its original each copy is.

    OMP_NUM_THREADS=1 python benchmarks/transforms.py [NAME ...]

The original is smollm2 in bfloat16, whose checkpoint has weights of 4 bits in blocks of 32: int4 is all but the
identity on it, and fewer bits are where methods differ. Calibration: pages of docs/. Held out: benchmarks/texts. Of
each copy: perplexity, mean KL(original || copy) in nats, share of places with the original's most likely token (top-1),
overlap, the mean of sum min(p, q), which is what a drawn draft would be accepted with; of greedy texts drafted by the
copy, four tokens at a time, the tokens per pass of the original (1 to 5), and how many texts are the original's. bytes
and macs: shares of the original's, by the stated cost model, with numbers in float32 counted as if they had 16 bits;
read: of the bytes, those that a token reads, which a table of embeddings is not that is not the head, too.
gain: tokens per pass / (4 read + 1), what a machine bound by reading weights would make of that; a prediction, and no
measurement.

Beside the methods: the original itself, layers left out at the end, a model of random weights, and bits dealt out by
chance under the budget that evopress has. Counts alone, no
times. Writes benchmarks/results/transforms.json; rows that are there already are not measured again.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import decodery
from decodery.compression.base import LINEARS, Change, Report, Size, reported, sizes, transformed
from decodery.compression.evopress import Levels, switched
from decodery.core.registry import resolve
from decodery.engine.request import Request
from decodery.llm.llm import LLM
from decodery.models.batch import Batch, Segment
from decodery.models.native.rounded_inputs import RoundedInputs
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense
from decodery.speculative.drafters.draft_model import DraftModel
from decodery_benchmarks.experiment import Experiment

ROOT = Path(__file__).parents[1]
CALIBRATION = ("design", "serving", "searches", "training")
PIECES, LENGTH, HELD = 16, 128, 256
NEW, DRAFTED = 32, 4
BY_CHANCE = "3 bits by chance"
PROMPTS = (
    "Explain tides.",
    "Write a short letter to a neighbour about a broken fence.",
    "What is a lichen?",
    "List five uses of salt.",
    "Write a Python function that reverses a string.",
    "Why do leaves change colour in autumn?",
)
ROWS: dict[str, tuple[str, ...]] = {
    "int8": ("int8",),
    "int4": ("int4",),
    "int4, 3 bits": ("int4:bits=3",),
    "int4, 2 bits": ("int4:bits=2",),
    "evopress, 3 bits": ("evopress:generations=6,children=6,tokens=256/512",),
    "fp4": ("fp4",),
    "fp4, no search of biases": ("fp4:points=1",),
    "fp4, E2M1, no search": ("fp4:format=E2M1,points=1",),
    "fp4, inputs of 4 bits": ("fp4:activations=4,rounds=1",),
    "fp4, inputs of 4 bits, no search of biases": ("fp4:points=1,activations=4,rounds=1",),
    "fp4, inputs of 4 bits, E2M1, no search": ("fp4:format=E2M1,points=1,activations=4,rounds=1",),
    "lq-lora, 3 bits, rank 8": ("lq-lora:steps=3",),
    "lq-lora, 3 bits, rank 0": ("lq-lora:rank=0",),
    "lq-lora, 3 bits on average, rank 8": ("lq-lora:steps=3,budget=3.28125",),
    "lq-lora, 3 bits on average, rank 8, fisher": ("lq-lora:steps=3,budget=3.28125,fisher=true",),
    "lq-lora, 2 bits, rank 32": ("lq-lora:bits=2,rank=32,steps=3",),
    "jlcm, 3 bits, k-means": ("jlcm:steps=0",),
    "jlcm, 3 bits, 20 steps": ("jlcm:steps=20",),
    "2:4, magnitude": ("nm-sparsity",),
    "2:4, activation": ("nm-sparsity:by=activation",),
    "4:8, activation": ("nm-sparsity:n=4,m=8,by=activation",),
    "2:4, activation, int8": ("nm-sparsity:by=activation", "int8"),
    "5:16, magnitude": ("nm-sparsity:n=5,m=16",),
    "5:16, activation": ("nm-sparsity:n=5,m=16,by=activation",),
    "3:16, magnitude": ("nm-sparsity:n=3,m=16",),
    "1:16, magnitude": ("nm-sparsity:n=1,m=16",),
    "ternary, untrained": ("bitnet",),
    "slicegpt 0": ("slicegpt:share=0",),
    "slicegpt 0.05": ("slicegpt:share=0.05",),
    "slicegpt 0.1": ("slicegpt:share=0.1",),
    "slicegpt 0.2": ("slicegpt:share=0.2",),
    "slicegpt 0.25": ("slicegpt:share=0.25",),
    "slicegpt 0.1, int8": ("slicegpt:share=0.1", "int8"),
    "slicegpt 0.1, principal directions, int8": ("slicegpt:share=0.1,orientation=pca", "int8"),
}


def fewer_layers(model: Transformer, count: int) -> Transformer:
    """The model without its last layers but the very last one, which makes the states that the head reads."""
    layers = [*model.weights.layers[: count - 1], model.weights.layers[-1]]
    config = replace(model.config, num_layers=count, sliding_layers=model.config.sliding_layers[:count])
    return Transformer(config, replace(model.weights, layers=layers))


def at_random(model: Transformer) -> Transformer:
    """The same shapes and sizes of weights, in another order."""
    chance = torch.Generator().manual_seed(0)

    def mixed(linear: Any) -> Dense:
        weight = linear.weight
        return Dense(weight.flatten()[torch.randperm(weight.numel(), generator=chance)].view_as(weight), linear.bias)

    names = ("qkv", "output", "gate_up", "down")
    layers = [replace(each, **{name: mixed(getattr(each, name)) for name in names}) for each in model.weights.layers]
    return Transformer(model.config, replace(model.weights, layers=layers))


BASELINES: dict[str, Callable[[Transformer], Transformer]] = {
    "original": lambda model: model,
    "27 of 30 layers": lambda model: fewer_layers(model, 27),
    "24 of 30 layers": lambda model: fewer_layers(model, 24),
    "random": at_random,
}


def by_chance(model: Transformer, bits: int) -> tuple[Transformer, Report]:
    """So many bits for each linear layer in the mean, moved about between layers of a shape by chance."""
    levels, chance = Levels(model), np.random.default_rng(0)
    state = (bits,) * len(levels.groups)
    for _ in range(1000):
        state = switched(state, levels.groups, chance)
    change = Change(levels.model(state), levels.parts(state))
    return change.model, reported(model, [("bits by chance", change)])


def pieces(lm: LLM, files: list[Path], length: int) -> list[np.ndarray]:
    """Texts cut into pieces of so many tokens, one of each file in turn."""
    texts = [lm.tokenizer.encode(file.read_text(encoding="utf-8"), special=False) for file in files]
    places = range(0, max(map(len, texts)) - length + 1, length)
    cut = [text[at : at + length] for at in places for text in texts if at + length <= len(text)]
    return [np.asarray(each) for each in cut]


def log_laws(model: Transformer, texts: list[np.ndarray]) -> Iterator[torch.Tensor]:
    for text in texts:
        segment = Segment(np.arange(len(text)), tokens=text)
        yield model.forward(Batch([segment])).logits.float().log_softmax(dim=-1)


@torch.no_grad()
def drift(laws: list[torch.Tensor], copy: Transformer, texts: list[np.ndarray]) -> dict[str, float]:
    sums = np.zeros(4)
    count = 0
    for text, p, q in zip(texts, laws, log_laws(copy, texts), strict=True):
        following = torch.from_numpy(text[1:])
        sums[0] -= float(q[torch.arange(len(following)), following].double().sum())
        sums[1] += float((p.exp() * (p - q))[:-1].sum())
        sums[2] += int((p.argmax(dim=-1) == q.argmax(dim=-1))[:-1].sum())
        sums[3] += float(torch.minimum(p, q).exp()[:-1].sum())
        count += len(following)
    nll, kl, same, overlap = (sums / count).tolist()
    return {"perplexity": math.exp(nll), "kl": kl, "top-1": same, "overlap": overlap}


def texts_of(lm: LLM, drafter: DraftModel | None) -> tuple[list[list[int]], int]:
    """Greedy texts, and the passes that wrote them, those that read prompts left aside."""
    engine = lm.engine()
    requests = [Request(lm.encode(prompt), max_new_tokens=NEW, drafter=drafter) for prompt in PROMPTS]
    found = [engine.submit(request) for request in requests]
    engine.run(found)
    passes = sum(not step.prefill for seq in found for step in seq.trace.steps)
    return [seq.generated for seq in found], passes


def measured(
    lm: LLM, copy: Transformer, held: list[np.ndarray], laws: list[torch.Tensor], plain: list[list[int]]
) -> dict[str, Any]:
    drafted, passes = texts_of(lm, DraftModel(copy, length=DRAFTED))
    # The first token of each text comes with its prompt.
    tokens = sum(map(len, drafted)) - len(drafted)
    same = sum(a == b for a, b in zip(drafted, plain, strict=True))
    return drift(laws, copy, held) | {"tokens per pass": tokens / passes, "same texts": [same, len(plain)]}


def looked_up(model: Transformer) -> float:
    """Bytes of the embedding, of which a token reads one row, where it is not the head, too."""
    return sizes(model)["embedding"].bytes


def total(model: Transformer) -> Size:
    parts = sizes(model).values()
    return Size(sum(part.bytes for part in parts), sum(part.macs for part in parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="rows to measure; all of them where none is named")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "transforms.json")
    args = parser.parse_args()
    lm = decodery.load("smollm2", dtype="bfloat16")
    model = lm.model
    assert isinstance(model, Transformer)
    calibration = pieces(lm, [ROOT / "docs" / f"{name}.md" for name in CALIBRATION], LENGTH)[:PIECES]
    held = pieces(lm, sorted((ROOT / "benchmarks" / "texts").glob("*.txt")), HELD)
    laws = list(log_laws(model, held))
    plain, _ = texts_of(lm, None)
    settings = {"calibration": sum(map(len, calibration)), "held out": sum(map(len, held)), "drafted": DRAFTED}
    whole = total(model)

    def run(name: str) -> dict[str, Any]:
        if name in BASELINES:
            copy, method = BASELINES[name](model), ""
            size, bits = total(copy), 16.0
            about: dict[str, Any] = {}
        else:
            copy, report = (
                by_chance(model, 3)
                if name == BY_CHANCE
                else transformed(model, [resolve("compression", spec) for spec in ROWS[name]], calibration)
            )
            size, bits, method = report.after, report.bits, " + ".join(ROWS.get(name, ()))
            last = report.stages[-1]
            errors = {each: [part.error for part in last.parts if part.name.endswith(f".{each}")] for each in LINEARS}
            about = {
                "lost": [stage.error for stage in report.stages],
                "lost by layer": {name: sum(each) / len(each) for name, each in errors.items() if each},
            }
        row = measured(lm, copy, held, laws, plain)
        # Numbers of 32 bits, of which the original's have 16: of some copies all, of others what is not in 4 bits.
        rounded = isinstance(copy.weights.layers[0].qkv, RoundedInputs)
        floats = copy.weights.dtype == torch.float32 and isinstance(copy.weights.head, Dense)
        wide = 2 if floats and not rounded else 1
        if rounded:
            others = sum(part.bytes for part_name, part in sizes(copy).items() if not part_name.endswith(LINEARS))
            weights = sum(part.macs for part in sizes(copy).values())
            size = replace(size, bytes=size.bytes - others / 2)
            bits = 8 * size.bytes / weights
        shares = (size.bytes / whole.bytes, (size.bytes - looked_up(copy)) / (whole.bytes - looked_up(model)))
        share, read = (each / wide for each in shares)
        row |= about | {"method": method, "bits": bits / wide, "bytes": share, "read": read}
        row |= {"macs": size.macs / whole.macs, "gain": row["tokens per pass"] / (DRAFTED * read + 1)}
        return row

    names = args.names or [*BASELINES, BY_CHANCE, *ROWS]
    Experiment({"name": names}, run, settings=settings).measure(args.out, "python benchmarks/transforms.py")


if __name__ == "__main__":
    main()
