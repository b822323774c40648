"""Tokens to text without loss, and tokenizers from GGUF metadata."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from decodery.core.errors import CorruptFile, PromptError, UnsupportedModel
from decodery.models.loaders.folder import FolderCheckpoint
from decodery.models.loaders.gguf_tokenizer import read_texts
from decodery.models.tokenizers.tokenizer import Tokenizer
from tiny_gguf import byte_vocabulary
from tiny_models import make_model, make_tokenizer, save

CORPUS = """The tide is the regular rise and fall of the sea, caused by the pull of the moon and of the sun.
Twice a day the water comes and goes; in some bays it rises by more than 12 metres, in others by 0.3.
Une marée haute, une marée basse. Die Flut kommt, die Ebbe geht. 潮の満ち引き。 def tide(moon, sun): return moon + sun
"""
TEXTS = [
    "", " ", "a", "The tide", " the tide", "the  tide   rises\n\n  and falls\t.", "marée", "naïve café", "潮の満ち引き",
    "🎉 party 👩‍👩‍👧", "12345.678", "it's don't WE'LL", "x_1 = f(y)**2 # note", "\r\n\r\n", "e\u0301", "\x00\x01",
]  # fmt: skip


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return Tokenizer(make_tokenizer(), bos_id=256, eos_ids=(257,))


@pytest.fixture(scope="module")
def pieces_model() -> sentencepiece.SentencePieceProcessor:
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.splitlines() * 3), model_writer=file, vocab_size=420, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, character_coverage=0.99,
        user_defined_symbols=["▁▁▁▁"], control_symbols=["<|turn|>"], minloglevel=2,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=file.getvalue())


def pieces_metadata(model: sentencepiece.SentencePieceProcessor, **changes: Any) -> dict[str, Any]:
    """What a converter writes of a SentencePiece model."""

    def kind(id: int) -> int:
        if model.is_unknown(id):
            return 2
        if model.is_control(id):
            return 3
        if model.is_byte(id):
            return 6
        return 4 if model.id_to_piece(id) == "▁▁▁▁" else 1

    ids = range(model.get_piece_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(id) for id in ids],
        "tokenizer.ggml.scores": np.array([model.get_score(id) for id in ids], dtype=np.float32),
        "tokenizer.ggml.token_type": np.array([kind(id) for id in ids]),
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        **{f"tokenizer.ggml.{name}": value for name, value in changes.items()},
    }


def _pieces_of(text: list[int], seed: int) -> list[list[int]]:
    rng, parts, at = random.Random(seed), [], 0
    while at < len(text):
        size = rng.randint(1, 4)
        parts.append(text[at : at + size])
        at += size
    return parts


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 300)), seed=st.integers(0, 99), special=st.booleans())
def test_streamed_pieces_join_to_the_decoded_whole(
    byte_level: Tokenizer, ids: list[int], seed: int, special: bool
) -> None:
    stream = byte_level.stream(special=special)
    text = "".join(stream.push(part) for part in _pieces_of(ids, seed)) + stream.finish()
    assert text == byte_level.decode(ids, special=special)
    assert text == byte_level.backend.decode(ids, skip_special_tokens=not special)


@settings(max_examples=100, deadline=None)
@given(text=st.text())
def test_text_comes_back_and_no_character_is_cut(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text)
    assert byte_level.decode(ids, special=True) == text
    stream, seen = byte_level.stream(special=True), ""
    for id in ids:
        seen += stream.push([id])
        assert text.startswith(seen)
    assert seen + stream.finish() == text
    assert b"".join(map(byte_level.piece, ids)) == text.encode()


def test_special_tokens_are_recognised_and_hidden(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a<|im_end|>b")
    assert ids == [97, 259, 98]
    assert byte_level.decode(ids) == "ab"
    assert byte_level.decode(ids, special=True) == "a<|im_end|>b"
    assert byte_level.token_id("<|im_end|>") == 259 and 259 in byte_level.special_ids
    assert byte_level.piece(10_000) == b"" == byte_level.piece(-1)


def test_text_that_is_no_text_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(PromptError, match="not valid text: it has surrogates"):
        byte_level.encode("\ud800")


# --- tokenizers from GGUF metadata ----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_metadata_encodes_as_sentencepiece(
    pieces_model: sentencepiece.SentencePieceProcessor, text: str
) -> None:
    backend, facts = read_texts(pieces_metadata(pieces_model), "x")
    tokenizer = Tokenizer(backend, bos_id=facts.bos_id, eos_ids=facts.eos_ids)
    expected = pieces_model.encode(text)
    assert tokenizer.encode(text, special=False) == expected
    assert tokenizer.encode(text) == [pieces_model.bos_id(), *expected]
    assert tokenizer.decode(expected) == text == pieces_model.decode(expected)
    stream = tokenizer.stream()
    assert "".join(stream.push([id]) for id in expected) + stream.finish() == text


def test_sentencepiece_without_the_leading_space(pieces_model: sentencepiece.SentencePieceProcessor) -> None:
    backend, _ = read_texts(pieces_metadata(pieces_model, add_space_prefix=False, add_bos_token=False), "x")
    tokenizer = Tokenizer(backend)
    ids = tokenizer.encode("tide")
    assert tokenizer.piece(ids[0])[:1] != b" "
    assert tokenizer.decode(tokenizer.encode(" tide")) == " tide"
    turn = pieces_model.piece_to_id("<|turn|>")
    assert tokenizer.encode("tide<|turn|>tide") == [*ids, turn, *ids]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("gpt-2", ["it", "'s", "Ġ12345", "ĠABC", "'", "S", "Ċ", "Ċ", "x"]),
        ("mpt", ["it", "'s", "Ġ12345", "ĠABC", "'", "S", "Ċ", "Ċ", "x"]),
        ("falcon-h1", ["it", "'s", "Ġ", "123", "45", "ĠABC", "'S", "ĊĊ", "x"]),
        ("smollm", ["it", "'s", "Ġ", "1", "2", "3", "4", "5", "ĠABC", "'", "S", "Ċ", "Ċ", "x"]),
        ("llama-bpe", ["it", "'s", "Ġ", "123", "45", "ĠABC", "'S", "ĊĊ", "x"]),
        ("qwen2", ["it", "'s", "Ġ", "1", "2", "3", "4", "5", "ĠABC", "'S", "ĊĊ", "x"]),
        ("tekken", ["it", "'s", "Ġ", "1", "2", "3", "4", "5", "ĠABC", "'S", "ĊĊ", "x"]),
    ],
)
def test_byte_level_kinds_cut_words_as_their_models_do(kind: str, words: list[str]) -> None:
    backend, _ = read_texts(_bytes_metadata(pre=kind), "x")
    assert [word for word, _ in backend.pre_tokenizer.pre_tokenize_str("it's 12345 ABC'S\n\nx")] == words


def _bytes_metadata(**changes: Any) -> dict[str, Any]:
    tokens = byte_vocabulary()
    kinds = [3 if token.startswith("<") and len(token) > 1 else 1 for token in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(kinds),
        "tokenizer.ggml.merges": ["t h"],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
        **{f"tokenizer.ggml.{name}": value for name, value in changes.items()},
    }


def test_beginning_and_ends() -> None:
    backend, facts = read_texts(_bytes_metadata(), "x")
    assert backend.encode("th").ids == [260] and facts.bos_id == 256
    assert facts.eos_ids == (257, 259), "a token known to end turns ends the text too"
    assert read_texts(_bytes_metadata(add_bos_token=True), "x")[0].encode("th").ids == [256, 260]
    # Llama 3 files leave it out and mean yes.
    assert read_texts(_bytes_metadata(pre="llama-bpe"), "x")[0].encode("th").ids == [256, 260]
    assert read_texts(_bytes_metadata(eot_token_id=258), "x")[1].eos_ids == (257, 258, 259)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"model": "rwkv"}, UnsupportedModel, "rwkv"),
        ({"pre": "kimi-k2"}, UnsupportedModel, "kimi-k2"),
        ({"tokens": None}, CorruptFile, "holds no tokenizer"),
        ({"merges": None}, CorruptFile, "no merges"),
        ({"merges": ["t nosuch"]}, CorruptFile, "damaged"),
        ({"merges": ["th"]}, CorruptFile, "damaged"),
        ({"token_type": np.zeros(3)}, CorruptFile, "one for each token"),
        ({"model": "llama"}, CorruptFile, "no scores"),
    ],
)
def test_damaged_metadata(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        read_texts(_bytes_metadata(**changes), "x.gguf")


def test_decoders_that_are_not_bytes_are_refused() -> None:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModel, match="WordPiece"):
        Tokenizer(backend)


# --- tokenizers of folders ------------------------------------------------------------------------------------------


def test_a_folders_files_say_what_begins_and_ends_a_text(tmp_path: Path) -> None:
    folder = save(make_model("llama"), tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [259, 258]}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {"add_bos_token": True, "bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "old"}
        )
    )
    (folder / "chat_template.jinja").write_text("new")
    backend, facts = FolderCheckpoint(folder).texts()
    assert backend.encode("a").ids == [256, 97]
    assert facts.eos_ids == (259, 258, 257) and facts.bos_id == 256
    assert facts.special == {"bos_token": "<s>", "eos_token": "</s>"}
    assert facts.chat_template == "new"
