"""Work in a process of its own: it may hang, break down or print, and the next question is answered."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest

from decodery.core.worker import Worker

JOB = """
import os, time

def start(name):
    global known
    known = name
    print("started")

def answer(question):
    print("asked")
    if question.get("do") == "abort":
        os.abort()
    if question.get("do") == "hang":
        time.sleep(600)
    if question.get("do") == "grow":
        bytearray(1 << 33)
    return {"name": known, "process": os.getpid(), **question}
"""


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    (tmp_path / "job.py").write_text(JOB)
    return Worker(tmp_path / "job.py", "one", memory=1 << 32)


def test_one_process_answers_until_it_breaks_down(worker: Worker) -> None:
    first = worker.ask({"text": "é\n"}, 60.0)
    assert first is not None and (first["name"], first["text"]) == ("one", "é\n")
    second = worker.ask({}, 60.0)
    assert second is not None and second["process"] == first["process"]
    # Only Linux bounds the address space of a process.
    grow = [("grow", 60.0)] if sys.platform == "linux" else []
    for broken, seconds in (("abort", 60.0), ("hang", 0.1), *grow):
        assert worker.ask({"do": broken}, seconds) is None
        found = worker.ask({}, 60.0)
        assert found is not None and found["process"] not in (first["process"], os.getpid())


def test_a_fork_leaves_the_process_to_its_owner(worker: Worker) -> None:
    found = worker.ask({}, 60.0)
    assert found is not None
    child = os.fork()
    if child == 0:
        other = worker.ask({}, 60.0)
        os._exit(0 if other is not None and other["process"] != found["process"] else 1)
    assert os.waitpid(child, 0)[1] == 0
    again = worker.ask({}, 60.0)
    assert again is not None and again["process"] == found["process"]


def test_the_process_ends_with_the_worker(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    worker = Worker(tmp_path / "job.py", "two", memory=1 << 32)
    assert worker.ask({}, 60.0) is not None
    process = worker._process
    del worker
    gc.collect()
    assert process is not None and process.returncode is not None


def test_a_job_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("raise SystemExit")
    with pytest.raises(OSError, match=r"job\.py does not start"):
        Worker(tmp_path / "job.py", memory=1 << 32).ask({}, 60.0)
