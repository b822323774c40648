"""AdaDec: greedy decoding that pauses where the model is unsure, and looks a few tokens ahead."""

from __future__ import annotations

import math
from dataclasses import dataclass

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.core.topk import topk
from decodery.sampling.entropy import entropy

from .lookahead import LookaheadRule, Run, View


@register(
    "adadec",
    paper="Towards Better Code Generation: Adaptive Decoding with Uncertainty Guidance (2025)",
    guarantee="lossy and deterministic; tau=inf and length=0 are greedy decoding",
)
@dataclass(frozen=True)
class AdaDec(LookaheadRule):
    """Above an entropy threshold, reranks the most likely tokens by a lookahead's log-probability.

    What was read on the way costs no further pass where decoding goes on along it. Extra: up to `length` passes per
    pause, of up to 1 + width * length rows; counted in the trace.

    Attributes:
        tau: The threshold, in nats, of the model's own distribution; `decodery train adadec-thresholds` learns a
            model's (the default is SmolLM2-135M-Instruct's, from HumanEval's solutions; the authors' are 0.6 to 1.3).
        width: Candidates.
        length: Tokens that each is followed greedily, at most.
        stops: Token ids that end such a run early, as the end of text does.
    """

    tau: float = 0.742
    width: int = 3
    length: int = 5
    stops: tuple[int, ...] = ()

    requirements = Requirements(trees=True, greedy=True, law=True)

    def __post_init__(self) -> None:
        if math.isnan(self.tau) or self.width < 1 or self.length < 0:
            raise SettingsError("adadec needs a tau in nats (inf never pauses), width >= 1 and length >= 0")

    def decide(self, view: View, node: int) -> Run:
        if self.tau == math.inf or uncertainty(view, node) < self.tau:
            return (view.laws.picks([node])[0],)
        law = view.laws.rows([node]).log_softmax(dim=-1)
        ids, logprobs = topk(law, self.width)
        scored = [
            self._read_on(view, node, token, logprob)
            for token, logprob in zip(ids[0].tolist(), logprobs[0].tolist(), strict=True)
            if logprob > -math.inf
        ]
        view.ask(node, [run for run, score in scored if score is None])
        best, _ = max(scored, key=lambda pair: -math.inf if pair[1] is None else pair[1])
        return best[:1]

    def _read_on(self, view: View, node: int, token: int, logprob: float) -> tuple[Run, float | None]:
        """A candidate with its greedy continuation, and their mean log-probability once that is read to its end."""
        run: Run = (token,)
        ends = view.seq.request.eos_ids.union(self.stops)
        most = min(self.length + 1, view.room - len(view.tree.path(node)))
        while len(run) < most and run[-1] not in ends:
            found = view.next(node, run, view.seq.request.seed)
            if found is None:
                return run, None
            run, logprob = (*run, found[0]), logprob + found[1]
        return run, logprob / len(run)


def uncertainty(view: View, node: int) -> float:
    """Entropy, in nats, of the model's own distribution after `node`."""
    return float(entropy(view.laws.row(node)[None].float().log_softmax(dim=-1)))
