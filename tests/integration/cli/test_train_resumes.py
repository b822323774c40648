"""Every kind of `decodery train` that is stopped, by Ctrl-C or for good, ends with the bits of a run that was not."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from commands import inside
from covering import some
from decodery.models.loaders import store
from decodery.training import loop, los
from trained_kinds import KINDS, made_files


class Killed(BaseException):
    """Nothing of the program handles it, as nothing handles a kill."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return made_files(tmp_path_factory.mktemp("kinds"))


@pytest.fixture(autouse=True)
def ticking(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A checkpoint is due after every step, and a training whose length has no option is short."""
    clock, check = itertools.count(step=1000), loop.TrainingPlan.__post_init__

    def often(plan: loop.TrainingPlan) -> None:
        check(plan)
        object.__setattr__(plan, "validate_every", 1)

    monkeypatch.setattr(loop, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(loop.TrainingPlan, "__post_init__", often)
    monkeypatch.setitem(los.train_los.__wrapped__.__kwdefaults__, "epochs", 6)
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))


def run(kind: str, files: dict[str, str], out: Path, stop: int | None, error: type[BaseException]) -> list[int]:
    """Train a kind; at its `stop`-th report of progress the error comes. Returns the steps that were reported."""
    said = list[int]()

    @contextmanager
    def counting(**settings: Any) -> Iterator[Any]:
        def progress(what: str, done: int, total: int) -> None:
            said.append(done)
            if len(said) == stop:
                raise error

        yield progress

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(store, "terminal_progress", counting)
        arguments = KINDS[kind].format(**files).split()
        try:
            code, _, errors = inside("train", *kind.split(), *arguments, "--out", str(out))
        except BaseException as ended:
            # `inside` expects an exit, and what is not handled is none.
            assert stop is not None and isinstance(ended.__context__ or ended, Killed | pytest.fail.Exception)
            return said
    assert code == (0 if stop is None else 130), errors
    return said


def contents(out: Path) -> dict[str, Any]:
    """All that lies in a folder, or in a file: tensors and what is said of them."""
    found: dict[str, Any] = {}
    for path in [out] if out.is_file() else sorted(each for each in out.rglob("*") if each.is_file()):
        name = str(path.relative_to(out))
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                found[name] = {each: file.get_tensor(each).flatten().view(torch.uint8).tolist() for each in file.keys()}  # noqa: SIM118
                found[f"about {name}"] = {key: _read(value) for key, value in (file.metadata() or {}).items()}
        else:
            found[name] = path.read_bytes()
    return found


def _read(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


@pytest.mark.parametrize("kind", some(list(KINDS), 6))
def test_a_kind_that_was_stopped_ends_with_the_same_bits(kind: str, files: dict[str, str], tmp_path: Path) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    reports = len(run(kind, files, out, None, Killed))
    out.rename(whole)
    assert reports >= 1
    for stop, error in ((-(-reports // 3), KeyboardInterrupt), (-(-reports // 2), Killed)):
        run(kind, files, out, stop, error)
    run(kind, files, out, None, Killed)
    expected, found = contents(whole), contents(out)
    assert set(found) == set(expected)
    assert [name for name in expected if found[name] != expected[name]] == []


def test_a_training_that_forgets_its_moments_is_caught(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, whole, restore = tmp_path / "out", tmp_path / "whole", loop._restore

    def forgetting(path: Path, made: str, parameters: Any, best: Any, optimizer: Any) -> Any:
        history = restore(path, made, parameters, best, optimizer)
        for state in optimizer.state.values():
            state["exp_avg"].zero_()
        return history

    reports = run("hidden-transfer", files, out, None, Killed)
    out.rename(whole)
    # The third of four steps, which are reported after all texts.
    steps = max(at for at in range(len(reports) - 3) if reports[at : at + 4] == [1, 2, 3, 4])
    run("hidden-transfer", files, out, steps + 3, KeyboardInterrupt)
    monkeypatch.setattr(loop, "_restore", forgetting)
    run("hidden-transfer", files, out, None, Killed)
    assert contents(whole) != contents(out)
