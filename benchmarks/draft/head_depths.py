"""How often a head's most likely token is the model's own, by how far ahead, on questions nobody has learned from.

    python benchmarks/draft/head_depths.py [SPEC ...] [--questions 52] [--new 64]

SPECs are drafters with a head, as `hydra:head=FOLDER`; without any, the head that comes along. Texts are the embedded
model's greedy answers to questions of Spec-Bench (DECODERY_DATA), as many of every category; a head is unrolled over
them. Nothing is timed. Writes benchmarks/results/draft-head-depths.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from heads import RESULTS, questions

import decodery
from decodery.core.registry import resolve
from decodery.core.topk import logsumexp, topk
from decodery.llm.llm import LLM
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.drafts import HEAD
from decodery.speculative.heads.drafter import HeadDrafter, bound
from decodery.training.corpus import TrainingText
from decodery.training.features import FeatureRows
from decodery.training.head import TOP, judged, taught

sys.path.insert(0, str(Path(__file__).parents[1]))
from decodery_benchmarks.results import write_result


def features(lm: LLM, text: TrainingText, taps: tuple[Any, ...]) -> FeatureRows:
    """What the model shows of a text while it reads it."""
    segment = Segment.chunk(text.tokens.astype(np.int64), lm.model.new_cache())
    with torch.no_grad():
        scores = lm.model.forward(Batch([segment]), taps=taps)
    logits = scores.logits.float()
    ids, values = topk(logits, TOP)
    logprobs = torch.from_numpy(values - logsumexp(logits, values[:, 0])[:, None])
    return FeatureRows(text, {tap: scores.hidden[tap] for tap in taps}, torch.from_numpy(ids), logprobs)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("specs", nargs="*", default=[HEAD])
    parser.add_argument("--questions", type=int, default=52)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--out", type=Path, default=RESULTS / "draft-head-depths.json")
    options = parser.parse_args()
    lm = decodery.load("smollm2")
    texts = []
    for question in questions(options.questions, 0):
        output = lm.generate(question["turns"][0], max_new_tokens=options.new, drafter="prompt-lookup")
        tokens = np.asarray([*output.prompt_tokens, *output.tokens], dtype=np.int32)
        texts.append(TrainingText(tokens, len(output.prompt_tokens)))
    command = "python benchmarks/draft/head_depths.py " + " ".join(
        [*options.specs, f"--questions {options.questions}", f"--new {options.new}"]
    )
    result: dict[str, Any] = {
        "command": command,
        "questions": options.questions,
        "new_tokens": options.new,
        "rows": {},
    }
    for spec in options.specs:
        drafter = resolve("drafter", spec).bind(lm.model)
        assert isinstance(drafter, HeadDrafter) and drafter.trained is not None
        head = bound(drafter.kind, drafter.trained, lm.model)
        place = torch.full((lm.model.vocab_size,), -1)
        known = torch.arange(lm.model.vocab_size) if head.vocabulary is None else head.vocabulary
        place[known] = torch.arange(len(known))
        training_batches = []
        for text in texts:
            shown = features(lm, text, head.taps)
            training_batches.append(taught([shown], place, 5, len(text.tokens), head.dtype, head.lead))
        found = judged(head, training_batches, 1.0)
        result["rows"][spec] = {name: round(value, 4) for name, value in found.items()}
        print(spec, json.dumps(result["rows"][spec]), flush=True)
    write_result(options.out, result)


if __name__ == "__main__":
    main()
