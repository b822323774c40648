"""Codebook features: hidden states as a few codes per place, which can be counted, and forced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.core.threads import one_thread
from decodery.models.hooks import OF_LAYERS, Intervention, hook_point
from decodery.models.loaders.fields import Kind, Listed, Text, Whole
from decodery.models.protocol import Reader
from decodery.models.trained.artifact import Artifact, TrainedPart, expect, refuse_other
from decodery.step.monitor import Monitor, Row
from decodery.step.sequence import Sequence

__all__ = ["Codebooks"]

ABLATED = -1

Edit = tuple[int, int, int]
"""The number of a site, a group (a head, or 0), and a code, or `ABLATED`."""


@dataclass(frozen=True, eq=False)
class Codebooks(TrainedPart):
    """Codes of some hook points.

    Attributes:
        tensors: "codes.i" [groups, codes, dim] of the i-th hook point, whose rows are groups * dim wide: one group per
            head at a head output, one elsewhere.
        sites: Their taps.
        k: Codes that a row has in each group.
        model: `fingerprint` of the model they were trained in.
    """

    KIND = "codebooks"
    FILE = "codebook.safetensors"
    MADE = "make some with `decodery train codebook -m MODEL TEXTS --out DIR`"
    FACTS: ClassVar[Mapping[str, Kind]] = {"sites": Listed(Text(64), 256), "k": Whole(1, 1 << 10)}

    tensors: Mapping[str, torch.Tensor]
    sites: tuple[str, ...]
    k: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""

    def codes(self, number: int) -> torch.Tensor:
        return self.tensors[f"codes.{number}"].double()

    @one_thread()
    def ids(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        """[n, groups, k] nearest codes of rows [n, width] at a hook point.

        Distance is by direction, after the norm; the nearest comes first.
        """
        return nearest(rows.double(), self.codes(number).to(rows.device), self.k)

    @one_thread()
    def values(self, number: int, ids: torch.Tensor) -> torch.Tensor:
        """[n, width] float64 means of the codes of ids [n, groups, k]; an ablated code is 0."""
        return mean_of(self.codes(number).to(ids.device), ids).flatten(1)

    def artifact(self) -> Artifact:
        facts = {**self.facts, "sites": list(self.sites), "k": self.k}
        return Artifact(self.KIND, self.tensors, facts, self.model)

    @classmethod
    def from_artifact(cls, found: Artifact) -> Codebooks:
        sites, k, tensors = tuple(found.facts["sites"]), found.facts["k"], found.tensors
        expect(set(tensors) == {f"codes.{number}" for number in range(len(sites))})
        expect(all(each.ndim == 3 and each.shape[1] >= k and each.numel() for each in tensors.values()))
        expect(all(tap.partition(".")[0] in OF_LAYERS for tap in sites))
        return cls(tensors, sites, k, found.facts, found.model)


def nearest(rows: torch.Tensor, codes: torch.Tensor, k: int) -> torch.Tensor:
    """[n, groups, k] ids.

    Args:
        rows: [n, groups * dim].
        codes: [groups, codes, dim].
    """
    groups, _, dim = codes.shape
    normed = torch.nn.functional.layer_norm(rows.unflatten(-1, (groups, dim)), (dim,))
    directions = codes / codes.norm(dim=-1, keepdim=True).clamp_min(1e-9)
    return torch.einsum("ngd,gcd->ngc", normed, directions).topk(k, dim=-1).indices


def mean_of(codes: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[n, groups, dim].

    Args:
        codes: [groups, codes, dim].
        ids: [n, groups, k].
    """
    groups = torch.arange(codes.shape[0], device=ids.device)[None, :, None]
    found = codes[groups, ids.clamp_min(0)]
    return torch.where((ids >= 0)[..., None], found, torch.zeros_like(found)).mean(dim=2)


def coding(codebooks: Codebooks, edits: Iterable[Edit] = ()) -> tuple[Intervention, ...]:
    """Changes that replace rows by their codes at every hook point, with edits applied."""
    forced = list(edits)

    def change(number: int) -> Any:
        own = [(group, code) for at, group, code in forced if at == number]

        def coded(rows: torch.Tensor, segment: object) -> torch.Tensor:
            ids = codebooks.ids(number, rows)
            for group, code in own:
                ids[:, group] = code
            return codebooks.values(number, ids).to(rows.dtype)

        return coded

    return tuple(Intervention(tap, change(number)) for number, tap in enumerate(codebooks.sites))


@register(
    "codebook",
    paper="Codebook Features: Sparse and Discrete Interpretability for Neural Networks (2023)",
    guarantee="read-only unless action=switch, which writes with another model: the one whose states are their codes",
    requirements=("codebooks made by decodery train codebook",),
)
@dataclass(frozen=True)
class Codebook(Monitor):
    """Scores tokens by the codes of their rows; can also replace states by codes, or force codes.

    The code is the paper's, which takes the mean of codes where its text has their sum. Cost: a product with the
    codebook per hook point.

    Attributes:
        codebooks: A file or folder made by `decodery train codebook`, or a `Codebooks`.
        watch: Codes that stand for a concept, each site:group:code by number; the score is the share of them that the
            newest row has, without any there is none.
        force: With "switch", the code that a hook point's group has in every row, site:group:code, where -1 takes a
            group's codes out, which still count in the mean.
        action: "switch" replaces the states at every hook point by the mean of their codes, in prompt and answer, which
            is what they were trained for; without it they are only read.
    """

    waits = "states"

    codebooks: Codebooks | str | None = None
    watch: tuple[tuple[int, int, int], ...] = ()
    force: tuple[tuple[int, int, int], ...] = ()
    action: Literal["flag", "stop", "switch"] = field(default="flag", kw_only=True)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        object.__setattr__(self, "codebooks", Codebooks.load(self.codebooks, "codebook:codebooks"))
        if self.force and self.action != "switch":
            raise SettingsError("codes are forced where states are replaced by them: add action=switch")
        for edits, least in ((self.watch, 0), (self.force, ABLATED)):
            for number, group, code in edits:
                shape = self.trained.codes(number).shape if 0 <= number < len(self.trained.sites) else (0, 0)
                if not 0 <= group < shape[0] or not least <= code < shape[1]:
                    sites = ", ".join(f"{at} ({tap})" for at, tap in enumerate(self.trained.sites))
                    raise SettingsError(
                        f"there is no code {number}:{group}:{code}, by site, group and code: the sites are {sites}"
                        + (f", with {shape[0]} groups of {shape[1]} codes" if shape[0] else "")
                    )

    @property
    def trained(self) -> Codebooks:
        assert isinstance(self.codebooks, Codebooks)
        return self.codebooks

    @property
    def requirements(self) -> Requirements:
        read = dict.fromkeys(f"given.{self.trained.sites[number]}" for number, _, _ in self.watch)
        return Requirements(taps=tuple(read), changes=self.action == "switch")

    def fits(self, model: Reader) -> None:
        trained, config = self.trained, model.config
        for number, tap in enumerate(trained.sites):
            heads = hook_point(tap, config.num_layers).name == "head_out"
            groups, _, dim = trained.codes(number).shape
            if (groups, dim) != ((config.num_heads, config.head_dim) if heads else (1, config.hidden_size)):
                raise SettingsError(f"these codebooks are of a model of another size: {trained.MADE}")
        refuse_other("these codebooks", trained.model, model, trained.MADE)

    def start(self, seq: Sequence) -> float | None:
        return None

    def observe(self, state: float | None, row: Row) -> float | None:
        if not self.watch:
            return None
        found = 0
        for number, group, code in self.watch:
            ids = self.trained.ids(number, row.hidden[f"given.{self.trained.sites[number]}"][None])
            found += bool((ids[0, group] == code).any())
        return found / len(self.watch)

    def score(self, state: float | None) -> float | None:
        return state

    def steering(self, state: float | None) -> str | None:
        return "codes" if self.action == "switch" else None

    def changes(self, steering: Any) -> tuple[Intervention, ...]:
        return coding(self.trained, self.force)
