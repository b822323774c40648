"""SWIFT: the model drafts for itself with some of its sublayers left out, and finds out which while it writes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from decodery.core.errors import SettingsError
from decodery.core.ledger import count
from decodery.core.registry import register
from decodery.core.requirements import Provides
from decodery.models.batch import Segment
from decodery.models.layer_plan import LayerPlan, layer_steps
from decodery.models.protocol import Reader
from decodery.models.trained.artifact import refuse_other
from decodery.models.trained.skips import SkipSet, sublayers
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter_memory import Scope
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence
from decodery.step.tree_policy import TreePolicy

from ..stores.skip_search import SkipSearch
from ..trees.caterpillar import Caterpillar
from .own_layers import OwnLayers, OwnReading, through


@dataclass(slots=True)
class _State:
    """search: None where the set is given. steps: since the text began."""

    skip: frozenset[str]
    search: SkipSearch | None
    reading: OwnReading = field(default_factory=OwnReading)
    steps: int = 0


@register(
    "swift",
    paper="SWIFT: On-the-Fly Self-Speculative Decoding for LLM Inference Acceleration (2024)",
    guarantee="the output distribution is unchanged",
    lossless=True,
    slower=True,
)
@dataclass(frozen=True)
class Swift(OwnLayers):
    """Drafts with the target itself without some of its attention and MLP sublayers.

    It reads the target's own cache. Once a text has more than `window` tokens, after every `interval`-th step a set is
    tried on its first tokens, in one pass; the set in use is replaced by one that gets more of them right, its
    matchness. Sets are drawn uniformly, every `bayes`-th comes from a Gaussian process. The search ends above the
    matchness `enough`, after `patience` sets that were no better or `proposals` in all. Scope: of what was found, the
    process, for every model apart; memory: what was tried, and forks of the text's cache while it drafts. Cost: a draft
    pass per level, of the sublayers that are kept and the head; a pass over `window` rows per set tried. Source:
    hemingkx/SWIFT (2024).

    Attributes:
        skip: A `SkipSet`, or the file or folder of the one that `decodery train swift` found. None: the set is looked
            for while texts are written, beginning with every odd layer.
        ratio: Share of the sublayers that are then skipped, of all but those of the first and the last layer.
        window: Tokens of a text on which sets are tried.
        interval: Steps from one trial to the next.
        bayes: Every so many sets, one comes from a Gaussian process, the others are drawn uniformly.
        proposals: Sets tried at most.
        patience: The search ends after so many sets that were no better.
        enough: The search ends at this matchness, 0 to 1.
        scope: How long the found set is kept.
        tree_policy: The paper's tree by default.
    """

    skip: SkipSet | str | None = None
    ratio: float = 0.45
    window: int = 32
    interval: int = 1
    bayes: int = 25
    proposals: int = 1000
    patience: int = 300
    enough: float = 0.95
    scope: Scope = "process"
    tree_policy: TreePolicy | str | None = field(default=Caterpillar(), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.ratio < 1 or min(self.window, self.interval, self.bayes) < 1:
            raise SettingsError("swift needs a ratio from 0 to less than 1, and window, interval and bayes >= 1")

    @property
    def provides(self) -> Provides:
        drawn = Provides(drafts=("without-replacement",))
        return drawn if isinstance(self.tree_policy, Caterpillar) else super().provides

    def start(self, seq: Sequence) -> _State:
        if self.skip is not None:
            return _State(self._given(seq.request.model), None)
        layers = seq.request.model.config.num_layers
        key = ("swift", seq.request.model.fingerprint, layers, self.ratio, self.bayes)
        search = seq.request.memory.recall(
            self.scope, seq, key, lambda: SkipSearch(layers, self.ratio, bayes=self.bayes)
        )
        return _State(search.skip, search)

    def layer_plan(self, seq: Sequence) -> LayerPlan:
        state: _State = seq.states[self]
        return LayerPlan(skip=state.skip)

    def propose(self, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        state: _State = seq.states[self]
        if state.search is not None:
            state.steps += 1
            if state.steps % self.interval == 0:
                yield from self._search(seq, state.search)
            state.skip = state.search.skip
        try:
            return (yield from super().propose(seq, budget))
        finally:
            state.reading.forget()

    def _search(self, seq: Sequence, search: SkipSearch) -> ForwardCoroutine[None]:
        """Try one more set on what the text says, where it says enough."""
        if seq.position <= self.window + 1 or search.over(self.proposals, self.patience, self.enough):
            return
        chosen = search.propose()
        asked = matchness(seq, LayerPlan(skip=sublayers(chosen, search.layers)), self.window)
        search.register(chosen, (yield from asked))
        count("sets tried")

    def _given(self, model: Reader) -> frozenset[str]:
        found = SkipSet.load(self.skip)
        advice = "find one for this one with decodery train swift -m MODEL"
        refuse_other("this set of sublayers", found.model, model, advice)
        layer_steps(LayerPlan(skip=found.skip), model.config.num_layers)
        return found.skip


def matchness(seq: Sequence, layer_plan: LayerPlan, window: int) -> ForwardCoroutine[float]:
    """The share of the tokens 2 to `window` + 1 that a route finds most likely, after the same prompt."""
    first = seq.request.prompt_length
    cache = seq.cache.fork()
    cache.truncate(first)
    written = seq.tokens[first : first + window + 1]
    said = yield from through(seq, Segment.chunk(written[:-1], cache), layer_plan, "search")
    return float(
        (said.argmax(dim=-1).cpu() == torch.tensor(written[1:], dtype=torch.int64, device="cpu")).float().mean()
    )
