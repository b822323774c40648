"""Kangaroo: the target's first layers and one trained attention block draft, and the other layers verify."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, cast

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.core.threads import one_thread
from decodery.models.batch import Segment
from decodery.models.hooks import Tap
from decodery.models.layer_plan import LayerPlan
from decodery.models.protocol import LanguageModel, Reader
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import copied
from decodery.step.draft_length_policy import Budget, Outlook
from decodery.step.draft_tree import DraftTree, Entered
from decodery.step.drafter import VerificationFeedback
from decodery.step.forward_request import ForwardCoroutine, ForwardRequest
from decodery.step.sequence import Sequence

from ..heads.copied import copied_layer
from ..heads.drafter import TrainedDrafter
from ..heads.head import MADE, BoundHead, Guess, TrainedHead
from ..heads.parts import DecoderLayer, Held, LayerShape
from ..heads.unrolled import teacher_attention
from .rows import TreeRows


class KangarooHead(BoundHead):
    """The adapter: an attention block between the target's first layers and its vocabulary.

    The states are the target's own, also of tokens that are drafted, so that it is taught one step at a time.
    """

    kind = "kangaroo"
    taught = 1
    lead = 1

    def __init__(self, trained: TrainedHead, model: Reader) -> None:
        super().__init__(trained, model)
        self.exit: int = trained.settings["exit"]
        if not 0 < self.exit < model.config.num_layers:
            layers = model.config.num_layers
            raise SettingsError(f"this head for kangaroo stands after layer {self.exit} of {layers}: {MADE}")
        self.layer = DecoderLayer(self.parts, "layer.", LayerShape(**trained.settings["layer"]))

    @classmethod
    def reads(cls, trained: TrainedHead) -> tuple[Tap, ...]:
        return (trained.settings["exit"],)

    @classmethod
    def untrained(cls, model: Transformer, seed: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        layers = model.config.num_layers
        leave = max(1, layers // 4)
        # The states are those that the next layer of the target would read.
        following = min(leave, layers - 1)
        shape, tensors = copied_layer(model, following)
        own = {name: each for name, each in tensors.items() if name.startswith(("layer.qkv.", "layer.output."))}
        own["layer.input_norm.weight"] = copied(model.weights.layers[following].attention_norm)
        own["norm.weight"] = copied(model.weights.norm)
        return own, {"layer": asdict(shape), "exit": leave}

    @property
    def reach(self) -> int:
        return 1

    def keep(self, held: Held, states: torch.Tensor, positions: np.ndarray) -> None:
        """Remember states [n, hidden] of text."""
        _, keys, values = self.layer.heads(self.layer.norm("input_norm", states), torch.from_numpy(positions))
        held.write(keys, values, text=True)

    def guess(self, held: Held, states: torch.Tensor, positions: np.ndarray, mask: np.ndarray) -> torch.Tensor:
        """Logits [n, outputs] after tentative rows of which these are the states [n, hidden].

        Args:
            mask: [n, rows + n].
        """
        held.rows = mask.shape[1] - len(states)
        normed = self.layer.norm("input_norm", states)
        return self.project(self._spoken(states + self.layer.attention(normed, positions, held, mask)))

    def unroll(self, states: dict[Tap, torch.Tensor], tokens: torch.Tensor, steps: int) -> list[Guess]:
        assert steps == 1
        rows = states[self.exit]
        b, n, _ = rows.shape
        rows = rows.flatten(0, 1)
        heads = self.layer.heads(self.layer.norm("input_norm", rows), torch.arange(n, device="cpu").repeat(b))
        queries, keys, values = (each.view(b, n, *each.shape[1:]) for each in heads)
        context = teacher_attention(self.layer, queries, [keys], [values]).flatten(0, 1)
        spoken = self._spoken(rows + self.parts.linear("layer.output")(context)).view(b, n, -1)
        return [Guess(spoken, spoken)]

    def _spoken(self, stream: torch.Tensor) -> torch.Tensor:
        return self.parts.norm("norm", stream, self.layer.shape.eps)


@dataclass(slots=True)
class _Reading:
    """What the adapter remembers of one text. fresh: states of the text it has not read yet, and where they stand.

    rows: of the last token and the nodes below it; states: [rows, hidden], theirs after the first layers. sure: how
    likely it found the newest token's most likely successor.
    """

    head: KangarooHead
    held: Held
    fresh: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    states: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float32, device="cpu"))
    rows: TreeRows = field(default_factory=TreeRows)
    sure: float = 1.0

    def __deepcopy__(self, memo: dict[int, object]) -> _Reading:
        # Tentative rows do not follow a fork.
        clone = _Reading(self.head, deepcopy(self.held, memo), list(self.fresh))
        clone.held.rows = 0
        return clone

    def begin(self) -> None:
        """Forget what is tentative, and read what became text."""
        self.states = self.states[:0]
        self.rows.clear()
        for states, start in self.fresh:
            self.head.keep(self.held, states.to(self.head.dtype), np.arange(start, start + len(states)))
        self.fresh = []

    def guess(self, states: torch.Tensor, positions: np.ndarray, mask: np.ndarray) -> torch.Tensor:
        """The adapter's logits after rows that the first layers have just read."""
        with torch.no_grad(), one_thread():
            known = mask.shape[1] - len(states)
            self.states = torch.cat((self.states[:known], states)) if known else states
            found = self.head.guess(self.held, states.to(self.head.dtype), positions, mask)
            self.sure = float(found[-1].softmax(dim=-1).max())
            return found


@register(
    "kangaroo",
    paper="Kangaroo: Lossless Self-Speculative Decoding via Double Early Exiting (2024)",
    lossless=True,
    requirements=(
        "hidden states of every token",
        "a head made by decodery train head --kind kangaroo",
    ),
)
@dataclass(frozen=True)
class Kangaroo(TrainedDrafter):
    """Drafts by the target's first layers and a trained attention block after them.

    The other layers verify. What the first layers made of the drafted tokens is where verification goes on, so that no
    layer reads a token twice. A draft ends at `length` tokens, or after the first whose probability is below `eta`: it
    is verified, and nothing is drafted after it. Where a tree is grown in place of a chain, or states of the first
    layers are tapped, verification begins anew. Scope: the request; memory: keys and values of one layer. Cost: a pass
    of the first layers and of the vocabulary projection for each token.

    Attributes:
        eta: A draft ends after the first token whose probability is below this.
        length: Most tokens of a draft.
        head: A file or folder made by `decodery train head` or a `TrainedHead`; it says after which layer it stands.
    """

    kind: ClassVar[type[BoundHead]] = KangarooHead

    eta: float = 0.6
    length: int = field(default=6, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.eta <= 1:
            raise SettingsError(f"kangaroo needs eta from 0 to 1, not {self.eta}")

    @property
    def requirements(self) -> Requirements:
        return replace(super().requirements, keys=True, states=True, layer_plans=True)

    def start(self, seq: Sequence) -> _Reading:
        head = self._bound(seq.request.model)
        assert isinstance(head, KangarooHead)
        return _Reading(head, head.layer.begin(head.embed(torch.zeros(1, dtype=torch.int64, device="cpu"))))

    def propose(self, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        reading: _Reading = seq.states[self]
        reading.begin()
        tree = yield from super().propose(seq, replace(budget, ask=partial(self._goes_on, reading, budget)))
        if not len(states := reading.states) or self.tree_policy is not None:
            return tree
        if len(states) < len(tree):
            # Nothing was drafted after the last token, which the first layers are to read all the same.
            place = seq.cache.next_position + tree.depths[-1:]
            last = Segment(place, tree.tokens[-1:], cache=seq.cache, retained=len(states))
            states = torch.cat((states, (yield from self._shallow(seq, last))))
        return replace(tree, entered=Entered(reading.head.exit, states))

    def logits(self, seq: Sequence, tree: DraftTree, nodes: Ordered[int]) -> ForwardCoroutine[torch.Tensor]:
        reading: _Reading = seq.states[self]
        found = yield from reading.rows.after(seq.cache, tree, nodes, partial(self._read, seq))
        return reading.head.spread(found)

    def _read(self, seq: Sequence, segment: Segment) -> ForwardCoroutine[torch.Tensor]:
        """The adapter's logits [n, outputs] after rows that the first layers read now."""
        states = yield from self._shallow(seq, segment)
        return seq.states[self].guess(states, segment.positions, segment.seen())

    def observe(self, seq: Sequence, seen: VerificationFeedback) -> None:
        reading: _Reading = seq.states[self]
        rows = [0, *seen.path]
        # What follows the last token that is kept is known, too.
        rows = rows[: len(seq.tokens) - seen.start - 1]
        reading.fresh.append((seen.hidden[reading.head.exit][rows], seen.start))

    def _goes_on(self, reading: _Reading, budget: Budget, outlook: Outlook) -> bool | ForwardCoroutine[bool]:
        """Whether the token drafted last was sure enough for one more, and the request's own budget agrees."""
        return False if outlook.drawn and reading.sure < self.eta else budget.goes_on(outlook)

    def _shallow(self, seq: Sequence, segment: Segment) -> ForwardCoroutine[torch.Tensor]:
        """[n, hidden] states of rows after the first layers, where they stay in the text's cache."""
        leave = seq.states[self].head.exit
        layer_plan, segment = LayerPlan(tuple(range(leave))), replace(segment, logit_rows=[])
        (scored,) = yield [
            ForwardRequest(cast(LanguageModel, seq.request.model), segment, (leave,), "draft", layer_plan)
        ]
        return scored.hidden[leave]
