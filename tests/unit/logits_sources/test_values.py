"""Sources led by a value or a reward: controlled decoding and transfer-Q, beside slow and obvious counterparts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import log_softmax, softmax

from decodery.core.errors import CorruptFile, SettingsError
from decodery.core.registry import resolve
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.logits_sources.controlled_decoding import ControlledDecoding
from decodery.logits_sources.transfer_q import TransferQ, expected_reward
from decodery.models.batch import Batch, Segment
from decodery.sampling import Sampler
from decodery.scorers.value_head import LinearValue, ValueHead
from decodery.search.controlled_blocks import ControlledBlocks
from decodery.step.forward_request import run_sync, score
from decodery.step.scorer import Candidates, Scorer
from decodery.testing import TableModel, decode
from decodery.training.sampled_value import train_value
from decodery.training.value import fit_value, read_judged
from sourced import OTHER, PROMPTS, TARGET, logits_after, text


def test_a_value_head_of_another_model_is_refused(tmp_path: Path) -> None:
    heads = {
        "there is no state after layer 9 of 2": LinearValue(torch.ones(32), torch.tensor(0.0), 9),
        "24 numbers after layer 1, and the model has 32": LinearValue(torch.ones(24), torch.tensor(0.0), 1),
    }
    engine, request = Engine(TARGET), Request([1, 2])
    for message, head in heads.items():
        head.save(tmp_path / "head.safetensors")
        for value in (ValueHead(head), f"value-head:head={tmp_path / 'head.safetensors'}"):
            with pytest.raises(SettingsError, match=message):
                text(ControlledDecoding(value))
            with pytest.raises(SettingsError, match=message):
                ControlledBlocks(value).run(engine, request)
    LinearValue(torch.full((32,), math.nan), torch.tensor(0.0), 1).save(tmp_path / "head.safetensors")
    with pytest.raises(CorruptFile, match="not finite"):
        text(ControlledDecoding(f"value-head:head={tmp_path / 'head.safetensors'}"))


class Share(Scorer):
    """How many of a text's tokens are of a kind."""

    def __init__(self, kind: Callable[[int], bool]) -> None:
        self.kind = kind

    def of(self, outputs: Sequence[Sequence[int]]) -> list[float]:
        return [sum(map(self.kind, output)) / len(output) for output in outputs]

    def score(self, candidates: Candidates) -> torch.Tensor:
        return torch.tensor(self.of(candidates.outputs), dtype=torch.float64)


class Judged(Scorer):
    """Exact values of a table model's prefixes for a reward of its four-token texts, by enumeration."""

    def __init__(self, model: TableModel, strength: float, *, soft: bool) -> None:
        self.model, self.strength, self.soft = model, strength, soft

    def reward(self, output: list[int]) -> float:
        return math.sin(3 * output[0] + 5 * output[1] + 2 * output[2] * output[3])

    def value(self, output: list[int]) -> float:
        if len(output) == 4:
            return self.reward(output)
        p = softmax(self.model.logits([1, *output]), -1).tolist()
        below = [self.value([*output, token]) for token in range(4)]
        if not self.soft:
            return sum(a * b for a, b in zip(p, below, strict=True))
        return math.log(sum(a * math.exp(self.strength * b) for a, b in zip(p, below, strict=True))) / self.strength

    def score(self, candidates: Candidates) -> torch.Tensor:
        return torch.tensor([self.value(list(output)) for output in candidates.outputs], dtype=torch.float64)


def test_controlled_decoding_is_the_closed_form_on_a_model_that_can_be_enumerated() -> None:
    model, strength = TableModel(4, order=2, seed=3), 1.5
    for soft in (False, True):
        judged = Judged(model, strength, soft=soft)
        scorer = ControlledDecoding(judged, strength, k=4).over(model, [1])
        induced, tilted = {(): 1.0}, {(): 1.0}
        for length in range(4):
            for begun in itertools.product(range(4), repeat=length):
                p = softmax(model.logits([1, *begun]), -1)
                values = torch.tensor([judged.value([*begun, z]) for z in range(4)], dtype=torch.float64)
                closed = p * (strength * values).exp()
                law = softmax(logits_after(scorer, [1, *begun]), -1)
                assert (law - closed / closed.sum()).abs().max() < 1e-10
                for token in range(4):
                    output = (*begun, token)
                    induced[output] = induced[begun] * float(law[token])
                    tilted[output] = tilted[begun] * float(p[token])
        induced, tilted = (
            {output: mass for output, mass in found.items() if len(output) == 4} for found in (induced, tilted)
        )
        for output in tilted:
            tilted[output] *= math.exp(strength * judged.reward(list(output)))
        total = sum(tilted.values())
        gap = max(abs(induced[each] - tilted[each] / total) for each in induced)
        # Expected rewards make the best law token by token; only soft values make the best one of whole texts.
        assert gap < 1e-10 if soft else gap > 1e-3


def test_controlled_decoding_reads_the_states_of_the_candidates() -> None:
    value = LinearValue(torch.linspace(-1, 1, 32, dtype=torch.float64), torch.tensor(0.3), tap=2)
    prompt = PROMPTS[0]
    scorer = ControlledDecoding(ValueHead(value), 2.0, k=3).over(TARGET, prompt)
    cache = scorer.new_cache()
    run_sync(score(scorer, Segment.chunk(prompt, cache, logit_rows=[2])))
    cache.keep(range(3))
    rows = Segment(
        np.array([3, 4, 4]), np.array([7, 8, 9]), mask=np.eye(3, dtype=bool) | (np.arange(3) == 0), cache=cache
    )
    scored = run_sync(score(scorer, rows)).logits
    for row, path in enumerate(([7], [7, 8], [7, 9])):
        logp = log_softmax(logits_after(TARGET, [*prompt, *path]), -1)
        expected = torch.full_like(logp, -math.inf)
        for token in logp.topk(3).indices.tolist():
            chunk = Segment.chunk([*prompt, *path, token], TARGET.new_cache())
            state = TARGET.forward(Batch([chunk]), taps=[2]).hidden[2][-1]
            expected[token] = logp[token] + 2.0 * (state @ value.weight + 0.3)
        assert torch.allclose(scored[row].where(scored[row] > -1e4, -math.inf), expected, atol=1e-9)
    assert text(ControlledDecoding(ValueHead(value), 0.0)) == text(None)


@pytest.mark.integration
def test_a_value_head_learns_what_prefixes_promise(tmp_path: Path) -> None:
    reward, heads = Share(lambda token: token < 32), {}
    settings = {"sampler": Sampler.from_settings(temperature=1.0), "seeds": range(8), "max_new_tokens": 8}
    plain = np.mean(reward.of([seq.generated for seq in decode(TARGET, PROMPTS, **settings)]))
    for method in ("fudge", "q"):
        heads[method] = train_value(TARGET, PROMPTS, reward, method=method, samples=30, length=8, ridge=1e-2)
        source = ControlledDecoding(ValueHead(heads[method]), 100.0, k=16)
        steered = np.mean(
            reward.of([seq.generated for seq in decode(TARGET, PROMPTS, logits_source=source, **settings)])
        )
        assert steered > plain + 0.1
    heads["q"].save(tmp_path / "value.safetensors")
    kept = LinearValue.load(tmp_path / "value.safetensors")
    assert torch.equal(kept.weight, heads["q"].weight) and kept.tap == 2
    (tmp_path / "other").write_bytes(b"no head")
    with pytest.raises(CorruptFile, match="no value head"):
        resolve("logits-source", f"controlled-decoding:value=value-head(head={tmp_path / 'other'})")


def test_a_value_head_is_learned_from_judged_texts(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    texts = [(PROMPTS[0], draw.integers(0, 64, 8).tolist()) for _ in range(80)]
    head = fit_value(TARGET, [(prompt, text, np.mean(np.array(text) < 32)) for prompt, text in texts], ridge=1e-2)
    source = ControlledDecoding(ValueHead(head), 30.0, k=64)
    settings = {"sampler": Sampler.from_settings(temperature=1.0), "seeds": range(10), "max_new_tokens": 8}
    low = [
        np.mean(
            [token < 32 for seq in decode(TARGET, PROMPTS, logits_source=each, **settings) for token in seq.generated]
        )
        for each in (None, source)
    ]
    assert low[1] > low[0] + 0.1
    lines = tmp_path / "texts.jsonl"
    lines.write_text('{"prompt": "a", "text": "b", "reward": 1}\n\n{"prompt": "a", "text": "c", "reward": 0.5}\n')
    assert read_judged(lines) == [("a", "b", 1.0), ("a", "c", 0.5)]
    for wrong in ('{"prompt": "a", "text": "b"}', '{"prompt": "a", "text": "b", "reward": NaN}', "[", "3", "\xff", ""):
        lines.write_bytes(wrong.encode("latin-1"))
        with pytest.raises(CorruptFile, match=r"texts\.jsonl"):
            read_judged(lines)
    for nothing in ([], [([1] * 600, [2], 1.0)]):
        with pytest.raises(SettingsError, match="no text to learn from"):
            fit_value(TARGET, nothing)


EVEN = Share(lambda token: token % 2 == 0)


def test_transfer_q_is_the_loop_that_rolls_out_every_candidate() -> None:
    for prompt, own in ((PROMPTS[0], None), (PROMPTS[1], (40, 41))):
        written: list[int] = []
        for _ in range(8):
            logits = logits_after(TARGET, [*prompt, *written])
            scores = torch.full_like(logits, -math.inf)
            for token in logits.topk(4).indices.tolist():
                rolled = [*written, token]
                while len(rolled) < len(written) + 6 and rolled[-1] != 9:
                    rolled.append(int(logits_after(OTHER, [*(own or prompt), *rolled]).argmax()))
                scores[token] = logits[token] + 3.0 * EVEN.of([rolled])[0]
            written.append(int(scores.argmax()))
        source = TransferQ(EVEN, OTHER, own, k=4, weight=3.0, length=5, end=(9,))
        assert text(source, prompt, n=8) == written
    assert text(TransferQ(EVEN, OTHER, weight=0.0)) == text(None)


def test_transfer_q_reweighs_what_was_aligned_with_something_else() -> None:
    random = np.random.default_rng(2)
    reward, against, law = random.normal(size=50), random.normal(size=50), random.dirichlet(np.ones(50))
    tilted = law * np.exp((reward - against) / 2.0)
    expected = float(tilted @ reward / tilted.sum())
    drawn = random.choice(50, size=(200, 5000), p=law)
    estimates = expected_reward(reward[drawn], against[drawn], 2.0)
    assert abs(estimates.mean() - expected) < 3 * estimates.std() / 200**0.5 + 1e-3
    assert abs(expected_reward(reward[drawn], None, 2.0).mean() - expected) > 0.01
    assert expected_reward(np.array([[0.5]]), np.array([[0.1]]), 2.0)[0] == pytest.approx(math.exp(0.2) * 0.5)


def test_transfer_q_counts_rollouts_and_rewards() -> None:
    (seq,) = decode(
        TARGET, PROMPTS[:1], logits_source=TransferQ(EVEN, OTHER, k=3, length=4, rollouts=2), max_new_tokens=5
    )
    ledger = seq.trace.ledger
    assert ledger.scorer_calls == 5 * 6 and ledger.passes == {"baseline": 5 * 4 + 4, "model": 5}
