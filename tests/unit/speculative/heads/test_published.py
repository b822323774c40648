"""Published heads: small checkpoints in the layouts of the public code, read and run as that code runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from decodery.core.errors import CorruptFile, ModelNotFound, SettingsError, UnsupportedModel
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Batch, Segment
from decodery.speculative.drafters.eagle import EAGLE
from decodery.speculative.drafters.eagle_3 import EAGLE3
from decodery.speculative.heads.drafter import HeadDrafter, head_kind
from decodery.speculative.heads.grown import DraftHead
from decodery.speculative.heads.head import TrainedHead
from decodery.speculative.heads.parts import Parts
from decodery.speculative.heads.recognise import published_drafter
from decodery.testing import check_identical, tiny_transformer
from published import (
    DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    TARGET,
    TEXT,
    frequencies,
    layer,
    norm,
    run_layer,
    tensors_of,
    write,
)

Kind = gguf.GGMLQuantizationType
NAMES = {
    **{f"midlayer.self_attn.{each}_proj": f"blk.0.attn_{each}" for each in "qkv"},
    **{f"midlayer.mlp.{each}_proj": f"blk.0.ffn_{each}" for each in ("gate", "up", "down")},
    "midlayer.self_attn.o_proj": "blk.0.attn_output",
    "midlayer.input_layernorm": "blk.0.attn_norm",
    "midlayer.hidden_norm": "blk.0.attn_norm_2",
    "midlayer.post_attention_layernorm": "blk.0.ffn_norm",
    **{"lm_head": "output", "norm": "output_norm", "embed_tokens": "token_embd", "fc": "fc"},
    "input_norm": "enc.output_norm",
}
"""What llama.cpp calls the tensors of an EAGLE-3 head."""

OUTPUTS = 20
EMBEDDING = TARGET.embed_tokens(torch.arange(64)).float()
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "vocab_size": 64,
}
LLAMA3 = {
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_type": "llama3",
    },
}


def eagle(prefix: str = "layers.0.", fc: str = "fc", bias: bool = True) -> dict[str, torch.Tensor]:
    sizes = {f"{fc}.weight": (HIDDEN, 2 * HIDDEN), **({f"{fc}.bias": (HIDDEN,)} if bias else {})}
    return tensors_of(sizes | layer(prefix, HIDDEN)) | {"embed_tokens.weight": EMBEDDING.clone()}


def eagle_3(prefix: str = "midlayer.") -> dict[str, torch.Tensor]:
    sizes = layer(prefix, 2 * HIDDEN) | {
        f"{prefix}hidden_norm.weight": (HIDDEN,),
        f"{prefix}input_layernorm.weight": (HIDDEN,),
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (OUTPUTS, HIDDEN),
    }
    spoken = torch.arange(0, 3 * OUTPUTS, 3)
    told = torch.zeros(64, dtype=torch.bool)
    told[spoken] = True
    return tensors_of(sizes) | {"d2t": spoken - torch.arange(OUTPUTS), "t2d": told}


def speculators(kind: str, own: dict[str, Any], **settings: Any) -> dict[str, Any]:
    config = {name: value for name, value in CONFIG.items() if name not in ("architectures", "hidden_act")}
    return {
        "architectures": ["Eagle3Speculator" if kind == "eagle3" else "EagleSpeculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.1.0",
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "some/model"}},
        "transformer_layer_config": config | own,
        **settings,
    }


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {
    "eagle": (CONFIG | {"bias": True}, eagle()),
    "eagle-without-bias": (CONFIG | LLAMA3 | {"bias": False}, eagle(bias=False)),
    "eagle-speculators": (
        speculators("eagle", {}, fusion_bias=True, layernorms=False),
        eagle("transformer.", "fusion_fc"),
    ),
    "eagle-3": (CONFIG | {"draft_vocab_size": OUTPUTS}, eagle_3()),
    "eagle-3-llama3": (CONFIG | LLAMA3 | {"draft_vocab_size": OUTPUTS}, eagle_3()),
    "eagle-3-speculators": (
        speculators("eagle3", {}, draft_vocab_size=OUTPUTS, norm_before_residual=True),
        eagle_3("layers.0."),
    ),
    "eagle-3-of-own-depths": (
        speculators("eagle3", LLAMA3, draft_vocab_size=OUTPUTS, eagle_aux_hidden_state_layer_ids=[1, 2, 4]),
        eagle_3("layers.0."),
    ),
    "eagle-3-of-own-depths-without-projection": (
        CONFIG | {"norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
        {name: each for name, each in eagle_3().items() if name not in ("lm_head.weight", "d2t", "t2d")}
        | tensors_of({"input_norm.weight": (3 * HIDDEN,)}),
    ),
    # The layers that the states leave, where the cases above have those that they enter.
    "eagle-3-of-specforge": (
        CONFIG | {"draft_vocab_size": OUTPUTS, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}},
        eagle_3() | {"embed_tokens.weight": EMBEDDING.half()},
    ),
}


def expected(name: str) -> list[torch.Tensor]:
    """[vocab] logits of what follows the text, and of what follows one token more, as the public code has them."""
    config, given = LAYOUTS[name]
    weights = {part: each.double() for part, each in given.items()}
    n = len(TEXT) - 2
    own_depths = name.startswith(("eagle-3-of-own-depths", "eagle-3-of-specforge"))
    taps = [1, 2, 4] if own_depths else [2, 3, 3]
    states = TARGET.forward(Batch([Segment.chunk(TEXT[:n], TARGET.new_cache())]), taps=(*taps, 6)).hidden
    tokens = TARGET.embed_tokens(torch.tensor(TEXT[1:]))
    said = []
    if name.startswith("eagle-3"):
        prefix = "midlayer." if "midlayer.hidden_norm.weight" in weights else "layers.0."
        joined = torch.cat([states[tap] for tap in taps], dim=1)
        if config.get("norm_before_fc"):
            joined = norm(joined, weights["input_norm.weight"])
        features = joined @ weights["fc.weight"].T
        for rows in (n, n + 1):
            normed = norm(features, weights[f"{prefix}hidden_norm.weight"])
            read = torch.cat((norm(tokens[:rows], weights[f"{prefix}input_layernorm.weight"]), normed), dim=1)
            stream = normed if config.get("norm_before_residual") else features
            out = run_layer(weights, prefix, config, stream, read)[-1:]
            last = norm(out, weights["norm.weight"])
            if "d2t" in given:
                logits = torch.full((64,), -torch.inf, dtype=torch.float64)
                logits[torch.arange(OUTPUTS) + given["d2t"]] = (last @ weights["lm_head.weight"].T)[0]
            else:
                logits = TARGET.project(last)[0]
            said.append(logits)
            features = torch.cat((features, out))
        return said
    prefix, fc = ("transformer.", "fusion_fc") if "fusion_fc.weight" in weights else ("layers.0.", "fc")
    features = TARGET.final_norm(states[6])
    for rows in (n, n + 1):
        items = torch.cat((tokens[:rows], features), dim=1) @ weights[f"{fc}.weight"].T
        items = items + weights.get(f"{fc}.bias", 0.0)
        out = run_layer(weights, prefix, config, items, items)[-1:]
        said.append(TARGET.project(out)[0])
        features = torch.cat((features, out))
    return said


def gguf_of(name: str, path: Path, kind: gguf.GGMLQuantizationType = Kind.F32, **metadata: Any) -> Path:
    """The head as a file of llama.cpp: rotated neighbours side by side, token ids for offsets."""
    config, tensors = LAYOUTS[name]
    own, prefix = config.get("transformer_layer_config", config), "midlayer."
    writer = gguf.GGUFWriter(path, "eagle3")
    for key, value in (("block_count", 1), ("context_length", 2048), ("vocab_size", 64)):
        writer.add_uint32(f"eagle3.{key}", value)
    for key, theirs in (
        ("embedding_length", "hidden_size"), ("feed_forward_length", "intermediate_size"),
        ("attention.head_count", "num_attention_heads"), ("attention.head_count_kv", "num_key_value_heads"),
    ):  # fmt: skip
        writer.add_uint32(f"eagle3.{key}", own[theirs])
    writer.add_float32("eagle3.attention.layer_norm_rms_epsilon", own["rms_norm_eps"])
    writer.add_float32("eagle3.rope.freq_base", own.get("rope_theta", 10000.0))
    # Newer files have another name for them.
    key = "target_layers" if config.get("norm_before_fc") else "extract_layers"
    writer.add_array(f"eagle3.{key}", config.get("eagle_aux_hidden_state_layer_ids", [2, 3, 3]))
    writer.add_uint32("eagle3.target_hidden_size", HIDDEN)
    writer.add_bool("eagle3.norm_before_fc", config.get("norm_before_fc", False))
    writer.add_bool("eagle3.norm_before_residual", config.get("norm_before_residual", False))
    for key, value in metadata.items():
        writer.add_uint32(f"eagle3.{key}", value)
    if "rope_scaling" in own:
        plain = torch.tensor([own["rope_theta"] ** (-2 * pair / DIM) for pair in range(DIM // 2)])
        writer.add_tensor("rope_freqs.weight", (plain / frequencies(config)).float().numpy())
    for name, each in tensors.items():
        name = name.replace("layers.0.", prefix).removesuffix(".weight")
        if name == "t2d":
            continue
        if name == "d2t":
            writer.add_tensor("d2t", (each + torch.arange(OUTPUTS)).numpy())
            continue
        rows = each.float().numpy()
        if name.endswith(("q_proj", "k_proj")):
            heads = HEADS if name.endswith("q_proj") else KV_HEADS
            rows = rows.reshape(heads, 2, DIM // 2, -1).swapaxes(1, 2).reshape(rows.shape).copy()
        packed = gguf.quants.quantize(rows, kind) if rows.ndim == 2 else rows
        writer.add_tensor(f"{NAMES[name]}.weight", packed, raw_dtype=kind if rows.ndim == 2 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def drafter_of(name: str, folder: Path) -> HeadDrafter:
    if name.startswith("gguf "):
        return EAGLE3(str(gguf_of(name.removeprefix("gguf "), folder / "head.gguf")))
    return (EAGLE3 if name.startswith("eagle-3") else EAGLE)(str(write(folder / name, *LAYOUTS[name])))


FILES = [
    *("gguf eagle-3", "gguf eagle-3-llama3", "gguf eagle-3-speculators", "gguf eagle-3-of-own-depths"),
    "gguf eagle-3-of-own-depths-without-projection",
]


@pytest.mark.parametrize("name", [*LAYOUTS, *FILES])
def test_a_published_head_says_what_it_says_where_it_was_published(name: str, tmp_path: Path) -> None:
    trained = drafter_of(name, tmp_path).trained
    assert trained is not None
    head, n = head_kind(trained.kind)(trained, TARGET), len(TEXT) - 2
    states = TARGET.forward(Batch([Segment.chunk(TEXT[:n], TARGET.new_cache())]), taps=head.taps).hidden
    memory = head.begin()
    first = head.read(memory, states, torch.tensor(TEXT[1 : n + 1]), np.arange(n))
    place = np.array([-1]), np.array([1]), np.ones((1, 1), dtype=bool)
    second = head.grow(memory, torch.tensor(TEXT[n + 1 : n + 2]), *place)
    for found, wanted in zip((first[None], second), expected(name.removeprefix("gguf ")), strict=True):
        spoken = wanted > -torch.inf
        assert torch.equal(head.spread(found)[0] > -torch.inf, spoken)
        # The frequencies of stretched positions are read in float32.
        assert float((head.spread(found)[0] - wanted)[spoken].abs().max()) < 1e-5


@pytest.mark.parametrize("name", ["eagle", "eagle-3", "gguf eagle-3"])
def test_drafts_of_published_heads_change_nothing(name: str, tmp_path: Path) -> None:
    drafter = drafter_of(name, tmp_path)
    check_identical(TARGET, [[1, 2, 3]], drafter=drafter, max_new_tokens=8, seeds=(0,), tested="drafted")


@pytest.mark.parametrize(
    ("config", "tensors", "error", "words"),
    [
        (speculators("mlp", {}), eagle(), UnsupportedModel, "mlp is no layout of a draft head"),
        (CONFIG, {"model.norm.weight": torch.ones(32)}, UnsupportedModel, "LlamaForCausalLM.* is no layout"),
        (CONFIG, eagle() | {"layers.1.mlp.up_proj.weight": torch.ones(2, 2)}, UnsupportedModel, "layers.1.mlp.up_proj"),
        (CONFIG, eagle() | {"fc2.weight": torch.ones(2, 2)}, UnsupportedModel, "fc2.weight belongs to a part"),
        (CONFIG | {"num_hidden_layers": 2}, eagle(), UnsupportedModel, "num_hidden_layers = 2"),
        (CONFIG | {"model_type": "deepseek"}, eagle(), UnsupportedModel, "model_type 'deepseek'"),
        (speculators("eagle", {}, layernorms=True), eagle("transformer.", "fusion_fc"), UnsupportedModel, "layernorms"),
        (speculators("eagle3", {}, norm_before_fc=True), eagle_3("layers.0."), CorruptFile, "lm_head.weight"),
        (CONFIG | {"draft_vocab_size": 20, "norm_before_fc": True}, eagle_3(), CorruptFile, "no tensor input_norm"),
        (CONFIG | {"draft_vocab_size": 9}, eagle_3(), CorruptFile, r"lm_head.weight is \[20, 32\]"),
        (CONFIG, {"fc.weight": torch.ones(32, 64)} | eagle_3("layers.0."), CorruptFile, "lm_head.weight"),
        (CONFIG, eagle() | {"fc.weight": torch.full((32, 64), torch.nan)}, CorruptFile, "not finite"),
        (CONFIG | {"hidden_size": "wide"}, eagle(), CorruptFile, "hidden_size"),
        (CONFIG | {"sliding_window": 512}, eagle_3(), UnsupportedModel, "sliding_window = 512"),
        (CONFIG | {"layer_types": ["sliding_attention"]}, eagle_3(), UnsupportedModel, "layer_types"),
        (speculators("eagle3", {"sliding_window": 9}), eagle_3("layers.0."), UnsupportedModel, "sliding_window = 9"),
        (CONFIG | {"draft_vocab_size": 20, "target_hidden_size": 48}, eagle_3(), CorruptFile, "fc.weight"),
        (CONFIG | {"eagle_config": {"use_aux_hidden_state": False}}, eagle_3(), UnsupportedModel, "use_aux_hidden"),
        (CONFIG | {"eagle_config": {"use_last_layernorm": False}}, eagle_3(), UnsupportedModel, "use_last_layernorm"),
        (CONFIG | {"eagle_config": {"parallel_draft_step": 2}}, eagle_3(), UnsupportedModel, "parallel_draft_step = 2"),
        (CONFIG | {"parallel_drafting": True}, eagle_3(), UnsupportedModel, "parallel_drafting = True"),
        (CONFIG | {"draft_vocab_size": 20, "fc_norm": True}, eagle_3(), CorruptFile, "no tensor fc_norm.0.weight"),
        ({}, {"medusa_head.0.linear.weight": torch.ones(2, 2)}, UnsupportedModel, "tensor medusa_head.0.linear.weight"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    config: dict[str, Any], tensors: dict[str, torch.Tensor], error: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        TrainedHead.load(write(tmp_path / "head", config, tensors))


def test_a_quantized_file_is_read_and_others_are_refused_by_name(tmp_path: Path) -> None:
    whole = TrainedHead.load(gguf_of("eagle-3", tmp_path / "whole.gguf"))
    coded = TrainedHead.load(gguf_of("eagle-3", tmp_path / "coded.gguf", Kind.Q8_0))
    assert any(each.dtype == torch.int8 for each in coded.tensors.values())
    rows = {name: Parts(each.tensors).floating()["fc.weight"] for name, each in (("whole", whole), ("coded", coded))}
    assert 0 < float((rows["whole"] - rows["coded"]).abs().max()) < 0.05
    assert published_drafter(str(tmp_path / "whole.gguf")).trained is whole
    for words, more in (("key eagle3.expert_count is not known", {"expert_count": 4}), ("block_count = 2", {})):
        path = gguf_of("eagle-3", tmp_path / "other.gguf", **more)
        if not more:
            at = path.read_bytes().index(b"eagle3.block_count") + len(b"eagle3.block_count") + 4
            path.write_bytes(path.read_bytes()[:at] + b"\x02" + path.read_bytes()[at + 1 :])
        with pytest.raises(UnsupportedModel, match=words):
            TrainedHead.load(path)
    (tmp_path / "other.gguf").write_bytes((tmp_path / "whole.gguf").read_bytes().replace(b"eagle3", b"eagle2"))
    with pytest.raises(UnsupportedModel, match="of the architecture eagle3 or dflash, and this one is of 'eagle2'"):
        TrainedHead.load(tmp_path / "other.gguf")


def test_a_head_reads_tokens_by_an_embedding_of_its_own(tmp_path: Path) -> None:
    config, tensors = LAYOUTS["eagle-3"]

    def head(table: torch.Tensor) -> DraftHead:
        own = {"vocab_size": len(table)}
        folder = write(tmp_path / "head", config | own, tensors | {"embed_tokens.weight": table})
        found = head_kind("eagle-3")(TrainedHead.load(folder), TARGET)
        assert isinstance(found, DraftHead)
        return found

    # One that is the target's is left out.
    assert not head(EMBEDDING + 1e-3).own_embedding
    other = head(EMBEDDING.flip(0))
    assert torch.equal(other.embed(torch.tensor([3])), EMBEDDING.flip(0)[3:4].double())
    with pytest.raises(SettingsError, match="has embeddings of 48 tokens, and this model has 64"):
        head(EMBEDDING[:48])


def test_a_head_is_refused_where_it_does_not_belong(tmp_path: Path) -> None:
    folder = write(tmp_path / "head", *LAYOUTS["eagle"])
    with pytest.raises(SettingsError, match="a head for eagle, not for eagle-3: use the drafter eagle"):
        EAGLE3(str(folder))
    wide = tiny_transformer(0, num_layers=6, hidden_size=48)
    with pytest.raises(SettingsError, match="for a model of width 32, and this one has 48"):
        Engine(wide).submit(Request([1], drafter=EAGLE(str(folder))))
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(ModelNotFound, match="write its tensors as safetensors first"):
        EAGLE(str(folder))
