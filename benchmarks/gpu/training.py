"""Part C: a draft head trained on the device, on texts that the embedded model writes there."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from kit import MEASURED, PASSED, Kit, NotRunError

from decodery.core.registry import resolve
from decodery.speculative.heads.drafter import head_kind
from decodery.speculative.heads.head import HEAD, TrainedHead
from decodery.testing import check_identical
from decodery.training.corpus import Corpus
from decodery.training.data import built_in_prompts, write_texts
from decodery.training.head import HeadRecipe, train_head
from decodery.training.kind import Run
from decodery.training.loop import CHECKPOINT

TEXTS = "texts.zip"
LARGEST = 15 << 20
"""Bytes of a file that comes back from the other machine."""
Said = tuple[str, dict[str, Any]]


class _TimeUp(Exception):
    """The share of the time that a step of the training has is over."""


@dataclass(frozen=True)
class Training:
    """What part C needs. keeps: seconds for what comes later.

    work: a folder that stays between runs, for texts, features and the checkpoint.
    earlier: what an earlier run left in its `out`, to go on from on another machine; None for nothing.
    """

    kit: Kit
    device: torch.device
    load: Callable[[str, torch.device], Any]
    few: bool
    keeps: float
    work: Path
    earlier: Path | None

    @property
    def recipe(self) -> HeadRecipe:
        if self.few:
            return HeadRecipe(outputs=80, epochs=1.0, lr=3e-3, batch=8, length=48)
        return HeadRecipe(epochs=20.0, lr=1e-3, batch=32)

    def run(self) -> None:
        """Texts, the head, and whether a drafter takes it."""
        most, keeps = self.kit.left, self.keeps
        self.kit.check("C", "texts of the model", self.texts, needs=5, most=most, keeps=keeps, outcome=MEASURED)
        self.kit.check("C", "training a head", self.head, needs=5, most=most, keeps=keeps, outcome=MEASURED)
        self.kit.check("C", "drafting with the head on the CPU", self.drafts, needs=5, keeps=keeps, outcome=PASSED)

    @property
    def _left(self) -> float:
        """Seconds that are left for this part."""
        return self.kit.reserve(self.keeps)

    @property
    def _text(self) -> Path:
        return self.work / "text"

    @property
    def _head(self) -> Path:
        return self.work / "head"

    def texts(self) -> Said:
        """As many texts as fit in two fifths of the time, in batches; those of an earlier run are taken first."""
        loaded = self.load("bfloat16", self.device)
        if self.earlier is not None and (self.earlier / TEXTS).is_file() and not self._text.exists():
            with zipfile.ZipFile(self.earlier / TEXTS) as archive:
                archive.extractall(self._text)
        if (self._head / "training" / CHECKPOINT).is_file():
            # What a checkpoint has learned from must not change.
            return f"{len(Corpus(self._text))} texts of an earlier run, whose training goes on", {}
        count, tokens, begun = (40, 12, monotonic()) if self.few else (8192, 160, monotonic())
        before = len(Corpus(self._text)) if (self._text / "corpus.json").is_file() else 0
        try:
            write_texts(
                loaded,
                built_in_prompts(loaded, count),
                self._text,
                max_new_tokens=tokens,
                progress=self._until(monotonic() + 0.4 * self._left),
            )
            ended = "all of them"
        except _TimeUp:
            ended = "as many whole shards as there was time for"
        corpus, seconds = Corpus(self._text), monotonic() - begun
        written = sum(len(text.tokens) - text.written for text in corpus)
        left_out = self._pack()
        values = {"texts": len(corpus), "tokens": written, "of_earlier_runs": before, "seconds": round(seconds, 1)}
        return f"{len(corpus)} of {count} texts ({ended}), {written:,} tokens{left_out}", values

    def _pack(self) -> str:
        """Put the texts into `out`, for another machine; what is to be said of it."""
        path = self.kit.out / TEXTS
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for file in sorted(each for each in self._text.iterdir() if not each.name.startswith(".")):
                archive.write(file, file.name)
        if path.stat().st_size > LARGEST:
            path.unlink()
            return f"; {TEXTS} was left out, because it would be larger than {LARGEST >> 20} MiB"
        return ""

    def head(self) -> Said:
        """The head, from an earlier one where there is one, until it is done or the time is over."""
        if not (self._text / "corpus.json").is_file() or len(corpus := Corpus(self._text)) < 20:
            raise NotRunError("fewer than 20 texts were written, and a head is trained on at least so many")
        loaded, start = self.load("bfloat16", self.device), None
        if self.earlier is not None and (self.earlier / HEAD).is_file():
            start = TrainedHead.load(self.earlier / HEAD)
        try:
            until = self._until(monotonic() + self._left - (2 if self.few else 20))
            run = Run(loaded, self._head, (self.recipe,), progress=until, command="make gpu")
            train_head(run, head_kind("eagle-3"), corpus, start=start)
            ended = "to the end of its plan"
        except _TimeUp:
            ended = "until the time was over; the same command goes on from the checkpoint"
        if not (self._head / HEAD).is_file():
            raise NotRunError(f"no checkpoint was written: it trained {ended}")
        self._bring_back()
        facts = TrainedHead.load(self._head / HEAD).facts
        agreement = [facts[f"agreement.{depth}"] for depth in (1, 2, 3)]
        says = ", ".join(f"{each:.1%}" for each in agreement)
        values = {name: facts[name] for name in facts if name.startswith("agreement") or name in ("tokens", "steps")}
        begun = "an earlier head" if start is not None else "nothing"
        return f"from {begun}, best after {facts['steps']} steps, {ended}: right at {says} of places", values

    def drafts(self) -> Said:
        """The head drafts on the CPU, and the texts stay what they are."""
        if not (self._head / HEAD).is_file():
            raise NotRunError("no head was trained")
        loaded = self.load("float32", torch.device("cpu"))
        prompts = built_in_prompts(loaded, 1 if self.few else 3)
        drafter = resolve("drafter", f"eagle-3:head={self._head},tree_policy=none,length=3")
        runs = check_identical(
            loaded.model, prompts, drafter=drafter, seeds=(0,), max_new_tokens=8 if self.few else 48, tested="drafted"
        )
        written, passes = (sum(each) for each in zip(*((len(r.generated), r.trace.passes) for r in runs), strict=True))
        rate = written / max(passes, 1)
        return f"texts identical, {rate:.2f} tokens a pass", {"tokens_per_pass": round(rate, 3)}

    def _until(self, end: float) -> Callable[[str, int, int], None]:
        """Progress that ends what reports it when the time is over, and brings back each head that was written."""
        seen = [0.0]

        def report(what: str, done: int, total: int) -> None:
            path = self._head / HEAD
            if path.is_file() and path.stat().st_mtime != seen[0]:
                seen[0] = path.stat().st_mtime
                self._bring_back()
                self.kit.note(f"the best head so far is in {self.kit.out / HEAD} ({what}: {done} of {total})")
            if monotonic() > end:
                raise _TimeUp

        return report

    def _bring_back(self) -> None:
        shutil.copyfile(self._head / HEAD, self.kit.out / f".{HEAD}")
        (self.kit.out / f".{HEAD}").replace(self.kit.out / HEAD)
