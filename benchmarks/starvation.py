"""One key streams while another has the widest searches, a slow pattern and slow tests run: seconds of its tokens.

    python benchmarks/starvation.py --out benchmarks/results/starvation.json

A server of the embedded model, two keys. The first token and the last of 50 are timed alone, beside one ordinary
request of the other key, and beside all of its searches at once. `ratio` is the median beside the searches by that
beside the ordinary request; at most 1.5 is wanted. It takes two to three minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from decodery.bench.load.target import Target
from decodery_benchmarks.results import write_result

TEXT, PROMPT = "/v1/completions", "The tide comes in twice a day, and people who live at the sea know"
MODEL, TOKENS, PATIENCE = "smollm2", 50, 25.0
TESTS = "assert sum(1 for _ in iter(int, 1)) == 0\n"
"""A test that never ends."""
SEARCHES: dict[str, dict[str, Any]] = {
    "best-of-n": {"search": "best-of-n:n=1024,scorer=log-probability"},
    "beam": {"search": "beam:width=1024"},
    "particle-filter": {"search": "particle-filter:particles=1024,scorer=self-evaluation"},
    "pattern": {"search": "self-consistency:n=4,pattern=((.|\n)+)+éé"},
    "tests": {"search": "best-of-n:n=16,scorer=program-tests(file={tests})"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        keys, tests = Path(folder, "keys"), Path(folder, "tests.py")
        keys.write_text("many a-key\none b-key\n")
        tests.write_text(TESTS)
        command = [sys.executable, "-m", "decodery", "serve", "--port", "{port}", "--api-key-file", str(keys)]
        command += ["--served-model-name", MODEL, "--trust", "--kv-gib", "4"]
        command += ["--max-texts", "1024", "--max-texts-per-key", "8192", "--max-queue", "8192"]
        with Target("decodery", command=tuple(command)).open() as url:
            rows = measured(url, tests, given.repeats)
    summary = {
        name: round(rows["searches"][name] / rows["ordinary"][name], 3) for name in ("first_seconds", "whole_seconds")
    }
    shown = "python benchmarks/starvation.py --out benchmarks/results/starvation.json"
    settings = {"tokens": TOKENS, "repeats": given.repeats, "model": MODEL}
    write_result(given.out, {"command": shown, "settings": settings, "rows": rows, "summary": {"ratio": summary}})
    print(json.dumps({**rows, "ratio": summary}, indent=1))


def measured(url: str, tests: Path, repeats: int) -> dict[str, dict[str, Any]]:
    """Rows by what else the server does."""
    stream(url, 0)
    rows = {"alone": row(url, repeats)}
    for name, beside in (("ordinary", {"text": {"drafter": "none"}}), ("searches", SEARCHES)):
        stop, done = threading.Event(), dict[str, int]()
        threads = [
            threading.Thread(target=ask, args=(url, kind, own, tests, stop, done), daemon=True)
            for kind, own in beside.items()
        ]
        for thread in threads:
            thread.start()
        time.sleep(2.0 if name == "ordinary" else 15.0)
        rows[name] = row(url, repeats) | {"ended": done}
        stop.set()
    return rows


def ask(url: str, kind: str, own: dict[str, Any], tests: Path, stop: threading.Event, done: dict[str, int]) -> None:
    """One request after another, until it is enough; done: answers by kind and status."""
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True}
    body["temperature"] = 0.0 if kind == "beam" else 1.0
    body["decodery"] = {name: value.replace("{tests}", str(tests)) for name, value in own.items()}
    while not stop.is_set():
        try:
            answer = httpx.post(url + TEXT, json=body, headers={"Authorization": "Bearer a-key"}, timeout=PATIENCE * 8)
        except httpx.HTTPError:
            return
        named = f"{kind} {answer.status_code}"
        done[named] = done.get(named, 0) + 1
        if answer.status_code == 429:
            stop.wait(1.0)


def row(url: str, repeats: int) -> dict[str, Any]:
    """Medians of several streams."""
    found = [stream(url, seed) for seed in range(1, repeats + 1)]
    first, whole = zip(*found, strict=True)
    return {
        "first_seconds": round(median(first), 4),
        "whole_seconds": round(median(whole), 4),
        "worst_whole_seconds": round(max(whole), 4),
    }


def stream(url: str, seed: int) -> tuple[float, float]:
    """Seconds to the first and to the last token; as many as the patience lasts where they do not come."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": TOKENS, "stream": True, "temperature": 1.0, "seed": seed}
    body |= {"ignore_eos": True, "decodery": {"drafter": "none"}}
    begin, first = time.monotonic(), 0.0
    headers = {"Authorization": "Bearer b-key"}
    with httpx.stream("POST", url + TEXT, json=body, headers=headers, timeout=PATIENCE) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["text"]:
                first = first or time.monotonic() - begin
            if time.monotonic() - begin > PATIENCE:
                break
    whole = time.monotonic() - begin
    return first or whole, whole


if __name__ == "__main__":
    main()
