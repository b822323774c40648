"""Sound files of every kind, which the cases mutate."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

QUANTIZED = (
    *("GPTQ 4 bits, act-order", "AWQ gemv", "FP8, blocks of 48 by 40", "compressed-tensors W4A16, any zeros"),
    *("compressed-tensors NVFP4", "Model Optimizer FP8, channels", "bitsandbytes NF4, double", "bitsandbytes int8"),
)
"""Layouts of quantized folders of which there is one each."""


def prepare(base: Path) -> None:
    """Write one sound file of every kind."""
    import numpy as np
    import torch
    from gguf import GGMLQuantizationType

    import quantized_weights
    import tiny_gguf
    import tiny_models
    from decodery.logits_sources.partial_attention import PartialWeights
    from decodery.models.loaders import fused
    from decodery.models.loaders.description import Description
    from decodery.models.loaders.load import load
    from decodery.models.trained.prefix import KVPrefix, Prefixes
    from decodery.scorers.value_head import LinearValue
    from decodery.speculative.acceptance.judge import Head
    from decodery.speculative.draft_length.specdec_pp import AcceptanceHead
    from decodery.speculative.stores.warm import CONTEXTS, WarmContexts
    from decodery.testing import to_int8
    from decodery.training.datastore import build_datastore

    hf_model = tiny_models.make_model("llama yarn rope")
    tiny_models.save(hf_model, base / "whole")
    folder = tiny_models.save(hf_model, base / "folder", max_shard_size="60KB")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    settings = {"add_bos_token": True, "bos_token": "<s>", "eos_token": {"content": "</s>"}}
    settings["chat_template"] = [{"name": "default", "template": template}]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    _other_tokenizers(base)

    loaded = load(folder, dtype="float32", device="cpu")
    model: Any = loaded.model
    mark, config = model.fingerprint, model.config
    KVPrefix.zeros(config, 3)
    Prefixes({name: KVPrefix.zeros(config, 3) for name in ("secure", "unsafe")}, {"made": "here"}, mark).save(
        base / "prefixes.safetensors"
    )
    PartialWeights.initial(model).save(base / "partial.safetensors")
    LinearValue(torch.ones(64), torch.tensor(0.5), 2, mark).save(base / "value.safetensors")
    Head(torch.ones(64), 0.5, 2, {"auc": 0.9}, mark).save(base / "judge.safetensors")
    AcceptanceHead.random(64, config.vocab_size, depth=1).save(base / "acceptance.safetensors")
    rows = {order: np.full((5, 4), 7, dtype=np.int32) for order in CONTEXTS}
    contexts = {order: np.arange(5 * order).reshape(5, order) for order in CONTEXTS}
    WarmContexts(contexts, rows, np.full((3, 3, 4), 0.5), config.vocab_size, "v", {"made": "here"}).save(
        base / "contexts.safetensors"
    )
    (base / "text.txt").write_text("some text to index, and some more of it " * 20)
    build_datastore([base / "text.txt"], base / "datastore", tokenizer=loaded.tokenizer, vocab_size=config.vocab_size)
    draft = to_int8(model)
    # A draft's embedding is the table of its head.
    (base / "draft").mkdir()
    fused.save(base / "draft" / "int8.safetensors", draft.weights)
    loaded.tokenizer.backend.save(str(base / "draft" / "tokenizer.json"))
    description = Description(draft.config, "int8", {"bos_token": "<s>"}, template)
    (base / "draft" / "model.json").write_text(description.text())

    for name in QUANTIZED:
        folder = tiny_models.save(tiny_models.make_model("llama"), base / "quantized" / name)
        quantized_weights.quantize_folder(folder, quantized_weights.LAYOUTS[name])
    tiny_gguf.write_gguf(base / "model.gguf", tiny_models.make_model("llama"), GGMLQuantizationType.Q8_0)
    _take_apart(base)


def _other_tokenizers(base: Path) -> None:
    """Tokenizers of other kinds, with steps of most kinds before, after and around their models."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    bpe = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "Ġ": 3}, [("a", "b")], unk_token="a"))
    words = pre_tokenizers.Split(tokenizers.Regex(r"\w+"), "isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), words, pre_tokenizers.ByteLevel()])
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(["<s>", "</s>"])
    bpe.add_tokens(["foo"])
    bpe.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], pair=["<s>", "$A", "$B"], special_tokens=[("<s>", 4)]
    )
    bpe.enable_truncation(10, stride=2)
    bpe.enable_padding(length=8)
    bpe.save(str(base / "bpe.json"))
    pieces = [("<unk>", 0.0), ("a", -1.0), ("▁", -2.0), ("b", -3.0), ("ab", -1.5)]
    unigram = tokenizers.Tokenizer(models.Unigram(pieces, 0, True))
    unigram.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Prepend("▁"), normalizers.Replace(" ", "▁"), normalizers.Strip()]
    )
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    unigram.add_special_tokens(["<s>"])
    unigram.post_processor = processors.ByteLevel()
    unigram.save(str(base / "unigram.json"))
    wordpiece = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    wordpiece.normalizer = normalizers.BertNormalizer()
    wordpiece.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    wordpiece.decoder = decoders.ByteFallback()
    wordpiece.save(str(base / "wordpiece.json"))


def _take_apart(base: Path) -> None:
    """Of the GGUF file: its metadata as JSON, each value with its type, and what comes after the metadata."""
    from gguf import GGUFReader

    reader = GGUFReader(base / "model.gguf")
    entries = {}
    for key, entry in reader.fields.items():
        kinds = [int(kind) for kind in entry.types]
        if not key.startswith("GGUF."):
            entries[key] = [9, kinds[1], entry.contents()] if kinds[0] == 9 else [kinds[0], entry.contents()]
    (base / "model.gguf.json").write_text(json.dumps(entries))
    content = (base / "model.gguf").read_bytes()
    begin = min(int(tensor.field.offset) for tensor in reader.tensors)
    sizes = [sum(part.nbytes for part in tensor.field.parts) for tensor in reader.tensors]
    head = struct.pack("<QQ", len(reader.tensors), sum(sizes))
    infos, data = content[begin : begin + sum(sizes)], content[reader.data_offset :]
    (base / "model.gguf.tail").write_bytes(head + infos + data)
