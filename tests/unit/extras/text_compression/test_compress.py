"""Compressed texts come back byte for byte, in about as many bits as the model says, and damage is an error."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from decodery.core.errors import CorruptFile, NumericalError, SettingsError, UnsupportedModel
from decodery.core.native import kernels
from decodery.extras.text_compression.coder import ArithmeticDecoder, ArithmeticEncoder
from decodery.extras.text_compression.counts import TOTAL, frequencies
from decodery.extras.text_compression.file import Header, digest, pack, unpack
from decodery.extras.text_compression.text import coded, compress, decompress, fingerprint, tokens_of
from decodery.llm.llm import LLM
from decodery.models.loaders.load import LoadedModel
from decodery.models.torch.transformer import Transformer, runs_natively
from decodery.testing.models import to_int8
from tiny_models import tiny_loaded


@cache
def lm() -> LLM:
    loaded = tiny_loaded()
    model = to_int8(loaded.model)  # type: ignore[arg-type]
    return LLM(LoadedModel(model, loaded.tokenizer, None, "tiny", "int8"))


TEXTS = [
    b"",
    b"a",
    b"\xff",
    b"\xc3\x28 \xf0\x9f\x98 cut",
    "Grüße, 世界 🎉\r\n\t\0".encode(),
    b"before <|im_end|></s> after",
    bytes(range(256)),
    b"the tide comes in and the tide goes out, " * 5,
]


def test_any_bytes_come_back() -> None:
    chance = np.random.default_rng(0)
    short = [chance.integers(0, 256, chance.integers(1, 12)).astype(np.uint8).tobytes() for _ in range(12)]
    for text in [*TEXTS, *short]:
        assert decompress(lm(), compress(lm(), text)) == text
        if tokens := tokens_of(lm().tokenizer, text):
            # Coded even where that is longer; in windows that are full again and again.
            header = Header(fingerprint(lm()), digest(text), len(text), len(tokens), 40, 7)
            assert decompress(lm(), pack(header, coded(lm(), tokens, 40, 7))) == text
        else:
            assert not text


def test_a_short_context_is_a_short_window() -> None:
    model = lm().model
    assert isinstance(model, Transformer)
    brief = Transformer(replace(model.config, max_positions=40), model.weights)
    other = LLM(LoadedModel(brief, lm().tokenizer, None, "tiny", "int8"))
    text = TEXTS[-1] * 9
    assert decompress(other, compress(other, text)) == text and unpack(compress(other, text))[0].window == 40
    with pytest.raises(SettingsError, match="does not fit a window of 40"):
        compress(other, text, overlap=40)


def test_coded_tokens_come_back_whatever_drafts_and_whichever_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    # A model of noise expects no text; its own, at a low temperature, it does.
    said = lm().generate(
        "ab", apply_chat_template=False, max_new_tokens=90, temperature=0.5, seed=3, ignore_eos=True, drafter=None
    )
    text = b"".join(map(lm().tokenizer.piece, said.tokens))
    made = compress(lm(), text, window=64, overlap=16)
    header, payload = unpack(made)
    assert header.tokens > 0 and len(payload) < len(text)
    assert decompress(lm(), made, drafter="prompt-lookup") == decompress(lm(), made, drafter="ngram") == text
    monkeypatch.setattr(kernels, "library", lambda: None)
    monkeypatch.setattr("decodery.models.torch.transformer.library", lambda: None)
    other = LLM(LoadedModel(to_int8(tiny_loaded().model), lm().tokenizer, None, "tiny", "int8"))  # type: ignore[arg-type]
    assert isinstance(other.model, Transformer) and not runs_natively(other.model.config)
    assert compress(other, text, window=64, overlap=16) == made


def test_every_damage_is_an_error() -> None:
    said = lm().generate(
        "xy", apply_chat_template=False, max_new_tokens=40, temperature=0.5, seed=1, ignore_eos=True, drafter=None
    )
    text = b"".join(map(lm().tokenizer.piece, said.tokens))
    made = compress(lm(), text)
    for place in range(len(made)):
        broken = bytearray(made)
        broken[place] ^= 1 << place % 8
        with pytest.raises((CorruptFile, SettingsError)):
            decompress(lm(), bytes(broken))
    for cut in (0, 3, 10, len(made) // 2, len(made) - 1):
        with pytest.raises(CorruptFile):
            decompress(lm(), made[:cut])
    # Where the sum over the file was made to fit, what comes out still gives it away, or ends.
    from zlib import crc32

    body = bytearray(made[:-4])
    body[-3] ^= 16
    with pytest.raises(CorruptFile):
        decompress(lm(), bytes(body) + crc32(body).to_bytes(4, "little"))
    # A small file that promises much ends where its bits do.
    empty = pack(Header(fingerprint(lm()), bytes(8), 1 << 24, 1 << 24, 64, 16), b"")
    with pytest.raises(CorruptFile, match="ends too early"):
        decompress(lm(), empty)
    with pytest.raises(CorruptFile, match="damaged"):
        unpack(pack(Header(bytes(8), bytes(8), 1 << 40, 1, 1024, 256), b""))


def test_other_models_are_refused() -> None:
    made = compress(lm(), b"hello hello hello")
    loaded = tiny_loaded()
    with pytest.raises(UnsupportedModel, match="int8"):
        compress(LLM(loaded), b"hello")
    model = to_int8(loaded.model)  # type: ignore[arg-type]
    model.weights.layers[1].down.weight[3, 4] += 1  # type: ignore[attr-defined]
    with pytest.raises(SettingsError, match="another model"):
        decompress(LLM(LoadedModel(model, loaded.tokenizer, None, "tiny", "int8")), made)
    with pytest.raises(SettingsError, match="overlap"):
        compress(lm(), b"hello", window=4, overlap=4)


def test_the_coder_spends_what_the_frequencies_say() -> None:
    chance, n, size = np.random.default_rng(0), 20_000, 1000
    likely = chance.random(n) < 0.9
    symbols = np.where(likely, 0, chance.integers(1, size, n))
    encoder, bits = ArithmeticEncoder(), 0.0
    for symbol in symbols.tolist():
        # One symbol has all that the least frequencies of the others leave.
        begin, end = (0, TOTAL - size + 1) if symbol == 0 else (TOTAL - size + symbol, TOTAL - size + symbol + 1)
        encoder.push(begin, end, TOTAL)
        bits -= math.log2((end - begin) / TOTAL)
    data = encoder.finish()
    assert abs(8 * len(data) - bits) <= 3 + 8 + 1e-4 * n
    decoder, found = ArithmeticDecoder(data), []
    for _ in range(n):
        target = decoder.target(TOTAL)
        symbol = 0 if target < TOTAL - size + 1 else target - (TOTAL - size)
        begin, end = (0, TOTAL - size + 1) if symbol == 0 else (TOTAL - size + symbol, TOTAL - size + symbol + 1)
        decoder.pull(begin, end, TOTAL)
        found.append(symbol)
    assert found == symbols.tolist() and not decoder.beyond
    for _ in range(9):
        decoder.pull(TOTAL - 1, TOTAL, TOTAL)
    assert decoder.beyond


def test_random_bits_are_a_sample_that_encodes_to_them() -> None:
    bits = np.random.default_rng(1).integers(0, 256, 40).astype(np.uint8).tobytes()
    rows = torch.randn(60, 50, generator=torch.Generator().manual_seed(0)) * 3
    ends = frequencies(rows).cumsum(axis=1)
    decoder, encoder = ArithmeticDecoder(bits), ArithmeticEncoder()
    for row in ends:
        symbol = int(np.searchsorted(row, decoder.target(TOTAL), side="right"))
        share = int(row[symbol - 1]) if symbol else 0, int(row[symbol])
        decoder.pull(*share, TOTAL)
        encoder.push(*share, TOTAL)
    made = encoder.finish()
    same = min(len(made), len(bits)) - 2
    assert same > 15 and made[:same] == bits[:same]


def test_frequencies_follow_the_logits_and_add_up() -> None:
    rows = torch.randn(20, 500, generator=torch.Generator().manual_seed(0)) * 4
    rows[0, 3] = -torch.inf
    counts = frequencies(rows)
    assert (counts.sum(axis=1) == TOTAL).all() and counts.min() >= 1 and counts[0, 3] == 1
    p = rows.double().softmax(dim=-1).numpy()
    cost = -(p * np.log2(counts / TOTAL)).sum(axis=1) + (p * np.log2(np.maximum(p, 1e-300))).sum(axis=1)
    # Steps of a 256th of a nat and a least frequency for everything cost next to nothing.
    assert 0 <= cost.max() < 1e-3
    with pytest.raises(NumericalError):
        frequencies(torch.full((1, 5), torch.nan))
