"""Every kind of `decodery train` that is stopped, by Ctrl-C or for good, goes on, and ends with the same bits."""

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
from decodery.cli import train_common
from decodery.models.loaders import store
from decodery.training import loop, los, router
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
    monkeypatch.setattr(loop, "_BETWEEN", 0)
    # Hours are said of a run, and two runs take different ones.
    monkeypatch.setattr(train_common, "monotonic", lambda: 0.0)
    monkeypatch.setattr(loop.TrainingPlan, "__post_init__", often)
    monkeypatch.setitem(los.train_los.__wrapped__.__kwdefaults__, "epochs", 6)
    monkeypatch.setitem(router.fit_router.__kwdefaults__, "steps", 6)
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))


class Watch:
    """What the training loop did in a run, by checkpoint: the steps that it restored and saved, in order.

    Attributes:
        reports: How many reports of progress came before each save.
    """

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.events = dict[str, list[tuple[str, int]]]()
        self.reports, self.said = list[int](), list[int]()
        restore, save = loop._restore, loop._save

        def restoring(path: Path, *others: Any) -> loop.History:
            history = restore(path, *others)
            self.events.setdefault(str(path), []).append(("restored", history.step))
            return history

        def saving(path: Path, made: str, history: loop.History, *others: Any) -> None:
            save(path, made, history, *others)
            self.events.setdefault(str(path), []).append(("saved", history.step))
            self.reports.append(len(self.said))

        patched.setattr(loop, "_restore", restoring)
        patched.setattr(loop, "_save", saving)

    def check(self, before: dict[str, int]) -> None:
        """Assert that this run went on from the steps of the checkpoints that there were before it."""
        for path, step in before.items():
            first, *others = self.events[path]
            assert first == ("restored", step), path
            assert others[:1] in ([], [("saved", step + 1)]), path


def steps_of(out: Path) -> dict[str, int]:
    """The step of each checkpoint of the training loop in the folder that holds what is made."""
    found = {}
    for path in out.parent.rglob(loop.CHECKPOINT):
        with safe_open(path, "pt") as file:
            history = (file.metadata() or {}).get("history")
        if history is not None:
            found[str(path)] = json.loads(history)["step"]
    return found


def run(
    kind: str, files: dict[str, str], out: Path, stop: int | None, error: type[BaseException], *, saved: bool = False
) -> Watch:
    """Train a kind, which goes on from the checkpoints there are.

    At its `stop`-th report of progress the error comes, or with `saved` at the first one after so many checkpoints.
    """
    # Files and models that it names are made before anything is counted.
    before, arguments = steps_of(out), KINDS[kind].format_map(files).split()

    @contextmanager
    def counting(**settings: Any) -> Iterator[Any]:
        def progress(what: str, done: int, total: int) -> None:
            watch.said.append(done)
            if len(watch.reports if saved else watch.said) == stop:
                raise error

        yield progress

    with pytest.MonkeyPatch.context() as patched:
        watch = Watch(patched)
        patched.setattr(store, "terminal_progress", counting)
        try:
            code, _, errors = inside("train", *kind.split(), *arguments, "--out", str(out))
        except BaseException as ended:
            # `inside` expects an exit, and what is not handled is none.
            assert stop is not None and isinstance(ended.__context__ or ended, Killed | pytest.fail.Exception)
            return watch
    assert code == (0 if stop is None else 130), errors
    if stop is None:
        watch.check(before)
    return watch


def contents(out: Path) -> dict[str, Any]:
    """All that lies in a folder: tensors and what is said of them."""
    found: dict[str, Any] = {}
    for path in sorted(each for each in out.rglob("*") if each.is_file()):
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
    # What is one file has its checkpoints beside it.
    out, whole = tmp_path / "out" / "made", tmp_path / "whole"
    out.parent.mkdir()
    first = run(kind, files, out, None, Killed)
    out.parent.rename(whole)
    out.parent.mkdir()
    reports = len(first.said)
    assert reports >= 1
    run(kind, files, out, -(-reports // 3), KeyboardInterrupt)
    if several := len(first.reports) > 2:
        run(kind, files, out, 1, Killed, saved=True)
    else:
        run(kind, files, out, -(-reports // 2), Killed)
    kept = steps_of(out)
    run(kind, files, out, None, Killed)
    assert kept or not several
    expected, found = contents(whole), contents(out.parent)
    assert set(found) == set(expected)
    assert [name for name in expected if found[name] != expected[name]] == []


def forgetting(restore: Any) -> Any:
    """A restore that leaves the moments of the optimizer out."""

    def restored(path: Path, made: str, parameters: Any, best: Any, optimizer: Any) -> Any:
        history = restore(path, made, parameters, best, optimizer)
        for state in optimizer.state.values():
            state["exp_avg"].zero_()
        return history

    return restored


def starting_again(restore: Any) -> Any:
    """A restore that restores nothing."""
    return lambda *given: loop.History()


@pytest.mark.parametrize(("wrong", "bits"), [(forgetting, False), (starting_again, True)])
def test_a_training_that_does_not_go_on_is_caught(
    wrong: Any, bits: bool, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, whole = tmp_path / "out" / "made", tmp_path / "whole"
    first = run("hidden-transfer", files, out, None, Killed)
    out.rename(whole)
    run("hidden-transfer", files, out, len(first.reports) - 1, KeyboardInterrupt, saved=True)
    monkeypatch.setattr(loop, "_restore", wrong(loop._restore))
    if bits:
        # It would end with the same bits.
        with pytest.raises(AssertionError, match="restored"):
            run("hidden-transfer", files, out, None, Killed)
        assert contents(whole) == contents(out)
    else:
        run("hidden-transfer", files, out, None, Killed)
        assert contents(whole) != contents(out)
