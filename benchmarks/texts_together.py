"""Several texts at once: tokens a second of plain decoding, of `auto` and of llama.cpp, in alternating runs.

    DECODERY_THREADS=2 python benchmarks/texts_together.py MODEL [--dtype int8] [--kv-dtype int8] [--peer PYTHON]

PYTHON is an interpreter with `xllamacpp`, which runs in a process of its own on the same file; without it, or if MODEL
is no file, the peer is left out. Texts answer the built-in questions of `decodery bench`, --new tokens each whatever
they say, greedy. Each has a cache namespace of its own and each run a fresh memory, so that no draft comes of another
text or run. All prompts are read in one pass, so that texts begin together however fast each goes on; time counts after
it; llama.cpp's is by its own clock. Reported are medians of --rounds
and their range, and the ratio to one text. Writes benchmarks/results/texts-together.json, a row for each model, dtype
and number of texts; for a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

import decodery
from decodery.bench.workloads import questions
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.engine.schedule import Limits
from decodery.llm.llm import LLM
from decodery.step.drafter_memory import Memory
from decodery_benchmarks.peers.llama_cpp_server import LlamaCppServer
from decodery_benchmarks.results import begun_result, write_result

RESULTS = Path(__file__).parent / "results" / "texts-together.json"


def ours(lm: LLM, prompts: list[list[int]], drafter: str | None, new: int) -> float:
    """Tokens a second of all texts."""
    limits = Limits(rows=sum(map(len, prompts)) + 1024)
    engine = Engine(
        lm.model, memory=Memory(), prefill_chunk=limits.rows, limits=limits, detokenizer=lm.tokenizer.stream
    )
    texts = [
        engine.submit(Request(prompt, max_new_tokens=new, drafter=drafter, cache_namespace=str(number)))
        for number, prompt in enumerate(prompts)
    ]
    while any(seq.position < 1 for seq in texts):
        engine.step()
    before, begin = sum(len(seq.tokens) for seq in texts), perf_counter()
    while not all(seq.finished for seq in texts):
        engine.step()
    return (sum(len(seq.tokens) for seq in texts) - before) / (perf_counter() - begin)


def theirs(peer: LlamaCppServer, prompts: list[list[int]], new: int) -> float:
    """Tokens a second of all texts."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: peer.complete(prompt, new, ignore_eos=True)["timings"], prompts))
    return sum(each["predicted_n"] - 1 for each in answers) / max(each["predicted_ms"] for each in answers) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--peer", help="an interpreter that has xllamacpp")
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    lm, path = decodery.load(options.model, dtype=options.dtype, kv_dtype=options.kv_dtype), Path(options.model)
    known, threads = begun_result(RESULTS), torch.get_num_threads()
    # Where files lie says nothing to others.
    shown = ["python", sys.argv[0], *(Path(each).name if Path(each).exists() else each for each in sys.argv[1:])]
    known["command"] = f"DECODERY_THREADS={threads} {shlex.join(shown)}"
    known["settings"] = {"threads": threads}
    asked = list(islice(cycle(each.turns[0] for each in questions("built-in")), max(options.texts)))
    prompts = [lm.encode(each) for each in asked]
    name = f"{path.stem if path.is_file() else options.model} {lm.dtype}"
    for count in options.texts:
        peer = None
        if options.peer and path.is_file():
            peer = LlamaCppServer(options.peer, path, threads, count)
        rates: dict[str, list[float]] = {}
        # The first round warms all of them up.
        for number in range(options.rounds + 1):
            found = {
                who: ours(lm, prompts[:count], drafter, options.new)
                for who, drafter in (("plain", None), ("auto", "auto"))
            }
            if peer is not None:
                found["llama.cpp"] = theirs(peer, prompts[:count], options.new)
            for who, rate in found.items() if number else ():
                rates.setdefault(who, []).append(rate)
        if peer is not None:
            peer.close()
        alone = known["rows"].get(f"{name}, 1", {}) if count > 1 else {}
        row: dict[str, Any] = {"model": name, "texts": count, "new": options.new, "rounds": options.rounds}
        for who, each in rates.items():
            row[who] = {
                "tokens_per_second": round(median(each), 1),
                "range": [round(min(each), 1), round(max(each), 1)],
            }
            if who in alone:
                row[who]["times_one"] = round(row[who]["tokens_per_second"] / alone[who]["tokens_per_second"], 2)
        known["rows"][f"{name}, {count}"] = row
        print(row, flush=True)
        write_result(RESULTS, known)


if __name__ == "__main__":
    main()
