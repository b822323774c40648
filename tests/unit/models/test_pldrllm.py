"""Published PLDR-LLM checkpoints: read as the formula says of their tensors, in the order that they have there."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import layer_norm, linear, silu

from decodery.core.errors import CorruptFile, UnsupportedModel
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Batch, Segment
from decodery.models.families.pldrllm import read_pldr
from decodery.models.loaders.load import load
from tiny_models import VOCAB, make_tokenizer

LAYERS, HEADS, DIM, INNER, NET, UNITS, DEPTH = 2, 3, 8, 20, 10, 2, 2
HIDDEN = HEADS * DIM
CONFIG = {
    "model_type": "pldrllm", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "A_dff": NET,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "head_dim": DIM, "num_reslayerA": UNITS,
    "num_denseA": DEPTH, "bos_token_id": 256, "eos_token_id": 257, "layer_norm_eps": 1e-6, "reference_rope": True,
    "custom_G_type": None, "max_position_embeddings": 64,
}  # fmt: skip
IDS = [5, 60, 17, 200, 33, 5, 9]


def shapes() -> dict[str, tuple[int, ...]]:
    """Of all tensors, under their names in a checkpoint."""
    found: dict[str, tuple[int, ...]] = {
        "decoder.embedding.weight": (VOCAB, HIDDEN),
        "final_layer.weight": (VOCAB, HIDDEN),
        "final_layer.bias": (VOCAB,),
    }

    def norm(name: str, size: int) -> None:
        found.update({f"{name}.weight": (size,), f"{name}.bias": (size,)})

    def dense(name: str, inputs: int, outputs: int) -> None:
        found.update({f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)})

    def gated(name: str, size: int, inner: int) -> None:
        dense(f"{name}.gluw1", size, inner)
        dense(f"{name}.gluw2", size, inner)
        dense(f"{name}.gluw3", inner, size)

    norm("decoder.layernorm1", HIDDEN)
    for index in range(LAYERS):
        at = f"decoder.dec_layers.{index}"
        for name in ("wq", "wk", "wv", "dense"):
            dense(f"{at}.mha1.{name}", HIDDEN, HIDDEN)
        norm(f"{at}.mha1.layernorm1", DIM)
        for unit in range(UNITS):
            norm(f"{at}.mha1.reslayerAs.{unit}.layernormA", DIM)
            for depth in range(DEPTH):
                gated(f"{at}.mha1.reslayerAs.{unit}.denseAs.{depth}", DIM, NET)
        found |= {f"{at}.mha1.plgatt_layer.{name}lst": (HEADS, DIM, DIM) for name in ("W", "b", "pw", "a", "ba")}
        gated(f"{at}.ffn", HIDDEN, INNER)
        norm(f"{at}.layernorm1", HIDDEN)
        norm(f"{at}.layernorm2", HIDDEN)
    return found


def checkpoint(folder: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """A folder of random weights, and its tensors."""
    draws = torch.Generator().manual_seed(3)
    tensors = {name: 0.5 * torch.randn(shape, generator=draws) for name, shape in shapes().items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return tensors


def turned(rows: torch.Tensor) -> torch.Tensor:
    """[n, heads, dim], neighbours turned by their position."""
    places = torch.arange(len(rows))[:, None] * 10_000.0 ** (-torch.arange(0, DIM, 2) / DIM)
    pairs = torch.view_as_complex(rows.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(places), places)[:, None]).flatten(-2)


def formula(tensors: dict[str, torch.Tensor], ids: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits and operators by layer, written down as the paper does."""

    def dense(name: str, rows: torch.Tensor) -> torch.Tensor:
        return linear(rows, tensors[f"{name}.weight"], tensors[f"{name}.bias"])

    def gated(name: str, rows: torch.Tensor) -> torch.Tensor:
        return dense(f"{name}.gluw3", silu(dense(f"{name}.gluw1", rows)) * dense(f"{name}.gluw2", rows))

    def norm(name: str, rows: torch.Tensor) -> torch.Tensor:
        return layer_norm(rows, rows.shape[-1:], tensors[f"{name}.weight"], tensors[f"{name}.bias"], 1e-6)

    stream = norm("decoder.layernorm1", tensors["decoder.embedding.weight"][ids] * math.sqrt(HIDDEN))
    later = torch.full((len(ids), len(ids)), -math.inf).triu(1)
    operators = []
    for index in range(LAYERS):
        at = f"decoder.dec_layers.{index}"
        queries, keys, values = (dense(f"{at}.mha1.w{name}", stream).view(-1, HEADS, DIM) for name in "qkv")
        queries, keys, values = (each.transpose(0, 1) for each in (turned(queries), turned(keys), values))
        metric = norm(f"{at}.mha1.layernorm1", queries.mT @ queries)
        for unit in range(UNITS):
            inside, of = metric, f"{at}.mha1.reslayerAs.{unit}"
            for depth in range(DEPTH):
                inside = gated(f"{of}.denseAs.{depth}", inside)
            metric = norm(f"{of}.layernormA", metric + inside)
        weight, bias, power, coupling, offset = (
            tensors[f"{at}.mha1.plgatt_layer.{name}lst"] for name in ("W", "b", "pw", "a", "ba")
        )
        potential = weight @ metric + bias
        operators.append(coupling @ (potential * silu(potential) + 1e-9) ** power + offset)
        law = ((queries @ operators[-1] @ keys.mT) / math.sqrt(DIM) + later).softmax(dim=-1)
        read = dense(f"{at}.mha1.dense", (law @ values).transpose(0, 1).flatten(1))
        stream = norm(f"{at}.layernorm1", stream + read)
        stream = norm(f"{at}.layernorm2", stream + gated(f"{at}.ffn", stream))
    return dense("final_layer", stream), operators


def test_a_published_folder_is_what_the_formula_says(tmp_path: Path) -> None:
    tensors = checkpoint(tmp_path)
    law, tokenizer = read_pldr(tmp_path)
    logits, made = formula(tensors, IDS)
    found, _ = law.predicted(torch.tensor([IDS]))
    assert torch.allclose(found[0], logits, atol=2e-4) and tokenizer.eos_ids == (257,)
    neighbours = torch.arange(DIM).view(-1, 2).T.flatten()
    operators = law.operators(IDS)
    for one, other in zip(operators, made, strict=True):
        assert torch.allclose(one, other[:, neighbours][:, :, neighbours], rtol=1e-3, atol=1e-4)
    # Halves turned in the place of neighbours are another model.
    checkpoint(tmp_path / "halves", reference_rope=False)
    assert (read_pldr(tmp_path / "halves")[0].predicted(torch.tensor([IDS]))[0][0] - logits).abs().max() > 0.1

    # With its operators kept it is causal, and can be drafted for; without, it is no model that could be loaded.
    with pytest.raises(UnsupportedModel, match="read_pldr"):
        load(tmp_path)
    kept = law.frozen(operators)
    whole = kept.forward(Batch([Segment.chunk(IDS, kept.new_cache(), logit_rows=range(len(IDS)))])).logits
    assert torch.allclose(whole, logits, atol=2e-4)
    engine = Engine(kept)
    texts = [engine.submit(Request(IDS, max_new_tokens=10, drafter=drafter)) for drafter in (None, "ngram")]
    engine.run(texts)
    assert texts[0].generated == texts[1].generated


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"custom_G_type": "identity"}, "custom_G_type"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling"),
        ({"glu_bias": False}, "glu_bias"),
        ({"model_type": "llama"}, "model_type"),
    ],
)
def test_what_is_not_read_is_refused_by_name(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    checkpoint(tmp_path, **changes)
    with pytest.raises(UnsupportedModel, match=said):
        read_pldr(tmp_path)


def test_a_folder_that_does_not_fit_together_is_corrupt(tmp_path: Path) -> None:
    tensors = checkpoint(tmp_path, head_dim=6)
    with pytest.raises(CorruptFile, match="do not make a width"):
        read_pldr(tmp_path)
    checkpoint(tmp_path)
    save_file(tensors | {"final_layer.bias": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(CorruptFile, match=r"final_layer.bias has shape \[3\]"):
        read_pldr(tmp_path)
