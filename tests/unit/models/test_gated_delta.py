"""Gated DeltaNet layers: a scan over a tree is the recurrence along every path, in PyTorch and in native code."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import rms_norm, silu, softplus

from decodery.core.errors import CorruptFile, UnsupportedModel
from decodery.core.native.kernels import choose, kernel_sets
from decodery.models.batch import Batch, Segment
from decodery.models.cache.kept_rows import parents
from decodery.models.config import GatedDelta, ModelConfig
from decodery.models.families.config_json import read_config
from decodery.models.loaders.load import load
from decodery.models.native.scan import NativeScan
from decodery.models.torch.gated_delta import DeltaRule
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense, Layer
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.testing import check_cache, check_identical, check_state
from tiny_models import doubled, make_model, random_ids, reference, save, tree_mask

SHAPE = GatedDelta(heads=4, head_dim=21, groups=2, state=9, kernel=3)


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Convolution, the steps' bias, the logarithm of the decay, and the norm of `SHAPE`."""
    rng = np.random.default_rng(seed)
    sizes = {"conv": (SHAPE.channels, SHAPE.kernel), "step_bias": (4,), "decay": (4,), "gate_norm": (21,)}
    return {name: torch.from_numpy(rng.normal(size=size).astype(np.float32)) for name, size in sizes.items()}


def next_state(mixed: torch.Tensor, raw: torch.Tensor, state: torch.Tensor, own: dict[str, torch.Tensor]) -> tuple:
    """What one row says, not gated [heads, head_dim], and the state after it: the formulas, in float64."""
    queries, keys, values = mixed.split((18, 18, SHAPE.inner))
    queries, keys = (each.view(2, 9).repeat_interleave(2, dim=0) for each in (queries, keys))
    queries, keys = (each / (each.square().sum(1, keepdim=True) + 1e-6).sqrt() for each in (queries, keys))
    left = (-own["decay"].double().exp() * softplus(raw[4:] + own["step_bias"])).exp()[:, None, None]
    told = torch.einsum("hs,hsp->hp", keys, left * state)
    added = raw[:4].sigmoid()[:, None] * (values.view(4, 21) - told)
    state = left * state + keys[:, :, None] * added[:, None]
    return torch.einsum("hs,hsp->hp", queries / 3.0, state), state


def along(path: list[int], held: torch.Tensor, gate: torch.Tensor, own: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the last row of a path of rows says, row by row in float64."""
    rows, raw = held[path].double().split((SHAPE.channels, 8), dim=1)
    windows = torch.cat((torch.zeros(2, SHAPE.channels, dtype=torch.float64), rows)).unfold(0, 3, 1)
    mixed, state = silu((windows * own["conv"]).sum(2)), torch.zeros(4, 9, 21, dtype=torch.float64)
    for row, steps in zip(mixed, raw, strict=True):
        said, state = next_state(row, steps, state, own)
    gated: torch.Tensor = (
        rms_norm(said, (21,), None, 1e-5) * own["gate_norm"] * silu(gate[path[-1]].double().view(4, 21))
    )
    return gated.flatten()


def random_tree(rng: np.random.Generator, rows: int) -> torch.Tensor:
    tree = [-1, *(int(rng.integers(max(0, node - 4), node)) for node in range(1, rows))]
    return torch.from_numpy(tree_mask(tree))


def config_of(shape: GatedDelta) -> ModelConfig:
    return ModelConfig(8, 16, 16, 1, 2, 2, 8, 64, delta=shape, state_layers=(True,), norm_eps=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 2e-4)])
def test_a_scan_over_a_tree_is_the_recurrence_along_every_path(dtype: torch.dtype, tolerance: float) -> None:
    rng, own, wrong = np.random.default_rng(0), tensors(3), 0.0
    nothing = Dense(torch.zeros(0, 0, dtype=dtype))
    layer = Layer(torch.zeros(0), nothing, nothing, torch.zeros(0), nothing, nothing, **own)
    rule = DeltaRule(layer, config_of(SHAPE), dtype)
    for _ in range(20):
        seen = random_tree(rng, int(rng.integers(1, 41)))
        mixed, raw = (torch.from_numpy(rng.normal(size=(len(seen), size))).to(dtype) for size in (SHAPE.channels, 8))
        state = torch.from_numpy(rng.normal(size=(4, 9, 21))).to(dtype)
        said = rule.scan(mixed, raw, seen, len(seen), state)
        chained = rule.scan(mixed, raw, torch.ones_like(seen).tril(), len(seen), state)
        states = list[torch.Tensor]()
        for node, parent in enumerate(parents(seen).tolist()):
            before = state.double() if parent < 0 else states[parent]
            expected, after = next_state(mixed[node].double(), raw[node].double(), before, own)
            states.append(after)
            assert (said[node] - expected.flatten()).abs().max() <= tolerance * max(1.0, float(expected.abs().max()))
            wrong = max(wrong, float((chained[node] - expected.flatten()).abs().max()))
        assert torch.allclose(rule.scan(mixed, raw, seen, 1, state), said[-1:], atol=1e-5)
        walked = state.double()
        for row, steps in zip(mixed, raw, strict=True):
            walked = next_state(row.double(), steps.double(), walked, own)[1]
        assert (rule.advance(mixed, raw, state) - walked).abs().max() <= tolerance * max(1.0, float(walked.abs().max()))
    # The order of packing is no path: a scan that took it for one would be found out.
    assert wrong > 0.1


@pytest.mark.parametrize("shape", [SHAPE, GatedDelta(heads=2, head_dim=32, groups=2, state=16, kernel=4)])
def test_native_rows_say_the_same_bits_however_a_text_is_cut(shape: GatedDelta) -> None:
    rng, own = np.random.default_rng(1), tensors(0)
    if shape != SHAPE:
        sizes = {"conv": (shape.channels, 4), "step_bias": (2,), "decay": (2,), "gate_norm": (32,)}
        own = {name: torch.from_numpy(rng.normal(size=size).astype(np.float32)) for name, size in sizes.items()}
    decay = -own["decay"].exp()
    scan = NativeScan(shape, [own["conv"], None, own["step_bias"], decay, None, own["gate_norm"]], 1e-5)
    seen, back = random_tree(rng, 30), shape.kernel - 1
    held = torch.from_numpy(rng.normal(size=(30, shape.width)).astype(np.float32))
    wide = torch.from_numpy(rng.normal(size=(30, shape.inner + 7)).astype(np.float32))
    gate, nothing = wide[:, : shape.inner], torch.zeros(shape.heads, shape.state, shape.head_dim)
    line, whole = parents(seen), []
    for name in kernel_sets():
        choose(name)
        whole.append(scan.said(held, 0, line, nothing, gate))
    choose(kernel_sets()[0])
    assert all(torch.equal(each, whole[0]) for each in whole[1:])
    assert torch.equal(scan.said(held, 0, line, nothing, gate[-5:]), whole[0][-5:])
    packed, wrong = scan.said(held, 0, None, nothing, gate), 0.0
    for node in range(30):
        path = torch.where(seen[node])[0].tolist()
        if shape == SHAPE:
            expected = along(path, held, gate, own).float()
            assert (whole[0][node] - expected).abs().max() < 1e-4
            wrong = max(wrong, float((packed[node] - expected).abs().max()))
        # The path as a text of its own, of which the last row comes alone and all others are content.
        rows, state, done = held[path], nothing, 0
        for size in (3, 1, len(path)):
            stop = min(done + size, len(path) - 1)
            if stop > done:
                state = scan.advance(rows[max(0, done - back) : stop], min(done, back), state)
                done = stop
        last = scan.said(rows[max(0, done - back) :], min(done, back), None, state, gate[node : node + 1])
        assert torch.equal(last[0], whole[0][node])
    assert wrong > 0.1 or shape != SHAPE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    home = tmp_path_factory.mktemp("delta")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DECODERY_HOME", str(home / "home"))
        found = load(save(make_model("qwen3_5"), home / "model"), dtype="float32", device="cpu").model
    assert isinstance(found, Transformer)
    return doubled(found)


def test_texts_remember_as_caches_must_and_drafts_change_nothing(model: Transformer) -> None:
    assert check_cache(model, programs=2, steps=10) < 1e-9
    ids = random_ids(90)
    logits = model.forward(Batch([Segment.chunk(ids, model.new_cache())])).logits
    # Over chunks of the scan; states of transformers are float32.
    assert (logits - reference(make_model("qwen3_5").double(), ids)).abs().max() < 1e-4
    prompts = [[5, 6, 7, 8] * 4, [9, 10, 9, 10, 9]]
    check_identical(model, prompts, drafter="ngram", max_new_tokens=10, tested="drafted")
    assert check_state(model, prompts, drafter="token-recycling", max_new_tokens=6) < 1e-9


def test_a_text_of_a_model_that_reads_images_too_and_experts_in_one_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    theirs, ids = make_model("qwen3_5_moe"), random_ids(16)
    folder = save(theirs, tmp_path / "model")
    held, stacks = load_file(folder / "model.safetensors"), dict[str, torch.Tensor]()
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp.experts."
        each = [
            {half: held.pop(f"{prefix}{n}.{half}_proj.weight") for half in ("gate", "up", "down")} for n in range(6)
        ]
        stacks[f"{prefix}gate_up_proj"] = torch.stack([torch.cat((one["gate"], one["up"])) for one in each])
        stacks[f"{prefix}down_proj"] = torch.stack([one["down"] for one in each])
    own = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in (held | stacks).items()}
    save_file(own | {"model.visual.patch_embed.proj.weight": torch.zeros(2), "mtp.fc.weight": torch.zeros(2)},
              folder / "model.safetensors")  # fmt: skip
    raw = json.loads((folder / "config.json").read_text())
    # As published files say it.
    raw |= {"mtp_num_hidden_layers": 1, "attn_output_gate": True, "mamba_ssm_dtype": "float32"}
    raw["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [1, 1, 0]}
    outer = {"model_type": "qwen3_5_moe", "text_config": raw, "vision_config": {}, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(outer))
    for dtype, likeness in (("float32", 0.999999), ("int8", 0.9)):
        found = load(folder, dtype=dtype, device="cpu").model
        assert isinstance(found, Transformer)
        logits = found.forward(Batch([Segment(np.arange(16), ids)])).logits
        assert torch.nn.functional.cosine_similarity(logits, reference(theirs, ids)).median() > likeness
    check_identical(found, [[5, 6, 7] * 3], drafter=DraftModel(found, length=3), max_new_tokens=6)


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"linear_num_key_heads": 3}, CorruptFile, "3 groups do not fit 4 states"),
        ({"layer_types": ["linear_attention", "full_attention"]}, CorruptFile, "layer_types should name"),
        ({"hidden_act": "gelu"}, UnsupportedModel, "hidden_act"),
        ({"attn_output_gate": "headwise"}, UnsupportedModel, "attn_output_gate"),
        ({"mlp_only_layers": [1]}, UnsupportedModel, "mlp_only_layers"),
    ],
)
def test_what_cannot_be_run_faithfully_is_refused(change: dict, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        read_config(make_model("qwen3_next").config.to_dict() | change)
