"""Plain decoding and first tokens beside llama.cpp on the same GGUF files, in turns.

    DECODERY_THREADS=2 python benchmarks/llama_cpp_speed.py FILE ... --peer PYTHON [--rounds 5] [--first]

PYTHON is an interpreter with `xllamacpp`, which runs in a process of its own. Each round every program in turn reads
the same prompt of --prompt tokens and writes --tokens tokens, greedy, without drafts: tokens a second after the first
one, and rows a second of the prompt. With --first each round also starts each program anew, as a command that answers a
question through the chat template with one token and with 32, with the file in the page cache and all other settings at
their defaults; --commands measures nothing else. Medians and the best of all rounds; ratios above 1 say that this
package is faster. Writes benchmarks/results/llama-cpp-speed.json; to be run on a machine that does nothing else.
Random weights do (`random_gguf.py`): nothing depends on what is written.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

import decodery
from decodery_benchmarks.peers.llama_cpp_server import LlamaCppServer
from decodery_benchmarks.results import begun_result, write_result

RESULTS = Path(__file__).parent / "results" / "llama-cpp-speed.json"
FIRST = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup = sys.argv[1], 2048, 1, False
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[3])
params.use_jinja = True
server = xllamacpp.Server(params)
question = {"messages": [{"role": "user", "content": sys.argv[2]}], "max_tokens": int(sys.argv[4]), "temperature": 0.0}
print(server.handle_chat_completions(question), flush=True)
"""
QUESTION = "Write a function that reverses a list."
COMMANDS = {"first token": 1, "32 tokens": 32}
"""Commands by what they write."""


def ours(lm: decodery.LLM, prompt: list[int], tokens: int) -> dict[str, float]:
    begin = perf_counter()
    settings: dict[str, Any] = {"temperature": 0.0, "drafter": "none", "ignore_eos": True}
    times = [perf_counter() for _ in lm.stream(prompt, max_new_tokens=tokens, **settings)]
    first, last = times[0], times[-1]
    return {"written": (tokens - 1) / (last - first), "read": len(prompt) / (first - begin)}


def theirs(peer: LlamaCppServer, prompt: list[int], tokens: int) -> dict[str, float]:
    said = peer.complete(prompt, tokens, ignore_eos=True)["timings"]
    # The first token comes of the pass over the prompt.
    seconds = said["predicted_ms"] / 1e3
    return {"written": (said["predicted_n"] - 1) / seconds, "read": 1e3 * said["prompt_n"] / said["prompt_ms"]}


def started(command: list[str]) -> float:
    # As installed, where imports find compiled files.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    begin = perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
    return perf_counter() - begin


def answering(path: Path, options: argparse.Namespace, threads: int, rows: dict[str, list[float]]) -> None:
    """Add what programs that have started take for the same prompt."""
    lm, peer = decodery.load(str(path)), LlamaCppServer(options.peer, path, threads)
    prompt = [(7 * place + 11) % 4000 for place in range(options.prompt)]
    for number in range(options.rounds + 1):
        found = {f"{name}, ours": value for name, value in ours(lm, prompt, options.tokens).items()}
        found |= {f"{name}, llama.cpp": value for name, value in theirs(peer, prompt, options.tokens).items()}
        # The first round warms both up.
        for name, value in found.items() if number else ():
            rows.setdefault(name, []).append(value)
    peer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--peer", required=True, help="an interpreter that has xllamacpp")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--first", action="store_true", help="measure commands from their start to their end, too")
    parser.add_argument("--commands", action="store_true", help="measure commands alone")
    options = parser.parse_args()
    known, threads = begun_result(RESULTS), torch.get_num_threads()
    known["command"] = f"DECODERY_THREADS={threads} {shlex.join(['python', *sys.argv])}"
    known["settings"] = {"prompt": options.prompt, "tokens": options.tokens, "threads": threads}
    for path in options.models:
        rows: dict[str, list[float]] = {}
        if not options.commands:
            answering(path, options, threads, rows)
        for _ in range(options.rounds if options.first or options.commands else 0):
            for name, tokens in COMMANDS.items():
                mine = [sys.executable, "-m", "decodery", "generate", QUESTION, "--model", str(path)]
                mine += ["--max-new-tokens", str(tokens), "--temperature", "0"]
                other = [options.peer, "-c", FIRST, str(path), QUESTION, str(threads), str(tokens)]
                rows.setdefault(f"{name}, ours", []).append(started(mine))
                rows.setdefault(f"{name}, llama.cpp", []).append(started(other))
        result: dict[str, Any] = {}
        for name in ("written", "read", *COMMANDS):
            if f"{name}, ours" not in rows:
                continue
            pair = {who: median(rows[f"{name}, {who}"]) for who in ("ours", "llama.cpp")}
            ratio = pair["ours"] / pair["llama.cpp"]
            result[name] = {who: round(value, 3) for who, value in pair.items()}
            result[name] |= {"ratio": round(1 / ratio if name in COMMANDS else ratio, 3)}
            best = min if name in COMMANDS else max
            result[name] |= {f"best, {who}": round(best(rows[f"{name}, {who}"]), 3) for who in pair}
        known["rows"].setdefault(path.stem, {}).update(result)
        print(path.name, result, flush=True)
        write_result(RESULTS, known)


if __name__ == "__main__":
    main()
