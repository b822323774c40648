"""How long it takes to read a long prompt, here and by other programs on the same file.

    python benchmarks/prefill_peers.py --out benchmarks/results/prefill-peers.json

One round reads, by every program in turn, one more prompt of --tokens tokens of this package's documents, the same for
all of them in a round and another one in the next, up to the first token that is written. Rounds are added to those in
the file. Peers run in processes of their own (llama.cpp needs xllamacpp, OpenVINO openvino-genai). Beside every time
stand what its processes took of the cores, spinning while they wait included, and how many of them others took
meanwhile: a time means little where that is much above 0. Needs a quiet machine, and some minutes.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import decodery
from decodery.bench.settings import Settings
from decodery.bench.subject import Own, Subject, UnavailableError
from decodery.bench.workloads import documents
from decodery_benchmarks.peers import peers
from decodery_benchmarks.peers.apart import open_apart
from decodery_benchmarks.peers.base import Order
from decodery_benchmarks.results import begun_result, write_result

OURS = ("int8", "int8/float16", "int4", "int4/float16")
PEERS = ("llama.cpp", "llama.cpp-q8", "openvino")


def packages() -> dict[str, str]:
    """Versions of what the peers run by, as far as they are installed."""
    found = {}
    for name in ("xllamacpp", "openvino-genai"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def busy() -> float | None:
    """Seconds that all cores have been busy, waiting for the disk left aside."""
    try:
        user, nice, system, _, _, irq, soft, *_ = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:])
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def spent(process: int) -> float:
    """Seconds of a processor that a process has had."""
    after = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(after[11]) + int(after[12])) / os.sysconf("SC_CLK_TCK")


def processes(peer: int) -> list[int]:
    """A peer's process and those it started, such as a server."""
    return [peer, *map(int, Path(f"/proc/{peer}/task/{peer}/children").read_text().split())]


def measured(own: list[int], read: Callable[[], float]) -> dict[str, float]:
    """Seconds of a reading, of a processor that its processes took, and the cores that others took meanwhile."""
    begin, before = perf_counter(), busy()
    had = None if before is None else sum(map(spent, own))
    found = {"seconds": round(read(), 3)}
    after, wall = busy(), perf_counter() - begin
    if before is not None and after is not None and had is not None:
        found["processor"] = round(sum(map(spent, own)) - had, 2)
        found["others"] = round(max(0.0, after - before - found["processor"]) / wall, 2)
    return found


def prompt(lm: decodery.LLM, tokens: int, number: int) -> list[int]:
    """That many tokens of the documents, from a place of its own in each round."""
    text = lm.tokenizer.encode("\n".join(documents().values()), special=False)
    text *= 2 + (tokens + 97 * number) // len(text)
    return text[97 * number : 97 * number + tokens]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2", help="an embedded model or a .gguf file")
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--programs", nargs="*", default=[*OURS, *PEERS], help="precisions of this package, and peers")
    options = parser.parse_args()
    known: dict[str, Any] = begun_result(options.out)
    known |= {"command": f"python benchmarks/prefill_peers.py --out {options.out}", "model": options.model}
    known |= {"tokens": options.tokens, "packages": packages(), "rows": list(known["rows"])}
    subjects: dict[str, Subject] = {}
    for name in options.programs:
        dtype, _, kept = ("int8" if name in peers() else name).partition("/")
        lm = decodery.load(options.model, dtype=dtype, kv_dtype=kept or "auto")
        if name not in peers():
            subjects[name] = Own(lm, "none", 0.0)
            continue
        try:
            subjects[name] = open_apart(Order.of(name, lm, Settings(model=options.model)))
        except UnavailableError as reason:
            print(f"{name} is left out: {reason}", flush=True)
    for subject in subjects.values():
        # Of another prompt than any that is timed: a program may keep what it has read.
        subject.decode([prompt(lm, 300, 1000)], max_new_tokens=1, seed=0)
    for _ in range(options.rounds):
        number, found = len(known["rows"]), dict[str, Any]()
        known["rows"].append(found)
        for name, subject in subjects.items():
            own = processes(subject.process.pid) if name in peers() else [os.getpid()]  # type: ignore[attr-defined]
            text = prompt(lm, options.tokens, number)
            found[name] = measured(
                own,
                lambda: subject.decode([text], max_new_tokens=1, seed=0).prefill_seconds,  # noqa: B023
            )
            print(number, name, subject.dtype, found[name], torch.get_num_threads(), "threads", flush=True)
            write_result(options.out, known)


if __name__ == "__main__":
    main()
