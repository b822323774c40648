"""Part B: what passes, steps and texts take, beside the floor of the device's memory and beside `transformers`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from counting import copy_bandwidth, counted, product_rate, synchronize
from kit import MEASURED, PASSED, Kit, NotRunError, Row
from peers import clone, generated, logits_of
from shapes import SHAPES, TINY, moved, random_model, without_static

from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Batch, Segment
from decodery.models.footprint import precision, weight_bytes
from decodery.models.torch.transformer import Transformer
from decodery.step.pass_cost import time_passes

Said = tuple[str, dict[str, Any]]
TARGETED = "8B", "SmolLM2-135M"
"""Models that targets are for."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured. rows, contexts: of passes; texts: decoded together; tokens: written of each.

    prompt: tokens read before; rounds: of interleaved passes; seconds: after which a case's rounds end; steps: watched;
    copied: MiB of the copy; product: width of the matrices; compile: seconds a compiled `generate` may need.
    """

    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    contexts: tuple[int, ...] = (128, 1024, 4096, 8000)
    texts: tuple[int, ...] = (1, 16, 64)
    tokens: int = 64
    prompt: int = 32
    rounds: int = 60
    seconds: float = 3.0
    steps: int = 12
    copied: int = 2048
    product: int = 8192
    compile: float = 45.0


FEW = Sizes((1, 2, 4), (16, 100), (1, 2, 4), 8, 8, 2, 1.0, 2, 4, 64, 1.0)


@dataclass
class Speed:
    """What part B needs. load: as in part A; keeps: seconds for part C; bandwidth: GB/s, once it is measured."""

    kit: Kit
    device: torch.device
    load: Callable[[str, torch.device], Any]
    few: bool
    keeps: float
    bandwidth: float = 0.0
    models: dict[str, tuple[Transformer, list[list[int]]]] = field(default_factory=dict)

    @property
    def sizes(self) -> Sizes:
        return FEW if self.few else Sizes()

    def run(self) -> None:
        """The device, then what the targets are made of (see `report.targets`), then the rest."""
        sizes, few = self.sizes, [self.sizes.texts[0], self.sizes.texts[-1]]
        row = self._check("the device", self.device_itself)
        self.bandwidth = row.values.get("copy_gb_per_s", 0.0)
        for name in TARGETED:
            self._model(name, few)
        # Compiling takes its peer's time: the one that a target names comes first.
        self._each(TARGETED[0], "transformers computes the same", self.same, outcome=PASSED)
        self._peer(TARGETED[0], sizes.texts[0], static=True)
        for name in SHAPES:
            self._model(name, sizes.texts)
            self._each(name, "pass by context", self.by_context)
        for static in (False, True):
            for name in SHAPES:
                self._each(name, "transformers computes the same", self.same, outcome=PASSED)
                for texts in sizes.texts:
                    self._peer(name, texts, static=static)

    def _model(self, name: str, texts: Sequence[int]) -> None:
        """Passes of a model, and so many texts together."""
        self._check(f"{name}: weights", lambda: self.weights(name))
        self._each(name, "pass by rows", self.by_rows)
        for count in texts:
            self._each(name, _texts(count), lambda model, prompts, count=count: self.texts(model, prompts, count))
            self._each(
                name, f"a step of {_texts(count)}", lambda model, prompts, count=count: self.step(model, prompts, count)
            )

    def _check(self, name: str, body: Callable[[], Said], needs: float = 3.0, outcome: str = MEASURED) -> Row:
        return self.kit.check(
            "B", name, body, needs=needs, most=300.0 if self.few else 90.0, keeps=self.keeps, outcome=outcome
        )

    def _each(
        self, name: str, what: str, body: Callable[..., Said], needs: float = 3.0, outcome: str = MEASURED
    ) -> None:
        def of_model() -> Said:
            if name not in self.models:
                # Another process may have made them.
                self.weights(name)
            return body(*self.models[name])

        self._check(f"{name}: {what}", of_model, needs, outcome)

    def device_itself(self) -> Said:
        """Bandwidth of a copy, and the rate of a product."""
        bandwidth = copy_bandwidth(self.device, self.sizes.copied)
        rate = product_rate(self.device, self.sizes.product)
        values = {"copy_gb_per_s": round(bandwidth, 1), "bfloat16_tflops": round(rate, 3)}
        return f"copies {bandwidth:,.0f} GB/s, multiplies {rate:,.3g} TFLOP/s in bfloat16", values

    def weights(self, name: str) -> Said:
        """The embedded model in bfloat16 where it is there, else and for the others random weights of the shape."""
        draws, n = np.random.default_rng(0), max(self.sizes.texts)
        shape, how = (TINY if self.few else SHAPES)[name], "random"
        model, prompts = None, list[list[int]]()
        if name.startswith("SmolLM2"):
            try:
                loaded = self.load("bfloat16", self.device)
                how, prompts = Path(loaded.name).name, _prompts(loaded, n, self.sizes.prompt)
                model = loaded.model if self.device.type == "cuda" else moved(loaded.model, self.device)
            except NotRunError as error:
                how = f"random, because {error}"
        if model is None:
            model = random_model(shape, self.device, torch.bfloat16)
            prompts = draws.integers(0, shape.vocab, (n, self.sizes.prompt)).tolist()
        self.models[name] = model, prompts
        size = weight_bytes(model)
        values = {"weights": how, "weight_bytes": size, "precision": precision(model), "floor_ms": self._floor(size)}
        return f"{how}, {size / 1e9:.3g} GB read by a pass, floor {self._floor(size):.4g} ms", values

    def _floor(self, size: int) -> float:
        """Milliseconds in which so many bytes can be read at best."""
        return round(size / self.bandwidth / 1e6, 5) if self.bandwidth else 0.0

    def _timed(self, models: dict[str, Any], rows: Sequence[int], context: int) -> dict[str, dict[str, float]]:
        begun = monotonic()

        def enough(done: int) -> bool:
            return done >= self.sizes.rounds or (done >= 2 and monotonic() - begun > self.sizes.seconds)

        found = time_passes(models, rows, context=context, enough=enough)
        return {
            kind: {str(n): round(1e3 * float(np.median(times)), 4) for n, times in by_rows.items()}
            for kind, by_rows in found.items()
        }

    def by_rows(self, model: Transformer, prompts: list[list[int]]) -> Said:
        """Replayed and launched kernel by kernel, in turns."""
        context = min(self.sizes.contexts[0], 128)
        ms = self._timed({"fixed": model, "ordinary": without_static(model)}, self.sizes.rows, context)
        size = weight_bytes(model)
        most = str(self.sizes.rows[-1])
        says = ", ".join(
            f"{kind} {each['1']:.3g} ms for 1 row and {each[most]:.3g} for {most}" for kind, each in ms.items()
        )
        share = self._floor(size) / ms["fixed"]["1"]
        return f"{says}; {share:.0%} of the floor's speed", {
            "ms": ms,
            "floor_ms": self._floor(size),
            "share": round(share, 4),
        }

    def by_context(self, model: Transformer, prompts: list[list[int]]) -> Said:
        """One row and 16 after longer and longer texts."""
        config, few = model.config, [self.sizes.rows[0], min(16, self.sizes.rows[-1])]
        contexts = [each for each in self.sizes.contexts if each + few[1] <= config.max_positions]
        row = 2 * config.num_layers * config.num_kv_heads * config.head_dim * model.dtype.itemsize
        ms = {str(context): self._timed({"fixed": model}, few, context)["fixed"] for context in contexts}
        floors = {str(context): self._floor(weight_bytes(model) + context * row) for context in contexts}
        far = str(contexts[-1])
        says = f"1 row {ms[str(contexts[0])]['1']:.3g} ms after {contexts[0]} tokens and {ms[far]['1']:.3g} after {far}"
        return f"{says} (floor {floors[far]:.3g})", {"ms": ms, "floor_ms": floors}

    def texts(self, model: Transformer, prompts: list[list[int]], count: int) -> Said:
        """So many texts together, plain and with `auto`; each run is the second of its kind."""
        found: dict[str, dict[str, float]] = {}
        for name in ("plain", "auto"):
            for _ in range(2):
                engine = Engine(model)
                asked = {"max_new_tokens": self.sizes.tokens}
                drafter: Any = None if name == "plain" else "auto"
                texts = [engine.submit(Request(prompt, drafter=drafter, **asked)) for prompt in prompts[:count]]
                synchronize(self.device)
                begun, steps = monotonic(), 0
                while any(not text.finished for text in texts):
                    engine.step()
                    steps += 1
                seconds = monotonic() - begun
            written, passes = (
                sum(each) for each in zip(*((len(t.generated), t.trace.passes) for t in texts), strict=True)
            )
            found[name] = {
                "tokens_per_s": round(written / seconds, 1),
                "ms_per_step": round(1e3 * seconds / steps, 3),
                "tokens_per_pass": round(written / max(passes, 1), 3),
            }
        says = ", ".join(f"{name} {each['tokens_per_s']:,.0f} tokens/s" for name, each in found.items())
        return f"{says} ({found['plain']['ms_per_step']:.3g} ms a step)", found

    def step(self, model: Transformer, prompts: list[list[int]], count: int) -> Said:
        """What a step of plain decoding asks of the device and of Python."""
        engine, steps = Engine(model), self.sizes.steps
        for prompt in prompts[:count]:
            engine.submit(Request(prompt, max_new_tokens=8 * steps + 16))
        for _ in range(4):
            engine.step()
        if engine.running != min(count, len(prompts)):
            raise RuntimeError(f"only {engine.running} of {count} texts are in progress")
        found = counted(self.device, engine.step, steps)
        names = ("graphs", "launches", "waits", "copies", "operators", "python_calls")
        says = ", ".join(f"{found[name]:.0f} {name.replace('_', ' ')}" for name in names)
        return f"{found['step_ms']:.3g} ms, kernels {found['kernel_ms']:.3g} ms; {says}", found

    @torch.no_grad()
    def same(self, model: Transformer, prompts: list[list[int]]) -> Said:
        """Both compute the same logits of a prompt."""
        ours = model.forward(Batch([Segment.chunk(prompts[0], model.new_cache())])).logits.float()
        theirs = logits_of(clone(model), prompts[0]).float()
        error = float((ours - theirs).norm() / theirs.norm())
        if not error <= 5e-2:
            raise AssertionError(f"logits are {error:.1e} away from those of transformers")
        return f"logits within {error:.0e}", {"error": error}

    def _peer(self, name: str, count: int, *, static: bool) -> None:
        def peer(model: Transformer, prompts: list[list[int]]) -> Said:
            rate = generated(clone(model), prompts[:count], self.sizes.tokens, static=static)
            compiled = static and self.device.type == "cuda"
            says = f"{rate:,.0f} tokens/s{', compiled by generate' if compiled else ''}"
            return says, {"tokens_per_s": round(rate, 1), "compiled": compiled}

        how, needs = ("static cache", self.sizes.compile) if static else ("eager", 3.0)
        self._each(name, f"transformers, {how}, {_texts(count)}", peer, needs)


def _texts(count: int) -> str:
    return f"{count} text{'s' if count > 1 else ''}"


def _prompts(loaded: Any, count: int, length: int) -> list[list[int]]:
    """The ends of built-in prompts, all of one length, so that peers need no padding."""
    from decodery.training.data import built_in_prompts

    found = [prompt for prompt in built_in_prompts(loaded, 4 * count) if len(prompt) >= length]
    if len(found) < count:
        raise NotRunError(f"only {len(found)} built-in prompts have {length} tokens")
    return [prompt[-length:] for prompt in found[:count]]
