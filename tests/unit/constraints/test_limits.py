"""Constraints at their limits: an error that names the limit, never a text that looks complete and is not."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from decodery.constraints import Choice, ConstraintSpec, Grammar, JSONSchema, Regex, trial
from decodery.constraints.engine import GrammarConstraint
from decodery.constraints.lark import lark
from decodery.core.errors import ConstraintError, SettingsError
from decodery.core.worker_pool import WorkerPool
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.tokenizers.vocabulary import Vocabulary
from decodery.sampling import Sampler
from decodery.sampling.constraint import Constrained
from decodery.search.coupling import Coupling
from decodery.speculative.acceptance.coupled import Coupled
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.drafters.forced import Forced
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.step.acceptance_rule import Accepted, NodeDistributions
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter
from decodery.step.sequence import Sequence
from decodery.testing import check_constraint, check_identical
from languages import ENDS, OTHER, PROMPTS, TARGET, VOCABULARY, accepts, constrained

WORDS = tuple("".join(random.Random(number).choices("abcdefghij", k=20)) for number in range(3000))
LIMITED: dict[str, tuple[ConstraintSpec, str]] = {
    "alternatives": (Grammar("start: " + " | ".join(f'"{word}"' for word in WORDS)), "3001 items; max is 2000"),
    "alternatives of one beginning": (
        Grammar("start: " + " | ".join(f'"the {word}"' for word in WORDS)),
        "3001 items; max is 2000",
    ),
    "objects": (
        JSONSchema(
            {
                "anyOf": [
                    {"type": "object", "properties": {key: True}, "required": [key], "additionalProperties": False}
                    for key in map(str, range(3000))
                ]
            },
            "compact",
        ),
        "items; max is 2000",
    ),
    "optional characters": (
        JSONSchema({"type": "string", "pattern": "^(a?){1000}a{1000}$"}, "compact"),
        "too many expressions",
    ),
    "properties": (JSONSchema({"properties": {f"k{n}": {} for n in range(600)}, "type": "object"}), "max is 2000"),
}


def run(language: ConstraintSpec, drafter: Drafter | None = None, seed: int = 0) -> Sequence:
    """A text without looking at errors."""
    sampler, prompt = constrained(language, temperature=1.0), PROMPTS[0]
    engine = Engine(TARGET, pass_seconds=lambda context: np.ones(1024))
    seq = engine.submit(Request(prompt, max_new_tokens=40, sampler=sampler, drafter=drafter, seed=seed, eos_ids=ENDS))
    while not seq.finished:
        engine.step()
    return seq


@pytest.mark.parametrize("name", LIMITED)
def test_a_limit_of_the_engine_is_an_error_that_names_it(name: str) -> None:
    language, limit = LIMITED[name]
    with pytest.raises(ConstraintError, match=limit):
        if (error := run(language).error) is not None:
            raise error


@dataclass(frozen=True)
class _Fork(Drafter):
    """Drafts a branch that comes upon the limit beside one that does not."""

    def propose(self, seq: Sequence, budget: Budget) -> DraftTree:
        if seq.position > 1 or budget.depth < 2:
            return DraftTree.root(seq.last_token)
        return DraftTree(np.array([seq.last_token, *b"maxy"]), np.array([-1, 0, 1, 0, 3]), "deterministic")


def test_a_limit_in_a_draft_changes_nothing() -> None:
    language = Regex("[n-z]yz|m(a?){1000}a{1000}")
    ends = set()
    for seed in range(6):
        plain = run(language, seed=seed)
        for drafter in (_Fork(), Forced(_Fork()), Forced(DraftModel(OTHER, length=3))):
            fast = run(language, drafter, seed)
            assert (fast.finish_reason, str(fast.error)) == (plain.finish_reason, str(plain.error))
            assert plain.error is not None or fast.generated == plain.generated
        ends.add(plain.finish_reason)
        if plain.finish_reason == "stop":
            assert VOCABULARY.bytes_of(plain.generated)[1:] == b"yz"
    assert ends == {"stop", "error"}


def test_a_limit_spoils_no_other_state() -> None:
    constraint = Regex("xyz|m(a?){1000}a{1000}").compile(VOCABULARY)
    state, beside = constraint.init([]), constraint.init([])
    after = constraint.advance(beside, ord("x"))
    assert constraint.permits(state, ord("m")) and not constraint.permits(state, ord("a"))
    state, limit = constraint.advance(state, ord("m")), None
    while limit is None:
        try:
            assert constraint.allowed(state)[ord("a")]
            state = constraint.advance(state, ord("a"))
        except ConstraintError as error:
            limit = error
    assert re.search("too complex at this point: .*too many", str(limit)) and not constraint.is_complete(state)
    with pytest.raises(ConstraintError, match=re.escape(str(limit))):
        constraint.allowed(state)
    # The lexer of both is one; what is beside the limit goes on without it.
    assert constraint.allowed(after).sum() == 1 and constraint.accepts(after, ord("y"))
    assert constraint.forced(after, 2) == [ord("y"), Z]
    assert constraint.allowed(constraint.init([]))[list(b"mx")].all()
    check_constraint(constraint, ENDS, walks=1, length=1)


@pytest.mark.parametrize("mode", ["canonical", "strict"])
def test_thousands_of_options_are_a_choice(mode: str) -> None:
    options = (*(f"option number {number}" for number in range(3000)), *WORDS)
    language = Choice(options, mode=mode)
    sampler = constrained(language, temperature=1.0)
    for drafter in (Forced(PromptLookup(length=4)), DraftModel(OTHER, length=3)):
        check_identical(TARGET, PROMPTS[:1], drafter=drafter, sampler=sampler, seeds=(1,), eos_ids=ENDS)
    ended = run(language, seed=4)
    assert ended.finish_reason == "stop" and VOCABULARY.bytes_of(ended.generated).decode() in options
    check_constraint(language.compile(VOCABULARY), ENDS, walks=3)


Z = VOCABULARY.encode("z")[0]
PARTS = ["na", "me", "ab", "é", "z", "name", '"', " ", "€", "x1"]


@pytest.mark.parametrize("seed", range(6))
def test_choices_are_masked_as_by_the_grammar_engine(seed: int) -> None:
    chance = random.Random(seed)
    options = ["".join(chance.choices(PARTS, k=chance.randrange(1, 7))) for _ in range(chance.choice([1, 3, 30]))]
    rules = "start: " + " | ".join(json.dumps(each, ensure_ascii=False) for each in dict.fromkeys(options))
    ours = Choice(tuple(options), mode="strict").compile(VOCABULARY)
    theirs = GrammarConstraint(VOCABULARY, lark(rules, "strict"))
    for _ in range(4):
        state, other = ours.init([]), theirs.init([])
        while not state.ended:
            mask = ours.allowed(state)
            assert np.array_equal(mask, theirs.allowed(other))
            token = chance.choice(np.flatnonzero(mask).tolist())
            state, other = ours.advance(state, token), theirs.advance(other, token)
    check_constraint(Choice(tuple(options)).compile(VOCABULARY), ENDS, walks=4)
    assert all(accepts(Choice(tuple(options)).compile(VOCABULARY), option) for option in options)


def test_canonical_options_are_spelled_as_the_tokenizer_does() -> None:
    for options in (("name",), ("name", "name age"), ("é€ name", "é€ age")):
        constraint = Choice(options).compile(VOCABULARY)
        state, tokens = constraint.init([]), []
        while not constraint.is_complete(state):
            tokens.append(int(constraint.allowed(state).argmax()))
            state = constraint.advance(state, tokens[-1])
        text = VOCABULARY.bytes_of(tokens).decode()
        assert text in options and ("€" in text or tokens == VOCABULARY.encode(text))


def test_an_option_no_token_can_write_is_named() -> None:
    bare = Vocabulary([b"<e>", b"a"], frozenset({0}), (0,), lambda text: [1] * len(text))
    constraint = Choice(("ab",), mode="strict").compile(bare)
    with pytest.raises(ConstraintError, match="no token of the model can write 'b'"):
        constraint.allowed(constraint.advance(constraint.init([]), 1))


def test_a_hidden_message_waits_for_the_constraint() -> None:
    def hidden(pattern: str) -> Sequence:
        sampler = Sampler((Constrained(Regex(pattern, mode="strict").compile(VOCABULARY)),
                           *Sampler.from_settings().processors))  # fmt: skip
        request = Request([5], max_new_tokens=60, sampler=sampler, eos_ids=ENDS)
        return Coupling(message=b"a").run(Engine(TARGET), request)[0]

    found = hidden("[0-9]{30}")
    assert found.finish_reason == "stop" and len(VOCABULARY.bytes_of(found.generated)) == 30
    with pytest.raises(SettingsError, match="must end here"):
        hidden("[0-9]")


@pytest.mark.integration
def test_compiling_is_bounded_and_the_next_one_is_not_harmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "MOST_SECONDS", 0.2)
    with pytest.raises(ConstraintError, match=r"cannot be enforced: compiling .* more than 0.2 s .* multipleOf"):
        JSONSchema({"type": "integer", "multipleOf": 999_983}).compile(VOCABULARY)
    monkeypatch.undo()
    ring = "\n".join(f'a{n}: "x" a{(n + 1) % 20_000}?' for n in range(20_000))
    with pytest.raises(ConstraintError, match=r"its process breaks down .* the engine's stack"):
        Grammar(f"start: a0\n{ring}").compile(VOCABULARY)
    assert accepts(JSONSchema({"type": "integer", "multipleOf": 7}).compile(VOCABULARY), "49")


def test_what_python_reads_has_a_size() -> None:
    for language in (lambda: Regex("a" * 65_537), lambda: JSONSchema({"allOf": [{"pattern": "a" * 40_000}] * 2})):
        with pytest.raises(ConstraintError, match="the limit is 65536"):
            language().compile(VOCABULARY)
    with pytest.raises(ConstraintError, match="has 65539 values"):
        JSONSchema({"enum": list(range(65_537))}).compile(VOCABULARY)


@pytest.mark.parametrize(
    "language",
    [Regex("a[]"), Regex("[]"), Grammar("start: /[^\\s\\S]/"), Regex(r"[\ud800]")],
    ids=["regex", "class", "grammar", "surrogate"],
)
def test_an_empty_language_is_found_while_compiling(language: ConstraintSpec) -> None:
    with pytest.raises(ConstraintError, match="allows no text at all"):
        language.compile(VOCABULARY)


def test_special_tokens_in_forced_text_are_text() -> None:
    # As tokenizers do, this one reads the name of a special token as that token.
    def encode(text: str) -> list[int]:
        begin, found, end = text.partition("<special>")
        return [*VOCABULARY.encode(begin), *([ENDS[1] + 1] if found else []), *(encode(end) if end else [])]

    vocabulary = Vocabulary(VOCABULARY.pieces, VOCABULARY.special_ids, VOCABULARY.eos_ids, encode)
    assert encode("a<special>b") == [97, 292, 98]
    for language in (JSONSchema({"const": "name <special>"}), Choice(("<special> name",)), Regex("name<special>a")):
        constraint = language.compile(vocabulary)
        (walk, *_) = check_constraint(constraint, ENDS, walks=1)
        assert walk[-1] in ENDS and b"<special>" in vocabulary.bytes_of(walk)
    named = Grammar('start: "name" <special> "age"').compile(vocabulary)
    assert named.forced(named.init([]), 3) == [260, 292, 264]


def test_json_is_meant_only_where_the_grammar_says_it() -> None:
    rules = (
        '# %json here, and "\n// another "%json\n'
        'start: "%json {" | /%json "\\/ a/ | <special> "//" %json {"enum": ["%json", "//"]} // {\n'
    )
    constraint = Grammar(rules).compile(VOCABULARY)
    assert accepts(constraint, "%json {") and accepts(constraint, '%json "/ a')
    state = constraint.advance(constraint.init([]), 292)
    for byte in b'//"//"':
        assert constraint.permits(state, byte)
        state = constraint.advance(state, byte)
    assert constraint.is_complete(state)
    with pytest.raises(ConstraintError, match="uniqueItems"):
        Grammar('start: "x" # %json\n | %json {"uniqueItems": true}').compile(VOCABULARY)


def test_half_characters_and_half_repetitions_are_named() -> None:
    half = "\ud800"
    for make in (
        *(lambda: Choice((half,)), lambda: Regex(f"a{half}"), lambda: Grammar(f'start: "{half}"')),
        lambda: JSONSchema(f'{{"const": "{half}"}}'),
    ):
        with pytest.raises(ConstraintError, match=r"half a character \(U\+D800\)"):
            make().compile(VOCABULARY)
    for pattern in ("a{,2}", "{,2}"):
        with pytest.raises(ConstraintError, match=r"write \{0,n\}"):
            Regex(pattern).compile(VOCABULARY)
    assert accepts(Regex("a{,x}").compile(VOCABULARY), "a{,x}")


class _Elsewhere(NodeDistributions):
    """Laws whose logits seem to be on a device, where all nodes are worked out together."""

    def __init__(self, laws: NodeDistributions) -> None:
        self._here = laws
        self.tree = laws.tree

    @property
    def logits(self) -> Any:
        return SimpleNamespace(device=torch.device("cuda"))

    def picks(self, nodes: Iterable[int]) -> list[int]:
        return self._here.picks(nodes)


def test_nodes_worked_out_together_may_hold_one_beyond_the_limit() -> None:
    constraint = Regex("[n-z]yz|m(a?){1000}a{1000}").compile(VOCABULARY)
    sampler = Sampler((Constrained(constraint), *Sampler.from_settings().processors))
    seq = Engine(TARGET).open(Request([5], sampler=sampler, max_new_tokens=20, eos_ids=ENDS))
    tree = DraftTree(np.array([5, *b"maxy"]), np.array([-1, 0, 1, 0, 3]), "deterministic")
    logits = torch.zeros(len(tree), VOCABULARY.size)
    logits[0, ord("x")] = 1.0
    laws = NodeDistributions(tree, logits, seq)
    assert Coupled().choose(tree, _Elsewhere(laws), seq) == Coupled().choose(tree, laws, seq) == Accepted([3, 4], Z)
    logits[0, ord("m")] = 2.0
    with pytest.raises(ConstraintError, match="too complex at this point"):
        Coupled().choose(tree, _Elsewhere(NodeDistributions(tree, logits, seq)), seq)


def test_what_was_tried_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    language = Regex("tried once")
    language.compile(VOCABULARY)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(trial, "_workers", WorkerPool(Path(trial.__file__), memory=1 << 30))
    language.compile(VOCABULARY)
    with pytest.raises(ConstraintError, match="tries grammars does not start"):
        Regex("tried never").compile(VOCABULARY)


def test_a_vocabulary_of_262_thousand_tokens_is_laid_out_once() -> None:
    special = range(256, 256 + 6_242)
    pieces = [*(bytes([byte]) for byte in range(256)), *(f"<{id}>".encode() for id in special)]
    pieces += [b""] * (262_144 - len(pieces))
    vocabulary = Vocabulary(pieces, frozenset(special), (256,), lambda text: list(text.encode()))
    # With a set made per id this ended at the limit of five seconds.
    assert accepts(Regex("[ab]+").compile(vocabulary), "ab")
