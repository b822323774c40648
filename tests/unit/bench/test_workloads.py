"""What the benchmark decodes: the built-in sets, the public ones, and prompts of fixed lengths."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from decodery.bench.settings import Settings, split_methods
from decodery.bench.units import Case, Conversation, fixed_length, make_units
from decodery.bench.workloads import TIERS, WORKLOADS, documents, find, questions, spaced
from decodery.core.errors import CorruptFile, DecoderyError, SettingsError
from decodery.llm.llm import LLM

SPEC_BENCH_KINDS = {
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
    "translation", "summarization", "qa", "math_reasoning", "rag",
}  # fmt: skip


def test_the_built_in_set_has_every_kind() -> None:
    found = questions("built-in")
    kinds = Counter(question.category for question in found)
    assert set(kinds) == SPEC_BENCH_KINDS | {"code_edit", "long_context"}
    assert min(kinds.values()) >= 2
    assert {question.category for question in found if len(question.turns) == 2} == {
        "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
    }  # fmt: skip
    assert len({question.id for question in found}) == len(found)
    assert all(turn.strip() for question in found for turn in question.turns)
    longest = [len(question.turns[0]) for question in found if question.category == "long_context"]
    assert min(longest) > 4000


def test_copy_prompts_hold_what_is_to_be_copied() -> None:
    assert {question.category for question in questions("copy")} == {
        "repeat", "replace", "correct", "convert", "edit_code",
    }  # fmt: skip


def test_public_sets(data: Path) -> None:
    found = questions("spec-bench", data)
    kinds = Counter(question.category for question in found)
    assert set(kinds) == SPEC_BENCH_KINDS and len(found) == 240
    assert sum(len(question.turns) == 2 for question in found) == 40
    assert len(questions("code", data)) == 82 and len(questions("math", data)) == 1000
    assert "def has_close_elements" in questions("code", data)[0].turns[0]
    schemas = questions("json", data)
    assert len(schemas) > 500 and all(len(question.turns[0]) < 2200 for question in schemas)


def test_fewer_questions_keep_the_shares_of_the_kinds(data: Path) -> None:
    chosen = questions("spec-bench", data, 48)
    kinds = Counter(question.category for question in chosen)
    assert len(chosen) == 48 and kinds["translation"] == 8 and kinds["rag"] == 8
    assert sum(len(question.turns) == 2 for question in chosen) == 8
    whole = questions("built-in")
    assert spaced(whole, 1000) == whole
    assert spaced(whole, len(whole)) == whole


def test_a_set_that_is_not_there() -> None:
    with pytest.raises(SettingsError, match=r"no workload 'poems'; choose among .*spec-bench"):
        questions("poems")
    with pytest.raises(SettingsError, match="DECODERY_DATA"):
        questions("spec-bench")
    with pytest.raises(SettingsError, match="no folder"):
        questions("spec-bench", Path("/nowhere"))


@pytest.mark.parametrize("text", ['{"question_id": 1', "[1]", '{"category": "x"}', '"x"', "\xff", ""])
def test_damaged_sets(tmp_path: Path, text: str) -> None:
    (tmp_path / "spec_bench.jsonl").write_bytes(text.encode("latin-1"))
    with pytest.raises(CorruptFile):
        questions("spec-bench", tmp_path)


def speed_row(turn: str, category: str = "coding") -> str:
    return json.dumps({"question_id": 7, "category": category, "turns": [turn], "source": "x", "multiturn": False})


def test_speed_bench_is_read_and_placeholders_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "speed"
    folder.mkdir()
    (folder / "qualitative.jsonl").write_text(speed_row("Sort this list."))
    (question,) = questions("speed", tmp_path)
    assert (question.category, question.turns) == ("coding", ("Sort this list.",))
    placeholder = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    (folder / "qualitative.jsonl").write_text(speed_row(placeholder))
    with pytest.raises(SettingsError, match=r"question 7 .* placeholder"):
        questions("speed", tmp_path)


def test_every_workload_has_a_summary() -> None:
    assert all(workload.summary for workload in WORKLOADS.values())
    assert tuple(documents()) == TIERS


def test_prompts_of_a_fixed_length(smollm2_int8: LLM) -> None:
    for tier, text in documents().items():
        for length in (64, 256, 512, 1024):
            tokens = fixed_length(smollm2_int8, text, length)
            assert tokens is not None and len(tokens) == length, tier
            shown = smollm2_int8.tokenizer.decode(tokens, special=True)
            assert text[:80] in shown and shown.endswith("Continue this text.<|im_end|>\n<|im_start|>assistant\n")
    assert fixed_length(smollm2_int8, "Too short.", 64) is None


def test_cases_of_the_throughput_split(smollm2_int8: LLM) -> None:
    settings = Settings(splits=("throughput",), prompts=4, input_tokens=(64, 2000), concurrency=(1, 4))
    units, notes = make_units(smollm2_int8, settings)
    assert notes == [] and len(units) == 2 * 2 * 3
    for unit in units:
        assert isinstance(unit, Case) and len(unit.tokens) == 4
        assert {len(prompt) for prompt in unit.tokens} == {unit.length}
        assert len({tuple(prompt) for prompt in unit.tokens}) == 4, "real, different texts"
    with pytest.raises(SettingsError, match="takes its texts from"):
        make_units(smollm2_int8, Settings(splits=("throughput",), workloads=("copy",)))


def test_speed_bench_throughput_files(smollm2_int8: LLM, tmp_path: Path) -> None:
    rows = [speed_row(text, f"{tier}_entropy") for tier, text in documents().items()]
    (tmp_path / "throughput_1k.jsonl").write_text("\n".join(rows))
    settings = Settings(
        splits=("throughput",), workloads=("speed",), data=str(tmp_path), input_tokens=(1024,), concurrency=(1,)
    )
    units, _ = make_units(smollm2_int8, settings)
    assert [unit.tier for unit in units if isinstance(unit, Case)] == list(TIERS)


def test_later_turns_follow_plain_decodings_answer(smollm2_int8: LLM) -> None:
    question = next(question for question in questions("built-in") if len(question.turns) == 2)
    unit = Conversation(question, smollm2_int8, room=2000)
    answer = smollm2_int8.tokenizer.encode("An answer.<|im_end|>", special=False)
    (tokens,) = unit.prompts(1, [[answer]]) or [[]]
    shown = smollm2_int8.tokenizer.decode(tokens, special=True)
    assert f"assistant\nAn answer.<|im_end|>\n<|im_start|>user\n{question.turns[1]}" in shown
    unit.room = len(tokens) - 1
    assert unit.prompts(1, [[answer]]) is None


def test_methods_may_have_settings() -> None:
    text = "none,prompt-lookup:length=5,max_ngram=2, transformers,stand:alpha=0.5"
    assert split_methods(text) == ("none", "prompt-lookup:length=5,max_ngram=2", "transformers", "stand:alpha=0.5")
    nested = "none,draft-model:model=a,tree_policy=eagle-2(nodes=8,depth=3),copyspec(gamma=1,length=2)"
    assert split_methods(nested) == ("none", nested[5:-27], nested[-26:])


@pytest.mark.parametrize("given", [True, False])
def test_a_workload_without_its_file_is_answered_with_one_that_needs_none(tmp_path: Path, given: bool) -> None:
    with pytest.raises(SettingsError, match=r"spec_bench\*\.jsonl.* take the workload built-in"):
        find("spec-bench", tmp_path if given else None, ("spec_bench*.jsonl",))


def test_settings_round_trip_and_begin_with_plain_decoding() -> None:
    settings = Settings(methods=("prompt-lookup", "none", "prompt-lookup"), data="x", prompts=3)
    assert settings.methods == ("none", "prompt-lookup")
    assert Settings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings


@pytest.mark.parametrize(
    "change",
    [
        {"rounds": 0},
        {"prompts": 0},
        {"temperature": -1.0},
        {"concurrency": (0,)},
        {"workloads": ("x",)},
        {"splits": ()},
    ],
)
def test_settings_out_of_range(change: dict[str, object]) -> None:
    with pytest.raises(DecoderyError):
        Settings(**change)  # type: ignore[arg-type]


@pytest.mark.parametrize("raw", [None, {"colour": 1}, {"rounds": "3"}, {"methods": "none"}, {"methods": [1]}])
def test_settings_of_a_strange_file(raw: object) -> None:
    with pytest.raises(SettingsError, match="result file"):
        Settings.from_dict(raw)
