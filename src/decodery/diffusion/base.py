"""What a way of filling a canvas is, and what most of them are: a rule that says which proposals are written.

`DiffusionDecoder` is whatever fills a canvas by asking for passes. An `UnmaskingPolicy` is one whose passes are looked
at one by one: a pure function of what the last pass says, and of what it remembers of earlier passes.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal

from decodery.core.abstract import Contract
from decodery.core.errors import SettingsError
from decodery.core.registry import resolve
from decodery.step.forward_request import ForwardCoroutine

from .cache.base import DiffusionCache
from .experts.base import ExpertSharing
from .run import Run
from .view import Commit, Measure, View

__all__ = ["DiffusionDecoder", "Region", "UnmaskingPolicy"]

Region = tuple[int, int]


@dataclass(frozen=True)
class DiffusionDecoder(Contract):
    """A way of filling a canvas.

    Fields are settings; one instance serves many canvases. With the former an unlikely draw has to be the most
    confident one of its pass to be written, with the latter it comes again until it is.

    Attributes:
        block: Places that are filled before those after them, which must divide the canvas; None is the whole canvas,
            or the model's own blocks where its rows see nothing of later ones.
        cache: What is kept of earlier passes, such as "dual"; None computes everything in every pass.
        measure: How sure a proposal is, see `View`.
        eos: Whether ends may be written like other tokens ("free"), rank after them ("last") or are "never" written.
        guidance: How far to go from the distribution without the prompt to that with it, and beyond: l + guidance * (l
            - l without); 0 asks for the one distribution.
        experts: Which experts of a mixture the rows of a pass share, such as "des-vote"; None leaves each row its
            choice.
        noise: At a temperature above 0, whether proposals are drawn anew in every "pass", as published samplers do it,
            or with noise that stays the same at each "position".
        top_k, top_p: Proposals come from the top_k most likely tokens (0: all), of them from the most likely ones
            that have top_p of the probability.
        tempered: Confidence and entropy are those of the distribution that proposals are drawn from, as in Dream's
            and SDAR's released samplers, not of the model's own at temperature 1, as in LLaDA's.
    """

    block: int | None = field(default=None, kw_only=True)
    cache: DiffusionCache | str | None = field(default=None, kw_only=True)
    measure: Measure = field(default="probability", kw_only=True)
    eos: Literal["free", "last", "never"] = field(default="free", kw_only=True)
    guidance: float = field(default=0.0, kw_only=True)
    experts: ExpertSharing | str | None = field(default=None, kw_only=True)
    noise: Literal["pass", "position"] = field(default="pass", kw_only=True)
    top_k: int = field(default=0, kw_only=True)
    top_p: float = field(default=1.0, kw_only=True)
    tempered: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.experts is not None:
            found = None if self.experts == "none" else resolve("expert-sharing", self.experts)
            object.__setattr__(self, "experts", found)
        if self.cache is not None:
            object.__setattr__(self, "cache", None if self.cache == "none" else resolve("diffusion-cache", self.cache))
        if self.block is not None and self.block < 1:
            raise SettingsError(f"a block has at least one place, not {self.block}")
        if not 0 <= self.guidance < float("inf"):
            raise SettingsError(f"guidance must be 0 or more, not {self.guidance}")
        if self.top_k < 0 or not 0 < self.top_p <= 1:
            raise SettingsError(f"top_k is 0 or more and top_p above 0 and up to 1, not {self.top_k} and {self.top_p}")

    @property
    def revises(self) -> bool:
        """Whether it takes back what it has written, so that nothing can be told before the end."""
        return False

    @property
    def foretold(self) -> bool:
        """Whether it writes a place a pass in the order of `shuffled`, which a cache may then know before."""
        return False

    @abstractmethod
    def fill(self, run: Run) -> ForwardCoroutine[None]:
        """Write until nothing is open, or until what is returned cannot change any more."""


@dataclass(frozen=True)
class UnmaskingPolicy(DiffusionDecoder):
    """A way of filling a canvas block by block, one pass after another."""

    def begin(self, run: Run, region: Region) -> Any:
        """What it remembers at the beginning of a region.

        Args:
            run: The canvas with its model.
            region: First and last position (exclusive).
        """
        return None

    @abstractmethod
    def select(self, view: View, memory: Any) -> tuple[Commit, Any]:
        """What is written after a pass, at least one token, and what is remembered from here on.

        Args:
            view: The proposals after the pass.
            memory: What `begin` or `select` gave before.
        """

    def fill(self, run: Run) -> ForwardCoroutine[None]:
        for region in run.regions():
            memory = self.begin(run, region)
            while len(run.canvas.open(*region)) and not run.canvas.ended:
                view = yield from run.look(region)
                commit, memory = self.select(view, memory)
                run.write(view, commit)


def require_share(method: str, name: str, value: float) -> None:
    """Raise SettingsError for a confidence that no probability reaches, or that every one does."""
    if not 0 < value <= 1:
        raise SettingsError(f"{method}: {name} is a probability above 0 and up to 1, not {value}")
