"""Sequential monitoring: a conversation judged as it grows, so that a goal split into harmless steps is noticed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.step.monitor import Prompt, Row
from decodery.step.sequence import Sequence

from .probed import Probed
from .turns import Turns


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    """turns: what was read; scores: of the conversation up to the end of each turn of the user's.

    apart: How far the state at the end of a turn was from those learned from, at most.
    """

    turns: Turns
    scores: tuple[float, ...] = ()
    apart: float = 0.0


@register(
    "sequential",
    paper="Monitoring Decomposition Attacks in LLMs with Lightweight Sequential Monitors (2025)",
    guarantee="read-only: the text is the one without it, until the action is taken",
    lossless=True,
    requirements=("a probe made by decodery train sequential",),
)
@dataclass(frozen=True)
class Sequential(Probed):
    """Scores a conversation by a probe on the model's own states at the end of every turn of the user's.

    The paper's judge is a prompted model; this one is the trainable kind of its family, and costs no token of its own:
    the prompt's own pass reads each turn once, with a probe evaluation per turn. Prompts are read whole.

    Attributes:
        view: "all" judges each turn with all before it; "last" is the last turn's score alone, without the latch.
        action: "stop" ends the answer after its first token.
        probe: A file or folder made by `decodery train sequential`, or a `Probe` of "prompt" rows: it judges all that
            was said so far. The score is the highest over the turns: a conversation that was above the threshold once
            stays there, whatever is said later, and since every request carries its conversation nothing is kept
            between requests.
    """

    waits = "states"
    pool = "prompt"
    made = "make one with `decodery train sequential -m MODEL CONVERSATIONS --out DIR`"
    view: Literal["all", "last"] = "all"
    action: Literal["flag", "stop"] = field(default="stop", kw_only=True)

    @property
    def requirements(self) -> Requirements:
        return Requirements(taps=(self.trained.site,), prompt_taps=True)

    def start(self, seq: Sequence) -> _State:
        return _State(Turns.of(seq, (self.trained.site,)))

    def read(self, state: _State, rows: Prompt) -> _State:
        turns = state.turns.read(rows)
        new = turns.found[len(state.scores) :]
        found = [self.trained.read_row(each[self.trained.site]) for each in new]
        scores, apart = [score for score, _ in found], [apart for _, apart in found]
        return _State(turns, (*state.scores, *scores), max((state.apart, *apart)))

    def unlike_training(self, state: _State) -> bool:
        return state.apart > self.trained.usual

    def observe(self, state: _State, row: Row) -> _State:
        return state

    def score(self, state: _State) -> float | None:
        if not state.scores:
            return None
        return max(state.scores) if self.view == "all" else state.scores[-1]
