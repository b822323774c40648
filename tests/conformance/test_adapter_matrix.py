"""Some causal classes of `transformers` through the adapter: exact, whoever drafts, or refused with a sentence.

All of them, from folders and with the differences of logits: `tests/integration/models/test_model_matrix.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from covering import some
from decodery.core.errors import UnsupportedModel
from decodery.models.transformers.adapter import TransformersModel
from decodery.testing import decode
from small_configs import build
from tiny_models import reference

PROMPT = [5, 9, 17, 5, 9, 17, 40, 41, 5, 9, 17, 40]
NEW = 16
DRAFTERS = ("auto", "token-recycling", "prompt-lookup")
SOME = {
    **dict.fromkeys(("gpt2", "falcon", "mistral", "gemma2", "phi3", "gpt_oss", "olmoe"), "trees"),
    **dict.fromkeys(("deepseek_v3", "gemma4_text", "llama4_text", "mimo_v2_flash"), "trees"),
    **dict.fromkeys(("gpt_neo", "qwen3_next", "nemotron_h", "rwkv", "bloom", "roberta", "recurrent_gemma"), "chains"),
    **dict.fromkeys(("mamba", "jamba"), "none"),
}
"""Plain caches, windows in all layers and in some, mixtures; keys wider than values, layers that differ, chunks; a
window that counts slots, states of every kind, positions that begin elsewhere, no cache; states that take one token at
a time."""


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


@pytest.mark.parametrize("family", some(tuple(SOME), 4))
def test_texts_are_those_of_plain_decoding(family: str) -> None:
    with _one_thread():
        ours = TransformersModel(build(family))
        can = ours.capabilities
        assert SOME[family] == ("trees" if can.trees else "chains" if can.chains else "none")
        check(ours)


def test_falcon_with_alibi_counts_its_own_positions() -> None:
    with _one_thread():
        ours = TransformersModel(build("falcon", alibi=True))
        assert ours.keeps == "states" and not ours.capabilities.trees
        check(ours)


@pytest.mark.parametrize("family", ["xlnet", "cpmant"])
def test_what_is_not_causal_is_refused_with_one_sentence(family: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        TransformersModel(build(family))
    text = str(caught.value)
    assert "\n" not in text and ": use generate() " in text and "when others follow it" in text
