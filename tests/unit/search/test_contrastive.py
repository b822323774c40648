"""Contrastive search against the published algorithm, run slowly on a model of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from covering import in_turn
from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.logits_sources.guidance import Guidance
from decodery.models.loaders.load import load
from decodery.models.protocol import Capabilities
from decodery.sampling import Sampler
from decodery.search.contrastive_search import ContrastiveSearch
from decodery.step.sequence import Sequence
from decodery.testing import TableModel, decode, tiny_transformer
from tiny_models import make_model, random_ids, save, without_tokenizer

PROMPTS = [random_ids(n, seed=n).tolist() for n in (1, 6, 17)]


def run(model, search, prompt, **settings) -> Sequence:
    (seq,) = search.run(Engine(model, prefill_chunk=7), Request(prompt, **settings))
    return seq


def slow(theirs, prompt: list[int], k: int, alpha: float, length: int) -> tuple[list[int], float]:
    """The paper's rule, every text read anew; also the smallest lead of a winner over the next candidate."""
    tokens, closest = list(prompt), float("inf")
    for _ in range(length):
        with torch.inference_mode():
            p = theirs(torch.tensor([tokens])).logits[0, -1].softmax(-1)
            best = p.topk(k)
            texts = torch.tensor([[*tokens, token] for token in best.indices.tolist()])
            hidden = theirs(texts, output_hidden_states=True).hidden_states[-1]
        cosines = torch.cosine_similarity(hidden[:, -1:], hidden[:, :-1], dim=-1)
        score = (1 - alpha) * best.values - alpha * cosines.amax(-1)
        leads = score.sort(descending=True).values
        closest = min(closest, float(leads[0] - leads[min(1, k - 1)]) if k > 1 else 1.0)
        tokens.append(int(best.indices[score.argmax()]))
    return tokens[len(prompt) :], closest


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """By family: a model of transformers, and the same one here."""
    found = {}
    for family in ("llama", "gemma3_text"):
        theirs = make_model(family, seed=3)
        folder = save(theirs, tmp_path_factory.mktemp(family))
        found[family] = theirs, without_tokenizer(load(folder, dtype="float32", device="cpu").model)
    return found


SETTINGS = [f"{k} {alpha}" for k, alpha in ((4, 0.6), (5, 0.3), (8, 1.0), (3, 0.0), (1, 0.6))]


@pytest.mark.parametrize(("settings", "family"), in_turn(SETTINGS, ["llama", "gemma3_text"]))
def test_it_is_the_published_algorithm(settings: str, family: str, pairs: dict[str, tuple[Any, Any]]) -> None:
    (theirs, ours), (k, alpha) = pairs[family], (int(settings.split()[0]), float(settings.split()[1]))
    for prompt in PROMPTS:
        expected, lead = slow(theirs, prompt, k, alpha, 10)
        assert lead > 1e-5, "a near-tie in the reference says nothing"
        found = run(ours, ContrastiveSearch(k, alpha), prompt, max_new_tokens=10)
        assert found.generated == expected


def test_without_penalty_it_is_greedy_decoding() -> None:
    model = tiny_transformer(5)
    penalties = Sampler.from_settings(repetition_penalty=1.3, no_repeat_ngram=2)
    for sampler in (Sampler.from_settings(), penalties):
        settings = {"sampler": sampler, "max_new_tokens": 20, "eos_ids": [7, 20]}
        (plain,) = decode(model, [[3, 1, 4]], **settings)
        found = run(model, ContrastiveSearch(5, 0.0), [3, 1, 4], **settings)
        assert (found.generated, found.finish_reason) == (plain.generated, plain.finish_reason)


def test_candidates_are_siblings_in_one_pass_per_token() -> None:
    found = run(tiny_transformer(5), ContrastiveSearch(6), list(range(10)), max_new_tokens=9)
    assert [step.rows for step in found.trace.steps] == [7, 3] + [6] * 9
    assert found.trace.passes == 9 and found.cache.next_position == len(found.tokens) - 1


def test_the_penalty_keeps_states_apart() -> None:
    """The larger alpha, the less a text's tokens look like each other to the model."""
    model = tiny_transformer(5)
    likeness = []
    for alpha in (0.0, 0.6, 1.0):
        seq = run(model, ContrastiveSearch(8, alpha), [3, 1, 4], max_new_tokens=30)
        likeness.append(len(set(seq.generated)))
    assert likeness[0] < likeness[1] <= likeness[2]


def test_excluded_tokens_never_win() -> None:
    allowed = 11
    bias = {token: -1e9 for token in range(64) if token != allowed}
    sampler = Sampler.from_settings(logit_bias=bias)
    found = run(tiny_transformer(5), ContrastiveSearch(4, 1.0), [3], sampler=sampler, max_new_tokens=3)
    assert found.generated == [allowed] * 3


def test_what_it_cannot_do_is_refused() -> None:
    closed = TableModel(4)
    closed.capabilities = Capabilities(exact_rows=True, states=True)
    with pytest.raises(UnsupportedModel, match="final norm and the head by themselves, which TableModel does not"):
        run(closed, ContrastiveSearch(), [1])
    with pytest.raises(SettingsError, match="leave the logits source out"):
        run(tiny_transformer(0), ContrastiveSearch(), [1], logits_source=Guidance())
    for make, message in ((lambda: ContrastiveSearch(0), "k >= 1"), (lambda: ContrastiveSearch(4, 1.5), "alpha")):
        with pytest.raises(SettingsError, match=message):
            make()
    assert np.isfinite(ContrastiveSearch().alpha)
