"""Generated programs run apart and within limits, and nothing of them comes back but a verdict."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from decodery.core.sandbox import Sandbox
from decodery.errors import SettingsError

BOX = Sandbox(seconds=0.7, memory_mib=256)


def test_programs_and_tests() -> None:
    verdict = BOX.run("print('hi')\ndef f(x):\n    return 6 // x", ["assert f(2) == 3", "f(0)", "assert f(3) == 2"])
    assert verdict.passed == (True, False, True) and verdict.share == pytest.approx(2 / 3)
    assert "ZeroDivisionError" in verdict.reason and verdict.output == "hi\n"
    assert BOX.run("x = 1").share == 1 and BOX.run("x = 1").reason is None


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("def f(:", "SyntaxError"),
        ("f()", "NameError"),
        ("\0", "null"),
        ("while True:\n    pass", "too long"),
        ("while True:\n    try:\n        while True: pass\n    except BaseException: pass", "too long|SIGXCPU|SIGKILL"),
        ("x = bytearray(1 << 30)", "MemoryError"),
        ("open('a', 'wb').write(bytes(1 << 22))", "OSError|SIGXFSZ"),
        ("while True:\n    print('x' * 10000)", "OSError|SIGXFSZ|too long"),
        ("import os\nos._exit(0)", "ended before its time"),
        ("raise SystemExit", "SystemExit"),
        ("import os\nos.fork()", "PermissionError"),
        ("import os\nos.kill(os.getppid(), 9)", "PermissionError"),
        ("import subprocess\nsubprocess.run(['ls'])", "PermissionError"),
        ("import socket\nsocket.socket()", "PermissionError"),
        ("import ctypes\nctypes.CDLL(None)", "PermissionError"),
        ("def f():\n    f()\nimport sys\nsys.setrecursionlimit(10**9)\nf()", "SIGSEGV|MemoryError|too long|Recursion"),
        ("import numpy", "ModuleNotFoundError"),
    ],
)
def test_what_goes_wrong_is_said(program: str, reason: str) -> None:
    verdict = BOX.run(program, ["pass"])
    assert verdict.share == 0 and re.search(reason, verdict.reason), verdict


def test_a_program_is_alone(tmp_path: Path) -> None:
    os.environ["SECRET_OF_THIS_TEST"] = "1"
    try:
        seen = BOX.run("import os\nprint(sorted(os.environ), os.listdir('.'))\nopen('mine', 'w').write('x')")
    finally:
        del os.environ["SECRET_OF_THIS_TEST"]
    assert seen.share == 1 and "SECRET" not in seen.output and seen.output.rstrip().endswith("[]")
    target = tmp_path / "theirs"
    target.write_text("kept")
    for program in (
        f"open({str(target)!r}, 'w')",
        f"import os\nos.remove({str(target)!r})",
        f"import os\nos.rename({str(target)!r}, 'mine')",
        f"import os\nos.symlink({str(target)!r}, 'link')\nopen('link', 'w')",
    ):
        assert "PermissionError" in (BOX.run(program).reason or ""), program
    assert target.read_text() == "kept"


def test_a_test_that_hangs_spoils_itself_only() -> None:
    box = Sandbox(seconds=0.5)
    assert box.run("x = 1", ["while True: pass", "assert x"]).passed == (False, True)


def test_results_are_remembered_by_text() -> None:
    box = Sandbox()
    first = [box.run("import random\nprint(random.random())", tests) for tests in ((), ["pass"])]
    assert box.runs == 2 and first[0].output != first[1].output
    assert box.run("import random\nprint(random.random())") is first[0] and box.runs == 2


def test_there_is_no_network_where_the_kernel_lets_go_of_it() -> None:
    # The guard is not asked: what the kernel shows of its devices is.
    verdict = BOX.run("print(open('/proc/self/net/dev').read())")
    can = sys.platform == "linux" and os.system("unshare -Urn true 2>/dev/null") == 0
    assert not can or [line.split(":")[0].strip() for line in verdict.output.splitlines()[2:] if line] == ["lo"]


def test_limits_must_be_limits() -> None:
    with pytest.raises(SettingsError, match="above 0"):
        Sandbox(seconds=0)
