"""UniXcoder's three modes: states of transformers' RoBERTa under each mode's sight, and the prefix's laws."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import decodery as dc
from decodery.core.errors import CorruptFile, PromptError, SettingsError, UnsupportedModel
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.logits_sources.prefix_lm import PrefixLM
from decodery.models.batch import Batch, Segment
from decodery.models.families.unixcoder import MODES, framed, read_weights, vectors
from decodery.models.loaders.load import LoadedModel, load
from decodery.models.torch.transformer import Transformer
from decodery.sampling import Sampler
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.step.forward_request import run_sync, score
from decodery.testing import check_identical, check_state
from tiny_models import TREE_PARENTS, make_tokenizer, random_ids, randomize, tree_mask

VOCAB = 288
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 130, "type_vocab_size": 3, "pad_token_id": 1, "bos_token_id": 256, "eos_token_id": 257,
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, transformers.RobertaModel]:
    """A random RoBERTa without a head, saved with a tokenizer that has the modes."""
    folder = tmp_path_factory.mktemp("unixcoder")
    model = transformers.RobertaModel(transformers.RobertaConfig(**SHAPE), add_pooling_layer=True)
    randomize(model).set_attn_implementation("eager")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("LayerNorm.weight"):
                weight.copy_(1.0 + 0.2 * torch.randn_like(weight))
            elif ".attention." in name:
                # What a token sees should matter.
                weight.mul_(3.0)
    model.save_pretrained(folder)
    backend = make_tokenizer()
    backend.add_special_tokens([f"<{mode}>" for mode in MODES])
    backend.save(str(folder / "tokenizer.json"))
    return folder, model


@pytest.fixture(scope="module")
def loaded(made: tuple[Path, Any]) -> LoadedModel:
    return load(made[0], device="cpu")


@pytest.fixture(scope="module")
def wide(made: tuple[Path, Any], loaded: LoadedModel) -> Transformer:
    """The model in float64, for laws."""
    tensors = made[1].state_dict()
    weights = read_weights(loaded.model.config, 2, lambda part: tensors[part].double())
    return Transformer(loaded.model.config, weights)


@torch.inference_mode()
def expected(theirs: transformers.RobertaModel, ids: Sequence[int], sight: np.ndarray) -> torch.Tensor:
    """States [n, hidden] under a mask [n, n]; their own positions begin after padding's."""
    added = torch.zeros(1, 1, len(ids), len(ids)).masked_fill_(~torch.from_numpy(sight), -1e9)
    return theirs(input_ids=torch.tensor([list(ids)]), attention_mask=added).last_hidden_state[0]


def logits_of(theirs: transformers.RobertaModel, states: torch.Tensor) -> torch.Tensor:
    return states @ theirs.embeddings.word_embeddings.weight.T.detach()


def prefix_sight(prompt: int, n: int) -> np.ndarray:
    sight = np.tri(n, dtype=bool)
    sight[:prompt, :prompt] = True
    return sight


def test_as_a_decoder_it_is_a_causal_model(made: tuple[Path, Any], loaded: LoadedModel) -> None:
    model, ids = loaded.model, random_ids(23)
    wanted = logits_of(made[1], expected(made[1], ids, np.tri(23, dtype=bool)))
    cache, rows = model.new_cache(), []
    for size in (9, 1, 1, 7, 1, 4):
        rows.append(model.forward(Batch([Segment.chunk(ids[cache.next_position :][:size], cache)])).logits)
        cache.keep(range(size))
    assert (torch.cat(rows) - wanted).abs().max() < 1e-4 < wanted.std()
    # Positions that began at 0, or norms before the sublayers, would say something else.
    shifted = made[1](input_ids=torch.from_numpy(ids)[None], position_ids=torch.arange(23)[None]).last_hidden_state[0]
    assert (logits_of(made[1], shifted) - wanted).abs().max() > 0.1
    assert loaded.tokenizer.encode("a")[:3] == framed(loaded.tokenizer, "", "decoder-only")
    check_identical(model, [[5, 6, 7] * 4, [9]], drafter="prompt-lookup", max_new_tokens=12)


def test_as_encoder_and_decoder_the_prompt_is_seen_both_ways(
    made: tuple[Path, Any], loaded: LoadedModel, wide: Transformer
) -> None:
    model, theirs = wide, copy.deepcopy(made[1]).double()
    prompt = framed(loaded.tokenizer, "def f(x):", "encoder-decoder")
    n, behind = len(prompt), random_ids(6).tolist()
    ids = [*prompt, *behind]
    wanted = logits_of(theirs, expected(theirs, ids, prefix_sight(n, len(ids))))
    causal = logits_of(theirs, expected(theirs, ids, np.tri(len(ids), dtype=bool)))
    for sizes in ([n, 6], [3, n - 3, 2, 4], [n + 2, 4], [n - 1, 3, 4], [1] * (n + 6)):
        # However a prompt is cut into passes, all of it is seen.
        reading = PrefixLM().over(model, prompt)
        cache, rows = reading.new_cache(), []
        for size in sizes:
            chunk = ids[cache.next_position :][:size]
            rows.append(run_sync(score(reading, Segment.chunk(chunk, cache))).logits)
            cache.keep(range(size))
        found = torch.cat(rows)
        assert (found - wanted).abs().max() < 1e-9 < (causal - wanted).abs().max()
    mask, nodes = tree_mask(TREE_PARENTS), random_ids(len(TREE_PARENTS), seed=2)
    tree = Segment(len(ids) + mask.sum(axis=1) - 1, nodes, mask=mask, cache=cache, logit_rows=[8, 5])
    for node, logits in zip([8, 5], run_sync(score(reading, tree)).logits, strict=True):
        path = [*ids, *nodes[mask[node]].tolist()]
        there = logits_of(theirs, expected(theirs, path, prefix_sight(n, len(path))))[-1]
        assert (logits - there).abs().max() < 1e-9
    # A later token of the prompt changes what earlier ones are; what is written changes none of them.
    held = cache.data[:, :, :, :n].clone()
    for at, changes in ((n - 2, True), (n + 1, False)):
        other = [*ids[:at], (ids[at] + 1) % 256, *ids[at + 1 :]]
        again = PrefixLM().over(model, other[:n])
        fresh = again.new_cache()
        run_sync(score(again, Segment.chunk(other, fresh)))
        fresh.keep(range(len(other)))
        assert bool((fresh.data[:, :, :, : n - 2] - held[:, :, :, : n - 2]).abs().max() > 1e-6) is changes


def test_drafts_behind_a_prefix_keep_the_laws(loaded: LoadedModel, wide: Transformer) -> None:
    model, drawn = wide, Sampler.from_settings(temperature=1.0)
    prompts = [framed(loaded.tokenizer, text, "encoder-decoder") for text in ("abc abc abc", "x")]
    check_identical(model, prompts, drafter="token-recycling", logits_source=PrefixLM(), max_new_tokens=16)
    # The same model without sight of the whole prompt guesses well enough.
    check_identical(
        model, prompts, drafter=DraftModel(model, length=3), logits_source=PrefixLM(), sampler=drawn, max_new_tokens=16
    )
    assert check_state(model, prompts, drafter="token-recycling", logits_source=PrefixLM(), max_new_tokens=8) < 1e-9
    engine, request = Engine(model), Request(prompts[0], logits_source="prefix-lm", sampler=drawn, max_new_tokens=10)
    whole = engine.submit(request)
    engine.run([whole])
    plain = engine.submit(Request(prompts[0], sampler=drawn, max_new_tokens=10))
    engine.run([plain])
    assert whole.generated != plain.generated
    cut = engine.submit(request)
    for _ in range(4):
        engine.step()
    engine.preempt(cut)
    engine.run([cut])
    assert cut.generated == whole.generated


def test_as_an_encoder_it_gives_one_vector_of_a_text(made: tuple[Path, Any], loaded: LoadedModel) -> None:
    texts = ["one text", "another, longer text", "one text"]
    found = vectors(loaded.model, loaded.tokenizer, texts)  # type: ignore[arg-type]
    assert torch.equal(found[0], found[2]) and not torch.allclose(found[0], found[1])
    for text, vector in zip(texts, found, strict=True):
        ids = framed(loaded.tokenizer, text, "encoder-only")
        mean = expected(made[1], ids, np.ones((len(ids), len(ids)), dtype=bool)).mean(dim=0)
        assert torch.allclose(vector, torch.nn.functional.normalize(mean, dim=0), atol=1e-5)


def test_frames_are_those_of_each_mode(loaded: LoadedModel) -> None:
    texts = loaded.tokenizer
    modes = [texts.token_id(f"<{mode}>") for mode in MODES]
    a, b, c = texts.encode("abc", special=False)
    assert framed(texts, "abc", "encoder-only") == [256, modes[0], 257, a, b, c, 257]
    assert framed(texts, "abc", "decoder-only") == [256, modes[1], 257, a, b, c]
    # What is too long loses its begin where it is to be gone on with.
    assert framed(texts, "abc", "decoder-only", 5) == [256, modes[1], 257, b, c]
    assert framed(texts, "abc", "encoder-decoder", 5) == [256, modes[2], 257, a, 257]
    with pytest.raises(SettingsError, match="there is no mode"):
        framed(texts, "abc", "decoder")


def test_what_does_not_fit_is_refused(made: tuple[Path, Any], loaded: LoadedModel, tmp_path: Path) -> None:
    reading = PrefixLM().over(loaded.model, [1, 2, 3])  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="another prompt"):
        run_sync(score(reading, Segment.chunk([1, 5], reading.new_cache())))
    with pytest.raises(PromptError, match="shorten it to 16,384"):
        PrefixLM().over(loaded.model, [1] * 16_385)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="runs in float32"):
        load(made[0], dtype="int8")
    described = json.loads((made[0] / "config.json").read_text())
    for name, value, error in (
        ("hidden_act", "relu", UnsupportedModel),
        ("position_embedding_type", "relative_key", UnsupportedModel),
        ("num_attention_heads", 5, CorruptFile),
        ("num_hidden_layers", 4, CorruptFile),
        ("max_position_embeddings", 131, CorruptFile),
    ):
        for each in made[0].iterdir():
            (tmp_path / each.name).write_bytes(each.read_bytes())
        (tmp_path / "config.json").write_text(json.dumps(described | {name: value}))
        with pytest.raises(error):
            dc.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(described))
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedModel, match="without the modes"):
        dc.load(tmp_path)
