"""Files that lie: mutated model files, trained artefacts, datastores and templates, and what reading them comes to.

    python tests/support/fuzz_files.py --cases 20000 --seed 1

prints, for every kind of file, how many cases were read, were refused in one sentence, ended in a stack trace, ended
the process or took too long. The cases run in a process of their own, which is begun anew after a case that ends it. A
case is decided by the seed, its number and the kinds alone: `--first N --cases 1` repeats it.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import Counter
from pathlib import Path

from fuzz.kinds import KINDS
from fuzz.sound import prepare

SECONDS = 60
"""What no case may take; the slowest are thousands of times faster."""
_MOST_BYTES = 16 << 30
OUTCOMES = ("read", "sentence", "trace", "crash", "hang")


def work(base: Path, seed: int, first: int, cases: int, kinds: list[str]) -> None:
    """Run cases one after the other, and tell of each on standard output: its number, then what it came to."""
    from decodery.core.errors import DecoderyError

    told = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    except (ImportError, ValueError, OSError):
        pass
    # Nobody needs what is written here to survive a power cut.
    os.fsync = lambda file: None  # type: ignore[assignment]
    scratch = Path(tempfile.mkdtemp(dir=base))
    os.environ["DECODERY_HOME"] = str(scratch / "home")
    for number in range(first, first + cases):
        make, use = KINDS[kinds[number % len(kinds)]]
        folder = scratch / str(number)
        folder.mkdir()
        make(random.Random(f"{seed} {number}"), base, folder)
        told.write(f"{number}\n")
        outcome, detail = "read", ""
        try:
            use(folder, base)
        except DecoderyError as error:
            detail = str(error)
            outcome = "trace" if "\n" in detail or len(detail) > 2000 or not detail else "sentence"
        except BaseException:
            outcome, detail = "trace", traceback.format_exc()[-3000:]
        told.write(json.dumps([outcome, detail]) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(scratch / "home", ignore_errors=True)


def fuzz(
    base: Path, seed: int, first: int, cases: int, kinds: list[str], seconds: float = SECONDS
) -> dict[str, tuple[Counter[str], list[str]]]:
    """Per kind of file: how many cases came to what, and what is wrong with those neither read nor refused."""
    found: dict[str, tuple[Counter[str], list[str]]] = {kind: (Counter(), []) for kind in kinds}
    at, last = first, first + cases
    while at < last:
        command = [sys.executable, __file__, "--worker", base, "--seed", seed, "--first", at, "--cases", last - at]
        worker = subprocess.Popen(
            [*map(str, command), "--kinds", ",".join(kinds)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        lines: queue.Queue[str | None] = queue.Queue()
        reader = threading.Thread(target=_forward, args=(worker, lines), daemon=True)
        reader.start()
        started = False
        while at < last:
            try:
                line = lines.get(timeout=seconds)
            except queue.Empty:
                line = "hang"
            if line is not None and line.strip().isdigit():
                started = True
                continue
            outcome, detail = ("crash", "") if line is None else (line, "") if line == "hang" else json.loads(line)
            if not started and line is None:
                raise RuntimeError("the process that runs the cases does not begin: run it with --worker to see why")
            counts, wrong = found[kinds[at % len(kinds)]]
            counts[outcome] += 1
            if outcome not in OUTCOMES[:2]:
                wrong.append(f"case {at} ({kinds[at % len(kinds)]}): {outcome} {detail}")
            at += 1
            if outcome in ("crash", "hang"):
                break
        worker.kill()
        worker.wait()
        reader.join()
    return found


def _forward(worker: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert worker.stdout is not None
    for line in worker.stdout:
        lines.put(line)
    lines.put(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of files, separated by commas")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    kinds = given.kinds.split(",")
    if given.worker is not None:
        work(given.worker, given.seed, given.first, given.cases, kinds)
        return
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        os.environ["DECODERY_HOME"] = str(base / "home")
        prepare(base)
        found = fuzz(base, given.seed, given.first, given.cases, kinds)
    print(f"{'':30}" + "".join(f"{outcome:>10}" for outcome in OUTCOMES))
    for kind, (counts, _) in found.items():
        print(f"{kind:30}" + "".join(f"{counts[outcome]:>10}" for outcome in OUTCOMES))
    every = sum((counts for counts, _ in found.values()), Counter[str]())
    print(f"{'all':30}" + "".join(f"{every[outcome]:>10}" for outcome in OUTCOMES))
    wrong = [each for _, several in found.values() for each in several]
    print("\n".join(wrong[:40]))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
