"""Cautious next token prediction: several trials to the next punctuation mark where the model is unsure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from decodery.core.errors import SettingsError
from decodery.core.noise import mix
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.sampling.entropy import entropy

from .lookahead import LookaheadRule, Run, View


@register(
    "cntp",
    paper="Cautious Next Token Prediction (2025)",
    guarantee="lossy; most=1 is plain sampling; a trial that stays has the lowest perplexity of those drawn",
    texts=("punctuation",),
)
@dataclass(frozen=True)
class CNTP(LookaheadRule):
    """Draws more trials at higher entropy, each up to a punctuation mark, and keeps the most likely.

    The published settings go with temperature 0.8 and top-p 0.95. Extra: one pass per token of the longest trial, over
    the newest token of each; counted in the trace.

    Attributes:
        least, most: Trials at and below the entropy `low`, at and above `high`, in between in proportion; entropies are
            in nats, of the sampler's distribution as in the authors' code, or of the model's own (entropy="raw"). With
            one trial the token is the one plain sampling would draw. A trial ends with a token whose text ends in one
            of `punctuation`, with one of `stops` (ids, such as the authors' list), at the end of text or after `length`
            tokens, a bound that the paper does not have.
        low: Entropy in nats up to which there are `least` trials.
        high: Entropy in nats from which there are `most` trials.
        length: Most tokens of a trial; the paper has no bound.
        entropy: Of which distribution: the sampler's ("warped", as in the authors' code) or the model's own ("raw").
        perplexity: Under the sampler's distribution or the model's own.
        punctuation: A trial ends with a token whose text ends in one of these characters.
        stops: Token ids that end a trial too, such as those of the authors' list.
    """

    least: int = 1
    most: int = 10
    low: float = 0.01
    high: float = 1.5
    length: int = 32
    entropy: Literal["warped", "raw"] = "warped"
    perplexity: Literal["warped", "raw"] = "warped"
    punctuation: str = ".,\n?!:;)]}"
    stops: tuple[int, ...] = ()

    requirements = Requirements(trees=True, chance=True)

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most or not self.low < self.high or self.length < 1:
            raise SettingsError("cntp needs 1 <= least <= most, low < high and length >= 1")
        if {self.entropy, self.perplexity} - {"warped", "raw"}:
            raise SettingsError("the entropy and the perplexity of cntp are warped or raw")

    def trials(self, nats: float) -> int:
        """How many trials an entropy asks for."""
        share = min(max((nats - self.low) / (self.high - self.low), 0.0), 1.0)
        return math.floor(self.least + (self.most - self.least) * share)

    def decide(self, view: View, node: int) -> Run:
        seq, laws = view.seq, view.laws
        number = 1
        if self.most > 1:
            rows = laws.row(node)[None].float() if self.entropy == "raw" else laws.rows([node])
            number = self.trials(float(entropy(rows.log_softmax(dim=-1))))
        if number == 1:
            return (laws.picks([node])[0],)
        # Noise of their own, so that what was discarded tells nothing of what is drawn later.
        seeds = [mix(seq.request.seed, laws.position(node), trial) for trial in range(number)]
        drawn = [self._trial(view, node, seed) for seed in seeds]
        if any(score is None for _, score in drawn):
            # The trial that stays is text, so all of it has to be in the pass that decides.
            view.ask(node, [run if score is None else run[:-1] for run, score in drawn])
        best, _ = max(drawn, key=lambda pair: -math.inf if pair[1] is None else pair[1])
        return best

    def _trial(self, view: View, node: int, seed: int) -> tuple[Run, float | None]:
        """The trial drawn with noise of `seed` and its mean log-probability, None while it is not at its end."""
        run: Run = ()
        total = 0.0
        most = min(self.length, view.room - len(view.tree.path(node)))
        while not run or (len(run) < most and not self._ends(view, run[-1])):
            found = view.next(node, run, seed, raw=self.perplexity == "raw")
            if found is None:
                return run, None
            run, total = (*run, found[0]), total + found[1]
        return run, total / len(run)

    def _ends(self, view: View, token: int) -> bool:
        if token in view.seq.request.eos_ids or token in self.stops:
            return True
        if view.seq.request.detokenizer is None:
            return False
        stream = view.seq.request.detokenizer()
        return (stream.push([token]) + stream.finish()).endswith(tuple(self.punctuation))
