"""The laws can fail: processors, drafters and batches that are wrong, or that put nothing to the test, are caught."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from decodery.core.registry import methods
from decodery.sampling import Context, LogitsProcessor, MinNewTokens, Sampler, Stage, Temperature
from decodery.speculative.draft_length.fixed import Fixed
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter
from decodery.step.sequence import Sequence
from decodery.testing import (
    Garbage,
    LawBroken,
    Oracle,
    check_batch,
    check_identical,
    check_logits_processor,
    check_predictions,
    decode,
)
from decodery.testing.models import Counted, tiny_transformer
from methods import WARPS
from wrong_rules import Credulous

TARGET = tiny_transformer(0)
PROMPTS = [[1, 2, 3], [5] * 6 + [7, 8, 9] * 4]


def test_further_drafters_are_compared_with_what_was_decoded_once() -> None:
    model, settings = Counted(TARGET), {"max_new_tokens": 30, "seeds": (0, 1)}
    passes = []
    for _ in range(2):
        before = len(model.rows)
        runs = check_identical(model, PROMPTS, drafter=PromptLookup(), **settings)
        passes.append(len(model.rows) - before)
    drafted = 1 + max(run.trace.passes for run in runs)
    assert passes == [30 + drafted, drafted]
    with pytest.raises(LawBroken, match="departs from plain decoding"):
        check_identical(model, PROMPTS, drafter=PromptLookup(), acceptance_rule=Credulous(), **settings)
    # Other settings are other texts.
    check_identical(model, PROMPTS, drafter=PromptLookup(), sampler=Sampler([Temperature(0.5)]), **settings)


@pytest.mark.parametrize("sampler", [None, Sampler([Temperature(0.8)])], ids=["greedy", "drawn"])
def test_predictions_cost_what_is_wrong_about_them(sampler: Sampler | None) -> None:
    for length in (1, 4, 7):
        check_predictions(TARGET, PROMPTS[1], length=length, sampler=sampler)
    with pytest.raises(LawBroken, match="took 20 passes, not 8"):
        check_predictions(TARGET, PROMPTS[1], sampler=sampler, draft_length=Fixed(1))
    with pytest.raises(LawBroken, match="the text differs"):
        check_predictions(TARGET, PROMPTS[1], sampler=sampler, acceptance_rule=Credulous())


@pytest.mark.parametrize("size", [64, 50_000])
@pytest.mark.parametrize("name", WARPS)
def test_every_registered_warp_keeps_its_laws(name: str, size: int) -> None:
    assert not WARPS[name].neutral
    # Rows of the larger vocabulary torch splits among threads, which must not change how a row is rounded.
    few = [([1, 2, 1, 2, 1], [2, 1]), ([4, 5, 6, 7], [3])]
    check_logits_processor(WARPS[name], vocab_size=size, texts=few if size > 64 else None)


def test_every_registered_warp_is_in_the_list() -> None:
    assert {name: type(processor) for name, processor in WARPS.items()} == {
        each.name: each.cls for each in methods("logits-processor")
    }


@dataclass(frozen=True)
class _Broken(LogitsProcessor):
    """Doubles the logits, as what is derived from it does in a wrong way."""

    stage = Stage.EDIT

    def process(self, logits: torch.Tensor, contexts: Ordered[Context]) -> torch.Tensor:
        return logits * 2


class InPlace(_Broken):
    def process(self, logits: torch.Tensor, contexts: Ordered[Context]) -> torch.Tensor:
        return logits.mul_(2)


class OtherRows(_Broken):
    """Subtracts the largest logit of the whole call from the negative ones."""

    def process(self, logits: torch.Tensor, contexts: Ordered[Context]) -> torch.Tensor:
        return torch.where(logits < 0, logits - logits.max(), logits)


@dataclass(frozen=True)
class Remembers(_Broken):
    """Gives every output position the temperature that the first text to get there asked for."""

    seen: dict[int, float] = field(default_factory=dict)

    def process(self, logits: torch.Tensor, contexts: Ordered[Context]) -> torch.Tensor:
        heat = [self.seen.setdefault(each.position, 1.0 + len(each.tokens)) for each in contexts]
        return logits / torch.tensor(heat)[:, None]


class Undeclared(_Broken):
    def init(self, prompt: Ordered[int]) -> Any:
        return len(prompt)


class Drawn(_Broken):
    def process(self, logits: torch.Tensor, contexts: Ordered[Context]) -> torch.Tensor:
        return logits + torch.from_numpy(np.random.default_rng().random(logits.shape)).float()


class Impure(_Broken):
    """Counts tokens in a list that all branches share."""

    stateful = True
    hears_logprobs = False

    def init(self, prompt: Ordered[int]) -> Any:
        return []

    def advance(self, state: Any, token: int, logprob: float) -> Any:
        state.append(token)
        return state

    def process(self, logits: torch.Tensor, contexts: Ordered[Context]) -> torch.Tensor:
        return logits / torch.tensor([1.0 + len(each.state) for each in contexts])[:, None]


class Revives(_Broken):
    def process(self, logits: torch.Tensor, contexts: Ordered[Context]) -> torch.Tensor:
        return logits.clamp(min=-1e9)


class Empties(_Broken):
    def process(self, logits: torch.Tensor, contexts: Ordered[Context]) -> torch.Tensor:
        return torch.full_like(logits, -torch.inf)


class View(_Broken):
    def process(self, logits: torch.Tensor, contexts: Ordered[Context]) -> torch.Tensor:
        return logits.view_as(logits)


@dataclass(frozen=True)
class Reuses(_Broken):
    """Writes all its answers of a size into the same tensor."""

    buffers: dict[int, torch.Tensor] = field(default_factory=dict)

    def process(self, logits: torch.Tensor, contexts: Ordered[Context]) -> torch.Tensor:
        return torch.mul(logits, 2, out=self.buffers.setdefault(len(logits), torch.empty_like(logits)))


class SaysNeutral(_Broken):
    neutral = True


@pytest.mark.parametrize(
    ("processor", "said"),
    [
        (InPlace(), "changes in place"),
        (OtherRows(), "with the rows beside it"),
        (Remembers(), "depends on earlier calls"),
        (Undeclared(), "set stateful = True"),
        (Drawn(), "called again"),
        (Impure(), "advance of .* changes the state"),
        (Revives(), "revives an excluded token"),
        (Empties(), "no law"),
        (View(), "returns a view"),
        (Reuses(), "the same memory twice"),
        (SaysNeutral(), "is declared neutral"),
        (MinNewTokens(0, (3,)), None),
        (MinNewTokens(5, (900,)), "nothing was put to the test"),
        (_Broken(), None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, LogitsProcessor) else "",
)
def test_broken_warps_are_caught(processor: LogitsProcessor, said: str | None) -> None:
    if said is None:
        check_logits_processor(processor)
        return
    with pytest.raises(LawBroken, match=said):
        check_logits_processor(processor)


def test_a_warp_that_changes_its_logits_in_place_breaks_identity() -> None:
    (plain,) = decode(TARGET, PROMPTS[:1])
    for processors in ([InPlace()], [Temperature(0.7), InPlace()]):
        with pytest.raises(LawBroken, match=r"InPlace\(.*\) changes the logits it is given in place"):
            check_identical(TARGET, PROMPTS[:1], drafter=Oracle(tuple(plain.tokens)), sampler=Sampler(processors))


@pytest.mark.parametrize("processor", [OtherRows(), Impure()], ids=lambda processor: type(processor).__name__)
def test_a_warp_that_depends_on_its_company_breaks_identity_on_a_cpu_too(processor: LogitsProcessor) -> None:
    (plain,) = decode(TARGET, PROMPTS[:1])
    sampler = Sampler([processor, Temperature(1.0)])
    with pytest.raises(LawBroken):
        check_identical(TARGET, PROMPTS[:1], drafter=Oracle(tuple(plain.tokens)), sampler=sampler)


class Silent(Drafter):
    """Never drafts."""

    def propose(self, seq: Sequence, budget: Budget) -> DraftTree:
        return DraftTree.root(seq.last_token)


class Wrong(Drafter):
    """Always drafts token 0, which no text holds where a bias bans it."""

    def propose(self, seq: Sequence, budget: Budget) -> DraftTree:
        return DraftTree.chain(seq.last_token, [0] * min(1, budget.nodes, budget.depth))


@pytest.mark.parametrize("check", [check_identical, check_batch])
def test_a_drafter_that_never_drafts_proves_nothing(check: Any) -> None:
    with pytest.raises(LawBroken, match="drafted nothing in"):
        check(TARGET, PROMPTS, drafter=Silent())
    with pytest.raises(LawBroken, match="drafted nothing"):
        check(TARGET, PROMPTS, drafter=PromptLookup(), draft_length=Fixed(0))
    check(TARGET, PROMPTS, drafter=PromptLookup(), draft_length=Fixed(0), tested="nothing")


@pytest.mark.parametrize("check", [check_identical, check_batch])
def test_drafts_of_which_none_is_accepted_prove_nothing_but_where_they_are_wrong_on_purpose(check: Any) -> None:
    never = Sampler.from_settings(logit_bias={0: -100.0})
    with pytest.raises(LawBroken, match="accepted: nothing was put to the test"):
        check(TARGET, PROMPTS, drafter=Wrong(), sampler=never)
    check(TARGET, PROMPTS, drafter=Wrong(), sampler=never, tested="drafted")


@pytest.mark.parametrize("check", [check_identical, check_batch])
def test_texts_of_one_token_prove_nothing(check: Any) -> None:
    with pytest.raises(LawBroken, match="longer than its first token"):
        check(TARGET, PROMPTS, drafter=Garbage(), max_new_tokens=1)


def test_a_comparison_with_itself_proves_nothing() -> None:
    with pytest.raises(LawBroken, match="compared with itself"):
        check_identical(TARGET, PROMPTS, drafter=None)
    with pytest.raises(LawBroken, match="a batch of one"):
        check_batch(TARGET, PROMPTS[:1], seeds=(0,))
