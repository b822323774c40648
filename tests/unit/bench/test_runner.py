"""The benchmark on tiny models: what it counts, compares and keeps."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decodery.bench import result, rows
from decodery.bench.lossless import EPSILON, compare, gap
from decodery.bench.metrics import histogram
from decodery.bench.report import table
from decodery.bench.runner import Bench
from decodery.bench.structured import is_valid
from decodery.bench.subject import Own, Run, check_methods, own_subjects
from decodery.bench.timeline import record_timeline
from decodery.bench.units import Case, Conversation
from decodery.bench.workloads import Question
from decodery.core.errors import SettingsError, UnknownMethod
from decodery.core.noise import gumbel
from decodery.core.registry import register
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.llm.llm import LLM
from decodery.models.batch import Batch, Segment
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.step.sequence import Sequence
from tiny_bench import SETTINGS, make_lm, measure, row

FIELDS = {
    "method", "workload", "category", "split", "temperature", "prompts", "new_tokens", "passes", "tokens_per_pass",
    "rows_per_token", "tokens_per_second", "speedup", "speedup_low", "speedup_high", "share", "lossless",
}  # fmt: skip


@pytest.fixture(scope="module")
def lm() -> LLM:
    return make_lm()


def test_rows_have_their_fields(measured: result.Result) -> None:
    assert set(measured) >= {"machine", "model", "settings", "rows", "generations"}
    assert measured["complete"] and measured["machine"]["threads"] >= 1
    for each in measured["rows"]:
        assert set(each) >= FIELDS
        assert set(each["share"]) == {"propose", "score", "choose", "commit"}
        assert set(each["lossless"]) == {"checked", "identical", "excused"}
        assert sum(each["share"].values()) == pytest.approx(1, abs=1e-3)


def test_plain_decoding_is_one_token_per_pass_and_its_own_measure(measured: result.Result) -> None:
    plain = row(measured, "none")
    assert (plain["tokens_per_pass"], plain["rows_per_token"]) == (1.0, 1.0)
    assert (plain["speedup"], plain["speedup_low"], plain["speedup_high"]) == (1.0, 1.0, 1.0)
    assert plain["acceptance"] == [] and plain["tokens_per_pass_macro"] == 1.0


def test_metric_identities(measured: result.Result) -> None:
    drafted = row(measured, "prompt-lookup")
    assert drafted["tokens_per_pass"] > 1 < drafted["rows_per_token"] and drafted["acceptance"]
    for each in measured["rows"]:
        rates = each["acceptance"]
        expected = 1 + sum(math.prod(rates[:depth]) for depth in range(1, len(rates) + 1))
        assert each["tokens_per_pass"] == pytest.approx(each["new_tokens"] / each["passes"], abs=1e-4)
        assert each["tokens_per_pass"] == pytest.approx(expected, abs=2e-3)
        assert each["speedup_low"] <= each["speedup"] <= each["speedup_high"]
        assert sum(each["emitted"].values()) == SETTINGS.rounds * each["passes"]


def test_all_sums_the_categories(measured: result.Result) -> None:
    for method in SETTINGS.methods:
        whole = row(measured, method)
        parts = [each for each in measured["rows"] if each["method"] == method and each["category"] != "all"]
        for name in ("prompts", "new_tokens", "passes"):
            assert whole[name] == sum(part[name] for part in parts)
        for name in ("checked", "identical", "excused"):
            assert whole["lossless"][name] == sum(part["lossless"][name] for part in parts)


def test_every_output_is_compared(measured: result.Result) -> None:
    prompts = row(measured, "none")["prompts"]
    assert row(measured, "none")["lossless"] == {"checked": prompts, "identical": prompts, "excused": 0}
    for method in SETTINGS.methods[1:]:
        expected = {"checked": 2 * prompts, "identical": 2 * prompts, "excused": 0}
        assert row(measured, method)["lossless"] == expected


def test_the_first_token_comes_from_prefill(measured: result.Result) -> None:
    plain = [each for each in measured["generations"] if each["method"] == "none"]
    assert all(each["new_tokens"][0] == len(each["outputs"][0]) - 1 for each in plain)


class Lossy(Own):
    """Changes a token of every answer, as a broken rule might."""

    def decode(self, prompts: list[list[int]], **options: Any) -> Run:
        run = super().decode(prompts, **options)
        run.outputs = [[*output[:5], (output[5] + 1) % 256, *output[6:]] for output in run.outputs]
        return run


def conversations(lm: LLM) -> list[Conversation]:
    texts = {"copy": ("Say hello hello hello.", "Once more."), "list": ("One two one two one",)}
    return [Conversation(Question(name, "mine", name, turns), lm, 500) for name, turns in texts.items()]


def test_a_method_that_changes_the_text_is_flagged(lm: LLM) -> None:
    settings = dataclasses.replace(SETTINGS, methods=("none",), rounds=2)
    bench = Bench(lm, settings, [Own(lm, "none", 0.0), Lossy(lm, "prompt-lookup", 0.0)], [*conversations(lm)])
    assert bench.run()
    (flagged,) = [
        each for each in rows.make_rows(bench.ordered(), settings, {})
        if (each["method"], each["category"]) == ("prompt-lookup", "all")
    ]  # fmt: skip
    assert flagged["lossless"] == {"checked": 6, "identical": 0, "excused": 0}
    record = next(each for each in bench.ordered() if each.method == "prompt-lookup")
    assert record.difference is not None and record.difference["position"] == 5
    assert record.outputs is not None


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_gap_is_the_distance_that_decided(lm: LLM, temperature: float) -> None:
    prompt = lm.encode("abcabc")
    (plain,) = Own(lm, "none", temperature).decode([prompt], max_new_tokens=12, seed=5).outputs
    at = 7
    logits = torch.from_numpy(lm_logits(lm, [*prompt, *plain[:at]])).double()
    scores = logits if temperature == 0 else logits / temperature + gumbel(5, at, torch.arange(len(logits)))
    assert int(scores.argmax()) == plain[at], "the noise of that position chooses the token"
    other = int(scores.topk(2).indices[1])
    changed = [*plain[:at], other, *plain[at + 1 :]]
    found = compare(lm, prompt, plain, changed, temperature=temperature, seed=5)
    assert found is not None and found.position == at
    assert found.gap == pytest.approx(float(scores[plain[at]] - scores[other]), abs=1e-4)
    assert not found.excused


def lm_logits(lm: LLM, tokens: list[int]) -> Any:
    cache = lm.model.new_cache()
    return lm.model.forward(Batch([Segment.chunk(tokens, cache)])).logits[-1].numpy()


def test_only_near_ties_are_excused(lm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = lm.encode("abcabc")
    (plain,) = Own(lm, "none", 0.0).decode([prompt], max_new_tokens=6, seed=0).outputs
    changed = [*plain[:-1], (plain[-1] + 1) % 256]
    distance = gap(lm, [*prompt, *plain[:-1]], len(prompt), (plain[-1], changed[-1]), temperature=0, seed=0)
    for epsilon, excused in ((distance * 0.99, False), (distance * 1.01, True)):
        monkeypatch.setitem(EPSILON, "float32", epsilon)
        found = compare(lm, prompt, plain, changed, temperature=0.0, seed=0)
        assert found is not None and found.excused is excused
    assert compare(lm, prompt, plain, plain, temperature=0.0, seed=0) is None
    shorter = compare(lm, prompt, plain, plain[:-1], temperature=0.0, seed=0)
    assert shorter is not None and (shorter.position, shorter.gap, shorter.excused) == (5, None, False)


def stopping_after(count: int) -> Callable[[], bool]:
    asked = 0

    def stopped() -> bool:
        nonlocal asked
        asked += 1
        return asked > count

    return stopped


@pytest.mark.integration
def test_an_interrupted_run_can_be_finished(lm: LLM, tmp_path: Path, measured: result.Result) -> None:
    out, home = tmp_path / "out", tmp_path / "home"
    partial = measure(lm, home, out=out, stopped=stopping_after(3 + 10))
    assert not partial["complete"]
    kept = result.read(out)
    assert kept["rows"] == partial["rows"]
    counts = {each["method"]: each["prompts"] for each in partial["rows"] if each["category"] == "all"}
    assert len(set(counts.values())) == 1 and 0 < counts["none"] < row(measured, "none")["prompts"]
    whole = measure(lm, home, out=out, earlier=kept)
    assert whole["complete"] and result.read(out)["complete"]
    counted = ("method", "category", "prompts", "new_tokens", "passes", "lossless", "emitted", "acceptance")
    assert [[each[name] for name in counted] for each in whole["rows"]] == [
        [each[name] for name in counted] for each in measured["rows"]
    ]
    done = {(each["method"], each["question"], each["turn"]): each["seconds"] for each in kept["generations"]}
    for each in whole["generations"]:
        before = done.get((each["method"], each["question"], each["turn"]), [])
        assert each["seconds"][: len(before)] == before, "what was measured is not measured again"


def test_a_run_stopped_at_once_leaves_a_valid_file(lm: LLM, tmp_path: Path) -> None:
    measure(lm, tmp_path / "home", out=tmp_path / "out", stopped=lambda: True)
    assert result.read(tmp_path / "out")["rows"] == []
    assert (tmp_path / "out" / "report.html").exists()


@dataclasses.dataclass(frozen=True)
class Remembering(PromptLookup):
    """Prompt lookup that counts the texts it has lived through."""

    def start(self, seq: Sequence) -> Any:
        self.lived(seq).append(seq.request.prompt_length)
        return super().start(seq)

    def lived(self, seq: Sequence) -> list[int]:
        return seq.request.memory.recall("process", seq, "lived", list)


def test_what_is_remembered_is_measured_hot_and_cold(lm: LLM, own_methods: None, tmp_path: Path) -> None:
    register("remembering")(Remembering)
    hot, cold = own_subjects(lm, "remembering", 0.0)
    assert [(each.name, each.store) for each in (hot, cold)] == [
        ("remembering", "hot"),
        ("remembering (cold)", "cold"),
    ]
    assert [each.store for each in own_subjects(lm, "prompt-lookup", 0.0)] == [""]
    anyone = Engine(lm.model).submit(Request([1]))
    for subject, expected in ((cold, 1), (hot, 3)):
        subject.new_round()
        for text in ("abab", "cdcd", "efef"):
            subject.decode([lm.encode(text)], max_new_tokens=4, seed=0)
        assert len(subject.memory.recall("process", anyone, "lived", list)) == expected
    hot.new_round()
    assert hot.memory.recall("process", anyone, "lived", list) == []
    assert lm.memory.recall("process", anyone, "lived", list) == [], "the user's own memory is left alone"
    found = measure(lm, tmp_path, dataclasses.replace(SETTINGS, methods=("none", "remembering"), rounds=1))
    assert row(found, "remembering")["store"] == "hot" and row(found, "remembering (cold)")["store"] == "cold"


def test_a_prompt_that_comes_again_is_not_drafted_from_its_own_answer(lm: LLM) -> None:
    prompts = [lm.encode(text) for text in ("the sea", "the sky")]
    hot = Own(lm, "suffix-tree", 0.0, "hot")

    def passes(count: int, concurrency: int) -> int:
        return hot.decode(prompts[:count], max_new_tokens=24, seed=0, concurrency=concurrency).passes

    # As the throughput split measures the same prompts at every concurrency.
    first = passes(1, 1)
    assert passes(1, 1) == first < 24
    memory = hot.memory
    hot.decode(prompts[1:], max_new_tokens=24, seed=0)
    assert hot.memory is memory, "another prompt may use what was learned from earlier ones"
    assert passes(2, 1) == passes(2, 1)


def test_several_prompts_at_once(lm: LLM) -> None:
    prompts = [lm.encode(f"{letter} says {letter} and then") for letter in "abcde"]
    singles = [Own(lm, "none", 0.7).decode([prompt], max_new_tokens=9, seed=3 + i) for i, prompt in enumerate(prompts)]
    for spec in ("none", "prompt-lookup"):
        run = Own(lm, spec, 0.7).decode(prompts, max_new_tokens=9, seed=3, concurrency=2)
        assert run.outputs == [single.outputs[0] for single in singles]
        assert run.passes % 2 == 0, "passes with fewer sequences than wanted do not count"
        assert run.new_tokens == sum(tokens * count for tokens, count in run.emitted.items())
        if spec == "none":
            assert run.new_tokens == run.passes == run.rows > 0


def test_throughput_rows(lm: LLM) -> None:
    tokens = [lm.encode(f"text number {number} of this case") for number in range(4)]
    units = [Case("built-in", tier, 26, at_once, tokens) for tier in ("low", "high") for at_once in (1, 4)]
    settings = dataclasses.replace(SETTINGS, splits=("throughput",), methods=("none", "prompt-lookup"))
    subjects = [*own_subjects(lm, "none", 0.0), *own_subjects(lm, "prompt-lookup", 0.0)]
    bench = Bench(lm, settings, subjects, [*units])
    assert bench.run()
    found = rows.make_rows(bench.ordered(), settings, {})
    categories = [each["category"] for each in found if each["method"] == "none"]
    assert categories == ["all", "26 tokens, 1 at once", "26 tokens, 4 at once"]
    plain, drafted = (each for each in found if each["category"] == "all")
    assert plain["split"] == "throughput" and plain["tokens_per_pass"] == 1.0 and plain["prompts"] == 4 * 4
    assert drafted["lossless"] == {"checked": 2 * 4 * 4, "identical": 2 * 4 * 4, "excused": 0}


def test_timelines_tell_the_text(lm: LLM, measured: result.Result) -> None:
    recorded = [each for each in measured["generations"] if "timeline" in each]
    assert len(recorded) == SETTINGS.timelines * len(SETTINGS.methods)
    prompt = lm.encode("hello hello hello")
    (tokens,) = Own(lm, "prompt-lookup", 0.0).decode([prompt], max_new_tokens=30, seed=0).outputs
    shown = record_timeline(lm, prompt, "prompt-lookup", max_new_tokens=30, temperature=0.0, seed=0)
    text = shown["first"]
    for each in shown["passes"]:
        text += "".join(each["tokens"][node - 1] for node in each["accepted"]) + each["bonus"]
        assert len(each["tokens"]) == len(each["parents"]) >= len(each["accepted"])
    assert text == "".join(lm.tokenizer.piece(token).decode(errors="replace") for token in tokens)
    emitted = histogram(len(each["accepted"]) + bool(each["bonus"]) for each in shown["passes"])
    run = Own(lm, "prompt-lookup", 0.0).decode([prompt], max_new_tokens=30, seed=0)
    assert emitted == dict(sorted(run.emitted.items()))


def test_unknown_methods_are_named_with_their_neighbours() -> None:
    with pytest.raises(UnknownMethod, match=r"prompt-lookup.*none is plain decoding"):
        check_methods(("none", "prompt-lokup"))
    with pytest.raises(SettingsError, match="length"):
        check_methods(("prompt-lookup:length=x",))


def _schemas(folder: Path) -> str:
    schemas = [
        {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False},
        {"type": "array", "items": {"enum": ["x"]}, "minItems": 1, "maxItems": 2},
        {"type": "array", "uniqueItems": True},
        {"type": "string"},
    ]
    rows = [
        {"dataset": "One" if number < 3 else "Two", "name": f"{number}.json", "schema": schema}
        for number, schema in enumerate(schemas)
    ]
    (folder / "jsonschemabench.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(folder)


def test_structured_output_is_covered_judged_and_timed(lm: LLM, tmp_path: Path) -> None:
    # By chance, as the tiny model's most likely tokens are spaces without end.
    settings = dataclasses.replace(
        SETTINGS,
        methods=("prompt-lookup",),
        workloads=("jsonschema",),
        data=_schemas(tmp_path),
        max_new_tokens=100,
        temperature=3.0,
    )
    found = measure(lm, tmp_path, settings, out=tmp_path / "out")
    one = row(found, "none", "One")
    assert (one["schemas"], one["prompts"]) == (3, 2)
    assert (
        one["declared"] == pytest.approx(2 / 3, abs=1e-3) and one["finished"] == one["sound"] == one["compliance"] == 1
    )
    assert one["coverage"] == pytest.approx(2 / 3, abs=1e-3)
    assert (
        one["compile_seconds"] < one["first_token_seconds"]
        and 0 < one["mask_share"] < 1
        and one["seconds_per_token"] > 0
    )
    # A string without an end is cut by its length, and then counts as not valid.
    two = row(found, "none", "Two")
    assert (two["finished"], two["compliance"], two["sound"]) in {(0, 0, None), (1, 1, 1)}
    total = row(found, "prompt-lookup")
    assert total["lossless"]["identical"] == total["lossless"]["checked"] > 0
    assert [schema["question"] for schema in found["schemas"] if schema["refused"]] == ["One/2.json"]
    assert "'uniqueItems'" in found["schemas"][2]["refused"]
    assert "schemas cannot be enforced" in found["notes"][0]
    assert result.compare(found, result.read(tmp_path / "out"))["differences"] == {}
    assert "by dataset" not in table(found) and "| One | none | 3 |" in table(found)


@pytest.mark.parametrize(
    ("schema", "text", "valid"),
    [
        *(({"multipleOf": 0.01}, "0.07", True), ({"multipleOf": 0.01}, "0.075", False)),
        *(
            ({"type": "string", "format": "date"}, '"2023-02-29"', False),
            ({"maximum": 0.1}, "0.1000000000000000001", False),
        ),
        *(
            ({}, "{", False),
            ({"type": "integer"}, "1", True),
            ({"$ref": "#/$defs/a", "$defs": {"a": False}}, "1", False),
        ),
        *(({"type": "number"}, "1e99999999999999999999", False), ({"multipleOf": 3}, "1e99999", False)),
        *(({"multipleOf": 1e-300}, "1e300", True), ({"type": "number"}, "NaN", False)),
    ],
)
def test_answers_are_judged_exactly(schema: dict, text: str, valid: bool) -> None:
    assert is_valid(json.dumps(schema), text) == valid
