"""Draft models that draft what both vocabularies have: the tokens meant, the distributions claimed, the texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from decodery.core.errors import SettingsError, VocabularyMismatch
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.tokenizers.shared_tokens import SharedTokens, shared_tokens
from decodery.models.tokenizers.token_bytes import byte_alphabet
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.models.tokenizers.vocabularies import speaks
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense
from decodery.sampling.sampler import Sampler
from decodery.speculative.drafters.auto import Auto
from decodery.speculative.drafters.tli import TLI
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter_memory import Memory
from decodery.testing import LawBroken, check_distribution, check_identical, decode, tiny_transformer

MERGES = [("a", "b"), ("ab", "c"), ("Ġ", "a"), ("Ġa", "b"), ("Ã", "©")]
DRAWN = Sampler.from_settings(temperature=1.0)


def tokenizer(letters: list[str], merges: Sequence[tuple[str, str]] = (), special: str = "<end>") -> Tokenizer:
    vocabulary = {letter: id for id, letter in enumerate(letters)}
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([special])
    return Tokenizer(backend, eos_ids=(len(vocabulary),))


def model(own: Tokenizer, layers: int, order: np.ndarray | None = None) -> Transformer:
    """A random model; with an order, that of the other tokens whose new ids it gives."""
    made = tiny_transformer(0, vocab_size=own.backend.get_vocab_size(), num_layers=layers)
    weights = made.weights
    if order is not None:
        assert isinstance(weights.head, Dense)
        rows = torch.from_numpy(np.argsort(order))
        weights = replace(weights, embedding=weights.embedding[rows], head=Dense(weights.head.weight[rows]))
    found = Transformer(replace(made.config, vocabulary=own.fingerprint(), eos_ids=own.eos_ids), weights)
    speaks(found, own)
    return found


BYTES, LETTERS = sorted(byte_alphabet()), list("abcdefghijklmnop")
OWN, OTHER = tokenizer(BYTES), tokenizer(BYTES[::-1], MERGES, "<stop>")
TARGET, DRAFT = model(OWN, 2), model(OTHER, 1)


def test_tokens_are_shared_whose_bytes_are_equal() -> None:
    found = shared_tokens(OTHER, OWN, (DRAFT.vocab_size, TARGET.vocab_size))
    assert len(found.own) == 256 and len(set(found.other.tolist())) == 256
    assert all(OTHER.piece(own) == OWN.piece(other) for own, other in zip(found.own, found.other, strict=True))
    assert (found.others[found.own] == found.other).all() and (found.others >= 0).sum() == 256
    row = torch.arange(TARGET.vocab_size, dtype=torch.float64)
    logits = found.translated(row[None])[0]
    assert torch.equal(logits[found.own], row[found.other])
    assert int((logits == -torch.inf).sum()) == DRAFT.vocab_size - 256


def test_a_byte_and_its_letter_are_one_text() -> None:
    backend = tokenizers.Tokenizer(models.BPE({"<0x41>": 0, "A": 1, "B": 2}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    doubled = Tokenizer(backend)
    assert doubled.piece(0) == doubled.piece(1) == b"A"
    found = shared_tokens(doubled, OWN, (3, TARGET.vocab_size))
    assert found.own.tolist() == [1, 2] and found.other.tolist() == [OWN.encode("A")[0], OWN.encode("B")[0]]


@dataclass(frozen=True)
class Shifted(TLI):
    """Takes every shared token for the next one."""

    def start(self, seq: Any) -> Any:
        state = super().start(seq)
        own, other = state.shared.own, state.shared.other
        return replace(state, shared=SharedTokens(own, np.roll(other, 1), state.shared.size))


def test_a_model_with_its_tokens_renumbered_drafts_the_text_itself() -> None:
    own, renumbered = tokenizer(LETTERS), tokenizer(LETTERS[::-1])
    order = np.array([*range(len(LETTERS) - 1, -1, -1), len(LETTERS)])
    target, draft = model(own, 2), model(renumbered, 2, order)
    prompts = [own.encode(text) for text in ("abcabd", "kj", "p")]

    def counted(drafter: TLI) -> tuple[int, int]:
        drafted = check_identical(
            target, prompts, drafter=drafter, sampler=DRAWN, max_new_tokens=12, seeds=(0,), eos_ids=own.eos_ids,
            tested="drafted",
        )  # fmt: skip
        # Ends of texts are never drafted: the last step alone may be in vain.
        steps = [step for seq in drafted for step in seq.trace.steps[:-1]]
        return sum(step.accepted for step in steps), sum(step.nodes for step in steps)

    right, drafted = counted(TLI(draft))
    wrong, shifted = counted(Shifted(draft))
    assert right == drafted > 0
    assert wrong < shifted / 2


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("tree_policy", [None, "eagle-2(nodes=6)"])
def test_texts_are_those_of_plain_decoding(swapped: bool, tree_policy: str | None) -> None:
    target, draft, own = (DRAFT, TARGET, OTHER) if swapped else (TARGET, DRAFT, OWN)
    prompts = [own.encode(prompt) for prompt in ("abc ab 12 é", "x", " ab ab ab")]
    drafter = TLI(draft, tree_policy=tree_policy)
    for sampler in (None, DRAWN):
        check_identical(
            target, prompts, drafter=drafter, sampler=sampler, max_new_tokens=10, seeds=(0,), tested="drafted"
        )


FEW, FEWER = tokenizer(["a", "b"]), tokenizer(["b", "x", "a"], special="<stop>")
SMALL, SMALLER = model(FEW, 1), model(FEWER, 1)


@dataclass(frozen=True)
class Unnormalised(TLI):
    """Claims less probability for its drafts than they were drawn with."""

    def propose(self, seq: Any, budget: Any) -> Any:
        tree: DraftTree = yield from super().propose(seq, budget)
        return replace(tree, distributions={node: law * 0.1 for node, law in tree.distributions.items()})


def test_rules_that_want_probabilities_get_those_drafts_were_drawn_with() -> None:
    flat = Sampler.from_settings(temperature=5.0)

    def check(drafter: TLI) -> None:
        check_distribution(
            SMALL, FEW.encode("abab"), drafter=drafter, acceptance_rule="rejection", sampler=flat, length=4, draws=250
        )

    check(TLI(SMALLER, length=3))
    with pytest.raises(LawBroken, match="do not follow"):
        check(Unnormalised(SMALLER, length=3))


def test_models_that_share_nothing_are_refused() -> None:
    with pytest.raises(VocabularyMismatch, match="share no token"):
        Engine(SMALL).submit(Request([0], drafter=TLI(model(tokenizer(["x", "y"]), 1))))
    with pytest.raises(SettingsError, match="tli needs the tokenizers of both models"):
        Engine(tiny_transformer(1)).submit(Request([1], drafter=TLI(DRAFT)))


def test_a_long_text_is_read_up_to_the_draft_models_context() -> None:
    prompt = OWN.encode("abc " * 4)
    short = Transformer(replace(DRAFT.config, max_positions=12), DRAFT.weights)
    speaks(short, OTHER)
    (found,) = decode(TARGET, [prompt], drafter=TLI(short), max_new_tokens=4)
    (plain,) = decode(TARGET, [prompt], max_new_tokens=4)
    assert found.generated == plain.generated


def advised(
    target: Transformer, draft: Transformer | None, prompt: list[int], new: int, sampler: Sampler = DRAWN
) -> Any:
    """A drawn text of `auto` whose second model is believed to take a fiftieth of a pass, by given prices."""
    loop = Engine(target, memory=Memory(), pass_seconds=lambda context: 1.0 + 0.01 * np.arange(1024))
    seq = loop.submit(Request(prompt, new, drafter=Auto(warm=None, model=draft), sampler=sampler))
    advice = seq.states[seq.request.drafter].advice
    if advice is not None:
        advice.costs.share = 0.02
    loop.run([seq])
    return seq, advice


def test_auto_asks_a_model_of_another_vocabulary() -> None:
    own, renumbered = tokenizer(LETTERS), tokenizer(LETTERS[::-1])
    order = np.array([*range(len(LETTERS) - 1, -1, -1), len(LETTERS)])
    # Hot enough that little of the text comes again.
    target, prompt, hot = model(own, 2), own.encode("abcabd"), Sampler.from_settings(temperature=4.0)
    alone, _ = advised(target, None, prompt, 120, hot)
    both, _ = advised(target, model(renumbered, 2, order), prompt, 120, hot)
    assert both.tokens == alone.tokens and both.trace.passes < 0.8 * alone.trace.passes


def test_a_model_of_another_vocabulary_that_is_never_right_costs_little() -> None:
    """Where the text ends inside a character, too: its tokens are drawn byte by byte."""
    prompt = OWN.encode("abc é")
    alone, _ = advised(TARGET, None, prompt, 200)
    both, advice = advised(TARGET, DRAFT, prompt, 200)
    assert both.tokens == alone.tokens
    assert advice.costs.taken > 0 and advice.costs.taken - advice.costs.brought < 0.01 * advice.costs.passed


def test_auto_refuses_a_model_that_shares_nothing() -> None:
    with pytest.raises(VocabularyMismatch, match="share no token, and auto drafts shared ones alone"):
        Engine(SMALL).submit(Request([0], drafter=Auto(model=model(tokenizer(["x", "y"]), 1))))
