"""`decodery train draft` as a user meets it: what it makes, what it says beforehand, whom it refuses and when."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from unittest import mock

import pytest
import transformers

from commands import inside
from decodery.cli.main import main
from decodery.cli.train import _run
from decodery.cli.train_common import with_time_left
from decodery.models.loaders.load import load
from decodery.training.kind import Kind, Run
from tiny_models import VOCAB, make_model, save


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))


def train_draft(*arguments: str) -> tuple[int, str, str]:
    """Exit status, output and errors of the command, run in this process."""
    output, errors = io.StringIO(), io.StringIO()
    with mock.patch.multiple(sys, stdout=output, stderr=errors), pytest.raises(SystemExit) as left:
        main(["train", "draft", *arguments])
    assert isinstance(left.value.code, int)
    return left.value.code, output.getvalue(), errors.getvalue()


def test_a_draft_is_made_for_a_target_with_few_inner_units_and_its_batch_is_told(tmp_path: Path) -> None:
    model = str(save(make_model("llama"), tmp_path / "model"))
    sizes = ("--texts", "40", "--max-new-tokens", "6", "--epochs", "1", "--tokens", "64")
    status, output, errors = train_draft("-m", model, "--out", str(tmp_path / "draft"), *sizes)
    assert status == 0 and "the draft is ready" in output
    first, second = errors.splitlines()
    assert first.endswith("writes 40 texts of at most 6 tokens")
    told = re.fullmatch(r"the draft learns 1 times from the (\d+) tokens of 40 texts", second)
    assert told is not None and 40 <= int(told[1]) <= 240
    config = load(tmp_path / "draft", device="cpu").model.config
    assert (config.intermediate_size, config.kept_tokens) == (96, 64)
    status, _, errors = train_draft("-m", model, "--out", str(tmp_path / "wide"), "--inner", "97", *sizes)
    assert status == 1 and errors.endswith("choose at most 3 layers and 96 inner units\n")


def test_a_target_that_no_draft_can_be_cut_from_is_refused_before_it_writes(tmp_path: Path) -> None:
    shape = {"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.FalconConfig(**shape, bos_token_id=256, eos_token_id=257)
    save(transformers.FalconForCausalLM(config), tmp_path / "model")
    status, output, errors = train_draft("-m", str(tmp_path / "model"), "--out", str(tmp_path / "draft"))
    assert (status, output) == (1, "") and not (tmp_path / "draft").exists()
    assert "runs through transformers, and a draft is cut only from models that this package runs itself" in errors


def test_what_takes_minutes_is_foretold_once_from_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now, passed_on = [0.0], []
    monkeypatch.setattr("decodery.cli.train_common.monotonic", lambda: now[0])
    report = with_time_left(lambda *told: passed_on.append(told))
    for step in range(1, 101):
        now[0] += 6.0
        report("aligning", step, 100)
    # A twentieth took 30 seconds, and 94 steps are left.
    assert capsys.readouterr().err == "aligning: 6 of 100 done, about 9 min more\n"
    assert len(passed_on) == 100
    for step in range(1, 101):
        now[0] += 0.2
        report("checking", step, 100)
    assert capsys.readouterr().err == ""


def test_a_training_ends_after_its_hours_and_goes_on(tmp_path: Path) -> None:
    model, out = str(save(make_model("llama"), tmp_path / "model")), tmp_path / "cache"
    arguments = ("train", "ngram-cache", "-m", model, "--texts", "20", "--max-new-tokens", "6", "--out", str(out))
    code, output, errors = inside(*arguments, "--limit-hours", "1e-9")
    assert (code, output) == (130, "") and f"stopped; the same command continues from {out}" in errors
    assert not (out / "contexts.safetensors").exists()
    code, output, errors = inside(*arguments, "--limit-hours", "1")
    assert code == 0 and f"--drafter auto:warm={out}/contexts.safetensors" in output, errors


def test_the_hours_of_a_file_are_kept_beside_it_and_a_kill_leaves_them_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now, out = [0.0], tmp_path / "part.bin"
    monkeypatch.setattr("decodery.cli.train_common.monotonic", lambda: now[0])

    def learn(run: Run) -> dict[str, int]:
        run.training.mkdir(exist_ok=True)
        now[0] += 3600.0
        run.progress("learning", 1, 2)
        return {"figure": 1}

    def killed(path: Path, text: str, encoding: str | None = None) -> None:
        path.open("w").close()
        raise KeyboardInterrupt

    kind = Kind("About.", learn, "ready", (), "", out="file")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        _run("kind", kind, {"out": out, "limit_hours": None})
        patched.setattr(Path, "write_text", killed)
        _run("kind", kind, {"out": out, "limit_hours": None})
    capsys.readouterr()
    _run("kind", kind, {"out": out, "limit_hours": None})
    assert '"hours": 2.0' in capsys.readouterr().out


def test_hours_of_writing_texts_are_kept_before_there_are_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now, out = [0.0], tmp_path / "out"
    monkeypatch.setattr("decodery.cli.train_common.monotonic", lambda: now[0])

    def learn(run: Run) -> dict[str, int]:
        now[0] += 3600.0
        if not (run.out / "text").is_dir():
            (run.out / "text").mkdir(parents=True)
            raise KeyboardInterrupt
        return {"figure": 1}

    kind = Kind("About.", learn, "ready: -m {out}", (), "")
    with pytest.raises(KeyboardInterrupt):
        _run("kind", kind, {"out": out, "limit_hours": None})
    capsys.readouterr()
    _run("kind", kind, {"out": out, "limit_hours": None})
    assert '"hours": 2.0' in capsys.readouterr().out


def test_a_training_without_an_output_leaves_the_folder_of_its_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "hours.json").write_text("5.0")
    _run("kind", Kind("About.", lambda run: {"figure": 1}, "ready", (), "", out=""), {"limit_hours": None})
    assert '"hours": 0.0' in capsys.readouterr().out
    assert (tmp_path / "training" / "hours.json").read_text() == "5.0"


@pytest.mark.parametrize("kind", ["sae", "direction", "sequential", "los", "value"])
def test_an_empty_file_is_refused_by_its_name(kind: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    code, _, errors = inside("train", kind, str(empty), "--out", str(tmp_path / "out"))
    assert code == 1 and errors == f"decodery: {empty} is empty: give one JSON object a line\n"


@pytest.mark.parametrize("command", [("train", "sae"), ("train", "draft"), ("bench",), ("compress-text", "x")])
def test_a_path_below_a_file_is_refused_before_any_work(command: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    code, _, errors = inside(*command, "--out", str(file / "deep" / "x"))
    assert code == 2 and f"{file} is a file, so {file / 'deep' / 'x'} cannot be written: name another path" in errors
