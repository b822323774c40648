"""One model over several processes: each has some heads of attention and inner units of MLPs, and all take each pass.

Every process runs the same program over the same requests. What a process lacks comes by two sums over all of them in
each layer, and by the logits that each has a part of.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from decodery.core.errors import SettingsError, UnsupportedModel

from ..batch import Batch, Scores
from ..config import ModelConfig
from ..hooks import SITES, Tap
from ..layer_plan import WHOLE, LayerPlan
from ..protocol import Capabilities
from .packed_cut import some_inputs
from .packed_linear import PackedLinear
from .transformer import Transformer
from .weights import Dense, Layer, Weights

PLAN: dict[str, Placement] = {
    **dict.fromkeys(("qkv", "gate_up", "out_gate", "sinks", "operator"), Shard(0)),
    **dict.fromkeys(("output", "down"), Shard(1)),
}
"""Where the dimension of a layer's tensors lies that processes share out; the others are whole in each."""


@dataclass
class Summed:
    """A linear layer of which each process has some inputs.

    Attributes:
        inner: Those of this process, without a bias.
        bias: [out] or None.
        mesh: The processes.
    """

    inner: Dense | PackedLinear
    bias: torch.Tensor | None
    mesh: DeviceMesh

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[N, inputs of this process] -> [N, out]."""
        found = self.inner(rows)
        dist.all_reduce(found, group=self.mesh.get_group())
        return found if self.bias is None else found + self.bias


@dataclass
class Gathered:
    """A linear layer of which each process has as many outputs, in turn.

    Attributes:
        inner: Those of this process.
        mesh: The processes.
    """

    inner: Dense | PackedLinear
    mesh: DeviceMesh

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows it reads."""
        return self.inner.dtype

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, outputs of all]."""
        return DTensor.from_local(self.inner(rows), self.mesh, [Shard(1)]).full_tensor()


class SplitTransformer(Transformer):
    """The part of a model that one of several processes has.

    Args:
        config: Of the whole model.
        weights: Of the whole model, in floating point or packed; they may lie elsewhere than the part is to.
        mesh: The processes.
        plan: What is split, and where.

    Raises:
        UnsupportedModel: If it cannot be split among so many.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, mesh: DeviceMesh, plan: dict[str, Placement] = PLAN
    ) -> None:
        size = mesh.size()
        _check(config, weights, mesh)
        heads, kv_heads = config.num_heads // size, config.num_kv_heads // size
        super().__init__(replace(config, num_heads=heads, num_kv_heads=kv_heads), _split(config, weights, mesh, plan))
        self._mesh = mesh
        # What a graph replays no process compares with the others.
        self.static = None

    @property
    def capabilities(self) -> Capabilities:
        """What no process can do by itself is left out."""
        known = super().capabilities
        # Processes compare the tokens of their passes on the host.
        known = replace(known, chosen=False, visible=False, costs=False)
        return replace(known, sites=SITES - {"head_out"}, policies=False, parts=False, gradients=False)

    def forward(self, batch: Batch, *, taps: Sequence[Tap] = (), layer_plan: LayerPlan = WHOLE) -> Scores:
        """See `LanguageModel.forward`.

        Raises:
            SettingsError: If the processes have come to different passes.
        """
        said = torch.tensor([_digest(batch)] * 2, dtype=torch.int64, device="cpu")
        said[1].neg_()
        dist.all_reduce(said, op=dist.ReduceOp.MIN, group=self._mesh.get_group())
        if int(said.sum()):
            raise SettingsError(
                "processes that share a model have come to different passes: give all of them the same requests in the "
                "same order, with seeds, and with drafters and searches that do not go by time"
            )
        return super().forward(batch, taps=taps, layer_plan=layer_plan)


def processes(size: int, device: torch.device) -> tuple[DeviceMesh, torch.device]:
    """The processes that `torchrun` has begun, and the device of this one.

    Args:
        size: How many there are to be.
        device: The kind of all devices.

    Raises:
        SettingsError: If there are not so many.
    """
    begun = int(os.environ.get("WORLD_SIZE", 1))
    if begun != size:
        raise SettingsError(
            f"tensor_parallel_size={size} needs {size} processes, and there {'is' if begun == 1 else 'are'} {begun}: "
            f"start your program by torchrun --nproc-per-node {size} PROGRAM.py"
        )
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        # Passes are compared on the host, whatever computes them.
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return init_device_mesh(device.type, (size,)), device


def _check(config: ModelConfig, weights: Weights, mesh: DeviceMesh) -> None:
    size = mesh.size()
    others: tuple[object, ...] = (
        *(config.keeps_order, config.experts, config.latent, config.alternating, config.layer_inputs),
        *(config.head_shapes, config.reused_layers, config.wide_qk_norm, config.kept_tokens, config.shared),
    )
    if any(others) or any(config.sparsity) or not config.causal:
        raise UnsupportedModel(
            f"{config.family} cannot be split among processes: leave tensor_parallel_size out, and run replicas"
        )
    inners = [config.inner(layer) for layer in range(config.num_layers) if config.has_mlp(layer)]
    counts = [("heads", config.num_heads), ("key-value heads", config.num_kv_heads)]
    for what, number in (*counts, *(("inner units", inner) for inner in inners)):
        if number % size:
            raise UnsupportedModel(f"{number} {what} cannot be shared out among {size} processes: choose a divisor")
    parts = [part for layer in weights.layers for part in vars(layer).values() if part is not None]
    if not all(isinstance(part, Dense | PackedLinear | torch.Tensor) for part in (weights.head, *parts)):
        raise UnsupportedModel(
            "these quantized weights are not split among processes: choose dtype bfloat16 (float32 on a CPU)"
        )
    if mesh.device_type == "cpu" and weights.dtype.itemsize < 4:
        raise UnsupportedModel("on a CPU a split model computes in float32: choose dtype float32")


def parts_of(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Outputs of the matrices that lie one after another in one, by its name: each of them is shared out."""
    dim, inner = config.head_dim, config.inner(layer)
    return {
        "qkv": (config.num_heads * dim, config.num_kv_heads * dim, config.num_kv_heads * dim),
        "gate_up": (inner,) * (2 if config.gated else 1),
    }


def _split(config: ModelConfig, weights: Weights, mesh: DeviceMesh, plan: dict[str, Placement]) -> Weights:
    """What this process has of all weights."""
    device = torch.device(mesh.device_type)

    def part(tensor: torch.Tensor, placement: Placement, sizes: Sequence[int] = ()) -> torch.Tensor:
        """Of a tensor, or of each of several that lie one after another in it."""
        pieces = (
            tensor.split(list(sizes)) if sizes and isinstance(placement, Shard) and placement.dim == 0 else [tensor]
        )
        own = [distribute_tensor(piece.contiguous(), mesh, [placement]).to_local() for piece in pieces]
        return own[0] if len(own) == 1 else torch.cat(own)

    def packed(value: PackedLinear, placement: Placement, sizes: Sequence[int]) -> PackedLinear | Summed:
        """Of a layer whose weights stay packed."""
        size, rank = mesh.size(), mesh.get_local_rank()
        if placement == Shard(1):
            step = value.shape[1] // size
            inner = some_inputs(value, rank * step, (rank + 1) * step).to(device)
            return Summed(inner, None if value.bias is None else value.bias.to(device), mesh)
        if isinstance(placement, Replicate):
            return value.to(device)
        ends = list(accumulate(sizes or value.shape[:1]))
        own = [
            torch.arange(n // size) + end - n + rank * (n // size)
            for end, n in zip(ends, sizes or value.shape[:1], strict=True)
        ]
        return value.some(torch.cat(own)).to(device)

    def own(name: str, value: Any, sizes: Sequence[int]) -> Any:
        if value is None or (isinstance(value, Dense) and value.weight.numel() == 0):
            return value
        placement = plan.get(name, Replicate())
        if isinstance(value, torch.Tensor):
            return part(value, placement)
        if isinstance(value, PackedLinear):
            return packed(value, placement, sizes)
        weight = part(value.weight, placement, sizes)
        if placement == Shard(1):
            return Summed(Dense(weight), None if value.bias is None else part(value.bias, Replicate()), mesh)
        return Dense(weight, None if value.bias is None else part(value.bias, placement, sizes))

    def layer(index: int, whole: Layer) -> Layer:
        sizes = parts_of(config, index)
        return Layer(**{name: own(name, value, sizes.get(name, ())) for name, value in vars(whole).items()})

    head = weights.head
    splits = config.vocab_size % mesh.size() == 0
    rows: Placement = Shard(0) if splits else Replicate()
    placed: Any
    if isinstance(head, PackedLinear):
        placed = packed(head, rows, ())
    else:
        assert isinstance(head, Dense)
        placed = Dense(part(head.weight, rows), None if head.bias is None else part(head.bias, rows))
    return Weights(
        embedding=part(weights.embedding, Replicate()),
        layers=[layer(index, each) for index, each in enumerate(weights.layers)],
        head=Gathered(placed, mesh) if splits else placed,
        norm=part(weights.norm, Replicate()),
        positions=None if weights.positions is None else part(weights.positions, Replicate()),
    )


def _digest(batch: Batch) -> int:
    """What passes of several processes are compared by."""
    found = zlib.crc32(batch.positions.tobytes())
    for segment in batch.segments:
        for array in (segment.tokens, segment.mask):
            found = zlib.crc32(b"none" if array is None else array.tobytes(), found)
        found = zlib.crc32(f"{len(segment)} {segment.retained}".encode(), found)
    return found
