"""Draft heads of three kinds, trained alike: on the same texts for the same processor time, and what each is worth.

    OMP_NUM_THREADS=1 python benchmarks/draft/alike.py --work DIR [--texts 3072] [--minutes 60] [--steps N]
        [--start HEAD] [--half] [--out FILE] [NAME ...]

NAMEs of HEADS, by default all of them. The embedded model writes the texts (see task_prompts.py), greedy and at
temperature 0.7, and the answers to held-out prompts of the same kinds. Every head learns for `minutes` of processor
time. What is finished stays in DIR, and what was interrupted goes on. Then every head is unrolled over the held-out
answers: how often its most likely token is the model's, by depth and by kind of prompt, beside the untrained heads, the
shipped one and a control whose states belong to another text.

--steps counts steps in place of minutes. --start is the head that those "from the shipped" begin with, by default the
shipped one. --half leaves beside each of them `half.safetensors`: the mean of its weights and of those it began with.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time
from typing import Any

import torch
from head_depths import features
from heads import RESULTS
from task_prompts import KINDS, task_prompts

import decodery
from decodery.llm.llm import LLM
from decodery.models.loaders.drafts import shipped_head
from decodery.models.loaders.load import LoadedModel, load
from decodery.models.loaders.store import Progress, terminal_progress
from decodery.speculative.heads.drafter import head_kind
from decodery.speculative.heads.head import HEAD, BoundHead, TrainedHead
from decodery.speculative.heads.parts import Parts
from decodery.training.corpus import Corpus
from decodery.training.cut import keep_tokens
from decodery.training.data import write_texts
from decodery.training.features import FeatureRows, FeatureStore
from decodery.training.head import TOP, HeadRecipe, _HeadTraining, _StoredTexts, train_head
from decodery.training.head_batch import judged, rank_rates, taught
from decodery.training.kind import Run

sys.path.insert(0, str(Path(__file__).parents[1]))
from decodery_benchmarks.results import write_result

NEW = 128
HELD = 160
OUTPUTS = 6144
HALF = "half.safetensors"
TRIAL = 6
"""Steps that a training's cost is measured on."""


@dataclass(frozen=True)
class Kind:
    """One head: its drafter, whether it goes on from the shipped one, and its training."""

    drafter: str
    shape: dict[str, Any]
    lr: float = 1e-3
    loss: str = "kl"
    goes_on: bool = False


HEADS = {
    "eagle-3": Kind("eagle-3", {}),
    "eagle-3, lk_hybrid": Kind("eagle-3", {}, loss="lk_hybrid"),
    "eagle-3 from the shipped": Kind("eagle-3", {}, lr=3e-4, goes_on=True),
    "eagle-3 from the shipped, lk_hybrid": Kind("eagle-3", {}, lr=3e-4, loss="lk_hybrid", goes_on=True),
    "dflash": Kind("dflash", {"layers": 1}),
    "dspark": Kind("dspark", {"layers": 1, "rank": 64}),
}


def command_line() -> str:
    return shlex.join(["python", "benchmarks/draft/alike.py", *sys.argv[1:]])


def folder(work: Path, name: str) -> Path:
    return work / name.replace(" ", "-").replace(",", "")


def begun(target: LoadedModel, kind: Kind, texts: Corpus, start: Path | None) -> TrainedHead:
    """A head before its training. All kinds read the same states, so that what was read once serves all."""
    path = start or shipped_head("eagle-3", target.model.config.vocabulary)
    assert path is not None
    first = TrainedHead.load(path)
    if kind.goes_on:
        return first
    bound = head_kind(kind.drafter)
    tensors, settings = bound.untrained(target.model, 0, **kind.shape)
    learned, _ = texts.split()
    kept = keep_tokens((texts[number] for number in learned), OUTPUTS, target.model, target.model.config.eos_ids)
    tensors["vocabulary"] = kept.ids.int()
    settings["taps"] = first.settings["taps"]
    return TrainedHead(kind.drafter, tensors, settings, model=target.model.fingerprint)


def steps_in(seconds: float, head: BoundHead, store: FeatureStore, recipe: HeadRecipe) -> int:
    """How many steps a training does in so many seconds of processor time."""
    learned, held = store.corpus.split()
    run = _HeadTraining(head, _StoredTexts(store, learned, held[:1]), None, recipe, TRIAL)
    run.loss(0)
    begin = process_time()
    for step in range(TRIAL):
        run.loss(step).backward()
    return max(TRIAL, round(seconds * TRIAL / (process_time() - begin)))


def train(target: LoadedModel, name: str, texts: Corpus, options: argparse.Namespace, progress: Progress) -> None:
    work, kind, out = options.work, HEADS[name], folder(options.work, name)
    begin = begun(target, kind, texts, options.start)
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "features").exists():
        (work / "features").mkdir(exist_ok=True)
        (out / "features").symlink_to(work / "features")
    recipe = HeadRecipe(outputs=OUTPUTS, lr=kind.lr, loss=kind.loss)
    store = FeatureStore(target.model, texts, begin.settings["taps"], work / "features", TOP, progress)
    bound = head_kind(kind.drafter)
    counted = out / "steps.txt"
    if not counted.is_file():
        head = bound(floating(begin), target.model)
        steps = options.steps or steps_in(60 * options.minutes, head, store, recipe)
        counted.write_text(f"{steps}\n", "utf-8")
    steps = int(counted.read_text("utf-8"))
    learned, _ = texts.split()
    recipe = replace(recipe, epochs=steps * recipe.batch / len(learned))
    start, command = floating(begin), command_line()
    train_head(Run(target, out, (recipe,), progress=progress, command=command), bound, texts, start=start)
    if options.half:
        halve(target, begin, out, store, recipe)


def halve(target: LoadedModel, begin: TrainedHead, out: Path, store: FeatureStore, recipe: HeadRecipe) -> None:
    """Write the mean of a trained head's weights and of those it began with, judged on the same held-out texts."""
    trained, bound = TrainedHead.load(out / HEAD), head_kind(begin.kind)
    first, last = floating(begin).tensors, floating(trained).tensors
    mean = {name: (first[name] + own) / 2 if own.is_floating_point() else own for name, own in last.items()}
    finished = replace(trained, tensors=Parts(mean).quantized())
    learned, held = store.corpus.split()
    texts = _StoredTexts(store, learned, held[:48])
    batches = _HeadTraining(bound(floating(finished), target.model), texts, None, recipe, 1).every
    head = bound(finished, target.model)
    facts = {**trained.facts, **judged(head, batches, recipe.decay), "rates": rank_rates(head, batches)}
    replace(finished, facts=facts).save(out / HALF)


def floating(head: TrainedHead) -> TrainedHead:
    """The head in floats of its own: a training of the same tensors leaves their gradients there."""
    parts = Parts(head.tensors).floating()
    return replace(head, tensors={name: each.detach().clone() for name, each in parts.items()})


def by_kind(head: BoundHead, shown: dict[str, list[FeatureRows]], *, shuffled: bool = False) -> dict[str, Any]:
    """How often a head is right on held-out answers, by kind of prompt and in all."""
    place = torch.full((head.model.vocab_size,), -1, dtype=torch.int64, device="cpu")
    known = torch.arange(head.model.vocab_size, device="cpu") if head.vocabulary is None else head.vocabulary
    place[known] = torch.arange(len(known), device="cpu")
    batches: dict[str, list[Any]] = {}
    for kind, rows in shown.items():
        if shuffled:
            random = torch.Generator().manual_seed(0)
            rows = [
                replace(
                    each,
                    states={tap: own[torch.randperm(len(own), generator=random)] for tap, own in each.states.items()},
                )
                for each in rows
            ]
        batches[kind] = [taught([each], place, 7, len(each.text.tokens), head.dtype, head.lead) for each in rows]
    found = {kind: judged(head, each, 1.0) for kind, each in batches.items()}
    found["all"] = judged(head, [each for own in batches.values() for each in own], 1.0)
    return {kind: {name: round(value, 4) for name, value in own.items()} for kind, own in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=3072)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--start", type=Path, metavar="HEAD")
    parser.add_argument("--half", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "draft-alike.json")
    parser.add_argument("--held", type=int, default=HELD)
    parser.add_argument("--train", action="store_true", help="train alone, measure nothing")
    options = parser.parse_args()
    target, work = load("smollm2"), options.work
    encode = LLM(target).encode
    names = options.names or list(HEADS)
    with terminal_progress(counts=True) as progress:
        prompts = [encode(prompt) for _, prompt in task_prompts(options.texts, 47)]
        texts = write_texts(
            target, prompts, work / "texts", max_new_tokens=NEW, temperatures=(0.0, 0.0, 0.0, 0.7), seed=47,
            progress=progress,
        )  # fmt: skip
        kinds, held = zip(*task_prompts(HELD, 4711), strict=True)
        answers = write_texts(
            target, [encode(prompt) for prompt in held], work / "held", max_new_tokens=NEW, temperatures=(0.0,),
            seed=4711, progress=progress,
        )  # fmt: skip
        for name in names:
            train(target, name, texts, options, progress)
    if options.train:
        return
    lm = decodery.load("smollm2")
    first = begun(target, HEADS["eagle-3 from the shipped"], texts, options.start)
    taps = tuple(first.settings["taps"])
    shown: dict[str, list[FeatureRows]] = {kind: [] for kind in KINDS}
    for number in range(min(options.held, len(answers))):
        shown[kinds[number]].append(features(lm, answers[number], taps))
    rows: dict[str, Any] = {
        "shipped" if options.start is None else "start": by_kind(head_kind("eagle-3")(first, lm.model), shown)
    }
    for name in names:
        kind, bound = HEADS[name], head_kind(HEADS[name].drafter)
        if not kind.goes_on:
            rows[f"{name}, untrained"] = by_kind(bound(begun(target, kind, texts, None), lm.model), shown)
        trained = TrainedHead.load(folder(work, name) / HEAD)
        rows[name] = {
            **by_kind(bound(trained, lm.model), shown),
            "steps": trained.facts["steps"],
            "bytes": sum(each.nbytes for each in trained.tensors.values()),
        }
        if options.half:
            rows[f"{name}, half"] = by_kind(bound(TrainedHead.load(folder(work, name) / HALF), lm.model), shown)
        rows[f"{name}, states shuffled"] = by_kind(bound(trained, lm.model), shown, shuffled=True)
        for each in (f"{name}, untrained", name, f"{name}, half", f"{name}, states shuffled"):
            if each in rows:
                print(each, rows[each]["all"], flush=True)
    write_result(
        options.out,
        {
            "command": command_line(),
            "texts": len(texts),
            "held": options.held,
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
