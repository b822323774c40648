"""The command as a user meets it: inside the test's process, and in real ones where that is what is tested."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from statistics import geometric_mean
from unittest import mock

import pytest

import decodery
from commands import COMMAND, ENVIRONMENT, PROMPT, inside, run
from decodery.cli.main import COMMANDS
from decodery.core.trace import Trace
from decodery.llm.llm import LLM
from serving import serving, tiny_lm


def failure(*arguments: str, text: str = "", status: int = 1, terminal: bool = False) -> str:
    """What a command that must fail says on standard error: for status 1, one sentence."""
    code, output, errors = inside(*arguments, text=text, terminal=terminal)
    assert (code, output) == (status, ""), errors
    if status == 1:
        assert errors.startswith("decodery: ") and errors.count("\n") == 1, errors
    return errors


def test_help_and_methods_do_not_import_torch() -> None:
    calls = [["--help"], ["methods"], ["methods", "--json"], ["methods", "--family", "drafter"]]
    calls += [[command, "--help"] for command in COMMANDS]
    program = f"""
import sys
from decodery.cli.main import main
for arguments in {calls!r}:
    try:
        main(arguments)
    except SystemExit as left:
        assert left.code == 0 and "torch" not in sys.modules, arguments
    print("---")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    shown, listed, described, _, *helps, rest = done.stdout.split("---\n")
    for name in COMMANDS:
        assert re.search(rf"^  {name} +\w", shown, re.MULTILINE)
    assert re.search(r"^  ready .*\bprompt-lookup\*", listed.replace(",\n          ", ", "), re.MULTILINE)
    assert {"prompt-lookup", "coupled"} < {method["name"] for method in json.loads(described)}
    assert all(text.startswith("Usage: decodery") for text in helps) and rest == ""


def test_a_process_ends_at_once_and_loses_nothing() -> None:
    program = """
import atexit, sys
from decodery.cli import main
class Late:
    def __del__(self): print("taken apart")
sys.late = Late()
sys.argv = ["decodery", *{arguments!r}]
command = main.main
main.main = lambda: (atexit.register(lambda: print("registered")), command())
main.process()
"""
    for arguments, status, shown in ((["--version"], 0, f"decodery {decodery.__version__}\n"), (["nothing"], 2, "")):
        command = [sys.executable, "-c", program.replace("{arguments!r}", repr(arguments))]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (status, f"{shown}registered\n"), done.stderr


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"decodery {decodery.__version__}\n", "")


def test_generate_json_is_one_object_that_python_gives_too_and_a_warm_start_imports_no_transformers(
    model: Path, smollm2_int8: LLM
) -> None:
    settings = ("--dtype", "int8", "--max-new-tokens", "24", "--temperature", "0.8", "--seed", "5")
    command = [sys.executable, "-X", "importtime", *COMMAND[1:], "generate", PROMPT, *settings, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    expected = smollm2_int8.generate(PROMPT, max_new_tokens=24, temperature=0.8, seed=5)
    assert (got["text"], got["tokens"], got["seed"]) == (expected.text, expected.tokens, 5)
    assert got["finish_reason"] in ("stop", "length")
    assert got["trace"].keys() >= {"passes", "rows", "tokens_per_pass", "tokens_per_second", "seconds"}
    assert all(line.startswith("import time:") for line in done.stderr.splitlines())
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "torch" in imported
    assert not imported & {"transformers", "huggingface_hub", "rich", "scipy", "pandas"}


@pytest.mark.usefixtures("loaded")
def test_the_prompt_comes_from_standard_input_too_and_the_drafter_leaves_no_trace() -> None:
    settings = ("--max-new-tokens", "20", "--temperature", "0.9", "--top-p", "0.95")
    code, argument, errors = inside("generate", *settings, "--drafter", "prompt-lookup:length=4", text=PROMPT)
    assert (code, errors) == (0, "") and argument.endswith("\n") and len(argument) > 20
    assert inside("generate", "-", *settings, "--drafter", "none", text=PROMPT + "\n") == (0, argument, "")
    assert inside("generate", *settings, text=PROMPT) == (0, argument, "")


@pytest.mark.usefixtures("loaded")
def test_several_texts() -> None:
    settings = ("--max-new-tokens", "12", "--temperature", "1", "--seed", "3", "--n", "2")
    code, output, errors = inside("generate", PROMPT, *settings, "--json", "--logprobs", "2")
    assert (code, errors) == (0, "")
    objects = json.loads(output)
    assert [one["seed"] for one in objects] == [3, 4]
    assert objects[0]["tokens"] != objects[1]["tokens"]
    assert all(len(one["logprobs"]) == len(one["tokens"]) for one in objects)
    _, text, _ = inside("generate", PROMPT, *settings)
    assert text == f"--- seed 3\n{objects[0]['text']}\n\n--- seed 4\n{objects[1]['text']}\n"


@pytest.mark.usefixtures("loaded")
def test_plain_text_stop_strings_and_a_sampler_by_name() -> None:
    arguments = ("--no-chat-template", "--stop", "\n", "--sampler", "temperature:t=0", "--max-new-tokens", "30")
    code, text, errors = inside("generate", "The days of the week are Monday, Tuesday,", *arguments)
    assert (code, errors) == (0, "")
    assert text.startswith(" Wednesday, Thursday") and text.count("\n") == 1


def test_an_error_is_one_sentence_and_exit_status_1() -> None:
    done = run("methods", "promt-lookup")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(
        "decodery: no method is called 'promt-lookup': did you mean prompt-lookup or predicted-output?"
    )


def test_bad_usage() -> None:
    assert "no command is called 'generat': did you mean generate?" in failure("generat", status=2)
    assert "--logprobs needs --json" in failure("generate", PROMPT, "--logprobs", "2", status=2)
    assert "'x' is not ID=VALUE" in failure("generate", PROMPT, "--logit-bias", "x", status=2)
    assert "a prompt is missing" in failure("generate", terminal=True, status=2)


def test_settings_that_change_nothing_are_warned_of_alike_in_python_and_here(model: Path, smollm2_int8: LLM) -> None:
    said = "top_p changes nothing at temperature 0"
    assert said in run("generate", PROMPT, "--top-p", "0.5", "--max-new-tokens", "2").stderr
    with pytest.warns(UserWarning, match=said):
        smollm2_int8.generate(PROMPT, top_p=0.5, max_new_tokens=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = smollm2_int8.generate(PROMPT, top_p=0.5, temperature=0.7, max_new_tokens=2)
    assert len(repr(out)) < 400 and "finish_reason='length'" in repr(out)


def test_bad_settings_fail_before_a_model_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decodery, "load", None)
    assert "try prompt-lookup" in failure("generate", PROMPT, "--drafter", "promptlookup")
    assert "its settings are" in failure("generate", PROMPT, "--drafter", "prompt-lookup:lenght=3")
    assert "draft-model: dtype=int5 is not auto, float32, bfloat16, float16, int8 or int4" in failure(
        "generate", PROMPT, "--drafter", "draft-model:model=none.gguf,dtype=int5"
    )
    assert "sampler" in failure("generate", PROMPT, "--sampler", "top-k:k=5", "--temperature", "1")
    assert "top_p" in failure("generate", PROMPT, "--temperature", "1", "--top-p", "1.5").replace("-", "_")
    assert "coupled" in failure("chat", "--acceptance-rule", "couple")
    assert "density-ratio is a continuous-acceptance method" in failure(
        "generate", PROMPT, "--acceptance-rule", "density-ratio"
    )
    assert "the acceptance rule cntp needs a temperature above 0" in failure(
        "generate", PROMPT, "--acceptance-rule", "cntp:most=3"
    )
    assert "transfer-q needs reward, as in transfer-q:reward=..." in failure(
        "generate", PROMPT, "--logits-source", "transfer-q"
    )
    assert "which no text can give" in failure("generate", PROMPT, "--constrain", "checker")


def test_bad_prompts(model: Path) -> None:
    assert "the prompt is empty" in failure("generate", "")
    assert "the prompt is empty" in failure("generate", "--no-chat-template", text="\n")
    assert "the model's context 8192" in failure("generate", text="tide " * 9000)


def test_bad_models(model: Path, tmp_path: Path) -> None:
    assert "no-such-model" in failure("generate", PROMPT, "--model", "no-such-model")
    assert "there is no file" in failure("generate", PROMPT, "--model", str(tmp_path / "no-such-file.gguf"))
    content = model.read_bytes()
    parts = {"short": content[:1_000_000], "header": content[:100], "noise": b"GGUF" + b"\xff" * 400, "empty": b""}
    for name, part in parts.items():
        broken = tmp_path / f"{name}.gguf"
        broken.write_bytes(part)
        assert f"{name}.gguf" in failure("generate", PROMPT, "--model", str(broken))
    assert "neither an embedded model" in failure("pull", "smollm")


def test_pull_from_a_file_and_what_a_bad_file_leaves(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(model.read_bytes()[:-1])
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("DECODERY_HOME", str(tmp_path / "cache"))
        assert "checksum" in failure("pull", "smollm2", "--from", str(broken))
        assert not list((tmp_path / "cache").rglob("*.gguf"))
        code, output, _ = inside("pull", "smollm2", "--from", str(model))
        assert code == 0 and output.startswith("smollm2 is ready: " + str(tmp_path / "cache"))
    assert inside("pull", "smollm2") == (0, f"smollm2 is ready: {model}\n", "")


def test_a_reader_that_goes_away_is_no_error(model: Path) -> None:
    command = [*COMMAND, "generate", PROMPT, "--ignore-eos", "--max-new-tokens", "2000"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 141


def test_a_hidden_message_is_read_back_through_pipes(loaded: LLM) -> None:
    settings = ("--search", "coupling:key=a")
    code, carrying, errors = inside(
        "stego", "encode", "-", "--message", "at noon", *settings, text="Tell me about rivers.\n"
    )
    assert (code, errors) == (0, "") and carrying == inside(
        *("stego", "encode"), "Tell me about rivers.", "--message", "at noon", *settings
    )[1]
    question = ("stego", "decode", "Tell me about rivers.", "--length", "7")
    assert inside(*question, *settings, text=carrying)[1] == "at noon\n"
    found = json.loads(inside(*question, *settings, "--json", text=carrying)[1])
    assert found["message"] == "at noon" and bytes.fromhex(found["hex"]) == b"at noon" and found["certainty"] > 0.999
    assert inside(*question, "--search", "coupling:key=b", text=carrying)[1] != "at noon\n"
    assert "could not have been written like this" in failure(*question, *settings, text="Some other text.")
    assert "there is no text" in failure(*question, *settings, text="")
    assert "% certain: the text" in inside(*question, *settings, text=carrying[: len(carrying) // 2])[2]
    for command in (("encode", "Hi", "--message", "a"), ("decode", "Hi", "--length", "1")):
        assert "beam carries no message" in failure("stego", *command, "--search", "beam", text="Hi")


def test_a_context_that_is_full_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = tiny_lm(max_positions=32)
    monkeypatch.setattr(decodery, "load", lambda *name, **settings: lm)
    asked = ("generate", "tides", "--no-chat-template", "--ignore-eos", "--drafter", "none", "--max-new-tokens")
    code, _, errors = inside(*asked, "99")
    assert code == 0 and errors.count("\n") == 1
    assert "the text was cut at the end of the model's context of 32 tokens" in errors
    assert "2 of 2 texts were cut" in inside(*asked, "99", "--n", "2")[2]
    assert "2 of 2 texts were cut" in inside(*asked, "99", "--n", "2", "--search", "beam:width=2")[2]
    assert inside(*asked, "9")[2] == ""
    told = json.loads(inside(*asked, "99", "--json")[1])
    assert told["context_full"] and told["finish_reason"] == "length"
    assert "context_full" not in json.loads(inside(*asked, "9", "--json")[1])
    on = json.loads(inside(*asked, "99", "--json", "--cache-policy", "streaming-llm:budget=16")[1])
    assert "context_full" not in on and len(on["tokens"]) == 99


def test_fewer_texts_than_asked_for_are_said(loaded: LLM) -> None:
    code, output, errors = inside(
        "generate", PROMPT, "--max-new-tokens", "4", "--search", "beam:width=2", "--n", "3", "--drafter", "none"
    )
    assert code == 0 and output.count("--- score") == 2 and "found 2 of 3 texts" in errors
    assert "given twice" in failure("stego", "encode", "Hi", "--message", "a", "--search", "coupling:message=b")
    page = inside("methods", "transfer-q")[1]
    assert "reward: Scorer | str" in page and "use: " in page
    assert "whole: " in (page := inside("methods", "text")[1]) and "use:" not in page


def test_a_program_that_fails_its_tests_is_said(loaded: LLM, tmp_path: Path) -> None:
    tests = tmp_path / "tests.py"
    search = (
        "--no-chat-template",
        "--max-new-tokens",
        "3",
        "--drafter",
        "none",
        "--stop",
        "\n",
        "--search",
        f"pg-td:tests=program-tests(file={tests}),budget=2",
    )
    for checks, status in (("assert False\nassert True\n", 1), ("assert True\n", 0)):
        tests.write_text(checks)
        for shape in ((), ("--json",)):
            code, output, errors = inside("generate", "x =", *search, *shape)
            assert code == status and output.strip()
            assert ("decodery: no program passes all tests, the best one scores 0.5 of 1" in errors) == bool(status)


def test_a_warning_is_a_line(loaded: LLM) -> None:
    settings = ("--temperature", "0.5", "--mirostat", "2", "--mirostat-tau", "30", "--mirostat-eta", "1")
    code, output, errors = inside("generate", PROMPT, "--max-new-tokens", "8", "--drafter", "none", *settings)
    assert code == 0 and output and re.fullmatch(r"decodery: mirostat cannot reach 30 bits .*\n", errors)


def test_a_value_head_from_judged_texts_steers(loaded: LLM, tmp_path: Path) -> None:
    texts, head = tmp_path / "texts.jsonl", tmp_path / "head.safetensors"
    pairs = [("The sea is blue and wide.", 1), ("Red red red red red.", -1)]
    texts.write_text("\n".join(json.dumps({"prompt": PROMPT, "text": text, "reward": r}) for text, r in pairs))
    code, output, errors = inside("train", "value", str(texts), "--out", str(head))
    assert (code, errors) == (
        0,
        "",
    ) and f'--logits-source "controlled-decoding:value=value-head(head={head})"' in output
    asked = ("generate", PROMPT, "--max-new-tokens", "6", "--drafter", "none")
    steered = inside(*asked, "--logits-source", f"controlled-decoding:value=value-head(head={head}),strength=50")
    assert steered[0] == 0 and steered[1] != inside(*asked)[1]
    texts.write_text("{}")
    assert "line 1 of" in failure("train", "value", str(texts), "--out", str(head))


def test_a_switch_tells_by_the_prompt_who_answers(loaded: LLM, tmp_path: Path) -> None:
    texts, switch = tmp_path / "texts.jsonl", tmp_path / "switch.safetensors"
    asked = [("What is blue?", 1), ("Count all the stars.", 0), ("What is red?", 1), ("Count the grains.", 0)]
    texts.write_text("\n".join(json.dumps({"prompt": each, "text": "It is.", "reward": r}) for each, r in asked))
    code, output, errors = inside("train", "value", str(texts), "--switch", "--out", str(switch))
    assert (code, errors) == (0, "") and f"edge:switch={switch},adapter=DIR" in output
    search = f"edge:switch={switch},n=2,most=none,scorer=log-probability,choose=best"
    settings = ("--max-new-tokens", "4", "--temperature", "1", "--json", "--search", search)
    reasoned = [json.loads(inside("generate", prompt, *settings)[1]) for prompt, _ in asked]
    assert [each["trace"]["ledger"]["counts"].get("reasoned", 0) for each in reasoned] == [0, 1, 0, 1]
    assert "--restart and --switch exclude" in failure(
        "train", "value", str(texts), "--switch", "--restart", "--out", str(switch), status=2
    )


def test_methods() -> None:
    listed = json.loads(inside("methods", "--json")[1])
    keys = {"name", "family", "paper", "year", "guarantee", "lossless", "requirements", "provides", "slower"}
    keys |= {"ready", "summary"}
    assert all(method.keys() == keys for method in listed)
    assert {"prompt-lookup", "coupled", "top-p"} <= {method["name"] for method in listed}
    (one,) = json.loads(inside("methods", "prompt-lookup", "--json")[1])
    length = {"name": "length", "type": "int", "default": 10, "description": "Tokens copied."}
    assert length in one["settings"]
    page = inside("methods", "prompt-lookup")[1]
    assert "Prompt Lookup Decoding (2023)" in page and "max_ngram: int = 3\n      Longest suffix" in page
    assert re.search(
        r"^  top-p +ready +2019 +Keeps .*$", inside("methods", "--family", "logits-processor")[1], re.MULTILINE
    )
    overview = inside("methods")[1]
    assert max(map(len, overview.splitlines())) <= 80 and "\nmonitor: watch a text" in overview
    assert "eagle-3*" in overview and overview.index("needs   ", 400) < overview.index("eagle-3*")
    assert "it is a family" in failure("methods", "drafter") and "try drafter" in failure(
        "methods", "--family", "drafte"
    )
    assert "exclude each other" in failure("methods", "auto", "--family", "drafter", status=2)


def test_info(model: Path) -> None:
    facts = json.loads(inside("info", "--json")[1])
    assert facts["decodery"] == decodery.__version__
    assert facts["threads"] >= 1 and facts["kernels"] and facts["processor"]
    assert any(name.startswith("smollm2") for name in facts["models"])
    assert str(model).startswith(facts["cache"]) and "drafts" not in facts
    able = json.loads(inside("info", "--json", "-m", str(model))[1])
    assert (able["runs"], able["keeps"], able["drafts"]) == ("natively", "keys and values", "trees")
    assert "logits" in able["hook points"] and "layer_plans" in able["can"]


@pytest.mark.usefixtures("loaded")
def test_the_demos_speed_up_is_never_above_its_tokens_per_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    # By a clock on which every pass takes a second: what is faster than that has seen the text before.
    monkeypatch.setattr(Trace, "decode_seconds", property(lambda trace: float(trace.passes)))
    monkeypatch.setattr("decodery.cli.demo.NEW_TOKENS", 20)
    monkeypatch.setattr("decodery.cli.demo.ROUNDS", 1)
    code, output, errors = inside("demo")
    assert (code, errors) == (0, "")
    speed = r"\d+ tokens/s: (\d+\.\d\d) x plain decoding \(1 tokens/s\)"
    found = re.findall(rf"^20 tokens, (\d\.\d\d) tokens per pass, {speed}, the same text$", output, re.MULTILINE)
    assert len(found) == 3 and all(1 <= float(factor) <= float(per_pass) for per_pass, factor in found)
    last = output.splitlines()[-1]
    assert (said := re.fullmatch(r"geometric mean of 3: (\d\.\d\d) x plain decoding, with an empty memory", last))
    assert float(said[1]) == pytest.approx(geometric_mean(float(factor) for _, factor in found), abs=0.02)


def test_the_demo_runs_on_any_model_that_runs_here() -> None:
    # Bytes, no chat template, noise for a text.
    tiny = tiny_lm(template=None)
    with mock.patch("decodery.load", return_value=tiny) as load, mock.patch("decodery.cli.demo.NEW_TOKENS", 9):
        code, output, errors = inside("demo", "-m", "folder", "--dtype", "float32")
    assert (code, errors) == (0, "") and output.count("the same text") == 3 and "NOT" not in output
    load.assert_called_once_with("folder", dtype="float32")
    with serving(tiny_lm()) as (_, address):
        assert f"{address} is a server" in failure("demo", "-m", address)
