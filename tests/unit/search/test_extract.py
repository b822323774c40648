"""Exact-extract against the probability of every span, one by one."""

from __future__ import annotations

import re
from functools import cache

import numpy as np
import pytest
import torch

from decodery.core.errors import PromptError, SettingsError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Batch, Segment
from decodery.sampling import Sampler
from decodery.search.exact_extract import ExactExtract
from decodery.step.sequence import Sequence
from decodery.testing import TableModel, decode, tiny_transformer

END = (0,)
MODELS = [TableModel(6, order=3, seed=number, spread=4.0) for number in range(30)]


def run(model, search: ExactExtract, prompt: list[int], **settings) -> Sequence:
    (seq,) = search.run(Engine(model), Request(prompt, **{"eos_ids": END, "max_new_tokens": 60} | settings))
    return seq


def score(model, prompt: list[int], span: list[int], end: tuple[int, ...]) -> float:
    """Log-probability of a whole answer, every token's logits found in a pass of its own."""
    total = 0.0
    for n in range(len(span) + 1):
        row = logprobs(model, (*prompt, *span[:n]))
        total += row[span[n]] if n < len(span) else float(np.logaddexp.reduce(row[list(end)]))
    return total


@cache
def logprobs(model, tokens: tuple[int, ...]) -> np.ndarray:
    segment = Segment.chunk(tokens, model.new_cache(), logit_rows=[len(tokens) - 1])
    return model.forward(Batch([segment])).logits[0].double().log_softmax(-1).numpy()


def brute(model, prompt, passage, end=END, normalised=False, longest=59) -> tuple[float, list[int]]:
    """Best score and span, the one that begins first and then the shorter among equals."""
    best = (-float("inf"), [])
    for i in range(len(passage)):
        for j in range(i + 1, min(len(passage), i + longest) + 1):
            span = passage[i:j]
            if set(span) & set(end):
                break
            value = score(model, prompt, span, end) / (len(span) + 1 if normalised else 1)
            if value > best[0] + 1e-12:
                best = (value, span)
    return best


@cache
def passages(normalised: bool) -> list[tuple[TableModel, list[int], tuple[float, list[int]]]]:
    """Models, passages, and the best spans of these."""
    random, found = np.random.default_rng(0), []
    for number, model in enumerate(MODELS):
        # Few tokens, so that spans repeat and share their beginnings; some end tokens inside.
        passage = [*random.integers(number % 2, 6, random.integers(2, 24)).tolist(), 1]
        found.append((model, passage, brute(model, [1, 2], passage, normalised=normalised)))
    return found


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_it_finds_the_most_likely_of_all_spans(rows: int, normalised: bool) -> None:
    for model, passage, expected in passages(normalised):
        found = run(model, ExactExtract(tuple(passage), normalised=normalised, rows=rows), [1, 2])
        assert found.generated == [*expected[1], 0]
        assert found.score == pytest.approx(expected[0], abs=1e-9)
        assert (found.finish_reason, found.stopped_by) == ("stop", 0)


def test_it_works_on_a_transformer_and_leaves_the_cache_in_order() -> None:
    model, random = tiny_transformer(5), np.random.default_rng(1)
    for _ in range(3):
        passage = random.integers(1, 64, 12).tolist()
        expected = brute(model, [3, 1, 4], passage)
        found = run(model, ExactExtract(tuple(passage)), [3, 1, 4], logprobs=0)
        assert found.generated == [*expected[1], 0] and found.score == pytest.approx(expected[0], abs=1e-6)
        assert sum(entry.logprob for entry in found.token_logprobs) == pytest.approx(expected[0], abs=1e-5)
        assert found.cache.next_position == len(found.tokens) - 1


def test_most_spans_are_never_scored() -> None:
    model = TableModel(40, order=3, seed=1, spread=6.0)
    passage = np.random.default_rng(2).integers(1, 40, 200).tolist()
    found = run(model, ExactExtract(tuple(passage)), [1, 2])
    assert found.trace.rows < 0.05 * 200 * 59
    assert found.trace.passes < 30


class Copier(TableModel):
    """Goes on copying the passage it was shown: deep spans are the likely ones."""

    def logits(self, tokens) -> torch.Tensor:
        row = torch.zeros(self.vocab_size, dtype=torch.float64)
        row[0 if len(tokens) >= 34 else int(tokens[-1]) % (self.vocab_size - 1) + 1] = 12.0
        return row


def test_long_spans_take_few_passes() -> None:
    model = Copier(64, order=40)
    passage = tuple(range(1, 63))
    found = run(model, ExactExtract(passage), [5, 9])
    assert found.generated == [*range(10, 42), 0]
    # One token per pass would take 33.
    assert found.trace.passes <= 8


def test_a_greedy_answer_that_is_a_span_is_never_better() -> None:
    for seed in range(20):
        model = TableModel(6, order=2, seed=seed, spread=4.0)
        (greedy,) = decode(model, [[1, 2]], eos_ids=END, max_new_tokens=8)
        if greedy.finish_reason == "stop" and len(greedy.generated) > 1:
            passage = [5, *greedy.generated[:-1], 3]
            found = run(model, ExactExtract(tuple(passage)), [1, 2])
            assert found.score >= score(model, [1, 2], greedy.generated[:-1], END) - 1e-9


def test_lengths_beginnings_and_ends() -> None:
    model, passage = TableModel(6, order=3, seed=4, spread=4.0), [2, 3, 5, 1, 4, 2, 5, 3, 1, 2]
    for longest in (1, 2, 4):
        expected = brute(model, [1], passage, longest=longest)
        assert run(model, ExactExtract(tuple(passage)), [1], max_new_tokens=longest + 1).generated[:-1] == expected[1]
    ends = (3, 4)
    expected = brute(model, [1], passage, end=ends)
    found = run(model, ExactExtract(tuple(passage), end=ends), [1])
    assert found.generated[:-1] == expected[1] and found.generated[-1] in ends and found.finish_reason == "stop"
    assert found.score == pytest.approx(expected[0])
    apart = max((brute(model, [1], piece) for piece in ([2], [5, 1, 4, 2, 5], [1, 2])), key=lambda found: found[0])
    assert run(model, ExactExtract(tuple(passage), excluded=(3,)), [1]).generated[:-1] == apart[1]
    # Of a beginning only what begins with its first token counts.
    begun = max((score(model, [1], passage[:n], END), passage[:n]) for n in range(1, 11))
    assert run(model, ExactExtract((0,), beginnings=(tuple(passage),)), [1]).generated[:-1] == begun[1]
    assert run(model, ExactExtract(), passage).generated[:-1] == brute(model, passage, passage)[1]


@pytest.mark.parametrize(
    ("settings", "request_settings", "message"),
    [
        ({}, {"eos_ids": ()}, "a token that ends an answer"),
        ({}, {"sampler": Sampler.from_settings(repetition_penalty=1.2)}, "leave masks, penalties and constraints out"),
        ({}, {"stop": ("a",)}, "leave stop out"),
        ({}, {"max_new_tokens": 1}, "max_new_tokens to 2"),
        ({"passage": (1, 9)}, {}, "outside the model's vocabulary of 6"),
        ({"passage": (0, 0)}, {}, "no span to extract"),
    ],
)
def test_what_it_cannot_do_is_refused(settings, request_settings, message: str) -> None:
    with pytest.raises((SettingsError, PromptError), match=message):
        run(TableModel(6), ExactExtract(**{"passage": (1, 2)} | settings), [1], **request_settings)
    with pytest.raises(SettingsError, match="rows >= 1"):
        ExactExtract(rows=0)


def test_a_text_is_spelt_as_in_the_passage_and_as_an_answer() -> None:
    class Words:
        """One token per word; a word after a space is another token than at the beginning."""

        special_ids = frozenset({7})

        def encode(self, text: str, *, special: bool) -> list[int]:
            pieces = re.findall(r"\s?\S+", text)
            return [sum(map(ord, piece.strip())) % 100 + 100 * piece.startswith(" ") for piece in pieces]

    text = " ".join(f"{chr(97 + n % 26)}{n}" for n in range(300))
    bound, whole = ExactExtract(text).bind(Words()), Words().encode(text, special=False)
    assert list(bound.passage) == whole and len(bound.beginnings) == 300
    for n, begun in enumerate(bound.beginnings):
        assert list(begun) == [whole[n] % 100, *whole[n + 1 : n + 256]]
    assert ExactExtract((1, 2)).bind(Words()) == ExactExtract((1, 2))
    assert ExactExtract().bind(Words()) == ExactExtract(excluded=(7,))
