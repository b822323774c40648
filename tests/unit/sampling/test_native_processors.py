"""Tokens that the kernels choose are those that processors and noise choose in Python."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from decodery.core.native.kernels import address, library
from decodery.core.native.structs import SamplingStruct
from decodery.sampling.constraint import Constrained, Constraint
from decodery.sampling.logits_processor import Context
from decodery.sampling.native_processors import NativeProcessors, native_processors
from decodery.sampling.sampler import ORDERS, Sampler
from decodery.sampling.typical import Typical

VOCAB = 500
POSSIBLE: dict[str, list[Any]] = {
    "temperature": [0.3, 0.8, 1.0, 2.0], "top_k": [1, 5, 40, 80], "top_p": [1e-6, 0.5, 0.9, 0.999],
    "min_p": [0.01, 0.3, 1.0], "repetition_penalty": [0.8, 1.5], "frequency_penalty": [-0.3, 0.5],
    "presence_penalty": [0.4], "logit_bias": [{3: 4.0, 400: -100.0}],
}  # fmt: skip


class Scattered(Constraint):
    """Allows about a third of the tokens after each text."""

    def __init__(self, seed: int, bonus: float | None) -> None:
        self.seed, self.bonus = seed, bonus

    def init(self, prompt: Any) -> tuple[int, ...]:
        return (self.seed,)

    def allowed(self, state: tuple[int, ...]) -> np.ndarray:
        return np.random.default_rng(state).random(VOCAB) < 0.3

    def advance(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*state, token)

    def is_complete(self, state: tuple[int, ...]) -> bool:
        return False


def chosen(sampler: Sampler, logits: np.ndarray, contexts: list[Context], tokens: list[int], parents: list[int]) -> Any:
    """What the kernels choose at one tree after each context, whose rows are `logits` [texts, rows, vocab]."""
    n, rows = len(contexts), len(tokens)
    processors = [native_processors(sampler, VOCAB) for _ in range(n)]
    for each, context in zip(processors, contexts, strict=True):
        assert each is not None
        if each.counts or each.masks is not None:
            each.follow(context.state)
    arrays = {
        "logits": np.ascontiguousarray(logits.reshape(-1, VOCAB)),
        "tokens": np.tile(np.array(tokens, dtype=np.int64), n),
        "parents": np.tile(np.array(parents, dtype=np.int32), n),
        "first": np.arange(0, n * rows + 1, rows, dtype=np.int32),
        "seeds": np.array([context.seed for context in contexts], dtype=np.uint64),
        "positions": np.array([context.position for context in contexts], dtype=np.int64),
        "processors": np.array([each.address for each in processors], dtype=np.uint64),  # type: ignore[union-attr]
        "processor_counts": np.array([each.count for each in processors], dtype=np.int32),  # type: ignore[union-attr]
        "greedy": np.full(n, sampler.greedy, dtype=np.uint8), "paths": np.zeros(n * rows, dtype=np.int32),
        "accepted": np.zeros(n, dtype=np.int32), "chosen": np.zeros(n, dtype=np.int64),
    }  # fmt: skip
    struct = SamplingStruct(texts=n, vocab=VOCAB, limit=VOCAB)
    for name, array in arrays.items():
        setattr(struct, name, address(array, array.dtype.type, *array.shape))
    lib = library()
    paths, accepted = arrays["paths"].reshape(n, rows), arrays["accepted"]
    assert lib is not None and lib.decodery_sample(ctypes.addressof(struct)) == 0
    while len(waiting := np.flatnonzero(accepted < -1)):
        for text in waiting.tolist():
            node = int(paths[text, -3 - accepted[text]]) if accepted[text] < -2 else 0
            processors[text].masks.compute(node, parents[node], tokens[node])  # type: ignore[union-attr]
        struct.waiting = len(waiting)
        assert lib.decodery_sample(ctypes.addressof(struct)) == 0
    return [
        None if count < 0 else (paths[text, :count].tolist(), int(arrays["chosen"][text]))
        for text, count in enumerate(arrays["accepted"].tolist())
    ]


def walked(sampler: Sampler, logits: np.ndarray, context: Context, tokens: list[int], parents: list[int]) -> Any:
    """The same in Python."""
    path, node = list[int](), 0
    while True:
        law = sampler.law(torch.from_numpy(logits[node : node + 1].copy()), [context])
        token = int(sampler.pick(law, context.seed, [context.position])[0])
        child = next((n for n in range(1, len(tokens)) if (parents[n], tokens[n]) == (node, token)), None)
        if child is None:
            return path, token
        context = sampler.extend(context, token, torch.from_numpy(logits[node]))
        path.append(child)
        node = child


def test_kernels_choose_what_processors_and_noise_choose() -> None:
    random = np.random.default_rng(5)
    known, differ, paths = 0, 0, 0
    for _ in range(60):
        settings = {
            name: values[random.integers(len(values))] for name, values in POSSIBLE.items() if random.random() < 0.5
        }
        sampler = Sampler.from_settings(
            order=str(random.choice(list(ORDERS))), min_new_tokens=4, eos_ids=(7,), **settings
        )
        if random.random() < 0.5:
            constraint = Scattered(int(random.integers(99)), None if random.random() < 0.7 else 2.5)
            sampler = Sampler((Constrained(constraint), *sampler.processors))
        logits = random.normal(size=(3, 4, VOCAB)).astype(np.float32) * float(random.choice([0.3, 2, 6]))
        contexts = []
        for _ in range(3):
            prompt, output = (
                random.integers(0, VOCAB, int(n)).tolist() for n in (random.integers(1, 90), random.integers(0, 8))
            )
            state = sampler.init(prompt)
            for token in output:
                state = sampler.follow(state, token)
            contexts.append(Context(len(prompt), prompt + output, state, int(random.integers(1 << 62))))
        # A tree that guesses what the first text will choose, so that paths are walked.
        _, first = walked(sampler, logits[0], contexts[0], [0], [-1])
        tokens, parents = [0, first, (first + 1) % VOCAB, first], [-1, 0, 0, 1]
        expected = [
            walked(sampler, rows, context, tokens, parents) for rows, context in zip(logits, contexts, strict=True)
        ]
        found = chosen(sampler, logits, contexts, tokens, parents)
        known += sum(each is not None for each in found)
        differ += sum(each is not None and each != other for each, other in zip(found, expected, strict=True))
        paths += sum(bool(each and each[0]) for each in found)
    assert differ == 0 and known >= 170 and paths >= 50


def test_numbers_that_are_none_are_left_to_python() -> None:
    sampler = Sampler.from_settings(temperature=1.0, top_p=0.9)
    logits = np.zeros((1, 1, VOCAB), dtype=np.float32)
    logits[0, 0, 17] = np.nan
    assert chosen(sampler, logits, [Context(1, [2])], [0], [-1]) == [None]
    logits[0, 0, 17] = np.inf
    assert chosen(Sampler.from_settings(), logits, [Context(1, [2])], [0], [-1]) == [None]


@pytest.mark.parametrize(
    "sampler",
    [
        Sampler([Typical(0.5)]),
        Sampler.from_settings(temperature=1.0, no_repeat_ngram=2),
        Sampler(["top-p:p=0.5", "logit-bias:bias=3:2"]),
        Sampler.from_settings(logit_bias={VOCAB: 1.0}),
        Sampler([Constrained(Scattered(1, None)), Constrained(Scattered(2, None))]),
    ],
    ids=["typical", "n-grams", "an edit after a truncation", "a bias beyond the vocabulary", "two masks"],
)
def test_what_kernels_do_not_know_is_left_to_python(sampler: Sampler) -> None:
    assert native_processors(sampler, VOCAB) is None


def test_neutral_processors_are_left_out() -> None:
    found = native_processors(Sampler(["top-p:p=1", "temperature:t=0.5"]), VOCAB)
    assert isinstance(found, NativeProcessors) and found.count == 1
