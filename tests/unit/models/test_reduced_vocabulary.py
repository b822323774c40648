"""Models that predict a part of their vocabulary: the whole model's logits to the bit, and lossless drafts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from decodery.core.errors import SettingsError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Batch, Segment
from decodery.models.footprint import weight_bytes
from decodery.models.loaders.gguf_blocks import READ
from decodery.models.native.floats import NF4Linear
from decodery.models.native.ternary import TernaryLinear
from decodery.models.reduced_vocabulary import ReducedVocabulary, reduced
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense, Kept
from decodery.sampling.sampler import Sampler
from decodery.speculative.drafters.auto import Auto
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.drafters.easyspec import EasySpec
from decodery.step.draft_tree import DraftTree
from decodery.testing import LawBroken, check_distribution, check_identical, tiny_transformer, to_int8
from tiny_gguf import as_linear, random_blocks

TARGET, OTHER = tiny_transformer(0), tiny_transformer(0, num_layers=1)
INTEGERS = to_int8(TARGET)
OUTPUTS = 20
SOME = torch.tensor([33, 0, 5])


def layers() -> dict[str, Any]:
    torch.manual_seed(0)
    found = {kind: as_linear(kind, random_blocks(Kind[kind], 34, 2)) for kind in READ}
    found["ternary"] = TernaryLinear.of(torch.randint(-1, 2, (34, 64)), torch.rand(34), torch.rand(34))
    codes = torch.randint(0, 256, (34, 32), dtype=torch.uint8)
    return found | {"nf4": NF4Linear(codes, torch.rand(34, 1))}


@pytest.mark.parametrize("name", [*READ, "ternary", "nf4"])
def test_some_outputs_of_a_layer_are_those_of_the_whole_one(name: str) -> None:
    layer = layers()[name]
    rows = torch.randn(3, layer.shape[1])
    assert torch.equal(layer.some(SOME)(rows), layer(rows)[:, SOME])


def models() -> dict[str, Transformer]:
    narrow = tiny_transformer(1, dtype=torch.bfloat16)
    # Logits of a few units are capped by much.
    soft = replace(narrow.config, logit_cap=2.0)
    found = {"float64": TARGET, "int8": to_int8(TARGET), "16 bits": narrow, "capped": Transformer(soft, narrow.weights)}
    return found | {"capped float64": Transformer(replace(TARGET.config, logit_cap=2.0), TARGET.weights)}


@pytest.mark.parametrize("name", list(models()))
def test_logits_are_those_of_the_whole_model_to_the_bit(name: str) -> None:
    model = models()[name]
    few = ReducedVocabulary(model, OUTPUTS)
    found = []
    for each in (model, few):
        segments = [Segment.chunk(np.arange(5), each.new_cache(), [4, 1]), Segment.chunk([7], each.new_cache())]
        found.append(each.forward(Batch(segments), taps=("half",)))
    whole, part = found
    assert torch.equal(part.logits[:, :OUTPUTS], whole.logits[:, :OUTPUTS]) and part.logits.shape == whole.logits.shape
    assert (part.logits[:, OUTPUTS:] == -torch.inf).all()
    assert part.bounds == whole.bounds and part.costs == whole.costs and list(part.hidden) == ["half"]
    assert torch.equal(part.hidden_of(0, "half"), whole.hidden_of(0, "half"))
    assert reduced(model, 64, "draft-model") is model


def test_its_weights_are_those_that_a_pass_reads() -> None:
    head = TARGET.weights.head.weight.nbytes  # type: ignore[attr-defined]
    assert weight_bytes(ReducedVocabulary(TARGET, 16)) == weight_bytes(TARGET) - head * 48 // 64


@pytest.mark.parametrize("drafter", [
    DraftModel(OTHER, vocabulary=OUTPUTS),
    DraftModel(OTHER, vocabulary=OUTPUTS, tree_policy="eagle-2(nodes=6)"),
    DraftModel(transform="int4", recycled=True, vocabulary=OUTPUTS),
    Auto(warm=None, model=OTHER, vocabulary=OUTPUTS),
], ids=["chain", "tree", "recycled", "auto"])  # fmt: skip
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_those_of_plain_decoding(drafter: Any, temperature: float) -> None:
    prompts, sampler = [[1, 2, 3], [5, 7, 9] * 4], Sampler.from_settings(temperature=temperature)
    tested = None if isinstance(drafter, Auto) else "drafted"
    # A copy in integers keeps keys and values as a model in integers does.
    target = INTEGERS if isinstance(drafter, DraftModel) and drafter.recycled else TARGET
    check_identical(target, prompts, drafter=drafter, sampler=sampler, seeds=(0,), tested=tested)  # type: ignore[arg-type]


def test_a_model_drafts_of_itself_what_it_predicts() -> None:
    """Every drafted token below the bound is right where the draft is the target."""
    (seq,) = check_identical(TARGET, [[1, 2, 3]], drafter=DraftModel(TARGET, vocabulary=40, length=2), seeds=(0,))
    text, drafted = seq.generated, sum(step.accepted for step in seq.trace.steps)
    assert min(text) < 40 <= max(text) and 0 < drafted <= sum(token < 40 for token in text)


@dataclass(frozen=True)
class OfTheWhole(DraftModel):
    """Claims the probabilities of a draw from all tokens, which are about equally likely."""

    def propose(self, seq: Any, budget: Any) -> Any:
        tree: DraftTree = yield from super().propose(seq, budget)
        return replace(tree, distributions={node: law * 2 / 4 for node, law in tree.distributions.items()})


def test_rules_that_want_probabilities_get_those_of_the_reduced_vocabulary() -> None:
    flat = Sampler.from_settings(temperature=5.0)
    small, smaller = (tiny_transformer(seed, vocab_size=4, num_layers=1) for seed in (0, 1))

    def check(drafter: DraftModel) -> None:
        check_distribution(
            small, [0, 1, 2], drafter=drafter, acceptance_rule="rejection", sampler=flat, length=4, draws=200
        )

    check(DraftModel(smaller, vocabulary=2, length=3))
    with pytest.raises(LawBroken, match="do not follow"):
        check(OfTheWhole(smaller, vocabulary=2, length=3))


def test_what_cannot_be_reduced_is_refused() -> None:
    for drafter in (DraftModel, Auto):
        with pytest.raises(SettingsError, match="vocabulary >= 1, not 0"):
            drafter(model=OTHER, vocabulary=0)

    with pytest.raises(SettingsError, match="that of a second model: give model"):
        Auto(vocabulary=8)

    with pytest.raises(SettingsError, match="easyspec predicts all tokens"):
        EasySpec(OTHER, vocabulary=8)

    class Closed:
        capabilities = replace(OTHER.capabilities, parts=False)

        def __getattr__(self, name: str) -> Any:
            return getattr(OTHER, name)

    with pytest.raises(SettingsError, match="projection can be called apart: leave vocabulary out"):
        Engine(TARGET).submit(Request([1], drafter=DraftModel(Closed(), vocabulary=8)))  # type: ignore[arg-type]

    kept = Kept(torch.arange(48), torch.arange(64) % 48)
    head = Dense(TARGET.weights.head.weight[:48])  # type: ignore[attr-defined]
    some = Transformer(replace(TARGET.config, kept_tokens=48), replace(TARGET.weights, kept=kept, head=head))
    with pytest.raises(SettingsError, match="predicts 48 of 64: leave vocabulary out"):
        Engine(TARGET).submit(Request([1], drafter=DraftModel(some, vocabulary=8)))
