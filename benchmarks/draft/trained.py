"""What a trained draft model is worth: how often it is right, tokens per pass, and what its passes cost.

    python benchmarks/draft/trained.py [--draft smollm2-draft] [--target smollm2] [--data ../shared/data]
        [--step 8] [--new 64] [--timed]

Writes benchmarks/results/draft-trained.json. Without --timed nothing is measured that depends on the machine's load.
The questions serve for evaluation alone: the draft has never seen them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

import decodery
from decodery.llm.llm import LLM, Output
from decodery.models.batch import Batch, Segment
from decodery.models.protocol import LanguageModel
from decodery.speculative.drafters.draft_model import DraftModel

sys.path.insert(0, str(Path(__file__).parents[1]))
from decodery_benchmarks.results import write_result

RESULTS = Path(__file__).parents[1] / "results"
ROWS = (1, 4, 8)


def acceptance(target: LanguageModel, draft: LanguageModel, output: Output, temperature: float) -> list[np.ndarray]:
    """Where the target chose each token of a text: sum min(p, q), and whether both find the same token most likely."""
    ids = np.asarray([*output.prompt_tokens, *output.tokens[:-1]])
    rows = list(range(len(output.prompt_tokens) - 1, len(ids)))
    p, q = (
        model.forward(Batch([Segment.chunk(ids, model.new_cache(), logit_rows=rows)])).logits.double()
        for model in (target, draft)
    )
    laws = [(logits / (temperature or 1.0)).softmax(dim=-1) for logits in (p, q)]
    return [torch.minimum(*laws).sum(dim=-1).numpy(), (p.argmax(dim=-1) == q.argmax(dim=-1)).numpy()]


def pass_ms(model: LanguageModel, rows: int, context: int = 200, repeats: int = 200) -> float:
    """Median milliseconds of a pass over `rows` rows after `context` tokens, as a drafter makes it."""
    cache = model.new_cache()
    model.forward(Batch([Segment.chunk(np.arange(context) + 300, cache, logit_rows=[context - 1])]))
    cache.keep(range(context))
    times = []
    for _ in range(repeats):
        begin = perf_counter()
        model.forward(Batch([Segment.chunk(np.arange(rows) + 400, cache)]))
        times.append(perf_counter() - begin)
    return round(1000 * median(times), 3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--draft", default="smollm2-draft")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--step", type=int, default=8)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--timed", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "draft-trained.json")
    options = parser.parse_args()
    lm: LLM = decodery.load(options.target)
    draft = decodery.load(options.draft).model
    lines = (options.data / "spec_bench_dev.jsonl").read_text("utf-8").splitlines()
    questions = [json.loads(line) for line in lines][:: options.step]
    result: dict[str, Any] = {"target": options.target, "draft": options.draft, "questions": len(questions), "rows": {}}
    for temperature in (0.0, 1.0):
        shares, same, by_category = [], [], {}
        emitted = passes = 0
        for question in questions:
            output = lm.generate(
                question["turns"][0],
                max_new_tokens=options.new,
                temperature=temperature,
                seed=1,
                drafter=DraftModel(draft, length=4),
                acceptance_rule="rejection" if temperature else "coupled",
            )
            assert isinstance(output, Output)
            share, agreed = acceptance(lm.model, draft, output, temperature)
            shares.append(share)
            same.append(agreed)
            steps = [step for step in output.trace.steps if not step.prefill]
            emitted += sum(step.emitted for step in steps)
            passes += len(steps)
            sums = by_category.setdefault(question["category"], [0, 0])
            sums[0] += sum(step.emitted for step in steps)
            sums[1] += len(steps)
        result["rows"][f"temperature {temperature:g}"] = {
            "acceptance": round(float(np.concatenate(shares).mean()), 4),
            "agreement": round(float(np.concatenate(same).mean()), 4),
            "tokens_per_pass": round(emitted / passes, 3),
            "by_category": {name: round(a / b, 2) for name, (a, b) in sorted(by_category.items())},
        }
    if options.timed:
        result["milliseconds"] = {
            name: {str(rows): pass_ms(model, rows) for rows in ROWS}
            for name, model in (("target", lm.model), ("draft", draft))
        }
    write_result(options.out, result, summary=["milliseconds"])
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
