"""HAMburger: groups are read as they were learned, and what is left of them in the cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from decodery.core.errors import CorruptFile, DecoderyError, SettingsError, UnsupportedModel
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.llm.llm import LLM
from decodery.logits_sources.hamburger import GroupCache, Hamburger
from decodery.models.batch import Batch, Segment
from decodery.models.trained.micro_steps import MicroSteps, quarters, shapes
from decodery.step.forward_request import run_sync, score
from decodery.testing import check_identical, decode, tiny_transformer
from decodery.training.corpus import TrainingText
from decodery.training.hamburger import GroupBatch, said
from methods import random_micro_steps
from questions import prompts

TARGET = tiny_transformer(0)
PARTS = random_micro_steps()
PROMPT = [5] * 6 + [7, 8, 9] * 4
SOURCE = Hamburger(PARTS, confidence=0.5)


def written(tokens: int = 24) -> tuple[list[int], list[int]]:
    """A text with its prompt, and the sizes of its groups, the last one whole."""
    (seq,) = decode(TARGET, [PROMPT], logits_source=SOURCE, max_new_tokens=tokens)
    ends = seq.cache.positions[0, len(PROMPT) : seq.cache.length]
    return seq.tokens[: int(ends[-1]) + 1], np.diff([len(PROMPT) - 1, *ends]).tolist()


def read(tokens: list[int], cache: GroupCache | None = None) -> torch.Tensor:
    """[n, vocab] of tokens, read at once after what a cache holds."""
    reader = SOURCE.over(TARGET, PROMPT)
    return run_sync(score(reader, Segment.chunk(tokens, reader.new_cache() if cache is None else cache))).logits


def test_groups_of_one_token_are_the_model_itself() -> None:
    (plain,) = decode(TARGET, [PROMPT], max_new_tokens=24)
    (alone,) = decode(TARGET, [PROMPT], logits_source=Hamburger(PARTS, confidence=1.1), max_new_tokens=24)
    (grouped,) = decode(TARGET, [PROMPT], logits_source=SOURCE, max_new_tokens=24)
    assert plain.generated == alone.generated != grouped.generated
    assert alone.trace.ledger.counts == {"rows": 23, "groups": 23}
    # A group's first token is always the model's own.
    assert plain.generated[0] == grouped.generated[0]


def test_the_cache_holds_the_prompt_and_a_slot_for_every_group() -> None:
    (seq,) = decode(TARGET, [PROMPT], logits_source=SOURCE, max_new_tokens=24, prefill_chunk=5)
    counts, cache = seq.trace.ledger.counts, seq.cache
    assert isinstance(cache, GroupCache) and cache.next_position == len(PROMPT) + 23 == len(PROMPT) + counts["rows"]
    assert set(cache.lengths.tolist()) == {len(PROMPT) + int(counts["groups"])}
    _, sizes = written()
    assert len(sizes) == counts["groups"] and set(sizes) == {1, 2, 3, 4}
    places = np.cumsum([len(PROMPT) - 1, *sizes])
    for positions in cache.positions[:, : cache.length]:
        assert positions.tolist() == [*range(len(PROMPT)), *places[1:]]


def test_texts_are_read_step_by_step_as_they_are_learned_at_once() -> None:
    tokens, sizes = written()
    text = TrainingText(np.array(tokens, dtype=np.int32), len(PROMPT), *nothing(len(tokens)))
    # Beside a text of another length, whose groups are others.
    other = TrainingText(np.arange(1, 8, dtype=np.int32), 3, *nothing(7))
    training_batch, parts = GroupBatch.of([other, text], [[1, 3], sizes], PARTS.most), PARTS.at(TARGET)
    logits = read(tokens)[len(PROMPT) - 1 : -1]
    assert (TARGET.project(said(TARGET, parts, training_batch))[4:] - logits).abs().max() < 1e-9
    assert training_batch.right.tolist() == [4, 5, 6, 7, *tokens[len(PROMPT) :]]
    assert training_batch.ends.tolist() == [
        1,
        0,
        0,
        1,
        *(float(n == size) for size in sizes for n in range(1, size + 1)),
    ]
    # Wrong on purpose: groups one place further after the prompt, as the published loop that generates puts them.
    shifted = np.where(
        training_batch.parts[1][2] >= len(PROMPT), training_batch.parts[1][2] + 1, training_batch.parts[1][2]
    )
    moved = replace(training_batch, parts=[training_batch.parts[0], (*training_batch.parts[1][:2], shifted)])
    assert (TARGET.project(said(TARGET, parts, moved))[4:] - logits).abs().max() > 1e-3


def nothing(n: int) -> tuple[np.ndarray, np.ndarray]:
    """What a model found likely in a text that it was not asked about."""
    return np.zeros((n, 1), dtype=np.int32), np.full((n, 1), -np.inf, dtype=np.float16)


def test_a_text_may_come_in_any_parts_and_again() -> None:
    tokens, sizes = written()
    whole, reader = read(tokens), SOURCE.over(TARGET, PROMPT)
    cache, rows = reader.new_cache(), []
    assert isinstance(cache, GroupCache)
    for first, last in (
        (0, 5),
        (5, len(PROMPT) + 2),
        (len(PROMPT) + 2, len(tokens) - 3),
        (len(tokens) - 3, len(tokens)),
    ):
        rows.append(read(tokens[first:last], cache))
        cache.keep(range(last - first))
    assert (torch.cat(rows) - whole).abs().max() < 1e-9
    inside = len(PROMPT) + next(sum(sizes[:n]) + 1 for n, size in enumerate(sizes) if n and size > 2)
    for n in (len(tokens) - 1, inside, len(PROMPT), 9):
        cache.truncate(n)
        assert cache.next_position == n
        # What is not kept leaves nothing, and a fork goes on by itself.
        for held in (cache, cache.fork()):
            assert (read(tokens[n:], held) - whole[n:]).abs().max() < 1e-9
            held.keep([])
            assert held.next_position == n
    clone, mark = cache.fork(), cache.snapshot()
    read(tokens[9:], clone)
    clone.keep(range(len(tokens) - 9))
    assert clone.next_position == len(tokens) and cache.next_position == 9
    read(tokens[9:], cache)
    cache.keep(range(12))
    cache.restore(mark)
    assert cache.next_position == 9 and not cache.behind


def test_memory_is_given_back_and_a_prompt_is_shared() -> None:
    (whole,) = decode(TARGET, [PROMPT], logits_source=SOURCE, max_new_tokens=24)
    engine, request = Engine(TARGET), Request(PROMPT, max_new_tokens=24, logits_source=SOURCE)
    first = engine.submit(request)
    while not first.finished:
        engine.step()
        # Often within a group, whose tokens are read again as one.
        if 0 < first.position < 20 and engine.preemptions < 8:
            engine.preempt(first)
    assert engine.preemptions == 8 and first.generated == whole.generated
    owner = engine.submit(request)
    other = engine.submit(request, like=owner)
    engine.run([owner, other])
    assert other.generated == whole.generated
    assert other.trace.ledger.rows["model"] + len(PROMPT) - 1 == owner.trace.ledger.rows["model"]


def test_rows_that_stay_are_gone_on_from() -> None:
    tokens, _ = written()
    whole, reader = read(tokens), SOURCE.over(TARGET, PROMPT)
    cache, n = reader.new_cache(), len(PROMPT) + 1
    read(tokens[:n], cache)
    cache.keep(range(n))
    read([*tokens[n : n + 3], 1, 2], cache)
    late = tokens[n + 3 : n + 6]
    segment = Segment(np.arange(n + 3, n + 6), np.array(late), cache=cache, retained=3)
    found = run_sync(score(reader, segment)).logits
    assert (found - whole[n + 3 : n + 6]).abs().max() < 1e-9
    cache.keep(range(6))
    assert (read(tokens[n + 6 :], cache) - whole[n + 6 :]).abs().max() < 1e-9


def test_a_group_is_its_token_or_what_its_tokens_make_in_their_order() -> None:
    parts, rows = PARTS.at(TARGET), torch.randn(3, 4, 32, dtype=torch.float64)
    found = parts.merged(rows, torch.tensor([1, 2, 4]))
    assert torch.equal(found[0], rows[0, 0])
    alone = parts.merged(rows[1:2, :2], torch.tensor([2]))[0]
    assert torch.allclose(found[1], alone) and not torch.allclose(found[1], rows[1, :2].mean(dim=0))
    assert not torch.allclose(parts.merged(rows.flip(1), torch.tensor([4] * 3))[2], found[2])
    untaught = replace(parts, tensors={**parts.tensors, "merge.weight": torch.zeros(32, 32, dtype=torch.float64)})
    mean = rows[2].mean(dim=0) + untaught.tensors["merge.bias"]
    assert torch.allclose(untaught.merged(rows, torch.tensor([4] * 3))[2], mean)


def test_states_are_read_after_every_quarter() -> None:
    assert [quarters(layers) for layers in (2, 4, 16, 30)] == [
        (1, 2), (1, 2, 3, 4), (4, 8, 12, 16), (8, 15, 23, 30)
    ]  # fmt: skip


def test_parts_of_this_model_are_needed(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="decodery train hamburger"):
        Hamburger()
    with pytest.raises(SettingsError, match="confidence"):
        Hamburger(PARTS, confidence=-0.1)
    for parts in (str(tmp_path), replace(PARTS, model="another")):
        with pytest.raises(DecoderyError, match="decodery train hamburger"):
            decode(TARGET, [[1]], logits_source=Hamburger(parts))
    with pytest.raises(UnsupportedModel, match="another shape"):
        decode(tiny_transformer(0, num_layers=3), [[1]], logits_source=SOURCE)
    reader = SOURCE.over(TARGET, PROMPT)
    with pytest.raises(UnsupportedModel, match="neither looked into nor changed"):
        run_sync(score(reader, Segment.chunk([1], reader.new_cache()), taps=(1,)))


def test_parts_are_read_as_they_were_written(tmp_path: Path) -> None:
    PARTS.save(tmp_path / MicroSteps.FILE)
    found = MicroSteps.load(tmp_path / MicroSteps.FILE)
    assert (found.taps, found.heads, found.kv_heads, found.theta) == ((1, 2), 4, 2, 1e4)
    (ours,), (theirs,) = (
        decode(TARGET, [PROMPT], logits_source=replace(SOURCE, micro=parts), max_new_tokens=12)
        for parts in (PARTS, str(tmp_path))
    )
    assert ours.generated == theirs.generated
    tensors = dict(PARTS.tensors)
    broken = {
        "missing": {name: each for name, each in tensors.items() if name != "merge.bias"},
        "shape": {**tensors, "stop.2.weight": torch.zeros(2, 32)},
        "endless": {**tensors, "place": torch.full((4, 16), torch.inf)},
    }
    for each in (replace(PARTS, tensors=wrong) for wrong in broken.values()):
        each.save(tmp_path / "wrong" / MicroSteps.FILE)
        with pytest.raises(CorruptFile, match=r"micro steps|not finite"):
            MicroSteps.load(tmp_path / "wrong" / MicroSteps.FILE)
    for wrong in (replace(PARTS, taps=(2, 1)), replace(PARTS, kv_heads=3)):
        wrong.save(tmp_path / "wrong" / MicroSteps.FILE)
        with pytest.raises(CorruptFile, match="micro steps"):
            MicroSteps.load(tmp_path / "wrong" / MicroSteps.FILE)


def test_int8_texts_are_the_same_with_drafts_and_in_batches(smollm2_int8: LLM) -> None:
    model, draws = smollm2_int8.model, torch.Generator().manual_seed(0)
    sizes = shapes(576, 1, 3, 1536, (9, 3, 64))
    tensors = {name: torch.randn(shape, generator=draws) * shape[-1] ** -0.5 for name, shape in sizes}
    parts = MicroSteps({**tensors, "stop.2.weight": tensors["stop.2.weight"] * 8}, quarters(30), 9, 3, 1e5)
    asked = [prompts(smollm2_int8)[number][:24] for number in (2, 6)]
    settings = {"logits_source": Hamburger(parts, confidence=0.5), "seeds": (1,), "max_new_tokens": 6}
    runs = check_identical(model, asked, drafter="ngram", tested="nothing", **settings)
    counts = [run.trace.ledger.counts for run in runs]
    assert 0 < sum(each["groups"] for each in counts) < sum(each["rows"] for each in counts)


def test_prompt_rows_say_what_the_model_says() -> None:
    own = TARGET.forward(Batch([Segment.chunk(PROMPT, TARGET.new_cache())])).logits
    assert torch.equal(read(PROMPT), own)
