"""Whether the operators of a small PLDR-LLM come to hang on nothing that it reads, and what keeping them changes.

    OMP_NUM_THREADS=1 python benchmarks/power_law.py --work DIR

A model of 3 layers and 4 heads of 32 learns the puzzle `chain`. Of 24 texts held out, before and after training: the
largest distance between a layer's operators of two texts, as a share of the mean operator's size (Frobenius norms).
As training goes on: the loss with operators of each text's own and with the mean ones of other texts, and the share of
puzzles solved greedily with those. Greedily, too, tokens per pass of the model that makes its operators anew of all it
has read at every token, where the model with operators of the prompt, or with the mean ones, drafts four at a time.
An interrupted run goes on from DIR. Nothing is timed. Writes benchmarks/results/power-law.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import torch

from decodery.models.loaders.store import terminal_progress
from decodery.models.torch.power_law import PowerLaw, side_by_side
from decodery.models.torch.transformer import Transformer
from decodery.training.loop import CHECKPOINT
from decodery_benchmarks.puzzles import drawn, puzzle
from decodery_benchmarks.puzzles.alphabet import END_ID, encoded
from decodery_benchmarks.results import write_result
from decodery_benchmarks.training.pldr import PLDRRecipe, mean_operators, random_power_law, train_pldr

OUT = Path(__file__).parent / "results" / "power-law.json"
TEXTS, WRITTEN, DRAFTED = 24, 8, 4


def apart(law: PowerLaw, texts: list[list[int]]) -> list[float]:
    """Of each layer, the largest distance between two texts' operators, as a share of the mean one's norm."""
    every = torch.stack([law.operators(each) for each in texts]).flatten(2).transpose(0, 1).flatten(2)
    sizes = every.mean(dim=1).norm(dim=-1)
    return [float(torch.cdist(layer, layer).max() / size) for layer, size in zip(every, sizes, strict=True)]


@torch.no_grad()
def most_likely(logits: Callable[[torch.Tensor], torch.Tensor], tokens: list[int]) -> int:
    return int(logits(torch.tensor([tokens]))[0, -1].argmax())


def written(logits: Callable[[torch.Tensor], torch.Tensor], prompt: list[int], most: int) -> list[int]:
    """Greedy text, each token after all that was read anew."""
    found: list[int] = []
    while len(found) < most and END_ID not in found:
        found.append(most_likely(logits, prompt + found))
    return found


def passes(model: Transformer, text: list[int], prompt: list[int]) -> int:
    """How many times the model that wrote `text` has to look, where another drafts."""
    count = place = 0
    while place < len(text):
        draft = written(lambda tokens: side_by_side(model, tokens), prompt + text[:place], DRAFTED)
        right = 0
        while right < len(draft) and place + right < len(text) and draft[right] == text[place + right]:
            right += 1
        place, count = place + right + 1, count + 1
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="Folder of the training.")
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()
    kind, recipe = puzzle("chain"), PLDRRecipe(steps=args.steps, every=max(1, args.steps // 6))
    with terminal_progress(counts=True) as progress:
        train_pldr(kind, args.work, recipe=recipe, progress=progress)
    from safetensors import safe_open

    with safe_open(args.work / "training" / CHECKPOINT, "np") as file:
        metrics = json.loads(file.metadata()["history"])["metrics"]
    law, random = PowerLaw.load(args.work), Random(0)
    prompts = list(islice(drawn(kind, "test"), TEXTS))
    texts = [encoded(each + kind.solve(each, random)) for each in prompts]
    distance = {"untrained": apart(random_power_law(recipe), texts), "trained": apart(law, texts)}
    mean = law.frozen(mean_operators(law, kind))
    tokens, looked = 0, {"operators of the prompt": 0, "mean operators": 0}
    for prompt in map(encoded, prompts[:WRITTEN]):
        text = written(lambda rows: law.predicted(rows)[0], prompt, kind.length)
        tokens += len(text)
        looked["operators of the prompt"] += passes(law.frozen(law.operators(prompt)), text, prompt)
        looked["mean operators"] += passes(mean, text, prompt)
    made: dict[str, Any] = {
        "command": "python benchmarks/power_law.py --work DIR",
        "steps": args.steps,
        "texts": TEXTS,
        "distance": distance,
        "curve": {step: {name: round(each, 4) for name, each in values.items()} for step, values in metrics.items()},
        "tokens per pass": {name: tokens / count for name, count in looked.items()},
    }
    write_result(OUT, made, summary=["distance", "curve", "tokens per pass"])
    print(json.dumps(made))


if __name__ == "__main__":
    main()
