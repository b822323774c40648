"""Compute-optimal scaling: a few texts tell how hard a prompt is, and a table which search spends the budget best."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from decodery.core.errors import SettingsError
from decodery.core.ledger import count
from decodery.core.registry import register, resolve
from decodery.core.requirements import Requirements
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.loaders.store import Progress, silent
from decodery.models.protocol import Reader
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.scorer import Scorer
from decodery.step.sequence import Sequence

from .allocation import Allocation
from .base import Search
from .pool import Sampled, TextPool, require_count, scored


@register(
    "compute-optimal",
    paper="Scaling LLM Test-Time Compute Optimally can be More Effective than Scaling Model Parameters (2024)",
    guarantee="that of the search it chooses, which was the best one on the prompts its table was fitted to; none on "
    "others",
    requirements=("a table made by python benchmarks/train.py compute-optimal",),
)
@dataclass(frozen=True)
class ComputeOptimal(Search):
    """Estimates difficulty from the mean score of a few texts, then runs the search a table names.

    Searches among several texts go on with the texts that were drawn, which are what they would have drawn; others
    begin anew, and the tokens of what was drawn are part of the budget they were compared at. The paper takes 2,048
    texts for the difficulty, and does not count them; here they are as few as the table says, and are counted.
    Sequential `revisions` may be among the searches; a table that is to weigh them needs a model trained to revise. The
    trace counts the texts "probed" and the number of the "bin", from the hardest on.

    Attributes:
        table: A file made by `python benchmarks/train.py compute-optimal` from a benchmark of searches, or an
            `Allocation`. It says which scorer tells the difficulty, by how many texts, and the search for each of its
            bins and budgets, settings and scorer included.
        n: The budget, in tokens of that many plain texts, of which the table's largest that is no larger counts.
    """

    table: Allocation | str
    n: int = 16
    _probe: Scorer = field(init=False, repr=False, compare=False)
    _strategies: tuple[Search, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_count("compute-optimal", "n", self.n)
        object.__setattr__(self, "table", Allocation.load(self.table))
        self.allocation.place(self.n)
        if any(strategy.startswith("compute-optimal") for strategy in self.allocation.strategies):
            raise SettingsError("compute-optimal chooses among other searches than itself: fit another table")
        self._hold(
            resolve("scorer", self.allocation.scorer), [resolve("search", s) for s in self.allocation.strategies]
        )

    def _hold(self, probe: Scorer, strategies: list[Search]) -> None:
        object.__setattr__(self, "_probe", probe)
        object.__setattr__(self, "_strategies", tuple(strategies))

    @property
    def allocation(self) -> Allocation:
        assert isinstance(self.table, Allocation)
        return self.table

    @property
    def requirements(self) -> Requirements:
        return Requirements.merged([self._probe.requirements, *(each.requirements for each in self._strategies)])

    @property
    def texts_at_once(self) -> int:
        """See `Search.texts_at_once`."""
        return max(self.n, *(each.texts_at_once for each in self._strategies))

    def bind(self, tokenizer: Tokenizer) -> ComputeOptimal:
        found = replace(self)
        found._hold(self._probe.bind(tokenizer), [each.bind(tokenizer) for each in self._strategies])
        return found

    def fits(self, model: Reader) -> None:
        self.allocation.fits(model)
        self._probe.fits(model)

    def find(self, engine: Engine, request: Request, progress: Progress = silent) -> ForwardCoroutine[list[Sequence]]:
        pool = TextPool(engine, request, self, self.allocation.probes)
        self.fits(pool.texts[0].request.model)
        yield from pool.write(progress)
        scores = [score for score in (yield from scored(self._probe, pool.texts)) if score is not None]
        mean = sum(scores) / len(scores)
        count("probed", len(pool.texts))
        count("bin", self.allocation.bin(mean))
        chosen = self._strategies[self.allocation.strategies.index(self.allocation.strategy(mean, self.n))]
        if not isinstance(chosen, Sampled):
            return (yield from chosen.find(engine, request, progress))
        pool.open(chosen.n)
        yield from pool.write(progress)
        return (yield from chosen.decide(pool))
