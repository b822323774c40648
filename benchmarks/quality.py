"""What precision costs in quality: perplexity on held-out text, and greedy tokens that differ from float32's.

    python benchmarks/quality.py --data ../shared/data --out benchmarks/results/quality.json
    python benchmarks/quality.py --data ../shared/data --model FILE.gguf --precisions float32,int8,int4,llama.cpp
    python benchmarks/quality.py --data ../shared/data --precisions float32,int8,int8/float16,int4,int4/float16

int8/float16 is int8 with keys and values kept in float16.

Text: the passages of Spec-Bench's summarization and retrieval questions. Greedy tokens: the first turns of Spec-Bench
questions, the float32 text being fed to every precision, so that one early difference does not count many times.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.progress import track

import decodery
from decodery.llm.llm import LLM
from decodery.models.batch import Batch, Segment
from decodery_benchmarks.intervals import interval
from decodery_benchmarks.peers.base import checkpoint
from decodery_benchmarks.results import write_result

WINDOW = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/quality.json"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--precisions", default="float32,bfloat16,int8,int4", help="also llama.cpp, of a .gguf file")
    parser.add_argument("--windows", type=int, default=64, help=f"windows of {WINDOW} tokens for the perplexity")
    parser.add_argument("--every", type=int, default=2, help="take every n-th question for the greedy comparison")
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args()
    questions = [json.loads(line) for line in (options.data / "spec_bench_dev.jsonl").open(encoding="utf-8")]
    reference = decodery.load(options.model, dtype="float32")
    windows = held_out(reference, questions, options.windows)
    texts = greedy_texts(reference, questions[:: options.every], options.new_tokens)
    rows, losses = [], dict[str, np.ndarray]()
    for precision in options.precisions.split(","):
        score = scorer(reference, options.model, precision)
        begin = time.perf_counter()
        losses[precision] = found = window_losses(precision, score, windows)
        different, compared, affected = differences(precision, score, texts)
        rows.append(
            {
                "precision": precision,
                "perplexity": round(math.exp(found.mean()), 4),
                "tokens_scored": sum(len(window) - 1 for window in windows),
                "greedy_differ": different,
                "greedy_compared": compared,
                "texts_affected": affected,
                "texts": len(texts),
                "seconds": round(time.perf_counter() - begin, 1),
            }
        )
        if "/" in precision and (weights := precision.partition("/")[0]) in losses:
            rows[-1]["more"] = more(found - losses[weights])
        print(rows[-1], flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    settings = {"windows": len(windows), "window": WINDOW, "every": options.every, "new_tokens": options.new_tokens}
    command = shlex.join(["python", "benchmarks/quality.py", *sys.argv[1:]])
    result = {"command": command, "model": reference.name, "settings": settings, "rows": rows}
    write_result(options.out, result)


def held_out(lm: LLM, questions: list[dict], count: int) -> list[list[int]]:
    """Windows of consecutive tokens from the passages people ask about, after what begins a text."""
    passages = [each["turns"][0] for each in questions if each["category"] in ("summarization", "rag")]
    tokens, begins = lm.tokenizer.encode("\n\n".join(passages), special=False), lm.tokenizer.encode("")
    size = WINDOW - len(begins)
    return [begins + tokens[at : at + size] for at in range(0, len(tokens) - size, size)][:count]


Score = Callable[[list[int], int], torch.Tensor]
"""[n - first, vocab] logits after every token from number `first` on."""


def scorer(reference: LLM, model: str, precision: str) -> Score:
    """What reads tokens at a precision, or by another program."""
    if precision == "llama.cpp":
        return llama_cpp(checkpoint(model))
    dtype, _, kept = precision.partition("/")
    lm = reference if precision == "float32" else decodery.load(model, dtype=dtype, kv_dtype=kept or "auto")
    return lambda tokens, first: logits(lm, tokens, first)


def logits(lm: LLM, tokens: list[int], first: int) -> torch.Tensor:
    rows = list(range(first, len(tokens)))
    with torch.no_grad():
        return lm.model.forward(Batch([Segment.chunk(tokens, lm.model.new_cache(), logit_rows=rows)])).logits


def llama_cpp(path: Path) -> Score:
    """Needs llama-cpp-python."""
    from llama_cpp import Llama

    llama = Llama(str(path), n_ctx=8 * WINDOW, logits_all=True, verbose=False)

    def score(tokens: list[int], first: int) -> torch.Tensor:
        llama.reset()
        llama.eval(tokens)
        return torch.from_numpy(llama.scores[first : len(tokens)].copy())

    return score


def window_losses(name: str, score: Score, windows: list[list[int]]) -> np.ndarray:
    """[windows] mean negative log-likelihood in nats of all but a window's first token; all are equally long."""
    losses = [
        float(torch.nn.functional.cross_entropy(score(window[:-1], 0), torch.tensor(window[1:])))
        for window in track(windows, description=f"perplexity {name}")
    ]
    return np.array(losses)


def more(nats: np.ndarray) -> list[float]:
    """By what share perplexity grows for these differences of windows, and a 95 % interval of resampled windows."""
    return [round(math.expm1(each), 6) for each in (nats.mean(), *interval(nats, digits=9))]


def greedy_texts(lm: LLM, questions: list[dict], length: int) -> list[tuple[list[int], int]]:
    """Prompt and greedy answer in float32, with the prompt's length."""
    texts = []
    for question in track(questions, description="float32 answers"):
        prompt = lm.encode(question["turns"][0])
        texts.append((prompt + lm.generate(question["turns"][0], max_new_tokens=length).tokens, len(prompt)))
    return texts


def differences(name: str, score: Score, texts: list[tuple[list[int], int]]) -> tuple[int, int, int]:
    """Answer tokens that this precision would have chosen otherwise, of how many, and in how many texts."""
    different = compared = affected = 0
    for tokens, start in track(texts, description=f"greedy {name}"):
        rows = score(tokens[:-1], start - 1)
        wrong = int((rows.numpy().argmax(axis=-1) != np.array(tokens[start:])).sum())
        different, compared, affected = different + wrong, compared + len(rows), affected + bool(wrong)
    return different, compared, affected


if __name__ == "__main__":
    main()
