"""Exactness on the real embedded model: drafts, batches and chunks change no token."""

from __future__ import annotations

import pytest

import decodery
from decodery.engine.engine import Engine
from decodery.llm.llm import LLM
from decodery.sampling import Sampler
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.testing import Garbage, Oracle, check_batch, check_identical, check_state, decode
from questions import QUESTIONS, SAMPLED, prompts


@pytest.mark.parametrize("sampler", [None, SAMPLED], ids=["greedy", "sampled"])
def test_float32_texts_are_those_of_plain_decoding(smollm2: LLM, sampler: Sampler | None) -> None:
    # Float32 passes over one row and over several round differently: a near-tie may fall the other way.
    runs = check_identical(
        *(smollm2.model, prompts(smollm2, 3)[2:]),
        drafter=PromptLookup(),
        sampler=sampler,
        seeds=(1,),
        max_new_tokens=12,
        near_tie=1e-3,
        excuses=1,
    )
    assert sum(run.trace.tokens for run in runs) > sum(run.trace.passes for run in runs)


@pytest.mark.parametrize("sampler", [None, SAMPLED], ids=["greedy", "sampled"])
def test_int8_texts_are_those_of_plain_decoding_bit_for_bit(smollm2_int8: LLM, sampler: Sampler | None) -> None:
    lm = smollm2_int8
    assert str(lm.dtype) == "int8"
    settings = {"sampler": sampler, "seeds": (1,), "max_new_tokens": 24}
    asked = prompts(lm, 3)[1:]
    plain = decode(lm.model, asked, **settings)
    # Passes over many rows cost what they have rows; a few of them go every way that such passes go.
    for drafter, count in ((PromptLookup(), 2), (Garbage(nodes=20), 1)):
        check_identical(lm.model, asked[:count], drafter=drafter, plain=plain[:count], **settings)


def test_int4_is_what_the_file_says_and_exact_too() -> None:
    """The embedded file is Q4_1: its layers come through without any further loss."""
    import gguf

    from decodery.models.loaders.package_index import gguf_path

    lm = decodery.load("smollm2", dtype="int4")
    wanted = {"blk.0.ffn_down.weight", "blk.29.ffn_down.weight"}
    stored = {each.name: each for each in gguf.GGUFReader(gguf_path("smollm2")).tensors if each.name in wanted}
    for name, index in (("blk.0.ffn_down.weight", 0), ("blk.29.ffn_down.weight", 29)):
        dense = gguf.dequantize(stored[name].data, stored[name].tensor_type)
        assert stored[name].tensor_type == gguf.GGMLQuantizationType.Q4_1
        assert (lm.model.weights.layers[index].down.dense().numpy() == dense).all()
    settings = {"seeds": (1,), "max_new_tokens": 10}
    plain = decode(lm.model, prompts(lm, 2), **settings)
    for drafter, count in ((PromptLookup(), 2), (Garbage(nodes=20), 1)):
        check_identical(lm.model, prompts(lm, count), drafter=drafter, plain=plain[:count], **settings)


def test_int8_trees_batches_and_chunks_leave_identical_caches(smollm2_int8: LLM) -> None:
    lm = smollm2_int8
    prompt = prompts(lm)[2]
    plain = decode(lm.model, [prompt], max_new_tokens=8)
    oracle = Oracle(tuple(plain[0].tokens), nodes=24)
    for drafter in (oracle, PromptLookup()):
        check_identical(lm.model, [prompt], drafter=drafter, seeds=(0,), max_new_tokens=8, plain=plain)
        assert check_state(lm.model, [prompt], drafter=drafter, max_new_tokens=8, tolerance=0.0) == 0.0
    check_batch(lm.model, prompts(lm, 3)[1:], drafter=PromptLookup(), sampler=SAMPLED, seeds=(3,), max_new_tokens=10)


def test_a_model_drafting_for_itself_is_always_right(smollm2_int8: LLM) -> None:
    lm = smollm2_int8
    drafter = DraftModel(lm.model, length=5)
    for sampler in (None, SAMPLED):
        (run,) = check_identical(
            lm.model, prompts(lm, 1), drafter=drafter, sampler=sampler, seeds=(2,), max_new_tokens=31
        )
        assert [step.emitted for step in run.trace.decoding] == [6] * 5


def test_a_stream_is_the_text_and_cuts_no_character(smollm2_int8: LLM) -> None:
    lm = smollm2_int8
    prompt = "Repeat exactly: naïve café 😀👍🏽 日本語 Ελλάδα"
    pieces = [piece.text for piece in lm.stream(prompt, max_new_tokens=60, min_new_tokens=40)]
    whole = lm.generate(prompt, max_new_tokens=60, min_new_tokens=40)
    assert "".join(pieces) == whole.text == lm.tokenizer.decode(whole.tokens)
    assert any(ord(letter) > 127 for letter in whole.text)
    assert all("\ufffd" not in piece for piece in pieces[:-2])


def test_samples_and_lists_of_prompts(smollm2_int8: LLM) -> None:
    lm = smollm2_int8
    settings = {"temperature": 0.9, "seed": 5, "max_new_tokens": 12}
    three = lm.generate(QUESTIONS[0], n=3, **settings)
    alone = [lm.generate(QUESTIONS[0], **settings | {"seed": seed}) for seed in (5, 6, 7)]
    assert [out.tokens for out in three] == [out.tokens for out in alone]
    assert len({tuple(out.tokens) for out in three}) > 1
    several = lm.generate(QUESTIONS[:2], **settings)
    assert [out.text for out in several] == [lm.generate(one, **settings).text for one in QUESTIONS[:2]]


def test_a_conversation_reads_only_what_is_new(smollm2_int8: LLM) -> None:
    lm = smollm2_int8
    messages = [{"role": "user", "content": "Name a river in Africa."}]
    first = lm.generate(messages, max_new_tokens=24, return_cache=True)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And one in Asia?"}]
    fresh = lm.generate(messages, max_new_tokens=24)
    second = lm.generate(messages, max_new_tokens=24, reuse=first)
    assert second.tokens == fresh.tokens
    read = sum(step.rows for step in second.trace.steps if step.prefill)
    assert read < sum(step.rows for step in fresh.trace.steps if step.prefill) / 2


def test_engines_take_requests_of_different_kinds_together(smollm2_int8: LLM) -> None:
    lm = smollm2_int8
    engine = Engine(lm.model, detokenizer=lm.tokenizer.stream, prefill_chunk=16)
    settings = [
        {"drafter": None},
        {"temperature": 0.7, "seed": 3},
        {"acceptance_rule": "rejection", "temperature": 1.0, "seed": 1, "drafter": "prompt-lookup"},
    ]
    sequences = [engine.submit(lm.request(lm.encode(QUESTIONS[1]), max_new_tokens=20, **each)) for each in settings]
    engine.run(sequences)
    for seq, each in zip(sequences, settings, strict=True):
        assert lm.output(seq).tokens == lm.generate(QUESTIONS[1], max_new_tokens=20, **each).tokens
