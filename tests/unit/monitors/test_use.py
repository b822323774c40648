"""Monitors where they are used: errors, texts that are streamed, the command line, the server."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from decodery.cli.given import given
from decodery.core.errors import MonitorFailed, SettingsError, UnknownMethod
from decodery.core.registry import methods
from decodery.core.requirements import Requirements
from decodery.engine.engine import Engine
from decodery.engine.monitoring import monitor_reports, monitor_states
from decodery.engine.request import Request
from decodery.monitors.confidence import Confidence
from decodery.monitors.signature import Signature
from decodery.monitors.threshold import Threshold
from decodery.sampling.sampler import Sampler
from decodery.server.fields import CompletionRequest
from decodery.server.methods import settings_of
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.step.monitor import Monitor, Rollback, Row, ScoredRow
from decodery.step.sequence import Sequence
from decodery.testing import decode, tiny_transformer, to_int8
from serving import tiny_lm

MODEL = tiny_transformer(0)
NATIVE = to_int8(MODEL)
PROMPT = [7, 3, 9, 9, 2, 11]


@dataclass(frozen=True)
class Raising(Monitor):
    """Cannot stand the fourth token."""

    def start(self, seq: Sequence) -> Any:
        return 0

    def observe(self, state: Any, row: Row) -> Any:
        return state + 1 // (3 - row.position)

    def score(self, state: Any) -> float | None:
        return float(state)


@dataclass(frozen=True)
class Elsewhere(Raising):
    @property
    def requirements(self) -> Requirements:
        return Requirements(taps=("resid_post.7",))


def test_a_monitor_that_raises_ends_its_own_text_or_is_turned_off() -> None:
    engine = Engine(MODEL)
    free, broken, alone = (
        engine.submit(Request(PROMPT, 8, monitors=monitors))
        for monitors in ((), (Raising(),), (Raising(errors="off"), Confidence()))
    )
    while engine.step():
        pass
    assert free.finish_reason == alone.finish_reason == "length" and free.tokens == alone.tokens
    assert isinstance(broken.error, MonitorFailed) and broken.finish_reason == "error"
    assert "the monitor Raising raised ZeroDivisionError: " in str(broken.error) and "errors=off" in str(broken.error)
    off, on = monitor_reports(alone)[:2]
    assert off.error is not None and off.error.startswith("ZeroDivisionError") and len(off.scores) == 3
    assert len(on.scores) == 8 and not monitor_reports(free)


@dataclass(frozen=True)
class Endless(Monitor):
    """Wants every token taken back."""

    threshold: float | None = 0.0

    @property
    def requirements(self) -> Requirements:
        return Requirements(keys=True)

    @property
    def rollback_tokens(self) -> int:
        return 2

    def start(self, seq: Sequence) -> Any:
        return 0

    def observe(self, state: Any, row: Row) -> Any:
        return state + 1

    def score(self, state: Any) -> float | None:
        return 1.0

    def act(self, state: Any) -> Rollback:
        return Rollback(min(state, 2))


def test_what_is_taken_back_is_bounded_whatever_a_monitor_asks_for() -> None:
    for monitors in ([Endless()], [Endless(), Confidence(threshold=-1.0, action="regenerate")]):
        (text,) = decode(
            MODEL, [PROMPT], monitors=monitors, sampler=Sampler.from_settings(temperature=1.0), max_new_tokens=4
        )
        counts = text.trace.ledger.counts
        assert text.finish_reason == "length" and counts["rollbacks_refused"] and counts["tokens_taken_back"] <= 16 * 4


def test_what_does_not_go_together_is_said() -> None:
    with pytest.raises(
        SettingsError, match=r"the monitor Elsewhere needs .* the nearest are resid_post.1, .* sites are embed, half"
    ):
        decode(MODEL, [PROMPT], monitors=[Elsewhere()])
    with pytest.raises(UnknownMethod, match="no monitor method is called 'confidense'; try confidence"):
        given({"monitor": ("confidense",)})
    with pytest.raises(SettingsError, match="monitors watch a text that is written once, and the search beam"):
        tiny_lm().search("ab", "beam:width=2", monitor="confidence", apply_chat_template=False)
    for name in ("los", "truthprint", "factcheckmate"):
        with pytest.raises(SettingsError, match="make one with `decodery train"):
            given({"monitor": (name,)})


def test_a_monitor_can_be_asked_for_everywhere() -> None:
    lm = tiny_lm()
    settings = {"max_new_tokens": 6, "apply_chat_template": False, "ignore_eos": True}
    free = lm.generate("abc", **settings)
    watched = lm.generate("abc", monitor=["confidence:measure=entropy", "confidence:threshold=0"], **settings)
    assert watched.text == free.text and free.monitors == () and "monitors" not in free.to_dict()
    entropy, doubt = watched.to_dict()["monitors"]
    assert entropy["flagged"] is None and entropy["limit"] is None and len(entropy["scores"]) == 6
    assert doubt["flagged"] == 0 and doubt["score"] == doubt["scores"][-1] > 0
    *pieces, last = lm.stream("abc", monitor="confidence:threshold=0,action=stop", **settings)
    assert last.output is not None and last.output.finish_reason == "content_filter"
    assert last.output.stopped_by == "monitor:confidence" and len(last.output.tokens) == 1
    assert "".join(piece.text for piece in pieces) == last.output.text == free.text[: len(last.output.text)]
    assert given({"monitor": ("confidence:threshold=1.5", "none")})["monitor"] == (Confidence(threshold=1.5),)
    body = CompletionRequest(prompt="a", decodery={"monitor": "confidence:threshold=1.5"})
    assert settings_of(body, 64)["monitor"] == "confidence:threshold=1.5"
    assert "confidence" in {method.name for method in methods("monitor")}


def test_a_threshold_keeps_its_promise_for_few_examples() -> None:
    import numpy as np

    random, rate = np.random.default_rng(0), 0.1
    for count in (9, 25):
        draws = random.standard_normal((4000, count + 1))
        limits = np.array([Threshold.calibrated(row[:-1].tolist(), rate, "draws").value for row in draws])
        quantile = np.quantile(draws[:, :-1], 1 - rate, axis=1)
        flagged, naive = (draws[:, -1] > limits).mean(), (draws[:, -1] > quantile).mean()
        assert flagged < rate + 0.012 < naive, "the plain quantile of so few flags more often than was promised"
    assert Threshold.calibrated([1.0] * 99, 0.01, "").value == 1.0
    with pytest.raises(SettingsError, match="cannot be promised from 98 harmless texts: give at least 99"):
        Threshold.calibrated([1.0] * 98, 0.01, "")
    assert Threshold.of(replace(Threshold(0.5, 0.1, 20, "x")).facts()) == Threshold(0.5, 0.1, 20, "x")


def test_a_signature_does_not_depend_on_names_and_holds_what_confidence_needs() -> None:
    import torch

    logits = torch.randn(64, generator=torch.Generator().manual_seed(0)) * 3
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    one, other = Signature.of(logits, int(order[5]), 10), Signature.of(logits[order], 5, 10)
    assert torch.allclose(one.numbers(), other.numbers(), atol=1e-6)
    row = torch.log_softmax(logits.double(), dim=-1)
    assert one.top.tolist() == row.sort(descending=True).values[:10].tolist()
    assert one.logprob == float(row[order[5]]) and one.rank == float((row > row[order[5]]).sum()) / 64
    assert abs(one.entropy + float((row.exp() * row).sum())) < 1e-9 and len(Signature.of(logits, 1, 99).top) == 99
    (text,) = decode(MODEL, [PROMPT], monitors=[Confidence("mean"), Confidence("worst"), Confidence("first")])
    mean, worst, first = (told.scores for told in monitor_reports(text))
    assert worst[-1] == max(worst) >= mean[-1] and first[0] == first[-1] == mean[0] == worst[0]  # type: ignore[type-var]
    for part in (logits, logits.double(), torch.where(order < 9, -torch.inf, logits)):
        whole = Signature.of(part, 20, 1)
        row = Row(20, 0, False, ScoredRow(part[None], 0), {})
        assert abs(row.entropy - whole.entropy) < 1e-5 > abs(row.logprob - whole.logprob)


@dataclass(frozen=True)
class Numbers(Monitor):
    """Notes what it sees, at once or some tokens later."""

    late: bool = False

    @property
    def waits(self) -> str | None:  # type: ignore[override]
        return "sums" if self.late else None

    @property
    def requirements(self) -> Requirements:
        return Requirements(taps=(1,))

    def start(self, seq: Sequence) -> tuple[Any, ...]:
        return ()

    def observe(self, state: tuple[Any, ...], row: Row) -> tuple[Any, ...]:
        seen = row.token, row.position, row.final, row.logprob, row.entropy, row.hidden[1].tolist()
        return (*state, seen)

    def score(self, state: tuple[Any, ...]) -> float | None:
        return float(state[-1][3])


@pytest.mark.parametrize("drafter", [None, PromptLookup()])
@pytest.mark.parametrize("model", [MODEL, NATIVE])
def test_one_that_waits_sees_what_one_at_once_sees(model: Any, drafter: Any) -> None:
    settings = {"max_new_tokens": 37, "drafter": drafter}
    (late,) = decode(model, [PROMPT], monitors=[Numbers(late=True)], **settings)
    (once,) = decode(model, [PROMPT], monitors=[Numbers()], **settings)
    (both,) = decode(model, [PROMPT], monitors=[Numbers(late=True), Numbers()], **settings)
    assert len(once.generated) == 37 and late.generated == once.generated == both.generated
    assert monitor_states(late)[0] == monitor_states(once)[0] == monitor_states(both)[0] == monitor_states(both)[1]
    assert monitor_reports(late)[0].scores == monitor_reports(once)[0].scores
    assert late.trace.ledger.counts["monitor_evaluations"] == 37


COMPUTED: list[float] = []


def largest(logits: Any) -> float:
    COMPUTED.append(float(logits.max()))
    return COMPUTED[-1]


@dataclass(frozen=True)
class Largest(Monitor):
    """Scores by the largest logit of the newest token's row."""

    def start(self, seq: Sequence) -> Any:
        return None

    def observe(self, state: Any, row: Row) -> Any:
        return row.once(largest)

    def score(self, state: Any) -> float | None:
        return float(state)


@dataclass(frozen=True)
class Keeping(Monitor):
    """Keeps every row, and its log-probability."""

    def start(self, seq: Sequence) -> tuple[Any, ...]:
        return ()

    def observe(self, state: tuple[Any, ...], row: Row) -> tuple[Any, ...]:
        return (*state, (row.token, row.logits, row.logprob, row.most_likely(3)))

    def score(self, state: tuple[Any, ...]) -> float | None:
        return float(state[-1][1].sum())


@pytest.mark.parametrize("model", [MODEL, NATIVE])
def test_rows_that_a_monitor_keeps_stay_as_they_were(model: Any) -> None:
    (text,) = decode(model, [PROMPT], monitors=[Keeping()])
    (report,) = monitor_reports(text)
    (kept,) = monitor_states(text)
    assert len(kept) > 3 and report.scores == [float(logits.sum()) for _, logits, _, _ in kept]
    for token, logits, logprob, (ids, values) in kept:
        assert abs(float(logits.double().log_softmax(-1)[token]) - logprob) < 1e-5
        best = logits.topk(3)
        assert ids.tolist() == best.indices.tolist() and values.tolist() == best.values.tolist()


@dataclass(frozen=True)
class LateKeeping(Keeping):
    waits = "sums"


def test_one_that_waits_cannot_have_logits() -> None:
    with pytest.raises(MonitorFailed, match="not for a monitor that waits"):
        decode(MODEL, [PROMPT], monitors=[LateKeeping()])


@dataclass(frozen=True)
class Keeper(Monitor):
    """Asks rows for their entropy once the text has ended."""

    def start(self, seq: Sequence) -> tuple[Row, ...]:
        return ()

    def observe(self, state: tuple[Row, ...], row: Row) -> tuple[Row, ...]:
        return (*state, row)

    def score(self, state: tuple[Row, ...]) -> float | None:
        return sum(row.entropy for row in state) if state[-1].final else None


@pytest.mark.parametrize("model", [MODEL, NATIVE])
def test_a_row_is_not_read_once_the_next_pass_wrote_over_it(model: Any) -> None:
    with pytest.raises(MonitorFailed, match="sums"):
        decode(model, [PROMPT], monitors=[Keeper()])


def test_monitors_of_a_text_share_what_they_compute_of_a_row() -> None:
    COMPUTED.clear()
    (text,) = decode(MODEL, [PROMPT], monitors=[Largest(), Largest()])
    one, other = (report.scores for report in monitor_reports(text))
    assert one == other == COMPUTED and len(COMPUTED) == text.position > 1
