"""Measuring servers under load: who comes when, what counts, what is kept of an interrupted measurement."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from decodery.bench.load.arrivals import arrivals, read_trace, seen_before, sharegpt_like
from decodery.bench.load.client import Seen
from decodery.bench.load.figures import row
from decodery.bench.load.job import LoadJob
from decodery.bench.load.settings import LoadSettings
from decodery.bench.load.stage import stage
from decodery.bench.load.target import Target
from decodery.bench.report import page, table
from decodery.bench.result import read, require_load
from decodery.core.errors import CorruptFile, DecoderyError, SettingsError
from serving import serving, tiny_lm

EASY = LoadSettings(prompts=3, max_new_tokens=4, concurrency=(1, 2), rates=(50.0,), first_token_limit=60, gap_limit=60)


def quiet(what: str, done: int, total: int) -> None:
    """Report nothing."""


def test_arrivals_are_a_poisson_process() -> None:
    settings = LoadSettings(prompts=4000)

    def told_apart(gaps: np.ndarray) -> bool:
        return bool(stats.kstest(gaps, "expon", args=(0, 1 / 3)).pvalue < 1e-3)

    times = np.array([each.at for each in arrivals(settings, 3.0, 0)])
    assert not told_apart(np.diff(times, prepend=0))
    # The same number in the same time, but evenly, or with the wrong rate.
    assert told_apart(np.full(4000, 1 / 3))
    assert told_apart(np.diff([each.at for each in arrivals(settings, 3.3, 0)], prepend=0))


def test_lengths_have_the_published_means() -> None:
    found = sharegpt_like(6000, 100_000, np.random.default_rng(0))
    read, written = np.array([len(prompt) / 4.4 for prompt, _ in found]), np.array([most for _, most in found])
    # Cut at 3,000 tokens the mean of prompts is a little lower.
    assert abs(read.mean() - 161) < 12 and abs(written.mean() - 338) < 15
    assert stats.kstest(np.log(written[written > 20]), "norm", args=(np.log(225), 0.9)).statistic < 0.03
    assert stats.kstest(np.log(read[read > 20]), "norm", args=(np.log(161), 1.2)).statistic > 0.1


def test_the_seed_decides_and_every_stage_asks_something_else() -> None:
    for workload in ("built-in", "sharegpt-like"):
        settings = LoadSettings(workload=workload, prompts=10)
        first, second = arrivals(settings, 2.0, 0), arrivals(settings, 2.0, 1)
        assert first == arrivals(settings, 2.0, 0) != arrivals(replace(settings, seed=1), 2.0, 0)
        assert not {each.prompt for each in first} & {each.prompt for each in second}
        assert [each.prompt for each in arrivals(settings, None, 0)] == [each.prompt for each in first]


def test_prompts_that_a_server_was_sent_before_are_counted(tmp_path: Path) -> None:
    known = len({each.prompt for each in arrivals(LoadSettings(workload="built-in", prompts=400), None, 0)})
    few, many = LoadSettings(workload="built-in", prompts=10), LoadSettings(workload="built-in", prompts=known + 5)
    assert [seen_before(few, stage, warm=3) for stage in (1, 2)] == [0, 0]
    assert seen_before(few, -(-known // 10) + 1, warm=3) > 3
    # Of its own prompts five come twice, and three were sent to warm up.
    assert seen_before(many, 1, warm=0) == 5 and seen_before(many, 1, warm=3) == 8
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"at": at, "prompt": str(at), "max_tokens": 2}) + "\n" for at in range(4)))
    replayed = LoadSettings(trace=str(trace))
    assert [seen_before(replayed, stage, warm=3) for stage in (1, 2)] == [3, 4]
    with serving(tiny_lm()) as (_, url):
        settings = replace(EASY, trace=str(trace), rates=(100.0, 200.0), concurrency=(), prompts=None)
        result = LoadJob(settings, [Target("tiny", url)], {"name": "tiny"}).run(quiet)
    assert [each["seen_before"] for each in result["rows"]] == [3, 4]
    assert [note.split(";")[0] for note in result["notes"]] == [
        "tiny, speed 100: 3 of 4 prompts were sent before",
        "tiny, speed 200: 4 of 4 prompts were sent before",
    ]


def test_traces_are_replayed_faster(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"at": 4, "prompt": "b", "max_tokens": 2}, {"at": 1.5, "prompt": "a", "max_tokens": 3}]
    path.write_text("\n".join(map(json.dumps, rows)))
    settings = LoadSettings(trace=str(path))
    assert [(each.at, each.prompt, each.max_tokens) for each in arrivals(settings, 2.0, 7)] == [
        (0.75, "a", 3),
        (2.0, "b", 2),
    ]
    for wrong in ({"at": -1}, {"at": "1"}, {"prompt": 5}, {"max_tokens": 0}, {"max_tokens": 1.5}):
        path.write_text(json.dumps({**rows[0], **wrong}))
        with pytest.raises(CorruptFile, match="line 1"):
            read_trace(path)


def test_figures_are_what_they_say() -> None:
    settings = LoadSettings(first_token_limit=1.0, gap_limit=0.5)
    quick = Seen(1.0, 3.0, [1.5, 2.0, 3.0], tokens=5, prompt_tokens=7)
    late = Seen(0.0, 4.0, [2.0, 4.0], tokens=5)
    slow = Seen(0.0, 4.0, [1.0, 4.0], tokens=4)
    broken = Seen(0.0, 0.5, [0.2], tokens=9, error="status 500")
    empty = Seen(0.0, 0.4)
    assert (quick.first, quick.gaps, quick.per_token) == (0.5, [0.5, 1.0], 0.375)
    assert [each.good(settings) for each in (quick, late, slow, broken, empty)] == [True, False, False, False, True]
    found = row("s", "rate", 2.0, [quick, late, slow, broken, empty], 4.0, settings)
    assert (found["requests"], found["errors"], found["good"], found["good_share"]) == (5, 1, 2, 0.4)
    assert (found["requests_per_second"], found["goodput"]) == (1.0, 0.5)
    assert (found["tokens"], found["tokens_per_second"], found["prompt_tokens"]) == (14, 3.5, 7)
    assert found["gap"]["p50"] == 1.5 and found["whole"]["p99"] == pytest.approx(4.0)
    # Of what comes after nobody is left to come only what was there by then counts.
    early = row("s", "concurrency", 2, [quick, slow], 2.0, settings)
    assert early["tokens_per_second"] == pytest.approx((5 * 2 / 3 + 4 / 2) / 2, abs=0.01)
    assert row("s", "rate", 1, [broken], 1.0, settings)["first_token"] is None


def test_a_measurement_of_a_real_server(tmp_path: Path) -> None:
    with serving(tiny_lm()) as (_, url):
        result = LoadJob(EASY, [Target("tiny", url)], {"name": "tiny"}, tmp_path).run(quiet)
    assert result["complete"] and result == require_load(read(tmp_path))
    assert [(each["mode"], each["load"]) for each in result["rows"]] == [
        ("concurrency", 1),
        ("concurrency", 2),
        ("rate", 50),
    ]
    assert len(result["requests"]) == 9 and not any(each["error"] for each in result["requests"])
    for found in result["rows"]:
        assert found["good_share"] == 1.0 and 3 <= found["tokens"] <= 12 and found["prompt_tokens"] > 0
    assert table(result).count("\n| tiny |") == 3
    assert '"kind": "load"' in page(result) and "loadPage" in page(result)


def test_rates_rise_until_the_service_breaks() -> None:
    with serving(tiny_lm()) as (_, url):
        impossible = replace(EASY, prompts=1, rates=(), concurrency=(), first_token_limit=1e-9)
        result = LoadJob(impossible, [Target("tiny", url)], {"name": "tiny"}).run(quiet)
    assert [(each["load"], each["good_share"]) for each in result["rows"]] == [(0.5, 0.0)]


def test_an_interrupted_measurement_goes_on(tmp_path: Path) -> None:
    with serving(tiny_lm()) as (_, url):
        targets = [Target("one", url), Target("two", url)]
        done: list[str] = []

        def report(what: str, count: int, total: int) -> None:
            done.append(what)

        first = LoadJob(EASY, targets, {"name": "tiny"}, tmp_path).run(report, lambda: "two: concurrency 2" in done)
        assert not first["complete"] and first == read(tmp_path)
        stages = [(each["server"], each["mode"], each["load"]) for each in first["rows"]]
        assert stages[:4] == [(name, mode, load) for name, mode, load in stages if name == "one"] + [
            ("two", "concurrency", 1)
        ]
        whole = LoadJob(EASY, targets, {"name": "tiny"}, tmp_path, first).run(quiet)
        assert whole["complete"] and len(whole["rows"]) == 6 and whole["rows"][: len(first["rows"])] == first["rows"]
        assert {(each["server"], each["mode"], each["load"]) for each in whole["rows"]} == {
            (name, *each) for name in ("one", "two") for each in [("concurrency", 1), ("concurrency", 2), ("rate", 50)]
        }


@contextmanager
def scripted(answer: bytes, status: int = 200) -> Iterator[str]:
    """A server that says this, whatever it is asked."""

    class Says(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, b'{"data": [{"id": "m"}]}')

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self._send(status, answer)

        def _send(self, code: int, body: bytes) -> None:
            self.send_response(code)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Says)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


PIECE = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'


@pytest.mark.parametrize(
    ("answer", "status", "error"),
    [
        pytest.param(PIECE + PIECE + b"data: [DONE]\n\n", 200, "", id="whole"),
        pytest.param(PIECE, 200, "before it was over", id="cut"),
        pytest.param(b"data: [1]\n\n", 200, "no object", id="no object"),
        pytest.param(b"data: {\n\n", 200, "JSONDecodeError", id="no JSON"),
        pytest.param(PIECE + b'data: {"error": {"message": "x"}}\n\n', 200, "x", id="error"),
        pytest.param(b"too much", 429, "status 429: too much", id="refused"),
    ],
)
def test_answers_that_are_not_whole_are_errors(answer: bytes, status: int, error: str) -> None:
    with scripted(answer, status) as url:
        seen, busy = asyncio.run(stage(url, arrivals(EASY, None, 0), EASY, clients=2))
        both, whole = asyncio.run(stage(url, arrivals(EASY, None, 0)[:2], EASY, clients=2))
    assert len(seen) == 3
    # The third comes when one of two is over; of two for two nobody is left to come from the beginning on.
    assert busy == max(each.at for each in seen) >= min(each.end for each in seen)
    assert whole == max(each.end for each in both)
    for each in seen:
        assert error in each.error and bool(each.error) == bool(error)
        # A server that counts no tokens writes one per piece.
        assert each.good(EASY) != bool(error) and (error or each.tokens == 2)


def test_what_is_no_server_is_said(tmp_path: Path) -> None:
    nobody = Target("nobody", command=(sys.executable, "-c", "print('on purpose')"))
    with pytest.raises(DecoderyError, match="nobody did not start: on purpose"), nobody.open():
        pass
    with pytest.raises(DecoderyError, match="cannot start none"), Target("none", command=("/nowhere",)).open():
        pass
    with pytest.raises(DecoderyError, match="no server with a model"):
        LoadJob(EASY, [Target("closed", "http://127.0.0.1:9")], {"name": "m"}).run(quiet)
    with serving(tiny_lm()) as (_, url):
        result = LoadJob(EASY, [nobody, Target("tiny", url)], {"name": "m"}, tmp_path).run(quiet)
    assert result["complete"] and len(result["rows"]) == 3 and "nobody was left out" in result["notes"][0]


@pytest.mark.parametrize(
    "wrong", [{"prompts": 0}, {"rates": (0.0,)}, {"rates": (float("nan"),)}, {"gap_limit": -1}, {"workload": "x"}]
)
def test_settings_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        LoadSettings(**wrong)


def test_the_command_measures_and_names_what_is_wrong(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from decodery.cli.main import main

    def left(*arguments: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main(["bench", *arguments])
        return int(ended.value.code or 0)

    with serving(tiny_lm()) as (_, url):
        few = ["--prompts", "2", "--max-new-tokens", "3", "--concurrency", "2", "--rates", "40"]
        assert left("--serve", f"{url}/v1", *few, "--out", str(tmp_path), "--json") == 0
    assert len(json.loads(capfd.readouterr().out)["rows"]) == 2
    assert (tmp_path / "report.html").exists()
    assert left("--serve", url, "--resume", "--out", str(tmp_path)) == 1
    assert "is complete" in capfd.readouterr().err
    result = read(tmp_path)
    (tmp_path / "results.json").write_text(json.dumps({**result, "complete": False}))
    for other in (["--serve"], ["--serve", url, "--prompts", "9"]):
        assert left(*other, "--resume", "--out", str(tmp_path)) == 1
        assert "has other settings" in capfd.readouterr().err
    assert left("--rates", "1") == 2 and left("--serve", url, "--rounds", "2") == 2
    assert left("--from", str(tmp_path)) == 1
    assert "not 'benchmark'" in capfd.readouterr().err
