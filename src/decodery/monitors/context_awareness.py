"""Context awareness: how much an answer's attention rests on what the user said, and steering it there."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import numpy as np
import torch

from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.core.threads import one_thread
from decodery.models.batch import Segment
from decodery.models.hooks import Intervention
from decodery.models.protocol import Reader
from decodery.models.torch.transformer import Transformer
from decodery.step.monitor import Monitor, Prompt, Row
from decodery.step.sequence import Sequence

from .turns import user_spans

_MANY = 32
"""Parts of the keys that are joined to one."""


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    """keys: of all rows so far, in parts [n, kv_heads, head_dim]; users: [prompt] bool, where the user speaks.

    count, total: number of the answer's rows so far, and the sum of their shares.
    """

    model: Any
    users: np.ndarray
    keys: tuple[torch.Tensor, ...] = ()
    rows: int = 0
    count: int = 0
    total: float = 0.0


@register(
    "context-awareness",
    paper="On the Loss of Context-awareness in General Instruction Fine-tuning (2024)",
    guarantee="read-only unless action=switch, which steers attention, in the prompt too; alpha=1 is the identity",
)
@dataclass(frozen=True)
class ContextAwareness(Monitor):
    """Scores a text by how little its tokens attend to what the user said: 1 - the share that they do.

    Of every token of the answer the attention to the user's words, in all turns and without the template's tokens, is
    summed; the head with most of it counts, and the mean over tokens is taken. Known from the second token on: the
    newest token's own row does not exist yet. The paper calls answers with a share above 0.6 dependent on their
    context, a score below 0.4. Needs no training. Cost: that layer's queries and keys are computed once more from its
    input, and a row of attention per token; the prompt is read whole. What is generated keeps its own. With several
    turns of the user's the published code scales each down for the others; here they are one.

    Attributes:
        layer: Whose attention is looked at, from 0, or from the last one down; the default is two thirds of smollm2's
            depth.
        alpha: Factor of the other tokens' attention under "switch".
        steer: Layers that "switch" changes; all by default.
        action: "switch" steers attention, as PASTA does: in prompt and answer, whatever the score is, and in all heads
            of the layers named by steer, all layers by default, the prompt's tokens that the user did not say (the
            template's, the system's) lose weight by the factor alpha before weights are scaled to sum to 1.
    """

    waits = "states"

    layer: int = 20
    alpha: float = 0.9
    steer: tuple[int, ...] = ()
    action: Literal["flag", "stop", "regenerate", "switch"] = field(default="flag", kw_only=True)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1:
            raise SettingsError(f"alpha scales attention down, above 0 to 1, not {self.alpha}")

    @property
    def site(self) -> str:
        return f"resid_pre.{self.layer}"

    @property
    def requirements(self) -> Requirements:
        steers = self.action == "switch"
        return Requirements(taps=(self.site,), prompt_taps=True, parts=True, changes=steers, policies=steers)

    def fits(self, model: Reader) -> None:
        if not isinstance(model, Transformer):
            raise UnsupportedModel(
                f"context-awareness looks into the attention of models that this package runs itself, and "
                f"{type(model).__name__} is none: load the model with decodery, and without a cache policy"
            )
        layers = model.config.num_layers
        if wrong := [layer for layer in self.steer if not -layers <= layer < layers]:
            raise SettingsError(f"there is no layer {wrong[0]} to steer: layers are 0 to {layers - 1}, or -1 and down")

    def start(self, seq: Sequence) -> _State:
        users = np.zeros(seq.request.prompt_length, dtype=bool)
        for first, last in user_spans(seq):
            users[first:last] = True
        return _State(seq.request.model, users)

    def read(self, state: _State, rows: Prompt) -> _State:
        _, keys = self._heads(state, rows.hidden[self.site])
        return replace(state, keys=_joined(state.keys, keys), rows=state.rows + len(keys))

    @one_thread()
    def observe(self, state: _State, row: Row) -> _State:
        # The row that the first token is chosen at is the prompt's last one, and was read there.
        if row.position == 0:
            return state
        queries, keys = self._heads(state, row.hidden[self.site][None])
        state = replace(state, keys=_joined(state.keys, keys), rows=state.rows + 1)
        share = float(self.shares(state, queries[0])[state.users.nonzero()[0]].sum(dim=0).max())
        return replace(state, count=state.count + 1, total=state.total + share)

    def score(self, state: _State) -> float | None:
        return 1 - state.total / state.count if state.count else None

    def steering(self, state: _State) -> tuple[tuple[int, ...], bytes] | None:
        """Layers, and which of the prompt's tokens lose weight."""
        if self.action != "switch" or self.alpha == 1 or state.users.all():
            return None
        return self.steer or tuple(range(state.model.config.num_layers)), (~state.users).tobytes()

    def changes(self, steering: Any) -> tuple[Intervention, ...]:
        layers, others = steering
        added = np.frombuffer(others, dtype=bool) * math.log(self.alpha)
        return tuple(Intervention(f"attn_scores.{layer}", adding(layer, added)) for layer in layers)

    def shares(self, state: _State, queries: torch.Tensor) -> torch.Tensor:
        """[rows, heads] float64: where the newest row's attention goes.

        Args:
            queries: [heads, head_dim] of it.
        """
        model = cast(Transformer, state.model)
        config = model.config
        # [kv_heads, rows, head_dim] by [kv_heads, head_dim, heads of each]
        keys = torch.cat(state.keys).double().transpose(0, 1)
        asked = queries.double().view(config.num_kv_heads, -1, config.head_dim).transpose(1, 2)
        found = (keys @ asked).transpose(0, 1).reshape(keys.shape[1], -1) * config.attention_scale
        window = config.window(self.layer % config.num_layers)
        if window is not None:
            found[: max(len(keys) - window, 0)] = -torch.inf
        return found.softmax(dim=0)

    def _heads(self, state: _State, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys of rows [n, hidden] that enter the layer, the next ones of the text."""
        model = cast(Transformer, state.model)
        positions = np.arange(state.rows, state.rows + len(rows))
        queries, keys, _ = model.heads(self.layer % model.config.num_layers, rows, positions)
        return queries.cpu(), keys.cpu()


def _joined(parts: tuple[torch.Tensor, ...], more: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The parts with one more, or one of all where they are many, so that few are joined for a token."""
    return (torch.cat((*parts, more)),) if len(parts) >= _MANY else (*parts, more)


def adding(layer: int, added: np.ndarray) -> Callable[[torch.Tensor, Segment], torch.Tensor]:
    """A change of scores by what is added for every position of the prompt, and nothing after it."""

    def change(rows: torch.Tensor, segment: Segment) -> torch.Tensor:
        assert segment.cache is not None
        # Slots may have been evicted: what counts is which positions they hold.
        positions = segment.slots(layer % len(segment.cache.lengths))
        own = np.where(positions < len(added), added[np.minimum(positions, len(added) - 1)], 0.0)
        return rows + torch.from_numpy(own)

    return change
