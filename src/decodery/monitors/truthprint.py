"""TruthPrInt: a probe on every token's hidden state, and another branch where it finds what looks made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.step.detokenizer import Detokenizer
from decodery.step.monitor import Action, Rollback, Row, Stop
from decodery.step.sequence import Sequence

from .probed import Probed

_BOUNDARIES = frozenset(".,;:!?\n")


@dataclass(frozen=True, slots=True)
class _Trial:
    """A phrase that is tried in other ways.

    Attributes:
        place: Where it begins.
        original: Its tokens.
        others: First tokens that are left to try.
        settled: Nothing before this position is questioned again.
    """

    place: int
    original: tuple[int, ...]
    others: tuple[int, ...]
    settled: int


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    """window: the last tokens and their most likely rivals; value: of the newest token; trial: what is in progress.

    apart: How far the newest row is from those learned from.
    """

    pieces: Callable[[], Detokenizer] | None
    position: int = -1
    window: tuple[tuple[int, tuple[int, ...]], ...] = ()
    value: float | None = None
    apart: float = 0.0
    trial: _Trial | None = None


@register(
    "truthprint",
    paper="TruthPrInt: Mitigating LVLM Object Hallucination Via Latent Truthful-Guided Pre-Intervention (2025)",
    guarantee="with threshold=1 the text without it; else where the probe objects another branch is written, lossy",
    requirements=("a probe made by decodery train probe --rows new",),
)
@dataclass(frozen=True)
class TruthPrInt(Probed):
    """Scores tokens by a probe on hidden states, and tries other phrases where the score is high.

    The first phrase it lets pass stays, and if it lets none pass the original one, which is not questioned again. So
    the text always ends: no more than `tries` + 1 times its tokens are taken back. The text side alone; the policy is
    this package's, the paper's code is not public.

    Attributes:
        most: Tokens that are taken back at most.
        tries: Other phrases that are tried.
        share: Share of the largest probability that another first token needs.
        probe: A file or folder made by `decodery train probe --rows new`, or a `Probe`. Above the threshold the text
            goes back to the beginning of the phrase, after the last punctuation mark or `most` tokens at most, and goes
            on with the most likely other first token, of at least `share` of the largest probability; with the next one
            where the probe objects again within as many tokens, up to `tries` of them.
    """

    pool = "new"
    made = "make one with `decodery train probe -m MODEL QUESTIONS --rows new --out DIR`"
    most: int = 8
    tries: int = 3
    share: float = 0.05
    action: Literal["flag", "stop", "rollback"] = field(default="rollback", kw_only=True)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.most <= 64 or not 1 <= self.tries <= 15 or not 0 <= self.share <= 1:
            raise SettingsError("truthprint takes back 1 to 64 tokens (most), tries 1 to 15, share from 0 to 1")

    @property
    def requirements(self) -> Requirements:
        return Requirements(taps=(self.trained.site,), keys=self.action == "rollback")

    @property
    def rollback_tokens(self) -> int:
        return self.most if self.action == "rollback" else 0

    def start(self, seq: Sequence) -> _State:
        return _State(seq.request.detokenizer)

    def observe(self, state: _State, row: Row) -> _State:
        value, apart = self.trained.read_row(row.hidden[self.trained.site])
        rivals: tuple[int, ...] = ()
        if self.rollback_tokens:
            ids, values = row.most_likely(self.tries + 1)
            near = ids[np.exp(values - values[0]) >= self.share]
            rivals = tuple(token for token in near.tolist() if token != row.token)[: self.tries]
        trial, window = state.trial, state.window
        if trial is not None and row.position >= trial.settled:
            # Nothing was found in as many tokens as the phrase had: this one stays, and is not gone back to.
            trial, window = None, ()
        window = (*window, (row.token, rivals))[-self.most :]
        return replace(state, position=row.position, window=window, value=value, apart=apart, trial=trial)

    def unlike_training(self, state: _State) -> bool:
        return state.apart > self.trained.usual

    def score(self, state: _State) -> float | None:
        return state.value

    def act(self, state: _State) -> Action | None:
        if self.action != "rollback":
            return Stop() if self.action == "stop" else None
        trial = self._trial(state)
        if trial is None:
            return None
        back = state.position + 1 - trial.place
        return Rollback(back, write=trial.others[:1] or trial.original)

    def resume(self, before: _State, after: _State) -> _State:
        trial = self._trial(after)
        assert trial is not None
        # Once the original is written again, there is nothing left to try up to its end.
        return replace(
            before, trial=replace(trial, others=trial.others[1:], original=trial.original * bool(trial.others))
        )

    def _trial(self, state: _State) -> _Trial | None:
        """The phrase to try again from its beginning; None where the newest token is to stay."""
        if state.trial is not None:
            return state.trial if state.trial.original else None
        phrase = list(state.window)
        while len(phrase) > 1 and self._begins(state, phrase):
            phrase.pop(0)
        place = state.position + 1 - len(phrase)
        rivals = phrase[0][1]
        if not rivals:
            return None
        return _Trial(place, tuple(token for token, _ in phrase), rivals, state.position + 1)

    def _begins(self, state: _State, phrase: list[tuple[int, tuple[int, ...]]]) -> bool:
        """Whether a boundary lies within the phrase before its last token."""
        if state.pieces is None:
            return False
        return any(_BOUNDARIES & set(state.pieces().push([token])) for token, _ in phrase[:-1])
