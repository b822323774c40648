"""How tasks share passes: what a search spawns counts as its own work, and whoever asks for little waits for little."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch

from decodery.core.errors import SettingsError
from decodery.core.ledger import charged
from decodery.engine.engine import Engine
from decodery.engine.pace import Pace
from decodery.engine.request import Request
from decodery.engine.schedule import Limits
from decodery.engine.share import Beside, PassBudget, divided, fair, most_nodes
from decodery.engine.task import CoroutineTask, SchedulerEntry
from decodery.models.batch import Segment
from decodery.sampling.sampler import Sampler
from decodery.search.base import Search
from decodery.search.beam import Beam
from decodery.search.best_of_n import BestOfN
from decodery.search.smc import SMC
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.step.forward_request import ForwardCoroutine, ForwardRequest, gather, off_loop, run_sync
from decodery.step.scorer import Candidates, Scorer
from decodery.step.segment_end import SegmentEnd
from decodery.step.sequence import Sequence
from decodery.testing import decode, tiny_transformer, to_int8
from decodery.testing.models import Counted

MODEL = to_int8(tiny_transformer(0))
PROMPT = [(7 * token + 3) % 64 for token in range(20)]
ROWS = 16
WIDE: dict[str, tuple[Search, Sampler]] = {
    "best-of-n": (BestOfN("log-probability(of=sum)", n=64), Sampler.from_settings(temperature=1.0)),
    "beam": (Beam(width=64), Sampler.from_settings()),
    "smc": (SMC(64, 8), Sampler.from_settings(temperature=1.0)),
}


def begin(engine: Engine, search: Search, sampler: Sampler, owner: str = "wide", **settings: object) -> object:
    request = Request([1, 2, 3], sampler=sampler, max_new_tokens=24, cache_namespace=owner, **settings)  # type: ignore[arg-type]
    return engine.enter(search.find(engine, request), owner=owner)


def steps_until(engine: Engine, done: Callable[[], bool]) -> int:
    steps = 0
    while not done():
        engine.step()
        steps += 1
        assert steps < 1000
    return steps


@pytest.mark.parametrize("name", WIDE)
def test_a_wide_search_is_slow_for_itself_alone(name: str) -> None:
    model = Counted(MODEL)
    engine = Engine(model, limits=Limits(rows=ROWS))
    search = begin(engine, *WIDE[name])
    for _ in range(12):
        engine.step()
    begun = len(model.rows)
    text = engine.submit(Request(PROMPT, max_new_tokens=4, cache_namespace="other"))
    # Half of every pass is the other owner's: the prompt takes three passes, and each token one.
    assert steps_until(engine, lambda: bool(text.generated)) <= 4
    assert steps_until(engine, lambda: text.finished) <= 4
    assert len(model.rows) - begun <= 8
    assert not search.finished and max(model.rows) <= ROWS
    assert text.generated == decode(MODEL, [PROMPT], max_new_tokens=4)[0].generated


def test_owners_share_alike_however_many_searches_one_of_them_has() -> None:
    engine = Engine(Counted(MODEL), limits=Limits(rows=ROWS))
    searches = [begin(engine, *WIDE["best-of-n"]) for _ in range(12)]
    for _ in range(20):
        engine.step()
    text = engine.submit(Request(PROMPT, max_new_tokens=4, cache_namespace="other"))
    assert steps_until(engine, lambda: text.finished) <= 8
    assert not any(search.finished for search in searches)


def test_passes_of_draft_models_count_as_work() -> None:
    draft, model = Counted(to_int8(tiny_transformer(1))), Counted(MODEL)
    engine = Engine(model, limits=Limits(rows=ROWS))
    sampler = Sampler.from_settings(temperature=1.0)
    search = begin(engine, BestOfN("log-probability(of=sum)", n=4), sampler, drafter=DraftModel(draft))  # type: ignore[arg-type]
    for _ in range(4):
        engine.step()
    text = engine.submit(Request(PROMPT, max_new_tokens=4, cache_namespace="other"))
    target, side = len(model.rows), len(draft.rows)
    steps = steps_until(engine, lambda: text.finished)
    assert steps <= 8 and max(*model.rows, *draft.rows) <= ROWS
    assert len(model.rows) - target <= steps and 0 < sum(draft.rows[side:]) <= ROWS * steps
    assert not search.finished


def test_a_pass_is_shared_by_time_as_well() -> None:
    """A search gets as few rows beside others as fit into the time of a pass, and all of them alone."""
    model = Counted(MODEL)
    engine = Engine(model, limits=Limits(rows=64, seconds=1e-9))
    search = begin(engine, *WIDE["best-of-n"])
    for _ in range(4):
        engine.step()
    assert max(model.rows) == 64
    begun = len(model.rows)
    text = engine.submit(Request(PROMPT, max_new_tokens=6, cache_namespace="other"))
    steps_until(engine, lambda: text.finished)
    # What it had asked for before may fill the first one.
    assert not search.finished and max(model.rows[begun + 1 :]) <= 16 + 16


def test_passes_of_searches_alone_are_short_where_texts_were_measured() -> None:
    engine = Engine(MODEL, limits=Limits(rows=512, seconds=1.0))
    budget = engine._schedule.budget
    for name in ("beam", "smc"):
        begin(engine, *WIDE[name])
    engine.step()
    budget.wide = Pace()
    budget.wide.learn(100, 1000, 1.0)
    runs = engine._schedule.runs
    unbounded = budget.share(runs[0], runs)
    budget.learn(0, 1, 10, 0.05)
    assert budget.share(runs[0], runs) == pytest.approx(unbounded * 6 * 0.05, rel=0.1)


@pytest.mark.parametrize("rows", [1, 5])
def test_rows_change_no_text(rows: int) -> None:
    sampler, found = Sampler.from_settings(temperature=1.0), []
    for limits in (Limits(rows=rows), Limits()):
        engine = Engine(MODEL, limits=limits)
        searches = [begin(engine, each, sampler) for each in (BestOfN("log-probability(of=sum)", n=7), SMC(7, 8))]
        text = engine.submit(Request(PROMPT, max_new_tokens=12))
        engine.run([*searches, text])
        found.append([[seq.generated for seq in search.result] for search in searches] + [text.generated])
    assert found[0] == found[1]


def test_parts_are_max_min_fair() -> None:
    assert divided([1, 100, 3], 20) == [1, 16, 3]
    assert divided([100, 100], 21) == [10, 11] and sum(divided([5] * 3, 2)) == 2
    assert divided([4, 4], 100) == [4, 4] and divided([], 3) == []
    assert fair(["a"] * 9 + ["b"], [10] * 10, 18) == [1] * 9 + [9]


def test_texts_are_taken_apart_only_for_an_ask_that_has_its_rows() -> None:
    """A search asks for more rows than there are beside texts in arrays, and saves for some passes."""
    budget = PassBudget(32, 1.0, 32)
    tasks = [CoroutineTask(probe()) for _ in range(9)]
    wide, *texts = [SchedulerEntry(task, owner=str(number)) for number, task in enumerate(tasks)]
    wide.requests = next(wide.task.coroutine)
    wide.results = [None]
    assert [budget.places([(wide, [0])], texts, 8) for _ in range(2)] == [[], None]
    assert budget.places([(wide, [0])]) == [(wide, 0)]


def probe(rows: int = 30) -> ForwardCoroutine[None]:
    """Asks for so many rows."""
    while True:
        yield [ForwardRequest(MODEL, Segment(np.arange(rows), np.arange(rows)))]


@pytest.mark.parametrize(("texts", "each"), [(["a"] * 40, 1.0), (["b"] * 40, 1.0), (["b"] * 3 + ["c"] * 2, 0.25)])
def test_a_search_gets_what_a_text_gets_however_dear_its_rows_are(texts: list[str], each: float) -> None:
    """An owner with twelve searches gets no more for them than the owner with the most texts for these."""
    budget = PassBudget(256, 1.0, 64)
    for rows in (0, 16, 16, 16):
        budget.learn(rows, 40, 400, 1.0 + 100 * rows)
    assert budget._beside.rows < 0.01
    writers = [SchedulerEntry(CoroutineTask(probe()), owner=owner) for owner in texts]
    searches = [SchedulerEntry(CoroutineTask(probe(3)), owner="a") for _ in range(12)]
    for run in searches:
        run.requests, run.results = next(run.task.coroutine), [None]
    had, passes = Counter[int](), 1600
    for _ in range(passes):
        for run, _ in budget.places([(run, [0]) for run in searches], writers, len(writers)) or []:
            had[id(run)] += 3
            run.served = had.total()
    shares = [had[id(run)] / passes for run in searches]
    # One pass of sixteen has no search, so that the time of texts alone is known.
    assert min(shares) == pytest.approx(each * 15 / 16, rel=0.1) == max(shares)


def passes_to_restore() -> int:
    """Passes in which a search beside six texts reads again what was taken from it, where its rows are dear."""
    engine = Engine(MODEL, limits=Limits(rows=256, seconds=1.0))
    engine._schedule.budget._beside.rows = 0.0
    texts = [engine.submit(Request(PROMPT[: 4 + n], max_new_tokens=200)) for n in range(6)]
    search = begin(engine, BestOfN("log-probability(of=sum)", n=4), Sampler.from_settings(temperature=1.0))
    for _ in range(60):
        engine.step()
    (run,) = (run for run in engine._schedule.runs if run.task is search)
    engine.preempt(search)
    passes = steps_until(engine, lambda: run.restored)
    assert not any(text.finished for text in texts)
    return passes


def test_what_was_taken_from_a_search_is_read_like_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """By rows that it saves for, one per pass, it would take as long as what it had done."""
    monkeypatch.setattr(Beside, "learn", lambda *_: None)
    passes = passes_to_restore()
    assert passes <= 8
    monkeypatch.setattr(PassBudget, "_next_restored", lambda *_: None)
    assert passes_to_restore() > 3 * passes


def test_more_texts_at_a_time_than_a_task_may_have_are_refused() -> None:
    for name, (search, sampler) in WIDE.items():
        engine = Engine(MODEL, limits=Limits(branches=63))
        with pytest.raises(SettingsError, match="has 64 texts written at a time, and may have 63: ask for fewer"):
            engine.finish(search.find(engine, Request([1, 2], sampler=sampler, max_new_tokens=8)))
        assert search.texts_at_once == 64, name


class Held(Scorer):
    """Waits until it is let go; then longer texts are better."""

    def __init__(self) -> None:
        self.begun, self.go, self.threads = threading.Event(), threading.Event(), set[str]()

    def score(self, candidates: Candidates) -> torch.Tensor:
        self.threads.add(threading.current_thread().name)
        self.begun.set()
        assert self.go.wait(60), "nobody went on while this waited"
        charged().counts["waited"] = 1
        return torch.tensor([float(len(output)) for output in candidates.outputs])


def test_a_scorer_that_waits_holds_up_nobody_else() -> None:
    engine, scorer = Engine(MODEL), Held()
    search = begin(engine, BestOfN(scorer, n=3), Sampler.from_settings(temperature=1.0))
    steps_until(engine, scorer.begun.is_set)
    text = engine.submit(Request(PROMPT, max_new_tokens=12))
    engine.run([text])
    assert text.generated == decode(MODEL, [PROMPT], max_new_tokens=12)[0].generated
    assert not search.finished
    # A step that has nothing but this to wait for comes back, so that others can be let in.
    assert engine.step() == [search] and engine.rows == 0
    engine.preempt(search)
    engine.step()
    scorer.go.set()
    engine.run([search])
    assert threading.current_thread().name not in scorer.threads
    assert search.result[0].trace.ledger.counts["waited"] == 1 and len(search.result) == 3


def test_a_search_is_cancelled_while_its_scorer_waits() -> None:
    engine, scorer = Engine(MODEL), Held()
    search = begin(engine, BestOfN(scorer, n=3), Sampler.from_settings(temperature=1.0))
    steps_until(engine, scorer.begun.is_set)
    search.cancel()
    text = engine.submit(Request(PROMPT, max_new_tokens=4))
    scorer.go.set()
    engine.run([text])
    assert search.result is None and len(text.generated) == 4


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3)])
def test_what_a_blocking_function_raises_ends_its_task(error: BaseException) -> None:
    def fails() -> None:
        raise error

    engine = Engine(MODEL)
    text, job = engine.submit(Request(PROMPT, max_new_tokens=4)), engine.enter(off_loop(fails))
    engine.run([text])
    with pytest.raises((ValueError, RuntimeError), match=r"^no$|SystemExit: 3"):
        engine.run([job])


def test_blocking_functions_return_anything_in_order() -> None:
    def several() -> ForwardCoroutine[list[object]]:
        return (yield from gather([off_loop(lambda value=value: value) for value in (None, 2, [])]))  # type: ignore[misc]

    assert Engine(MODEL).finish(several()) == run_sync(several()) == [None, 2, []]


def test_what_is_shared_is_used_on_one_thread_at_a_time() -> None:
    inside, most, lock = [0], [0], threading.Lock()

    def enters() -> None:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        threading.Event().wait(0.01)
        with lock:
            inside[0] -= 1

    engine = Engine(MODEL)
    engine.run([engine.enter(off_loop(enters, lock)) for _ in range(6)])
    assert most == [1]


def test_evil_patterns_hold_up_nobody_else() -> None:
    from decodery.search.self_consistency import SelfConsistency

    engine = Engine(MODEL)
    evil = SelfConsistency(2, pattern="((.|\n)+)+éé")
    search = begin(engine, evil, Sampler.from_settings(temperature=1.0))
    first: list[Sequence] = []
    while not any(run.blocked for run in engine._schedule.runs):
        engine.step()
        assert not search.finished
    first.append(engine.submit(Request(PROMPT, max_new_tokens=12)))
    engine.run(first)
    assert not search.finished
    with pytest.raises(SettingsError, match=r"takes more than 1 s; simplify it"):
        engine.run([search])


class Waits(SegmentEnd):
    """Ends no segment, and finds that out once `answers` is set."""

    def __init__(self) -> None:
        self.answers, self.known = threading.Event(), 0

    def question(self, seq: Sequence) -> Callable[[], object] | None:
        return None if self.known == len(seq.tokens) else lambda: self._find(len(seq.tokens))

    def _find(self, length: int) -> None:
        assert self.answers.wait(60)
        self.known = length

    def __call__(self, seq: Sequence) -> bool:
        assert self.known == len(seq.tokens), "not asked before"
        return False


@pytest.mark.parametrize("drafter", [None, "prompt-lookup"])
def test_ends_of_segments_hold_up_nobody_else(drafter: str | None) -> None:
    """They are found out beside the loop after every token, drafted ones included, and no token changes."""
    (plain,) = decode(MODEL, [PROMPT], max_new_tokens=12)
    engine, ends = Engine(MODEL), Waits()
    seq = engine.submit(Request(PROMPT, max_new_tokens=12, drafter=drafter))
    seq.segment_end = ends
    other = engine.submit(Request(PROMPT, max_new_tokens=12))
    engine.run([other])
    assert seq.position <= 1
    ends.answers.set()
    engine.run([seq])
    assert seq.tokens == other.tokens == plain.tokens


def test_a_fork_belongs_to_the_owner_of_its_text() -> None:
    engine = Engine(MODEL)
    text = engine.submit(Request([1, 2, 3], max_new_tokens=8, cache_namespace="one"))
    engine.step()
    engine.fork(text)
    schedule = engine._schedule
    assert [run.owner for run in (*schedule.runs, *schedule._waiting)] == ["one", "one"]


def test_rows_are_kept_for_what_a_drafter_proposes() -> None:
    engine = Engine(MODEL)
    drafter = PromptLookup(length=3)
    text = engine.submit(Request([1, 2, 3], drafter=drafter, max_draft_tokens=10))
    assert most_nodes(SchedulerEntry(text)) == 3
