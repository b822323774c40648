"""Tokenizers whose tokens are whole words: both loaders read them, and texts come back word by word."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
import transformers
from tokenizers import models, pre_tokenizers

import decodery as dc
from decodery.core.errors import UnsupportedModel
from decodery.models.tokenizers.tokenizer import Tokenizer
from tiny_models import randomize

WORDS = ["[UNK]", "<s>", "</s>", *(f"w{n}" for n in range(60)), "é"]
_SHAPE = {
    "vocab_size": len(WORDS), "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 4, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def make_tokenizer(unknown: str | None = "[UNK]") -> tokenizers.Tokenizer:
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, **({} if unknown is None else {"unk_token": unknown})))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


@pytest.fixture(params=["llama", "falcon"], ids=["our own loader", "through transformers"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    config = transformers.AutoConfig.for_model(request.param, **_SHAPE)
    randomize(transformers.AutoModelForCausalLM.from_config(config)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_both_loaders_read_and_write_words(folder: Path) -> None:
    make_tokenizer().save(str(folder / "tokenizer.json"))
    lm = dc.load(folder, device="cpu")
    assert lm.tokenizer.encode("w3 é never") == [6, 63, 0]
    out = lm.generate("w3 w4 w3 w4", max_new_tokens=12)
    assert out.tokens and "w3 w4 w3 w4" + out.text == make_tokenizer().decode([6, 7, 6, 7, *out.tokens])
    assert out.tokens == lm.generate("w3 w4 w3 w4", max_new_tokens=12, drafter=None).tokens


def test_a_vocabulary_without_a_token_for_other_words_is_refused(folder: Path) -> None:
    for unknown in (None, "missing"):
        make_tokenizer(unknown).save(str(folder / "tokenizer.json"))
        with pytest.raises(UnsupportedModel, match=r"no token for others: name one of its vocabulary as unk_token"):
            dc.load(folder, device="cpu")


def test_words_are_joined_as_their_library_joins_them() -> None:
    backend = make_tokenizer()
    ours, ids = Tokenizer(backend), [3, 63, 1, 5, 0, 4]
    assert ours.decode(ids) == backend.decode(ids) == "w0 é w2 [UNK] w1"
    assert ours.decode(ids, special=True) == backend.decode(ids, skip_special_tokens=False)
    stream = ours.stream()
    assert [stream.push([id]) for id in ids] == ["w0", " é", "", " w2", " [UNK]", " w1"]
