"""Reasoning parts: a budget that holds however marks are cut into tokens, and a constraint of the answer alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from decodery.constraints import Choice, Reasoning, Regex
from decodery.constraints.reasoning import ReasoningConstraint
from decodery.core.errors import ConstraintError, SettingsError
from decodery.models.tokenizers.vocabulary import Vocabulary
from decodery.sampling import Sampler
from decodery.sampling.constraint import Constrained
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.testing import check_constraint, check_identical, tiny_transformer

ANSWERS = ("yes", "no", "<no")
WHOLE = [b"<think>", b"</think>", b"k>\n", b"</", b"think", b"\n\n"]


def vocabulary(*pieces: bytes, special: frozenset[int] = frozenset()) -> Vocabulary:
    """A token per byte, these ones, and an end."""
    known = [bytes([byte]) for byte in range(256)] + [*pieces, b"</s>"]
    end = len(known) - 1
    return Vocabulary(known, special | {end}, (end,), lambda text: list(text.encode()))


BYTES, WORDS = vocabulary(), vocabulary(*WHOLE, special=frozenset({256, 257}))


def compiled(known: Vocabulary = BYTES, **settings: Any) -> ReasoningConstraint:
    found = Reasoning(**settings).compile(known)
    assert isinstance(found, ReasoningConstraint)
    return found


def walked(constraint: ReasoningConstraint, text: bytes, prompt: bytes = b"") -> Any:
    state = constraint.init(list(prompt))
    for byte in text:
        assert constraint.accepts(state, byte) and constraint.allowed(state)[byte], (text, byte)
        state = constraint.advance(state, byte)
    return state


def allowed(constraint: ReasoningConstraint, text: bytes, prompt: bytes = b"") -> list[int]:
    return np.flatnonzero(constraint.allowed(walked(constraint, text, prompt))).tolist()


@pytest.mark.parametrize("known", [BYTES, WORDS], ids=["bytes", "words"])
@pytest.mark.parametrize("prompt", [b"", b"x<think>\n"], ids=["before", "inside"])
@pytest.mark.parametrize("answer", [None, Choice(ANSWERS)], ids=["free", "bound"])
def test_every_state_goes_on_and_the_budget_holds(known: Vocabulary, prompt: bytes, answer: Any) -> None:
    constraint, rng = compiled(known, budget=5, answer=answer), np.random.default_rng(3)
    if not prompt:
        check_constraint(constraint, known.eos_ids, walks=20, length=60)
    for _ in range(60):
        state, text = constraint.init(list(prompt)), b"" if prompt else b"<think>"
        state = state if prompt else walked(constraint, text)
        tokens = list[int]()
        while len(tokens) < 40 and not (tokens and tokens[-1] in known.eos_ids):
            tokens.append(int(rng.choice(np.flatnonzero(constraint.allowed(state)))))
            state = constraint.advance(state, tokens[-1])
        said = b"".join(known.pieces[token] for token in tokens)
        if answer is not None:
            thought, mark, rest = said.partition(b"</think>")
            assert mark and rest.removesuffix(b"</s>").decode() in ANSWERS
            assert len(thought) <= 5 * max(map(len, WHOLE))
        # A mark that is begun takes its own tokens, no more.
        elif b"</s>" not in said:
            assert b"</think>" in b"".join(known.pieces[token] for token in tokens[: 5 + 8])


def test_reasoning_is_free_until_its_budget_is_spent() -> None:
    free = compiled(budget=3)
    state = walked(free, b" <think>ab")
    assert free.idle(state) and free.is_complete(state)
    assert allowed(free, b"<think>abc") == [ord("<")] and allowed(free, b"<think>ab<") == [ord("/")]
    assert allowed(free, b"<think>abc</think") == [ord(">")]
    assert free.idle(walked(free, b"<think>ab</think>and <think>so on")) and free.idle(walked(free, b"no <think>abcd"))
    none = compiled(budget=0)
    assert allowed(none, b"", b"<think>\n") == [ord("<")] and not none.idle(walked(none, b"<think>"))
    # One token ends it where the model has one.
    assert np.flatnonzero(compiled(WORDS, budget=0).allowed(compiled(WORDS, budget=0).init([256]))).tolist() == [257]


def test_an_answer_is_bound_after_the_reasoning_and_from_the_first_token_without_one() -> None:
    bound = compiled(answer=Choice(ANSWERS))
    assert allowed(bound, b"") == sorted(map(ord, "<yn")) and allowed(bound, b"<") == sorted(map(ord, "nt"))
    assert bound.is_complete(walked(bound, b"<no")) and not bound.is_complete(walked(bound, b"<think>no"))
    thinking = allowed(bound, b"<think>x")
    assert BYTES.eos_ids[0] not in thinking and len(thinking) == 256
    assert allowed(bound, b"<think>x</think>") == sorted(map(ord, "<yn"))
    one = compiled(answer=Regex("no"))
    assert one.completion(walked(one, b"<think>x</")) == [*b"think>", *b"no"]
    # A token that would go on after the mark hides where the answer begins.
    words = compiled(WORDS, answer=Choice(ANSWERS))
    state = words.init([256])
    for token in (259, *b"thin"):
        state = words.advance(state, token)
    mask = words.allowed(state)
    assert not mask[258] and mask[ord("k")] and words.allowed(words.init([256]))[258]


def test_drafts_change_no_text() -> None:
    model = tiny_transformer(0, vocab_size=BYTES.size)
    bound = Constrained(compiled(budget=4, answer=Choice(ANSWERS)))
    sampler = Sampler((bound, *Sampler.from_settings(temperature=1.0).processors))
    prompts = [list(b"</think>yes </think>no <think>"), list(b"yes yes")]
    texts = check_identical(model, prompts, drafter=PromptLookup(), sampler=sampler, eos_ids=BYTES.eos_ids)
    assert any(bytes(text.generated[:-1]).partition(b"</think>")[2].decode() in ANSWERS for text in texts)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(SettingsError, match="0 tokens or more, not -1"):
        Reasoning(budget=-1)
    with pytest.raises(SettingsError, match="give both as texts"):
        Reasoning(end="")
    # Requests may name marks, and each of their beginnings takes memory and time.
    with pytest.raises(SettingsError, match="has 65 bytes, and may have 64"):
        Reasoning(begin="x" * 65)
    letters = Vocabulary([b"a", b"b", b"</s>"], frozenset({2}), (2,), lambda text: [])
    with pytest.raises(ConstraintError, match="no tokens for each beginning of '<think>'"):
        Reasoning().compile(letters)
