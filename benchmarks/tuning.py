"""What a few minutes of tuning make of small models, on data that is not learned from, beside controls.

    python benchmarks/tuning.py --out benchmarks/results/tuning.json
    python benchmarks/tuning.py --out benchmarks/results/tuning.json --annotator qwen2.5-coder-0.5b-instruct-q4_k_m.gguf

- lora, s2ft: adapters of pages of this documentation, on one piece of each of the other pages. Control: the same words
  in random order.
- orpo: right and wrong capitals, on other countries. Control: the two in random order.
- grpo: rewards of right small sums, on other ones, greedy. Control: rewards of the other texts of the group.
- step-labels (SPARE): an annotator that reads a reference, on steps that are known to be right or wrong. The last step
  is labelled by the answer, without the annotator: beside it stands labelling all steps by that. Control: the labels of
  other solutions.

Rows that a result file has are kept.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decodery.llm.llm import LLM
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.adapters import Adapter, tuned
from decodery.models.loaders.load import LoadedModel, load
from decodery.training import adapter
from decodery.training.checkable import CheckableQuestion, capitals
from decodery.training.grpo import GRPORecipe, train_grpo
from decodery.training.held_out import HeldOut
from decodery.training.kind import KINDS, Run
from decodery.training.kind_data import CutFiles
from decodery.training.orpo import ORPORecipe, train_orpo
from decodery.training.remade import CopyRecipe
from decodery.training.step_labels import Exercise, LabelSettings, label_steps
from decodery_benchmarks.results import begun_result, write_result
from decodery_benchmarks.trained_data import ROOT

_LENGTH, _PAGES, _CHARACTERS = 64, 12, 48000
_SUMS = 100
"""Sums that are learned, of 171; the others are tested."""
Report = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--annotator", help="the model that labels steps, --model by default")
    parser.add_argument("--methods", default=",".join(METHODS))
    given = parser.parse_args()
    result = begun_result(given.out)
    for name in given.methods.split(","):
        model = given.annotator or given.model if name == "step-labels" else given.model
        row = f"{name}, {Path(model).name}"
        if row in result["rows"]:
            continue
        begin = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            report = METHODS[name](load(model), Path(folder))
        result["rows"][row] = {"processor minutes": round((time.process_time() - begin) / 60, 2), **report}
        named = f" --annotator {Path(given.annotator).name}" if given.annotator else ""
        result["command"] = f"python benchmarks/tuning.py --out benchmarks/results/tuning.json{named}"
        write_result(given.out, result)
        print(row, result["rows"][row], flush=True)


def compared(
    name: str, unit: str, figures: dict[str, Sequence[float]], *, control: Sequence[float], trained: Sequence[float]
) -> Report:
    """The report of a figure of each item.

    Args:
        name: The figure.
        unit: What an item is, in the plural.
        figures: Of each item, of what needs no training.
        control: Of the control.
        trained: Of what was trained.
    """
    known = HeldOut[int]([], list(range(len(trained))))

    def measured(each: Sequence[float]) -> Any:
        return known.measured(lambda some: {name: float(np.mean([each[number] for number in some]))}, name)

    baselines = {each: measured(values) for each, values in figures.items()}
    return {"figure": name, **known.report(measured(trained), baselines, unit, control=measured(control))}


@torch.no_grad()
def logprobs(loaded: LoadedModel, folder: Path | None, texts: Sequence[tuple[list[int], list[int]]]) -> list[float]:
    """The mean log-probability of what is written after each prompt, with the adapter in a folder or without."""
    model = loaded.model if folder is None else tuned(loaded.model, Adapter.load(folder))
    found = []
    for prompt, written in texts:
        tokens, first = [*prompt, *written], len(prompt) - 1
        segment = Segment.chunk(tokens, model.new_cache(), logit_rows=list(range(first, len(tokens) - 1)))
        likely = model.forward(Batch([segment])).logits.double().log_softmax(dim=-1)
        found.append(float(likely.gather(1, torch.tensor(written)[:, None]).mean()))
    return found


def adapted(kind: str, steps: int = 24) -> Callable[[LoadedModel, Path], Report]:
    """An adapter of pages, by the command that trains it."""

    def method(loaded: LoadedModel, work: Path) -> Report:
        pages = [page.read_text("utf-8") for page in sorted((ROOT / "docs").glob("*.md"))]
        text = "\n\n".join(pages[:_PAGES])[:_CHARACTERS]
        words = np.random.default_rng(0).permutation(text.split(" ")).tolist()
        encode = loaded.tokenizer.encode
        tested = [encode(page[len(page) // 2 :], special=False)[:_LENGTH] for page in pages[_PAGES:]]
        pieces = [(each[:1], each[1:]) for each in tested if len(each) == _LENGTH]
        nats = {"untrained": [-each for each in logprobs(loaded, None, pieces)]}
        for name, written in (("trained", text), ("control", " ".join(words))):
            (work / f"{name}.txt").write_text(written)
            settings = (CutFiles((work / f"{name}.txt",), _LENGTH), CopyRecipe(steps, 2, 5e-4))
            if kind == "lora":
                settings += (adapter.LoRARemaking(rank=4),)  # type: ignore[assignment]
            KINDS[kind].learn(Run(loaded, work / name, settings))
            nats[name] = [-each for each in logprobs(loaded, work / name, pieces)]
        return compared("cross_entropy", "pages", **_split(nats))

    return method


def preferences(loaded: LoadedModel, work: Path) -> Report:
    """ORPO of right and wrong capitals."""
    pairs, random = list(capitals().items()), np.random.default_rng(0)
    texts = [
        (f"What is the capital of {country}?", *(f"The capital of {country} is {each}." for each in (city, other)))
        for country, city in pairs
        for other in [pairs[int(random.integers(len(pairs)))][1]]
        if other != city
    ]
    order = random.permutation(len(texts)).tolist()
    tested, learned = ([texts[at] for at in part] for part in (order[:40], order[40:]))
    mixed = [pair if random.random() < 0.5 else (pair[0], pair[2], pair[1]) for pair in learned]
    lm = LLM(loaded)
    margins: dict[str, list[float]] = {}
    for name, given in (("untrained", None), ("trained", learned), ("control", mixed)):
        if given is not None:
            train_orpo(Run(loaded, work / name, (ORPORecipe(steps=16, batch=2), adapter.LoRARemaking(rank=4))), given)
        folder = None if given is None else work / name
        right, wrong = (
            logprobs(
                loaded, folder, [(lm.encode(each[0]), lm.tokenizer.encode(each[at], special=False)) for each in tested]
            )
            for at in (1, 2)
        )
        margins[name] = [a - b for a, b in zip(right, wrong, strict=True)]
    report = compared("margin", "countries", **_split(margins))
    return report | {"preferred": {name: float(np.mean(np.array(each) > 0)) for name, each in margins.items()}}


def rewards(loaded: LoadedModel, work: Path) -> Report:
    """GRPO of right sums."""
    random, lm = np.random.default_rng(0), LLM(loaded)
    sums = [
        CheckableQuestion(f"What is {a} + {b}?", str(a + b), f"{a} + {b}") for a in range(1, 20) for b in range(1, 10)
    ]
    sums = [sums[at] for at in random.permutation(len(sums))]
    learned, tested = sums[:_SUMS], sums[_SUMS:]
    right: dict[str, list[float]] = {}
    for name in ("untrained", "trained", "control"):
        source = None
        if name != "untrained":
            mixed = name == "control"

            def reward(number: int, texts: Sequence[Any], mixed: bool = mixed) -> list[float]:
                found = [float(learned[number].held_by(lm.tokenizer.decode(each.generated))) for each in texts]
                return [found[at] for at in random.permutation(len(found))] if mixed else found

            recipe = GRPORecipe(group=6, batch=2, steps=16, lr=3e-4, max_new_tokens=16)
            run = Run(loaded, work / name, (recipe, adapter.LoRARemaking(rank=4)))
            train_grpo(run, [each.prompt for each in learned], reward, name)
            source = f"adapter:file={work / name}"
        outs = lm.generate([each.prompt for each in tested], max_new_tokens=16, drafter=None, logits_source=source)
        right[name] = [float(each.held_by(out.text)) for each, out in zip(tested, outs, strict=True)]
    return compared("right", "sums", **_split(right))


def labels(loaded: LoadedModel, work: Path) -> Report:
    """Labels of steps by an annotator, where it is known which steps are right."""
    exercises, truth = list[Exercise](), list[tuple[float, float]]()
    for number in range(24):
        n = number + 2
        # Wrong are none, the first and what follows from it, the second, or the first alone.
        kind, sums = number % 4, (2 * n + 1, 3 * n + 3)
        first, second = sums[0] + (kind in (1, 3)), sums[1] + (kind in (1, 2))
        steps = [f"First, {n} + {n + 1} = {first}", f"Then {first} + {n + 2} = {second}"]
        reference = f"{n} + {n + 1} = {sums[0]}\n\n{sums[0]} + {n + 2} = {sums[1]}"
        exercises.append(Exercise(f"What is {n} + {n + 1} + {n + 2}?", reference, ("\n\n".join(steps),)))
        truth.append((float(first == sums[0]), float(second == sums[1])))
    found = label_steps(Run(loaded, work / "labels.jsonl", (LabelSettings(max_new_tokens=96),), single=True), exercises)
    own = [
        next(each for each in found if each.prompt == asked.question and each.text == asked.solutions[0])
        for asked in exercises
    ]

    def right(said: Sequence[Sequence[float]]) -> list[float]:
        return [float(np.mean(np.array(one) == np.array(other))) for one, other in zip(said, truth, strict=True)]

    order = np.random.default_rng(0).permutation(len(own))
    return compared(
        "right",
        "solutions",
        {
            "all steps right": right([(1.0, 1.0)] * len(own)),
            "the answer, for all steps": right([(each.reward, each.reward) for each in own]),
        },
        trained=right([each.labels for each in own]),
        control=right([own[at].labels for at in order]),
    )


def _split(figures: dict[str, list[float]]) -> dict[str, Any]:
    rest = dict(figures)
    return {"control": rest.pop("control"), "trained": rest.pop("trained"), "figures": rest}


METHODS: dict[str, Callable[[LoadedModel, Path], Report]] = {
    "orpo": preferences,
    "grpo": rewards,
    "step-labels": labels,
    "lora": adapted("lora"),
    "s2ft": adapted("s2ft"),
}

if __name__ == "__main__":
    main()
