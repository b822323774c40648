"""Generated programs run apart and within limits, and nothing of them comes back but a verdict."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from decodery.core.errors import SettingsError
from decodery.scorers import sandbox
from decodery.scorers.sandbox import Sandbox

BOX = Sandbox(seconds=0.7, memory_mib=256)
PATIENT = Sandbox(seconds=60, cpu_seconds=100)
"""Of programs that are to come to their end, however slow the machine."""


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
        ("import ctypes\nctypes.CDLL(None)", "_ctypes"),
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


HONEST = {
    "asyncio": """
import asyncio
async def f():
    await asyncio.sleep(0)
    return 3
assert asyncio.run(f()) == 3
""",
    "touch": """
from pathlib import Path
for _ in range(2):
    Path("a").touch()
""",
    "copy": """
import shutil
open("a", "w").write("x")
shutil.copy("a", "b")
shutil.copy2("a", "c")
shutil.move("b", "d")
""",
    "folders": """
import os, shutil, tempfile
with tempfile.TemporaryDirectory() as place:
    os.makedirs(place + "/x/y")
    shutil.copytree(place + "/x", place + "/z")
    shutil.rmtree(place + "/x")
    os.rename(place + "/z", "z")
""",
    "database": """
import sqlite3
for name in (":memory:", "mine.db"):
    with sqlite3.connect(name) as db:
        db.execute("create table t(a)")
""",
    "library": """
import collections, concurrent.futures, dataclasses, decimal, doctest, enum, random, ssl, typing, unittest, uuid
uuid.uuid4(), random.random()
enum.Enum("E", "a b")
collections.namedtuple("N", "a b")(1, 2)
@dataclasses.dataclass
class C:
    a: int
doctest.testmod()
""",
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_programs_run(name: str) -> None:
    verdict = PATIENT.run(HONEST[name])
    assert verdict.reason is None, verdict


def test_folders_without_end_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    verdict = PATIENT.run(
        "import os\nfor _ in range(1500):\n    os.mkdir('d')\n    os.chdir('d')\nopen('f', 'w')", ["pass"]
    )
    assert verdict.share == 1, verdict
    # The same where the kernel gives no folder in memory.
    place, here = tmp_path / "deep", os.getcwd()
    place.mkdir()
    try:
        os.chdir(place)
        for depth in range(1050):
            os.mkdir("d")
            if depth % 100 == 0:
                os.symlink("..", "link")
                os.mkdir("locked", mode=0)
            os.chdir("d")
    finally:
        os.chdir(here)
    sandbox._delete(str(place))
    assert not list(tmp_path.iterdir())


FORGERIES = (
    "",
    # Whatever those who call the program hold, sent wherever something can be sent.
    """
def held():
    found, frame = [b''], sys._getframe()
    while frame:
        for each in [*frame.f_locals.values(), *frame.f_globals.values(), *frame.f_builtins.values()]:
            found += [each] if isinstance(each, bytes) else [each.encode()] if isinstance(each, str) else []
            cells = getattr(each, '__closure__', None) or ()
            found += [str(cell.cell_contents).encode() for cell in cells]
        frame = frame.f_back
    return found
for key in held():
    send(key + b'null\\n')
""",
    # What the others will call, replaced.
    """
import builtins, json, traceback
class Never(Exception):
    pass
def pretend(*_, **__):
    return 'null'
builtins.BaseException = builtins.AssertionError = Never
builtins.exec = builtins.compile = json.dumps = json.encoder.encode_basestring_ascii = os.write = pretend
""",
    # Whatever runs next is watched.
    """
def watch(frame, event, argument):
    for each in frame.f_locals.values():
        if isinstance(each, bytes):
            send(each[:32] + b'null\\n')
    return watch
sys.settrace(watch), sys.setprofile(watch), signal.signal(signal.SIGALRM, lambda _, frame: watch(frame, '', None))
""",
)
SEND = """
import os, signal, sys
def send(text, write=os.write):
    for place in range(64):
        try:
            write(place, text)
        except (OSError, TypeError):
            pass
def f():
    return 0
send(b'null\\nnull\\nnull\\n')
"""


@pytest.mark.parametrize("forgery", FORGERIES)
@pytest.mark.parametrize("end", ["", "os._exit(0)"])
def test_programs_write_no_results(forgery: str, end: str) -> None:
    # Once as the program runs, and once as it is tested.
    for program in (SEND + forgery + end, SEND + "def f():\n" + textwrap.indent(forgery + end + "\nreturn 0", "    ")):
        verdict = PATIENT.run(program, ["assert f() == 1", "assert f() == 2"])
        assert verdict.passed == (False, False) and verdict.reason is not None, (program, verdict)


WITHOUT = """
import ctypes, json, struct, sys
libc = ctypes.CDLL(None)
code = [(0x20, 0, 0, 0)]
for number, argument in json.loads(sys.argv[1]):
    # Refuse the call, or only with this first argument.
    asked = [] if argument is None else [(0x20, 0, 0, 16), (0x15, 0, 1, argument)]
    code += [(0x15, 0, len(asked) + 1, number), *asked, (0x06, 0, 0, 0x50001), (0x20, 0, 0, 0)]
code += [(0x06, 0, 0, 0x7FFF0000)]
held = b"".join(struct.pack("HBBI", *each) for each in code)
buffer = ctypes.create_string_buffer(held, len(held))
if len(code) > 2:
    libc.prctl(38, 1, 0, 0, 0)
    assert libc.prctl(22, 2, struct.pack("H6xQ", len(code), ctypes.addressof(buffer)), 0, 0) == 0
from decodery.scorers.sandbox import Sandbox
box = Sandbox(seconds=60)
print(json.dumps([box.protection, [[verdict.reason, verdict.output] for verdict in map(box.run, sys.argv[2:])]]))
"""
CALLS = {"x86_64": {"unshare": 272, "prctl": 157}, "aarch64": {"unshare": 97, "prctl": 167}}.get(platform.machine(), {})
MISSING = {"namespaces": [CALLS.get("unshare"), None], "landlock": [444, None], "seccomp": [CALLS.get("prctl"), 22]}


@pytest.mark.parametrize(
    "missing",
    [(), ("namespaces",), ("landlock",), ("landlock", "seccomp"), tuple(MISSING)]
    if CALLS and sys.platform == "linux"
    else [()],
    ids="-".join,
)
def test_what_is_said_to_hold_holds_with_any_kernel(missing: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        theirs, new = Path(folder, "theirs"), Path(folder, "new.db")
        theirs.write_text("secret")
        programs = [
            HONEST["asyncio"],
            HONEST["copy"],
            # Neither is known to Python's guard: a database is opened by a statement, a file is only read.
            f"import sqlite3\ndb = sqlite3.connect(':memory:')\ndb.execute(\"attach '{new}' as x\")\n"
            "db.execute('create table x.t(a)')\ndb.commit()",
            f"print(open({str(theirs)!r}).read())",
        ]
        refused = [MISSING[each] for each in missing]
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT, json.dumps(refused), *programs], capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        protection, (waits, copies, attaches, reads) = json.loads(done.stdout)
        assert waits[0] is None and copies[0] is None
        assert new.exists() == (attaches[0] is None) == (protection["writing outside"] != "kernel")
        assert ("secret" in reads[1]) == (protection["reading outside"] == "nothing")
        assert protection["size of a file"] == protection["processor time"] == "kernel"
    if missing == tuple(MISSING):
        assert {"guard", "nothing"} <= set(protection.values())
    elif "Seccomp:" in _status() and "seccomp" not in missing and CALLS:
        assert {protection[each] for each in ("processes", "local services", "network", "signals")} == {"kernel"}


def _status() -> str:
    status = Path("/proc/self/status")
    return status.read_text() if status.exists() else ""


def test_limits_must_be_limits() -> None:
    with pytest.raises(SettingsError, match="above 0"):
        Sandbox(seconds=0)
