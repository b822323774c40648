"""What goes together runs, and what does not is refused by one sentence from one place."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest

from covering import FULL
from decodery.core.errors import SettingsError, UnknownMethod, UnsupportedModel
from decodery.core.registry import method_of, methods, register
from decodery.core.requirements import WORDS, Provides, Requirements, said
from decodery.engine import validation as fit
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.logits_sources.entropy_adaptive import EntropyAdaptive
from decodery.models.protocol import Capabilities
from decodery.sampling.constraint import Constrained, Constraint
from decodery.sampling.sampler import Sampler
from decodery.speculative.acceptance.awrs import AWRS
from decodery.speculative.draft_length.fixed import Fixed
from decodery.speculative.drafters.combine import Cascade, Union
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.drafters.forced import Forced
from decodery.speculative.drafters.ngram import NGram
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.speculative.drafters.stand import STAND
from decodery.speculative.trees.sequoia import Sequoia
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter
from decodery.step.sequence import Sequence
from decodery.testing import TableModel, check_batch, check_identical, check_state, decode, tiny_transformer
from methods import BUDGETS, CHOOSING, DRAFTERS, KINDS, LOSSY_RULES, RULES, SAMPLERS, SEARCHES, SOURCES

TARGET = tiny_transformer(0)
OTHER = tiny_transformer(0, num_layers=1)
PROMPT = [5] * 3 + [7, 8, 9] * 2


@dataclass(frozen=True)
class Even(Constraint):
    """Even tokens, with a mask or without, forbidden or made less likely."""

    masked: bool = True
    bonus: float | None = None

    @property
    def provides(self) -> Provides:
        return Provides(mask=self.masked)

    def init(self, prompt: Any) -> int:
        return 0

    def allowed(self, state: int) -> Any:
        return np.arange(64) % 2 == 0

    def advance(self, state: int, token: int) -> int:
        return state

    def is_complete(self, state: int) -> bool:
        return True


CONSTRAINED = {
    "unconstrained": (),
    "masked": (Constrained(Even()),),
    "unmasked": (Constrained(Even(masked=False)),),
    "soft": (Constrained(Even(bonus=2.0)),),
}
FAMILIES = {"drafter": "drafter", "acceptance-rule": "acceptance_rule", "draft-length": "draft_length"} | {
    "logits-source": "logits_source"
}
PARTS: dict[str, dict[str, Any]] = {
    "sampler": {"nucleus": SAMPLERS["nucleus"]} | SAMPLERS | CHOOSING,
    "drafter": {name: make(OTHER) for name, make in DRAFTERS.items()},
    "acceptance_rule": RULES | LOSSY_RULES | {"awrs": AWRS()},
    "draft_length": {"none": None} | {name: make(OTHER) for name, make in BUDGETS.items()},
    "logits_source": {"none": None} | {name: make(OTHER) for name, make in SOURCES.items()},
    "constraint": CONSTRAINED,
}
Row = tuple[str, ...]
PLAIN = dict(zip(PARTS, ("nucleus", "draft-model", "coupled", "none", "none", "unconstrained"), strict=True))


def request(row: Row, **settings: Any) -> Request:
    found = {role: PARTS[role][name] for role, name in zip(PARTS, row, strict=True)}
    processors = (*found.pop("constraint"), *found.pop("sampler").processors)
    return Request(PROMPT, max_new_tokens=3, sampler=Sampler(processors), eos_ids=(0,), **found | settings)


@cache
def refusal(row: Row) -> str | None:
    """What is said against a combination, None where nothing is; whoever says it is the one place."""
    try:
        request(row).bind(TARGET)
    except (SettingsError, UnsupportedModel) as error:
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        assert place is not None and place.tb_frame.f_code.co_filename == fit.__file__
        return str(error)
    return None


def alone(first: str, one: str, second: str, two: str) -> list[Row]:
    """Two parts with others that stand in nobody's way, at either temperature where none of the two is a sampler."""
    pair = {first: one, second: two}
    samplers = (PLAIN["sampler"],) if "sampler" in pair else (PLAIN["sampler"], "greedy")
    return [tuple((PLAIN | {"sampler": sampler} | pair).values()) for sampler in samplers]


PAIRS = [
    (first, one, second, two)
    for first, second in combinations(PARTS, 2)
    for one, two in product(PARTS[first], PARTS[second])
]


def runs(pair: tuple[str, str, str, str]) -> bool:
    return any(refusal(row) is None for row in alone(*pair))


def stands(pair: tuple[str, str, str, str]) -> bool:
    """Whether its drafter, if any, stands for those of its kind: the others run in `test_conformance.py`."""
    return all(role != "drafter" or name in KINDS for role, name in (pair[:2], pair[2:]))


def covering_rows() -> list[Row]:
    """Few combinations that hold every pair of parts that is not refused."""
    missing = {pair for pair in PAIRS if stands(pair) and runs(pair)}
    rows = []

    def held(row: Row) -> set[tuple[str, str, str, str]]:
        parts = list(zip(PARTS, row, strict=True))
        return {(*one, *two) for one, two in combinations(parts, 2)} & missing

    for pair in PAIRS:
        if pair not in missing:
            continue
        row = next(row for row in alone(*pair) if refusal(row) is None)
        for number, role in enumerate(PARTS):
            if role not in pair:
                others = [(*row[:number], name, *row[number + 1 :]) for name in PARTS[role]]
                others.sort(key=lambda each: len(held(each)), reverse=True)
                row = next(each for each in others if refusal(each) is None)
        rows.append(row)
        missing -= held(row)
    return rows


def test_every_pair_is_refused_by_one_sentence() -> None:
    refused = {pair: [refusal(row) for row in alone(*pair)] for pair in PAIRS if not runs(pair)}
    assert 100 < len(refused) < len(PAIRS) / 3
    for sentence in (each for sentences in refused.values() for each in sentences):
        assert sentence is not None and sentence[0].islower() and "\n" not in sentence and ". " not in sentence
        assert " needs " in sentence and " does not give: " in sentence
    assert ("drafter", "stand", "acceptance_rule", "rejection") in refused and (
        "drafter",
        "stand",
        "acceptance_rule",
        "coupled",
    ) not in refused
    assert ("acceptance_rule", "judge", "logits_source", "entropy-adaptive") in refused
    assert ("acceptance_rule", "judge", "logits_source", "guidance") not in refused


def test_every_pair_that_is_not_refused_runs() -> None:
    engine = Engine(TARGET, pass_seconds=lambda context: np.ones(1024))
    rows = covering_rows()
    texts = {row: engine.submit(request(row)) for row in rows}
    assert len(rows) < len(PAIRS) / 3
    while not all(seq.finished for seq in texts.values()):
        engine.step()
    for row, seq in texts.items():
        assert seq.error is None and 0 < len(seq.generated) <= 3, (row, seq.error)


@pytest.mark.parametrize("name", SEARCHES)
def test_searches_run_with_what_they_do_not_refuse(name: str) -> None:
    # A byte at a time needs more freedom than some sources leave.
    search = replace(SEARCHES[name], bits=1, temperature=5.0) if name == "coupling" else SEARCHES[name]
    sampler = "plain" if search.requirements.chance else "greedy"
    turn = sorted(SEARCHES).index(name) % 4
    for source in PARTS["logits_source"] if FULL else list(PARTS["logits_source"])[turn::4]:
        row = tuple((PLAIN | {"sampler": sampler, "logits_source": source}).values())
        asked = request(row, drafter=None)
        try:
            replace(asked, search=search).bind(TARGET)
        except SettingsError as error:
            assert " does not give: " in str(error)
            with pytest.raises(SettingsError, match=re.escape(str(error))):
                search.run(Engine(TARGET), asked)
        else:
            assert search.run(Engine(TARGET), replace(asked, max_new_tokens=60 if name == "coupling" else 6))


def test_composites_need_what_their_parts_need_and_give_what_they_give() -> None:
    lookup, model, sampled = PromptLookup(), DraftModel(OTHER), STAND()
    fused = Union((lookup, sampled))
    assert fused.requirements == Requirements(prompt=True) and fused.provides.drafts == ("deterministic",)
    both = Cascade((lookup, Cascade((sampled, model))))
    assert both.requirements == Requirements(prompt=True)
    assert both.provides.drafts == ("deterministic", "without-replacement", "sampled") and both.provides.pauses
    assert Forced(sampled).provides.drafts == ("without-replacement", "deterministic")
    assert NGram(tree_policy=Sequoia(draft_cost=0.1)).requirements == Requirements(prompt=True, costs=True)
    # What pauses without states spoils it for who judges by them.
    assert Cascade((lookup, model)).provides.draft_states and not Cascade((NGram(), model)).provides.draft_states
    sampler = Sampler([Constrained(Even(bonus=1.0)), *SAMPLERS["nucleus"].processors])
    assert sampler.requirements == Requirements(checked=True, mask=True, ends=True)
    tables = (
        Requirements(taps=(2, "logits"), drafts=("sampled", "deterministic")),
        Requirements(taps=(1, 2), drafts=("sampled",)),
    )
    assert Requirements.merged(tables) == Requirements(taps=(2, "logits", 1), drafts=("sampled",))


NOTHING = Requirements()


@dataclass(frozen=True)
class Reading(Drafter):
    """A method of one's own that needs this or that."""

    requirements: Requirements = NOTHING

    def propose(self, seq: Sequence, budget: Budget) -> DraftTree:
        return DraftTree.root(seq.last_token)


@pytest.mark.parametrize("name", ["states", "layer_plans", "policies", "parts", "exact_rows", "gradients"])
def test_a_method_of_ones_own_is_refused_where_the_model_lacks_what_it_needs(name: str) -> None:
    class Bare(TableModel):
        """A model that can do nothing beyond scoring tokens."""

        def __init__(self) -> None:
            super().__init__(5)
            self.capabilities = Capabilities()

    drafter = Reading(Requirements(**{name: True}))
    with pytest.raises(UnsupportedModel) as caught:
        decode(Bare(), [[1]], drafter=drafter)
    assert str(caught.value) == (
        f"the drafter Reading needs {WORDS[name]}, which Bare does not give: use another drafter, or a model that this "
        "package runs itself"
    )
    model = Bare()
    model.capabilities = Capabilities(**{name: True})
    decode(model, [[1]], drafter=drafter)


def test_hidden_states_that_a_model_does_not_have_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"the drafter Reading needs hidden states .* no state after layer 3 of 2"):
        decode(TARGET, [[1]], drafter=Reading(Requirements(taps=(3,))))
    with pytest.raises(UnsupportedModel, match=r"the hidden states at mlp_out\.0, which TableModel does not give"):
        decode(TableModel(5), [[1]], drafter=Reading(Requirements(taps=("mlp_out.0",))))
    decode(TARGET, [[1]], drafter=Reading(Requirements(taps=("mlp_out.0", -1))))
    with pytest.raises(
        SettingsError, match="which the logits source entropy-adaptive does not give: leave the logits source out"
    ):
        Request(
            [1], drafter=Union((PromptLookup(), Reading(Requirements(taps=(1,))))), logits_source=EntropyAdaptive(OTHER)
        )


def test_names_stand_for_methods() -> None:
    check_identical(TARGET, [PROMPT], drafter="token-recycling:nodes=8", max_new_tokens=30)
    check_identical(
        TARGET, [PROMPT], drafter="prompt-lookup", acceptance_rule="awrs", logits_source="guidance", tested="nothing"
    )
    check_batch(TARGET, [PROMPT], drafter="suffix-tree", tested="nothing")
    check_state(TARGET, [PROMPT], drafter="copyspec", draft_length="fixed:nodes=2")
    assert Request([1], draft_length="fixed:nodes=2", acceptance_rule="rejection").draft_length == Fixed(nodes=2)
    with pytest.raises(UnknownMethod, match="no drafter method is called 'prompt-lokup'; try prompt-lookup"):
        check_identical(TARGET, [PROMPT], drafter="prompt-lokup")
    for role, given in (
        ("drafter", PromptLookup),
        ("draft_length", 4),
        ("acceptance_rule", None),
        ("logits_source", PromptLookup()),
    ):
        with pytest.raises(SettingsError, match=f"{role} must be .* or the name of one, not"):
            Request([1], **{role: given})


def test_the_catalogue_tells_what_the_tables_hold() -> None:
    described = {(method.family, method.name): method for method in methods()}
    for family, found in FAMILIES.items():
        for name, part in PARTS[found].items():
            # A growth policy gives in place of the drafter that it asks; of a method's variants one stands for all.
            if part is None or getattr(part, "tree_policy", None) is not None or ":" in name:
                continue
            method = described[family, name]
            for table, words in (
                ((part.requirements, method.requirements), (part.provides, method.provides))
                if family != "draft-length"
                else ((part.requirements, method.requirements),)
            ):
                composed = any(each.startswith("what its parts") for each in words)
                assert composed or set(said(table)) <= set(words), (name, said(table), words)
    assert described["acceptance-rule", "k-seq"].requirements == (
        "deterministic or sampled drafts",
        "the distributions that drafts come from",
    )
    assert described["drafter", "union"].requirements == ("what its parts need",)
    assert "temperature 0" in described["search", "beam"].requirements
    assert "temperature 0" not in described["search", "smc"].requirements
    assert {each.name for each in fields(Requirements)} | {each.name for each in fields(Provides)} == set(WORDS)


def test_a_method_registered_elsewhere_tells_its_own_table(own_methods: None) -> None:
    @register("needy", requirements=("a kind word",))
    @dataclass(frozen=True)
    class Needy(Reading):
        """Needs rows."""

        provides = Provides(drafts=("sampled",), law=True)

    own = method_of(Needy())
    assert own is not None and own.provides == ("sampled drafts",) and own.requirements[-1] == "a kind word"
