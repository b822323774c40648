"""Rows that a vocabulary was padded with: ids that no token stands for are never written, whoever draws."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import models

from covering import some
from decodery.core.requirements import Provides
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.extras.superposed.ngrams import NGrams
from decodery.extras.superposed.superposed import Superposition, superpose
from decodery.models.batch import Batch, Segment
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.models.tokenizers.vocabularies import Padding, excluded, padding_of, speaks
from decodery.models.torch.encoder_decoder import EncoderDecoder
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense
from decodery.sampling import Sampler
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter
from decodery.step.forward_request import run_sync
from decodery.step.level_choice import choose_next
from decodery.step.look_ahead import Level, Look
from decodery.step.sequence import Sequence
from decodery.testing import tiny_transformer
from methods import DRAFTERS, DRAWING, KVS, LOSSY_RULES, RULES, SEARCHES, SOURCES, TWO_MODELS, fits
from tiny_encoder import tiny_encoder_decoder

VOCAB, PADDED = 64, {17, 60, 61, 62, 63}
TOKENIZER = Tokenizer(
    tokenizers.Tokenizer(models.WordLevel({f"w{id}": id for id in range(VOCAB) if id not in PADDED}, unk_token="w0"))
)
PROMPT = [5, 9, 2, 33, 5, 9, 2]
GREEDY, DRAWN = Sampler.from_settings(), Sampler.from_settings(temperature=1.2, top_p=0.98)


def padded(seed: int) -> Transformer:
    """A model that likes nothing better than its padding."""
    model = tiny_transformer(seed)
    assert isinstance(model.weights.head, Dense)
    bias = torch.zeros(VOCAB, dtype=torch.float64)
    bias[sorted(PADDED)] = 30.0
    head = Dense(model.weights.head.weight, bias.to(model.weights.head.weight.dtype))
    made = Transformer(model.config, replace(model.weights, head=head))
    speaks(made, TOKENIZER)
    return made


MODEL, OTHER = padded(0), padded(1)


@dataclass(frozen=True)
class Drafts(Drafter):
    """Drafts nothing but padding, and is sure of it."""

    provides = Provides(drafts=("deterministic",))

    def propose(self, seq: Sequence, budget: Budget) -> DraftTree:
        tree = DraftTree.chain(seq.last_token, [61, 17][: min(budget.nodes, budget.depth)])
        return replace(tree, logq=np.zeros(len(tree)))


def written(sampler: Sampler = DRAWN, **settings: Any) -> Sequence:
    engine = Engine(MODEL)
    seq = engine.submit(Request(PROMPT, sampler=sampler, **{"max_new_tokens": 12, "seed": 4, "logprobs": 2} | settings))
    engine.run([seq])
    return seq


def check(seq: Sequence) -> None:
    assert seq.generated and PADDED.isdisjoint(seq.generated)


PLAIN = {sampler: written(sampler).generated for sampler in (GREEDY, DRAWN)}


def test_the_models_padding_is_known() -> None:
    found = padding_of(MODEL)
    assert found is not None and found.first == 60 and found.others.tolist() == [17]
    assert [id for id in range(VOCAB) if found.holds(id)] == sorted(PADDED)
    assert padding_of(tiny_transformer(0)) is None
    ends = Tokenizer(TOKENIZER.backend, eos_ids=(61,))
    spelt = tokenizers.Tokenizer(models.WordLevel({"w0": 0, "[PAD1]": 1, "[PAD3]": 2, "[PAD]": 3}, unk_token="w0"))
    assert Tokenizer(spelt).unknown(5).tolist() == [1, 4]
    # An id that ends texts is no padding, whatever it is spelt like.
    assert ends.unknown(VOCAB).tolist() == [17, 60, 62, 63] and TOKENIZER.unknown(60).tolist() == [17]


def test_what_is_written_is_what_the_model_says_without_it() -> None:
    for sampler, tokens in PLAIN.items():
        seq = written(sampler)
        assert seq.generated == tokens
        check(seq)
        # Log-probabilities are those of a distribution over tokens.
        for each in seq.token_logprobs:
            assert each.logprob > -15 and PADDED.isdisjoint(id for id, _ in each.top)
    bare, tokens = tiny_transformer(0), list(PROMPT)
    for _ in range(12):
        logits = bare.forward(Batch([Segment.chunk(tokens, bare.new_cache())])).logits[-1]
        logits[sorted(PADDED)] = -torch.inf
        tokens.append(int(logits.argmax()))
    assert PLAIN[GREEDY] == tokens[len(PROMPT) :]


@pytest.mark.parametrize("name", some(list(DRAFTERS), 16))
def test_drafters_write_none(name: str) -> None:
    for sampler, expected in PLAIN.items():
        assert written(sampler, drafter=DRAFTERS[name](OTHER)).generated == expected


@pytest.mark.parametrize("name", [*RULES, *LOSSY_RULES])
def test_rules_accept_none(name: str) -> None:
    rule = (RULES | LOSSY_RULES)[name]
    for drafter in (DRAFTERS["draft-model"](OTHER), Drafts()):
        if fits(drafter, rule):
            check(written(GREEDY if rule.requirements.greedy else DRAWN, drafter=drafter, acceptance_rule=rule))


@pytest.mark.parametrize("name", SEARCHES)
def test_searches_write_none(name: str) -> None:
    search = SEARCHES[name]
    second = {"model": OTHER} if name in TWO_MODELS else {}
    sampler = DRAWN if name in DRAWING else GREEDY
    request = Request(PROMPT, sampler=sampler, max_new_tokens=12, seed=4, eos_ids=(3,))
    for seq in replace(search, **second).run(Engine(MODEL), request):  # type: ignore[type-var]
        assert PADDED.isdisjoint(seq.generated)


@pytest.mark.parametrize("name", SOURCES)
def test_sources_say_none(name: str) -> None:
    check(written(logits_source=SOURCES[name](OTHER)))


@pytest.mark.parametrize("name", KVS)
def test_texts_under_a_cache_policy_hold_none(name: str) -> None:
    check(written(cache_policy=KVS[name]))


def test_suggestions_and_prompts_hold_none() -> None:
    for draft in run_sync(superpose(MODEL, PROMPT, 3, length=6, settings=Superposition.published(3), ngrams=NGrams())):
        assert draft.tokens and PADDED.isdisjoint(draft.tokens)
    seq = written(prompt_logprobs=2)
    assert len(seq.prompt_token_logprobs) == len(PROMPT) - 1
    assert all(PADDED.isdisjoint(id for id, _ in each.top) for each in seq.prompt_token_logprobs)


def test_a_models_own_tokenizer_counts_before_that_of_another_with_the_same_vocabulary() -> None:
    whole = tokenizers.Tokenizer(models.WordLevel({f"w{id}": id for id in range(VOCAB)}, unk_token="w0"))
    first, second, third = (
        Transformer(replace(MODEL.config, vocabulary="one of this test"), MODEL.weights) for _ in range(3)
    )
    speaks(first, TOKENIZER)
    speaks(second, Tokenizer(whole))
    found = padding_of(first), padding_of(second), padding_of(third)
    assert found[0] is not None and found[1] is None and found[2] is not None


def test_what_an_encoders_text_is_drawn_from_holds_none() -> None:
    made = tiny_encoder_decoder()
    # Its vocabulary is the puzzles', and TOKENIZER is not theirs: no other model of this process may take it for it.
    model = EncoderDecoder(replace(made.config, vocabulary=""), made.weights)
    speaks(model, TOKENIZER)
    logits = torch.zeros(2, model.vocab_size, dtype=torch.float32, device="cpu")
    wanted = [id for id in sorted(PADDED | set(range(VOCAB, model.vocab_size))) if id < model.vocab_size]
    assert excluded(model, logits) is logits
    assert torch.nonzero(logits[1] == -torch.inf).flatten().tolist() == wanted != []


def test_looks_below_texts_exclude_each_its_own() -> None:
    engine, plan = Engine(tiny_transformer(0)), (Level(1, 1),)
    looks = []
    for padding in (None, Padding(60, np.zeros(0, dtype=np.int64)), Padding(VOCAB, np.array([63]))):
        seq: Any = engine.submit(Request(PROMPT))
        looks.append(Look(seq, plan, "deterministic", None, padding))
    rows = torch.arange(VOCAB, dtype=torch.float32)[None]
    choose_next([(look, rows.clone()) for look in looks])
    assert [int(look.found[0][0][0, 0]) for look in looks] == [63, 59, 62]
