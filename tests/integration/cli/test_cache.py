"""What is kept in the cache as a user lists and cleans it: real models, real files, other processes that use them."""

from __future__ import annotations

import gc
import io
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from filelock import FileLock
from gguf import GGMLQuantizationType as Kind

from decodery.cli.main import main
from decodery.models.loaders import store
from decodery.models.loaders.cache_use import mark_of
from decodery.models.loaders.load import load
from tiny_gguf import write_gguf
from tiny_models import make_model, save

DAY = 86400


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def sources(home: Path, tmp_path: Path) -> dict[str, Path]:
    """Two models, a file and a folder, each of which was loaded in float32 and then in int8."""
    found = {"tiny": tmp_path / "tiny.gguf", "model": tmp_path / "model"}
    write_gguf(found["tiny"], make_model("llama"), Kind.Q8_0)
    save(make_model("llama", seed=1), found["model"])
    for path in found.values():
        for dtype in ("float32", "int8"):
            load(path, dtype=dtype, device="cpu")
    # A model is part of a cycle: until that is found, it still uses its weights.
    gc.collect()
    return found


def cache(*arguments: str, text: str = "", terminal: bool = False) -> tuple[int, str, str]:
    """Exit status, output and errors of the command, run in this process."""
    output, errors, typed = io.StringIO(), io.StringIO(), io.StringIO(text)
    typed.isatty = lambda: terminal  # type: ignore[method-assign]
    with mock.patch.multiple(sys, stdin=typed, stdout=output, stderr=errors), pytest.raises(SystemExit) as left:
        main(["cache", *arguments])
    assert isinstance(left.value.code, int)
    return left.value.code, output.getvalue(), errors.getvalue()


def listed() -> dict[str, Any]:
    status, output, errors = cache("--json")
    assert (status, errors) == (0, "")
    return json.loads(output)


def titles() -> set[str]:
    return {f"{each['name']}:{each['kind']}" for each in listed()["entries"]}


def used_ago(days: dict[str, float]) -> None:
    """Make it so many days ago that each of these was used last."""
    for each in listed()["entries"]:
        then = time.time() - DAY * days[f"{each['name']}:{each['kind']}"]
        os.utime(mark_of(Path(each["path"])), (then, then))


def test_everything_is_listed_with_its_size_and_its_source(home: Path, sources: dict[str, Path]) -> None:
    for name in ("cost/a.json", "converted/v1/old/int8.safetensors", "peers/tiny-0123-Q8_0.gguf", "unfinished/ab/half"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(bytes(1000))
    whole = listed()
    found = {f"{each['name']}:{each['kind']}": each for each in whole["entries"]}
    copies = {f"{name}:{dtype}" for name in sources for dtype in ("float32", "int8")}
    others = {"measurements:passes", "v1:converted", "tiny:Q8_0", "unfinished:ab"}
    assert found.keys() == copies | others
    assert {(found[name]["source"], found[name]["source_exists"]) for name in copies} == {
        (str(path), True) for path in sources.values()
    }
    assert {name for name in found if found[name]["source_exists"] is False} == {"v1:converted", "unfinished:ab"}
    assert whole["folder"] == str(home)
    # All bytes but those of unknown origin are accounted for, each once.
    on_disk = sum(path.stat().st_size for path in home.rglob("*") if path.is_file())
    assert whole["bytes"] == sum(each["bytes"] for each in whole["entries"]) == on_disk
    _, table, _ = cache()
    heads = {":".join(line.split()[:2]): line for line in table.splitlines()}
    assert found.keys() < heads.keys()
    assert heads["tiny:int8"].endswith(f"  {sources['tiny']}") and heads["v1:converted"].endswith("unknown (gone)")
    assert f"8 entries ({on_disk / 1024**2:.1f} MiB) in {home}" in table


def test_an_empty_cache_is_told(home: Path) -> None:
    assert cache() == (0, f"0 entries (0 bytes) in {home}\n", "")
    assert cache("clean") == (0, "0 entries (0 bytes) removed, 0 entries (0 bytes) left\n", "")
    assert not home.joinpath("converted").exists()


def test_an_entry_that_names_no_source_is_read_and_listed(home: Path, sources: dict[str, Path]) -> None:
    (path,) = (path for path in home.rglob("model.json") if "tiny" in str(path))
    kept = json.loads(path.read_text())
    assert kept.pop("source") == str(sources["tiny"])
    path.write_text(json.dumps(kept))
    weights = path.parent / "float32.safetensors"
    written = weights.stat().st_mtime_ns
    assert load(sources["tiny"], dtype="float32", device="cpu").dtype == "float32"
    gc.collect()
    assert weights.stat().st_mtime_ns == written, "it should not have been converted anew"
    sources["tiny"].unlink()
    entries = [each for each in listed()["entries"] if each["name"] == "tiny"]
    assert [(each["source"], each["source_exists"]) for each in entries] == [(None, None)] * 2
    assert "0 entries (0 bytes) removed" in cache("clean")[1]


def test_loading_tells_of_the_last_use_where_that_can_be_written(home: Path, sources: dict[str, Path]) -> None:
    ago = dict.fromkeys(("tiny:float32", "tiny:int8", "model:float32", "model:int8"), 10.0)
    used_ago(ago)
    before = {each["path"]: each["last_used"] for each in listed()["entries"]}
    load(sources["tiny"], dtype="int8", device="cpu")
    entries = {f"{each['name']}:{each['kind']}": each for each in listed()["entries"]}
    changed = {name for name, each in entries.items() if each["last_used"] != before[each["path"]]}
    assert changed == {"tiny:int8"}
    mark = mark_of(Path(entries["model:int8"]["path"]))
    mark.unlink()
    mark.mkdir()
    assert load(sources["model"], dtype="int8", device="cpu").dtype == "int8"


def test_what_has_no_source_any_more_goes_and_the_rest_stays(home: Path, sources: dict[str, Path]) -> None:
    shutil.rmtree(sources["model"])
    assert f"{sources['model']} (gone)" in cache()[1]
    status, output, errors = cache("clean")
    assert (status, errors) == (0, "") and "removed model:int8" in output and "\n2 entries (" in output
    assert titles() == {"tiny:float32", "tiny:int8"}
    assert not [path for path in home.rglob("*") if path.name.startswith("model-")], "nothing of it should be left"


def test_a_bound_takes_what_has_no_source_first_and_then_what_was_used_longest_ago(
    home: Path, sources: dict[str, Path]
) -> None:
    used_ago({"tiny:float32": 3, "tiny:int8": 5, "model:float32": 1, "model:int8": 1})
    shutil.rmtree(sources["model"])
    sizes = {f"{each['name']}:{each['kind']}": each["bytes"] for each in listed()["entries"]}
    both = sizes["tiny:float32"] + sizes["tiny:int8"]
    _, output, _ = cache("clean", "--most", str((both - 1) / 2**30))
    *removed, last = (line.split(",")[0] for line in output.splitlines())
    assert set(removed[:2]) == {"removed model:float32", "removed model:int8"}
    assert removed[2:] == ["removed tiny:int8"] and last.startswith("3 entries (")
    (entry,) = listed()["entries"]
    assert entry["kind"] == "float32" and list(home.rglob("tokenizer.json"))
    assert load(sources["tiny"], dtype="int8", device="cpu").dtype == "int8"
    gc.collect()
    cache("clean", "--most", "0")
    assert titles() == set()


def test_age_and_names_choose(home: Path, sources: dict[str, Path]) -> None:
    used_ago({"tiny:float32": 3, "tiny:int8": 5, "model:float32": 5, "model:int8": 1})
    cache("clean", "--older-than", "4", "tiny")
    assert titles() == {"tiny:float32", "model:float32", "model:int8"}
    cache("clean", "--older-than", "4")
    assert titles() == {"tiny:float32", "model:int8"}
    cache("clean", str(sources["tiny"]))
    assert titles() == {"model:int8"}
    status, output, errors = cache("clean", "modell:int8")
    assert (status, output) == (1, "")
    assert errors == "decodery: nothing in the cache is called 'modell:int8': try model:int8, model\n"
    cache("clean", "model:int8")
    assert titles() == set()


def test_a_terminal_is_asked(home: Path, sources: dict[str, Path]) -> None:
    status, output, errors = cache("clean", "tiny", text="n\n", terminal=True)
    assert status == 0 and "nothing was removed" in output and "Remove 2 entries" in errors
    assert len(titles()) == 4
    assert "2 entries" in cache("clean", "tiny", text="y\n", terminal=True)[1]
    assert len(titles()) == 2
    assert "Remove" not in cache("clean", "--yes", "model", terminal=True)[2]
    assert titles() == set()


def test_what_another_process_makes_or_uses_stays(home: Path, sources: dict[str, Path]) -> None:
    code = "import sys; from decodery.models.loaders.load import load\n"
    code += "found = load(sys.argv[1], dtype='int8', device='cpu')\n"
    command = [sys.executable, "-c", code + "print(found.dtype, flush=True); sys.stdin.read()", str(sources["tiny"])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "int8\n"
        in_use = {f"{each['name']}:{each['kind']}" for each in listed()["entries"] if each["in_use"]}
        assert in_use == {"tiny:int8"}
        (made,) = (path for path in home.rglob("*.lock") if "model-" in str(path))
        with FileLock(made):
            _, output, errors = cache("clean", "--most", "0")
        assert errors.count("it stays") == 3 and "1 entry (" in output
        assert titles() == {"tiny:int8", "model:float32", "model:int8"}
        process.stdin.close()
        process.wait(60)
    assert cache("clean", "--most", "0")[2] == "" and titles() == set()


def test_a_model_of_this_process_is_held_while_it_lives(home: Path, sources: dict[str, Path]) -> None:
    found = load(sources["tiny"], dtype="int8", device="cpu")
    assert "tiny:int8: it stays" in cache("clean", "tiny")[2]
    del found
    gc.collect()
    assert cache("clean", "tiny")[2] == ""


def test_a_removal_that_is_killed_leaves_nothing_half(home: Path, sources: dict[str, Path]) -> None:
    with mock.patch.object(store.shutil, "rmtree"):
        cache("clean", "tiny")
    assert {name for name in titles() if not name.startswith("unfinished:")} == {"model:float32", "model:int8"}
    assert load(sources["tiny"], dtype="int8", device="cpu").dtype == "int8"
    cache("clean")
    assert titles() == {"tiny:int8", "model:float32", "model:int8"} and not list((home / "unfinished").iterdir())
