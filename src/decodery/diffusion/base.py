"""Base classes of the methods that fill a canvas.

A `DiffusionDecoder` fills a canvas and requests the forward passes for it. An `UnmaskingPolicy` is the usual kind: it
chooses, after each pass, which proposals are written. The choice is a pure function of the last pass and of the
policy's own memory of earlier passes.
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
    """A method that fills a canvas.

    Fields are settings; one instance serves many canvases.

    Attributes:
        block: Size of the blocks that are filled one after the other, in tokens; it must divide the canvas. None is
            the whole canvas, or the model's own block size where its rows do not attend to later blocks.
        cache: How keys and values of earlier passes are reused, such as "dual"; None computes all rows in every pass.
        measure: How the confidence of a proposal is measured, see `View`.
        eos: Whether end tokens are written like other tokens ("free"), rank after them ("last") or are "never" written.
        guidance: Weight of classifier-free guidance: l + guidance * (l - l_without_prompt), where l are the logits; 0
            computes only l.
        experts: Which experts of a mixture the rows of a pass share, such as "des-vote"; None routes each row
            separately.
        noise: Noise of the draws at a temperature above 0. "pass" draws new noise in every pass, as published samplers
            do: an unlikely token is written only if it is the most confident proposal of its pass. "position" keeps
            the noise of a position: an unlikely token is proposed again until it is written.
        top_k: Proposals are drawn from this many most likely tokens; 0 is all.
        top_p: Of those, from the most likely ones that together have this probability.
        tempered: True measures confidence and entropy on the distribution that proposals are drawn from, as Dream's
            and SDAR's released samplers do. False measures them at temperature 1, as LLaDA's does.
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
            raise SettingsError(f"block must be at least 1, not {self.block}")
        if not 0 <= self.guidance < float("inf"):
            raise SettingsError(f"guidance must be 0 or more, not {self.guidance}")
        if self.top_k < 0 or not 0 < self.top_p <= 1:
            raise SettingsError(
                f"top_k must be 0 or more, and top_p above 0 and up to 1, not {self.top_k} and {self.top_p}"
            )

    @property
    def revises(self) -> bool:
        """Whether it may replace written tokens, so that no text can be streamed before the end."""
        return False

    @property
    def predictable_order(self) -> bool:
        """Whether each pass writes one position in the order of `shuffled`, which is fixed ahead."""
        return False

    @property
    def states(self) -> int:
        """States of the canvas that a pass scores at most."""
        return 1

    @property
    def blocks_at_once(self) -> int:
        """Blocks that a pass looks at, at most."""
        return 1

    @abstractmethod
    def fill(self, run: Run) -> ForwardCoroutine[None]:
        """Write until no position is open, or until the output cannot change any more."""


@dataclass(frozen=True)
class UnmaskingPolicy(DiffusionDecoder):
    """A method that fills a canvas block by block, one pass after another."""

    def begin(self, run: Run, region: Region) -> Any:
        """Return the policy's memory at the beginning of a region.

        Args:
            run: The canvas with its model.
            region: First and last position (exclusive).
        """
        return None

    @abstractmethod
    def select(self, view: View, memory: Any) -> tuple[Commit, Any]:
        """Choose what is written after a pass.

        Args:
            view: The proposals after the pass.
            memory: The memory that `begin` or the last `select` returned.

        Returns:
            At least one token to write, and the memory for the next pass.
        """

    def fill(self, run: Run) -> ForwardCoroutine[None]:
        for region in run.regions():
            memory = self.begin(run, region)
            while len(run.canvas.open(*region)) and not run.canvas.ended:
                view = yield from run.look(region)
                commit, memory = self.select(view, memory)
                run.write(view, commit)
                # Its distributions would still be there while those of the next pass are made.
                del view


def require_share(method: str, name: str, value: float) -> None:
    """Raise SettingsError unless a threshold on confidence is above 0 and up to 1."""
    if not 0 < value <= 1:
        raise SettingsError(f"{method}: {name} must be a probability above 0 and up to 1, not {value}")
