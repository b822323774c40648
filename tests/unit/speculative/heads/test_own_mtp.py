"""Next-token layers in a model's own folder: recognised, run by the public formulas, and found by `mtp` alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from decodery.core.errors import CorruptFile, SettingsError, UnsupportedModel
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.load import LoadedModel, load
from decodery.models.torch.transformer import Transformer
from decodery.speculative.drafters.mtp import MTP, MTPHead
from decodery.speculative.heads.found import found_heads
from decodery.speculative.heads.own_mtp import gguf_mtp
from decodery.speculative.heads.recognise import published_drafter
from decodery.testing import check_identical
from dense_gguf import write_dense
from published import norm, tensors_of
from published_blocks import attention, causal, mlp, sizes_of
from tiny_models import VOCAB, doubled, make_model, save

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
LAYERS, HIDDEN = 3, 64
CONFIG: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": HIDDEN, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "rope_theta": 10_000.0,
}  # fmt: skip
MIMO, AFTER = "model.mtp_layers.0.", f"model.layers.{LAYERS}."
LAYOUTS: dict[str, tuple[str, str, tuple[str, str, str], str, dict[str, Any]]] = {
    "qwen": (
        "mtp.layers.0.", "mtp.fc", ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"),
        "mtp_num_hidden_layers", {},
    ),
    "mimo": (
        MIMO, f"{MIMO}input_proj", (f"{MIMO}token_layernorm", f"{MIMO}hidden_layernorm", f"{MIMO}final_layernorm"),
        "num_mtp_layers", {"states_first": True},
    ),
    "deepseek": (
        AFTER, f"{AFTER}eh_proj", (f"{AFTER}enorm", f"{AFTER}hnorm", f"{AFTER}shared_head.norm"),
        "num_nextn_predict_layers",
        {"raw": True, "words": f"{AFTER}shared_head.head", "embedding": f"{AFTER}embed_tokens"},
    ),
}  # fmt: skip
"""By family: where the layer is, what joins token and state, the norms, the count's name, and what differs."""


def folder_of(name: str, folder: Path, count: int = 1) -> tuple[Path, dict[str, torch.Tensor]]:
    """A tiny Qwen3 model with a next-token layer in this layout; and the layer's tensors."""
    prefix, fc, norms, counted, others = LAYOUTS[name]
    save(make_model("qwen3, tied", rms_norm_eps=1e-5), folder)
    sizes = sizes_of(CONFIG, prefix, HIDDEN) | {f"{fc}.weight": (HIDDEN, 2 * HIDDEN)}
    sizes |= {f"{each}.weight": (HIDDEN,) for each in norms}
    sizes |= {f"{others[each]}.weight": (VOCAB, HIDDEN) for each in ("words", "embedding") if each in others}
    own = tensors_of(sizes)
    path = folder / "model.safetensors"
    save_file(load_file(path) | own, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {counted: count}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, {each: tensor.double() for each, tensor in own.items()}


def loaded(folder: Path) -> LoadedModel:
    return load(str(folder), dtype="float32", device="cpu")


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layer_is_run_as_its_family_runs_it(name: str, tmp_path: Path) -> None:
    folder, weights = folder_of(name, tmp_path)
    prefix, fc, norms, _, others = LAYOUTS[name]
    model = loaded(folder).model
    assert isinstance(model, Transformer)
    target = doubled(model)
    drafter = published_drafter(str(folder))
    assert isinstance(drafter, MTP) and drafter.trained is not None
    head = MTPHead(drafter.trained, target)

    def wanted(path: list[int]) -> torch.Tensor:
        states = target.forward(Batch([Segment.chunk(TEXT[:-1], target.new_cache())]), taps=[-1]).hidden[-1]
        tokens, features, last = TEXT[1:], target.final_norm(states), torch.empty(0)
        table = weights.get(f"{others.get('embedding')}.weight")
        for number in range(len(path) + 1):
            ids = torch.tensor(tokens)
            embedded = target.embed_tokens(ids) if table is None else table[ids]
            both = [norm(embedded, weights[f"{norms[0]}.weight"]), norm(features, weights[f"{norms[1]}.weight"])]
            stream = torch.cat(both[::-1] if others.get("states_first") else both, dim=1) @ weights[f"{fc}.weight"].T
            rows, places = norm(stream, weights[f"{prefix}input_layernorm.weight"]), torch.arange(len(tokens))
            seen = causal(places, None)
            stream = mlp(
                weights, prefix, stream + attention(weights, prefix, CONFIG, rows, rows, (places, places), seen)
            )
            last = norm(stream, weights[f"{norms[2]}.weight"])
            if number < len(path):
                tokens = [*tokens, path[number]]
                features = torch.cat((features, (stream if others.get("raw") else last)[-1:]))
        words = weights.get(f"{others.get('words')}.weight")
        return target.project(last[-1:])[0] if words is None else last[-1] @ words.T

    states = target.forward(Batch([Segment.chunk(TEXT[:-1], target.new_cache())]), taps=head.taps).hidden
    memory = head.begin()
    for first, end in ((0, 3), (3, 8)):
        own = {tap: rows[first:end] for tap, rows in states.items()}
        found = head.read(memory, own, torch.tensor(TEXT[first + 1 : end + 1]), np.arange(first, end))
    below = head.grow(memory, torch.tensor([7]), np.array([-1]), np.array([1]), np.ones((1, 1), dtype=bool))[0]
    # The target's norms and embeddings are computed in float32 in places.
    for logits, path in ((found, []), (below, [7])):
        assert float((logits - wanted(path)).abs().max()) < 1e-5


def test_a_model_finds_the_layer_in_its_own_folder(tmp_path: Path) -> None:
    folder, _ = folder_of("qwen", tmp_path)
    found = loaded(folder)
    bound = MTP().bind(found.model)
    assert bound.trained is not None and bound.trained.facts["layout"] == "mtp of the model"
    check_identical(found.model, [TEXT, [7]], drafter=bound, max_new_tokens=6, seeds=(0,), tested="drafted")
    other = save(make_model("qwen3, tied"), tmp_path / "other")
    with pytest.raises(SettingsError, match="no head for mtp comes along"):
        MTP().bind(loaded(other).model)


def test_layers_that_are_not_run_are_refused_by_name(tmp_path: Path) -> None:
    folder, _ = folder_of("qwen", tmp_path, count=2)
    with pytest.raises(UnsupportedModel, match="mtp_num_hidden_layers = 2 is not supported"):
        published_drafter(str(folder))
    folder, own = folder_of("deepseek", tmp_path / "other")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {f"{AFTER}mlp.gate.weight": torch.ones(2)}, path, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"model.layers.3.mlp.gate.weight belongs to a part"):
        published_drafter(str(folder))
    del tensors[f"{AFTER}enorm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CorruptFile, match=r"no tensor model\.layers\.3\.enorm\.weight"):
        published_drafter(str(folder))
    assert own


PLACES = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")


def gated_parts(own: Any) -> tuple[dict[str, torch.nn.Module], torch.Tensor]:
    """Norms and the joining layer around the last layer of a tiny Qwen3.5."""
    own.double()
    norms = {name: type(own.model.norm)(HIDDEN, eps=own.config.rms_norm_eps).double() for name in PLACES}
    torch.manual_seed(2)
    for each in norms.values():
        each.weight.data = 0.2 * torch.randn(HIDDEN).double()
    return norms, 0.1 * torch.randn(HIDDEN, 2 * HIDDEN).double()


def check_gated(model: Any, own: Any, norms: dict[str, torch.nn.Module], fc: torch.Tensor) -> None:
    """`mtp` finds the layer and predicts what the layer of `transformers` does."""
    assert isinstance(model, Transformer)
    bound = MTP().bind(model)
    check_identical(model, [TEXT, [7]], drafter=bound, max_new_tokens=6, seeds=(0,), tested="drafted")
    target = doubled(model)
    assert bound.trained is not None
    head = MTPHead(bound.trained, target)
    states = target.forward(Batch([Segment.chunk(TEXT[:-1], target.new_cache())]), taps=head.taps).hidden
    embedded = target.embed_tokens(torch.tensor(TEXT[1:])).double()
    both = [norms[PLACES[0]](embedded), norms[PLACES[1]](target.final_norm(states[-1]))]
    rows, places = (torch.cat(both, dim=1) @ fc.T)[None], torch.arange(len(TEXT) - 1)[None]
    mask = torch.full((len(TEXT) - 1, len(TEXT) - 1), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    with torch.no_grad():
        turned = own.model.rotary_emb.double()(rows, places.expand(3, 1, -1))
        out = own.model.layers[-1](rows, position_embeddings=turned, attention_mask=mask, position_ids=places)
        out = out[0] if isinstance(out, tuple) else out
        expected = target.project(norms["norm"](out[0, -1:]))[0]
    found = head.read(head.begin(), states, torch.tensor(TEXT[1:]), np.arange(len(TEXT) - 1))
    assert float((found - expected).abs().max()) < 1e-5


@pytest.mark.parametrize("nested", [False, True])
def test_the_layer_of_a_hybrid_is_gated_attention(nested: bool, tmp_path: Path) -> None:
    """Qwen3.5's: some dimensions turned, a gate after attention, norms stored less one, trunks with states."""
    own = make_model("qwen3_5, tied", 1, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    folder = save(make_model("qwen3_5, tied"), tmp_path)
    norms, fc = gated_parts(own)
    given = {f"mtp.layers.0.{name}": each for name, each in own.model.layers[-1].state_dict().items()}
    given |= {f"mtp.{name}.weight": each.weight.data for name, each in norms.items()} | {"mtp.fc.weight": fc}
    path = folder / "model.safetensors"
    tensors = load_file(path) | {name: each.float().contiguous() for name, each in given.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    described = json.loads((folder / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
    described["mtp_use_dedicated_embeddings"] = False
    if nested:
        described = {"model_type": "qwen3_5", "text_config": described, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(described))
    check_gated(loaded(folder).model, own, norms, fc)


def test_the_layer_of_a_gguf_file_is_found(tmp_path: Path) -> None:
    """llama.cpp's layout: one more block beside `nextn` tensors, norms stored as they are used."""
    own = make_model("qwen3_5, tied", 1)
    norms, fc = gated_parts(own)
    block = f"blk.{len(own.model.layers) - 1}.nextn."
    names = dict(zip(PLACES, ("enorm", "hnorm", "shared_head_norm"), strict=True))
    given = {f"{block}{names[name]}.weight": (each.weight.data + 1).float().numpy() for name, each in norms.items()}
    given[f"{block}eh_proj.weight"] = fc.float().numpy()
    own.float()
    write_dense(tmp_path / "own.gguf", own, further=given, nextn_predict_layers=1)
    model = loaded(tmp_path / "own.gguf").model
    assert model.config.num_layers == len(own.model.layers) - 1
    assert [each.place for each in found_heads(model)] == ["in the model's own file"]
    check_gated(model, own.double(), norms, fc)
    given[f"{block}embed_tokens.weight"] = fc.float().numpy()
    write_dense(tmp_path / "other.gguf", own.float(), further=given, nextn_predict_layers=1)
    with pytest.raises(UnsupportedModel, match=r"nextn.embed_tokens.weight belongs to a part"):
        gguf_mtp(tmp_path / "other.gguf")
