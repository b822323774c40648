"""MC-MoE: bits by an exact allotment, experts that rows do without, and what stays as it is."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from decodery.compression import Int8, MCMoE
from decodery.compression.base import transformed
from decodery.compression.folder import save
from decodery.compression.mc_moe import allotted, few
from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.load import LoadedModel, load
from decodery.models.protocol import LanguageModel
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.testing import check_identical, decode, tiny_transformer
from tiny_models import tiny_loaded

IDS = np.random.default_rng(9).integers(0, 64, 20)
TEXTS = [np.random.default_rng(seed).integers(0, 64, 24) for seed in range(6)]


def mixture(experts: int = 8, taken: int = 2, **settings: object) -> Transformer:
    """Two layers of eight experts, whose routers are sure of themselves."""
    model, draws = tiny_transformer(0, **settings), torch.Generator().manual_seed(0)  # type: ignore[arg-type]
    config = replace(model.config, experts=experts, experts_per_token=taken)
    inner, hidden, dtype = config.intermediate_size, config.hidden_size, model.weights.dtype

    def random(*shape: int, size: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=draws, dtype=torch.float64) * size).to(dtype)

    layers = [
        replace(
            layer,
            gate_up=Dense(random(experts * 2 * inner, hidden, size=hidden**-0.5)),
            down=Dense(random(experts * hidden, inner, size=2 * inner**-0.5)),
            router=random(experts, hidden, size=3 * hidden**-0.5),
        )
        for layer in model.weights.layers
    ]
    return Transformer(config, replace(model.weights, layers=layers))


MODEL = mixture()


def logits(model: LanguageModel, *pieces: np.ndarray) -> torch.Tensor:
    found, cache = [], model.new_cache()
    for piece in pieces or (IDS,):
        found.append(model.forward(Batch([Segment.chunk(piece, cache)])).logits)
        cache.keep(range(len(piece)))
    return torch.cat(found)


def test_bits_are_allotted_as_an_exhaustive_search_allots_them() -> None:
    for seed in range(20):
        draws = np.random.default_rng(seed)
        prices = np.sort(draws.exponential(size=(8, 3)), axis=1)[:, ::-1]
        for budget in (12, 16, 20):
            found = allotted(prices, budget)
            states = np.array(list(product((1, 2, 3), repeat=8)))
            states = states[(states.sum(axis=1) <= budget) & (states == 2).any(axis=1) & (states == 3).any(axis=1)]
            totals = np.take_along_axis(prices[None], states[..., None] - 1, axis=2)[..., 0].sum(axis=1)
            assert prices[np.arange(8), np.array(found) - 1].sum() == pytest.approx(totals.min())
            assert sum(found) <= budget and {2, 3} <= set(found)
    # Nobody is better off with fewer bits, and where the bits do not allow one of 3, there is none.
    assert allotted(np.array([[3.0, 2.0, 1.0]] * 4), 4) == [1, 1, 1, 1]
    assert sorted(allotted(np.array([[9.0, 2.0, 1.0]] * 4), 8)) == [1, 2, 2, 3]
    with pytest.raises(SettingsError, match="too few"):
        allotted(prices, 7)


def test_no_floor_is_bit_identical_and_an_endless_one_leaves_one_expert() -> None:
    plain = logits(MODEL)
    same = Transformer(replace(MODEL.config, experts_floor=(0.0, 0.0)), MODEL.weights)
    assert torch.equal(logits(same), plain)
    alone = Transformer(replace(MODEL.config, experts_floor=(1e9, 1e9)), MODEL.weights)
    first = Transformer(replace(MODEL.config, experts_per_token=1), MODEL.weights)
    assert torch.allclose(logits(alone), logits(first), atol=1e-12) and not torch.allclose(logits(alone), plain)
    scores = alone.forward(Batch([Segment(np.arange(1), tokens=IDS[:1])]))
    assert scores.costs[0].experts == 2 < MODEL.forward(Batch([Segment(np.arange(1), tokens=IDS[:1])])).costs[0].experts


def test_rows_that_do_without_are_the_same_in_chunks_and_one_by_one() -> None:
    pruned, report = transformed(MODEL, [MCMoE(bits=0, pruned=1.0)], TEXTS)
    whole = logits(pruned)
    assert not torch.allclose(whole, logits(MODEL))
    assert torch.allclose(logits(pruned, *(IDS[at : at + 1] for at in range(20))), whole, atol=1e-12)
    assert torch.allclose(logits(pruned, IDS[:7], IDS[7:]), whole, atol=1e-12)
    # The same weights, of which less is multiplied: the second expert of about half of the rows.
    assert pruned.weights is MODEL.weights and report.after.bytes == report.before.bytes
    macs = {part.name: part.size.macs for part in report.stages[0].parts}
    for index in range(2):
        share = macs[f"layers.{index}.down"] / (2 / 8 * MODEL.weights.layers[index].down.weight.numel())
        assert 0.74 <= share <= 0.77
    half, _ = transformed(MODEL, [MCMoE(bits=0, pruned=0.5)], TEXTS)
    assert sum(floor > 0 for floor in half.config.experts_floor) == 1


def test_it_drafts_for_its_original_and_for_nothing_else() -> None:
    prompts = [[1, 2, 3], [5, 6] * 4]
    plain = decode(MODEL, prompts, max_new_tokens=10)
    for settings in (MCMoE(bits=0, pruned=1.0), MCMoE()):
        copy, _ = transformed(MODEL, [settings], TEXTS)
        drafted = decode(MODEL, prompts, drafter=DraftModel(copy), max_new_tokens=10)
        assert [seq.tokens for seq in drafted] == [seq.tokens for seq in plain]
        # In its place it writes other texts.
        assert [seq.tokens for seq in decode(copy, prompts, max_new_tokens=10)] != [seq.tokens for seq in plain]
    check_identical(copy, prompts, seeds=(1,), tested="nothing", max_new_tokens=8, drafter="ngram")


def test_more_bits_lose_less() -> None:
    whole = logits(MODEL).log_softmax(-1)

    def kl(copy: Transformer) -> float:
        return float((whole.exp() * (whole - logits(copy).double().log_softmax(-1))).sum(-1).mean())

    made = [transformed(MODEL, [MCMoE(bits=bits)], TEXTS) for bits in (1.5, 2.0, 3.0)]
    losses = [kl(model) for model, _ in made]
    assert losses == sorted(losses, reverse=True)
    sizes = [report.after.bytes for _, report in made]
    assert sizes == sorted(sizes) and sizes[-1] < made[0][1].before.bytes / 4
    down = MODEL.weights.layers[0].down.weight.float()
    errors = [float((few(down, bits).dense() - down).square().sum()) for bits in (1, 2, 3)]
    assert errors == sorted(errors, reverse=True)
    assert len(few(down, 1).dense()[0, :32].unique()) == 2


def test_it_is_saved_and_what_it_cannot_change_is_refused(tmp_path: Path) -> None:
    tiny = tiny_loaded()
    model = mixture(vocab_size=tiny.model.vocab_size, dtype=torch.float32)
    assert isinstance(tiny.model, Transformer)
    config = replace(model.config, eos_ids=(257,), bos_id=256, vocabulary=tiny.model.config.vocabulary)
    loaded = LoadedModel(Transformer(config, model.weights), tiny.tokenizer, None, "tiny", "float32")
    copy, report = transformed(loaded.model, [MCMoE(pruned=0.5)], [4 * ids for ids in TEXTS])
    save(tmp_path / "copy", copy, report, loaded)
    again = load(tmp_path / "copy").model
    assert torch.equal(logits(again), logits(copy)) and again.config.experts_floor == copy.config.experts_floor
    with pytest.raises(UnsupportedModel, match="two experts or more"):
        transformed(tiny_transformer(0), [MCMoE()], TEXTS)
    with pytest.raises(UnsupportedModel, match="mc-moe alone"):
        transformed(MODEL, [Int8()])
    with pytest.raises(SettingsError, match="must read a text"):
        transformed(MODEL, [MCMoE()])
    for bad in (0.5, 4.0):
        with pytest.raises(SettingsError, match="1 to 3 bits"):
            MCMoE(bits=bad)
