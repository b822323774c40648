"""Mamba-2 layers: a scan over a tree is the recurrence along every path, and texts remember as caches must."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from covering import some
from decodery.core.errors import CorruptFile, DecoderyError, UnsupportedModel
from decodery.core.native.kernels import choose, kernel_sets
from decodery.models.batch import Batch, Segment
from decodery.models.cache.kept_rows import behind, parents
from decodery.models.config import Mamba
from decodery.models.families.config_json import read_config
from decodery.models.footprint import weight_bytes
from decodery.models.layer_plan import LayerPlan
from decodery.models.loaders import fused
from decodery.models.loaders.description import Description
from decodery.models.loaders.load import load
from decodery.models.native.scan import NativeScan
from decodery.models.torch.mamba import advance, tree_scan
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.testing import check_cache, check_identical, check_state, decode, tiny_transformer
from decodery.training.cut import changeable, parameters
from decodery.training.draft import check_target
from methods import DRAFTERS
from tiny_models import doubled, make_model, random_ids, reference, save, tree_mask


def loaded(case: str, home: Path) -> Transformer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DECODERY_HOME", str(home / "home"))
        model = load(save(make_model(case), home / "model"), dtype="float32", device="cpu").model
    assert isinstance(model, Transformer)
    return model


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return doubled(loaded("bamba", tmp_path_factory.mktemp("hybrid")))


BOTH = ("zamba2", "zamba2, rotated, blocks in turns", "falcon_h1", "falcon_h1, multiplied and normed")
"""Hybrids of which some layers have keys and values beside a state."""


@pytest.fixture(scope="module", params=some(BOTH, 2))
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Transformer]:
    return request.param, doubled(loaded(request.param, tmp_path_factory.mktemp("both")))


def random_rows(rng: np.random.Generator, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Steps, decay, x, b, c and a state of two groups of two heads."""
    sizes = ((rows, 4), (4,), (rows, 4, 3), (rows, 2, 5), (rows, 2, 5), (4, 3, 5))
    steps, decay, *others = (torch.from_numpy(rng.normal(size=size)).to(dtype) for size in sizes)
    return steps.exp(), -decay.exp(), *others


def recurrence(
    path: list[int], steps: torch.Tensor, decay: torch.Tensor, x: torch.Tensor, b: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """The state after a path, row after row."""
    for row in path:
        led = b[row].repeat_interleave(2, dim=0)
        added = (steps[row][:, None] * x[row])[:, :, None] * led[:, None]
        state = (steps[row] * decay).exp()[:, None, None] * state + added
    return state


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_a_scan_over_a_tree_is_the_recurrence_along_every_path(dtype: torch.dtype, tolerance: float) -> None:
    rng = np.random.default_rng(0)
    wrong = 0.0
    for _ in range(200):
        rows = int(rng.integers(1, 41))
        tree = [-1, *(int(rng.integers(0, node)) for node in range(1, rows))]
        seen = torch.from_numpy(tree_mask(tree))
        steps, decay, x, b, c, state = random_rows(rng, rows, dtype)
        said = tree_scan(steps, decay, x, b, c, seen, state)
        chained = tree_scan(steps, decay, x, b, c, torch.ones_like(seen).tril(), state)
        states = list[torch.Tensor]()
        for node, parent in enumerate(tree):
            # A path's state is its parent's, one row on.
            states.append(recurrence([node], steps, decay, x, b, state if parent < 0 else states[parent]))
            expected = torch.einsum("hps,hs->hp", states[node], c[node].repeat_interleave(2, dim=0))
            assert (said[node] - expected).abs().max() <= tolerance * max(1.0, float(expected.abs().max()))
            wrong = max(wrong, float((chained[node] - expected).abs().max()))
        replayed = advance(steps, decay, x, b, state)
        walked = recurrence(list(range(rows)), steps, decay, x, b, state)
        assert (replayed - walked).abs().max() <= tolerance * max(1.0, float(walked.abs().max()))
    # The order of packing is no path: a scan that took it for one would be found out.
    assert wrong > 0.1


SHAPE = Mamba(heads=4, head_dim=6, groups=2, state=21, kernel=3, most_step=2.0)


def mixer_tensors(seed: int) -> list[torch.Tensor]:
    """Convolution, its bias, the steps' bias, decay, skip and norm of `SHAPE`."""
    sizes = ((SHAPE.channels, SHAPE.kernel), (SHAPE.channels,), (4,), (4,), (4,), (SHAPE.inner,))
    rng = np.random.default_rng(seed)
    found = [torch.from_numpy(rng.normal(size=size).astype(np.float32)) for size in sizes]
    found[3] = -found[3].exp()
    return found


def mixed(tensors: list[torch.Tensor], held: torch.Tensor, gate: torch.Tensor, path: list[int]) -> torch.Tensor:
    """What the last row of a path of rows says, in float64 by the formulas."""
    conv, conv_bias, step_bias, decay, skip, norm = (each.double() for each in tensors)
    rows, raw = held.double().split((SHAPE.channels, 4), dim=1)
    behind = torch.cat((torch.zeros(SHAPE.kernel - 1, SHAPE.channels, dtype=torch.float64), rows[path]))
    windows = behind.unfold(0, SHAPE.kernel, 1)
    inputs = torch.nn.functional.silu((windows * conv).sum(2) + conv_bias)
    x, b, c = inputs.split((SHAPE.inner, 42, 42), dim=1)
    x, b, c = x.unflatten(1, (4, 6)), b.unflatten(1, (2, 21)), c.unflatten(1, (2, 21))
    steps = torch.nn.functional.softplus(raw[path] + step_bias).clamp(max=SHAPE.most_step)
    state = recurrence(list(range(len(path))), steps, decay, x, b, torch.zeros(4, 6, 21, dtype=torch.float64))
    said = torch.einsum("hps,hs->hp", state, c[-1].repeat_interleave(2, dim=0)) + skip[:, None] * x[-1]
    gated = said.flatten() * torch.nn.functional.silu(gate[path[-1]].double())
    return torch.nn.functional.rms_norm(gated.unflatten(0, (2, -1)), (12,), None, 1e-5).flatten() * norm


def test_native_rows_say_the_same_bits_however_a_text_is_cut_and_what_the_formulas_say() -> None:
    rng, tensors = np.random.default_rng(1), mixer_tensors(0)
    scan = NativeScan(SHAPE, tensors, 1e-5)
    tree = [-1, *(int(rng.integers(max(0, node - 4), node)) for node in range(1, 30))]
    seen = torch.from_numpy(tree_mask(tree))
    held = torch.from_numpy(rng.normal(size=(30, SHAPE.width)).astype(np.float32))
    wide = torch.from_numpy(rng.normal(size=(30, SHAPE.inner + 7)).astype(np.float32))
    gate, nothing = wide[:, : SHAPE.inner], torch.zeros(4, 6, 21)
    line, whole = parents(seen), []
    for name in kernel_sets():
        choose(name)
        whole.append(scan.said(held, 0, line, nothing, gate))
    choose(kernel_sets()[0])
    assert all(torch.equal(each, whole[0]) for each in whole[1:])
    assert torch.equal(scan.said(held, 0, line, nothing, gate[-5:]), whole[0][-5:])
    packed = scan.said(held, 0, None, nothing, gate)
    wrong = 0.0
    for node in range(30):
        path = torch.where(seen[node])[0].tolist()
        expected = mixed(tensors, held, gate, path).float()
        assert (whole[0][node] - expected).abs().max() < 1e-4
        wrong = max(wrong, float((packed[node] - expected).abs().max()))
        # The path as a text of its own, of which the last row comes alone and all others are content.
        rows, state, done = held[path], nothing, 0
        for size in (3, 1, len(path)):
            stop = min(done + size, len(path) - 1)
            if stop > done:
                state = scan.advance(rows[max(0, done - 2) : stop], min(done, 2), state)
                done = stop
        last = scan.said(rows[max(0, done - 2) :], min(done, 2), None, state, gate[node : node + 1])
        assert torch.equal(last[0], whole[0][node])
    # Taking the order of packing for a path would be found out.
    assert wrong > 0.1
    # Where nothing is normed, rows are those of a norm that is taken back.
    bare = NativeScan(SHAPE, [*tensors[:5], None], 1e-5).said(held, 0, line, nothing, gate)
    normed = torch.nn.functional.rms_norm(bare.unflatten(1, (2, -1)), (12,), None, 1e-5).flatten(1) * tensors[5]
    assert (normed - whole[0]).abs().max() < 1e-5 < (bare - whole[0]).abs().max()


def test_every_row_finds_the_one_before_it() -> None:
    tree = [-1, 0, 0, 1, 1, 2]
    seen = torch.from_numpy(tree_mask(tree))
    expected = [-1, 0, 1, 2, 2, 3, 3, 4]
    assert behind(parents(seen), 2).tolist() == expected
    # Rows that stayed from an earlier pass stand where those that see them have them.
    assert behind(parents(seen[3:]), 2).tolist() == expected


def test_what_a_hybrid_remembers_obeys_the_law_of_caches(hybrid: Transformer) -> None:
    assert check_cache(hybrid, programs=4, steps=12) < 1e-9
    whole = reference(make_model("bamba").double(), random_ids(90))
    cache = hybrid.new_cache()
    logits = hybrid.forward(Batch([Segment.chunk(random_ids(90), cache)])).logits
    assert (logits - whole).abs().max() < 1e-5  # over chunks of the scan; transformers' states are float32
    cache.keep(range(90))
    held = cache.bytes
    cache.truncate(3)
    assert cache.states.bytes == 0 and cache.bytes <= held


@pytest.mark.parametrize("drafter", ["prompt-lookup", "token-recycling", "ngram", "suffix-automaton"])
def test_drafts_on_a_hybrid_give_the_text_of_plain_decoding(drafter: str, hybrid: Transformer) -> None:
    prompts = [[5, 6, 7, 8] * 4, [9, 10, 9, 10, 9]]
    check_identical(hybrid, prompts, drafter=drafter, max_new_tokens=16, tested="drafted")
    assert check_state(hybrid, prompts, drafter=drafter, max_new_tokens=8) < 1e-9


@pytest.mark.integration
def test_every_drafter_runs_on_a_hybrid_but_those_that_leave_layers_out_or_read_keys(hybrid: Transformer) -> None:
    asked: dict[str, Any] = {"seeds": (0,), "max_new_tokens": 8}
    prompts, refused = [[5, 6, 7, 8] * 3], set()
    plain = decode(hybrid, prompts, **asked)
    other = tiny_transformer(0, num_layers=1, vocab_size=hybrid.vocab_size, hidden_size=hybrid.config.hidden_size)
    for name, make in DRAFTERS.items():
        try:
            check_identical(hybrid, prompts, drafter=make(other), plain=plain, tested="nothing", **asked)
        except UnsupportedModel as error:
            assert re.search(f"the drafter {name} needs .* which", str(error))
            refused.add(name)
    assert refused == {"del", "kangaroo", "swift", "compressed-cache"}
    with pytest.raises(DecoderyError, match="no draft can be cut"):
        check_target(type("Loaded", (), {"model": hybrid, "name": "it"})())


def test_layers_that_attend_beside_a_state_remember_both(both: tuple[str, Transformer]) -> None:
    case, model = both
    assert check_cache(model, programs=3, steps=10) < 1e-9
    whole = reference(make_model(case).double(), random_ids(70))
    cache = model.new_cache()
    logits = model.forward(Batch([Segment.chunk(random_ids(70), cache)])).logits
    assert (logits - whole).abs().max() < 1e-4  # transformers' states are float32
    # What transformers writes step by step from its own cache, whose states nobody made again.
    theirs = make_model(case).generate(
        torch.tensor([[5, 6, 7, 8]]), max_new_tokens=12, do_sample=False, eos_token_id=None
    )
    (ours,) = decode(model, [[5, 6, 7, 8]], max_new_tokens=12, prefill_chunk=3)
    assert ours.tokens == theirs[0].tolist()
    prompts = [[5, 6, 7, 8] * 4]
    check_identical(model, prompts, drafter="ngram", max_new_tokens=12, tested="drafted")
    assert check_state(model, prompts, drafter="ngram", max_new_tokens=6) < 1e-9


def test_shared_blocks_are_kept_once_and_every_use_of_one_is_its_own(tmp_path: Path) -> None:
    model = loaded("zamba2, rotated, blocks in turns", tmp_path)
    weights = model.weights
    assert [len(each) for each in (weights.shared, weights.uses)] == [2, 3] and model.config.sharing == [0, 2, 3]
    fused.save(tmp_path / "float32.safetensors", model.weights)
    again = Transformer(model.config, fused.read(tmp_path / "float32.safetensors", model.config, model.device))
    batch = Batch([Segment(np.arange(20), random_ids(20))])
    logits = model.forward(batch).logits
    assert torch.equal(again.forward(batch).logits, logits)
    # The first and the third use are of one block: without what each adds, or with blocks changed about, it shows.
    bare = [replace(use, gate_up_out=Dense(torch.zeros_like(use.gate_up_out.weight))) for use in weights.uses]  # type: ignore[attr-defined]
    for wrong in (replace(weights, uses=bare), replace(weights, shared=weights.shared[::-1])):
        assert (Transformer(model.config, wrong).forward(batch).logits - logits).abs().max() > 0.1
    # The first block is read twice a pass.
    learned = {name: value.detach() for name, value in parameters(changeable(again)).items() if name != "embedding"}
    first = sum(value.nbytes for name, value in learned.items() if name.startswith("shared.0."))
    head = weights.embedding.nbytes
    assert weight_bytes(model) == head + first + sum(value.nbytes for value in learned.values())
    inside = Batch([Segment(np.arange(2), states=torch.zeros(2, model.config.hidden_size))])
    with pytest.raises(UnsupportedModel, match="enters the first layer"):
        model.forward(inside, layer_plan=LayerPlan((1, 2)))


@pytest.mark.parametrize("case", BOTH)
def test_hybrids_of_both_kinds_in_int8_say_nearly_the_same_and_trees_what_paths_say(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    theirs, ids = make_model(case), random_ids(16)
    model = load(save(theirs, tmp_path / "model"), dtype="int8", device="cpu").model
    logits = model.forward(Batch([Segment(np.arange(16), ids)])).logits
    assert torch.nn.functional.cosine_similarity(logits, reference(theirs, ids)).median() > 0.93
    check_identical(model, [[5, 6, 7] * 3], drafter=DraftModel(model, length=3), max_new_tokens=6)


@pytest.mark.parametrize(
    ("case", "change", "error", "named"),
    [
        ("zamba2", {"add_bias_linear": True}, UnsupportedModel, "add_bias_linear"),
        ("zamba2", {"tie_word_embeddings": False}, UnsupportedModel, "tie_word_embeddings"),
        ("zamba2", {"rms_norm_eps": 1e-6}, UnsupportedModel, "rms_norm_eps"),
        ("zamba2", {"num_mem_blocks": 3}, CorruptFile, "3 blocks are shared by 2 layers"),
        ("zamba2", {"layers_block_type": ["mamba", "attention", "mamba"]}, CorruptFile, "layers_block_type"),
        ("falcon_h1", {"attention_bias": True}, UnsupportedModel, "attention_bias"),
        ("falcon_h1", {"mamba_rms_norm": True}, UnsupportedModel, "mamba_norm_before_gate"),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, CorruptFile, "ssm_multipliers should be 5 numbers"),
        ("falcon_h1", {"mamba_n_heads": 7}, CorruptFile, "7 states do not fit"),
    ],
)
def test_hybrids_of_both_kinds_that_cannot_be_run_faithfully_are_refused(
    case: str, change: dict, error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        read_config(make_model(case).config.to_dict() | change)


def test_linear_layers_in_int8_say_nearly_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    theirs, ids = make_model("mamba2"), random_ids(16)
    model = load(save(theirs, tmp_path / "model"), dtype="int8", device="cpu").model
    logits = model.forward(Batch([Segment(np.arange(16), ids)])).logits
    assert torch.nn.functional.cosine_similarity(logits, reference(theirs, ids)).min() > 0.99
    assert model.capabilities.exact_rows
    cache, parts = model.new_cache(), []
    for first, last in ((0, 1), (1, 6), (6, 16)):
        parts.append(model.forward(Batch([Segment.chunk(ids[first:last], cache)])).logits)
        cache.keep(range(last - first))
    assert torch.equal(torch.cat(parts), logits)
    check_identical(model, [[5, 6, 7] * 3], drafter=DraftModel(model, length=3), max_new_tokens=6)


@pytest.mark.parametrize(
    ("case", "change", "error", "named"),
    [
        ("mamba", {"use_bias": True}, UnsupportedModel, "use_bias"),
        ("mamba", {"d_model": 32}, CorruptFile, "d_model is 32"),
        ("mamba", {"time_step_rank": 0}, CorruptFile, "time_step_rank"),
        ("jamba", {"mamba_proj_bias": True}, UnsupportedModel, "mamba_proj_bias"),
        ("jamba", {"attn_layer_period": 0}, CorruptFile, "attn_layer_period"),
        ("jamba", {"secret": 1}, UnsupportedModel, "the field secret = 1 is not known"),
    ],
)
def test_states_of_channels_that_do_not_fit_are_refused(
    case: str, change: dict, error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        read_config(make_model(case).config.to_dict() | change)


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"mamba_proj_bias": True}, UnsupportedModel, "mamba_proj_bias"),
        ({"mamba_n_heads": 7}, CorruptFile, "do not fit a width"),
        ({"mamba_n_groups": 3}, CorruptFile, "3 groups do not fit"),
        ({"time_step_limit": [1.0, 0.5]}, CorruptFile, "time_step_limit"),
        ({"time_step_limit": [-(10**400), 10**400]}, CorruptFile, "time_step_limit"),
        ({"layer_types": ["linear_attention", "chunked"]}, CorruptFile, "layer_types"),
    ],
)
def test_states_that_do_not_fit_are_refused(change: dict, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        read_config(make_model("bamba").config.to_dict() | change)


@pytest.mark.parametrize("case", ["mamba", "mamba2", "zamba2, rotated, blocks in turns", "falcon_h1"])
def test_gradients_come_through_a_recurrent_layer_that_says_the_same_without_them(case: str, tmp_path: Path) -> None:
    model = changeable(loaded(case, tmp_path))
    batch = Batch([Segment(np.arange(20), random_ids(20))])
    native = model.outputs(model.layers(model.embed(batch), batch))
    learned = parameters(model)
    scanned = model.outputs(model.layers(model.embed(batch), batch))
    assert (scanned - native).abs().max() < 1e-4
    scanned.logsumexp(dim=1).sum().backward()  # type: ignore[no-untyped-call]
    ends = ("conv", "step_bias", "skip", "gate_norm", "mix_in.weight", "down.weight", "back.weight", "_out.weight")
    grads = {name: value.grad for name, value in learned.items() if name.endswith(ends) and value.numel()}
    assert all(grad is not None and grad.abs().max() > 0 for grad in grads.values()) and len(grads) >= 4
    assert sum(name.startswith(("shared.", "uses.")) for name in grads) == (17 if case.startswith("zamba2") else 0)


def test_a_description_of_a_hybrid_that_lacks_a_number_is_refused_by_its_name(tmp_path: Path) -> None:
    model = loaded("zamba2", tmp_path)
    text = Description(model.config, "float32", {}, None).text()
    path = tmp_path / "model.json"
    path.write_text(text)
    assert Description.read(path).config == model.config
    for part, name in (("shared", "inner"), ("mamba", "heads")):
        raw = json.loads(text)
        del raw["config"][part][name]
        path.write_text(json.dumps(raw))
        with pytest.raises(CorruptFile, match=f"config: {part} has no field {name}"):
            Description.read(path)
