"""Next-token layers with experts: run as `transformers` runs the layers of their families, and found by `auto`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from decodery.core.errors import UnsupportedModel
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.load import load
from decodery.models.torch.transformer import Transformer
from decodery.speculative.drafters.mtp import MTP, MTPHead
from decodery.speculative.heads.found import found_heads
from decodery.speculative.heads.head import TrainedHead
from decodery.speculative.heads.own_mtp import own_mtp
from decodery.speculative.heads.parts import Parts
from decodery.testing import check_identical
from dense_gguf import write_dense
from published import write
from tiny_models import doubled, make_model, save

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
LAYERS, HIDDEN = 3, 64
AFTER = f"model.layers.{LAYERS}."
QWEN = "mtp.layers.0.", "mtp.fc", ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
GLM = AFTER, f"{AFTER}eh_proj", (f"{AFTER}enorm", f"{AFTER}hnorm", f"{AFTER}shared_head.norm")
CASES = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe"), QWEN),
    **dict.fromkeys(("glm4_moe", "glm4_moe, in groups", "glm4_moe_lite", "deepseek_v3"), GLM),
}
PARTS = ("token", "hidden", "final")
"""What speculators calls the norms of an embedding, of a state and of what leaves the layer."""
COUNTS = {QWEN: "mtp_num_hidden_layers", GLM: "num_nextn_predict_layers"}


class Layer:
    """The last layer of a tiny model of `transformers` as a next-token layer, in float64."""

    def __init__(self, case: str) -> None:
        kinds = {} if CASES[case] is GLM else {"layer_types": ["linear_attention"] * 2 + ["full_attention"]}
        self.names, self.own = CASES[case], make_model(case, 1, **kinds).double()
        # The fused products of `transformers` have no float64.
        self.own.set_experts_implementation("eager")
        torch.manual_seed(2)
        self.norms = [type(self.own.model.norm)(HIDDEN, eps=self.own.config.rms_norm_eps).double() for _ in range(3)]
        for each in self.norms:
            each.weight.data = each.weight.data + 0.2 * torch.randn(HIDDEN).double()
        self.fc = 0.1 * torch.randn(HIDDEN, 2 * HIDDEN).double()
        self.layer = self.own.model.layers[-1]
        if (bias := getattr(self.layer.mlp.gate, "e_score_correction_bias", None)) is not None:
            bias.data = 0.3 * torch.randn(len(bias)).double()
        self.normed = self.names is QWEN

    def tensors(self, stacked: bool) -> dict[str, torch.Tensor]:
        """As checkpoints name them. stacked: all experts in one tensor."""
        prefix, fc, norms = self.names
        found = {f"{prefix}{name}": each for name, each in self.layer.state_dict().items()}
        for name in [] if stacked else [name for name in found if ".experts." in name]:
            base, kind = name.rsplit(".", 1)
            for number, expert in enumerate(found.pop(name)):
                halves = {"down_proj": expert}
                if kind == "gate_up_proj":
                    halves = dict(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True))
                found |= {f"{base}.{number}.{half}.weight": each for half, each in halves.items()}
        found |= {f"{name}.weight": each.weight.data for name, each in zip(norms, self.norms, strict=True)}
        return {name: each.float().contiguous() for name, each in (found | {f"{fc}.weight": self.fc}).items()}

    def expected(self, target: Transformer, path: list[int]) -> torch.Tensor:
        """Logits after the text and a path below it."""
        states = target.forward(Batch([Segment.chunk(TEXT[:-1], target.new_cache())]), taps=[-1]).hidden[-1]
        tokens, features, last = TEXT[1:], target.final_norm(states).double(), torch.empty(0)
        for number in range(len(path) + 1):
            embedded = target.embed_tokens(torch.tensor(tokens)).double()
            rows = (torch.cat((self.norms[0](embedded), self.norms[1](features)), dim=1) @ self.fc.T)[None]
            places = torch.arange(len(tokens))[None]
            turning = places if "qwen3_5" not in self.own.config.model_type else places.expand(3, 1, -1)
            mask = torch.full((len(tokens),) * 2, -torch.inf, dtype=torch.float64).triu(1)[None, None]
            turned = self.own.model.rotary_emb.double()(rows, turning)
            out = self.layer(rows, position_embeddings=turned, attention_mask=mask, position_ids=places)
            stream = (out[0] if isinstance(out, tuple) else out)[0]
            last = self.norms[2](stream)
            if number < len(path):
                tokens = [*tokens, path[number]]
                features = torch.cat((features, (last if self.normed else stream)[-1:]))
        return target.project(last[-1:])[0]


def folder_of(case: str, folder: Path, layer: Layer, **described: Any) -> Path:
    save(make_model(case), folder)
    path = folder / "model.safetensors"
    save_file(load_file(path) | layer.tensors(case == "qwen3_5_moe"), path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {COUNTS[layer.names]: 1} | described
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_the_layer_is_run_as_transformers_runs_it(case: str, tmp_path: Path) -> None:
    layer = Layer(case)
    model = load(str(folder_of(case, tmp_path, layer)), dtype="float32", device="cpu").model
    assert [each.place for each in found_heads(model)] == ["in the model's own folder"]
    check_layer(model, layer)


def check_layer(model: Any, layer: Layer) -> None:
    """`mtp` finds the layer and predicts what that of `transformers` does."""
    assert isinstance(model, Transformer)
    bound, target = MTP().bind(model), doubled(model)
    assert bound.trained is not None and bound.trained.settings["experts"]["experts"] >= 4
    check_identical(model, [TEXT, [7]], drafter=bound, max_new_tokens=6, seeds=(0,), tested="drafted")
    head = MTPHead(bound.trained, target)
    states = target.forward(Batch([Segment.chunk(TEXT[:-1], target.new_cache())]), taps=head.taps).hidden
    memory = head.begin()
    for first, end in ((0, 3), (3, 8)):
        own = {tap: rows[first:end] for tap, rows in states.items()}
        found = head.read(memory, own, torch.tensor(TEXT[first + 1 : end + 1]), np.arange(first, end))
    below = head.grow(memory, torch.tensor([7]), np.array([-1]), np.array([1]), np.ones((1, 1), dtype=bool))[0]
    with torch.no_grad():
        for logits, path in ((found, []), (below, [7])):
            wanted = layer.expected(target, path)
            assert float((logits - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())


@pytest.mark.parametrize("case", ["qwen3_5_moe", "glm4_moe"])
def test_the_layer_of_a_gguf_file_is_that_of_a_folder(case: str, tmp_path: Path) -> None:
    layer = Layer(case)
    block, names = f"blk.{LAYERS - 1}.nextn.", ("enorm", "hnorm", "shared_head_norm")
    # Norms are stored as they are used.
    less = float(layer.normed)
    given = {
        f"{block}{name}.weight": (each.weight.data + less).float().numpy()
        for name, each in zip(names, layer.norms, strict=True)
    }
    given[f"{block}eh_proj.weight"] = layer.fc.float().numpy()
    write_dense(tmp_path / "own.gguf", layer.own.float(), further=given, nextn_predict_layers=1)
    model = load(str(tmp_path / "own.gguf"), dtype="float32", device="cpu").model
    assert [each.place for each in found_heads(model)] == ["in the model's own file"]
    layer.own.double()
    check_layer(model, layer)


@pytest.mark.parametrize("case", ["qwen3_next", "qwen3_5_moe"])
def test_a_layer_that_speculators_took_out_is_that_of_the_folder(case: str, tmp_path: Path) -> None:
    layer = Layer(case)
    wanted = own_mtp(folder_of(case, tmp_path / "model", layer))
    prefix, fc, norms = layer.names
    to = {
        f"{fc}.": "input_proj.",
        **{f"{norm}.": f"{name}_layernorm." for norm, name in zip(norms, PARTS, strict=True)},
    }
    tensors = {}
    for name, each in layer.tensors(stacked=True).items():
        kind = next((begin for begin in to if name.startswith(begin)), prefix)
        tensors[f"mtp_layers.0.{to.get(kind, '')}{name.removeprefix(kind)}"] = each
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    described = config.get("text_config", config)
    own = {"speculators_model_type": "mtp", "num_nextn_predict_layers": 1, "transformer_layer_config": described}
    found = TrainedHead.load(write(tmp_path / "head", own, tensors))
    assert found.kind == "mtp" and found.tensors.keys() == wanted.tensors.keys()
    assert all(torch.equal(found.tensors[name], wanted.tensors[name]) for name in wanted.tensors)
    assert found.settings == {**wanted.settings, "further": []}


def test_a_router_stays_as_it_is_where_experts_become_integers(tmp_path: Path) -> None:
    found = own_mtp(folder_of("qwen3_next", tmp_path, Layer("qwen3_next"))).tensors
    made = Parts(found).quantized()
    assert made["layer.experts_gate_up.weight"].dtype == torch.int8
    for name in ("layer.router.weight", "layer.shared_router.weight"):
        assert torch.equal(made[name], found[name])


def test_an_expert_that_is_missing_or_too_many_is_refused(tmp_path: Path) -> None:
    folder = folder_of("glm4_moe", tmp_path, Layer("glm4_moe"))
    path = folder / "model.safetensors"
    tensors = load_file(path)
    further = {f"{AFTER}mlp.experts.6.down_proj.weight": torch.ones(HIDDEN, 32)}
    save_file(tensors | further, path, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"experts.6.down_proj.weight belongs to a part"):
        own_mtp(folder)
