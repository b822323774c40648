"""A probe: what a small trained part reads off hidden states, with what they were standardised by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.threads import one_thread
from decodery.models.hooks import hook_point
from decodery.models.loaders.fields import Kind, Named, Text, Whole
from decodery.models.protocol import Reader
from decodery.models.trained.artifact import Artifact, TrainedPart, expect

from .threshold import Threshold

__all__ = ["Probe"]


@dataclass(frozen=True, eq=False)
class Probe(TrainedPart):
    """A linear map or an MLP with ReLU on standardised rows, whose outputs are logits.

    There is one logit, or one per class of every field that `facts["fields"]` names, as {name: classes}.

    Attributes:
        tensors: "mean" and "scale" [width] of the rows it learned from, and "weight.i" [out, in] and "bias.i" [out] of
            its layers.
        site: The tap that is read.
        pool: "new" for a token's own row, "prompt" for the mean of the prompt's rows beside the last of them, "answer"
            for the mean of the answer's.
        model: `fingerprint` of the model it reads, "" where that is not known.
    """

    KIND = "probe"
    FILE = "probe.safetensors"
    MADE = "make one with `decodery train probe -m MODEL QUESTIONS --out DIR`"
    FACTS: ClassVar[Mapping[str, Kind]] = {"site": Text(64), "pool": Text(16), "fields": Named(Whole(2, 1 << 12), 16)}

    tensors: Mapping[str, torch.Tensor]
    site: str
    pool: str
    threshold: Threshold
    facts: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""

    @cached_property
    def layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Weight and bias of each, in double precision."""
        number = sum(name.startswith("weight.") for name in self.tensors)
        return [(self.tensors[f"weight.{at}"].double(), self.tensors[f"bias.{at}"].double()) for at in range(number)]

    @property
    def fields(self) -> dict[str, int]:
        """What is read, and how many classes each has; none where there is one logit alone."""
        return dict(self.facts.get("fields", {}))

    @cached_property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
        """Mean, scale and layers in double precision: numpy takes a row in a tenth of the time that PyTorch takes."""
        mean, scale = (self.tensors[name].double().cpu().numpy() for name in ("mean", "scale"))
        return mean, scale, [(weight.cpu().numpy(), bias.cpu().numpy()) for weight, bias in self.layers]

    def read_row(self, row: torch.Tensor) -> tuple[float, float]:
        """`score` and `distance` of one row.

        Args:
            row: [width] as the hook point gives it, pooled as `pool` says.
        """
        mean, scale, layers = self._arrays
        found = apart = (row.double().cpu().numpy() - mean) / scale
        for number, (weight, bias) in enumerate(layers):
            found = weight @ found + bias
            if number + 1 < len(layers):
                found = np.maximum(found, 0.0)
        # Of the tangent, which overflows nowhere.
        return float(0.5 + 0.5 * np.tanh(found[0] / 2)), float(apart @ apart / len(apart))

    def score(self, rows: torch.Tensor) -> torch.Tensor:
        """[n] probabilities, float64.

        Args:
            rows: [n, width] as the hook point gives them, pooled as `pool` says.
        """
        return self.logits(rows)[:, 0].sigmoid()

    @one_thread()
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, outputs] float64, for rows as `score` takes them."""
        found = (rows.double().cpu() - self.tensors["mean"].double()) / self.tensors["scale"].double()
        for number, (weight, bias) in enumerate(self.layers):
            found = found @ weight.T + bias
            if number + 1 < len(self.layers):
                found = found.relu()
        return found

    @one_thread()
    def distance(self, rows: torch.Tensor) -> torch.Tensor:
        """[n] float64 mean squares of standardised rows, about 1 where they are like those learned from."""
        apart = (rows.double().cpu() - self.tensors["mean"].double()) / self.tensors["scale"].double()
        return apart.square().mean(dim=-1)

    @property
    def usual(self) -> float:
        """Rows of a larger `distance` are unlike those learned from; infinity where it was not measured."""
        return float(self.facts.get("inputs", {}).get("limit", math.inf))

    def likely(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Of every field its classes' probabilities [n, classes], float64."""
        return [part.softmax(dim=-1) for part in self.logits(rows).split(list(self.fields.values()), dim=1)]

    def to_tensors(self) -> dict[str, torch.Tensor]:
        """Plain tensors for rows as they are: "weight" and "bias", or "weight.i" and "bias.i" of layers.

        What rows are standardised by is folded into the first layer. `from_tensors` reads them again.
        """
        scale, mean = self.tensors["scale"].double(), self.tensors["mean"].double()
        layers = [(weight.clone(), bias.clone()) for weight, bias in self.layers]
        weight, bias = layers[0]
        layers[0] = weight / scale, bias - (weight / scale) @ mean
        if len(layers) == 1:
            return {"weight": layers[0][0].float(), "bias": layers[0][1].float()}
        named = {f"weight.{at}": weight.float() for at, (weight, _) in enumerate(layers)}
        return named | {f"bias.{at}": bias.float() for at, (_, bias) in enumerate(layers)}

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, torch.Tensor], site: str, *, pool: str = "new", threshold: float = 0.5
    ) -> Probe:
        """A probe of plain tensors, such as those of a logistic regression on hidden states.

        Args:
            tensors: "weight" [width] or [1, width] and "bias", a number or [1], which give the logit of what is looked
                for; or the layers of an MLP with ReLU, as `to_tensors` names them.
            site: The hook point of the rows, such as resid_post.10.
            pool: Which rows are read, see `Probe`.
            threshold: Probabilities above it are flagged; `decodery train threshold` sets one that promises a rate.

        Raises:
            SettingsError: The tensors are others, or do not fit each other.
        """
        given = dict(tensors)
        try:
            if set(given) == {"weight", "bias"}:
                given = {"weight.0": torch.atleast_2d(given["weight"]), "bias.0": given["bias"].reshape(1)}
            width, outputs = chained(given)
            expect(outputs == 1 and pool in ("new", "prompt", "answer"))
            expect(set(given) == {f"{kind}.{at}" for kind in ("weight", "bias") for at in range(len(given) // 2)})
            expect(all(bool(each.isfinite().all()) for each in given.values()))
        except (KeyError, ValueError, RuntimeError, IndexError) as error:
            raise SettingsError(
                "a probe has the tensors weight and bias, or weight.i and bias.i of layers that fit each other, with "
                "one output, and the pool new, prompt or answer"
            ) from error
        plain = {
            name: torch.full((width,), value, dtype=torch.float32, device="cpu")
            for name, value in (("mean", 0.0), ("scale", 1.0))
        }
        made = {name: each.detach().float().cpu() for name, each in given.items()}
        return cls(made | plain, site, pool, Threshold(threshold, 0.5, 0, ""))

    def require(self, model: Reader, pool: str, made: str) -> None:
        """Raise SettingsError for a model it was not trained for, or a monitor that pools rows in another way.

        Args:
            made: How one is made that would do.
        """
        if self.pool != pool:
            raise SettingsError(f"this probe reads {self.pool} rows, and here {pool} rows are needed: {made}")
        hook_point(self.site, model.config.num_layers)
        width = model.config.hidden_size * (2 if pool == "prompt" else 1)
        if len(self.tensors["mean"]) != width:
            raise SettingsError(f"this probe reads {len(self.tensors['mean'])} numbers and here are {width}: {made}")
        self.refuse_other(model, made)

    def artifact(self) -> Artifact:
        facts = {**self.facts, "site": self.site, "pool": self.pool, "fields": self.fields}
        facts["threshold"] = self.threshold.facts()
        return Artifact(self.KIND, self.tensors, facts, self.model)

    @classmethod
    def from_artifact(cls, found: Artifact) -> Probe:
        facts, tensors = found.facts, found.tensors
        width, classes = len(tensors["mean"]), sum(facts["fields"].values()) or 1
        expect(chained(tensors) == (width, classes))
        expect(tuple(tensors["scale"].shape) == (width,) and bool((tensors["scale"] > 0).all()))
        inputs = facts.get("inputs", {})
        expect(isinstance(inputs, dict) and isinstance(inputs.get("limit", 1.0), int | float))
        threshold = Threshold.of(facts.get("threshold") or {})
        return cls(tensors, facts["site"], facts["pool"], threshold, facts, found.model)


def chained(tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    """The widths that layers "weight.i" and "bias.i" read and give.

    Raises ValueError where they do not fit.
    """
    weights = [tensors[f"weight.{at}"] for at in range(sum(name.startswith("weight.") for name in tensors))]
    expect(bool(weights) and all(weight.ndim == 2 for weight in weights))
    expect(all(before.shape[0] == after.shape[1] for before, after in pairwise(weights)))
    expect(all(tuple(tensors[f"bias.{at}"].shape) == (len(weight),) for at, weight in enumerate(weights)))
    return weights[0].shape[1], len(weights[-1])


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """Running summary of a prompt's rows at a hook point: count, sum [width] float64, and last row."""

    count: int = 0
    total: torch.Tensor | None = None
    last: torch.Tensor | None = None

    def with_rows(self, rows: torch.Tensor) -> Pool:
        """The pool with further rows [n, width]; row by row, so that chunks of any size make the same sum."""
        found = rows.double().cpu()
        total = torch.zeros_like(found[0]) if self.total is None else self.total.clone()
        for row in found:
            total += row
        return Pool(self.count + len(found), total, found[-1])

    def numbers(self) -> torch.Tensor:
        """[2 * width] float64: the mean of the rows beside the last of them."""
        assert self.total is not None and self.last is not None
        return torch.cat((self.total / self.count, self.last))
