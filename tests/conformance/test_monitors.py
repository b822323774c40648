"""The laws of monitors: what they see, what they leave alone, and that drafts change nothing under them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from decodery.core.requirements import Requirements
from decodery.engine import monitoring as watch
from decodery.engine.engine import Engine
from decodery.engine.monitoring import TextMonitors, monitor_states
from decodery.engine.request import Request
from decodery.models.hooks import Intervention
from decodery.monitors.confidence import Confidence
from decodery.monitors.context_awareness import ContextAwareness
from decodery.sampling.sampler import Sampler
from decodery.step.monitor import Action, Monitor, Prompt, Rollback, Row
from decodery.step.sequence import Sequence
from decodery.testing import LawBroken, check_identical, decode, tiny_transformer, to_int8
from decodery.testing.drafters import Garbage, Oracle
from methods import DRAFTERS, MONITORS, READING

MODEL = tiny_transformer(0)
EXACT = to_int8(MODEL)
PROMPTS = [np.random.default_rng(seed).integers(0, 64, n).tolist() for seed, n in ((1, 31), (2, 9))]
SAMPLED = Sampler.from_settings(temperature=1.0)
TAPS = ("embed", 1, "head_out.0", "mlp_out.1", "final_norm", "logits")


@dataclass(frozen=True)
class Seen(Monitor):
    """Keeps all that it is shown."""

    prompt: bool = True

    @property
    def requirements(self) -> Requirements:
        return Requirements(taps=TAPS[:4] if self.prompt else TAPS, prompt_taps=self.prompt)

    def start(self, seq: Sequence) -> Any:
        return ()

    def read(self, state: Any, rows: Prompt) -> Any:
        kept = {tap: found.clone() for tap, found in rows.hidden.items()}
        return (
            *state,
            *((token, {tap: found[at] for tap, found in kept.items()}) for at, token in enumerate(rows.tokens)),
        )

    def observe(self, state: Any, row: Row) -> Any:
        return (
            *state,
            (row.token, {"row": row.logits.clone()} | {tap: each.clone() for tap, each in row.hidden.items()}),
        )

    def score(self, state: Any) -> float | None:
        return float(len(state))


def seen(text: Sequence) -> list[Any]:
    return list(monitor_states(text)[-1])


def test_they_see_committed_rows_alone_and_change_no_bit() -> None:
    for prompt in (True, False):
        plain = decode(EXACT, PROMPTS)
        alone = decode(EXACT, PROMPTS, monitors=[Seen(prompt=prompt)], together=False)
        for number, (free, watched) in enumerate(zip(plain, alone, strict=True)):
            assert watched.generated == free.generated
            oracle = Oracle((*free.tokens[:-9], 3, *free.tokens[-8:]))
            others = [
                *(
                    decode(
                        EXACT,
                        PROMPTS[number : number + 1],
                        drafter=drafter,
                        prefill_chunk=7,
                        monitors=[Seen(prompt=prompt)],
                    )[0]
                    for drafter in (oracle, Garbage(), "token-recycling:nodes=12")
                ),
                decode(EXACT, PROMPTS, monitors=[Seen(prompt=prompt)])[number],
            ]
            for other in others:
                assert other.generated == free.generated and len(seen(other)) == len(seen(watched))
                for (token, found), (wanted, expected) in zip(seen(other), seen(watched), strict=True):
                    assert token == wanted and all(found[tap].equal(expected[tap]) for tap in expected)


@dataclass(frozen=True)
class Turning(Monitor):
    """Turns a change of rows on and off, whenever a token of some kind is written."""

    site: Any = 1
    always: bool = False

    @property
    def requirements(self) -> Requirements:
        return Requirements(changes=True)

    def start(self, seq: Sequence) -> Any:
        return self.always

    def observe(self, state: Any, row: Row) -> Any:
        return state ^ (row.token % 3 == 0)

    def score(self, state: Any) -> float | None:
        return float(state)

    def steering(self, state: Any) -> Any:
        return True if state else None

    def changes(self, steering: Any) -> tuple[Intervention, ...]:
        return (Intervention(self.site, lambda rows, segment: rows + 0.5 * rows.flip(-1)),)


@dataclass(frozen=True)
class Returning(Monitor):
    """Takes two or three tokens back where one of some kind is written, and has them written otherwise."""

    threshold: float | None = 0.5

    @property
    def requirements(self) -> Requirements:
        return Requirements(keys=True)

    @property
    def rollback_tokens(self) -> int:
        return 3

    def start(self, seq: Sequence) -> Any:
        return ()

    def observe(self, state: Any, row: Row) -> Any:
        return (*state, row.token)

    def score(self, state: Any) -> float | None:
        return float(len(state) >= 3 and state[-1] % 4 == 0)

    def act(self, state: Any) -> Action | None:
        back = 2 + len(state) % 2
        return Rollback(back, ban=(state[-back],))


ACTING: dict[str, Monitor] = {
    "switch": Turning(),
    "switch at the embeddings": Turning("embed", always=True),
    "always": Turning("head_out.1", always=True),
    "switch at the logits": Turning("logits"),
    "switch at the attention": ContextAwareness(layer=1, alpha=0.05, steer=(0,), action="switch"),
    "rollback": Returning(),
    "stop": Confidence("worst", threshold=5.5, action="stop"),
    "regenerate": Confidence("worst", threshold=5.5, action="regenerate"),
}


def check(monitor: Monitor, *drafters: str, prompts: list[list[int]] = PROMPTS) -> list[Sequence]:
    """Plain decoding under a monitor, and that drafts, batches, chunks and a preemption give the same."""
    settings: dict[str, Any] = {"sampler": SAMPLED, "monitors": [monitor], "max_new_tokens": 16}
    plain = decode(EXACT, prompts, together=False, **settings)
    for name in drafters:
        drafter = DRAFTERS[name](MODEL)
        check_identical(EXACT, prompts, drafter=drafter, plain=plain, tested="drafted", seeds=(0,), **settings)
    for text, found in zip(plain, decode(EXACT, prompts, prefill_chunk=7, **settings), strict=True):
        if found.tokens != text.tokens:
            raise LawBroken("in chunks and in a batch the text is another one")
        for layer in range(2):
            assert all(a.equal(b) for a, b in zip(found.cache.view(layer), text.cache.view(layer), strict=True))
    return plain


ALL = ("jacobi", "draft-model", "eagle-3", "kangaroo", "del", "token-recycling")


def test_every_registered_monitor_keeps_the_law() -> None:
    free = decode(EXACT, PROMPTS, sampler=SAMPLED, max_new_tokens=16)
    for name, monitor in MONITORS.items():
        plain = check(monitor, "token-recycling")
        assert ([text.tokens for text in plain] == [text.tokens for text in free]) == (name in READING), name


@pytest.mark.parametrize("name", ACTING)
def test_drafts_give_the_text_of_plain_decoding_under_an_action(name: str) -> None:
    free = decode(EXACT, PROMPTS, sampler=SAMPLED, max_new_tokens=16)
    drafters = {"switch": ALL, "rollback": ALL[:3]}.get(name, ALL[2:3])
    plain = check(ACTING[name], *drafters, prompts=PROMPTS[1:] if name == "rollback" else PROMPTS)
    assert [text.generated for text in free] != [text.generated for text in plain]
    if name == "stop":
        assert {text.finish_reason for text in plain} == {"content_filter"}
        assert [text.generated == whole.generated[: text.position] for text, whole in zip(plain, free, strict=True)]


def test_the_law_catches_watches_that_break_it(monkeypatch: pytest.MonkeyPatch) -> None:
    see, within = TextMonitors.see, watch._within
    with monkeypatch.context() as patch, pytest.raises(LawBroken):
        # What was drafted after a switch was scored without it.
        patch.setattr(TextMonitors, "see", lambda self, *args: see(self, *args) and False)
        check(ACTING["switch"], *ALL)
    with monkeypatch.context() as patch, pytest.raises(AssertionError):
        # From now on, and for what was read before as well.
        patch.setattr(watch, "_within", lambda change, start, end: within(change, 0, end))
        texts = [engine_text(ACTING["switch"], again) for again in (False, True)]
        assert texts[0] == texts[1]
    assert engine_text(ACTING["switch"], False) == engine_text(ACTING["switch"], True)


def engine_text(monitor: Monitor, preempted: bool) -> list[int]:
    """A text under a monitor that gives its memory back in the middle, or does not."""
    engine = Engine(EXACT)
    seq = engine.submit(Request(PROMPTS[0], 16, SAMPLED, monitors=[monitor, Seen()]))
    places = {4, 9} if preempted else set()
    while not seq.finished:
        engine.step()
        if seq.position in places:
            places.remove(seq.position)
            engine.preempt(seq)
    assert engine.preemptions >= 2 * preempted and len(seen(seq)) == len(seq.tokens)
    return seq.generated
