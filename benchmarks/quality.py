"""What precision costs in quality: perplexity on held-out text, and greedy tokens that differ from float32's.

    python benchmarks/quality.py --data ../shared/data --out benchmarks/results/quality.json

Text: the passages of Spec-Bench's summarization and retrieval questions. Greedy tokens: the first turns of Spec-Bench
questions, the float32 text being fed to every precision, so that one early difference does not count many times.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from rich.progress import track

import decodery
from decodery.lm import LM
from decodery.model.batch import Batch, Segment

WINDOW = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/quality.json"))
    parser.add_argument("--precisions", default="float32,bfloat16,int8,int4")
    parser.add_argument("--windows", type=int, default=64, help=f"windows of {WINDOW} tokens for the perplexity")
    parser.add_argument("--every", type=int, default=2, help="take every n-th question for the greedy comparison")
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args()
    questions = [json.loads(line) for line in (options.data / "spec_bench_dev.jsonl").open(encoding="utf-8")]
    reference = decodery.load("smollm2", dtype="float32")
    windows = held_out(reference, questions, options.windows)
    texts = greedy_texts(reference, questions[:: options.every], options.new_tokens)
    rows = []
    for precision in options.precisions.split(","):
        lm = reference if precision == "float32" else decodery.load("smollm2", dtype=precision)
        begin = time.perf_counter()
        loss, scored = perplexity(lm, windows)
        different, compared, affected = differences(lm, texts)
        rows.append(
            {
                "precision": precision,
                "perplexity": round(math.exp(loss), 4),
                "tokens_scored": scored,
                "greedy_differ": different,
                "greedy_compared": compared,
                "texts_affected": affected,
                "texts": len(texts),
                "seconds": round(time.perf_counter() - begin, 1),
            }
        )
        print(rows[-1], flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    settings = {"windows": len(windows), "window": WINDOW, "every": options.every, "new_tokens": options.new_tokens}
    options.out.write_text(json.dumps({"model": reference.name, "settings": settings, "rows": rows}, indent=1) + "\n")


def held_out(lm: LM, questions: list[dict], count: int) -> list[list[int]]:
    """Windows of consecutive tokens from the passages people ask about."""
    passages = [each["turns"][0] for each in questions if each["category"] in ("summarization", "rag")]
    tokens = lm.tokenizer.encode("\n\n".join(passages), special=False)
    return [tokens[at : at + WINDOW] for at in range(0, len(tokens) - WINDOW, WINDOW)][:count]


def logits(lm: LM, tokens: list[int], first: int = 0) -> torch.Tensor:
    """[n - first, vocab] logits after every token from number `first` on."""
    rows = list(range(first, len(tokens)))
    with torch.no_grad():
        return lm.model.forward(Batch([Segment.chunk(tokens, lm.model.new_cache(), logit_rows=rows)])).logits


def perplexity(lm: LM, windows: list[list[int]]) -> tuple[float, int]:
    """Mean negative log-likelihood in nats of all but the first token of every window, and how many were scored."""
    total, scored = 0.0, 0
    for window in track(windows, description=f"perplexity {lm.dtype}"):
        rows = logits(lm, window[:-1])
        total += float(torch.nn.functional.cross_entropy(rows, torch.tensor(window[1:]), reduction="sum"))
        scored += len(window) - 1
    return total / scored, scored


def greedy_texts(lm: LM, questions: list[dict], length: int) -> list[tuple[list[int], int]]:
    """Prompt and greedy answer in float32, with the prompt's length."""
    texts = []
    for question in track(questions, description="float32 answers"):
        prompt = lm.encode(question["turns"][0])
        answer = lm.generate([{"role": "user", "content": question["turns"][0]}], max_new_tokens=length).tokens
        texts.append((prompt + answer, len(prompt)))
    return texts


def differences(lm: LM, texts: list[tuple[list[int], int]]) -> tuple[int, int, int]:
    """Answer tokens that this precision would have chosen otherwise, of how many, and in how many texts."""
    different = compared = affected = 0
    for tokens, start in track(texts, description=f"greedy {lm.dtype}"):
        rows = logits(lm, tokens[:-1], start - 1)
        wrong = int((rows.numpy().argmax(axis=-1) != np.array(tokens[start:])).sum())
        different, compared, affected = different + wrong, compared + len(rows), affected + bool(wrong)
    return different, compared, affected


if __name__ == "__main__":
    main()
