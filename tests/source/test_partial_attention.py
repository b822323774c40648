"""Partial attention: nothing changes before training, passes of any shape agree, and only the prompt is looked at."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from decodery.cli.main import cli
from decodery.errors import CorruptFile, ModelNotFound, PromptError, SettingsError, UnsupportedModel
from decodery.model.attention import rotate
from decodery.model.batch import Batch, Segment
from decodery.model.load import LoadedModel
from decodery.model.one_pass import Pass
from decodery.model.tokenizer import Tokenizer
from decodery.registry import resolve
from decodery.source.partial_attention import PartialAttention, PartialCache, PartialTransformer, PartialWeights
from decodery.testing import Garbage, decode, tiny_transformer
from decodery.testing.models import to_int8
from decodery.train.loop import Plan
from decodery.train.partial import pair_loss, read_pairs, train_partial
from tiny_models import VOCAB, make_tokenizer

MODEL = tiny_transformer(0)
PROMPT = [5, 9, 2, 44, 17, 30]


def random_weights(seed: int = 0) -> PartialWeights:
    weights = PartialWeights.initial(MODEL)
    generator = torch.Generator().manual_seed(seed)
    for layer in weights.layers:
        layer["output"].copy_(torch.randn(layer["output"].shape, generator=generator) * 0.3)
    return weights


def all_logits(model, tokens: list[int], sizes: list[int]) -> torch.Tensor:
    cache, rows, read = model.new_cache(), [], 0
    for size in sizes:
        rows.append(model.forward(Batch([Segment.chunk(tokens[read : read + size], cache)])).logits)
        cache.keep(range(size))
        read += size
    return torch.cat(rows)


def test_nothing_changes_before_training() -> None:
    tokens = [*PROMPT, 1, 2, 3]
    fresh = PartialAttention(PartialWeights.initial(MODEL)).over(MODEL, PROMPT)
    trained = PartialAttention(random_weights()).over(MODEL, PROMPT)
    plain = all_logits(MODEL, tokens, [9])
    assert torch.equal(all_logits(fresh, tokens, [9]), plain)
    assert (all_logits(trained, tokens, [9]) - plain).abs().max() > 0.1


def test_chunks_single_tokens_and_one_pass_agree() -> None:
    scorer, tokens = PartialAttention(random_weights()).over(MODEL, PROMPT), [*PROMPT, 8, 7, 6, 50, 3]
    whole = all_logits(scorer, tokens, [11])
    for sizes in ([6, 1, 1, 1, 1, 1], [2, 3, 4, 2], [1] * 11):
        assert (all_logits(scorer, tokens, sizes) - whole).abs().max() < 1e-10
    segment = Segment(np.arange(11), np.array(tokens))
    assert (scorer.forward(Batch([segment])).logits - whole).abs().max() < 1e-10


def test_only_the_prompt_is_looked_at() -> None:
    """What a layer adds to a later row does not depend on the rows between, but for what they do to its own state."""
    one = tiny_transformer(0, num_layers=1)
    weights = PartialWeights(random_weights().layers[:1])
    scorer = PartialAttention(weights).over(one, PROMPT)
    added = []
    for between in ([8, 7], [33, 60]):
        cache = scorer.new_cache()
        assert isinstance(cache, PartialCache)
        for chunk in (PROMPT, between, [3]):
            scorer.forward(Batch([Segment.chunk(chunk, cache)]))
            cache.keep(range(len(chunk)))
        assert cache.source.length == len(PROMPT) and cache.length == len(PROMPT) + 3
        added.append(cache.source.data[:, :, :, : len(PROMPT)])
    assert torch.equal(*added)


def test_the_prompts_keys_survive_drafts_and_forks() -> None:
    source = PartialAttention(random_weights())
    (plain,) = decode(MODEL, [PROMPT], source=source, max_new_tokens=20)
    (drafted,) = decode(MODEL, [PROMPT], source=source, drafter=Garbage(), max_new_tokens=20)
    assert plain.generated == drafted.generated != decode(MODEL, [PROMPT], max_new_tokens=20)[0].generated
    n = len(PROMPT)
    for cache in (drafted.cache, drafted.cache.fork()):
        assert isinstance(cache, PartialCache) and cache.source.length == n
        difference = cache.source.data[..., :n, :] - plain.cache.source.data[..., :n, :]
        assert difference.abs().max() < 1e-12


def test_rows_of_the_prompt_may_stay_tentative_across_passes() -> None:
    scorer = PartialAttention(random_weights()).over(MODEL, PROMPT)
    text = [*PROMPT, 8, 7]
    expected = scorer.forward(Batch([Segment(np.arange(len(text)), np.array(text))])).logits
    cache = scorer.new_cache()
    scorer.forward(Batch([Segment(np.arange(4), np.array(text[:4]), cache=cache)]))
    rest = Segment(np.arange(2, len(text)), np.array(text[2:]), cache=cache, stays=2)
    assert (scorer.forward(Batch([rest])).logits - expected[2:]).abs().max() < 1e-10
    cache.keep(range(len(text)))
    assert isinstance(cache, PartialCache) and cache.source.length == len(PROMPT)


def test_weights_are_kept_and_checked(tmp_path: Path) -> None:
    weights, path = random_weights(), tmp_path / "partial.safetensors"
    weights.save(path)
    (by_name,) = decode(MODEL, [PROMPT], source=resolve("source", f"partial-attention:weights={path}"))
    assert by_name.generated == decode(MODEL, [PROMPT], source=PartialAttention(weights))[0].generated
    with pytest.raises(CorruptFile, match="another shape"):
        PartialAttention(str(path)).over(tiny_transformer(hidden_size=64), PROMPT)
    with pytest.raises(ModelNotFound, match="no partial attention"):
        PartialAttention(str(tmp_path / "nothing")).over(MODEL, PROMPT)
    with pytest.raises(UnsupportedModel, match="dtype='float32'"):
        PartialAttention(weights).over(to_int8(MODEL), PROMPT)


def test_training_moves_the_second_attention_alone(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    pairs = [(ids[:6].tolist(), ids[:3].tolist()) for ids in random.integers(0, 8, (40, 6))]
    model, weights = (
        tiny_transformer(0, dtype=torch.float32),
        PartialWeights.initial(tiny_transformer(0, dtype=torch.float32)),
    )
    before = model.weights.layers[0].qkv.weight.clone()
    history = train_partial(model, weights, pairs[:32], pairs[32:], Plan(steps=25, lr=0.01), tmp_path)
    assert history.best is not None and history.best < 0.8 * history.metrics["0"]["loss"]
    assert torch.equal(model.weights.layers[0].qkv.weight, before) and weights.layers[0]["output"].abs().max() > 0
    with pytest.raises(SettingsError, match="pairs"):
        train_partial(model, weights, [], [], Plan(steps=1), tmp_path / "other")


def test_positions_begin_anew_behind_the_prompt_for_the_second_attention_alone() -> None:
    one, tokens, row = tiny_transformer(0, num_layers=1), [*PROMPT, 8, 7, 6, 50], 8
    config, (weights,) = one.config, random_weights().layers[:1]
    normed = torch.nn.functional.rms_norm(one.embed_tokens(torch.tensor(tokens)), (32,), eps=config.norm_eps)
    bent = torch.nn.functional.silu(normed[:6] @ weights["bend"].T)
    source = bent + bent @ weights["mix"].T
    # Row 8 is the third one behind a prompt of six tokens: it asks as the third of the prompt does.
    asks = np.array([row - len(PROMPT)])
    shape = (-1, config.num_kv_heads, config.head_dim)

    def turned(heads: torch.Tensor, positions: np.ndarray) -> torch.Tensor:
        cos, sin = one.angles(config.rope, positions)
        return rotate(heads, cos[:, None].double(), sin[:, None].double())

    query = turned((normed[row] @ weights["query"].T).view(1, config.num_heads, -1), asks)[0]
    keys = turned((source @ weights["key"].T).view(shape), np.arange(6)).repeat_interleave(2, dim=1)
    values = (source @ weights["value"].T).view(shape).repeat_interleave(2, dim=1)
    weighed = (torch.einsum("hd,nhd->hn", query, keys) * config.attention_scale).softmax(dim=-1)
    expected = torch.einsum("hn,nhd->hd", weighed, values).reshape(-1) @ weights["output"].T

    def attended(reset: bool) -> torch.Tensor:
        scorer = PartialTransformer(one, PartialWeights((weights,), reset), len(PROMPT))
        step, layer = Pass(scorer, Batch([Segment(np.arange(10), np.array(tokens))])), one.weights.layers[0]
        own = Pass(one, Batch([Segment(np.arange(10), np.array(tokens))]))
        return (scorer._attention(0, layer, normed, step) - one._attention(0, layer, normed, own))[row]

    assert (attended(True) - expected).abs().max() < 1e-10 < (attended(False) - expected).abs().max()


def test_the_echo_is_the_sources_own_cross_entropy() -> None:
    model, pair = tiny_transformer(0), (PROMPT, [8, 7, 6])
    logits = model.forward(Batch([Segment(np.arange(8), np.array([*PROMPT, 8, 7]))])).logits.log_softmax(dim=-1)
    echo = -float(logits[range(6), PROMPT].mean())
    plain, both = (float(pair_loss(model, None, [pair], echo=weight)) for weight in (0.0, 0.5))
    assert plain == pytest.approx(-float(logits[range(5, 8), [8, 7, 6]].mean())) and both == pytest.approx(
        plain + echo / 2
    )


def test_the_command_trains_the_last_layers_and_says_what_it_brings(tmp_path: Path, monkeypatch) -> None:
    tokenizer = Tokenizer(make_tokenizer(), bos_id=256, eos_ids=(257,))
    model = tiny_transformer(3, vocab_size=VOCAB, dtype=torch.float32)
    loaded = LoadedModel(model, tokenizer, None, "tiny", "float32")
    monkeypatch.setattr("decodery.model.load.load", lambda name, **options: loaded)
    lines = [{"source": f"say {number % 3}: ", "target": "abc"[number % 3] * 3} for number in range(30)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    command = ["train", "partial", str(tmp_path / "pairs.jsonl"), "--out", str(tmp_path / "out"), "--last", "1"]
    done = CliRunner().invoke(cli, [*command, "--steps", "30", "--lr", "0.01"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = PartialWeights.load(tmp_path / "out" / "partial.safetensors", model.config)
    figures = found.facts["validation"]
    assert figures["with partial attention"] < figures["alone"] and found.reset
    assert not found.layers[0] and found.layers[1]["output"].abs().max() > 0
    (tmp_path / "pairs.jsonl").write_text('{"source": "a"}\n')
    with pytest.raises(PromptError, match='"source" and "target"'):
        read_pairs(tmp_path / "pairs.jsonl")
