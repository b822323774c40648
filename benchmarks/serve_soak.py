"""A server under mixed traffic and faults for a long time: no error of its own, no text different, memory flat.

    python benchmarks/serve_soak.py [--seconds 3600]

Known requests, searches, constraints, monitors, an adapter and cache policies among them, are answered alone first.
Then clients send them mixed, whole and streamed, beside clients that leave, send what is no request, prompts that are
too long, schemas nothing fits, and clients that read slowly or not at all.
What comes of it is in benchmarks/results/serve-soak.json: answers by kind and status, texts that differ from their solo
run, and the server's resident memory over time. The status is 1 where the server failed at any of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np

from decodery.bench.load.target import own
from decodery.bench.terminal import progress_bar
from decodery.cli.decode import stop_on_interrupt
from decodery_benchmarks.results import write_result
from decodery_benchmarks.soak_traffic import PATIENCE, Soak, drawn_adapter, known_requests, texts_of

KV_GIB = "0.25"
"""Little, so that memory runs out often: texts wait for it, and what was kept for later ones goes."""
WARM_UP = 0.25
"""Share of the time in which memory may grow: the prefix cache fills, and pools reach their size."""
FLAT = 0.03
"""Share of the memory by which the last quarter may lie above the one after the warm-up."""
POINTS = 240


def resident(process: subprocess.Popen[bytes]) -> float:
    """MiB of memory a process holds."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


async def soak(
    url: str,
    process: subprocess.Popen[bytes],
    options: argparse.Namespace,
    report: Callable[[str, int, int], None],
    stopped: Callable[[], bool],
    adapter: Path,
) -> Soak:
    chance = random.Random(options.seed)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=httpx.Limits(max_connections=None)) as http:
        found = Soak(http, [], chance)
        asked = known_requests(options.seed, options.topics, adapter)
        for number, known in enumerate(asked):
            report("alone", number, len(asked))
            answer = (await http.post(known.url, json=known.body)).raise_for_status().json()
            found.known.append(replace(known, texts=texts_of(answer)))
            if stopped():
                return found
        begin = time.monotonic()

        def over() -> bool:
            return stopped() or process.poll() is not None or time.monotonic() - begin > options.seconds

        clients = [asyncio.create_task(found.client(over)) for _ in range(options.clients)]
        while not over():
            now = time.monotonic() - begin
            found.memory.append((round(now, 1), round(resident(process), 1)))
            report(f"{found.compared} texts compared", int(now), int(options.seconds))
            await asyncio.sleep(max(0.5, options.seconds / POINTS))
        await asyncio.gather(*clients)
        if process.poll() is not None:
            found.fault("the server ended", f"with status {process.returncode}")
            return found
        for _ in range(100):
            found.load = (await http.get("/decodery/load")).json()
            if not found.load["running"] and not found.load["waiting"]:
                break
            await asyncio.sleep(0.1)
        else:
            found.fault("texts that nobody waits for", json.dumps(found.load))
        health = await http.get("/health")
        if health.status_code != 200:
            found.fault("health", health.text)
        return found


def growth(memory: list[tuple[float, float]]) -> dict[str, float] | None:
    """Memory after the warm-up: its median in the quarter that follows and in the last one, and MiB per hour."""
    if len(memory) < 16:
        return None
    times, held = np.array(memory).T
    quarter = len(held) // 4
    warm = int(WARM_UP * len(held))
    slope = np.polyfit(times[warm:] / 3600, held[warm:], 1)[0]
    early, late = float(np.median(held[warm : warm + quarter])), float(np.median(held[-quarter:]))
    return {
        "after_warm_up_mib": early,
        "last_quarter_mib": late,
        "grown_share": round(late / early - 1, 4),
        "mib_per_hour": round(float(slope), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--topics", type=int, default=8, help="of the requests whose texts are known, 16 each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "serve-soak.json")
    options = parser.parse_args()
    server = own(options.model, "auto")
    wide = ("--max-queue", "1024", "--max-texts-per-key", "1024", "--trust")
    server = replace(server, command=(*server.command, "--kv-gib", KV_GIB, *wide))
    with (
        tempfile.TemporaryDirectory() as folder,
        stop_on_interrupt() as stopped,
        progress_bar() as report,
        server.process(stopped) as (process, url),
    ):
        adapter = Path(folder) / "adapter.safetensors"
        drawn_adapter(options.model, adapter)
        found = asyncio.run(soak(url, process, options, report, stopped, adapter))
        complete = not stopped()
    if process.returncode:
        found.fault("status of the server", str(process.returncode))
    grown = growth(found.memory)
    flat = grown is None or grown["grown_share"] <= FLAT
    result = {
        "command": f"python benchmarks/serve_soak.py --seconds {options.seconds:g} --clients {options.clients} "
        f"--topics {options.topics}",
        "complete": complete,
        "seconds": options.seconds,
        "server_errors": found.server_errors,
        "texts_compared": found.compared,
        "texts_different": found.different,
        "never_answered": found.never,
        "seconds_to_the_end": found.waits(),
        "memory_flat": flat,
        "memory": grown,
        "answers": dict(sorted(found.counts.items())),
        "load_at_the_end": found.load,
        "faults": found.faults,
        "resident_mib_by_second": found.memory,
    }
    summary = [name for name in result if name not in ("command", "complete", "seconds")]
    write_result(options.json, result, summary=summary)
    print(json.dumps({name: value for name, value in result.items() if name != "resident_mib_by_second"}, indent=1))
    sys.exit(0 if not found.faults and flat else 1)


if __name__ == "__main__":
    main()
