"""Partial attention: nothing changes before training, passes of any shape agree, and only the prompt is looked at."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from decodery.cli.main import cli
from decodery.core.errors import CorruptFile, ModelNotFound, SettingsError, UnsupportedModel
from decodery.core.registry import resolve
from decodery.logits_sources.partial_attention import PartialAttention, PartialCache, PartialWeights
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.load import LoadedModel
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.models.torch.attention import rotate
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense
from decodery.testing import Garbage, decode, tiny_transformer
from decodery.testing.models import to_int8
from decodery.training.kind import Run
from decodery.training.partial import PartialSettings, SourcePairs, pair_loss, train_partial
from tiny_models import VOCAB, make_tokenizer

MODEL = tiny_transformer(0)
PROMPT = [5, 9, 2, 44, 17, 30]


def random_weights(seed: int = 0, model: Transformer = MODEL) -> PartialWeights:
    weights = PartialWeights.initial(model)
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
    (plain,) = decode(MODEL, [PROMPT], logits_source=source, max_new_tokens=20)
    (drafted,) = decode(MODEL, [PROMPT], logits_source=source, drafter=Garbage(), max_new_tokens=20)
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
    rest = Segment(np.arange(2, len(text)), np.array(text[2:]), cache=cache, retained=2)
    assert (scorer.forward(Batch([rest])).logits - expected[2:]).abs().max() < 1e-10
    cache.keep(range(len(text)))
    assert isinstance(cache, PartialCache) and cache.source.length == len(PROMPT)


def test_weights_are_kept_and_checked(tmp_path: Path) -> None:
    weights, path = random_weights(), tmp_path / "partial.safetensors"
    weights.save(path)
    (by_name,) = decode(MODEL, [PROMPT], logits_source=resolve("logits-source", f"partial-attention:weights={path}"))
    assert by_name.generated == decode(MODEL, [PROMPT], logits_source=PartialAttention(weights))[0].generated
    with pytest.raises(CorruptFile, match="another shape"):
        PartialAttention(str(path)).over(tiny_transformer(hidden_size=64), PROMPT)
    with pytest.raises(ModelNotFound, match="no partial attention"):
        PartialAttention(str(tmp_path / "nothing")).over(MODEL, PROMPT)
    with pytest.raises(UnsupportedModel, match="dtype='float32'"):
        PartialAttention(weights).over(to_int8(MODEL), PROMPT)


def test_training_moves_the_second_attention_alone(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    pairs = [(ids[:6].tolist(), ids[:3].tolist()) for ids in random.integers(0, 8, (40, 6))]
    model = tiny_transformer(0, dtype=torch.float32)
    loaded = LoadedModel(model, make_tokenizer(), None, "tiny", "float32")
    before = model.weights.layers[0].qkv.weight.clone()
    weights = train_partial(Run(loaded, tmp_path, (PartialSettings(steps=25, lr=0.01, batch=8),)), pairs)
    report = weights.facts["validation"]
    assert report["loss"] < 0.8 * report["baselines"]["alone"]["loss"]
    assert torch.equal(model.weights.layers[0].qkv.weight, before) and weights.layers[0]["output"].abs().max() > 0
    with pytest.raises(SettingsError, match="at least 10 pairs"):
        train_partial(Run(loaded, tmp_path / "other"), [])
    with pytest.raises(SettingsError, match="of two sources"):
        train_partial(Run(loaded, tmp_path / "other"), [(PROMPT, [7, number]) for number in range(12)])


def wide_model() -> Transformer:
    """Two layers whose heads together are twice as wide as the stream."""
    config = replace(MODEL.config, head_dim=2 * MODEL.config.head_dim)
    generator = torch.Generator().manual_seed(11)

    def matrix(rows: int, columns: int) -> Dense:
        return Dense(torch.randn(rows, columns, generator=generator, dtype=torch.float64) / columns**0.5)

    inner, hidden = config.num_heads * config.head_dim, config.hidden_size
    rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layers = [replace(each, qkv=matrix(rows, hidden), output=matrix(hidden, inner)) for each in MODEL.weights.layers]
    return Transformer(config, replace(MODEL.weights, layers=layers))


def by_formula(
    model: Transformer, partial: PartialWeights, tokens: list[int], prompt: int, *, through_output: bool = False
) -> torch.Tensor:
    """Logits by the paper's formula, row by row: a layer adds W_o a of its own attention and W_p a of the second one.

    through_output: the second one's goes through the layer's own output matrix as well, which is wrong.
    """
    config, n = model.config, len(tokens)
    group, scale = config.num_heads // config.num_kv_heads, config.attention_scale
    sizes = [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]

    def normed(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rows * (rows.square().mean(-1, keepdim=True) + config.norm_eps).rsqrt() * weight

    def heads(rows: torch.Tensor, positions: list[int] | None) -> torch.Tensor:
        found = rows.view(len(rows), -1, config.head_dim)
        if positions is not None:
            cos, sin = model.angles(config.rope, np.array(positions))
            found = rotate(found, cos[:, None].double(), sin[:, None].double())
        return found

    def read(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        parts = []
        for head in range(config.num_heads):
            weighed = (keys[:, head // group] @ query[head] * scale).softmax(dim=0)
            parts.append(weighed @ values[:, head // group])
        return torch.cat(parts)

    stream = model.embed_tokens(torch.tensor(tokens))
    for layer, second in zip(model.weights.layers, partial.layers, strict=True):
        rows = normed(stream, layer.attention_norm)
        query, key, value = layer.qkv.weight.split(sizes)  # type: ignore[union-attr]
        queries, keys = heads(rows @ query.T, list(range(n))), heads(rows @ key.T, list(range(n)))
        values = heads(rows @ value.T, None)
        bent = rows[:prompt] @ second["bend"].T
        bent = bent * bent.sigmoid()
        source = bent + bent @ second["mix"].T
        at = [place - prompt if partial.reset and place >= prompt else place for place in range(n)]
        asked = heads(rows @ second["query"].T, at)
        known = heads(source @ second["key"].T, list(range(prompt))), heads(source @ second["value"].T, None)
        more = []
        for row in range(n):
            own = read(queries[row], keys[: row + 1], values[: row + 1])
            seen = min(row + 1, prompt)
            beside = second["output"] @ read(asked[row], *(each[:seen] for each in known))
            output = layer.output.weight  # type: ignore[union-attr]
            more.append(output @ (own + beside) if through_output else output @ own + beside)
        stream = stream + torch.stack(more)
        gate, up = (normed(stream, layer.mlp_norm) @ layer.gate_up.weight.T).chunk(2, -1)  # type: ignore[union-attr]
        stream = stream + (gate * gate.sigmoid() * up) @ layer.down.weight.T  # type: ignore[union-attr]
    return normed(stream, model.weights.norm) @ model.weights.head.weight.T  # type: ignore[union-attr]


@pytest.mark.parametrize("reset", [True, False], ids=["positions begin anew", "positions go on"])
@pytest.mark.parametrize("model", [MODEL, wide_model()], ids=["square", "wide heads"])
def test_logits_are_those_of_the_formula(model: Transformer, reset: bool) -> None:
    tokens = [*PROMPT, 8, 7, 6, 50]
    weights = replace(random_weights(model=model), reset=reset)
    found = all_logits(PartialAttention(weights).over(model, PROMPT), tokens, [len(tokens)])
    assert (found - by_formula(model, weights, tokens, len(PROMPT))).abs().max() < 1e-9
    other = by_formula(model, replace(weights, reset=not reset), tokens, len(PROMPT))
    assert (found - other).abs().max() > 1e-3
    if model is MODEL:
        wrong = by_formula(model, weights, tokens, len(PROMPT), through_output=True)
        assert (found - wrong).abs().max() > 1e-1


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
    monkeypatch.setattr("decodery.models.loaders.load.load", lambda name, **options: loaded)
    lines = [{"source": f"say {number % 3}: ", "target": "abc"[number % 3] * 3} for number in range(30)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    command = ["train", "partial", str(tmp_path / "pairs.jsonl"), "--out", str(tmp_path / "out"), "--last", "1"]
    done = CliRunner().invoke(cli, [*command, "--steps", "30", "--lr", "0.01"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = PartialWeights.load(tmp_path / "out" / "partial.safetensors", model.config)
    figures = found.facts["validation"]
    assert figures["loss"] < figures["baselines"]["alone"]["loss"] and found.reset
    assert not found.layers[0] and found.layers[1]["output"].abs().max() > 0
    (tmp_path / "pairs.jsonl").write_text('{"source": "a"}\n')
    with pytest.raises(CorruptFile, match='"source": text, "target": text'):
        SourcePairs(tmp_path / "pairs.jsonl").check()
