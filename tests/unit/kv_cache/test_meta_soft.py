"""Meta-Soft: what is kept, where the rest flows, and what the tokens learn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from decodery.core.errors import CorruptFile, PromptError, SettingsError, UnsupportedModel
from decodery.kv_cache.after_prompt import Prompt
from decodery.kv_cache.meta_soft import MetaSoft, folded, nearest
from decodery.models.batch import Batch, Segment
from decodery.models.trained.artifact import Artifact
from decodery.models.trained.meta_tokens import MetaTokens, feature, library, mixture
from decodery.testing import decode, tiny_transformer
from decodery.training.kind import Run
from decodery.training.meta_tokens import MetaRecipe, MetaTokenTrainee, RecordedAttention, distance
from decodery.training.one_by_one import train_beside
from largest import Largest
from tiny_models import tiny_loaded

MODEL = tiny_transformer(0)
PROMPT = np.random.default_rng(4).integers(0, 64, 30).tolist()
SOFT = MetaTokens.initial(MODEL.config, 1.0, 6, 3, 2)


def test_rows_of_a_library_stand_at_right_angles() -> None:
    tensors = {**SOFT.tensors, "scale": torch.tensor([1.0, 2, 3, 4, 5, 6])}
    rows = library(tensors)
    assert (rows @ rows.T - torch.diag(tensors["scale"] ** 2)).abs().max() < 1e-5
    shown = feature(torch.randn(7, 32, generator=torch.Generator().manual_seed(0)))
    mixed = mixture(SOFT.tensors, shown, 2, None, 1.0)
    assert ((mixed > 1e-7).sum(dim=-1) == 2).all() and torch.allclose(mixed.sum(dim=-1), torch.ones(3))
    other = mixture(SOFT.tensors, -shown, 2, None, 1.0)
    assert not torch.allclose(mixed, other), "prompts get tokens of their own"
    static = replace(SOFT, static=True)
    embeddings = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(1))
    assert static.compose(embeddings[0]).equal(static.compose(embeddings[1]))


@pytest.mark.parametrize("flow", [0.0, 0.7])
def test_soft_tokens_decide_and_leave_nothing(flow: float) -> None:
    method = MetaSoft(11, SOFT, sinks=2, flow=flow, partners=2)
    (text,) = decode(MODEL, [PROMPT], cache_policy=method, max_new_tokens=2)
    soft = SOFT.compose(MODEL.embed_tokens(torch.tensor(PROMPT)))
    cache = MODEL.new_cache()
    cache.policy = read = Everything()
    MODEL.forward(Batch([Segment.chunk(PROMPT, cache)]))
    rows = {layer: weights.numpy() for layer, weights in read.weights.items()}
    cache.keep(range(30))
    MODEL.forward(Batch([Segment(np.arange(30, 33), None, soft, cache=cache)]))
    cache.keep([])
    for layer in range(2):
        kept_keys, kept_values = text.cache.view(layer)
        keys, values = (part.numpy() for part in cache.view(layer))
        assert kept_keys.shape[1] == 12 and text.cache.next_position == 31
        for head in range(2):
            heads = slice(2 * head, 2 * head + 2)
            paid = read.weights[layer][heads, :, :30].mean(dim=(0, 1)).numpy()
            best = {0, 1, *sorted(range(2, 30), key=lambda j: (-paid[j], j))[:9]}
            between = rows[layer][heads].mean(0)
            total = {j: paid[j] for j in best}
            summed = {j: paid[j] * values[head, j] for j in best}
            for i in set(range(30)) - best if flow else ():
                near = {j: between[max(i, j), min(i, j)] for j in best}
                partners = sorted(near, key=lambda j: -near[j])[:2]
                for j in partners:
                    share = flow * paid[i] * near[j] / sum(near[each] for each in partners)
                    total[j], summed[j] = total[j] + share, summed[j] + share * values[head, i]
            for place, j in enumerate(sorted(best)):
                assert kept_keys[head, place].numpy() == pytest.approx(keys[head, j], abs=1e-6)
                assert kept_values[head, place].numpy() == pytest.approx(summed[j] / total[j], abs=1e-5)


class Everything(RecordedAttention):
    """The weights of all rows, by layer."""

    def __init__(self) -> None:
        super().__init__(0)
        self.weights: dict[int, torch.Tensor] = {}

    def observe(self, attention: object) -> None:
        self.weights[attention.layer] = attention.weights  # type: ignore[attr-defined]


def test_what_flows_is_conserved() -> None:
    draws = torch.Generator().manual_seed(0)
    values, paid = torch.randn(9, 4, generator=draws), torch.rand(9, generator=draws)
    stays = torch.tensor([True, False, True, True, False, False, True, False, True])
    between = torch.rand(4, 5, generator=draws)
    best = between.topk(3, dim=1)
    found = folded(values, paid, *best, stays, 1.0)
    near = torch.zeros(4, 5).scatter(1, *best[::-1])
    weight = paid[stays] + (paid[~stays][:, None] * near / near.sum(dim=1, keepdim=True)).sum(dim=0)
    whole = (paid[:, None] * values).sum(dim=0)
    assert torch.allclose((weight[:, None] * found).sum(dim=0), whole, atol=1e-6)
    lost = (paid[stays][:, None] * values[stays]).sum(dim=0)
    assert not torch.allclose(lost, whole, atol=1e-2), "what is dropped alone is not"
    assert torch.allclose(folded(values, paid, *best, stays, 0.0), values[stays])


def test_attention_between_the_tokens_of_a_long_prompt_is_never_all_there() -> None:
    draws, config = torch.Generator().manual_seed(0), MODEL.config
    queries, keys = torch.randn(2, 3000, 4, generator=draws), torch.randn(1, 3000, 4, generator=draws)
    stays = torch.arange(3000) % 4 == 1
    with Largest() as largest:
        near, partners = nearest(Prompt(config, 0, queries, np.arange(3000), keys, keys), 0, stays, 2)
    assert largest.numbers <= 1 << 20
    later = torch.ones(3000, 3000, dtype=torch.bool).triu(1)
    paid = (queries @ keys[0].T).masked_fill(later, -torch.inf).softmax(dim=-1).mean(dim=0)
    wanted = (paid + paid.tril(-1).T)[~stays][:, stays].topk(2, dim=1)
    assert torch.allclose(near, wanted.values, rtol=1e-4) and partners.equal(wanted.indices)


def test_tokens_learn_to_look_as_what_follows_does(tmp_path: Path) -> None:
    loaded = tiny_loaded()
    texts = [np.random.default_rng(seed).integers(0, 200, 24).tolist() for seed in range(16)]
    recipe = MetaRecipe(steps=24, lr=0.01, library=5, tokens=2, sparse=2, ahead=6)
    found = train_beside(Run(loaded, tmp_path), MetaTokenTrainee(loaded, recipe), texts)
    before = MetaTokenTrainee(loaded, recipe).figures(texts[15:])["divergence"]
    assert found.facts["validation"]["divergence"] < before - 0.1
    again = MetaTokens.load(tmp_path)
    assert again.sparse == 2 and all(again.tensors[name].equal(each) for name, each in found.tensors.items())
    # What it learned under is what it is used under.
    trainee = MetaTokenTrainee(loaded, recipe)
    for name, tensor in trainee.tensors.items():
        tensor.data.copy_(found.tensors[name])
    prompt = texts[0][:-6]
    soft = found.compose(loaded.model.embed_tokens(torch.tensor(prompt)))  # type: ignore[attr-defined]
    assert torch.allclose(trainee.mixed(texts[0]) @ library(trainee.tensors), soft, atol=1e-5)
    wanted, _ = trainee.example(texts[0])
    assert wanted.shape == (2, 2, 18) and torch.allclose(wanted.sum(dim=-1), torch.ones(2, 2), atol=1e-5)
    assert distance(wanted, wanted).item() == pytest.approx(0, abs=1e-6)
    with pytest.raises(PromptError, match="too few"):
        train_beside(Run(loaded, tmp_path / "few"), MetaTokenTrainee(loaded, recipe), texts[:3])


def test_meta_tokens_are_asked_for_and_checked(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="decodery train kv meta-soft"):
        decode(MODEL, [PROMPT], cache_policy="meta-soft")
    with pytest.raises(SettingsError, match="partners of at least 1"):
        MetaSoft(partners=0)
    replace(SOFT, model=MODEL.fingerprint).save(tmp_path / MetaTokens.FILE)
    kv = f"meta-soft:trained={tmp_path},budget=0.5"
    assert decode(MODEL, [PROMPT], cache_policy=kv, max_new_tokens=4)[0].generated
    with pytest.raises(SettingsError, match="another model"):
        decode(tiny_transformer(1), [PROMPT], cache_policy=kv)
    with pytest.raises(UnsupportedModel, match="another shape"):
        replace(SOFT, tensors={"free": torch.zeros(2, 5)}).require(MODEL)
    for name, tensor in (("scale", torch.zeros(3)), ("weight.1", torch.zeros(7, 256)), ("free", torch.zeros(6))):
        Artifact("library of meta-tokens", {**SOFT.tensors, name: tensor}, {"sparse": 2, "static": False}).save(
            tmp_path / MetaTokens.FILE
        )
        with pytest.raises(CorruptFile):
            MetaTokens.load(tmp_path)
