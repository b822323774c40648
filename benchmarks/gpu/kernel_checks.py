"""The first checks: each kernel by itself, at the shapes that are measured. What fails is left out of all that follows.

So a kernel that does not work costs its own line, and no table. Off CUDA the kernels run in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from kit import FAILED, STOPPED, Kit, NotRunError
from shapes import SHAPES, TINY, Shape, pools_of_pytorch, random_model, without_static

from decodery.models.batch import Batch, Segment
from decodery.models.cache import coded
from decodery.models.cache.cache import KVCache
from decodery.models.config import ModelConfig
from decodery.models.cuda import graphs
from decodery.models.native.int4 import Int4Linear
from decodery.models.native.int8 import Int8Linear
from decodery.models.torch import fused, packed_linear, paged_rows
from decodery.testing import tiny_transformer

Said = tuple[str, dict[str, Any]]
CLOSE = {torch.bfloat16: 3e-2, torch.float32: 1e-4}
"""How far numbers of a kernel may be from those of PyTorch or float64, as a share of the largest."""
CONTEXT = 500


@dataclass(frozen=True)
class Kernels:
    """What these checks need. few: whether fewer shapes say enough."""

    kit: Kit
    device: torch.device
    few: bool
    keeps: float

    def run(self) -> None:
        """All of them; one that fails is switched off, also where another process found that out."""
        checks = {"attention": self.attention, "rows": self.rows, "weights": self.weights, "graphs": self.graphs}
        for what, body in checks.items():
            most = 300.0 if self.few else 60.0
            row = self.kit.check("A", f"kernels: {what}", body, needs=5.0, most=most, keeps=self.keeps)
            if row.outcome in (FAILED, STOPPED):
                self.kit.note(f"all that follows runs without kernels for {what}")
                switch_off(what)

    @property
    def _shapes(self) -> list[Shape]:
        return list((TINY if self.few else SHAPES).values())

    @property
    def _dtypes(self) -> list[torch.dtype]:
        # The interpreter multiplies the bits of bfloat16 as integers.
        return [torch.bfloat16, torch.float32] if self.device.type == "cuda" else [torch.float32]

    def _needs_triton(self) -> None:
        if find_spec("triton") is None:
            raise NotRunError("Triton is not installed: PyTorch's operations stand for the kernels")

    @torch.no_grad()
    def attention(self) -> Said:
        """Attention over pages of all kinds, of single rows, trees' worth of rows and prompts, beside PyTorch's."""
        self._needs_triton()
        from decodery.models.cuda.paged_kernel import attend

        worst, cases = 0.0, 0
        # The interpreter takes hundredths of a second for a program.
        shapes, passes = self._shapes, ((1,), (1,) * 64, (8, 60), (300,))
        if self.few:
            shapes, passes = shapes[::2], ((1,), (3, 9))
        with pools_of_pytorch():
            for number, shape in enumerate(shapes):
                for dtype in self._dtypes[: None if number == 0 else 1]:
                    for held in (dtype, *((coded.DTYPE, coded.FLOATS) if shape is shapes[-1] else ())):
                        for counts in passes:
                            worst = max(worst, self._attended(attend, shape, dtype, held, counts))
                            cases += 1
        return f"{cases} kinds of passes within {worst:.0e} of PyTorch's attention", {"worst": worst}

    def _attended(
        self, attend: Callable[..., Any], shape: Shape, dtype: torch.dtype, held: torch.dtype, counts: tuple[int, ...]
    ) -> float:
        dim = shape.hidden // shape.heads
        heads = {"num_heads": shape.heads, "num_kv_heads": shape.kv_heads, "head_dim": dim}
        config = replace(tiny_transformer().config, num_layers=1, max_positions=8192, **heads)
        context, segments = 40 if self.few else CONTEXT, []
        for number, rows in enumerate(counts):
            cache = KVCache(1, shape.kv_heads, dim, dtype=held, device=self.device)
            # The least that is a page more than another's.
            length = context + 16 * (number % 3)
            cache.reserve(np.arange(length))
            cache.write(0, *self._drawn(dtype, 2, length, shape.kv_heads, dim))
            cache.keep(range(length))
            positions = length + np.arange(rows)
            cache.reserve(positions)
            segments.append(Segment(positions, np.zeros(rows, dtype=np.int64), cache=cache))
        total = sum(counts)
        queries = self._drawn(dtype, total, shape.heads, dim)
        keys, values = self._drawn(dtype, 2, total, shape.kv_heads, dim)
        found = []
        for kernel in (attend, None):
            with by_kernel(kernel):
                step = paged_rows.PagedRows.of(segments, config, [None], dtype)
                found.append(step.attend(0, 0, queries, keys, values, dim**-0.5).double())
        return self._error(found[0], found[1], dtype, f"{shape}, {held}, {counts}")

    @torch.no_grad()
    def rows(self) -> Said:
        """Norms, rotations and gates beside float64."""
        self._needs_triton()
        from decodery.models.cuda import fused_kernel

        worst = 0.0
        for shape in self._shapes:
            for dtype in self._dtypes:
                dim, heads = shape.hidden // shape.heads, shape.heads + shape.kv_heads
                rows, more = self._drawn(dtype, 2, 5, shape.hidden)
                weight = self._drawn(dtype, shape.hidden)
                sums, normed = fused_kernel.add_norm(rows, more, weight, 1e-5)
                wide = sums.double()
                wanted = wide * (wide.square().mean(dim=1, keepdim=True) + 1e-5).rsqrt() * weight.double()
                errors = [(normed, wanted), (sums, rows.double() + more.double())]
                angles = self._drawn(torch.float32, 5, 1, dim // 2)
                cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
                projected = self._drawn(dtype, 5, heads * dim)
                turned = fused_kernel.turn(projected, shape.heads, shape.kv_heads, cos, sin, None, 1e-5)
                first, second = projected.double().view(5, heads, 2, dim // 2).unbind(2)
                c, s = cos.double(), sin.double()
                errors.append((turned, torch.cat((first * c - second * s, second * c + first * s), dim=2)))
                opened = self._drawn(dtype, 5, 2 * shape.inner)
                gate, up = opened.double().chunk(2, dim=1)
                errors.append((fused_kernel.gate(opened, "silu"), gate * gate.sigmoid() * up))
                worst = max(worst, *(self._error(one.double(), other, dtype, str(shape)) for one, other in errors))
        return f"within {worst:.0e} of float64", {"worst": worst}

    @torch.no_grad()
    def weights(self) -> Said:
        """Packed weights of four and of eight bits beside the numbers that they stand for."""
        self._needs_triton()
        from decodery.models.cuda.packed_kernel import product

        shape, draws, worst = self._shapes[-1], np.random.default_rng(0), 0.0
        outputs, inputs = shape.hidden, shape.inner

        def drawn(*sizes: int) -> torch.Tensor:
            return torch.from_numpy(draws.integers(0, 256, sizes).astype(np.uint8))

        steps = torch.full((outputs, inputs // 32), 0.01, dtype=torch.float16)
        scale = torch.full((outputs,), 0.01, dtype=torch.float32)
        layers = [
            Int4Linear(drawn(outputs, inputs // 2), steps, -8 * steps),
            Int8Linear(drawn(outputs, inputs).view(torch.int8), scale),
        ]
        for layer in layers:
            for dtype in self._dtypes[:1]:
                packed = packed_linear.packed_linear(layer, dtype)
                assert packed is not None
                packed = packed.to(self.device)
                for count in (1, 20) if self.few else (1, 16, 100):
                    rows = self._drawn(dtype, count, inputs)
                    wanted = rows.double() @ packed.dense().double().T
                    worst = max(worst, self._error(product(packed, rows).double(), wanted, dtype, type(layer).__name__))
        return f"within {worst:.0e} of float64", {"worst": worst}

    @torch.no_grad()
    def graphs(self) -> Said:
        """Passes at a fixed shape, captured and replayed, beside ordinary ones."""
        worst = 0.0
        with pools_of_pytorch():
            for dtype in self._dtypes:
                model = random_model(TINY["8B"], self.device, dtype)
                assert model.static is not None
                both = model, without_static(model)
                caches = [each.new_cache() for each in both]
                for tokens in ([3, 1, 4], [1], [5], [9, 2, 6, 5]):
                    found = [
                        each.forward(Batch([Segment.chunk(tokens, cache)])).logits.double()
                        for each, cache in zip(both, caches, strict=True)
                    ]
                    for cache in caches:
                        cache.keep(range(len(tokens)))
                    worst = max(worst, self._error(found[0], found[1], dtype, str(tokens)))
                if not model.static.shapes:
                    raise AssertionError("no pass ran at a fixed shape")
        return f"within {worst:.0e} of ordinary passes", {"worst": worst}

    def _drawn(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.from_numpy(np.random.default_rng(sum(shape)).standard_normal(shape)).to(self.device, dtype)

    def _error(self, found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, of: str) -> float:
        error = float((found.reshape(wanted.shape) - wanted).abs().max() / wanted.abs().max())
        if not error <= CLOSE[dtype]:
            raise AssertionError(f"{of}, {dtype}: {error:.1e} away, and may be {CLOSE[dtype]:.0e}")
        return error


@contextmanager
def by_kernel(kernel: Callable[..., Any] | None) -> Iterator[None]:
    """Within it this kernel attends in passes that are no graphs; None leaves it to PyTorch."""
    known = paged_rows.kernel_for
    paged_rows.kernel_for = lambda pool: kernel
    try:
        yield
    finally:
        paged_rows.kernel_for = known


def switch_off(what: str) -> None:
    """Let PyTorch's operations stand for kernels from now on, or ordinary passes for graphs."""
    if what == "attention":
        paged_rows.kernel_for = graphs.kernel_for = lambda pool: None
    elif what == "rows":
        fused.kernels_for = lambda rows: None
    elif what == "weights":
        packed_linear.packed_kernel = lambda rows: None
    else:
        ModelConfig.static_shapes = property(lambda config: False)  # type: ignore[assignment,method-assign]
