"""How many tokens a step may draft: a setting of the request, and a sentence where it cuts what was asked for."""

from __future__ import annotations

import warnings
from contextlib import suppress
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from decodery.bench.settings import Settings
from decodery.bench.subject import Own
from decodery.cli.given import given
from decodery.core.errors import SettingsError
from decodery.core.registry import methods
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.speculative.draft_length.fixed import Fixed
from decodery.speculative.draft_length.hardware import Hardware
from decodery.speculative.draft_length.memory import MemoryBound, held
from decodery.speculative.drafters.auto import Auto
from decodery.speculative.drafters.combine import Cascade, Union
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.drafters.forced import Forced
from decodery.speculative.drafters.lookahead import Lookahead
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.speculative.drafters.stand import STAND
from decodery.speculative.drafters.token_recycling import TokenRecycling
from decodery.speculative.trees.dyspec import DySpec
from decodery.speculative.trees.sequoia import Sequoia
from decodery.step.draft_length_policy import LARGEST, MOST_NODES, Budget
from decodery.step.drafter import Drafter
from decodery.step.sequence import Sequence
from decodery.testing import tiny_transformer, to_int8
from methods import DRAFTERS, GROWTHS, KINDS

TARGET = to_int8(tiny_transformer(0))
OTHER = tiny_transformer(0, num_layers=1)
PROMPT = [5] * 6 + [7, 8, 9] * 4


def decoded(drafter: Drafter | None, max_nodes: int = MOST_NODES, **settings) -> Sequence:
    engine = Engine(TARGET, pass_seconds=lambda context: np.ones(LARGEST))
    asked = {"max_new_tokens": 8 if isinstance(drafter, DraftModel) else 48, **settings}
    # Stores know nothing at first.
    seqs = [engine.submit(Request(PROMPT, drafter=drafter, max_draft_tokens=max_nodes, **asked)) for _ in range(2)]
    for seq in seqs[isinstance(drafter, DraftModel) :]:
        engine.run([seq])
    return seqs[-1]


@cache
def undrafted() -> list[int]:
    return decoded(None).generated


@pytest.mark.filterwarnings("ignore:.* drafts up to .* tokens per step")
@pytest.mark.parametrize(
    ("drafter", "published"),
    [
        (TokenRecycling(), 80),
        (STAND(orders=(1,)), 80),
        (DraftModel(OTHER, tree_policy=DySpec(nodes=128)), 128),
        (DraftModel(OTHER, tree_policy=Sequoia(nodes=128, acceptance=(0.5, 0.2, 0.1))), 128),
        (Lookahead(15, 5, 15), 119),
    ],
    ids=["token-recycling", "stand", "dyspec", "sequoia", "lookahead"],
)
def test_published_sizes_can_be_had(drafter: Drafter, published: int) -> None:
    assert drafter.largest() == published
    plain = undrafted()
    for most in (48, 256):
        seq = decoded(drafter, most)
        assert seq.generated == plain[: len(seq.generated)]
        largest = max(step.nodes for step in seq.trace.decoding)
        assert largest <= most
        if most == 48:
            assert largest == 48
        else:
            # Lookahead's n-grams share rows with its window, so that fewer than there is room for are fed.
            assert 48 < largest <= published
            assert largest == published or isinstance(drafter, Lookahead | STAND)


def test_what_is_cut_is_said_once_and_to_the_point() -> None:
    with pytest.warns(
        UserWarning,
        match=r"^token-recycling drafts up to 80 tokens per step as it is set, and max_draft_tokens leaves 64",
    ):
        Request(PROMPT, drafter=TokenRecycling(), max_draft_tokens=64)
    with pytest.warns(UserWarning, match="leaves 10: allow max_draft_tokens=40 for all of them"):
        Request(PROMPT, drafter=Forced(Cascade((PromptLookup(), TokenRecycling(nodes=40)))), max_draft_tokens=10)
    with pytest.warns(UserWarning, match="drafts up to 90"):
        Request(PROMPT, drafter=Union((PromptLookup(), TokenRecycling())))
    with pytest.warns(UserWarning, match="drafts up to 80"):
        Request(PROMPT, drafter=TokenRecycling(), draft_length=Hardware(most=100), max_draft_tokens=79)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Request(PROMPT, drafter=TokenRecycling(nodes=64), max_draft_tokens=64)
        # Where a budget allows less anyway nothing is lost by the request's own bound.
        Request(PROMPT, drafter=TokenRecycling(), draft_length=Fixed(16), max_draft_tokens=64)
        Request(PROMPT, drafter=TokenRecycling(), draft_length=Hardware(), max_draft_tokens=64)


def test_methods_as_they_are_published_have_room() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for method in methods("drafter"):
            with suppress(TypeError):  # some need a setting
                try:
                    Request(PROMPT, drafter=method.cls())
                except SettingsError as error:
                    assert "train one with" in str(error)
        for name, growth in GROWTHS.items():
            assert (type(growth)().largest() or 0) <= MOST_NODES, name


@pytest.mark.parametrize("most", [0, -1, LARGEST + 1, 3.5])
def test_bounds_out_of_range_are_refused(most: float) -> None:
    with pytest.raises(SettingsError, match=f"between 1 and {LARGEST}"):
        Request(PROMPT, max_draft_tokens=most)  # type: ignore[arg-type]
    if most != 3.5:
        with pytest.raises(SettingsError, match="max_draft_tokens must be at"):
            Settings(max_draft_tokens=int(most))


def test_every_method_says_how_much_it_drafts() -> None:
    for name, make in DRAFTERS.items():
        drafter, largest = make(OTHER), make(OTHER).largest()
        if name == "forced":
            assert largest is None, "a constraint may force any number of tokens"
            continue
        assert largest is not None and largest > 0, name
        if name not in KINDS:
            continue
        seq = decoded(drafter, LARGEST, max_new_tokens=10)
        assert all(step.nodes <= largest for step in seq.trace.decoding), name
    for name, growth in GROWTHS.items():
        seq = decoded(DraftModel(OTHER, tree_policy=growth), LARGEST)
        assert 0 < max(step.nodes for step in seq.trace.decoding) <= (growth.largest() or 0), name


def test_the_command_line_and_the_benchmark_hand_it_on() -> None:
    assert given({"max_draft_tokens": 96, "drafter": "token-recycling"})["max_draft_tokens"] == 96
    assert Settings.from_dict(Settings(max_draft_tokens=96).to_dict()).max_draft_tokens == 96
    older = Settings().to_dict()
    del older["max_draft_tokens"]
    assert Settings.from_dict(older).max_draft_tokens == MOST_NODES


def test_the_benchmark_drafts_no_more_than_it_is_allowed(smollm2_int8) -> None:
    rows = {}
    for most in (1, 12):
        own = Own(smollm2_int8, "token-recycling:nodes=12", 0.0, max_draft_tokens=most)
        run = own.decode([smollm2_int8.encode("Name a bird, a bird, a bird.")], max_new_tokens=12, seed=0)
        rows[most] = run.rows / run.passes
    assert rows[1] <= 2 < rows[12] <= 13


def test_bytes_are_planned_for_larger_drafts() -> None:
    engine = Engine(TARGET, pass_seconds=lambda context: np.ones(LARGEST))
    drafter = PromptLookup(length=300)

    def submitted(mib: float) -> Sequence:
        request = Request(
            PROMPT, max_new_tokens=9, drafter=drafter, max_draft_tokens=300, draft_length=MemoryBound(mib)
        )
        return engine.submit(request)

    free = submitted(1e6)
    assert free.states[free.request.draft_length].nodes == 300
    sizes = [held(free, nodes) for nodes in range(301)]
    assert all(a <= b for a, b in pairwise(sizes))
    for nodes in (0, 1, 70, 200):
        seq = submitted((sizes[nodes] + 1) / 2**20)
        state = seq.states[seq.request.draft_length]
        assert (state.nodes, state.bytes) == (nodes, sizes[nodes])


def test_bytes_are_planned_for_no_more_than_the_drafter_makes() -> None:
    engine = Engine(TARGET, pass_seconds=lambda context: np.ones(LARGEST))
    for drafter, most in ((DraftModel(OTHER, length=4), 4), (PromptLookup(length=12), 12), (None, 0)):
        seq = engine.submit(Request(PROMPT, max_new_tokens=9, drafter=drafter, draft_length=MemoryBound(1e6)))
        plan = seq.states[seq.request.draft_length]
        # Memory comes in pages of 16 slots.
        slots = -(-(len(PROMPT) + 9 + most) // 16) * 16
        assert (plan.nodes, plan.slots) == (most, slots) and plan.bytes == held(seq, most)
        # That much is enough for all of its drafts.
        enough = MemoryBound((plan.bytes + 1) / 2**20)
        seq = engine.submit(Request(PROMPT, max_new_tokens=9, drafter=drafter, draft_length=enough))
        assert seq.states[seq.request.draft_length] == plan


def test_costs_of_larger_passes() -> None:
    known = Budget(200, 9, pass_seconds=lambda context: 1.0 + 0.5 * np.arange(101) + context)
    assert known.seconds(np.array([0, 100, 101, 300])).tolist() == [1.0, 51.0, 51.5, 151.0]
    assert Budget(200, 9).seconds(np.array([3, 900])).tolist() == [1.0, 1.0]
    seq = decoded(Auto(most=200, warm=None), 200)
    assert max(step.nodes for step in seq.trace.decoding) > 64
