"""Superposed drafts: the n-grams they are scored with, the drafts themselves, and what comes with the package."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from decodery.cli.main import cli
from decodery.core.errors import DecoderyError
from decodery.extras.superposed import superposed
from decodery.extras.superposed.ngrams import NGrams, load_ngrams, ngrams_for, save_ngrams
from decodery.extras.superposed.superposed import Superposition, mixture, ngram_scores, superpose
from decodery.llm.llm import LLM
from decodery.models.batch import Batch, Segment
from decodery.step.forward_request import run_sync
from decodery.testing import decode, tiny_transformer

TARGET = tiny_transformer(0)
PROMPT = [5] * 6 + [7, 8, 9] * 4


def after(model, tokens: list[int]) -> torch.Tensor:
    """[vocab] logits after `tokens`, read in one plain pass."""
    segment = Segment.chunk(tokens, model.new_cache(), logit_rows=[len(tokens) - 1])
    return model.forward(Batch([segment])).logits[0]


def corpus() -> list[list[int]]:
    chance = np.random.default_rng(2)
    return [chance.integers(0, 12, size=60).tolist() for _ in range(8)]


def test_ngram_tables_equal_a_recount() -> None:
    texts = corpus()
    counted = NGrams.count(texts[:5]) + NGrams.count(texts[5:])
    grams = Counter(tuple(text[at : at + n]) for text in texts for n in (2, 3, 4) for at in range(len(text) - n + 1))
    heads = Counter()
    for gram, count in grams.items():
        heads[gram[:-1]] += count
    for gram, count in grams.items():
        assert counted.frequency(gram[:-1], gram[-1]) == count / heads[gram[:-1]]
    assert counted.frequency((1, 2, 3, 4, 1, 2), 5) == counted.frequency((99,), 1) == NGrams().frequency((1,), 2) == 0.0


def test_one_draft_without_ngrams_is_greedy_decoding() -> None:
    settings = Superposition(alpha=0.0, temperature=0.06, top=3)
    (draft,) = run_sync(superpose(TARGET, PROMPT, 1, length=20, settings=settings, ngrams=NGrams()))
    (plain,) = decode(TARGET, [PROMPT], max_new_tokens=20)
    assert draft.tokens == plain.generated


def test_a_mixture_of_one_token_is_that_token() -> None:
    cache = TARGET.new_cache()
    for scores in ([0.0], [-3.0, -3.0]):
        mixed = mixture(TARGET, [7] * len(scores), scores)
        logits = TARGET.forward(Batch([Segment(np.array([0]), states=mixed, cache=cache)])).logits[0]
        assert (logits - after(TARGET, [7])).abs().max() < 1e-5


@pytest.mark.parametrize("unseen", ["floor", "drop"])
def test_drafts_equal_those_of_an_exhaustive_scorer(unseen: Any) -> None:
    counted, settings, k = NGrams.count(corpus()), Superposition(alpha=0.5, temperature=0.5, top=9, unseen=unseen), 3
    got = run_sync(superpose(TARGET, PROMPT, k, length=10, settings=settings, ngrams=counted, eos_ids=(0,)))
    running, finished = [((), 0.0)], []
    cache = TARGET.new_cache()
    logits = TARGET.forward(Batch([Segment.chunk(PROMPT, cache, logit_rows=[len(PROMPT) - 1])])).logits[0]
    cache.keep(range(len(PROMPT)))
    for _ in range(10):
        likely = logits.topk(9)
        log_p = (likely.values / 0.5).log_softmax(0)
        pairs = []
        for tokens, score in running:
            gains = [ngram_scores(counted, [*PROMPT, *tokens][-5:], [token])[0] for token in likely.indices.tolist()]
            for token, lp, gain in zip(likely.indices.tolist(), log_p.tolist(), gains, strict=True):
                if unseen == "floor" or gain:
                    known = 0.5 * math.log(max(gain, 1e-4) if unseen == "floor" else gain)
                elif any(gains):
                    continue
                else:
                    known = -200.0
                pairs.append(((*tokens, token), score + 0.5 * lp + known))
        pairs = sorted(pairs, key=lambda pair: -pair[1])[: 2 * k]
        finished = sorted([*finished, *(pair for pair in pairs if pair[0][-1] == 0)], key=lambda pair: -pair[1])[:k]
        running = [pair for pair in pairs if pair[0][-1] != 0][:k]
        weights = torch.tensor([score for _, score in running], dtype=torch.float64).softmax(0)
        rows = TARGET.embed_tokens(torch.tensor([tokens[-1] for tokens, _ in running]))
        mixed = (weights[:, None] * rows).sum(0, keepdim=True)
        position = np.array([cache.next_position])
        logits = TARGET.forward(Batch([Segment(position, states=mixed, cache=cache)])).logits[0]
        cache.keep([0])
    ranked = sorted([*running, *finished], key=lambda pair: -pair[1] / len(pair[0]))[:k]
    assert [tuple(draft.tokens) for draft in got] == [tokens for tokens, _ in ranked]
    assert np.allclose([draft.score for draft in got], [score for _, score in ranked])


def test_drafts_on_the_real_model_cost_one_run(smollm2_int8: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    lm, passes = smollm2_int8, []
    forward = lm.model.forward
    monkeypatch.setattr(lm.model, "forward", lambda *given, **more: passes.append(1) or forward(*given, **more))
    known = lm.ngrams(["The capital of France is Paris. The capital of France is a city."])
    found = lm.suggestions("The capital of France", 3, max_new_tokens=6, ngrams=known)
    assert len(passes) == 6
    assert len({draft.text for draft in found}) == len(found) == 3
    assert any(draft.text.startswith(" is Paris") for draft in found)
    for call in (
        lambda: lm.suggestions("A", 0),
        lambda: lm.suggestions("A", max_new_tokens=0),
        lambda: lm.suggestions(""),
    ):
        with pytest.raises(DecoderyError):
            call()


def test_ngrams_are_kept_in_a_file_and_damaged_ones_refused(tmp_path: Path) -> None:
    path = tmp_path / "ngrams.safetensors"
    save_ngrams(path, corpus(), 12, {"from": "nowhere"})
    found, counted = load_ngrams(path), NGrams.count(corpus())
    runs = [text[at : at + n] for text in corpus() for n in (1, 3) for at in range(0, 50, 7)]
    assert all((found.frequencies(run, np.arange(12)) == counted.frequencies(run, np.arange(12))).all() for run in runs)
    whole = path.read_bytes()
    for damaged in (b"", whole[:-3], whole.replace(b"table of n-grams", b"table of n-gramz"), b"\xff" * 64):
        path.write_bytes(damaged)
        with pytest.raises(DecoderyError, match="decodery train ngrams"):
            load_ngrams(path)
    with pytest.raises(DecoderyError, match="decodery train ngrams"):
        load_ngrams(tmp_path / "missing")


def test_the_shipped_table_knows_most_of_what_is_suggested(smollm2_int8: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    # Counts, not times: with the prompt's own n-grams alone four steps in five found none.
    found: list[list[bool]] = []
    score = superposed.ngram_scores

    def noted(*given) -> np.ndarray:
        scores = score(*given)
        found[-1].append(bool((scores > 0).any()))
        return scores

    monkeypatch.setattr(superposed, "ngram_scores", noted)
    for text in ("Natalia sold clips to 48 of her", "The water cycle begins when", "Dear Sir, I am writing to"):
        found.append([])
        drafts = smollm2_int8.suggestions(text, 3, max_new_tokens=8)
        assert len({draft.text for draft in drafts}) == 3
    assert sum(map(sum, found)) > 0.8 * sum(map(len, found))
    assert ngrams_for(smollm2_int8.model.config.vocabulary).shards and not ngrams_for("another").shards


def test_it_is_listed_beside_the_other_methods() -> None:
    listed = CliRunner().invoke(cli, ["methods", "superposed"]).output
    assert "Superposed Decoding" in listed and "lm.suggestions" in listed
