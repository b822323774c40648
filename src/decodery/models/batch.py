"""What one pass of the model reads and returns: rows of several sequences, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from decodery.core.errors import SettingsError

from .cache.cache import KVCache
from .hooks import OF_OUTPUTS, OF_SCORES, Intervention, Tap, hook_point
from .layer_plan import WHOLE, LayerPlan, attending, sublayers


@dataclass
class Segment:
    """One sequence's rows in one pass: a draft tree, a prefill chunk, a single token, a Jacobi window.

    A row's visible rows must stand in ascending position order, so that a row's result does not depend on what else is
    in the pass. The others are overwritten, as all of them are by default.

    Attributes:
        positions: [n] position ids.
        tokens: [n] token ids, or in their place states: [n, hidden], what enters the first layer of the route:
            embeddings, or hidden states where it begins further up.
        states: [n, hidden] that enter the first layer in place of embeddings, None for tokens.
        mask: [n, retained + n] bool, which tentative rows each row sees (itself included): first those that stay, then
            its own pass's; None for causal order over all of them.
        cache: Every row also sees all that the cache holds; the rows' own keys and values are written after it as
            tentative ones, which `cache.keep(rows)` turns into content. None: rows see each other only.
        logit_rows: Rows whose logits are wanted, None for all.
        retained: How many tentative rows of earlier passes remain, from the first on; the new ones are written after
            them.
        interventions: What changes these rows on their way, in this order where several meet at one hook point.
        chosen: [n] int64 token ids on the model's device that the host does not know, -1 for what may be read as any;
            `tokens` hold no ids then. For models with `Capabilities.chosen`.
        visible: `mask`, bool on the model's device, where the host does not know it. For models with
            `Capabilities.visible`, and caches whose content is whole.
    """

    positions: np.ndarray
    tokens: np.ndarray | None = None
    states: torch.Tensor | None = None
    mask: np.ndarray | None = None
    cache: KVCache | None = None
    logit_rows: Sequence[int] | None = None
    retained: int = 0
    interventions: tuple[Intervention, ...] = ()
    chosen: torch.Tensor | None = None
    visible: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def sparse(self) -> bool:
        """Whether what its rows read is decided apart: for a policy, lost slots or changed scores."""
        cache = self.cache
        if cache is None:
            return False
        return (cache.policy is not None and cache.policy.wanted(self)) or bool(cache.losses) or self.steered

    @property
    def steered(self) -> bool:
        """Whether something is added to attention's scores."""
        return any(str(each.hook_point).startswith(OF_SCORES) for each in self.interventions)

    def slots(self, layer: int) -> np.ndarray:
        """Positions of the cache slots that a layer's attention covers, those of its own rows last."""
        assert self.cache is not None
        return self.cache.positions[layer, : int(self.cache.lengths[layer]) + self.retained + len(self)]

    def bias(self, layer: int) -> torch.Tensor | None:
        """[n, slots] float64, what is added to the scores of all heads of a layer; None for nothing."""
        assert self.cache is not None
        layers, place = len(self.cache.lengths), (OF_SCORES, layer)
        own = (
            [each for each in self.interventions if hook_point(each.hook_point, layers)[:2] == place]
            if self.steered
            else []
        )
        if not own:
            return None
        rows = torch.zeros(len(self), len(self.slots(layer)), dtype=torch.float64, device="cpu")
        for each in own:
            changed = each.change(rows, self)
            if changed.shape != rows.shape:
                shapes = f"was given rows {list(rows.shape)} and returned {list(changed.shape)}"
                raise SettingsError(f"an intervention at {each.hook_point} {shapes}")
            rows = changed.double()
        return rows

    def seen(self) -> np.ndarray:
        """`mask`, causal order written out: [n, retained + n] bool."""
        n, shape = len(self), (len(self), self.retained + len(self))
        if self.visible is not None:
            raise ValueError("which rows see which is known on the model's device alone: it has to be read there")
        if self.mask is None:
            return np.tri(n, self.retained + n, self.retained, dtype=bool)
        if self.mask.shape != shape:
            raise ValueError(
                f"a mask over {self.retained} rows that stay and {n} new ones is {shape}, not {self.mask.shape}"
            )
        return np.asarray(self.mask, dtype=bool)

    @classmethod
    def chunk(
        cls, tokens: Sequence[int] | np.ndarray, cache: KVCache, logit_rows: Sequence[int] | None = None
    ) -> Segment:
        """Consecutive tokens right after what `cache` has seen.

        Args:
            tokens: [n] ids.
            cache: The sequence's cache.
            logit_rows: Rows whose logits are wanted.
        """
        ids = np.asarray(tokens, dtype=np.int64)
        positions = np.arange(cache.next_position, cache.next_position + len(ids))
        return cls(positions=positions, tokens=ids, cache=cache, logit_rows=logit_rows)


@dataclass
class Batch:
    """Segments flattened to `rows` rows: linear layers see all rows at once, attention works per segment."""

    segments: list[Segment]

    def __post_init__(self) -> None:
        caches = [id(segment.cache) for segment in self.segments if segment.cache is not None]
        if len(set(caches)) < len(caches):
            raise ValueError(
                "two segments of a pass cannot write to one cache: make one segment of them, or two passes"
            )

    @cached_property
    def offsets(self) -> list[int]:
        """First row of every segment, then the total: [len(segments) + 1]."""
        total, result = 0, [0]
        for segment in self.segments:
            total += len(segment)
            result.append(total)
        return result

    @property
    def rows(self) -> int:
        return self.offsets[-1]

    @cached_property
    def positions(self) -> np.ndarray:
        """[N] position ids of all rows."""
        if len(self.segments) == 1:
            return self.segments[0].positions
        return np.concatenate([segment.positions for segment in self.segments])

    def with_chosen(self, tokens: torch.Tensor) -> torch.Tensor:
        """Ids [N] of all rows, of `tokens` [N] on the device where they are known on the host."""
        if all(segment.chosen is None for segment in self.segments):
            return tokens
        parts = tokens.split([len(segment) for segment in self.segments])
        given = [part if each.chosen is None else each.chosen for each, part in zip(self.segments, parts, strict=True)]
        return torch.cat(given).clamp(min=0)

    @cached_property
    def logit_rows(self) -> tuple[np.ndarray, list[int]]:
        """Flat indices of the rows whose logits are wanted [M], and where each segment's begin among them."""
        parts, bounds = [], [0]
        for segment, offset in zip(self.segments, self.offsets, strict=False):
            rows = np.arange(len(segment)) if segment.logit_rows is None else np.asarray(segment.logit_rows)
            if segment.logit_rows is not None and len(rows) and not 0 <= rows.min() <= rows.max() < len(segment):
                raise IndexError(f"logits are wanted of rows {rows.tolist()}, and there are {len(segment)} rows")
            parts.append(rows.astype(np.int64) + offset)
            bounds.append(bounds[-1] + len(rows))
        return np.concatenate(parts), bounds


@dataclass(frozen=True, slots=True)
class Cost:
    """What one segment's rows cost in a pass.

    Attributes:
        sublayers: How many attention and MLP sublayers they went through.
        logits: How many of the rows had their logits computed.
        read: Bytes of keys and values that attention had before it, each counted once per pass however many rows share
            it, windows and policies left aside.
        experts: Of all layers together, how many the rows had to have read where MLPs are mixtures, each counted once.
    """

    rows: int
    sublayers: int
    logits: int
    read: int
    experts: int = 0

    @classmethod
    def of(cls, segment: Segment, layer_plan: LayerPlan, layers: int, row_bytes: int) -> Cost:
        """To be asked after the cache has made room, before the rows are kept.

        Args:
            row_bytes: Of one row in one layer.
        """
        attention = attending(layer_plan, layers)
        slots = len(attention) * (segment.retained + len(segment))
        if segment.cache is not None:
            lengths = segment.cache.lengths.tolist()
            slots += sum(lengths) if layer_plan == WHOLE else sum(lengths[layer] for layer in attention)
        wanted = len(segment) if segment.logit_rows is None else len(segment.logit_rows)
        return cls(len(segment), sublayers(layer_plan, layers), wanted, slots * row_bytes)


@dataclass
class Scores:
    """What a pass returns.

    Attributes:
        logits: [M, vocab] float32, the requested rows of all segments in order.
        hidden: {tap: [N, width]}, or [M, width] of the requested rows, as `sites.site` says, by the taps as they were
            asked for.
        costs: Of every segment.
    """

    logits: torch.Tensor
    bounds: list[int]
    hidden: dict[Tap, torch.Tensor] = field(default_factory=dict)
    offsets: list[int] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)

    def of(self, segment: int) -> torch.Tensor:
        """Logits [m, vocab] of one segment's requested rows."""
        return self.logits[self.bounds[segment] : self.bounds[segment + 1]]

    def hidden_of(self, segment: int, tap: Tap) -> torch.Tensor:
        """What was read at a tap, of one segment's rows [n, width], or requested rows [m, width]."""
        bounds = self.bounds if tap in OF_OUTPUTS else self.offsets
        return self.hidden[tap][bounds[segment] : bounds[segment + 1]]
