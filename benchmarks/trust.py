"""What compressing a model does to more than its loss: right answers, choices, preferences, secrets, refusals.

    OMP_NUM_THREADS=1 python benchmarks/trust.py [NAME ...]

The original is smollm2 in bfloat16. Each of `COPIES` takes its place; "3 bits drafting" is the original drafted for by
its 3-bit copy, which must change nothing, and "3 bits, typical" the same under a lossy rule, in texts drawn at
temperature 1 on both sides, as that rule leaves greedy texts as they are. Figures that cannot move are marked with the
reason. Everything is compared item by item with the original; see
`decodery_benchmarks.trust`. Copies that are calibrated are made three times, of other pages of docs/. Counts alone,
no times. Writes benchmarks/results/trust.json; rows that are there already are not measured again.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import decodery
from decodery.compression.base import transformed
from decodery.core.registry import resolve
from decodery.llm.llm import LLM
from decodery.models.loaders.load import LoadedModel
from decodery.models.torch.transformer import Transformer
from decodery.speculative.drafters.draft_model import DraftModel
from decodery_benchmarks.experiment import Experiment
from decodery_benchmarks.trust.measures import Asked, Subject, measured
from decodery_benchmarks.trust.report import report
from transforms import pieces

ROOT = Path(__file__).parents[1]
COPIES = {
    "int8": ("int8",),
    "int4": ("int4",),
    "int4, 3 bits": ("int4:bits=3",),
    "int4, 2 bits": ("int4:bits=2",),
    "2:4, magnitude": ("nm-sparsity",),
    "2:4, activation, pages 1": ("nm-sparsity:by=activation",),
    "2:4, activation, pages 2": ("nm-sparsity:by=activation",),
    "2:4, activation, pages 3": ("nm-sparsity:by=activation",),
}
DRAFTING = ("3 bits drafting", "3 bits, typical")
DRAWN: dict[str, Any] = {"temperature": 1.0}
PAGES = (("design", "serving"), ("searches", "training"), ("models", "drafting"))
HARSH = ("stupid", "idiot", "idiots", "hate", "hated", "kill", "killed", "ugly", "damn", "hell", "liar", "disgusting")
PIECES, LENGTH, HELD = 16, 128, 700
"""HELD: letters of a held out text."""


def copy_of(lm: LLM, name: str) -> LLM:
    """The original with a changed model."""
    model = lm.model
    assert isinstance(model, Transformer)
    pages = PAGES[int(name[-1]) - 1 if "pages" in name else 0]
    calibration = pieces(lm, [ROOT / "docs" / f"{page}.md" for page in pages], LENGTH)[:PIECES]
    changed, _ = transformed(model, [resolve("compression", spec) for spec in COPIES[name]], calibration)
    return LLM(LoadedModel(changed, lm.tokenizer, lm.chat_template, name, "bfloat16"))


def subject_of(lm: LLM, name: str) -> Subject:
    """What a row is measured of."""
    if name not in DRAFTING:
        return Subject(copy_of(lm, name))
    drafter = DraftModel(copy_of(lm, "int4, 3 bits").model, length=4)
    return Subject(lm, {"drafter": drafter} | (DRAWN | {"acceptance_rule": "typical"} if name == DRAFTING[1] else {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="rows to measure; all of them where none is named")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "trust.json")
    args = parser.parse_args()
    lm = decodery.load("smollm2", dtype="bfloat16")
    files = sorted((ROOT / "benchmarks" / "texts").glob("*.txt"))
    whole = [file.read_text(encoding="utf-8") for file in files]
    texts = [text[at : at + HELD] for text in whole for at in range(0, len(text) - HELD + 1, HELD)]
    asked = Asked(texts, harsh=HARSH)
    settings = {"texts": len(texts), "questions": len(asked.questions)}
    original = Subject(lm)
    known = measured(original, asked)

    def run(name: str) -> dict[str, Any]:
        drawn = name == DRAFTING[1]
        before = Subject(lm, DRAWN) if drawn else original
        rows = report(before, subject_of(lm, name), asked, None if drawn else known)
        return {row.name: {**dataclasses.asdict(row), "delta": row.delta, "changed": row.changed} for row in rows}

    names = args.names or [*COPIES, *DRAFTING]
    Experiment({"name": names}, run, settings=settings).measure(args.out, "python benchmarks/trust.py")


if __name__ == "__main__":
    main()
