"""Texts in arrays: the same tokens, states, traces and ledgers as one by one, whoever comes and goes, in few calls."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch

from count_calls import counted_calls
from decodery.core.errors import MonitorFailed
from decodery.core.requirements import Requirements
from decodery.engine import array_batch, array_commit, monitoring
from decodery.engine.array_batch import ArrayBatch
from decodery.engine.array_text import ArrayText
from decodery.engine.engine import Engine
from decodery.engine.monitoring import TextMonitors, monitor_reports
from decodery.engine.prefixes import PrefixCache
from decodery.engine.request import Request
from decodery.engine.schedule import Limits
from decodery.models.batch import Segment
from decodery.models.config import ModelConfig
from decodery.models.native.array_step import ArraySteps
from decodery.models.step_arrays import StepArrays
from decodery.models.torch.transformer import Transformer
from decodery.monitors.confidence import Confidence
from decodery.sampling.sampler import Sampler
from decodery.speculative.drafters.auto import Auto
from decodery.speculative.drafters.copyspec import CopySpec
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.step.forward_request import ForwardCoroutine, run_sync, score
from decodery.step.monitor import Monitor, Prompt, Rollback, Row
from decodery.step.pass_prices import PassPrices
from decodery.step.prior_prices import PriorPrices
from decodery.step.sequence import Sequence
from decodery.testing import Oracle, tiny_transformer, to_int8
from decodery.testing.models import Counted
from drawn_models import made

MODEL = to_int8(tiny_transformer(3))
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8], [1, 1, 2, 3, 5, 8, 13, 21, 34]]


@dataclass(frozen=True)
class Norms(Monitor):
    """Scores a token by the states that it was chosen at, after two depths."""

    @property
    def requirements(self) -> Requirements:
        return Requirements(taps=("resid_post.0", -1), prompt_taps=True)

    def start(self, seq: Sequence) -> float:
        return 0.0

    def read(self, state: float, rows: Prompt) -> float:
        return state + float(rows.hidden[-1].sum())

    def observe(self, state: float, row: Row) -> float:
        return state + float(row.hidden["resid_post.0"].norm() + 2 * row.hidden[-1].sum())

    def score(self, state: float) -> float:
        return state


@dataclass(frozen=True)
class Returning(Monitor):
    """Takes one to three tokens back after every token that 4 divides, and has them written otherwise.

    Attributes:
        writes: Whether the token below is required there, or the one that was written is excluded.
    """

    threshold: float | None = 0.5
    writes: bool = False

    @property
    def requirements(self) -> Requirements:
        return Requirements(keys=True)

    @property
    def rollback_tokens(self) -> int:
        return 3

    def start(self, seq: Sequence) -> tuple[int, ...]:
        return ()

    def observe(self, state: tuple[int, ...], row: Row) -> tuple[int, ...]:
        return (*state, row.token)

    def score(self, state: tuple[int, ...]) -> float:
        return float(len(state) > 4 and state[-1] % 4 == 0)

    def act(self, state: tuple[int, ...]) -> Rollback:
        back = 1 + len(state) % 3
        return Rollback(back, write=(state[-back] - 1, 1)) if self.writes else Rollback(back, ban=(state[-back],))


AUTO: dict[str, Any] = {"drafter": Auto(warm=None), "sampler": Sampler.from_settings(temperature=0.7)}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"sampler": Sampler.from_settings(temperature=0.9)},
    "truncated": {"sampler": Sampler.from_settings(temperature=1.3, top_k=30, top_p=0.9, min_p=0.02)},
    "penalties": {
        "sampler": Sampler.from_settings(
            temperature=1.1, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2,
            logit_bias={5: 2.0, 9: -100.0}, min_new_tokens=6, eos_ids=(7, 11),
        ),
        "eos_ids": (7, 11),
    },
    "greedy penalties": {"sampler": Sampler.from_settings(repetition_penalty=1.5)},
    "copies": {"drafter": PromptLookup()},
    "first copies": {"drafter": PromptLookup(pick="first", max_ngram=2), "eos_ids": (7, 11)},
    "copyspec": {"drafter": CopySpec(gamma=1), "sampler": Sampler.from_settings(temperature=0.7)},
    "auto": AUTO,
    "monitored": {"monitors": (Confidence("worst"), Confidence("entropy"))},
    "monitored states": {"monitors": (Norms(), Confidence()), **AUTO},
    "monitored copies": {"monitors": (Confidence("mean"),), "drafter": PromptLookup(), "eos_ids": (7, 11)},
    "reported": {"logprobs": 3, "sampler": Sampler.from_settings(temperature=0.9)},
    "reported copies": {"logprobs": 0, "drafter": PromptLookup(), "eos_ids": (7, 11)},
    "reported auto": {"logprobs": 2, **AUTO},
    "taken back of reported": {"logprobs": 1, "monitors": (Returning(), Confidence())},
    "taken back": {"monitors": (Returning(), Confidence())},
    "taken back of drafts": {"monitors": (Norms(), Returning()), **AUTO},
    "taken back of copies": {"monitors": (Returning(writes=True),), "drafter": PromptLookup(), "eos_ids": (7, 11)},
    "taken back with penalties": {
        "monitors": (Returning(),),
        "drafter": PromptLookup(max_ngram=1),
        "sampler": Sampler.from_settings(temperature=1.1, repetition_penalty=1.3, frequency_penalty=0.4),
    },
    "written again": {"monitors": (Confidence("worst", threshold=3.5, action="regenerate"),), **AUTO},
    "stopped": {"monitors": (Confidence("mean", threshold=2.5, action="stop"),), **AUTO},
}  # fmt: skip


class Letters:
    """A detokenizer whose token i is the i-th letter."""

    def push(self, ids: list[int]) -> str:
        return "".join(chr(97 + token % 26) for token in ids)

    def finish(self) -> str:
        return ""


def outcome(seq: Sequence) -> tuple[Any, ...]:
    """What a text says that does not depend on what was drafted."""
    text = None if seq.text is None else seq.text.text
    counts = seq.trace.ledger.tokens, seq.trace.ledger.counts
    watched = [each.to_dict() for each in monitor_reports(seq)]
    reported = [(each.token, each.logprob, each.top) for each in seq.token_logprobs]
    return seq.tokens, seq.finish_reason, seq.stopped_by, text, counts, seq.cache.next_position, watched, reported


def figures(seq: Sequence) -> tuple[Any, ...]:
    """What a text, its trace and its ledger say that does not depend on time."""
    steps = [(each.nodes, each.accepted, each.emitted, each.rows, each.choices) for each in seq.trace.steps]
    ledger = seq.trace.ledger
    return outcome(seq), steps, ledger.passes, ledger.rows, ledger.depth


def written(model: Any, settings: dict[str, Any], **others: Any) -> list[Sequence]:
    """Texts after all prompts, of which one comes later."""
    engine = Engine(model, detokenizer=Letters, pass_seconds=lambda context: 1.0 + 0.01 * np.arange(1024))
    seqs = []
    for number, prompt in enumerate(PROMPTS):
        seqs.append(engine.submit(Request(prompt, max_new_tokens=24 + number, seed=number, **settings, **others)))
        for _ in range(5 * (number == 1)):
            engine.step()
    engine.run(seqs)
    return seqs


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_texts_in_arrays_are_what_they_are_one_by_one(settings: dict[str, Any]) -> None:
    model = Counted(MODEL)
    plain = written(model, settings)
    assert model.rows, "a wrapped model is not run in arrays"
    together = written(MODEL, settings)
    # How much auto drafts depends on who drafts with a text, and one that was taken back is alone for a step.
    drafted = any(settings is SETTINGS[name] for name in ("taken back of drafts", "written again"))
    same = outcome if drafted else figures
    assert [same(seq) for seq in together] == [same(seq) for seq in plain]
    for one, alone in zip(together, plain, strict=True):
        # Pages for 64 rows are taken ahead, and one that they begin in.
        spare = 5 * 16 * one.cache.slot_bytes
        assert alone.trace.ledger.bytes <= one.trace.ledger.bytes <= alone.trace.ledger.bytes + spare


def shown_in_arrays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens that monitors are shown in arrays, from now on."""
    seen = list[int]()
    watch = ArrayText.watch

    def counted(text: ArrayText, token: int, steps: StepArrays, row: int) -> None:
        seen.append(token)
        watch(text, token, steps, row)

    monkeypatch.setattr(ArrayText, "watch", counted)
    return seen


def test_monitors_that_only_read_watch_texts_in_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, seen = ArrayText.watch, shown_in_arrays(monkeypatch)
    for name in ("monitored", "monitored states", "monitored copies", "stopped"):
        seen.clear()
        texts = written(MODEL, SETTINGS[name])
        # Those of the prompts' last rows are chosen before a text is in arrays.
        assert len(seen) > 0.6 * sum(len(seq.generated) for seq in texts)
        assert all(len(report.scores) == len(seq.generated) for seq in texts for report in monitor_reports(seq))
    stopped = written(MODEL, SETTINGS["stopped"])
    assert any(seq.finish_reason == "content_filter" for seq in stopped)
    # Scores are of the row that predicted each token, and of no other.
    monkeypatch.setattr(
        ArrayText, "watch", lambda text, token, steps, row: watch(text, token, steps, (row + 1) % steps.rows)
    )
    for name in ("monitored", "monitored states"):
        wrong, right = (written(model, SETTINGS[name])[0] for model in (MODEL, Counted(MODEL)))
        assert wrong.tokens == right.tokens and figures(wrong) != figures(right)


def test_log_probabilities_are_reported_in_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, report = list[int](), array_commit.report

    def counted(steps: StepArrays, reported: list[tuple[ArrayText, int, int]]) -> None:
        seen.append(len(reported))
        report(steps, reported)

    monkeypatch.setattr(array_commit, "report", counted)
    for name in ("reported", "reported copies", "reported auto"):
        seen.clear()
        texts = written(MODEL, SETTINGS[name])
        assert all(len(seq.token_logprobs) == len(seq.generated) for seq in texts)
        # Those of the prompts' last rows are chosen before a text is in arrays.
        assert sum(seen) > 0.6 * sum(len(seq.generated) for seq in texts) and max(seen) > 1
        right = [outcome(seq) for seq in written(Counted(MODEL), SETTINGS[name])]
        assert [outcome(seq) for seq in texts] == right
        # Those of another row are others.
        with monkeypatch.context() as patched:
            patched.setattr(
                array_commit,
                "report",
                lambda steps, found: report(
                    steps, [(each, (row + 1) % steps.rows, token) for each, row, token in found]
                ),
            )
            assert [outcome(seq) for seq in written(MODEL, SETTINGS[name])] != right


TAKEN_BACK = [name for name in SETTINGS if name.startswith(("taken back", "written again"))]


@pytest.mark.parametrize("name", TAKEN_BACK)
def test_texts_leave_the_arrays_only_where_tokens_are_taken_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = shown_in_arrays(monkeypatch)
    counts = [seq.trace.ledger.counts for seq in written(MODEL, SETTINGS[name])]
    moments = sum(each.get("rollbacks", 0) + each.get("regenerations", 0) for each in counts)
    shown = sum(each["monitor_evaluations"] for each in counts) // len(SETTINGS[name]["monitors"])
    # The first token of a text, those that a rollback excludes or requires, and the first ones after it.
    assert moments > 1 and len(seen) > 10 and len(seen) >= shown - len(PROMPTS) - 3 * moments


@pytest.mark.parametrize("wrong", ["position", "states", "bans", "held"])
def test_wrong_rollbacks_out_of_arrays_are_other_texts(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "taken back with penalties" if wrong == "states" else "taken back of drafts"
    settings = SETTINGS[name]
    if wrong == "held":
        # All that is wanted back stays, and the text goes on in the middle of what was accepted of a draft.
        monkeypatch.setattr(monitoring, "MOST_TAKEN_BACK", 0)
        drafter = Oracle(tuple(written(MODEL, SETTINGS["sampled"])[0].tokens), nodes=12)
        settings = {"monitors": (Returning(),), "drafter": drafter, **SETTINGS["sampled"]}
    right = [outcome(seq) for seq in written(Counted(MODEL), settings)]
    assert [outcome(seq) for seq in written(MODEL, settings)] == right
    remember = TextMonitors.remember

    def late(own: TextMonitors, seq: Sequence, position: int, states: Any) -> None:
        remember(own, seq, position, seq.request.sampler.follow(states, seq.last_token))

    def held(batch: ArrayBatch) -> bool:
        for text in batch._texts:
            if text.rolls_back:
                text.roll_back()
        return False

    if wrong == "position":
        monkeypatch.setattr(TextMonitors, "remember", lambda own, seq, at, states: remember(own, seq, at + 1, states))
    elif wrong == "states":
        monkeypatch.setattr(TextMonitors, "remember", late)
    elif wrong == "bans":
        monkeypatch.setattr(array_batch, "banned_ahead", lambda seq: False)
    else:
        monkeypatch.setattr(ArrayBatch, "_roll_back", held)
    assert [outcome(seq) for seq in written(MODEL, settings)] != right


@dataclass(frozen=True)
class Broken(Monitor):
    """Breaks at the sixth token."""

    def start(self, seq: Sequence) -> int:
        return 0

    def observe(self, state: int, row: Row) -> int:
        if state == 5:
            raise ValueError("broken")
        return state + 1

    def score(self, state: int) -> float:
        return float(state)


def test_a_monitor_that_breaks_ends_its_own_text() -> None:
    engine = Engine(MODEL)
    ends, other = (engine.submit(Request(PROMPTS[0], 24, monitors=each)) for each in ((Broken(),), (Confidence(),)))
    off = engine.submit(Request(PROMPTS[0], 24, monitors=(Broken(errors="off"),)))
    with pytest.raises(MonitorFailed, match="broken"):
        engine.run([ends, other, off])
    engine.run([other, off])
    assert isinstance(ends.error, MonitorFailed) and len(ends.generated) == 6
    assert other.error is None and len(other.generated) == 24 == len(off.generated)
    assert "broken" in str(monitor_reports(off)[0].error)


def mixture() -> Transformer:
    config = ModelConfig(
        vocab_size=100, hidden_size=64, intermediate_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
        max_positions=512, experts=6, experts_per_token=2, dense_layers=(True, False), dense_inner=48,
    )  # fmt: skip
    return made(config)


@pytest.mark.parametrize("name", ["sampled", "copies", "auto"])
def test_texts_in_arrays_have_experts_read_as_one_by_one(name: str) -> None:
    plain, together = written(Counted(mixture()), SETTINGS[name]), written(mixture(), SETTINGS[name])
    assert [figures(seq) for seq in together] == [figures(seq) for seq in plain]
    read = [seq.trace.ledger.counts["experts"] for seq in together]
    assert read == [seq.trace.ledger.counts["experts"] for seq in plain]
    # Every row of one expert layer takes two, and rows of one pass may share some.
    assert all(2 * seq.trace.ledger.passes["model"] <= each for seq, each in zip(together, read, strict=True))


@pytest.mark.parametrize("name", ["greedy", "auto"])
def test_texts_that_have_ended_are_not_held(name: str) -> None:
    engine = Engine(MODEL)
    seq = engine.submit(Request(PROMPTS[0], 12, **SETTINGS[name]))
    engine.run([seq])
    ended = weakref.ref(seq)
    del seq
    gc.collect()
    assert ended() is None


def test_another_seed_is_another_text() -> None:
    one, two = (written(MODEL, SETTINGS["sampled"])[0], written(MODEL, SETTINGS["truncated"])[0])
    assert one.tokens != two.tokens


def test_stop_strings_end_a_text_inside_a_draft() -> None:
    whole = written(MODEL, {})[0]
    assert whole.text is not None
    stop = whole.text.text[7:9]
    drafter = Oracle(tuple(whole.tokens), nodes=12)
    for model in (MODEL, Counted(MODEL)):
        seq = written(model, {"drafter": drafter, "stop": [stop]})[0]
        assert seq.text is not None and seq.text.text == whole.text.text[: whole.text.text.index(stop)]
        assert seq.cache.next_position == len(seq.tokens) - 1 and seq.stopped_by == stop


def test_texts_leave_the_arrays_and_come_back() -> None:
    expected = [seq.tokens for seq in written(MODEL, SETTINGS["sampled"])]
    engine = Engine(MODEL, prefixes=PrefixCache(1 << 20))
    seqs = [
        engine.submit(Request(prompt, max_new_tokens=24 + number, seed=number, **SETTINGS["sampled"]))
        for number, prompt in enumerate(PROMPTS)
    ]
    for _ in range(4):
        engine.step()
    fork = engine.fork(seqs[0])
    engine.preempt(seqs[1])
    for _ in range(3):
        engine.step()
    # One that the arrays cannot hold shares passes with the others.
    other = engine.submit(Request(PROMPTS[0], max_new_tokens=3, logprobs=2, return_draft_trees=True))
    seqs[2].paused = True
    for _ in range(4):
        engine.step()
    seqs[2].paused = False
    engine.run([*seqs, fork, other])
    assert [seq.tokens for seq in seqs] == expected and fork.tokens == expected[0]
    assert len(other.token_logprobs) == 3


def test_a_text_that_is_cancelled_ends_and_the_others_go_on() -> None:
    expected = [seq.tokens for seq in written(MODEL, {})]
    engine = Engine(MODEL)
    seqs = [engine.submit(Request(prompt, max_new_tokens=24 + number)) for number, prompt in enumerate(PROMPTS)]
    for _ in range(5):
        engine.step()
    seqs[1].cancel()
    engine.run(seqs)
    assert seqs[1].finish_reason == "cancelled" and [seqs[0].tokens, seqs[2].tokens] == [expected[0], expected[2]]


def probe(found: list[torch.Tensor]) -> ForwardCoroutine[None]:
    """What a search is to the engine: passes of a text of its own."""
    cache = MODEL.new_cache()
    for token in range(1, 9):
        scored = yield from score(MODEL, Segment.chunk([token, token + 1], cache))
        cache.keep([0, 1])
        found.append(scored.logits)


@pytest.mark.parametrize("rows", [1024, 7], ids=["all fit", "not all fit"])
@pytest.mark.parametrize("name", ["sampled", "penalties", "copies", "auto"])
def test_texts_stay_in_arrays_beside_others(name: str, rows: int) -> None:
    """Beside a prompt that is read in chunks, a search, and a text that arrays cannot hold: one pass for all."""
    settings, others = SETTINGS[name], [[5, *range(1, 40)], PROMPTS[0]]
    alone = run_sync_all()
    expected = [seq.tokens for seq in written(MODEL, settings)]
    engine = Engine(
        MODEL, prefill_chunk=4, limits=Limits(rows), pass_seconds=lambda context: 1.0 + 0.01 * np.arange(1024)
    )
    seqs = [
        engine.submit(Request(prompt, max_new_tokens=24 + number, seed=number, **settings))
        for number, prompt in enumerate(PROMPTS)
    ]
    while any(seq.position < 2 for seq in seqs):
        engine.step()
    found: list[torch.Tensor] = []
    reading = engine.submit(Request(others[0], max_new_tokens=4))
    reported = engine.submit(Request(others[1], max_new_tokens=6, return_draft_trees=True))
    job, beside, passes = engine.enter(probe(found)), 0, engine.passes
    for step in range(6):
        before = [seq.position for seq in seqs]
        engine.step()
        beside += len(engine._arrays) == len(seqs)
        if rows > 7:
            assert all(seq.position > known for seq, known in zip(seqs, before, strict=True))
            assert engine.passes == passes + step + 1
    assert beside == 6 or rows == 7
    engine.run([*seqs, reading, reported, job])
    assert [seq.tokens for seq in seqs] == expected
    assert all(torch.equal(one, two) for one, two in zip(found, alone, strict=True))
    for seq, prompt, length in ((reading, others[0], 4), (reported, others[1], 6)):
        engine = Engine(Counted(MODEL))
        plain = engine.submit(Request(prompt, max_new_tokens=length))
        engine.run([plain])
        assert seq.tokens == plain.tokens


def run_sync_all() -> list[torch.Tensor]:
    """What a probe finds by itself."""
    found: list[torch.Tensor] = []
    run_sync(probe(found))
    return found


def test_a_search_that_fails_harms_no_text() -> None:
    """A pass that cannot be run for one of those who share it is run for the others."""
    expected = [seq.tokens for seq in written(MODEL, SETTINGS["sampled"])]
    engine = Engine(MODEL)
    seqs = [
        engine.submit(Request(prompt, max_new_tokens=24 + number, seed=number, **SETTINGS["sampled"]))
        for number, prompt in enumerate(PROMPTS)
    ]
    while any(seq.position < 2 for seq in seqs):
        engine.step()

    def wrong() -> ForwardCoroutine[None]:
        yield from score(MODEL, Segment.chunk([MODEL.vocab_size + 5], MODEL.new_cache()))

    job = engine.enter(wrong())
    while not job.finished:
        engine.step()
    engine.run(seqs)
    assert isinstance(job.error, IndexError) and [seq.tokens for seq in seqs] == expected


@pytest.mark.parametrize("calls", [("run",), ("choose",), ("run", "choose")])
@pytest.mark.parametrize("often", [1, 10_000])
def test_texts_go_on_by_themselves_where_the_step_of_all_fails(
    often: int, calls: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once or in every step; alone and beside a search, whose pass they join."""
    expected, left = [seq.tokens for seq in written(MODEL, SETTINGS["sampled"])], [often]

    def failing(call: str) -> Callable[..., Any]:
        real = getattr(ArraySteps, call)

        def either(self: ArraySteps, *arguments: Any) -> Any:
            left[0] -= 1
            if left[0] >= 0:
                raise MemoryError("no room for the step of all")
            return real(self, *arguments)

        return either

    for call in calls:
        monkeypatch.setattr(ArraySteps, call, failing(call))
    engine = Engine(MODEL)
    seqs = [
        engine.submit(Request(prompt, max_new_tokens=24 + number, seed=number, **SETTINGS["sampled"]))
        for number, prompt in enumerate(PROMPTS)
    ]

    def search() -> ForwardCoroutine[None]:
        cache = MODEL.new_cache()
        for token in range(6):
            yield from score(MODEL, Segment.chunk([token], cache))

    job = engine.enter(search())
    for _ in range(600):
        if job.finished and all(seq.finished for seq in seqs):
            break
        engine.step()
    assert job.error is None and [seq.tokens for seq in seqs] == expected
    assert left[0] < often, "nothing failed"


def calls(texts: int, *, steps: int = 4, lengths: tuple[int, ...] = (60,), **settings: Any) -> float:
    """Calls in one step of so many texts.

    lengths: how many tokens the texts write, in turns.
    """
    costs = 1.0 + 0.01 * np.arange(1024)
    engine = Engine(MODEL, detokenizer=Letters, pass_seconds=lambda context: costs)
    seqs = [
        engine.submit(Request([3, 1 + number % 60], max_new_tokens=length, seed=number, **settings))
        for number, length in zip(range(texts), cycle(lengths), strict=False)
    ]
    while any(seq.position < 3 for seq in seqs):
        engine.step()
    return counted_calls(engine.step, steps)


@pytest.mark.parametrize(
    ("name", "one", "many"),
    [
        ("greedy", 30, 100),
        ("truncated", 30, 100),
        ("auto", 90, 280),
        ("copies", 65, 450),
        ("copyspec", 65, 500),
        ("reported", 150, 300),
    ],
)
def test_a_step_is_few_calls(name: str, one: int, many: int) -> None:
    """Streams, trees and log-probabilities get calls for each text; without these 64 texts take as many as one."""
    settings = SETTINGS[name]
    assert calls(1, **settings) <= one
    assert calls(64, **settings) <= many


def test_texts_that_need_room_or_end_leave_the_others_in_arrays() -> None:
    """Each of 64 greedy texts gets room at 64 tokens; then two of them end, in two steps of 32."""
    assert calls(64, steps=92, lengths=(110,)) <= 150
    assert calls(64, steps=32, lengths=(*range(10, 12), *[60] * 30)) <= 220


def test_prices_are_few_calls() -> None:
    """What a step with drafts takes beside those of `test_a_step_is_few_calls` where prices are learned."""
    prices = PassPrices(PriorPrices(1.0, 0.01))

    def step() -> None:
        prices.learn(5, 1, 40.0, 1.1)
        prices.seconds(1, 40.0, 32)

    counted_calls(step, 300)
    assert counted_calls(step, 16) <= 60
