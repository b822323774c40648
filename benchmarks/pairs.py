"""What an encoder and a decoder make of as many weights as a decoder alone, and what they learn from a larger one.

    OMP_NUM_THREADS=1 python benchmarks/pairs.py --work DIR

Dates, numbers and times in words become figures (the transduction `normalise`). A decoder alone of 6 layers, an encoder
of 4 layers with a decoder of 2, both of width 64 and about as many weights, and such a pair that learns from a decoder
of width 128 on the texts that it draws itself. Of each: the share of 200 held-out sources of which greedy decoding
writes all that is right, as training goes on; weights; and multiply-adds for a source of 30 tokens and for each of 8
tokens written after it, by the shapes of its matrices and what attention reads. Of pairs: tokens per pass of greedy
decoding with drafts copied from the source. An interrupted run goes on from DIR. Nothing is timed. Writes
benchmarks/results/pairs.json.
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path
from typing import Any

import decodery
from decodery.models.loaders.store import terminal_progress
from decodery.models.torch.encoder_decoder import EncoderDecoder
from decodery.training.loop import CHECKPOINT
from decodery_benchmarks.results import write_result
from decodery_benchmarks.training import one_stack
from decodery_benchmarks.training.one_stack import OneStackRecipe, train_one_stack
from decodery_benchmarks.training.puzzle_model import SHAPES, TransformerShape
from decodery_benchmarks.training.seq2seq import Seq2SeqRecipe, right, train_seq2seq
from decodery_benchmarks.training.transductions import sources, transduction

OUT = Path(__file__).parent / "results" / "pairs.json"
KIND = transduction("normalise")
WIDTH, INNER, ENCODER, DECODER = 64, 128, 4, 2
ALONE = TransformerShape(WIDTH, ENCODER + DECODER, 4, 112, 128)
SOURCE, WRITTEN, HELD = 30, 8, 200


def one_stack_counts(shape: TransformerShape) -> dict[str, int]:
    """Weights of the layers, and multiply-adds of a source and of each token after it."""
    layer = 4 * shape.hidden**2 + 3 * shape.hidden * shape.inner
    seen = sum(2 * shape.hidden * (place + 1) for place in range(SOURCE))
    behind = sum(2 * shape.hidden * (SOURCE + place + 1) for place in range(WRITTEN)) // WRITTEN
    head = 59 * shape.hidden
    return {
        "weights": shape.layers * layer,
        "macs of the source": shape.layers * (SOURCE * layer + seen),
        "macs per token": shape.layers * (layer + behind) + head,
    }


def two_stack_counts() -> dict[str, int]:
    square, mlp = WIDTH**2, 2 * WIDTH * INNER
    encoder, decoder = 4 * square + mlp, 8 * square + mlp
    # Keys and values of the source are made once for each layer of the decoder.
    source = ENCODER * (SOURCE * encoder + 2 * WIDTH * SOURCE**2) + DECODER * SOURCE * 2 * square
    behind = sum(2 * WIDTH * (SOURCE + place + 1) for place in range(WRITTEN)) // WRITTEN
    return {
        "weights": ENCODER * encoder + DECODER * decoder,
        "macs of the source": source,
        "macs per token": DECODER * (decoder - 2 * square + behind) + 59 * WIDTH,
    }


def curve(folder: Path) -> dict[str, float]:
    """Share that was right, by step."""
    from safetensors import safe_open

    with safe_open(folder / "training" / CHECKPOINT, "np") as file:
        facts = json.loads(file.metadata()["history"])
    return {step: round(1 - values["wrong"], 3) for step, values in facts["metrics"].items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="Folder of trainings.")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    held = list(islice(sources(KIND, "test"), HELD))
    rows: dict[str, Any] = {}
    teacher = args.work / "teacher"
    with terminal_progress(counts=True) as progress:
        train_one_stack(KIND, teacher, recipe=OneStackRecipe(SHAPES["tiny-1M"], args.steps), progress=progress)
        known = decodery.models.loaders.load.load(teacher)
        rows["teacher"] = one_stack_counts(SHAPES["tiny-1M"]) | {
            "right": [one_stack.right(known.model, KIND, held)],
            "curve": curve(teacher),
        }
        for name in ("decoder alone", "pair", "pair, taught"):
            rights, curves, rates = [], [], []
            for seed in range(args.seeds):
                folder = args.work / f"{name} {seed}"
                if name == "decoder alone":
                    alone = OneStackRecipe(ALONE, args.steps, lr=3e-3, seed=seed)
                    train_one_stack(KIND, folder, recipe=alone, progress=progress)
                    rights.append(one_stack.right(decodery.load(folder).model, KIND, held))  # type: ignore[arg-type]
                else:
                    recipe = Seq2SeqRecipe(
                        WIDTH, 4, INNER, encoder_layers=ENCODER, decoder_layers=DECODER, steps=args.steps, seed=seed
                    )
                    taught = known if name.endswith("taught") else None
                    train_seq2seq(KIND, folder, recipe=recipe, teacher=taught, progress=progress)
                    lm = decodery.load(folder)
                    assert isinstance(lm.model, EncoderDecoder)
                    rights.append(right(lm.model, KIND, held))
                    texts = lm.generate(held[:50], drafter="aggressive", max_new_tokens=KIND.longest + 2)
                    rates.append(sum(each.trace.tokens for each in texts) / sum(each.trace.passes for each in texts))
                curves.append(curve(folder))
            counts = one_stack_counts(ALONE) if name == "decoder alone" else two_stack_counts()
            rows[name] = counts | {"right": rights, "curve": curves}
            if rates:
                rows[name]["tokens per pass, copying"] = rates
            print(name, rows[name], flush=True)
    made = {
        "command": "python benchmarks/pairs.py --work DIR", "steps": args.steps, "held out": HELD, "source": SOURCE,
        "written": WRITTEN, "rows": rows,
    }  # fmt: skip
    write_result(OUT, made)


if __name__ == "__main__":
    main()
