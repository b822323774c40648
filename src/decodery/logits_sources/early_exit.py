"""Early exits: rows run from check to check, and at each a gate decides which rows exit or end the text."""

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
"""Decisions of a gate about a row: continue, exit with the logits of the state here, or end the text."""


@dataclass(frozen=True, eq=False, slots=True)
class Check:
    """The input of a gate: the m rows that have not exited, after some layer.

    Attributes:
        steps: [m] output positions that the rows predict, from 1; the prompt's last row predicts position 0.
        before: [m, hidden] the residual stream before that layer.
        states: [m, hidden] the residual stream after that layer.
        logits: [m, vocab] of the model's head there, [0, vocab] for gates that do not use logits.
    """

    steps: np.ndarray
    before: torch.Tensor
    states: torch.Tensor
    logits: torch.Tensor


class Gate(Contract):
    """Decides which rows exit. Texts with equal gates share passes."""

    @property
    def logits(self) -> bool:
        """Whether it uses logits, so that the head is computed at every check."""
        return False

    @abstractmethod
    def judge(self, check: Check) -> np.ndarray:
        """[m] of `GO`, `LEAVE` and `END`; the decision about a row does not depend on other rows."""


@dataclass(frozen=True)
class Leaving(OfOneModel):
    """A model whose rows after the prompt may exit early; rows of the prompt run through all layers.

    Layers after an exit compute keys and values from its state, so that later tokens find some in every layer.

    Attributes:
        every: There is a check after every this many layers, except the last layer.
        heads: Corrections of the head for rows that have exited, None for the unchanged head.
        end: The token that ends a text where the gate decides so.
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
            # The first token is predicted by the whole model too.
            return (yield from score(self.model, segment, taps, role))
        return (yield from _Walk(self, segment, steps, role or "layers").run())


class _Walk:
    """The run of one segment through the layers.

    Attributes:
        left: [n] the check at which each row exited, -1 for none.
        ended: [n] bool, true for rows that end the text.
        states: [n, hidden] of all rows.
    """

    def __init__(self, source: Leaving, segment: Segment, steps: np.ndarray, role: str) -> None:
        self.source, self.segment, self.steps, self.role = source, segment, steps, role
        self.left = np.full(len(segment), -1, dtype=np.int64)
        self.ended = np.zeros(len(segment), dtype=bool)
        self.states: torch.Tensor | None = None

    def run(self) -> ForwardCoroutine[ForwardResult]:
        """Run from check to check, and return the logits of the requested rows."""
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
        # Rows that have exited only leave keys and values in later layers; if all have, MLPs are skipped.
        skip = [f"mlp.{layer}" for layer in range(first, last)] if gone.all() else []
        (scored,) = yield [self._ask(first, last, self.segment.logit_rows, (), skip, self._corrections())]
        asked = self.steps > 0
        count("layers", int(np.where(gone, (self.left + 1) * every, last)[asked].sum()))
        count("rows", int(asked.sum()))
        return replace(scored, logits=self._with_ends(scored.logits))

    def _up(self, first: int, end: int, going: np.ndarray) -> ForwardCoroutine[np.ndarray]:
        """Run from one layer to another, and return the gate's decisions about the rows that have not exited."""
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
        """Interventions that keep the states of rows that have exited."""
        if not (self.left >= 0).any():
            return ()
        assert self.states is not None
        left, states = torch.from_numpy(self.left >= 0).to(self.states.device), self.states

        def hold(rows: torch.Tensor, segment: Segment) -> torch.Tensor:
            return torch.where(left[:, None], states.to(rows.dtype), rows)

        return tuple(Intervention(f"resid_post.{layer}", hold) for layer in range(first, end))

    def _wanted(self, by_row: np.ndarray) -> np.ndarray:
        """The entries, of an array with one per row, of the rows whose logits are requested."""
        rows = self.segment.logit_rows
        return by_row if rows is None else by_row[np.asarray(rows, dtype=np.int64)]

    def _corrections(self) -> tuple[Intervention, ...]:
        """Interventions that correct the head's input for rows that have exited."""
        heads, checks = self.source.heads, self._wanted(self.left)
        if heads is None or not (checks >= 0).any():
            return ()
        return (Intervention("final_norm", lambda rows, segment: heads.corrected(rows, checks)),)

    def _with_ends(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits in which rows that end the text allow only the end token."""
        if not self.ended.any():
            return logits
        count("stops", int(self.ended.sum()))
        rows, logits = np.flatnonzero(self._wanted(self.ended)), logits.clone()
        others = torch.arange(logits.shape[1], device=logits.device) != self.source.end
        logits[rows] -= EXCLUDED * others
        return logits
