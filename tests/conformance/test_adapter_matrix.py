"""Every causal class of `transformers` that builds from a small configuration: exact through the adapter, or refused.

`make test` runs a few that differ in what they keep and see, other ones every day; `make test-matrix` all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from covering import FULL, some
from decodery.core.errors import UnsupportedModel
from decodery.models.families.config_json import FAMILIES as NATIVE
from decodery.models.transformers.adapter import TransformersModel
from decodery.testing import decode
from small_configs import FAMILIES, small_model
from tiny_models import reference

PROMPT = [5, 9, 17, 5, 9, 17, 40, 41, 5, 9, 17, 40]
NEW = 24
DRAFTERS = ("auto", "token-recycling", "prompt-lookup")
CHAINS = {"gpt_neo"}
"""Families whose rows may not branch."""
SOME = ("gpt_neo", "gpt2", "falcon", "mistral", "gemma2", "phi3", "gpt_oss", "olmoe")
"""A local window that counts slots, plain ones, ALiBi or not, windows in all layers and in some, mixtures."""
REFUSED = ("mamba", "recurrent_gemma", "granitemoehybrid", "bailing_hybrid", "roberta", "llama4_text")
"""State spaces alone and mixed with attention, positions that begin elsewhere, chunks."""

_PARTLY = {"lfm2"}
"""Families whose small configuration has attention alone, and whose published ones have not."""
DOCUMENTED = set(
    re.findall(
        r"`([\w-]+)`",
        (Path(__file__).parents[2] / "docs/supported-models.md")
        .read_text()
        .split("on small random models,")[1]
        .split("Refused")[0],
    )
)
"""Families that the documentation says to run through the adapter."""


def check(model: TransformersModel) -> None:
    """The greedy text is what reading all of it anew for each token gives, whoever drafts."""
    (plain,) = decode(model, [PROMPT], max_new_tokens=NEW)
    anew = reference(model.hf_model, np.array(plain.tokens[:-1]))[len(PROMPT) - 1 :]
    assert anew.argmax(dim=-1).tolist() == list(plain.generated)
    for drafter in DRAFTERS:
        (text,) = decode(model, [PROMPT], drafter=drafter, max_new_tokens=NEW)
        assert text.tokens == plain.tokens, drafter


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def assert_one_sentence(error: UnsupportedModel) -> None:
    text = str(error)
    assert "\n" not in text and ": use " in text and text.split()[0].isidentifier()


def test_the_documentation_says_what_runs() -> None:
    assert len(DOCUMENTED) > 70 and {*FAMILIES} >= DOCUMENTED
    assert {*SOME} - {*DOCUMENTED} <= {*NATIVE}, "what this package runs itself is said elsewhere"
    assert not {*REFUSED, "lfm2", "qwen3_next", "deepseek_v3"} & DOCUMENTED


@pytest.mark.parametrize("family", some(SOME, 4))
def test_texts_are_those_of_plain_decoding(family: str) -> None:
    theirs = small_model(family)
    assert theirs is not None
    with _one_thread():
        ours = TransformersModel(theirs)
        assert ours.capabilities.trees == (family not in CHAINS)
        check(ours)


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_exact_is_refused_with_one_sentence(family: str) -> None:
    theirs = small_model(family)
    assert theirs is not None
    with pytest.raises(UnsupportedModel) as caught:
        TransformersModel(theirs)
    assert_one_sentence(caught.value)


def test_falcon_with_alibi_is_refused_with_one_sentence() -> None:
    theirs = small_model("falcon", alibi=True)
    assert theirs is not None
    with pytest.raises(UnsupportedModel, match="FalconForCausalLM") as caught:
        TransformersModel(theirs)
    assert_one_sentence(caught.value)


# make test-matrix runs every class.
@pytest.mark.parametrize("family", FAMILIES if FULL else [])
def test_every_family_is_exact_or_refused(family: str) -> None:
    theirs: Any = small_model(family)
    if theirs is None:
        pytest.skip("no configuration so small makes one")
    with _one_thread():
        try:
            ours = TransformersModel(theirs)
        except UnsupportedModel as error:
            assert_one_sentence(error)
            assert family not in DOCUMENTED
            return
        assert family in {*DOCUMENTED, *NATIVE, *_PARTLY}
        check(ours)
