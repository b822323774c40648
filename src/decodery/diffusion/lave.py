"""LAVE: a token is written only if the canvas can still be completed to a text that the constraint allows."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.registry import register, resolve
from decodery.step.forward_request import ForwardCoroutine

from .base import DiffusionDecoder, UnmaskingPolicy
from .held import Held, Width
from .run import Run
from .scheduled import Scheduled
from .view import Commit, View

_MOST = 64
"""Maximum of `likely`, `top`, `others` and `retries`: the checks of a pass grow with their products."""


class _Left:
    """Proposals of a pass that are not tried yet, the most likely first.

    Args:
        view: The view of the pass.
        tried: Positions and tokens that were tried already.
    """

    def __init__(self, view: View, tried: list[tuple[int, int]]) -> None:
        self._view, self._gone = view, [set[int]() for _ in range(len(view))]
        self._best: list[tuple[float, int]] | None = None
        for place, token in tried:
            self._gone[int(np.searchsorted(view.positions, place))].add(token)

    def next(self, masked: np.ndarray) -> tuple[int, int] | None:
        """Row and token of the most likely proposal at an open position, which is then tried; None where there is none.

        Args:
            masked: [m] bool, which positions are open.
        """
        if self._best is None:
            self._best = [self._of(row) for row in range(len(self._view))]
        rows = [row for row in np.flatnonzero(masked).tolist() if self._best[row][0] > -np.inf]
        if not rows:
            return None
        row = max(rows, key=lambda each: (self._best[each][0], -each))  # type: ignore[index]
        token = self._best[row][1]
        self._gone[row].add(token)
        self._best[row] = self._of(row)
        return row, token

    def _of(self, row: int) -> tuple[float, int]:
        """The most likely untried token of a row, and its log-probability."""
        own = self._view.logprobs[row]
        best, ids = own.topk(min(len(self._gone[row]) + 1, len(own)))
        pairs = zip(best.tolist(), ids.tolist(), strict=True)
        return next(((share, token) for share, token in pairs if token not in self._gone[row]), (-np.inf, 0))


_OWN: dict[str, Any] = {field.name: field.default for field in fields(DiffusionDecoder)}
"""Settings of every method; lave's own are those that count."""


@register(
    "lave",
    paper="Lookahead-then-Verify: Reliable Constrained Decoding for Diffusion LLMs under Context-Free Grammars (2026)",
    guarantee="written tokens are part of a text that the constraint allows and that fits into the canvas; a token may "
    "be refused because no such text was found",
    requirements=("a constraint",),
)
@dataclass(frozen=True)
class LAVE(DiffusionDecoder):
    """Writes the tokens that a policy chooses, if the masks before them can be filled as allowed.

    A filling must also end within the canvas: the constraint searches its states for a short completion, whose length
    is the bound. The released code differs in four points: it does not require an end, it adds probabilities instead of
    their logarithms, it tests fillings at written tokens only, and it clears a block where this fills one hole. All
    policies work that run one state per pass.

    Attributes:
        policy: The policy; its tokens are checked one by one, the most confident first.
        likely: Tokens of a hole that are tried.
        top: Fillings kept per position, the most likely ones.
        others: Fillings kept in addition, drawn at random.
        retries: Number of other tokens to try where no chosen token may be written, or fewer than the policy's schedule
            needs. Then the token of the last filling is written at the first hole, so the number of passes stays as
            planned.
    """

    policy: UnmaskingPolicy | str = "static"
    likely: int = 5
    top: int = 5
    others: int = 5
    retries: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        policy = resolve("diffusion", self.policy)
        if not isinstance(policy, UnmaskingPolicy):
            raise SettingsError(
                "lave runs one state per pass: choose a policy that does so too, such as static or threshold"
            )
        if any(getattr(policy, name) != value for name, value in _OWN.items()):
            raise SettingsError(f"{', '.join(_OWN)} are settings of lave itself: as in lave:policy=static,block=32")
        object.__setattr__(self, "policy", policy)
        sizes = (self.likely, self.top, self.others, self.retries)
        if min(sizes[:2]) < 1 or min(sizes) < 0 or max(sizes) > _MOST:
            raise SettingsError(
                f"lave: likely and top must be from 1 to {_MOST}, others and retries from 0 to {_MOST}, not {sizes}"
            )

    @classmethod
    def around(cls, method: DiffusionDecoder) -> LAVE:
        """Return the method for a constrained canvas: `method` if it is lave, else lave with it as its policy.

        Raises:
            SettingsError: If the method runs several states per pass.
        """
        if isinstance(method, LAVE):
            return method
        if not isinstance(method, UnmaskingPolicy):
            raise SettingsError(
                "a constraint needs a method that runs one state per pass: choose one, such as threshold"
            )
        own: dict[str, Any] = {name: getattr(method, name) for name in _OWN}
        return cls(policy=replace(method, **_OWN), **own)

    def fill(self, run: Run) -> ForwardCoroutine[None]:
        if run.hold is None:
            raise SettingsError("lave needs a constraint: give one, such as --json-schema, or leave out lave")
        if self.eos == "never":
            raise SettingsError("a constrained text must be able to end: leave out eos=never")
        assert isinstance(self.policy, UnmaskingPolicy)
        held = Held(run.hold, run.canvas, Width(self.likely, self.top, self.others))
        for region in run.regions():
            memory = self.policy.begin(run, region)
            while len(run.canvas.open(*region)) and not run.canvas.ended:
                view = yield from run.look(region)
                length = len(run.canvas)
                commit, memory = self.policy.select(view, memory)
                if len(run.canvas) != length:
                    raise SettingsError(
                        "a constraint does not work with a policy that cuts its canvas: give it cut=never"
                    )
                self._write(run, held, view, commit)
                del view

    def _write(self, run: Run, held: Held, view: View, commit: Commit) -> None:
        """Write the tokens of a commit that the constraint allows, or else another token that it allows."""
        rows = np.searchsorted(view.positions, commit.positions)
        order = np.lexsort((commit.positions, -view.confidence[rows]))
        wanted = [(int(commit.positions[each]), int(commit.tokens[each])) for each in order]
        # One after the other: each token is checked with the ones before it written.
        count = sum(self._try(run, held, view, *each) for each in wanted)
        due = len(wanted) if isinstance(self.policy, Scheduled) else 1
        left = _Left(view, wanted)
        while not run.canvas.ended:
            if (end := held.advance()) is not None:
                run.close(held.place, end)
            elif count < due and len(run.canvas.open(*view.region)):
                if not self._retry(run, held, view, left):
                    self._put(run, held, view, held.place, held.next_token(view))
                count += 1
                continue
            return

    def _retry(self, run: Run, held: Held, view: View, left: _Left) -> bool:
        """Write another likely token; returns whether one was allowed.

        Args:
            run: The canvas and its model.
            held: The constraint of the canvas.
            view: Proposals of the pass.
            left: Proposals that are not tried yet.
        """
        for _ in range(self.retries):
            if (found := left.next(run.canvas.masked[view.positions])) is None:
                break
            row, token = found
            if self._try(run, held, view, int(view.positions[row]), token):
                return True
        return False

    def _try(self, run: Run, held: Held, view: View, place: int, token: int) -> bool:
        if run.canvas.tokens[place] != run.canvas.mask_id or not held.accepts(view, place, token):
            return False
        self._put(run, held, view, place, token)
        return True

    def _put(self, run: Run, held: Held, view: View, place: int, token: int) -> None:
        run.write(view, Commit(np.array([place]), np.array([token])))
        if token in run.canvas.eos_ids:
            run.close(place + 1, token)
