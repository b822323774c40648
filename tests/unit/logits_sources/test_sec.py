"""SEC: who leaves and who ends the text, what is left after, and what it says to heads that do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from decodery.core.errors import CorruptFile, DecoderyError, SettingsError, UnsupportedModel
from decodery.core.requirements import Provides, Requirements
from decodery.logits_sources.early_exit import LEAVE, Check, Gate, Leaving
from decodery.logits_sources.sec import SEC
from decodery.models.batch import Batch, Segment
from decodery.models.layer_plan import LayerPlan
from decodery.models.protocol import LanguageModel
from decodery.models.torch.transformer import Transformer
from decodery.models.trained.exits import EXIT, HEADS, STOP, ExitHeads
from decodery.step.forward_request import run_sync
from decodery.step.logits_source import LogitsSource
from decodery.testing import decode, tiny_transformer

LAYERS, WIDTH, END = 4, 32, 1
_plain = tiny_transformer(0, num_layers=LAYERS)
TARGET = Transformer(replace(_plain.config, eos_ids=(END,)), _plain.weights)
PROMPT = [5] * 6 + [7, 8, 9] * 4


def random_heads(every: int = 1, seed: int = 0, model: str = "") -> ExitHeads:
    """Heads that say something, and change what the head says."""
    generator, checks = torch.Generator().manual_seed(seed), (LAYERS - 1) // every
    down, up, classifier = (
        torch.randn(*shape, generator=generator) for shape in ((checks, 3, WIDTH), (checks, WIDTH, 3), (3, WIDTH))
    )
    return ExitHeads(every, classifier, down / 6, up / 2, model=model)


def written(source: LogitsSource | None, n: int = 20) -> list[int]:
    return decode(TARGET, [PROMPT], logits_source=source, max_new_tokens=n, eos_ids=(END,))[0].generated


@dataclass(frozen=True)
class Always(Gate):
    """Lets everybody leave at the first check there is."""

    def judge(self, check: Check) -> np.ndarray:
        return np.full(len(check.steps), LEAVE)


@dataclass(frozen=True)
class Forced(LogitsSource):
    heads: ExitHeads

    requirements, provides = Requirements(layer_plans=True), Provides()

    def over(self, model: LanguageModel, prompt: Sequence[int]) -> Leaving:
        return Leaving(model, Always(), self.heads.every, len(prompt), self.heads)


def test_thresholds_out_of_reach_are_plain_decoding() -> None:
    (run,) = decode(TARGET, [PROMPT], logits_source=SEC(random_heads(), 1.0, 2.0), max_new_tokens=20, eos_ids=(END,))
    assert run.generated == written(None)
    assert run.trace.ledger.counts == {"layers": LAYERS * 19, "rows": 19}
    assert written(SEC(random_heads(), t_exit=0.0, t_stop=2.0)) != run.generated


def test_leaving_at_the_last_check_is_the_model_without_the_layers_above() -> None:
    heads = random_heads(every=3)
    (run,) = decode(TARGET, [PROMPT], logits_source=Forced(heads), max_new_tokens=12)
    assert set(run.cache.lengths.tolist()) == {len(PROMPT) + 11}
    assert run.trace.ledger.counts == {"layers": 3 * 11, "rows": 11}
    # No layer that speaks ever looks at what the last one holds: the whole text is read anew by the first three.
    tokens = [*PROMPT, run.generated[0]]
    assert tokens[-1] == written(None, 1)[0]
    for _ in range(11):
        segment = Segment.chunk(tokens, TARGET.new_cache(), logit_rows=[])
        state = TARGET.forward(Batch([segment]), taps=(3,), layer_plan=LayerPlan((0, 1, 2))).hidden[3][-1:]
        normed = TARGET.final_norm(state)
        corrected = normed + normed @ heads.down[0].double().T @ heads.up[0].double().T
        tokens.append(int(TARGET.project(corrected).argmax()))
    assert tokens[len(PROMPT) :] == run.generated
    assert (
        run.generated
        != decode(TARGET, [PROMPT], logits_source=Forced(replace(heads, up=0 * heads.up)))[0].generated[:12]
    )


def test_a_text_ends_where_the_first_check_says_so() -> None:
    """Nobody leaves, so that all states are those of plain decoding, and a slow loop knows who would have stopped."""
    plain = decode(TARGET, [PROMPT], max_new_tokens=20)[0].generated
    segment = Segment.chunk([*PROMPT, *plain], TARGET.new_cache())
    hidden = TARGET.forward(Batch([segment]), taps=(1, 2, 3)).hidden
    lengths = set()
    for seed, bar in ((0, 0.0), (2, 0.0), (3, 0.9985), (4, 0.7)):
        heads, ends = random_heads(seed=seed), len(plain)
        for number in range(len(plain) - 1, 0, -1):
            for layer in (1, 2, 3):
                state = hidden[layer][len(PROMPT) - 1 + number]
                scores = heads.classifier.double() @ (state / state.square().mean().sqrt())
                law = scores.softmax(0)
                ends = number if int(law.argmax()) == STOP and float(law[STOP]) > bar else ends
        expected = [*plain[:ends], END] if ends < len(plain) else plain
        (run,) = decode(TARGET, [PROMPT], logits_source=SEC(heads, 2.0, bar), max_new_tokens=20, eos_ids=(END,))
        assert run.generated == expected
        assert run.trace.ledger.counts.get("stops", 0) == (ends < len(plain))
        lengths.add(ends)
    assert len(lengths) == 4 and len(plain) in lengths


def test_rows_read_together_are_rows_read_one_by_one() -> None:
    source = SEC(random_heads(), t_exit=0.4, t_stop=0.6)
    reader = source.over(TARGET, PROMPT)
    assert isinstance(reader, Leaving)
    tokens = [*PROMPT, *written(SEC(random_heads(), 0.4, 2.0))]
    together, cache = run_sync(reader.compose(Segment.chunk(tokens, reader.new_cache()))).logits, reader.new_cache()
    for row, token in enumerate(tokens):
        alone = run_sync(reader.compose(Segment.chunk([token], cache))).logits[0]
        cache.keep([0])
        assert torch.allclose(alone, together[row], atol=1e-9)
    ends = (together[len(PROMPT) :].softmax(-1)[:, END] > 0.999).sum()
    assert 0 < ends < len(tokens) - len(PROMPT)


def test_only_the_most_likely_class_acts_and_only_above_its_threshold() -> None:
    heads = replace(random_heads(), classifier=random_heads().classifier / 6)
    states = torch.randn(99, WIDTH, generator=torch.Generator().manual_seed(1))
    check = Check(np.arange(99) + 1, states, states, torch.empty(0, 4))
    gate = SEC(heads, t_exit=0.5, t_stop=0.4).over(TARGET, [1]).gate  # type: ignore[attr-defined]
    laws = heads.classes(states).tolist()
    for said, law in zip(gate.judge(check).tolist(), laws, strict=True):
        best = max(range(3), key=law.__getitem__)
        assert said == {STOP: 2 * (law[STOP] > 0.4), EXIT: int(law[EXIT] > 0.5)}.get(best, 0)
    assert any(0.4 < law[STOP] < max(law) for law in laws)
    assert any(law[EXIT] == max(law) <= 0.5 for law in laws)


def test_heads_of_this_model_are_needed(tmp_path: Path) -> None:
    for heads in (None, str(tmp_path), random_heads(model="another")):
        with pytest.raises(DecoderyError, match="decodery train sec"):
            decode(TARGET, [[1]], logits_source=SEC(heads))
    with pytest.raises(UnsupportedModel, match="another shape"):
        decode(tiny_transformer(0), [[1]], logits_source=SEC(random_heads()))
    with pytest.raises(UnsupportedModel, match="t_stop=1"):
        decode(_plain, [[1]], logits_source=SEC(random_heads()))
    with pytest.raises(SettingsError, match="t_exit and t_stop"):
        SEC(random_heads(), t_exit=-0.5)
    heads = random_heads()
    heads.save(tmp_path / HEADS)
    assert written(SEC(str(tmp_path), 0.4, 2.0)) == written(SEC(heads, 0.4, 2.0))
    replace(heads, up=heads.up[:1]).save(tmp_path / HEADS)
    with pytest.raises(CorruptFile, match="holds no heads of early exits"):
        ExitHeads.load(tmp_path / HEADS)
