"""Many prompts: they pass through in the memory of a few texts, in order, and each as it would be alone."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from weakref import WeakSet

import pytest

from decodery.core.errors import ContextFull, PromptError
from decodery.engine.output import Output
from decodery.llm.llm import LLM
from decodery.llm.texts import MOST_TEXTS
from decodery.models.cache.cache import KVCache
from tiny_models import tiny_loaded

SETTINGS = {"max_new_tokens": 4, "drafter": None, "ignore_eos": True}
PROMPTS = [f"prompt {number}" for number in range(100)]


@pytest.fixture
def lm() -> LLM:
    return LLM(tiny_loaded())


@pytest.fixture
def memories(monkeypatch: pytest.MonkeyPatch) -> WeakSet[KVCache]:
    """The caches that there are."""
    found, begin = WeakSet[KVCache](), KVCache.__init__

    def noted(self: KVCache, *args: object, **settings: object) -> None:
        begin(self, *args, **settings)  # type: ignore[arg-type]
        found.add(self)

    monkeypatch.setattr(KVCache, "__init__", noted)
    return found


@pytest.fixture
def held(lm: LLM, memories: WeakSet[KVCache], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many of them there were whenever a text became an output."""
    found, output = [0], lm.output

    def counted(*args: object, **settings: object) -> Output:
        found.append(sum(cache.bytes > 0 for cache in memories))
        return output(*args, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(lm, "output", counted)
    return found


def test_a_list_takes_the_memory_of_a_few_texts(lm: LLM, memories: WeakSet[KVCache], held: list[int]) -> None:
    outputs = lm.generate(PROMPTS, **SETTINGS)
    assert isinstance(outputs, list) and len(outputs) == len(PROMPTS)
    assert 1 < max(held) <= MOST_TEXTS
    gc.collect()
    assert not memories
    for number in (0, 31, 32, 99):
        alone = lm.generate(PROMPTS[number], **SETTINGS)
        assert isinstance(alone, Output) and outputs[number].tokens == alone.tokens
    assert [each.tokens for each in lm.generate(tuple(PROMPTS[:3]), **SETTINGS)] == [
        each.tokens for each in outputs[:3]
    ]


def test_prompts_are_taken_as_texts_end(lm: LLM, held: list[int]) -> None:
    taken = []

    def prompts() -> Iterator[str]:
        for prompt in PROMPTS:
            taken.append(prompt)
            yield prompt

    outputs = lm.generate(prompts(), **SETTINGS)
    assert isinstance(outputs, Iterator) and not taken
    expected = lm.generate(PROMPTS, **SETTINGS)
    for number, output in enumerate(outputs):
        assert output.tokens == expected[number].tokens
        assert len(taken) <= number + 2 * MOST_TEXTS
    assert number + 1 == len(taken) == 100 and 1 < max(held) <= MOST_TEXTS


def test_outputs_come_in_order_whatever_ends_first(lm: LLM) -> None:
    whole = lm.generate(PROMPTS[:40], **SETTINGS | {"max_new_tokens": 12})
    # Some texts end at once, others go on to the end.
    often, _ = Counter(token for each in whole for token in each.tokens).most_common(1)[0]
    ends = {"max_new_tokens": 12, "n": 2, "stop": lm.tokenizer.decode([often])}
    found = list(lm.generate(iter(PROMPTS[:40]), **SETTINGS | ends))
    lengths = [len(each.tokens) for each in found]
    assert len(found) == 80 and len(set(lengths)) > 2
    for each, expected in zip(found[::2], whole, strict=True):
        assert each.tokens == expected.tokens[: len(each.tokens)]
    assert len({each.seed for each in found[:2]}) == 2


def test_what_cannot_be_read_is_refused_before_anything_is(lm: LLM) -> None:
    with pytest.raises(PromptError, match="the prompt is empty"):
        lm.generate([*PROMPTS, ""], **SETTINGS)
    with pytest.raises(ContextFull):
        lm.generate([*PROMPTS, "a" * 5000], **SETTINGS)
    outputs = lm.generate(iter([*PROMPTS[:40], ""]), **SETTINGS)
    found = []
    with pytest.raises(PromptError, match="the prompt is empty"):
        found.extend(outputs)
    # Those before it that were done are there.
    assert list(lm.generate(iter([]), **SETTINGS)) == [] == lm.generate([], **SETTINGS)


def test_an_iterator_that_is_left_leaves_nothing(lm: LLM, memories: WeakSet[KVCache]) -> None:
    outputs = lm.generate(iter(PROMPTS), **SETTINGS)
    next(outputs)
    assert memories
    outputs.close()
    del outputs
    gc.collect()
    assert not memories
