"""The kit's checks run in a process of their own; where one breaks it or hangs, another process goes on after it.

After some faults a CUDA device answers nothing more in the process that made them, and a kernel that hangs cannot be
interrupted from within. So one bad kernel must not cost what comes after it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from kit import DOING, FAILED, RESULTS, STOPPED, dumped

AGAIN = 75
"""What a process ends with whose device answers no more."""
GRACE = 10.0
"""Seconds that a check may go on after its end."""
MOST = 20
"""Processes at most."""


def supervised(command: list[str], out: Path, until: float) -> dict[str, Any]:
    """Run the kit's checks until all are done or the time is over.

    Args:
        command: Runs those that are not in the results yet.
        out: Where it writes.
        until: When the time is over, by `monotonic`.

    Returns:
        The results.
    """
    doing, code = out / DOING, 0
    for _ in range(MOST):
        doing.unlink(missing_ok=True)
        # A group of its own: what a check has begun ends with it.
        child = subprocess.Popen(command, start_new_session=True)
        try:
            why = _broken(child, doing, until)
        finally:
            _end_group(child)
        code = child.returncode
        if doing.is_file():
            check = json.loads(doing.read_text(encoding="utf-8"))
            if not check.get("written"):
                _write_down(out, check, why)
            doing.unlink()
        else:
            break
        if monotonic() > until:
            break
    path = out / RESULTS
    if not path.is_file():
        raise SystemExit(f"the kit ended with {code} before its first check")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _broken(child: subprocess.Popen[bytes], doing: Path, until: float) -> tuple[str, str]:
    """Wait for a process, and end it where its check does not: the outcome of what it was doing, and why."""
    while True:
        try:
            code = child.wait(0.2)
        except subprocess.TimeoutExpired:
            if monotonic() > min(_end(doing), until) + GRACE:
                return STOPPED, f"it did not return {GRACE:.0f} s after its end: its process was ended"
            continue
        name = f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
        return FAILED, f"it ended its process with {name}"


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has begun."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    # One that waits for a driver may not end.
    with suppress(subprocess.TimeoutExpired):
        child.wait(20)


def _end(doing: Path) -> float:
    """When the check in progress is to have ended."""
    try:
        return float(json.loads(doing.read_text(encoding="utf-8"))["end"])
    except (OSError, ValueError, KeyError):
        return float("inf")


def _write_down(out: Path, check: dict[str, Any], why: tuple[str, str]) -> None:
    """Add the row of a check that broke its process to the results."""
    path = out / RESULTS
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    outcome, says = why
    row = {"part": check["part"], "check": check["check"], "outcome": outcome, "says": says}
    result["rows"].append(row | {"seconds": round(monotonic() - check["begun"], 2), "values": {}})
    path.write_text(dumped(result), encoding="utf-8")
    line = f"{row['part']} | {row['check']} | {outcome} | {says}"
    print(line, flush=True)
    with (out / "gpu.log").open("a", encoding="utf-8") as file:
        file.write(line + "\n")
