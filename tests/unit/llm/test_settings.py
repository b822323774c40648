"""Settings by name in Python: whatever does not exist or is of the wrong type is one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

import decodery
from decodery.core.errors import SettingsError, UnknownMethod
from decodery.core.settings import checked
from decodery.engine.request import Request
from decodery.llm.llm import LLM
from decodery.sampling import Sampler, TopP
from decodery.server.fields import CompletionRequest
from decodery.server.methods import settings_of
from tiny_bench import make_lm

UNLOADED = object.__new__(LLM)
"""Settings are looked at before the model is."""
UNLOADED.origin = "the-model"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_tokens": 5}, "there is no setting 'max_tokens'; give max_new_tokens"),
        ({"search": "smc"}, "there is no setting 'search'; call lm.search"),
        ({"diffuse": "static"}, "there is no setting 'diffuse'; call lm.diffuse"),
        ({"regex": "a+"}, "there is no setting 'regex'; give a constraint, such as constraint=Regex"),
        ({"temprature": 1.0}, "there is no setting 'temprature'; try temperature"),
        ({"topk": 3}, "there is no setting 'topk'; try top_k"),
        ({"eos_ids": (1,)}, "there is no setting 'eos_ids'; give stop_token_ids"),
        ({"zzz": 1}, "try acceptance_rule, apply_chat_template, cache_policy"),
        ({"stop": 5}, "stop must be a text or a list of texts, not 5"),
        ({"stop": ["a", 5]}, "stop must be a text or a list of texts, not ['a', 5]"),
        ({"drafter": 5}, "drafter must be a Drafter or a text or None, not 5"),
        ({"acceptance_rule": None}, "acceptance_rule must be an AcceptanceRule or a text, not None"),
        ({"draft_length": 3}, "draft_length must be a DraftLengthPolicy or a text or None, not 3"),
        ({"logits_source": 1.5}, "logits_source must be"),
        ({"sampler": 0.7}, "sampler must be a Sampler or a LogitsProcessor or a text or a list or None, not 0.7"),
        ({"temperature": "hot"}, "temperature must be a number or None, not 'hot'"),
        ({"top_k": 2.5}, "top_k must be an integer or None, not 2.5"),
        ({"top_p": True}, "top_p must be a number or None, not True"),
        ({"seed": "7"}, "seed must be an integer, not '7'"),
        ({"ignore_eos": "yes"}, "ignore_eos must be True or False, not 'yes'"),
        ({"logit_bias": 5}, "logit_bias must be a mapping of integers to numbers or None, not 5"),
        ({"min_new_tokens": 5, "max_new_tokens": 2}, "min_new_tokens is 5 and max_new_tokens 2: give a larger"),
        ({"max_new_tokens": "x" * 999}, "max_new_tokens must be an integer, not 'xxx"),
    ],
)
def test_a_request_names_what_is_wrong(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        UNLOADED.request([1], **settings)
    assert said in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 700


def test_so_do_the_other_calls() -> None:
    for call in (UNLOADED.generate, UNLOADED.stream, lambda *given, **named: UNLOADED.search(*given, "beam", **named)):
        with pytest.raises(SettingsError, match="apply_chat_template must be True or False, not 1"):
            call("hi", apply_chat_template=1)
    with pytest.raises(SettingsError, match=r"n must be an integer, not 1\.5"):
        UNLOADED.generate("hi", n=1.5)
    with pytest.raises(SettingsError, match="there is no setting 'dtyp'; try dtype"):
        decodery.load("smollm2", dtyp="int8")
    with pytest.raises(SettingsError, match="dtype must be a text, not 8"):
        decodery.load("smollm2", dtype=8)


def test_what_fits_is_handed_on() -> None:
    def inner(*, count: int | None = None, hidden: int = 0) -> None: ...

    @checked(inner, but=("hidden",))
    def outer(first: Any, *, share: float = 0.0, names: Sequence[str] = (), **more: Any) -> Any:
        return first, share, names, more

    assert outer(object, share=1)[1] == 1 and outer(1, share=np.float32(0.5))[1] == 0.5
    assert outer(1, names=("a", "b"), count=np.int64(3)) == (1, 0.0, ("a", "b"), {"count": 3})
    with pytest.raises(SettingsError, match="there is no setting 'hidden'"):
        outer(1, hidden=3)
    with pytest.raises(SettingsError, match="names must be a list of texts, not 'ab'"):
        outer(1, names="ab")

    @checked()
    def opened(*, table: Mapping[int, float] | None = None, **more: Any) -> Any:
        return table, more

    assert opened(table={1: 2.0}, other=3) == ({1: 2.0}, {"other": 3})


@pytest.mark.parametrize("seed", [-1, 1 << 64, 1.5])
def test_a_seed_that_would_be_another_one_is_refused(seed: Any) -> None:
    with pytest.raises(SettingsError, match=r"seed must be an integer from 0 to 2\^64 - 1"):
        Request([1], seed=seed)
    assert Request([1], seed=(1 << 64) - 1).seed == (1 << 64) - 1


def test_seeds_of_several_texts_go_on_from_0_behind_the_last() -> None:
    lm = make_lm()
    settings = {"apply_chat_template": False, "temperature": 1.0, "max_new_tokens": 8, "drafter": None}
    together = lm.generate("ab", n=3, seed=2**64 - 2, **settings)
    assert [out.seed for out in together] == [2**64 - 2, 2**64 - 1, 0]
    assert [out.tokens for out in together] == [lm.generate("ab", seed=out.seed, **settings).tokens for out in together]
    assert len({tuple(out.tokens) for out in together}) == 3


def test_a_method_is_named_alone_or_in_a_list_and_none_is_no_method() -> None:
    lm = make_lm()
    alone = lm.request([1], sampler="top-p:p=0.9", monitor=None)
    assert alone.sampler == lm.request([1], sampler=["top-p:p=0.9"]).sampler == Sampler(["top-p:p=0.9"])
    assert lm.request([1], sampler=TopP(0.9)).sampler == alone.sampler and alone.monitors == ()
    body = CompletionRequest(prompt="a", decodery={"sampler": "top-p:p=0.9"})
    assert lm.request([1], **settings_of(body, 64)).sampler == alone.sampler
    assert lm.generate("ab", apply_chat_template=False, max_new_tokens=2, monitor=None).monitors == ()
    with pytest.raises(UnknownMethod, match="no logits-processor method is called 'top-o'"):
        lm.request([1], sampler="top-o")
