"""Worker processes: what they answer, what they are held to, how callers share them, and that they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from decodery.core import process_usage
from decodery.core.fair_slots import caller
from decodery.core.worker_pool import NotStarted, Unanswered, WorkerPool

WORK = """
import os, time

def begin(*arguments):
    print("not an answer")
    return lambda question: act(arguments, **question)

def act(arguments, sleep=0, work=0, take=0, end="", said=""):
    print("nor this")
    time.sleep(sleep)
    while time.process_time() < work:
        pass
    held = bytearray(take)
    if end:
        os.abort() if end == "abort" else os._exit(3)
    return [os.getpid(), os.getppid(), said, *arguments]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "work.py").write_text(WORK)
    return tmp_path / "work.py"


def test_one_process_answers_until_it_is_ended(file: Path) -> None:
    asked = WorkerPool(file, "a", "b", memory=1 << 30)
    first = asked.ask({"said": "\ud800\né" * 10**6}, 60.0)
    assert first[1:] == [os.getpid(), "\ud800\né" * 10**6, "a", "b"]
    assert asked.ask({}, 60.0)[0] == first[0]
    for question, seconds, reason in (
        ({"sleep": 60}, 0.1, "more than 0.1 s"),
        ({"take": 1 << 31}, 60.0, "more than 1024 MiB of memory"),
        ({"end": "exit"}, 60.0, "breaks down"),
        ({"end": "abort"}, 60.0, "breaks down"),
    ):
        with pytest.raises(Unanswered, match=reason):
            asked.ask(question, seconds)
        assert asked.ask({}, 60.0)[2:] == ["", "a", "b"]


def test_a_process_that_died_between_two_questions_is_replaced(file: Path) -> None:
    asked = WorkerPool(file, memory=1 << 30)
    first = asked.ask({}, 60.0)[0]
    asked.idle[0].popen.kill()
    asked.idle[0].popen.wait()
    assert asked.ask({}, 60.0)[0] != first


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has priorities of another kind")
def test_processes_let_others_go_first(file: Path) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    for nice in (5, 15):
        asked = WorkerPool(file, memory=1 << 30, nice=nice)
        process, *_ = asked.ask({}, 60.0)
        assert os.getpriority(os.PRIO_PROCESS, process) == min(own + nice, 19)


@pytest.mark.parametrize("text", ["import no_such_module", "raise SystemExit", "def begin(): pass\nprint('{}')\n1 / 0"])
def test_what_does_not_start_is_said(file: Path, text: str) -> None:
    file.write_text(text)
    asked = WorkerPool(file, memory=1 << 30)
    asked.start()
    with pytest.raises(NotStarted):
        asked.ask({}, 60.0)


def test_threads_get_their_own_answers(file: Path) -> None:
    asked, answers = WorkerPool(file, memory=1 << 30), {}

    def ask(name: str) -> None:
        for _ in range(20):
            answers[name] = [*answers.get(name, []), asked.ask({"said": name}, 60.0)[2]]

    threads = [threading.Thread(target=ask, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {name: [name] * 20 for name in "abcd"}


def test_callers_get_equal_shares(file: Path) -> None:
    asked = WorkerPool(file, memory=1 << 30, processes=2)
    for each in ("one", "two"):
        ask_as(asked, each, {})
    order: list[str] = []

    def ask(name: str) -> None:
        ask_as(asked, name, {"sleep": 0.3})
        order.append(name)

    threads = [threading.Thread(target=ask, args=(name,)) for name in "aaaaaaaabc"]
    for thread in threads:
        thread.start()
        time.sleep(0.01)
    for thread in threads:
        thread.join()
    # One process is left to others, and whoever had nothing yet goes before whoever had something.
    assert order.index("b") <= 2 and order.index("c") <= 4 and len(asked.idle) <= 2


def ask_as(asked: WorkerPool, name: str, question: dict) -> list:
    token = caller.set(name)
    try:
        return asked.ask(question, 60.0)
    finally:
        caller.reset(token)


def test_one_caller_alone_has_one_process_of_two(file: Path) -> None:
    asked = WorkerPool(file, memory=1 << 30, processes=2)
    threads = [threading.Thread(target=asked.ask, args=({"sleep": 0.1}, 60.0)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked.idle) == 1
    asked.close()
    assert not asked.idle


def test_processes_inherit_no_descriptors(file: Path, tmp_path: Path) -> None:
    file.write_text(
        "import os\ndef begin():\n    return lambda question: sorted(map(int, os.listdir('/proc/self/fd')))\n"
    )
    if not Path("/proc/self/fd").exists():
        pytest.skip("this system does not list a process's descriptors")
    with (tmp_path / "open").open("w") as opened:
        os.set_inheritable(opened.fileno(), True)
        # Standard ones, the answers' and the one that lists them.
        assert len(WorkerPool(file, memory=1 << 30).ask(None, 60.0)) <= 5


def test_an_interrupt_leaves_no_answer_for_the_next_question(file: Path) -> None:
    asked = WorkerPool(file, memory=1 << 30)
    asked.ask({}, 60.0)
    # A run that was started in the background inherits that the signal is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            asked.ask({"sleep": 60, "said": "late"}, 60.0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert asked.ask({"said": "next"}, 60.0)[2] == "next"


def test_waiting_for_the_processor_is_not_working(file: Path) -> None:
    asked = WorkerPool(file, memory=1 << 30)
    asked.ask({}, 60.0)
    # Longer than it may work, and not nearly as long as it may take.
    if process_usage.processor_seconds(asked.idle[0].popen) is not None:
        assert asked.ask({"sleep": 0.6, "said": "rested"}, 0.2)[2] == "rested"
    with pytest.raises(Unanswered, match=r"more than 0\.3 s"):
        asked.ask({"work": 60}, 0.3)


def test_after_a_fork_each_side_has_a_process_of_its_own(file: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from decodery.core.worker_pool import WorkerPool
asked = WorkerPool(Path(sys.argv[1]), memory=1 << 30)
before = asked.ask({}, 60.0)
asked._slots._changed.acquire()  # As a thread that asks would hold it.
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
    asked._slots._changed.release()
    assert asked.ask({"said": "parent"}, 60.0)[:3] == [before[0], os.getpid(), "parent"]
else:
    own = asked.ask({"said": "child"}, 60.0)
    assert own[0] != before[0] and own[1:] == [os.getpid(), "child"]
    del asked
    sys.exit(0)
"""
    subprocess.run([sys.executable, "-c", code, str(file)], check=True, timeout=120)


def test_it_ends_with_its_owner(file: Path) -> None:
    asked = WorkerPool(file, memory=1 << 30)
    asked.ask({}, 60.0)
    process = asked.idle[0].popen
    del asked
    assert process.returncode is not None


@pytest.mark.parametrize("busy", [False, True])
def test_it_ends_when_its_owner_is_killed(file: Path, busy: bool) -> None:
    code = """
import json, os, sys
from pathlib import Path
from decodery.core.worker_pool import WorkerPool

asked = WorkerPool(Path(sys.argv[1]), memory=1 << 30)
print(asked.ask({}, 60.0)[0], flush=True)
if len(sys.argv) > 2:
    # As `ask` sends it; the answer would come long after the time for it.
    asked.idle[0].popen.stdin.write(json.dumps([{"sleep": 600}, 0.1]).encode() + b"\\n")
    asked.idle[0].popen.stdin.flush()
os.kill(os.getpid(), 9)
"""
    command = [sys.executable, "-c", code, str(file), *["busy"] * busy]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    until = time.monotonic() + 60
    # Gone, or a zombie where nobody collects what is left after.
    state = ["ps", "-o", "stat=", "-p", killed.stdout.strip()]
    while subprocess.run(state, capture_output=True, text=True).stdout[:1] not in ("", "Z"):
        assert time.monotonic() < until, "the worker of a killed process lives on"
        time.sleep(0.05)


def test_memory_is_looked_at_where_the_system_does_not_bound_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = WorkerPool(file, memory=1 << 30)
    asked.ask({}, 60.0)
    assert 1 << 20 < process_usage.resident(asked.idle[0].popen) < 1 << 30
    # What a system without the kernel's limit would see of a process that takes more than it may.
    monkeypatch.setattr(sys, "platform", "darwin")
    asked.memory = 1 << 20
    with pytest.raises(Unanswered, match="more than 1 MiB of memory"):
        asked.ask({"sleep": 60}, 60.0)
