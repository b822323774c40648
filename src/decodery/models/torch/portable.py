"""The int8 stack in PyTorch alone: the same sums in the same order as the native kernels, so the same bits.

It serves machines without a compiler, and it is what the kernels are checked against. Everything that could depend on
the order of a sum is spelled out in elementwise steps: sixteen lanes, chunks of slots, groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.nn.functional import pad

from ..batch import Batch
from ..cache import coded
from ..cache.sparse_indices import SparseIndices
from ..config import CLAMPED, ModelConfig, Rope
from ..hooks import HookPoint, Hooks
from ..layer_plan import LayerStep
from .attention import visible
from .mixture import mixtures
from .weights import Layer, Weights

LANES = 16
CHUNK = 256  # slots whose values are summed up before they are merged with others
ROWS_AT_ONCE = 32  # bounds attention's memory
_LEAST = -3e38

Angles = Callable[[Rope, np.ndarray], tuple[torch.Tensor, torch.Tensor]]


class PortableStack:
    """Layers and head of an int8 model; the interface and the results of `native.NativeStack`."""

    def __init__(self, config: ModelConfig, weights: Weights, angles: Angles) -> None:
        self.config = config
        self.weights = weights
        self._angles = angles
        others = {"silu": silu, CLAMPED: silu, "gelu": exact_gelu, "relu2": relu2}
        self._activation = others.get(config.activation, gelu)
        self._mixtures = mixtures(weights, config, self._activation)

    def layers(self, hidden: torch.Tensor, batch: Batch, run: Sequence[LayerStep], hooks: Hooks) -> torch.Tensor:
        """See `native.NativeStack.layers`."""
        hidden = hidden.float()
        for index, attention, mlp in run:
            entered = hidden
            if attention:
                hidden = self.attended(index, hidden, batch, hooks)
            if mlp:
                hidden = self._fed(index, hidden, entered, hooks)
            hidden = hooks.visit(HookPoint("residual", index + 1), hidden)
        return hidden

    def attended(self, index: int, hidden: torch.Tensor, batch: Batch, hooks: Hooks) -> torch.Tensor:
        """The stream after a layer's attention."""
        layer = self.weights.layers[index]
        rope = self.config.layer_rope(index)
        context = self._attention(layer, index, hidden, batch, *self._angles(rope, batch.positions))
        context = hooks.visit(HookPoint("head_out", index), context)
        branch = self._branch(layer.output(context), layer.attention_norm, layer.post_attention_norm)
        return hidden + hooks.visit(HookPoint("attn_out", index), branch)

    def _fed(self, index: int, hidden: torch.Tensor, entered: torch.Tensor, hooks: Hooks) -> torch.Tensor:
        """The stream after a layer's MLP. entered: what the layer read."""
        config, layer = self.config, self.weights.layers[index]
        normed = self._reads(entered if config.parallel else hidden, layer.mlp_norm)
        if index in self._mixtures:
            found, chosen = self._mixtures[index](normed, hooks.shared)
            hooks.chosen.append(chosen)
        elif config.gated:
            gate, up = layer.gate_up(normed).chunk(2, dim=-1)
            found = layer.down(self._activation(gate) * up)
        else:
            found = layer.down(self._activation(layer.gate_up(normed)))
        branch = self._branch(found, layer.mlp_norm, layer.post_mlp_norm)
        return hidden + hooks.visit(HookPoint("mlp_out", index), branch)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `native.NativeStack.head`."""
        return softly(self.project(self.final_norm(hidden)), self.config.logit_cap)

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `native.NativeStack.final_norm`."""
        return self._norm(hidden.float(), self.weights.norm)

    def project(self, normed: torch.Tensor) -> torch.Tensor:
        """See `native.NativeStack.project`."""
        return self.weights.head(normed.float())

    def _norm(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.config.centred_norms:
            return layer_norm(rows, weight.float(), self.config.norm_eps)
        return rms_norm(rows, weight.float(), self.config.norm_eps)

    def _reads(self, stream: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        return stream if self.config.norms_after else self._norm(stream, norm)

    def _branch(self, rows: torch.Tensor, norm: torch.Tensor, post_norm: torch.Tensor | None) -> torch.Tensor:
        if self.config.norms_after:
            return self._norm(rows, norm)
        if self.config.residual_scale != 1.0:
            rows = rows * self.config.residual_scale
        return rows if post_norm is None else self._norm(rows, post_norm)

    def _attention(
        self, layer: Layer, index: int, hidden: torch.Tensor, batch: Batch, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        config = self.config
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        qkv = layer.qkv(self._reads(hidden, layer.attention_norm)).view(-1, heads + 2 * kv_heads, dim)
        queries, keys, values = qkv.split((heads, kv_heads, kv_heads), dim=1)
        cos, sin = cos[:, None], sin[:, None]
        if config.norms_after_rope:
            queries, keys = rotate(queries, cos, sin), rotate(keys, cos, sin)
        if layer.q_norm is not None and layer.k_norm is not None:
            wide = config.wide_qk_norm
            queries, keys = (
                self._norm(each.flatten(1) if wide else each, norm).view_as(each)
                for each, norm in ((queries, layer.q_norm), (keys, layer.k_norm))
            )
        if not config.norms_after_rope:
            queries, keys = rotate(queries, cos, sin), rotate(keys, cos, sin)
        if config.norms_units(index):
            ones = torch.ones(dim, dtype=torch.float32, device="cpu")
            queries, keys = self._norm(queries, ones), self._norm(keys, ones)
        scale = np.full(len(queries), config.attention_scale, dtype=np.float32)
        if config.tempers(index):
            assert config.temperature is not None
            scale *= config.temperature.at(batch.positions)
        queries = queries * torch.from_numpy(scale)[:, None, None]
        parts = []
        for segment, first in zip(batch.segments, batch.offsets, strict=False):
            rows = slice(first, first + len(segment))
            if segment.cache is None:
                seen_keys, seen_values = keys[rows].transpose(0, 1), values[rows].transpose(0, 1)
            else:
                segment.cache.write(index, keys[rows], values[rows])
                seen_keys, seen_values = segment.cache.stored(index)
            if seen_keys.dtype not in (coded.DTYPE, torch.float16):
                seen_keys, seen_values = seen_keys.float(), seen_values.float()
            indices = SparseIndices.of(segment, index, queries[rows], config.window(index)) if segment.sparse else None
            if indices is not None:
                parts.append(attend_picked(queries[rows], seen_keys, seen_values, indices, config.attention_cap))
                continue
            slots = [np.flatnonzero(row) for row in visible(segment, index, config.window(index))]
            cap = config.attention_cap
            parts.append(attend(queries[rows], seen_keys, seen_values, slots, cap, layer.sinks)[0])
        return torch.cat(parts)


def attend_picked(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, indices: SparseIndices, cap: float
) -> torch.Tensor:
    """`attend` of what each key-value head of a segment's cache still has and its policy selects."""
    n, heads, dim = queries.shape
    group = heads // len(keys)
    context = torch.empty(n, heads, dim, dtype=torch.float32, device="cpu")
    for head in range(len(keys)):
        own = slice(head * group, (head + 1) * group)
        found, weights, mass = attend(
            queries[:, own], keys[head : head + 1], values[head : head + 1], indices.lists(head), cap
        )
        if indices.mass is not None:
            indices.mass[:, own] = mass
        context[:, own] = found.view(n, group, dim)
        if indices.weights is not None:
            indices.weights[:, indices.starts[head * n] : indices.starts[(head + 1) * n]] = weights
    flat = context.view(n, heads * dim)
    indices.settle(flat)
    return flat


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: list[np.ndarray],
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """queries [n, heads, head_dim], already scaled.

    Keys and values [kv_heads, L, head_dim], or as caches have them that are `coded`; the slots each row reads.
    Neighbouring rows of which each sees the beginning of what the last one sees are computed together.

    Args:
        cap: Of scores, see `ModelConfig.attention_cap`.
        sinks: [heads] scores that have no value.

    Returns:
        The context [n, heads * head_dim], the weights [heads, slots of all rows one after another] and the logarithms
        of their sums [n, heads].
    """
    n, first = len(slots), 0
    parts: list[torch.Tensor] = []
    weights: list[torch.Tensor] = []
    mass: list[torch.Tensor] = []
    finite = bool((coded.apart(values)[1] if values.dtype == coded.DTYPE else values).isfinite().all())
    while first < n:
        last = first + 1
        # A hidden value has weight 0, which only a finite one survives.
        while finite and last < n and last - first < ROWS_AT_ONCE and _begins(slots[last], slots[last - 1]):
            last += 1
        index = torch.from_numpy(slots[last - 1]).to(keys.device)
        lengths = torch.tensor([len(row) for row in slots[first:last]], dtype=torch.int64, device=keys.device)
        own = queries[first:last], keys[:, index], values[:, index]
        part, shares, sums = _attend_together(*own, lengths, cap, sinks)
        parts.append(part)
        weights += [row[:, :length] for row, length in zip(shares, lengths.tolist(), strict=True)]
        mass.append(sums)
        first = last
    return torch.cat(parts), torch.cat(weights, dim=1), torch.cat(mass)


def _begins(longer: np.ndarray, shorter: np.ndarray) -> bool:
    return len(longer) >= len(shorter) and np.array_equal(longer[: len(shorter)], shorter)


def _attend_together(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    cap: float,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row i sees the first lengths[i] of the given keys and values [kv_heads, L, head_dim].

    Returns the context [n, heads * head_dim], the weights [n, heads, L] and the logarithms of their sums [n, heads].
    """
    n, heads, dim = queries.shape
    kv_heads, seen = keys.shape[:2]
    scores = _scores(queries.view(n, kv_heads, heads // kv_heads, 1, dim), keys[None, :, None])
    scores = softly(scores, cap)
    largest = torch.full(scores.shape[:3], _LEAST, dtype=torch.float32, device=keys.device)
    total, context = (
        torch.zeros_like(largest),
        torch.zeros(*scores.shape[:3], dim, dtype=torch.float32, device=keys.device),
    )
    if sinks is not None:
        # As if they were a chunk before the others, whose value is zero.
        largest, total = sinks.float().view(1, kv_heads, -1).expand_as(largest).clone(), torch.ones_like(total)
    weights = torch.zeros_like(scores)
    for begin in range(0, seen, CHUNK):
        # Rows of which each sees as much as the one before it, so that those with slots here are the last ones.
        first = int((lengths <= begin).sum())
        part = slice(begin, min(begin + CHUNK, seen))
        hidden = (torch.arange(seen, device=keys.device)[part] >= lengths[first:, None])[:, None, None]
        own = scores[first:, ..., part].masked_fill(hidden, -torch.inf)
        top = own.amax(dim=-1)
        shares = exponential(own - top[..., None]).masked_fill(hidden, 0.0)
        added = _weighted_sums(shares, values[:, part], hidden)
        both = torch.where(top > largest[first:], top, largest[first:])
        before, now = exponential(largest[first:] - both), exponential(top - both)
        context[first:] = context[first:] * before[..., None] + added * now[..., None]
        total[first:] = total[first:] * before + lane_sum(shares) * now
        weights[first:, ..., :begin] *= before[..., None]
        weights[first:, ..., part] = shares * now[..., None]
        largest[first:] = both
    inverse = 1.0 / total[..., None]
    mass = (largest + total.log()).reshape(n, heads)
    return (context * inverse).reshape(n, heads * dim), (weights * inverse).reshape(n, heads, seen), mass


def _scores(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """queries [n, kv_heads, group, 1, head_dim] times keys [1, kv_heads, 1, L, ...]: [n, kv_heads, group, L]."""
    if keys.dtype == coded.DTYPE:
        return coded.products(queries, keys)
    if keys.dtype == torch.float16:
        queries, keys = _shortened(queries), keys.float()
    found = torch.zeros(*queries.shape[:3], keys.shape[-2], dtype=torch.float32, device=keys.device)
    for i in range(queries.shape[-1]):
        found += queries[..., i] * keys[..., i]
    return found


def _weighted_sums(shares: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """shares [n, kv_heads, group, L] of values [kv_heads, L, ...]: [n, kv_heads, group, head_dim]."""
    if values.dtype == coded.DTYPE:
        return coded.weighted_sums(shares, values[None, :, None], hidden)
    if values.dtype == torch.float16:
        shares, values = _shortened(shares), values.float()
    found = torch.zeros(*shares.shape[:3], values.shape[-1], dtype=torch.float32, device=values.device)
    for i in range(shares.shape[-1]):
        found += shares[..., i, None] * values[None, :, None, i]
    return found


def _shortened(x: torch.Tensor) -> torch.Tensor:
    """The nearest numbers of 13 bits, whose products with float16's are exact."""
    far = x * 2049.0
    return far - (far - x)


def lane_sum(values: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension: sixteen lanes each in order, then lanes 8, 4, 2 and 1 apart."""
    count = -(-values.shape[-1] // LANES)
    steps = pad(values, (0, count * LANES - values.shape[-1])).unflatten(-1, (count, LANES))
    lanes = steps[..., 0, :]
    for step in range(1, count):
        lanes = lanes + steps[..., step, :]
    for width in (8, 4, 2, 1):
        lanes = lanes[..., :width] + lanes[..., width : 2 * width]
    return lanes[..., 0]


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Rows [..., d] over their root mean square, times weight [d]."""
    mean = lane_sum(rows * rows) * float(np.float32(1) / np.float32(rows.shape[-1]))
    # PyTorch's float32 square root is not always the nearest one; by way of float64 it is.
    inverse = 1.0 / (mean + eps).double().sqrt().float()
    return rows * inverse[..., None] * weight


def layer_norm(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Layer norm of rows [..., d], with scale and bias as the halves of weight [2 d]."""
    share = float(np.float32(1) / np.float32(rows.shape[-1]))
    scale, shift = weight.chunk(2)
    centred = rows - lane_sum(rows)[..., None] * share
    inverse = 1.0 / (lane_sum(centred * centred) * share + eps).double().sqrt().float()
    return centred * inverse[..., None] * scale + shift


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[N, heads, head_dim] turned by cos, sin [N, 1, head_dim / 2]."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def exponential(x: torch.Tensor) -> torch.Tensor:
    """e^x as the kernels compute it: a polynomial, to within two units in the last place."""
    x = x.clamp(-87.0, 88.0)
    n = (x * 1.44269504).round()
    r = (x - n * 0.693359375) - n * -2.12194440e-4
    p = r * 1.9875691500e-4 + 1.3981999507e-3
    for coefficient in (8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + coefficient
    p = (p * r) * r + r + 1.0
    return p * ((n.to(torch.int32) + 127) << 23).view(torch.float32)


def softly(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap), or x where the cap is 0."""
    if cap == 0.0:
        return x
    u = x * float(np.float32(1) / np.float32(cap))
    return (1.0 - 2.0 / (exponential(u + u) + 1.0)) * cap


def silu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + e^-x)"""
    return x / (exponential(-x) + 1.0)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """The tanh form of GELU."""
    u = (x + x * x * x * 0.044715) * 0.7978845608
    return x * 0.5 * (2.0 - 2.0 / (exponential(u + u) + 1.0))


def relu2(x: torch.Tensor) -> torch.Tensor:
    """The square of what is above 0."""
    return x.relu().square()


def exact_gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU by the error function, to within 2e-7.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26.
    """
    z = x.abs() * 0.7071067812
    t = 1.0 / (z * 0.3275911 + 1.0)
    p = t * 1.061405429 - 1.453152027
    for coefficient in (1.421413741, -0.284496736, 0.254829592):
        p = p * t + coefficient
    tail = p * t * exponential(-z * z) * 0.5
    return x * torch.where(x < 0, tail, 1.0 - tail)
