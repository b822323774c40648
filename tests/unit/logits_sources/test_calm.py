"""Early exits: who leaves where, what is left in the layers above, and what calibration promises."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from decodery.core.errors import CorruptFile, DecoderyError, SettingsError
from decodery.llm.llm import LLM
from decodery.logits_sources.calm import CALM, softmax_gap, state_similarity, thresholds
from decodery.logits_sources.early_exit import Leaving
from decodery.models.batch import Batch, Segment
from decodery.models.layer_plan import LayerPlan
from decodery.models.loaders.load import LoadedModel
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.models.torch.attention import rotate
from decodery.models.trained.exits import EXITS, Exits
from decodery.step.forward_request import run_sync
from decodery.testing import check_identical, decode, tiny_transformer
from decodery.training.calm import NEVER, CalmRecipe, calibrate, last_passed, rouge_l
from decodery.training.kind import Run
from questions import prompts
from sourced import logits_after
from tiny_models import VOCAB, make_tokenizer

TARGET = tiny_transformer(0, num_layers=4)
PROMPT = [5] * 6 + [7, 8, 9] * 4


def texts(source: CALM | None, n: int = 20) -> list[list[int]]:
    return [seq.generated for seq in decode(TARGET, [PROMPT, [3]], logits_source=source, max_new_tokens=n)]


@pytest.mark.parametrize("confidence", ["state", "softmax"])
def test_a_threshold_out_of_reach_is_plain_decoding(confidence: str) -> None:
    source = CALM(NEVER, confidence, every=1)  # type: ignore[arg-type]
    (run,) = decode(TARGET, [PROMPT], logits_source=source, max_new_tokens=20)
    assert [run.generated] == texts(None)[:1]
    assert run.trace.ledger.counts == {"layers": 4 * 19, "rows": 19}
    assert texts(CALM(-1.0, confidence, every=1)) != texts(None)  # type: ignore[arg-type]


def test_who_leaves_leaves_keys_and_values_of_the_exits_state_above() -> None:
    source = CALM(-1.0, every=2)
    (seq,) = decode(TARGET, [PROMPT], logits_source=source, max_new_tokens=6)
    assert set(seq.cache.lengths.tolist()) == {len(PROMPT) + 5}
    assert seq.trace.ledger.counts == {"layers": 2 * 5, "rows": 5}
    # The first token after the prompt: its state after two layers, which nothing above has changed.
    whole = TARGET.new_cache()
    scores = TARGET.forward(Batch([Segment.chunk(seq.tokens[: len(PROMPT) + 1], whole)]), taps=(2, 3))
    for layer, tap, same in ((2, 2, True), (3, 2, True), (3, 3, False)):
        weights, config, state = TARGET.weights.layers[layer], TARGET.config, scores.hidden[tap][-1:]
        qkv = weights.qkv(torch.nn.functional.rms_norm(state, state.shape[-1:], None, config.norm_eps))
        keys = qkv.view(1, -1, config.head_dim)[:, config.num_heads : config.num_heads + config.num_kv_heads]
        cos, sin = TARGET.angles(config.rope, np.array([len(PROMPT)]))
        expected = rotate(keys, cos[:, None].double(), sin[:, None].double())[0]
        found = seq.cache.data[layer, 0, :, len(PROMPT)]
        assert torch.allclose(found, expected, atol=1e-6) == same


def test_rows_read_together_are_rows_read_one_by_one() -> None:
    reader = CALM(0.55, "softmax", every=1).over(TARGET, PROMPT)
    assert isinstance(reader, Leaving)
    tokens = [*PROMPT, *texts(CALM(0.55, "softmax", every=1))[0]]
    together, cache = run_sync(reader.compose(Segment.chunk(tokens, reader.new_cache()))).logits, reader.new_cache()
    for row, token in enumerate(tokens):
        alone = run_sync(reader.compose(Segment.chunk([token], cache))).logits[0]
        cache.keep([0])
        assert torch.allclose(alone, together[row], atol=1e-9)
        if row < len(PROMPT):
            assert torch.allclose(alone, logits_after(TARGET, tokens[: row + 1]), atol=1e-9)
    (run,) = decode(TARGET, [PROMPT], logits_source=CALM(0.55, "softmax", every=1), max_new_tokens=20)
    counts = run.trace.ledger.counts
    assert 1 < counts["layers"] / counts["rows"] < 4


def test_confidences_and_thresholds_are_those_of_the_paper() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.2, 0.3], [0.1, 0.8, 0.1]], dtype=torch.float64))
    assert softmax_gap(logits).tolist() == pytest.approx([0.2, 0.7])
    states = torch.tensor([[1.0, 0.0], [3.0, 4.0]])
    assert state_similarity(states, torch.tensor([[1.0, 1.0], [6.0, 8.0]])).tolist() == pytest.approx([0.5**0.5, 1.0])
    falling = thresholds(0.8, np.array([0, 64, 128]), 128, 4.0)
    assert falling.tolist() == pytest.approx([0.8, 0.72 + 0.08 * np.exp(-2), 0.72 + 0.08 * np.exp(-4)])


def test_a_threshold_or_a_calibration_of_this_model_is_needed(tmp_path: Path) -> None:
    for settings in ({}, {"threshold": 0.5, "confidence": "classifier"}):
        with pytest.raises(SettingsError, match="decodery train calm"):
            CALM(**settings)  # type: ignore[arg-type]
    found = Exits(0.9, "state", 5, 64, 4.0, torch.zeros(1, 3), {}, "another")
    found.save(tmp_path / EXITS)
    for calibration in (found, str(tmp_path), str(tmp_path / "none")):
        with pytest.raises(DecoderyError, match="decodery train calm"):
            decode(TARGET, [[1]], logits_source=CALM(calibration=calibration))
    (tmp_path / EXITS).write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    with pytest.raises(CorruptFile, match="holds no calibration of early exits"):
        Exits.load(tmp_path / EXITS)


def test_leaving_where_the_last_layer_agrees_changes_nothing_and_leaving_blindly_does() -> None:
    """After true keys and values of all layers; the head is heard at the first layer that says what the last does."""

    def exits(oracle: bool) -> tuple[list[int], list[int]]:
        cache, tokens, left = TARGET.new_cache(), list(PROMPT), []
        unread = tokens
        for _ in range(16):
            rows = [len(unread) - 1]
            said = []
            for layers in range(1, 5):
                segment = Segment.chunk(unread, cache, logit_rows=rows)
                said.append(
                    int(TARGET.forward(Batch([segment]), layer_plan=LayerPlan(tuple(range(layers)))).logits[0].argmax())
                )
            cache.keep(range(len(unread)))
            left.append(next(at for at, token in enumerate(said) if token == said[-1] or not oracle))
            unread = [said[left[-1]]]
            tokens += unread
        return tokens[len(PROMPT) :], left

    text, left = exits(oracle=True)
    assert text == texts(None, 16)[0] and 0 < sum(left) < 3 * len(left)
    assert exits(oracle=False)[0] != text


# -- calibration ------------------------------------------------------------------------------------------------------


def test_rouge_is_that_of_the_longest_common_subsequence() -> None:
    def longest(left: tuple[int, ...], right: tuple[int, ...]) -> int:
        @cache
        def at(i: int, j: int) -> int:
            if i == len(left) or j == len(right):
                return 0
            return at(i + 1, j + 1) + 1 if left[i] == right[j] else max(at(i + 1, j), at(i, j + 1))

        return at(0, 0)

    random = np.random.default_rng(0)
    for _ in range(30):
        left, right = (tuple(random.integers(0, 4, random.integers(1, 12)).tolist()) for _ in range(2))
        assert rouge_l(left, right) == pytest.approx(2 * longest(left, right) / (len(left) + len(right)))
    assert rouge_l([], []) == 1.0 and rouge_l([1], []) == 0.0


def test_calibration_keeps_its_promise_and_a_careless_one_does_not() -> None:
    """Losses that grow with every threshold: how often the expected loss of the one chosen exceeds delta."""
    random, delta, epsilon, repeats, n = np.random.default_rng(3), 0.2, 0.1, 300, 60
    means = np.linspace(0.0, 0.4, 41)

    def losses() -> list[tuple[float, np.ndarray]]:
        return [(float(mean), random.binomial(1, mean, n).astype(float)) for mean in means]

    def exceeds() -> bool:
        found, rows = last_passed(iter(losses()), delta, epsilon)
        assert all(row[2] <= epsilon for row in rows[:-1]) and rows[-1][2] > epsilon
        return found != NEVER and found > delta

    share = np.mean([exceeds() for _ in range(repeats)])
    assert share <= epsilon + 2 * np.sqrt(epsilon * (1 - epsilon) / repeats)
    # Whoever takes the last threshold with a small mean exceeds it more often than not.
    careless = [max(mean for mean, each in losses() if each.mean() <= delta) > delta for _ in range(repeats)]
    assert np.mean(careless) > 0.5


@pytest.mark.integration
def test_calibration_goes_on_where_it_stopped(tmp_path: Path) -> None:
    model = tiny_transformer(3, vocab_size=VOCAB, num_layers=3, dtype=torch.float32)
    target = LoadedModel(model, Tokenizer(make_tokenizer(), bos_id=256, eos_ids=(257,)), None, "tiny", "float32")
    asked = [[number % 50 + 1, 7] for number in range(12)]
    recipe = CalmRecipe("softmax", every=1, tokens=6, delta=0.4, epsilon=0.1)
    whole = calibrate(Run(target, tmp_path / "whole", (recipe,)), asked)
    assert whole.tested[-1, 2] > recipe.epsilon or len(whole.tested) == len(recipe.candidates())

    def stop(what: str, done: int, total: int) -> None:
        if what == "testing 0.85":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(Run(target, tmp_path / "twice", (recipe,), progress=stop), asked)
    assert not (tmp_path / "twice" / EXITS).exists()
    again = calibrate(Run(target, tmp_path / "twice", (recipe,)), asked)
    assert torch.equal(again.tested, whole.tested) and again.threshold == whole.threshold
    assert Exits.load(tmp_path / "twice" / EXITS).threshold == whole.threshold
    with pytest.raises(SettingsError, match="other settings"):
        calibrate(Run(target, tmp_path / "twice", (recipe,)), asked[1:])
    with pytest.raises(SettingsError, match="5 prompts can show nothing: give at least 8"):
        calibrate(Run(target, tmp_path / "few", (recipe,)), asked[:5])


def test_int8_texts_are_the_same_with_drafts_and_in_batches(smollm2_int8: LLM) -> None:
    asked = [prompts(smollm2_int8)[number][:40] for number in (2, 6)]
    source = CALM(0.3, "softmax", every=10, tokens=12)
    runs = check_identical(
        smollm2_int8.model,
        asked,
        drafter="ngram",
        logits_source=source,
        seeds=(1,),
        max_new_tokens=12,
        tested="nothing",
    )
    layers, rows = (sum(run.trace.ledger.counts[name] for run in runs) for name in ("layers", "rows"))
    assert layers < 30 * rows
