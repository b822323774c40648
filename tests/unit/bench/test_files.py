"""What a benchmark leaves after: files, pages, tables, and the command that makes them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from decodery.bench import result, rows
from decodery.bench.report import page, table
from decodery.cli.main import cli
from decodery.core.errors import CorruptFile
from decodery.llm.llm import LLM
from tiny_bench import SETTINGS, row


def test_files_are_read_back(measured: result.Result, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(result.dump(measured), encoding="utf-8")
    assert result.read(tmp_path) == json.loads(json.dumps(measured))
    again = [record.to_dict() for record in result.records_of(result.read(path))]
    assert again == json.loads(json.dumps(measured["generations"]))
    assert rows.make_rows(result.records_of(measured), SETTINGS, {}) == measured["rows"]


def test_the_page_needs_nothing_else(measured: result.Result) -> None:
    hostile = {**measured, "notes": ["</script><script>alert(1)</script>", "{{style}}"]}
    text = page(hostile)
    start = text.index('<script type="application/json" id="data">') + len('<script type="application/json" id="data">')
    data = json.loads(text[start : text.index("</script>", start)])
    assert data["rows"] == json.loads(json.dumps(measured["rows"])) and data["notes"] == hostile["notes"]
    assert not any(
        word in text.replace("http://www.w3.org/2000/svg", "") for word in ("http:", "https:", " src=", "@import")
    )
    assert "alert(1)</script>" not in text and "prefers-color-scheme: dark" in text
    assert all("outputs" not in each for each in data["generations"])


def test_markdown_comes_from_the_rows(measured: result.Result) -> None:
    heading, _, *lines = table(measured, categories=True).splitlines()
    prompts = row(measured, "none")["prompts"]
    assert heading == f"built-in, qualitative, {prompts} prompts, temperature 0, at most 24 tokens, 2 rounds:"
    drafted = row(measured, "prompt-lookup")
    assert f"| {drafted['tokens_per_pass']:.2f} |" in lines[3] and f"{drafted['speedup']:.2f} (" in lines[3]
    assert all(line.count("|") == lines[0].count("|") for line in lines[: 2 + len(SETTINGS.methods)])


def test_comparing_two_files(measured: result.Result) -> None:
    measured, slower = (json.loads(json.dumps(measured)) for _ in range(2))
    for each in slower["rows"]:
        if each["method"] != "none":
            for name in ("speedup", "speedup_low", "speedup_high"):
                each[name] /= 100
    slower["settings"]["rounds"] = 9
    slower["rows"].pop()
    compared = result.compare(measured, slower)
    assert compared["differences"] == {"settings.rounds": [2, 9]}
    (drafted,) = [each for each in compared["rows"] if (each["method"], each["category"]) == ("prompt-lookup", "all")]
    assert drafted["ratio"] == pytest.approx(0.01, abs=1e-4) and drafted["apart"]
    same = result.compare(measured, measured)
    assert all(each["ratio"] == 1.0 and not each["apart"] for each in same["rows"])
    for each in measured["rows"]:
        each["prompts"] = 4
    assert all(each["apart"] is None for each in result.compare(measured, slower)["rows"]), "too few for a verdict"
    assert compared["rows"][-1]["second"] is None


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"kind": "benchmark"}', '{"kind": "benchmark", "rows": {}}'])
def test_strange_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(CorruptFile):
        result.read(tmp_path)


@pytest.mark.integration
def test_the_command_on_the_real_model(smollm2_int8: LLM, tmp_path: Path) -> None:
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(cli, ["bench", *arguments])

    out = str(tmp_path / "out")
    wanted = ["--prompts", "2", "--max-new-tokens", "8", "--rounds", "1", "--methods", "prompt-lookup"]
    first = run(*wanted, "--out", out, "--json")
    assert first.exit_code == 0, first.output
    printed = json.loads(first.stdout)
    kept = result.read(Path(out))
    assert printed["rows"] == kept["rows"] and "generations" not in printed
    drafted = row(kept, "prompt-lookup", workload="built-in")
    assert drafted["lossless"]["identical"] == drafted["lossless"]["checked"] == drafted["prompts"]
    assert 0 < drafted["new_tokens"] <= 7 * drafted["prompts"]
    assert row(kept, "none")["new_tokens"] == drafted["new_tokens"]
    assert (Path(out) / "report.html").read_text().startswith("<!doctype html>")

    compared = run("--compare", out, out)
    assert compared.exit_code == 0 and "prompt-lookup" in compared.output and "overlap" not in compared.output
    repeated = run("--from", out, "--methods", "none", "--max-new-tokens", "4", "--json")
    assert json.loads(repeated.stdout)["settings"] == kept["settings"] | {"methods": ["none"], "max_new_tokens": 4}
    refused = run("--resume", "--out", out)
    assert "is complete: repeat it with --from" in str(refused.exception)


@pytest.mark.integration
def test_methods_of_other_modules_are_recorded_and_never_imported_because_a_file_says_so(
    smollm2_int8: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "told.py").write_text("from pathlib import Path\n\nPath('ran').touch()\n")

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(cli, ["bench", *arguments])

    wanted = ["--prompts", "1", "--max-new-tokens", "4", "--rounds", "1", "--methods", "none", "--import", "told.py"]
    first = run(*wanted, "--out", "out", "--json")
    assert first.exit_code == 0 and json.loads(first.stdout)["settings"]["imports"] == ["told.py"]
    (tmp_path / "ran").unlink()
    sys.modules.pop("told")
    refused = run("--from", "out", "--json")
    assert "add --import told.py, which runs their code" in str(refused.exception)
    assert not (tmp_path / "ran").exists()
    again = run("--from", "out", "--json", "--import", "told.py")
    assert again.exit_code == 0 and (tmp_path / "ran").exists()
    assert json.loads(again.stdout)["settings"] == result.read(Path("out"))["settings"]
    sys.modules.pop("told")
