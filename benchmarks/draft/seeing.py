"""What `msd` is worth after images: a small vision-language model learns to name patches, and drafters learn from it.

    OMP_NUM_THREADS=1 PYTHONPATH=tests/support python benchmarks/draft/seeing.py --work DIR [--steps 900] [--texts 160]
        [--epochs 10] [--prompts 24]

The model is a LLaVA of `transformers` with random weights, 9 patches to an image and a language model of 3 layers. It
learns to write the colour of every patch by its number, after an image or after the colours' first letters. It then
writes the texts that three drafters learn from: `msd` from letters and then from images too, the same layer from
letters alone, and `eagle`, which reads states and the placeholder's embedding at an image's places, from both. Greedy
texts after images that nobody learned from, which are compared with plain decoding's. Writes
benchmarks/results/draft-seeing.json; what is finished in DIR is left as it is. Counts alone, no times.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.loaders.load import LoadedModel, load
from decodery.models.loaders.store import terminal_progress
from decodery.speculative.drafters.eagle import EAGLE, EAGLEHead
from decodery.speculative.drafters.msd import MSD, MSDHead
from decodery.step.drafter import Drafter
from decodery.step.embedded import Embeddings
from decodery.training.data import write_texts
from decodery.training.embedded import write_shown
from decodery.training.head import HeadRecipe, train_head
from decodery.training.kind import Run
from tiny_models import SHAPE, make_tokenizer, save

sys.path.insert(0, str(Path(__file__).parents[1]))
from decodery_benchmarks.results import write_result

RESULTS = Path(__file__).parents[1] / "results" / "draft-seeing.json"
COLOURS = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "white": (1, 1, 1)}
NAMES = tuple(COLOURS)
PATCHES, IMAGE, END = 9, 258, 257
HELD, TAUGHT = 1 << 20, 1 << 21
"""Where the seeds of what nobody learns from begin, and those of the drafters' texts."""
TREE = "eagle-2(nodes=12,width=4,depth=5)"


def untrained() -> transformers.LlavaForConditionalGeneration:
    torch.manual_seed(0)
    text = transformers.LlamaConfig(**(SHAPE | {"hidden_size": 96, "intermediate_size": 192}))
    sight = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=6, patch_size=2
    )
    config = transformers.LlavaConfig(vision_config=sight, text_config=text, image_token_id=IMAGE)
    return transformers.LlavaForConditionalGeneration(config)


class Task:
    """Grids of colours: as images, as letters, and as the text that names them."""

    def __init__(self) -> None:
        encode = make_tokenizer().encode
        self.words = [[encode(f"{place + 1}{name} ").ids for name in NAMES] for place in range(PATCHES)]
        self.letters = [encode(name[0]).ids for name in NAMES]
        self.asks = encode("?").ids

    def grid(self, seed: int) -> torch.Tensor:
        return torch.randint(len(NAMES), (PATCHES,), generator=torch.Generator().manual_seed(seed))

    def image(self, grid: torch.Tensor) -> torch.Tensor:
        """[3, 6, 6] of patches of 2 by 2 points."""
        side = int(PATCHES**0.5)
        table = torch.tensor([COLOURS[name] for name in NAMES], dtype=torch.float32)
        points = table[grid].view(side, side, 3).permute(2, 0, 1)
        return points.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)

    def prompt(self, grid: torch.Tensor | None) -> list[int]:
        """By letters, or after an image where there is no grid to write."""
        shown = [IMAGE] * PATCHES if grid is None else [one for each in grid.tolist() for one in self.letters[each]]
        return [*shown, *self.asks]

    def answer(self, grid: torch.Tensor) -> list[int]:
        return [one for place, each in enumerate(grid.tolist()) for one in self.words[place][each]] + [END]


def learn(model: transformers.LlavaForConditionalGeneration, task: Task, steps: int, batch: int = 16) -> None:
    """Half of every batch is shown images."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for step in range(steps):
        total = torch.zeros(())
        for seen in (True, False):
            grids = [task.grid(step * batch + number + (seen << 30)) for number in range(batch // 2)]
            rows = [(task.prompt(None if seen else grid), task.answer(grid)) for grid in grids]
            width = max(len(prompt) + len(answer) for prompt, answer in rows)
            ids, labels = torch.full((len(rows), width), END), torch.full((len(rows), width), -100)
            for row, (prompt, answer) in enumerate(rows):
                both = torch.tensor([*prompt, *answer])
                ids[row, : len(both)], labels[row, len(prompt) : len(both)] = both, both[len(prompt) :]
            pixels = {"pixel_values": torch.stack([task.image(grid) for grid in grids])} if seen else {}
            total = total + model(input_ids=ids, labels=labels, **pixels).loss
        optimizer.zero_grad()
        total.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step} of {steps}: {float(total.detach()) / 2:.3f} nats a token", flush=True)


@torch.no_grad()
def shown(model: transformers.LlavaForConditionalGeneration, task: Task, seeds: range) -> list[Any]:
    """Prompts after images, with what the tower makes of them."""
    images = torch.stack([task.image(task.grid(seed)) for seed in seeds])
    found = model.model.get_image_features(images)
    rows = [each.view(PATCHES, -1) for each in getattr(found, "pooler_output", found)]
    return [Embeddings.placed([IMAGE, *task.asks], IMAGE, [each]) for each in rows]


def drafters(loaded: LoadedModel, task: Task, prompts: list[Any], options: argparse.Namespace) -> dict[str, Drafter]:
    work, recipe = options.work, HeadRecipe(outputs=0, epochs=options.epochs, lr=1e-3, batch=8, length=96)
    letters = [task.prompt(task.grid(TAUGHT + number)) for number in range(options.texts)]
    with terminal_progress(counts=True) as progress:
        plain = write_texts(loaded, letters, work / "plain", max_new_tokens=64, progress=progress)
        seen = write_shown(loaded, prompts, work / "shown", options.texts, 64, progress=progress)
        for name, kind, images in (("msd", MSDHead, seen), ("letters", MSDHead, None), ("eagle", EAGLEHead, seen)):
            if not (work / name / "README.md").is_file():
                train_head(Run(loaded, work / name, (recipe,), progress=progress), kind, plain, shown=images)
    found: dict[str, Drafter] = {}
    for shape, growth in {"chains of 4": None, "trees of 12": TREE}.items():
        found |= {
            f"msd, {shape}": MSD(str(work / "msd"), length=4, tree_policy=growth),
            f"msd that learned from letters alone, {shape}": MSD(str(work / "letters"), length=4, tree_policy=growth),
            f"eagle, states at an image's places too, {shape}": EAGLE(
                str(work / "eagle"), length=4, tree_policy=growth
            ),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--texts", type=int, default=160)
    parser.add_argument("--epochs", type=float, default=10.0)
    parser.add_argument("--prompts", type=int, default=24)
    options = parser.parse_args()
    task, folder = Task(), options.work / "model"
    if not (folder / "config.json").is_file():
        made = untrained()
        learn(made, task, options.steps)
        save(made.eval(), folder)
    theirs = transformers.LlavaForConditionalGeneration.from_pretrained(folder).eval()
    os.environ.setdefault("DECODERY_HOME", str(options.work / "home"))
    loaded = load(folder, dtype="float32", device="cpu")
    taught = shown(theirs, task, range(TAUGHT + options.texts, TAUGHT + 2 * options.texts))
    asked = shown(theirs, task, range(HELD, HELD + options.prompts))
    answers = [task.answer(task.grid(HELD + number)) for number in range(options.prompts)]
    command = f"OMP_NUM_THREADS=1 PYTHONPATH=tests/support {shlex.join(['python', *sys.argv])}"
    found: dict[str, Any] = {"command": command, "rows": {}}
    plain: list[list[int]] = []
    for name, drafter in {"plain": None, **drafters(loaded, task, taught, options)}.items():
        engine = Engine(loaded.model)
        seqs = [
            engine.submit(Request(ids, max_new_tokens=80, drafter=drafter, prompt_embeds=held, eos_ids=(END,)))
            for ids, held in asked
        ]
        engine.run(seqs)
        steps = [step for seq in seqs for step in seq.trace.decoding]
        tokens = sum(step.emitted for step in steps)
        texts = [seq.generated for seq in seqs]
        plain = plain or texts
        found["rows"][name] = {
            "tokens_per_pass": round(tokens / len(steps), 3),
            "rows_per_pass": round(sum(step.rows for step in steps) / len(steps), 2),
            "drafts_accepted": round(
                sum(step.accepted for step in steps) / max(sum(step.nodes for step in steps), 1), 4
            ),
            "texts_as_plain": sum(text == other for text, other in zip(texts, plain, strict=True)),
            "texts_right": sum(text == answer for text, answer in zip(texts, answers, strict=True)),
            "prompts": len(seqs),
        }
        print(name, json.dumps(found["rows"][name]), flush=True)
    write_result(RESULTS, found)


if __name__ == "__main__":
    main()
