"""The borders of `search-bench`: wrong options, servers that go away, runs that were killed, other problems."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import decodery
from decodery.bench.searches.job import SearchJob, Settings
from decodery.bench.searches.problems import read_problems
from decodery.cli.main import cli
from decodery.core.errors import DecoderyError, ServerError, SettingsError
from decodery.llm.remote import remote
from scripted_lm import Asked, Said, ScriptedLLM
from scripted_server import Reply, say, scripted, stream

VOTE = "self-consistency:n={n}"


def asked_of(folder: Path, count: int = 3, answer: int = 7) -> Path:
    path = folder / "problems.jsonl"
    path.write_text("".join(json.dumps({"question": f"q{n}", "answer": answer}) + "\n" for n in range(count)))
    return path


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--budgets", "1,,4"], "list of integers"),
        (["--budgets", "0,4"], "at least 1"),
        (["--budgets", "1.5"], "list of integers"),
        (["--prompt", "no place"], "{question}"),
        (["--limit", "0"], "--limit"),
        (["--max-new-tokens", "0"], "--max-new-tokens"),
        (["--seed", "-1"], "--seed"),
        (["--seconds", "0"], "--seconds"),
        (["--seconds", "-3"], "--seconds"),
        (["--seconds", "nan"], "--seconds"),
        (["--answer", "numbers"], "--answer"),
        (["--pattern", "("], "pattern"),
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--stop", ""], "stop"),
        (["--search", "self-consistancy:n={n}"], "self-consistency"),
        (["--search", "best-of-n:n={n}"], "scorer"),
        (["--search", "self-consistency:m={n}"], "m"),
        (["--search", "best-of-n:scorer={example},n={n}"], "example"),
        (["--search", "beam:width={n}"], "beam"),
        (["--import", "no_such_module"], "no_such_module"),
        (["--out", "FILE"], "FILE"),
        (["--out", "FILE/below"], "FILE"),
    ],
)
def test_a_wrong_option_is_named_before_anything_is_asked(
    options: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = ScriptedLLM(lambda asked: "#### 7")
    monkeypatch.setattr(decodery, "load", lambda *given, **more: lm)
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("")
    command = ["search-bench", str(asked_of(tmp_path)), "--search", VOTE, "--out", "out", *options]
    ended = CliRunner().invoke(cli, command)
    assert ended.exit_code, ended.output
    assert ended.exception is None or isinstance(ended.exception, SystemExit | DecoderyError), ended.exception
    assert words in ended.output + str(ended.exception) and not lm.asked
    assert not Path("out/records.jsonl").exists()


def test_problems_with_other_marks_of_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes('\ufeff{"question": "a\u2028b\u0085c", "answer": 1}\r\n'.encode())
    (problem,) = read_problems(path)
    assert problem.question == "a\u2028b\u0085c"


def test_what_a_server_broke_off_is_asked_again(tmp_path: Path) -> None:
    away = {"q1"}

    def script(asked: Asked) -> str | Said:
        return Said("#### 7 and", gone=asked.text in away and asked.seed % 2 == 0)

    problems, settings = read_problems(asked_of(tmp_path)), Settings((VOTE, "first-finish:n=2"), (1, 2))
    first = SearchJob(ScriptedLLM(script), problems, settings, tmp_path / "out").run()
    # Both searches lost a text of the second problem.
    assert not first["complete"] and [row["problems"] for row in first["rows"]] == [2, 2, 2]
    away.clear()
    lm = ScriptedLLM(script)
    whole = SearchJob(lm, problems, settings, tmp_path / "out").run()
    assert whole["complete"] and {asked.text for asked in lm.asked} == {"q1"}
    assert [row["problems"] for row in whole["rows"]] == [3, 3, 3] and not any(row["failed"] for row in whole["rows"])


def test_a_server_that_is_gone_ends_the_comparison_and_keeps_it(tmp_path: Path) -> None:
    problems, settings = read_problems(asked_of(tmp_path, 6)), Settings((VOTE,), (2,))
    late = [True]

    def script(asked: Asked) -> str | Said:
        return Said("", gone=True) if late[0] and asked.text >= "q4" else "#### 7"

    def job() -> SearchJob:
        return SearchJob(ScriptedLLM(script), problems, settings, tmp_path / "out")

    with pytest.raises(ServerError, match=r"went away.*the same command goes on"):
        job().run()
    late[0] = False
    found = job().run()
    assert found["complete"] and found["rows"][0]["right"] == 6


def test_what_a_server_refuses_is_a_result(tmp_path: Path) -> None:
    def refused(handler: Any, body: dict[str, Any]) -> None:
        say(handler, 400, {"error": {"message": "too long"}})

    def run(*replies: Reply) -> dict[str, Any]:
        with scripted(*replies) as (url, _):
            return SearchJob(remote(url, retries=0), problems, Settings((VOTE,), (1,)), tmp_path / "out").run()

    problems = read_problems(asked_of(tmp_path, 2))
    first = run(refused, stream("#### 7", whole=False))
    assert [row["problems"] for row in first["rows"]] == [1] and not first["complete"]
    again = run(stream("#### 7"))
    (row,) = again["rows"]
    assert again["complete"] and (row["problems"], row["failed"], row["right"]) == (2, 1, 1)


def test_a_run_that_was_killed_at_any_byte_goes_on_to_the_same_result(tmp_path: Path) -> None:
    def script(asked: Asked) -> str:
        return f"#### {7 if asked.seed % 3 else 8}"

    problems, settings = read_problems(asked_of(tmp_path)), Settings((VOTE, "first-finish:n=2"), (1, 3))

    def rows(out: Path) -> list[Any]:
        found = SearchJob(ScriptedLLM(script), problems, settings, out).run()
        assert found["complete"]
        return [{name: value for name, value in row.items() if name != "seconds"} for row in found["rows"]]

    expected = rows(tmp_path / "whole")
    kept = (tmp_path / "whole" / "records.jsonl").read_bytes()
    header = kept.index(b"\n") + 1
    for at in range(header, len(kept), 97):
        out = tmp_path / f"cut-{at}"
        out.mkdir()
        (out / "records.jsonl").write_bytes(kept[:at])
        assert rows(out) == expected


def _other_problems(folder: Path) -> Path:
    return asked_of(folder, answer=8)


def _older(folder: Path) -> Path:
    path = folder / "out" / "records.jsonl"
    path.write_text(path.read_text().replace('"digest"', '"sum"'))
    return asked_of(folder)


@pytest.mark.parametrize(("change", "words"), [(_other_problems, "another problem '1'"), (_older, "another version")])
def test_records_of_other_problems_are_refused(change: Callable[[Path], Path], words: str, tmp_path: Path) -> None:
    lm, settings = ScriptedLLM(lambda asked: "#### 7"), Settings((VOTE,), (1,))
    SearchJob(lm, read_problems(asked_of(tmp_path)), settings, tmp_path / "out").run()
    with pytest.raises(SettingsError, match=words):
        SearchJob(lm, read_problems(change(tmp_path)), settings, tmp_path / "out").run()


def test_fewer_problems_have_figures_of_their_own_and_further_ones_are_added(tmp_path: Path) -> None:
    lm, settings, problems = (
        ScriptedLLM(lambda asked: "#### 7"),
        Settings((VOTE,), (1,)),
        read_problems(asked_of(tmp_path)),
    )
    counts = []
    for limit in (2, 1, 3):
        found = SearchJob(lm, problems[:limit], settings, tmp_path / "out").run()
        assert found["complete"]
        counts.append((found["rows"][0]["problems"], len(lm.asked)))
    assert counts == [(2, 2), (1, 2), (3, 3)]
