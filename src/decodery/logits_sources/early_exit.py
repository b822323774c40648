"""Leaving a model early: rows go up from check to check, and after each a gate says who leaves or ends the text."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from decodery.core.abstract import Contract
from decodery.core.errors import UnsupportedModel
from decodery.core.ledger import count
from decodery.models.batch import Segment
from decodery.models.hooks import Intervention, Tap
from decodery.models.layer_plan import LayerPlan
from decodery.models.protocol import LanguageModel
from decodery.models.trained.exits import ExitHeads
from decodery.step.forward_request import ForwardCoroutine, ForwardRequest, ForwardResult, OfOneModel, score
from decodery.step.logits_source import EXCLUDED

GO, LEAVE, END = range(3)
"""What a gate says to a row: go on, leave with what the head makes of the state here, or end the text."""


@dataclass(frozen=True, eq=False, slots=True)
class Check:
    """What a gate is shown of the m rows that are on their way, after some layer.

    Attributes:
        steps: [m] output positions of what the rows will say, from 1 on: the prompt's last row says the one at 0.
        before, states: [m, hidden] the residual stream before and after that layer.
        logits: [m, vocab] of the model's head there, [0, vocab] for gates that take none.
    """

    steps: np.ndarray
    before: torch.Tensor
    states: torch.Tensor
    logits: torch.Tensor


class Gate(Contract):
    """Who may leave. Equal gates share their passes."""

    @property
    def logits(self) -> bool:
        """Whether it looks at logits, which takes the head at every check."""
        return False

    @abstractmethod
    def judge(self, check: Check) -> np.ndarray:
        """[m] of `GO`, `LEAVE` and `END`, each row's by itself."""


@dataclass(frozen=True)
class Leaving(OfOneModel):
    """A model whose rows after the prompt may leave early; the prompt's pass through all layers.

    The layers above an exit get keys and values of the state there, so that later tokens find some in every layer.

    Attributes:
        every: A check stands after so many layers, again and again, none after the last one.
        heads: Corrections of the head for rows that have left, None for the head as it is.
        end: The token that a text ends with where a gate says so.
    """

    model: LanguageModel
    gate: Gate
    every: int
    prompt_length: int = field(compare=False)
    heads: ExitHeads | None = None
    end: int | None = None

    def compose(self, segment: Segment, taps: Sequence[Tap] = (), role: str = "") -> ForwardCoroutine[ForwardResult]:
        if segment.interventions:
            raise UnsupportedModel("rows that may leave early cannot be changed on their way")
        steps = segment.positions - self.prompt_length + 1
        if not (steps > 0).any():
            # The first token, too, is said by the whole model.
            return (yield from score(self.model, segment, taps, role))
        return (yield from _Walk(self, segment, steps, role or "layers").run())


class _Walk:
    """One segment on its way up. left: [n] the check at which each row left, -1 for none; ended: [n] bool.

    states: [n, hidden] of all rows.
    """

    def __init__(self, source: Leaving, segment: Segment, steps: np.ndarray, role: str) -> None:
        self.source, self.segment, self.steps, self.role = source, segment, steps, role
        self.left = np.full(len(segment), -1, dtype=np.int64)
        self.ended = np.zeros(len(segment), dtype=bool)
        self.states: torch.Tensor | None = None

    def run(self) -> ForwardCoroutine[ForwardResult]:
        """From check to check; the logits of the rows that are wanted."""
        last, every, first = self.source.config.num_layers, self.source.every, 0
        for number, end in enumerate(range(every, last, every)):
            going = np.flatnonzero((self.steps > 0) & (self.left < 0))
            if not len(going):
                break
            said = yield from self._up(first, end, going)
            self.left[going[said != GO]] = number
            self.ended[going[said == END]] = True
            first = end
        gone = self.left >= 0
        # Whoever has left leaves keys and values above, and nothing else; if all have, MLPs have nothing to do.
        skip = [f"mlp.{layer}" for layer in range(first, last)] if gone.all() else []
        (scored,) = yield [self._ask(first, last, self.segment.logit_rows, (), skip, self._corrections())]
        asked = self.steps > 0
        count("layers", int(np.where(gone, (self.left + 1) * every, last)[asked].sum()))
        count("rows", int(asked.sum()))
        return replace(scored, logits=self._with_ends(scored.logits))

    def _up(self, first: int, end: int, going: np.ndarray) -> ForwardCoroutine[np.ndarray]:
        """Go from one layer to another; what the gate says there to the rows that are still on their way."""
        gate = self.source.gate
        (scored,) = yield [self._ask(first, end, going.tolist() if gate.logits else [], (end - 1, end))]
        self.states = scored.hidden[end]
        check = Check(self.steps[going], scored.hidden[end - 1][going], self.states[going], scored.logits)
        return gate.judge(check)

    def _ask(
        self,
        first: int,
        end: int,
        logit_rows: Sequence[int] | None,
        taps: tuple[Tap, ...],
        skip: Sequence[str] = (),
        also: tuple[Intervention, ...] = (),
    ) -> ForwardRequest:
        interventions = self._held(first, end) + also
        segment = replace(self.segment, logit_rows=logit_rows, interventions=interventions)
        if self.states is not None:
            segment = replace(segment, tokens=None, states=self.states)
        layer_plan = LayerPlan(tuple(range(first, end)), frozenset(skip))
        return ForwardRequest(self.source.model, segment, taps, self.role, layer_plan)

    def _held(self, first: int, end: int) -> tuple[Intervention, ...]:
        """What keeps the states of rows that have left as they were there."""
        if not (self.left >= 0).any():
            return ()
        assert self.states is not None
        left, states = torch.from_numpy(self.left >= 0).to(self.states.device), self.states

        def hold(rows: torch.Tensor, segment: Segment) -> torch.Tensor:
            return torch.where(left[:, None], states.to(rows.dtype), rows)

        return tuple(Intervention(f"resid_post.{layer}", hold) for layer in range(first, end))

    def _wanted(self, by_row: np.ndarray) -> np.ndarray:
        """What is known of every row, of those whose logits are wanted."""
        rows = self.segment.logit_rows
        return by_row if rows is None else by_row[np.asarray(rows, dtype=np.int64)]

    def _corrections(self) -> tuple[Intervention, ...]:
        """What the head reads of rows that have left, in place of the plain state."""
        heads, checks = self.source.heads, self._wanted(self.left)
        if heads is None or not (checks >= 0).any():
            return ()
        return (Intervention("final_norm", lambda rows, segment: heads.corrected(rows, checks)),)

    def _with_ends(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits in which rows that end the text leave no other token."""
        if not self.ended.any():
            return logits
        count("stops", int(self.ended.sum()))
        rows, logits = np.flatnonzero(self._wanted(self.ended)), logits.clone()
        others = torch.arange(logits.shape[1], device=logits.device) != self.source.end
        logits[rows] -= EXCLUDED * others
        return logits
