"""Logit sources compute what their papers say, beside slow and obvious counterparts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import log_softmax, softmax

from decodery.core.errors import PromptError, SettingsError, UnknownMethod, UnsupportedModel, VocabularyMismatch
from decodery.core.registry import resolve
from decodery.core.requirements import Requirements
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.logits_sources.dola import DoLa, candidates
from decodery.logits_sources.entropy_adaptive import EntropyAdaptive
from decodery.logits_sources.guidance import Guidance
from decodery.logits_sources.uscd import USCD, collision_mass, contrast, without_examples
from decodery.models.loaders.load import load
from decodery.models.protocol import LanguageModel
from decodery.models.transformers.adapter import TransformersModel
from decodery.sampling import Context, LogitsProcessor, Sampler, Stage, Temperature
from decodery.testing import Garbage, LawBroken, check_identical, decode, tiny_transformer
from decodery.training.switching import calibrate, large_share
from methods import SOURCES
from sourced import OTHER, PROMPTS, TARGET, logits_after, text
from tiny_models import make_model, save, without_tokenizer


def test_guidance_is_the_formula_over_two_contexts_read_anew() -> None:
    negative, scale, prompt = (9, 8, 7, 6, 5), 1.7, PROMPTS[1]
    written: list[int] = []
    for _ in range(30):
        p = log_softmax(logits_after(TARGET, [*prompt, *written]), -1)
        q = log_softmax(logits_after(TARGET, [*negative, *written]), -1)
        written.append(int((q + scale * (p - q)).argmax()))
    assert text(Guidance(scale, negative), prompt, n=30) == written


@pytest.mark.parametrize("negative", [None, (3, 200, 17, 5)])
def test_guidance_agrees_with_transformers(negative: tuple[int, ...] | None) -> None:
    theirs, prompt = make_model("llama"), [20, 31, 7, 112, 5]
    theirs.generation_config.eos_token_id = None
    given = {} if negative is None else {"negative_prompt_ids": torch.tensor([negative])}
    expected = theirs.generate(
        torch.tensor([prompt]), guidance_scale=1.5, max_new_tokens=14, do_sample=False, pad_token_id=0, **given
    )[0, len(prompt) :].tolist()
    assert text(Guidance(1.5, negative), prompt, TransformersModel(theirs), n=14) == expected
    assert text(None, prompt, TransformersModel(theirs), n=14) != expected


def test_guidance_at_scale_1_is_the_model_and_at_0_the_negative_prompt() -> None:
    assert Guidance(1.0).over(TARGET, [1]) is TARGET
    assert text(Guidance(0.0, tuple(PROMPTS[1]))) == text(None, PROMPTS[1])


def test_guidance_costs_a_row_per_row_and_no_pass() -> None:
    (seq,) = decode(TARGET, PROMPTS[:1], logits_source=Guidance(1.5, (9, 8, 7)), max_new_tokens=20)
    ledger = seq.trace.ledger
    # Both contexts are read by one model in one pass.
    assert ledger.passes == {"model": 20} and ledger.rows == {"model": 2 * (3 + 19)} and ledger.seconds["model"] > 0
    assert seq.trace.passes == 19 and not ledger.counts


def test_requests_with_sources_of_their_own_share_a_batch() -> None:
    sources = [None, Guidance(1.5, (9, 8)), Guidance(1.5, (7,)), USCD((4, 3)), EntropyAdaptive(OTHER, 2.0)]
    engine = Engine(TARGET)
    together = [engine.submit(Request(PROMPTS[0], logits_source=source, max_new_tokens=25)) for source in sources]
    engine.run(together)
    assert [seq.generated for seq in together] == [text(source, n=25) for source in sources]
    assert len({tuple(seq.generated) for seq in together}) > 3


def test_uscd_contrasts_as_the_loops_do() -> None:
    random = np.random.default_rng(0)
    for case in range(40):
        given = torch.from_numpy(random.normal(0, 2.5, (1, 12)))
        poorer = given + torch.from_numpy(random.normal(0, 1 + case % 3, (1, 12)))
        p, q = softmax(given[0], -1).tolist(), softmax(poorer[0], -1).tolist()
        slow = [a - 0.7 * b if a >= (2 / 3) / 12 else 0.0 for a, b in zip(p, q, strict=True)]
        expected = [math.log(s) if s > 0 else -math.inf for s in slow]
        if max(slow) <= 0:
            expected = given[0].tolist()
        scores = contrast(given, poorer, 0.7, 2 / 3)[0]
        assert scores.where(scores > -1e4, -math.inf).tolist() == pytest.approx(expected)
        assert collision_mass(given)[0] == pytest.approx(sum(a * a for a in p))
    same = contrast(given, given, 0.7, 0.0)
    assert (softmax(same, -1) - softmax(given, -1)).abs().max() < 1e-12


def test_uscd_reads_late_what_it_did_not_need_early() -> None:
    lame, prompt = tuple(PROMPTS[1]), PROMPTS[0]
    eager, deferred = USCD(lame, confident=0.35), USCD(lame, confident=0.35, deferred=True)
    runs = [decode(TARGET, [prompt], logits_source=each, max_new_tokens=60)[0] for each in (eager, deferred)]
    assert runs[0].generated == runs[1].generated != text(None, n=60)
    assert 5 < runs[0].trace.ledger.counts["contrasted tokens"] == runs[1].trace.ledger.counts["contrasted tokens"] < 55
    eager_ledger, late = runs[0].trace.ledger, runs[1].trace.ledger
    # Asked along, the lame context costs no pass of its own; asked late, only where it is needed.
    assert eager_ledger.passes["model"] == 60 < late.passes["model"] < 120
    assert late.rows["model"] <= eager_ledger.rows["model"]
    assert text(USCD(lame, confident=0.0)) == text(None)


def test_examples_are_taken_out_of_docstrings() -> None:
    prompt = 'def f(x):\n    """Doubles.\n    >>> f(1)\n    2\n    >>> f(2)\n    4\n    """\n'
    assert without_examples(prompt) == 'def f(x):\n    """Doubles.\n    """\n'
    assert without_examples("no examples\n") == "no examples\n"


def entropy_adaptive_by_hand(
    small: LanguageModel, large: LanguageModel, prompt: list[int], n: int, threshold: float, window: int, stay: int
) -> tuple[list[int], int]:
    """Tokens and how many the large model wrote, with every context read anew for every token."""
    models, active, since, seen, tokens, by_large = (small, large), 0, 0, [], list(prompt), 0
    for _ in range(n):
        logits = logits_after(models[active], tokens)
        logp = log_softmax(logits, -1)
        seen.append(float(-(logp.exp() * logp).sum() / math.log(2)))
        tokens.append(int(logits.argmax()))
        by_large += active
        since += 1
        recent = seen[-window:]
        wanted = int(sum(recent) / len(recent) > threshold)
        if since >= stay and wanted != active:
            active, since = wanted, 0
    return tokens[len(prompt) :], by_large


@pytest.mark.parametrize(("threshold", "window", "stay"), [(2.2, 5, 10), (2.4, 2, 0), (2.4, 3, 4)])
def test_entropy_adaptive_is_the_loop_that_reads_all_anew(threshold: float, window: int, stay: int) -> None:
    source = EntropyAdaptive(OTHER, threshold, window, stay)
    for prompt in PROMPTS:
        (seq,) = decode(TARGET, [prompt], logits_source=source, max_new_tokens=30)
        expected, by_large = entropy_adaptive_by_hand(OTHER, TARGET, prompt, 30, threshold, window, stay)
        assert seq.generated == expected
        ledger, counts = seq.trace.ledger, seq.trace.ledger.counts
        assert counts.get("large tokens", 0) == by_large and counts["small tokens"] == 30 - by_large
        # A plain text needs one model at a time, and nobody reads a token twice.
        assert sum(ledger.passes.values()) == 30 and set(ledger.passes) <= {"model", "small"}
        assert max(ledger.rows.values()) <= len(prompt) + 29


def test_entropy_adaptive_switches_in_the_texts_tested() -> None:
    (seq,) = decode(TARGET, [PROMPTS[1]], logits_source=EntropyAdaptive(OTHER, 2.4, 3, 4), max_new_tokens=60)
    assert seq.trace.ledger.counts["switches"] > 2 and 10 < seq.trace.ledger.counts["large tokens"] < 50


def test_a_threshold_is_found_for_a_wanted_share_of_the_large_model() -> None:
    source = calibrate(TARGET, EntropyAdaptive(OTHER, window=2, stay=0), PROMPTS, 0.4, length=30, rounds=5)
    assert abs(large_share(TARGET, source, PROMPTS, 30) - 0.4) < 0.15
    with pytest.raises(SettingsError, match="between 0 and 1"):
        calibrate(TARGET, source, PROMPTS, 2.0)


def test_entropy_adaptive_between_its_ends_is_one_model() -> None:
    assert text(EntropyAdaptive(OTHER, math.inf)) == text(None, model=OTHER)
    assert text(EntropyAdaptive(OTHER, -1.0, stay=0))[1:] == text(None, [*PROMPTS[0], text(None, model=OTHER)[0]])[:-1]


def test_a_source_that_looks_at_the_rows_beside_a_row_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entropies that are taken over the pass in place of the path break the law of identity."""
    from decodery.logits_sources import entropy_adaptive

    fair = entropy_adaptive.entropy
    monkeypatch.setattr(entropy_adaptive, "entropy", lambda logp: fair(logp) * 0 + fair(logp).mean())
    with pytest.raises(LawBroken, match="departs from plain decoding"):
        source = EntropyAdaptive(OTHER, 2.4, 2, 0)
        check_identical(TARGET, PROMPTS, drafter=Garbage(), logits_source=source, seeds=(0,), max_new_tokens=40)


def test_a_long_prompt_is_caught_up_in_chunks() -> None:
    model, small = (tiny_transformer(0, num_layers=n, max_positions=2048) for n in (2, 1))
    prompt = (np.arange(1300) * 7 % 64).tolist()
    source = EntropyAdaptive(small, 2.4, 2, 0)
    assert text(source, prompt, model, 12) == entropy_adaptive_by_hand(small, model, prompt, 12, 2.4, 2, 0)[0]


@dataclass(frozen=True)
class Only(LogitsProcessor):
    """A hard constraint: one token alone is allowed."""

    token: int
    stage = Stage.MASK

    def process(self, logits: torch.Tensor, contexts: list[Context]) -> torch.Tensor:
        return logits.masked_fill(torch.arange(logits.shape[-1]) != self.token, -math.inf)


@pytest.mark.parametrize("name", SOURCES)
def test_a_constraint_has_the_last_word(name: str) -> None:
    for temperature in (0.0, 1.0):
        sampler = Sampler([Only(60), Temperature(temperature)])
        (seq,) = decode(TARGET, PROMPTS[:1], logits_source=SOURCES[name](OTHER), sampler=sampler, max_new_tokens=4)
        assert seq.generated == [60] * 4


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(VocabularyMismatch, match="64 tokens and the other 65"):
        text(EntropyAdaptive(tiny_transformer(vocab_size=65)))
    with pytest.raises(SettingsError, match="token ids"):
        text(Guidance(negative="not like this"))
    with pytest.raises(SettingsError, match="outside the vocabulary"):
        text(Guidance(negative=(99,)))
    with pytest.raises(PromptError, match="fills the model's context"):
        text(Guidance(negative=(1,) * 512))
    with pytest.raises(UnknownMethod, match="guidance"):
        resolve("logits-source", "guidence")
    with pytest.raises(SettingsError, match="hidden states"):
        Request(
            [1],
            logits_source=EntropyAdaptive(OTHER),
            drafter=type("Taps", (Garbage,), {"requirements": Requirements(taps=(1,))})(),
        )
    engine = Engine(TARGET)
    first = engine.submit(Request([1, 2], logits_source=Guidance(negative=(3,))))
    with pytest.raises(SettingsError, match="and their sources"):
        engine.submit(Request([1, 2]), like=first)


def test_a_negative_prompt_may_hold_commas() -> None:
    assert resolve("logits-source", 'guidance:scale=2,negative="a, b=c, d"') == Guidance(2.0, "a, b=c, d")
    with pytest.raises(SettingsError, match="not key=value"):
        resolve("logits-source", "guidance:negative=a, b")


def dola_by_hand(theirs: torch.nn.Module, tokens: list[int], layers: list[int], *, normed: bool) -> torch.Tensor:
    """[vocab] scores after `tokens`: the published code's sums with a model of transformers, or the textbook's."""
    with torch.inference_mode():
        out = theirs(torch.tensor([tokens]), output_hidden_states=True)
        final = out.logits[0, -1].float()
        states = [out.hidden_states[layer][0, -1] for layer in layers]
        early = [theirs.lm_head(theirs.model.norm(state) if normed else state).float() for state in states]
    distances = []
    for logits in early:
        p, q = softmax(final, -1), softmax(logits, -1)
        mean = (p + q) / 2
        pairs = [(p, mean), (q, mean)] if normed else [(mean, p), (mean, q)]
        distances.append(sum(float((a * (a.log() - b.log())).double().sum()) for a, b in pairs))
    scores = log_softmax(final, -1)
    contrasted = scores - log_softmax(early[int(np.argmax(distances))], -1)
    return contrasted.masked_fill(scores < scores.max() + math.log(0.1), -math.inf)


@pytest.mark.parametrize(("case", "published"), [("llama", True), ("llama", False), ("qwen3, tied", True)])
def test_dola_agrees_with_transformers(case: str, published: bool, tmp_path: Path) -> None:
    theirs, prompt = make_model(case), [20, 31, 7, 112, 5]
    ours = without_tokenizer(load(str(save(theirs, tmp_path / "model")), dtype="float32").model)
    layers = [0, 1, 2] if case == "llama" else [1, 2]
    source = DoLa(layers=tuple(layers), published=published)
    tokens, scorer = list(prompt), source.over(ours, prompt)
    for _ in range(20):
        expected, got = dola_by_hand(theirs, tokens, layers, normed=not published), logits_after(scorer, tokens)
        kept = expected.isfinite()
        assert (kept == (got > -1e4)).all() and (expected[kept] - got[kept]).abs().max() < 1e-3
        tokens.append(int(expected.argmax()))
    assert text(source, prompt, ours, n=20) == tokens[len(prompt) :]


def test_dola_takes_every_second_layer_of_a_half() -> None:
    assert candidates("low", 30, tied=True) == (2, 4, 6, 8, 10, 12, 14)
    assert candidates("low", 30, tied=False) == (0, 2, 4, 6, 8, 10, 12, 14)
    assert candidates("high", 30, tied=True) == tuple(range(15, 30, 2))
    assert candidates("high", 60, tied=True) == tuple(range(40, 60, 2))
    assert candidates("low", 4, tied=True) == (2,) and candidates("low", 2, tied=True) == (1,)
    with pytest.raises(SettingsError, match="between 0 and 1"):
        text(DoLa(layers=(2,)))
    with pytest.raises(
        UnsupportedModel,
        match="the logits source dola needs the final norm and the head by themselves",
    ):
        text(DoLa(), model=TransformersModel(make_model("llama")))
    assert resolve("logits-source", "dola:layers=4/6/8,published=yes") == DoLa((4, 6, 8), published=True)
    assert resolve("logits-source", "dola:layers=high") == DoLa("high")
