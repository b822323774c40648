"""Batches: every request is answered once, whatever ends the process, and as the server would."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from decodery.core.errors import CorruptFile, DecoderyError
from decodery.llm.llm import LLM
from decodery.server.app import Front
from decodery.server.batch import answer_batch
from decodery.server.batch_file import Answers, BatchFile, Totals, read_lines
from decodery.server.run import EngineFailed
from decodery.server.settings import ServerSettings
from serving import client, serving, tiny_lm, user, wait_until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def lm() -> LLM:
    return tiny_lm()


def ask(name: str, url: str = TEXT, **body: Any) -> str:
    body = {"max_tokens": 6, "prompt" if url == TEXT else "messages": "abc" if url == TEXT else user("abc"), **body}
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})


def run(lm: LLM, source: Path, out: Path, stopped: Any = lambda: False, at_once: int = 4, **settings: Any) -> Totals:
    front = Front(lm, ServerSettings(name=lm.name, max_queue=1000, max_texts_per_key=1000, **settings))
    front.service.start()
    try:
        with BatchFile(source, out, front.settings.body_bytes, front.service.fingerprint) as batch:
            asyncio.run(answer_batch(front, batch, at_once, lambda done, total: None, stopped))
        return batch.totals
    finally:
        front.service.stop()


def read(path: Path) -> dict[str, Any]:
    """Answers by custom_id, each there once."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def text(line: dict[str, Any]) -> str:
    assert line["error"] is None and line["response"]["status_code"] == 200
    choice = line["response"]["body"]["choices"][0]
    written = choice.get("text") or choice["message"]["content"]
    assert isinstance(written, str)
    return written


def test_answers_are_those_of_the_server(lm: LLM, tmp_path: Path) -> None:
    asked = [ask(f"r{n}", (TEXT, CHAT)[n % 2], seed=n, temperature=1.0) for n in range(12)]
    (tmp_path / "in").write_text("\n".join(asked))
    totals = run(lm, tmp_path / "in", tmp_path / "out")
    assert (totals.total, totals.done, totals.failed, totals.complete) == (12, 12, 0, True)
    found = read(tmp_path / "out")
    with serving(lm) as (_, url):
        for line in map(json.loads, asked):
            create = client(url).completions if line["url"] == TEXT else client(url).chat.completions
            answer = create.create(model=lm.name, **line["body"]).choices[0]  # type: ignore[union-attr]
            assert text(found[line["custom_id"]]) == (answer.text if line["url"] == TEXT else answer.message.content)


def test_wrong_lines_are_named_and_the_others_answered(lm: LLM, tmp_path: Path) -> None:
    long = ask("long", prompt="x" * 3000)
    lines = ["{", ask("good"), "", "[1]", '{"body": {}}', ask("good"), ask("where", "/v1/embeddings"), long, ask("end")]
    lines += [ask("cold", temperature=-1), '{"custom_id": "none"}', ask("stream", stream=True), '{"custom_id": NaN}']
    lines += [ask("who", model="gpt-4"), ask("deep", prompt="x").replace('"x"', "[" * 900 + "]" * 900)]
    (tmp_path / "in").write_text("\n".join(lines))
    totals = run(lm, tmp_path / "in", tmp_path / "out", body_bytes=2500)
    found = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert totals.done == len(found) == totals.total == len(lines) - 1
    faults = {line["error"]["line"]: line["error"]["code"] for line in found if line["error"] is not None}
    assert faults == {
        **{1: "invalid_json_line", 4: "invalid_json_line", 5: "invalid_custom_id", 6: "duplicate_custom_id"},
        **{8: "line_too_long", 11: "invalid_url", 13: "invalid_json_line", 15: "invalid_json_line"},
    }
    answered = {line["custom_id"]: line["response"]["status_code"] for line in found if line["response"] is not None}
    assert answered == {"good": 200, "where": 404, "end": 200, "cold": 400, "stream": 400, "who": 404}
    assert totals.failed == len(found) - 2 and totals.named
    bodies = [line["response"]["body"] for line in found if line["response"] and line["response"]["status_code"] != 200]
    assert all(set(body["error"]) == {"message", "type", "param", "code"} for body in bodies)


def test_the_command_fails_where_a_line_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from decodery.cli.main import main

    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    good, bad = ask("good", max_tokens=2), ask('", "response": {"status_code": 200, "', temperature=-1)

    def status(*lines: str) -> tuple[int, str]:
        source.write_text("\n".join(lines))
        with pytest.raises(SystemExit) as left:
            main(["batch", "--kv-gib", "0.5", str(source), str(out)])
        assert isinstance(left.value.code, int)
        return left.value.code, capsys.readouterr().err

    assert status(good)[0] == 0
    code, said = status(good, bad)
    assert code == 1 and "1 answered, 1 of them with an error, 1 earlier, of 2" in said
    # What failed earlier is not asked for again, and still no success.
    code, said = status(good, bad)
    assert code == 1 and "0 answered, 0 of them with an error, 2 earlier (1 of them with an error), of 2" in said


def test_what_is_answered_is_left_alone_and_the_rest_is_done(lm: LLM, tmp_path: Path) -> None:
    source, out, whole = tmp_path / "in", tmp_path / "out", tmp_path / "whole"
    source.write_text("\n".join([*(ask(f"r{n}", seed=n) for n in range(9)), "{"]))
    run(lm, source, whole)
    lines = whole.read_bytes().splitlines(keepends=True)
    # Without one in the middle, and with one cut by a kill.
    out.write_bytes(b"".join(lines[:3] + lines[4:7]) + lines[7][:40])
    totals = run(lm, source, out)
    assert (totals.earlier, totals.done, totals.complete) == (6, 4, True)
    assert out.read_bytes().startswith(b"".join(lines[:3] + lines[4:7]))
    again, first = read(out), read(whole)
    assert again.keys() == first.keys()
    assert all(text(again[name]) == text(first[name]) for name in first if name is not None)
    kept = out.read_bytes()
    assert run(lm, source, out).earlier == 10 and out.read_bytes() == kept


def test_another_input_does_not_go_on_in_the_same_file(lm: LLM, tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.write_text("\n".join(ask(f"r{n}") for n in range(3)))
    run(lm, source, out)
    kept = out.read_bytes()
    source.write_text("\n".join(ask(f"r{n}", seed=5) for n in range(3)))
    with pytest.raises(CorruptFile, match="changed"):
        run(lm, source, out)
    source.write_text(ask("r0"))
    with pytest.raises(CorruptFile, match="changed"):
        run(lm, source, out)
    assert out.read_bytes() == kept
    out.write_text("a diary\n")
    with pytest.raises(CorruptFile, match="something else"):
        run(lm, source, out)
    assert out.read_text() == "a diary\n"


def test_one_process_writes_at_a_time(lm: LLM, tmp_path: Path) -> None:
    (tmp_path / "in").write_text(ask("r0"))
    with Answers(tmp_path / "out", 1), pytest.raises(DecoderyError, match="another process"):
        run(lm, tmp_path / "in", tmp_path / "out")


def test_an_interruption_leaves_what_is_in_progress_for_later(lm: LLM, tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.write_text("\n".join(ask(f"r{n}", max_tokens=24, ignore_eos=True) for n in range(16)))
    totals = run(lm, source, out, stopped=lambda: out.exists() and out.read_bytes().count(b"\n") >= 3)
    assert not totals.complete and 3 <= totals.done < 16
    assert run(lm, source, out).done == 16 - totals.done
    assert len(read(out)) == 16


def test_an_engine_that_ends_answers_nobody_wrongly(lm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from decodery.engine.engine import Engine

    source, out = tmp_path / "in", tmp_path / "out"
    source.write_text("\n".join(ask(f"r{n}", max_tokens=12, ignore_eos=True) for n in range(12)))

    step = Engine.step

    def breaks(self: Engine) -> Any:
        if out.exists() and out.read_bytes().count(b"\n") >= 4:
            raise RuntimeError("on purpose")
        return step(self)

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "step", breaks)
        with pytest.raises(EngineFailed):
            run(lm, source, out)
    assert all(text(line) for line in read(out).values())
    assert run(lm, source, out).complete and len(read(out)) == 12


def test_long_lines_are_never_held_whole(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"a" * 10 + b"\n" + b"b" * 11 + b"\n\n" + b"c" * 500 + b"\nd")
    found = list(read_lines(path, 10, ""))
    assert [(line.number, line.data) for line in found] == [(1, b"a" * 10), (2, None), (4, None), (5, b"d")]
    assert len({line.digest for line in found}) == 4
    assert [line.digest for line in read_lines(path, 10, "other")] != [line.digest for line in found]


def test_a_killed_process_loses_nothing_and_does_nothing_twice(smollm2_int8: LLM, tmp_path: Path) -> None:
    source, out, whole = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    own = {"ignore_eos": True, "decodery": {"drafter": "none"}}
    source.write_text("\n".join(ask(f"r{n}", prompt=f"Item {n}:", max_tokens=8, **own) for n in range(24)))
    options = ["--dtype", "int8", "--max-running", "2", "--kv-gib", "0.5"]
    command = [sys.executable, "-m", "decodery", "batch", *options, str(source)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def written() -> int:
        return out.read_bytes().count(b"\n") if out.exists() else 0

    process = subprocess.Popen([*command, str(out)], env=environment, stderr=subprocess.DEVNULL)
    wait_until(lambda: written() >= 3 or process.poll() is not None)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    kept = written()
    assert 3 <= kept < 24
    first = out.read_bytes().rpartition(b"\n")[0]
    done = subprocess.run([*command, str(out)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{24 - kept} answered, 0 of them with an error, {kept} earlier, of 24" in done.stderr
    assert out.read_bytes().startswith(first)
    run(smollm2_int8, source, whole)
    found, once = read(out), read(whole)
    assert len(found) == 24 and {name: text(found[name]) for name in found} == {name: text(once[name]) for name in once}
