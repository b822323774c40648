"""Beam search over steps: of several continuations of the best texts so far the best are continued."""

from __future__ import annotations

from dataclasses import dataclass

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence

from .pool import require_count
from .step_nodes import Node, distinct
from .steps import Growth, StepSearch


@register(
    "step-beam",
    paper="Scaling LLM Test-Time Compute Optimally can be More Effective than Scaling Model Parameters (2024)",
    guarantee="n=1, m=1 is plain decoding, and rounds=1 best-of-n; none on quality",
    requirements=("a scorer of beginnings and answers",),
    texts=("delimiter", "pattern"),
)
@dataclass(frozen=True)
class StepBeam(StepSearch):
    """Beam search over steps: keeps the best n / m texts and draws m next steps after each.

    A text whose score fails is left. Memory: what the kept texts do not have in common.

    Attributes:
        n: Texts judged in a round.
        m: Continuations of each that is kept. A text that ends leaves the beam with its worth; it ends with the first n
            of them, or when nothing is left to continue. Where fewer than n / m are left they share the n
            continuations. Of equal texts one is kept; of equal worth the one that was begun first. The other settings
            are those of all searches over steps: scorer, of beginnings and answers; delimiter, text or token ids that
            end a step and belong to it, with something before it; step_tokens and rounds, tokens of a step and steps of
            a text at most, the last step going on to the text's end; aggregate, how the scores of its steps make a
            text's worth: last, min, prod or mean.
        choose: Best returns the texts by worth, vote one for each of their answers, found as weighted-vote finds them
            (answer, pattern).
    """

    n: int = 16
    m: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("step-beam", "n", self.n)
        require_count("step-beam", "m", self.m)
        if self.m > self.n:
            raise SettingsError(f"step-beam draws m={self.m} continuations of a text in n={self.n}: give an m up to n")

    def follow(self, growth: Growth) -> ForwardCoroutine[list[Sequence]]:
        beam, ended = [growth.root], list[Node]()
        while beam and len(ended) < self.n:
            shared = [beam[number % len(beam)] for number in range(self.n)]
            candidates = yield from self.candidates(growth, shared)
            ended += [node for node in candidates if node.finished]
            going = sorted((node for node in candidates if not node.finished), key=lambda node: -self.worth(node))
            beam = going[: max(self.n // self.m, 1)]
            growth.settle([*ended, *beam])
        return (yield from growth.finish(ended))

    def candidates(self, growth: Growth, parents: list[Node]) -> ForwardCoroutine[list[Node]]:
        """Continuations of these texts, judged, no two of them equal."""
        children = yield from growth.extend(parents)
        return (yield from growth.judge(distinct(children)))
