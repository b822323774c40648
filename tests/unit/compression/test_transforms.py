"""Transformations: nothing at level zero, the original untouched, a file of the same bits, budgets kept."""

from __future__ import annotations

from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decodery.compression import EvoPress, FFNSplit, Int4, Int8, NMSparsity, SliceGPT
from decodery.compression.base import transformed
from decodery.compression.evopress import switched
from decodery.compression.ffn_split import grouped, routed
from decodery.compression.folder import save
from decodery.compression.int4 import rounded
from decodery.core.errors import NotTrusted, SettingsError, UnsupportedModel
from decodery.core.method_spec import from_network
from decodery.core.registry import methods, resolve
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.load import load
from decodery.models.protocol import LanguageModel
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense
from decodery.sampling import Sampler, Temperature
from decodery.speculative.acceptance.coupled import Coupled
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.testing import check_identical, check_state, decode, tiny_transformer
from methods import OF_FILES, OF_MIXTURES, TRANSFORMS
from tiny_models import tiny_loaded

MODEL = tiny_transformer(0)
TEXTS = [np.random.default_rng(seed).integers(0, 64, 24) for seed in range(6)]
IDS = np.random.default_rng(9).integers(0, 64, 20)


def logits(model: LanguageModel, ids: np.ndarray = IDS) -> torch.Tensor:
    return model.forward(Batch([Segment(np.arange(len(ids)), tokens=ids)])).logits


def tensors(model: Transformer) -> list[torch.Tensor]:
    weights = model.weights
    layers = [part for layer in weights.layers for part in vars(layer).values() if part is not None]
    parts = [weights.embedding, weights.norm, weights.head, *layers]
    return [t for part in parts for t in ([part] if isinstance(part, torch.Tensor) else part.tensors().values())]


def test_every_transformation_is_tested() -> None:
    assert {name.partition(":")[0] for name in (*TRANSFORMS, *OF_MIXTURES, *OF_FILES)} == {
        method.name for method in methods("compression")
    }


@pytest.mark.invariant
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_copy_is_saved_to_the_bit_and_drafts_for_its_original(name: str, tmp_path: Path) -> None:
    loaded = tiny_loaded()
    model = loaded.model
    assert isinstance(model, Transformer)
    texts = [4 * ids for ids in TEXTS]
    before = [tensor.clone() for tensor in tensors(model)]
    changed, report = transformed(model, [resolve("compression", name)], texts)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(model), strict=True))
    assert 0 < report.stages[0].error < 1
    assert report.after.bytes < report.before.bytes or report.after.macs < report.before.macs

    save(tmp_path / "copy", changed, report, loaded)
    again = load(tmp_path / "copy")
    assert torch.equal(logits(again.model), logits(changed)) and not torch.equal(logits(changed), logits(model))
    assert again.tokenizer.fingerprint() == loaded.tokenizer.fingerprint()
    with pytest.raises(SettingsError, match="is kept in"):
        load(tmp_path / "copy", dtype="bfloat16")

    prompts = [[1, 2, 3], [5, 6] * 4]
    plain = decode(MODEL, prompts, max_new_tokens=8)
    other, _ = transformed(MODEL, [resolve("compression", name)], TEXTS)
    drafted = decode(MODEL, prompts, drafter=DraftModel(other), max_new_tokens=8)
    assert [seq.tokens for seq in drafted] == [seq.tokens for seq in plain]


def test_a_copy_drafts_for_its_original_without_a_file() -> None:
    prompts = [[1, 2, 3], [5, 6] * 4]
    plain = decode(MODEL, prompts, max_new_tokens=12)
    drafted = decode(MODEL, prompts, drafter="draft-model:transform=int8", max_new_tokens=12)
    assert [seq.tokens for seq in drafted] == [seq.tokens for seq in plain]
    assert sum(len(seq.trace.steps) for seq in drafted) < 0.6 * sum(len(seq.trace.steps) for seq in plain)
    again = (
        DraftModel(transform="int8").auxiliary_models(MODEL),
        DraftModel(transform="int8", length=2).auxiliary_models(MODEL),
    )
    assert again[0][0] is again[1][0]
    with pytest.raises(SettingsError, match="must read a text"):
        decode(MODEL, prompts, drafter="draft-model:transform=slicegpt(share=0.5)")
    with pytest.raises(SettingsError, match="name one"):
        DraftModel(model="smollm2", transform="int8")
    with from_network(), pytest.raises(NotTrusted):
        resolve("drafter", "draft-model:transform=int8")


def test_a_copy_goes_on_from_what_its_original_has_kept() -> None:
    """It reads its own drafts alone; the text is the original's, drawn, forked and in trees too."""
    prompts = [[1, 2, 3], [5, 6] * 4]
    copy, _ = transformed(MODEL, [NMSparsity()])
    for drafter in (DraftModel(copy, recycled=True), DraftModel(copy, recycled=True, tree_policy="eagle-2(nodes=6)")):
        for sampler in (Sampler.from_settings(), Sampler.from_settings(temperature=1.0)):
            check_identical(MODEL, prompts, drafter=drafter, sampler=sampler, max_new_tokens=12)
    read, passes, clone = {}, {}, Transformer(MODEL.config, MODEL.weights)
    for recycled in (False, True):
        drafter = DraftModel(clone, length=3, recycled=recycled)
        (seq,) = decode(MODEL, prompts[1:], drafter=drafter, max_new_tokens=12)
        read[recycled], passes[recycled] = seq.trace.ledger.rows["draft"], len(seq.trace.steps)
    # A drafter that is the model is always right, whichever of both keeps the text, and need not read the prompt.
    assert passes[True] == passes[False] <= 4 and read[True] <= read[False] - len(prompts[1]) + 1
    with pytest.raises(SettingsError, match="leave recycled"):
        decode(MODEL, prompts, drafter=DraftModel(tiny_transformer(1, num_layers=1), recycled=True))


def test_level_zero_is_the_identity() -> None:
    for orientation in ("pca", "random"):
        sliced, report = transformed(MODEL, [SliceGPT(0.0, orientation)], TEXTS)
        assert (logits(sliced) - logits(MODEL)).abs().max() < 1e-10 and report.stages[0].error == 0.0
    whole, report = transformed(MODEL, [NMSparsity(n=4)])
    assert torch.equal(logits(whole), logits(MODEL)) and report.after == report.before
    # Rotations without their way back are what this would not forgive.
    broken = tiny_transformer(0)
    broken.weights.layers[0].attention_shortcut = torch.linalg.qr(torch.randn(32, 32, dtype=torch.float64)).Q
    assert (logits(broken) - logits(MODEL)).abs().max() > 1e-2


def test_a_stream_of_few_directions_is_sliced_without_loss() -> None:
    # All that is ever written to the stream lies in 16 of 32 directions, which no axis shows.
    model = tiny_transformer(3)
    turn = torch.linalg.qr(torch.randn(32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))).Q
    inside = turn[:, :16] @ turn[:, :16].T
    model.weights.embedding = model.weights.embedding @ inside
    for layer in model.weights.layers:
        for linear in (layer.output, layer.down):
            assert isinstance(linear, Dense)
            linear.weight = inside @ linear.weight
    exact, report = transformed(model, [SliceGPT(share=0.5)], TEXTS)
    assert exact.config.hidden_size == 16 and report.stages[0].error < 1e-12
    assert (logits(exact) - logits(model)).abs().max() < 1e-6
    lossy, _ = transformed(model, [SliceGPT(share=0.75)], TEXTS)
    assert (logits(lossy) - logits(model)).abs().max() > 1e-2
    # A sliced model is a model: trees, caches and batches as with any other.
    settings: dict[str, Any] = {
        "drafter": "ngram",
        "acceptance_rule": Coupled(),
        "sampler": Sampler((Temperature(1.0),)),
    }
    check_state(lossy, [[1, 2, 3], [5, 6] * 4], max_new_tokens=8, **settings)
    check_identical(lossy, [[1, 2, 3], [5, 6] * 4], seeds=(1,), tested="nothing", max_new_tokens=8, **settings)


def test_turning_what_is_left_of_a_stream_at_random_changes_weights_and_no_function() -> None:
    assert SliceGPT() == SliceGPT(0.25, "random")
    plain, turned, again, other = (
        transformed(MODEL, [SliceGPT(0.5, *turn)], TEXTS)[0]
        for turn in (("pca",), ("random",), ("random", 0), ("random", 1))
    )
    for model in (turned, again, other):
        assert (logits(model) - logits(plain)).abs().max() < 1e-9
        assert (logits(model) - logits(MODEL)).abs().max() > 1e-2
    assert all(torch.equal(one, two) for one, two in zip(tensors(turned), tensors(again), strict=True))

    def peaks(model: Transformer) -> float:
        """The largest mean square of a direction of the embeddings, by the mean of all."""
        energy = model.weights.embedding.square().mean(dim=0)
        return float(energy.max() / energy.mean())

    assert peaks(turned) < peaks(plain) and peaks(other) != peaks(turned)
    with pytest.raises(SettingsError, match="orientations of slicegpt"):
        SliceGPT(0.5, "upwards")  # type: ignore[arg-type]


def test_a_cut_costs_more_the_more_is_cut_and_calibration_pays() -> None:
    def kl(share: float, texts: list[np.ndarray]) -> float:
        model, _ = transformed(MODEL, [SliceGPT(share)], texts)
        p, q = logits(MODEL).log_softmax(-1), logits(model).log_softmax(-1)
        return float((p.exp() * (p - q)).sum(-1).mean())

    costs = [kl(share, TEXTS) for share in (0.0, 0.25, 0.5, 0.75)]
    assert costs == sorted(costs)

    by = {
        kind: transformed(MODEL, [NMSparsity(by=kind)], TEXTS)[1].stages[0].error
        for kind in ("magnitude", "activation")
    }
    assert by["activation"] < by["magnitude"]


def test_sparse_weights_are_the_strongest_of_their_group() -> None:
    model, report = transformed(MODEL, [NMSparsity(n=1, m=4)])
    before, after = MODEL.weights.layers[0].down.weight, model.weights.layers[0].down.weight
    groups, kept = before.view(32, -1, 4), after.view(32, -1, 4)
    assert torch.equal(kept.abs().sum(-1), groups.abs().amax(-1)) and bool(((kept != 0).sum(-1) == 1).all())
    # A weight of 64 bits and a place of two for every four.
    assert report.bits == pytest.approx(((64 + 2) / 4 * 16384 + 64 * 2048) / (16384 + 2048), rel=0.2)
    both, report = transformed(MODEL, [NMSparsity(), Int8()])
    zeros = (both.weights.layers[1].qkv.weight == 0).float().mean()
    assert 0.5 <= zeros < 0.55 and len(report.stages) == 2


def test_evolution_keeps_the_budget_and_finds_what_errors_that_cancel_hide() -> None:
    groups = [0] * 5 + [1] * 3
    state, chance = (3,) * 8, np.random.default_rng(0)
    for _ in range(300):
        state = switched(state, groups, chance)
        assert sum(state[:5]) == 15 and sum(state[5:]) == 9 and min(state) >= 2 and max(state) <= 6

    # Two units harm only where one of them is coarse without the other; a step that changes one alone never pays.
    def cost(state: tuple[int, ...]) -> float:
        pair = 0.0 if state[0] == state[1] == 2 else 3.0 * ((state[0] == 2) + (state[1] == 2))
        return pair + sum((4 - bits) ** 2 * (unit + 2) for unit, bits in enumerate(state[2:]))

    def judge(states: list[tuple[int, ...]], tokens: int) -> list[float]:
        return [cost(each) for each in states]

    best = min((s for s in product(range(2, 7), repeat=6) if sum(s) == 18), key=cost)
    assert best[:2] == (2, 2)
    one_step = [
        tuple(b - (u == i) + (u == j) for u, b in enumerate((3,) * 6))
        for i, j in [*combinations(range(6), 2)]
        for i, j in ((i, j), (j, i))
    ]
    greedy = min(one_step, key=cost)
    assert greedy[:2] != (2, 2)
    search = EvoPress(generations=40, children=8)
    found = [
        search.search((3,) * 6, [0] * 6, judge, np.random.default_rng(seed), lambda *_: None) for seed in range(20)
    ]
    assert sum(cost(each) == cost(best) for each in found) >= 18


def test_evolution_beats_the_uniform_start() -> None:
    uniform, plain = transformed(MODEL, [Int4(bits=3)], TEXTS)
    searched, report = transformed(MODEL, [EvoPress(generations=12, children=6, tokens=(48, 144))], TEXTS)
    assert report.after.bytes == plain.after.bytes

    def kl(model: Transformer) -> float:
        p, q = logits(MODEL).log_softmax(-1), logits(model).double().log_softmax(-1)
        return float((p.exp() * (p - q)).sum(-1).mean())

    assert kl(searched) < kl(uniform)


def test_layers_of_five_and_six_bits_lose_less_by_the_bit() -> None:
    chance = torch.Generator().manual_seed(4)
    whole = Dense(torch.randn(24, 96, generator=chance), torch.randn(24, generator=chance))
    rows = torch.randn(5, 96, generator=chance)
    errors = []
    for bits in (2, 3, 4, 5, 6):
        made = rounded(whole, bits)
        dense = made.linear.dense()  # type: ignore[union-attr]
        errors.append(float((dense - whole.weight).square().mean().sqrt()))
        assert made.size.bytes == 24 * 96 * (bits + 1) / 8 + 4 * 24
        if bits > 4:
            # No number is further from its weight than half of the largest step, but for the rounding of scales.
            assert made.linear.bits == bits  # type: ignore[union-attr]
            step = made.linear.scales.float()[..., : 1 if bits == 5 else 2].max()  # type: ignore[union-attr]
            assert float((dense - whole.weight).abs().max()) <= (1.0 if bits == 5 else 0.51) * float(step)
            exact = rows @ dense.T + whole.bias
            assert torch.allclose(made.linear(rows), exact, atol=0.05 * float(exact.abs().max()))
    # A bit more halves the error.
    assert all(1.6 < a / b < 3 for a, b in pairwise(errors))


def test_shapes_of_which_there_is_one_cannot_be_searched() -> None:
    search = EvoPress(generations=1)
    with pytest.raises(UnsupportedModel, match="no two of them have one shape"):
        search.search((3, 3), [0, 1], lambda states, tokens: [0.0], np.random.default_rng(0), lambda *_: None)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="must read a text"):
        transformed(MODEL, [SliceGPT()])
    with pytest.raises(SettingsError, match="nothing to do"):
        transformed(MODEL, [])
    with pytest.raises(UnsupportedModel, match="sliced already"):
        transformed(MODEL, [SliceGPT(), SliceGPT()], TEXTS)
    for bad in (
        "slicegpt:share=1.0",
        "nm-sparsity:n=5",
        "fp4:format=E4M3",
        "fp4:activations=5",
        "fp4:rounds=0",
        "evopress:survivors=2",
        "evopress:bits=2",
        "evopress:bits=6",
    ):
        with pytest.raises(SettingsError):
            resolve("compression", bad)
    (tmp_path / "note").write_text("mine")
    with pytest.raises(SettingsError, match="name a new folder"):
        save(tmp_path, *transformed(MODEL, [Int8()]), tiny_loaded())


def test_experts_of_a_split_mlp_add_up_to_it_and_the_router_learns_which_matter() -> None:
    whole = logits(MODEL)
    for texts in ([], TEXTS):
        changed, report = transformed(MODEL, [FFNSplit(experts=4, active=0)], texts)
        assert (logits(changed) - whole).abs().max() < 1e-10 and report.stages[0].error == 0
        assert changed.config.experts == changed.config.experts_per_token == 4
    made = [transformed(MODEL, [FFNSplit(experts=4, active=n)], TEXTS) for n in (1, 3)]
    assert [report.stages[0].error for _, report in made] == sorted((r.stages[0].error for _, r in made), reverse=True)
    assert report.before.macs > made[0][1].after.macs
    # Against a router that knows nothing, and groups that do not belong together.
    torch.manual_seed(0)
    rows, sizes = torch.randn(400, 16).double(), torch.rand(400, 4).double()
    sizes[torch.arange(400), rows[:, :4].argmax(dim=1)] += 4
    router = routed(rows, sizes, 150)
    assert ((rows @ router.T).argmax(dim=1) == sizes.argmax(dim=1)).double().mean() > 0.8
    active = torch.zeros(60, 12)
    for channel in range(12):
        active[channel % 3 :: 3, channel] = torch.randn(20)
    assert all(len({int(channel) % 3 for channel in group}) == 1 for group in grouped(active, 3))
    with pytest.raises(SettingsError, match="must read a text"):
        transformed(MODEL, [FFNSplit()])
    with pytest.raises(UnsupportedModel, match="equal parts"):
        transformed(MODEL, [FFNSplit(experts=7)], TEXTS)
    with pytest.raises(SettingsError, match="at least 2 experts"):
        FFNSplit(active=9)
