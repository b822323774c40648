"""Encoder-decoder models: logits of transformers' T5, and decoding with a source in view as with any other model."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import decodery as dc
from decodery.core.errors import CorruptFile, DecoderyError, PromptError, SettingsError, UnsupportedModel
from decodery.engine.engine import Engine
from decodery.engine.preempt import caches
from decodery.engine.request import Request
from decodery.engine.schedule import Limits
from decodery.logits_sources.reads import Reads
from decodery.models.batch import Segment
from decodery.models.cache.account import resident
from decodery.models.loaders.load import load
from decodery.models.torch.encoder_decoder import EncoderDecoder
from decodery.sampling import Sampler
from decodery.step.forward_request import run_sync, score
from decodery.testing import check_identical, check_state
from tiny_models import TREE_PARENTS, VOCAB, make_tokenizer, random_ids, randomize, tree_mask

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
    "pad_token_id": 256, "decoder_start_token_id": 256, "eos_token_id": 257,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "t5": {"num_decoder_layers": 3},
    "gated, own head": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}
SOURCE = tuple(random_ids(30, seed=3).tolist())
GREEDY = Sampler.from_settings()


def make(folder: Path, case: str) -> transformers.T5ForConditionalGeneration:
    """A random T5, saved with the tokenizer of these tests."""
    model = randomize(transformers.T5ForConditionalGeneration(transformers.T5Config(**SHAPE | CASES[case])))
    with torch.no_grad():
        # The head's scale makes random logits flat, and greedy texts all one token.
        model.shared.weight.mul_(8 if case == "t5" else 2)
    model.save_pretrained(folder)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    if "own" in case:
        # Checkpoints of version 1.1 have a head of their own.
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.weight"] = 0.15 * torch.randn(VOCAB, SHAPE["d_model"])
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        model.lm_head.weight = torch.nn.Parameter(tensors["lm_head.weight"])
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    found = {}
    for case in CASES:
        folder = tmp_path_factory.mktemp("t5")
        found[case] = folder, make(folder, case)
    return found


@pytest.fixture(scope="module")
def tiny(folders: dict[str, tuple[Path, Any]]) -> EncoderDecoder:
    """One whose every number is float64, for laws."""
    model = load(folders["t5"][0]).model
    assert isinstance(model, EncoderDecoder)
    from decodery.models.families.t5 import read_weights, tensors

    parts = {name: tensor.double() for name, tensor in tensors(model.config, model.weights)}
    return EncoderDecoder(model.config, read_weights(model.config, parts.__getitem__, parts))


@torch.inference_mode()
def expected(theirs: Any, ids: np.ndarray, source: Sequence[int] = SOURCE) -> torch.Tensor:
    return theirs(
        input_ids=torch.tensor([source]), use_cache=False, decoder_input_ids=torch.from_numpy(ids)[None]
    ).logits[0]


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, folders: dict[str, tuple[Path, Any]]) -> None:
    folder, theirs = folders[case]
    loaded = load(folder)
    assert loaded.dtype == "float32" and loaded.model.config.num_layers == theirs.config.num_decoder_layers
    reading = Reads(SOURCE).over(loaded.model, [256])
    cache, rows, ids = reading.new_cache(), [], random_ids(23)
    for size in (9, 1, 1, 7, 1, 4):
        chunk = ids[cache.next_position : cache.next_position + size]
        rows.append(run_sync(score(reading, Segment.chunk(chunk, cache))).logits)
        cache.keep(range(size))
    wanted = expected(theirs, ids)
    assert (torch.cat(rows) - wanted).abs().max() < 2e-4 < wanted.std()
    mask, nodes = tree_mask(TREE_PARENTS), random_ids(len(TREE_PARENTS), seed=2)
    tree = Segment(len(ids) + mask.sum(axis=1) - 1, nodes, mask=mask, cache=cache, logit_rows=[8, 5])
    for node, logits in zip([8, 5], run_sync(score(reading, tree)).logits, strict=True):
        assert (logits - expected(theirs, np.concatenate([ids, nodes[mask[node]]]))[-1]).abs().max() < 2e-4
    # A fork goes on from the same memory, and cutting the text leaves it in place.
    cache.keep([])
    clone = cache.fork()
    clone.truncate(5)
    assert clone.memory is cache.memory is not None and clone.bytes > cache.memory.bytes > cache.memory.data.nbytes
    again = run_sync(score(reading, Segment.chunk(ids[5:9], clone))).logits
    assert (again - wanted[5:9]).abs().max() < 2e-4


def test_decoding_with_a_source_keeps_the_laws(tiny: EncoderDecoder) -> None:
    source, sampler = Reads(SOURCE), Sampler.from_settings(temperature=1.0)
    for drawn in (GREEDY, sampler):
        check_identical(
            tiny, [[256], [256, 3]], drafter="token-recycling", sampler=drawn, logits_source=source, max_new_tokens=20
        )
    copied = Engine(tiny).submit(Request([256], logits_source=source, drafter="aggressive", max_new_tokens=3))
    assert (
        copied.states[copied.request.drafter].source == list(SOURCE)
        and copied.states[copied.request.drafter].pointer == 0
    )
    check_state(tiny, [[256]], drafter="token-recycling", logits_source=source, max_new_tokens=12)


def test_the_model_is_one_of_transformers_in_the_facade(folders: dict[str, tuple[Path, Any]]) -> None:
    folder, theirs = folders["t5"]
    lm = dc.load(folder)
    texts = ["one source", "another, longer source of the text"]
    found = lm.generate(texts, max_new_tokens=12, drafter="prompt-lookup", ignore_eos=True)
    for text, output in zip(texts, found, strict=True):
        written = [256]
        for _ in range(12):
            written.append(int(expected(theirs, np.asarray(written), lm.encode(text))[-1].argmax()))
        assert output.tokens == written[1:]
    assert found[0].tokens != found[1].tokens
    assert found[0].trace.ledger.passes["encoder"] == 1
    # What is written under a constraint matches it, whatever the source says, and samples of one prompt differ.
    bound = lm.generate("one source", constraint="regex:pattern=[0-9]{4}", drafter="token-recycling")
    assert bound.text.isdecimal() and len(bound.text) == 4
    drawn = lm.generate("one source", n=3, temperature=1.0, seed=5, max_new_tokens=6)
    assert len({tuple(each.tokens) for each in drawn}) == 3
    assert drawn[1].tokens == lm.generate("one source", temperature=1.0, seed=drawn[1].seed, max_new_tokens=6).tokens
    wide = lm.search("one source", "beam:width=2", max_new_tokens=6)
    assert len(wide) == 2 and all(each.score is not None for each in wide)


def test_a_text_goes_on_where_its_memory_was_given_up(tiny: EncoderDecoder) -> None:
    request = Request([256], logits_source=Reads(SOURCE), max_new_tokens=12)
    engine = Engine(tiny)
    whole = engine.submit(request)
    engine.run([whole])
    seq = engine.submit(request)
    for _ in range(5):
        engine.step()
    engine.preempt(seq)
    engine.run([seq])
    assert seq.generated == whole.generated and seq.trace.ledger.passes["encoder"] == 2


def most_held(model: EncoderDecoder, seed: int) -> float:
    """What pages and sources of random texts take together at most, in parts of a limit that holds a few of them."""
    chance, texts = random.Random(seed), list[Any]()
    reading = Reads((1,) * 60).over(model, [256])
    limit = 2 * reading.new_cache().more_for(40)
    engine, most = Engine(model, limits=Limits(cache_bytes=limit)), 0
    for step in range(400):
        if step < 60 and chance.random() < 0.6:
            source = Reads(tuple(chance.randrange(1, 200) for _ in range(chance.choice([5, 30, 60]))))
            texts.append(engine.submit(Request([256], logits_source=source, max_new_tokens=chance.randrange(2, 24))))
        engine.step()
        held = resident(cache for run in engine._schedule.runs for cache in caches(run))
        most = max(most, held)
        if step >= 60 and all(text.finished for text in texts):
            break
    assert all(text.finished and text.error is None for text in texts)
    return most / limit


def test_sources_are_in_the_account_before_they_are_read(tiny: EncoderDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = (reading := Reads(SOURCE).over(tiny, [256])).new_cache()
    announced = cache.memory_bytes
    run_sync(score(reading, Segment.chunk([256], cache)))
    assert cache.memory is not None and cache.memory.bytes == announced
    assert all(0.6 < most_held(tiny, seed) <= 1 for seed in range(2))
    # Wrong: they count once they were read.
    monkeypatch.setattr(EncoderDecoder, "memory_bytes", lambda model, tokens: 0)
    assert any(most_held(tiny, seed) > 1 for seed in range(2))


def test_what_does_not_fit_is_refused(
    tiny: EncoderDecoder, folders: dict[str, tuple[Path, Any]], tmp_path: Path
) -> None:
    def fails(error: type[DecoderyError], words: str, **settings: Any) -> None:
        engine = Engine(tiny)
        with pytest.raises(error, match=words):
            engine.run([engine.submit(Request([256], **settings))])

    fails(SettingsError, "was given none")
    fails(PromptError, "source is empty", logits_source=Reads(()))
    fails(PromptError, "outside the model's vocabulary", logits_source=Reads((VOCAB,)))
    said = "swift needs passes through some of the layers, which a model with an encoder does not give: use another"
    fails(SettingsError, said, logits_source=Reads((1,)), drafter="swift")
    folder = folders["t5"][0]
    with pytest.raises(SettingsError, match="run in float32"):
        load(folder, dtype="int8")
    described = json.loads((folder / "config.json").read_text())
    for name, value, error in (
        ("feed_forward_proj", "swish", UnsupportedModel),
        ("d_kv", 13, CorruptFile),
        ("num_layers", 9, CorruptFile),
        ("relative_attention_max_distance", 4, CorruptFile),
        ("eos_token_id", VOCAB, CorruptFile),
    ):
        for each in folder.iterdir():
            (tmp_path / each.name).write_bytes(each.read_bytes())
        (tmp_path / "config.json").write_text(json.dumps(described | {name: value}))
        with pytest.raises(error):
            load(tmp_path)
