"""Look-ahead: a search over steps whose texts are judged by where they lead, a few steps further on."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace

from decodery.core.errors import SettingsError
from decodery.core.ledger import count
from decodery.core.registry import register, resolve
from decodery.core.requirements import Requirements
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.loaders.store import Progress, silent
from decodery.models.protocol import Reader
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.sampling.sampler import Sampler
from decodery.sampling.temperature import Temperature
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence

from .base import Search
from .pool import require_count
from .step_nodes import Node
from .steps import Growth, Stepped, StepSearch


@register(
    "lookahead",
    paper="Scaling LLM Test-Time Compute Optimally can be More Effective than Scaling Model Parameters (2024)",
    guarantee="that of its search, whose texts keep nothing of what was looked at; none on quality",
    requirements=("a search over steps",),
)
@dataclass(frozen=True)
class Lookahead(Search):
    """Scores every text of a step search by its greedy continuation of k more steps, then discarded.

    Scores in the trace are those of the ends. What was written to look at is in no part of the trace's tree: it is
    counted as "rolled_out", among the "discarded" tokens. Cost: k + 1 steps in place of one, in passes that all texts
    share.

    Attributes:
        search: Over steps, as in step-beam(scorer=self-evaluation,n=8,m=2) or dvts(...).
        k: Steps, of each of which the most likely tokens after the request's processors are taken; a text that ends
            sooner is judged as it ends.
    """

    search: Search | str
    k: int = 1

    def __post_init__(self) -> None:
        found = resolve("search", self.search)
        if not isinstance(found, StepSearch):
            raise SettingsError("lookahead judges the texts of a search over steps, such as step-beam or dvts")
        object.__setattr__(self, "search", found)
        require_count("lookahead", "k", self.k)

    @property
    def inner(self) -> StepSearch:
        assert isinstance(self.search, StepSearch)
        return self.search

    @property
    def requirements(self) -> Requirements:
        return self.inner.requirements

    @property
    def texts_at_once(self) -> int:
        """See `Search.texts_at_once`."""
        return self.inner.texts_at_once

    def bind(self, tokenizer: Tokenizer) -> Lookahead:
        return replace(self, search=self.inner.bind(tokenizer))

    def fits(self, model: Reader) -> None:
        self.inner.fits(model)

    def find(self, engine: Engine, request: Request, progress: Progress = silent) -> ForwardCoroutine[list[Sequence]]:
        return (yield from self.inner.follow(_Ahead(engine, request, self.inner, progress, self.k)))


class _Ahead(Growth):
    """Shows the scorer where texts lead in k steps."""

    def __init__(self, engine: Engine, request: Request, search: Stepped, progress: Progress, k: int) -> None:
        super().__init__(engine, request, search, progress)
        self.k = k

    def shown(self, nodes: Ordered[Node]) -> ForwardCoroutine[list[Sequence]]:
        ends = [node.seq if node.finished else _greedy(node.seq) for node in nodes]
        for _ in range(self.k):
            going = [seq for seq in ends if not seq.finished]
            for seq in going:
                seq.segment_end = self.search.ends(seq)
            yield from self.write(going)
        count("rolled_out", sum(len(end.tokens) - len(node.seq.tokens) for end, node in zip(ends, nodes, strict=True)))
        return ends


def _greedy(seq: Sequence) -> Sequence:
    """A branch that goes on with what its sampler finds most likely."""
    clone, last = seq.branch(seq.request.seed), Temperature(0.0)
    clone.rebind(sampler=Sampler([*seq.request.sampler.processors, last]))
    clone.processor_states = (*seq.processor_states, last.init(seq.tokens[: seq.request.prompt_length]))
    return clone
