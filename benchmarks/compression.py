"""How small a language model makes texts, beside general-purpose compressors, and how many passes reading them takes.

    OMP_NUM_THREADS=1 python benchmarks/compression.py

Texts: those of benchmarks/texts, written for this. Of each: bytes of the compressed file and of its bits alone, bits
per byte, what the model's own law would need (before it is rounded to frequencies), and xz -9; zstd -19 where the
package `zstandard` is installed. Every text is decompressed by each drafter and compared. Counts alone, no times.
Writes benchmarks/results/compression.json; what is there already is not measured again.
"""

from __future__ import annotations

import argparse
import lzma
import math
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch

import decodery
from decodery.core.trace import Trace
from decodery.extras.text_compression.file import unpack
from decodery.extras.text_compression.text import compress, decompress, read_laws, tokens_of
from decodery.llm.llm import LLM
from decodery.llm.resolve_settings import resolve_drafter
from decodery_benchmarks.results import begun_result, write_result

ROOT = Path(__file__).parents[1]
DRAFTERS = ("draft-model", "prompt-lookup")
"""Without one there are as many passes as tokens."""


def bound(lm: LLM, text: bytes) -> float:
    """Bits that the model's law gives the text's tokens."""
    total = 0.0
    for tokens, logits in read_laws(lm, tokens_of(lm.tokenizer, text)):
        laws = logits.double().log_softmax(dim=-1)
        total -= float(laws[torch.arange(len(tokens)), torch.tensor(tokens)].sum()) / math.log(2)
    return total


def sizes(lm: LLM, text: bytes) -> dict[str, Any]:
    """What the text becomes."""
    made = compress(lm, text)
    header, payload = unpack(made)
    bits = bound(lm, text)
    return {
        "bytes": len(text),
        "tokens": header.tokens,
        "compressed": len(made),
        "bits per byte": 8 * len(made) / len(text),
        "coded bits": 8 * len(payload),
        "bits of the law": bits,
        "over the law": 8 * len(payload) / bits,
        "passes": {},
    }


def others(text: bytes) -> dict[str, float]:
    """Bits per byte of compressors for everything; zstd is a program, and left out where it is not installed."""
    found = {"xz -9": lzma.compress(text, preset=9)}
    if program := shutil.which("zstd"):
        made = subprocess.run([program, "-19", "--stdout"], input=text, capture_output=True, check=True)
        found["zstd -19"] = made.stdout
    return {name: 8 * len(made) / len(text) for name, made in found.items()}


def passes(lm: LLM, text: bytes, drafter: str) -> int:
    """How many it takes to get the text back, which must be the same."""
    trace = Trace()
    if decompress(lm, compress(lm, text), drafter=resolve_drafter(drafter), trace=trace) != text:
        raise SystemExit(f"{drafter} changes the text")
    return len(trace.steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=sorted((ROOT / "benchmarks" / "texts").glob("*.txt")))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "compression.json")
    args = parser.parse_args()
    lm = decodery.load("smollm2", dtype="int8")
    results = begun_result(args.out)
    results["command"] = " ".join(["python", "benchmarks/compression.py", *sys.argv[1:]])

    def note() -> None:
        write_result(args.out, results)

    for file in args.files:
        if file.stem not in results["rows"]:
            results["rows"][file.stem] = sizes(lm, file.read_bytes())
        results["rows"][file.stem] |= others(file.read_bytes())
        note()
    for drafter, file in product(DRAFTERS, args.files):
        known = results["rows"][file.stem]["passes"]
        if drafter not in known:
            known[drafter] = passes(lm, file.read_bytes(), drafter)
            note()


if __name__ == "__main__":
    main()
