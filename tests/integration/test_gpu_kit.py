"""The kit for a machine with a GPU runs from end to end without one, and keeps what it has when it is cut."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from argparse import Namespace
from importlib.util import find_spec
from itertools import chain, count, repeat
from math import inf
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import training
from correctness import Correctness
from filelock import FileLock
from kernel_checks import Kernels
from kit import Kit, NotRunError
from parts import PartsError, cut, join
from ready import missing
from report import targets
from run import loader, parts
from supervise import supervised

from decodery.core.errors import UnsupportedModel
from decodery.speculative.heads.head import TrainedHead
from far import Devices

ROOT = Path(__file__).parents[2]

Run = tuple[dict[str, Any], str, Path]


def ran(folder: Path, *options: str) -> Run:
    """The results, what was printed, and `out` of a run of the kit in a process of its own."""
    out = folder / "out"
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu" / "run.py"), "--device", "cpu", "--size", "tiny"]
    command += ["--minutes", "8", "--out", str(out), "--work", str(folder / "work"), *options]
    environment = {**os.environ, "DECODERY_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=540)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((out / "gpu.json").read_text()), done.stdout, out


def wheel(folder: Path, name: str, text: str) -> Path:
    """A wheel of one module."""
    path, about = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", text)
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{about}/RECORD", f"{name}.py,,\n{about}/METADATA,,\n{about}/WHEEL,,\n{about}/RECORD,,\n")
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Run:
    """One run for all processes that test: it takes long."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "gpu-kit"
    printed = folder / "printed.txt"
    with FileLock(f"{folder}.lock"):
        if not printed.exists():
            wheel(folder / "wheels", "brought_along", "found = 3\n")
            printed.write_text(ran(folder, "--wheels", str(folder / "wheels"))[1])
    return json.loads((folder / "out" / "gpu.json").read_text()), printed.read_text(), folder / "out"


def rows(result: dict[str, Any], part: str) -> dict[str, dict[str, Any]]:
    return {row["check"]: row for row in result["rows"] if row["part"] == part}


def test_all_parts_run_and_nothing_is_left_out_silently(whole: Run) -> None:
    result, printed, out = whole
    outcomes = {row["outcome"] for row in result["rows"]}
    assert outcomes == {"passed", "measured", "not run"} and result["complete"]
    assert all(row["says"] for row in result["rows"])
    checks = rows(result, "A")
    assert checks["kernels: graphs"]["outcome"] == checks["steps from embeddings to tokens"]["outcome"] == "passed"
    kernels = {checks[f"kernels: {what}"]["outcome"] for what in ("attention", "rows", "weights")}
    assert kernels == {"passed" if find_spec("triton") else "not run"}
    more = rows(result, "D")
    assert more["tests: graphs"]["says"] == "all 6 were skipped: capturing graphs needs a CUDA device"
    left = {name for name, row in more.items() if row["outcome"] == "not run"} - {"tests: graphs"}
    assert left and all(name.startswith("drafter ") for name in left)
    # The table comes last, a line for each check and one for the run.
    table = printed.rstrip().splitlines()[-len(result["rows"]) - 2 :]
    assert table[0].startswith("-     packages") and " measured" in table[-1]
    assert sorted(path.name for path in out.iterdir()) == ["gpu.json", "gpu.log", "head.safetensors", "texts.zip"]
    assert result["machine"]["torch"] and result["machine"]["transformers"]


def test_speed_has_figures_of_every_kind(whole: Run) -> None:
    speed = rows(whole[0], "B")
    assert speed["the device"]["values"]["copy_gb_per_s"] > 0
    for name in ("SmolLM2-135M", "1.5B", "8B"):
        passes = speed[f"{name}: pass by rows"]["values"]
        assert set(passes["ms"]) == {"fixed", "ordinary"} and set(passes["ms"]["fixed"]) == {"1", "2", "4"}
        assert set(speed[f"{name}: pass by context"]["values"]["floor_ms"]) == {"16", "100"}
        assert set(speed[f"{name}: 4 texts"]["values"]) == {"plain", "auto"}
        step = speed[f"{name}: a step of 1 text"]["values"]
        # Twice as many layers' operators as one layer has at least, and no device that could be waited for.
        assert step["operators"] > 100 and step["python_calls"] > 100 and step["waits"] == step["kernels"] == 0
        assert speed[f"{name}: transformers computes the same"]["outcome"] == "passed"
        for how in ("eager", "static cache"):
            assert speed[f"{name}: transformers, {how}, 2 texts"]["values"]["tokens_per_s"] > 0


def test_wheels_that_were_brought_are_installed_beside(whole: Run) -> None:
    (packages,) = [row for row in whole[0]["rows"] if row["check"] == "packages"]
    assert packages["values"] == {"wheels": ["brought_along-1.0-py3-none-any.whl"], "missing": []}
    assert missing() == []


def test_training_goes_on_from_what_an_earlier_run_left(
    whole: Run, kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, out = whole
    assert TrainedHead.load(out / "head.safetensors").kind == "eagle-3"
    monkeypatch.setenv("DECODERY_HOME", str(out.parent / "home"))
    given = Namespace(model=str(out.parent / "work" / "model"), device="cpu", size="tiny", minutes=0.5, parts="C")
    given.work, given.earlier = tmp_path / "work", out
    monkeypatch.setattr("kernel_checks.Kernels", lambda *given: SimpleNamespace(run=lambda: None))
    parts(kit, given)
    result = kit.result()
    texts, head = (rows(result, "C")[name] for name in ("texts of the model", "training a head"))
    assert texts["values"]["of_earlier_runs"] == texts["values"]["texts"] == 40
    assert head["says"].startswith("from an earlier head, ")
    left = {row["part"]: row["says"] for row in result["rows"] if row["outcome"] == "not run"}
    assert left == dict.fromkeys("ABD", "--parts left it out")


def test_without_the_device_it_says_so_at_once(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu" / "run.py"), "--size", "tiny", "--device", "cuda:77"]
    command += ["--out", str(out), "--work", str(tmp_path / "work"), "--model", str(tmp_path)]
    subprocess.run(command, capture_output=True, timeout=300)
    result = json.loads((out / "gpu.json").read_text())
    assert [row["check"] for row in result["rows"]] == ["packages", "the model", "the device"]
    assert result["rows"][-1]["outcome"] in ("not run", "failed")


def test_passes_at_fixed_shapes_keep_to_their_device(kit: Kit) -> None:
    """Checks of part A on a device that is none, which refuses tensors of two devices in one operation."""
    checks = Correctness(kit, torch.device("meta:0"), lambda dtype, device: None, True, 0.0)
    with Devices():
        assert checks.replays()[1]["worst"] < 1e-10
        assert 0 < checks.dtype("bfloat16")[1]["error"] < 0.05


@pytest.fixture
def kit(tmp_path: Path) -> Any:
    return Kit(tmp_path / "out", 0.5, {"device": "cpu", "size": "tiny"})


def test_the_results_are_whole_after_every_check(kit: Kit) -> None:
    def wrong() -> Any:
        raise ValueError("first line\nsecond line")

    def refused() -> Any:
        raise UnsupportedModel("not here: do that")

    def left() -> Any:
        raise NotRunError("nothing to do it with")

    def endless() -> Any:
        while True:
            pass

    asked = [(lambda: ("well", {"x": 1}), 1, "passed"), (wrong, 1, "failed"), (refused, 1, "refused")]
    asked += [(left, 1, "not run"), (lambda: ("", {}), 99, "not run"), (endless, 1, "stopped")]
    for number, (body, needs, outcome) in enumerate(asked, 1):
        kit.check("A", f"check {number}", body, needs=needs, most=0.2)
        result = json.loads((kit.out / "gpu.json").read_text())
        assert len(result["rows"]) == number and result["rows"][-1]["outcome"] == outcome and not result["complete"]
    says = [row["says"] for row in result["rows"]]
    assert says[0] == "well" and says[1] == "ValueError: first line" and says[2] == "not here: do that"
    assert "s were left for it, and it needs 99" in says[4]
    log = (kit.out / "gpu.log").read_text()
    assert "second line" in log and "Traceback" in log


def test_a_check_that_breaks_its_process_costs_its_own_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed, hanging, leaving a device that answers no more, or hanging while it is asked whether it does."""
    code = f"""
import os, signal, sys, time
from pathlib import Path
sys.path[:0] = [{str(ROOT / "benchmarks" / "gpu")!r}, {str(ROOT / "src")!r}]
import kit
from kit import Broken, Kit
kit.ASKED = 0.1
made = Kit(Path({str(tmp_path)!r}), 1.0, {{}})
made.write()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
def fails():
    raise ValueError("an illegal address")
bodies = [lambda: ("well", {{"x": 1}}), lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: time.sleep(60)]
bodies += [fails, fails, lambda: ("well", {{}})]
alive = {{3: lambda: False, 4: lambda: time.sleep(60)}}
try:
    for number, body in enumerate(bodies):
        made.alive = alive.get(number, made.alive)
        made.check("A", str(number), body, needs=0, most=0.1)
except Broken:
    sys.exit(75)
made.finish()
"""
    monkeypatch.setattr("supervise.GRACE", 0.5)
    result = supervised([sys.executable, "-c", code], tmp_path, monotonic() + 60)
    found = [(row["check"], row["outcome"]) for row in result["rows"]]
    wanted = ("passed", "failed", "stopped", "failed", "failed", "passed")
    assert found == [*zip("012345", wanted, strict=True)] and result["complete"]
    says = [row["says"] for row in result["rows"]]
    assert says[1] == "it ended its process with signal SIGKILL" and "its process was ended" in says[2]
    assert says[3] == says[4] == "ValueError: an illegal address" and result["rows"][0]["values"] == {"x": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu.json", "gpu.log"]


def test_the_time_ends_a_process_between_its_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpu.json").write_text(json.dumps({"rows": [], "complete": False}))
    monkeypatch.setattr("supervise.GRACE", 0.2)
    result = supervised([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path, monotonic())
    assert result == {"rows": [], "complete": False}


def test_what_does_not_work_is_switched_off_for_all_that_follows(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    off: list[str] = []
    # Other tests import scripts of this name anew.
    monkeypatch.setitem(Kernels.run.__globals__, "switch_off", off.append)
    checks = Kernels(kit, torch.device("cpu"), True, 0.0)

    def wrong(self: Kernels) -> Any:
        raise RuntimeError("out of resources")

    for what in ("attention", "rows", "weights", "graphs"):
        monkeypatch.setattr(Kernels, what, wrong if what in ("attention", "graphs") else lambda self: ("well", {}))
    checks.run()
    assert off == ["attention", "graphs"]
    # Another process finds the rows.
    off.clear()
    Kernels(Kit(kit.out, 0.5, {}), torch.device("cpu"), True, 0.0).run()
    assert off == ["attention", "graphs"]


def test_targets_are_told_from_what_was_measured() -> None:
    def row(check: str, **values: Any) -> dict[str, Any]:
        return {"part": "B", "check": check, "values": values}

    measured = [
        row("8B: weights", floor_ms=4.0),
        row("8B: a step of 1 text", step_ms=4.5, kernel_ms=4.41),
        row("8B: 1 text", plain={"tokens_per_s": 200.0}),
        row("8B: 64 texts", plain={"tokens_per_s": 9000.0}),
        row("SmolLM2-135M: 1 text", plain={"tokens_per_s": 1200.0}),
    ]
    found = [said for _, said, _ in targets({"rows": measured})]
    assert found == ["1.12", "not measured", "45.0", "2.0%", "1,200", "not measured"]


def test_a_file_goes_in_parts_and_comes_out_whole(tmp_path: Path) -> None:
    source, folder = tmp_path / "model.gguf", tmp_path / "parts"
    source.write_bytes(os.urandom(5 * (1 << 19)))
    made = cut(source, folder, 1)
    assert [path.name for path in made] == ["part-000", "part-001", "part-002", "manifest.json"]
    assert [path.stat().st_size for path in made[:3]] == [1 << 20, 1 << 20, 1 << 19]
    joined = join(folder, tmp_path / "there" / "model.gguf")
    assert joined.read_bytes() == source.read_bytes() and len(list(joined.parent.iterdir())) == 1
    second = made[1].read_bytes()
    made[1].write_bytes(second[:-1] + bytes([second[-1] ^ 1]))
    # What is whole already needs no parts.
    assert join(folder, joined) == joined
    with pytest.raises(PartsError, match="part-001 is damaged, its checksum differs"):
        join(folder, tmp_path / "other.gguf")
    made[1].unlink()
    with pytest.raises(PartsError, match=r"lacks part-001 of model\.gguf"):
        join(folder, tmp_path / "other.gguf")
    assert not (tmp_path / "other.gguf").exists()
    with pytest.raises(PartsError, match=r"has no manifest\.json"):
        join(tmp_path, tmp_path / "other.gguf")


def test_a_training_whose_time_is_over_leaves_its_head_and_goes_on(
    whole: Run, kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, out = whole
    monkeypatch.setenv("DECODERY_HOME", str(out.parent / "home"))
    model = str(out.parent / "work" / "model")
    made = training.Training(kit, torch.device("cpu"), loader(Namespace(model=model)), True, 0.0, tmp_path, None)
    made.texts()
    # A checkpoint with every validation, and the end at the fourth report, however fast this machine is.
    validations, reports = count(step=100), chain([0.0] * 4, repeat(inf))
    with monkeypatch.context() as hurried:
        hurried.setattr("decodery.training.loop.monotonic", lambda: float(next(validations)))
        hurried.setattr(training, "monotonic", lambda: next(reports))
        said, early = made.head()
    assert "until the time was over" in said and 0 <= early["steps"] < 5
    assert TrainedHead.load(kit.out / "head.safetensors").facts["steps"] == early["steps"]
    # Texts that a checkpoint has learned from stay as they are.
    assert made.texts()[0] == "40 texts of an earlier run, whose training goes on"
    assert "to the end of its plan" in made.head()[0]
