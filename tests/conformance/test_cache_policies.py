"""The laws of cache policies, and rules that break each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from decodery.core.errors import SettingsError
from decodery.kv_cache.actqkv import ActQKV, Fetching
from decodery.kv_cache.coprocessor import Augmented, Coprocessor
from decodery.kv_cache.evicting import Evicting
from decodery.kv_cache.h2o import H2O
from decodery.kv_cache.lserve import LServe, Serving
from decodery.kv_cache.quantized import Quantized, Storing
from decodery.kv_cache.quest import Quest
from decodery.kv_cache.selecting import Asked
from decodery.kv_cache.write_gate import Admitting, WriteGate
from decodery.models.batch import Segment
from decodery.models.cache.attention_policy import Attention, AttentionPolicy
from decodery.models.cache.cache import KVCache
from decodery.models.cache.page_pool import SLOTS
from decodery.models.protocol import LanguageModel
from decodery.step.cache_policy import CachePolicy, State
from decodery.testing import LawBroken, check_identical, decode, tiny_transformer, to_int8
from decodery.testing.policies import check_cache_policy
from methods import KVS

MODEL = tiny_transformer(0)
EXACT = to_int8(MODEL)
PROMPTS = [np.random.default_rng(seed).integers(0, 64, n).tolist() for seed, n in ((1, 31), (2, 9))]


@pytest.mark.parametrize("kv", KVS.values(), ids=KVS)
def test_a_text_under_a_policy_is_that_of_plain_decoding(kv: CachePolicy) -> None:
    check_cache_policy(EXACT, PROMPTS, kv, tolerance=0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8], ids=str)
@pytest.mark.parametrize("name", ["coprocessor", "d2o", "meta-soft"])
def test_policies_that_change_keys_and_values_keep_the_law_where_caches_hold_less(
    name: str, dtype: torch.dtype
) -> None:
    narrow = to_int8(MODEL)
    narrow.narrow_caches(dtype)
    assert narrow.new_cache().pages.nothing.dtype == dtype
    check_cache_policy(narrow, PROMPTS[:1], KVS[name], tolerance=0.0)


BUDGETED = {name: kv for name, kv in KVS.items() if hasattr(kv, "budget")}


@pytest.mark.parametrize("kv", BUDGETED.values(), ids=BUDGETED)
def test_a_budget_of_one_is_the_full_model(kv: CachePolicy) -> None:
    full, limited, whole = (
        decode(EXACT, PROMPTS[:1], cache_policy=policy, max_new_tokens=10)[0]
        for policy in (None, kv, replace(kv, **dict.fromkeys(_budgets(kv), 1.0)))
    )
    assert whole.generated == full.generated
    for layer in range(2):
        for ours, theirs in zip(whole.cache.view(layer), full.cache.view(layer), strict=True):
            assert ours.equal(theirs)
    less = any(not limited.cache.view(layer)[0].equal(full.cache.view(layer)[0]) for layer in range(2))
    assert less or limited.generated != full.generated


def _budgets(kv: CachePolicy) -> set[str]:
    """The fields that are budgets: the windows of streaming heads are one of their own."""
    return {"budget", "window"} if isinstance(kv, LServe) else {"budget"}


def test_drafts_trees_and_samples_under_a_policy() -> None:
    for kv in KVS.values():
        check_identical(
            EXACT, PROMPTS[:1], drafter="token-recycling:nodes=12", cache_policy=kv, tested="drafted", seeds=(0,)
        )


class Counting(Evicting):
    """Counts rows that were rejected."""

    def kept(self, cache: KVCache, rows: Sequence[int], layers: Sequence[int] | None) -> None:
        worths = self._worths
        lost = 0 if worths is None or worths.added is None else len(worths.added) - len(rows)
        super().kept(cache, rows, layers)
        for held in self._held.values() if lost else ():
            held.scores[:] += lost * (np.arange(held.scores.shape[1]) % 3)


class Counted(H2O):
    def state(self, model: LanguageModel, prompt: int) -> AttentionPolicy:
        return Counting(self, model.config, prompt, by_kernel=model.capabilities.cache_kernels)


class OfTheBlock(Quest):
    """One selection for all rows of a pass."""

    def choose(self, asked: Asked) -> np.ndarray:
        found = super().choose(asked)
        return np.broadcast_to(found[:, -1:], found.shape)


class Shared(State):
    """A window that slides with whatever was asked last, and is common to a text and its forks."""

    last = 0

    def select(self, attention: Attention) -> np.ndarray:
        assert attention.segment.cache is not None
        self.last = max(self.last, int(attention.segment.positions[-1]))
        return attention.segment.cache.positions[attention.layer, : attention.seen.shape[-1]][None] > self.last - 6

    def fork(self) -> Shared:
        return self


class ByPass(Serving):
    """Pages are chosen anew in every pass."""

    def select(self, attention: Attention) -> np.ndarray | None:
        self._held = {}
        return super().select(attention)


class ChosenByPass(LServe):
    def state(self, model: LanguageModel, prompt: int) -> AttentionPolicy:
        right = super().state(model, prompt)
        assert isinstance(right, Serving)
        return ByPass(right.method, right.streams, model.config, prompt)


class OfThePass(Admitting):
    """Stores only the first row of a pass."""

    def select(self, attention: Attention) -> np.ndarray | None:
        read = super().select(attention)
        if len(self._stored):
            self._stored[-len(attention.segment) :][1:] &= attention.segment.positions[1:] < self.prompt
        return read


class StoredByPass(WriteGate):
    def state(self, model: LanguageModel, prompt: int) -> AttentionPolicy:
        right = super().state(model, prompt)
        assert isinstance(right, Admitting)
        return OfThePass(right.method, right.gate, model.config, prompt)


class OfAllRows(Fetching):
    """The rows of a pass ask together."""

    def _asking(self, attention: Attention, history: torch.Tensor | None) -> torch.Tensor:
        asking = super()._asking(attention, history)
        return asking.mean(dim=1, keepdim=True).expand_as(asking)


class AskedTogether(ActQKV):
    def state(self, model: LanguageModel, prompt: int) -> AttentionPolicy:
        return OfAllRows(self, model.config, prompt)


class FirstRows(Augmented):
    """Only the first row of a pass reads the latents."""

    def merge(self, attention: Attention) -> torch.Tensor:
        found = super().merge(attention)
        assert attention.context is not None
        return torch.cat((found[:1], attention.context[1:]))


class ReadByFirst(Coprocessor):
    def state(self, model: LanguageModel, prompt: int) -> AttentionPolicy:
        right = super().state(model, prompt)
        assert isinstance(right, Augmented)
        return FirstRows(right.method, right.weights, model.config, prompt)


class AsStored(Storing):
    """All rows of a pass read what was sealed before it."""

    def _ends(self, segment: Segment) -> np.ndarray:
        return np.full(len(segment), self.stored, dtype=np.int32)


class SealedByPass(Quantized):
    def state(self, model: LanguageModel, prompt: int) -> AttentionPolicy:
        return AsStored(self, model.config, prompt)


@dataclass(frozen=True)
class Common(CachePolicy):
    def state(self, model: LanguageModel, prompt: int) -> AttentionPolicy:
        return Shared(model.config, prompt)


BROKEN = [
    Counted(0.4),
    OfTheBlock(0.2, page=3, dense_layers=0, least=1),
    ChosenByPass(**{**vars(KVS["lserve"]), "page": 8, "reuse": 8}),
    StoredByPass(**vars(KVS["write-gate"])),
    AskedTogether(**vars(KVS["actqkv"])),
    ReadByFirst(**vars(KVS["coprocessor"])),
    SealedByPass(**vars(KVS["quantized"])),
    Common(),
]


@pytest.mark.parametrize("kv", BROKEN, ids=lambda kv: type(kv).__name__)
def test_the_law_catches_rules_that_break_it(kv: CachePolicy) -> None:
    with pytest.raises(LawBroken):
        check_cache_policy(EXACT, PROMPTS, kv, tolerance=0.0)


def test_what_is_kept_is_what_was_promised() -> None:
    (text,) = decode(EXACT, PROMPTS[:1], cache_policy=H2O(10), max_new_tokens=20)
    assert text.cache.head_lengths.tolist() == [[10, 10]] * 2
    (text,) = decode(EXACT, [PROMPTS[0] * 12], cache_policy="snapkv:budget=40,window=8", max_new_tokens=4)
    assert text.cache.head_lengths.tolist() == [[43, 43]] * 2
    room = -(-text.cache.length // SLOTS) * SLOTS
    assert text.cache.bytes == text.cache.slot_bytes * room, "memory of the prompt is given back"
    (text,) = decode(EXACT, [PROMPTS[0] * 12], cache_policy="streaming-llm:budget=20", max_new_tokens=20)
    assert text.cache.length <= 20 + 16


@pytest.mark.parametrize("kv", ["quest:budget=0.5,dense_layers=0", "actqkv:budget=0.5"])
def test_a_prompt_may_be_shorter_than_a_page(kv: str) -> None:
    full, limited = (decode(EXACT, [[3, 4, 5]], cache_policy=each, max_new_tokens=6)[0] for each in (None, kv))
    assert limited.generated == full.generated, "the page a row stands in is always read"


def test_what_does_not_go_together_is_said() -> None:
    refused = {"quest:budget=0": "is a share of the text", "h2o:recent=2": "share of the budget"}
    refused |= {
        f"{name}:budget={size}": "is a share of the text" for name in ("actqkv", "h2o") for size in ("inf", "nan")
    }
    refused |= {f"meta-soft:flow={flow}": "finite flow" for flow in ("inf", "nan", "-1")}
    for spec, words in refused.items():
        with pytest.raises(SettingsError, match=words):
            decode(EXACT, PROMPTS[:1], cache_policy=spec)
    with pytest.raises(SettingsError, match="cache policy quest needs the keys and values of one model"):
        decode(EXACT, PROMPTS[:1], cache_policy="quest", logits_source="guidance")
    with pytest.raises(SettingsError, match="which the cache policy h2o does not give"):
        decode(EXACT, PROMPTS[:1], cache_policy="h2o", drafter="swift")


def test_a_policy_can_be_asked_for_everywhere() -> None:
    from decodery.cli.given import given
    from decodery.core.errors import UnknownMethod
    from decodery.server.fields import CompletionRequest
    from decodery.server.methods import settings_of
    from decodery.server.offered import offered

    assert (
        given({"cache_policy": "h2o:budget=0.3"})["cache_policy"] == H2O(0.3)
        and given({"cache_policy": "none"})["cache_policy"] == "none"
    )
    with pytest.raises(UnknownMethod, match="no cache-policy method is called 'h20'"):
        given({"cache_policy": "h20"})
    body = CompletionRequest(prompt="a", decodery={"cache_policy": "h2o:budget=0.3"})
    assert settings_of(body, 64)["cache_policy"] == "h2o:budget=0.3"
    names = {each["name"] for each in offered(trust=False, model=MODEL) if each["family"] == "cache-policy"}
    assert names == set(KVS)
