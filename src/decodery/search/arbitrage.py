"""Arbitrage: a small model writes the steps, and the model itself writes those where it would do better."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..core.ask import Asking
from ..core.ledger import count
from ..core.sequence import Sequence
from ..errors import SettingsError
from ..model.named import Precision
from ..model.protocol import LanguageModel
from ..registry import register
from ..sample.base import require_number
from .judged import Judged
from .second import Second
from .steps import Growth, Node, Stepped


@register(
    "arbitrage",
    paper="Arbitrage: Efficient Reasoning via Advantage-Aware Speculation (2025)",
    guarantee="lossy: by router=oracle no step is worth less than the other model's from the same place",
    needs=("a second model with the same vocabulary, or the one that comes with the target", "a scorer of beginnings"),
    texts=("delimiter",),
)
@dataclass(frozen=True)
class Arbitrage(Stepped, Judged):
    """Lets a second model write each step, and the model itself in its place where that is worth it.

    router: "threshold" keeps a step whose score reaches `theta` (reward-guided speculation, the baseline); "oracle" has
    both models write it, and takes the model's own where that is worth more by over `theta`: no faster, but what any
    router could reach, and in its trace what one would be trained on. scorer: of beginnings and answers. model, dtype:
    the second model, see spec-reason. The model writes from the same place with the same noise, by the request's
    drafter, budget and rule. The trace's tree says who wrote each step and what it was worth; steps are counted as
    "kept", those of the model itself as "escalated", and of these as "wasted" those that are worth no more than the
    step that was left, where both are known. The published router is a model trained to tell from the text and the
    second model's step whether the model would do better; it is not here.
    """

    rounds: int = 150
    step_tokens: int = 2048
    router: Literal["threshold", "oracle"] = "oracle"
    theta: float = 0.0
    model: LanguageModel | str | None = None
    dtype: Precision = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        Judged.__post_init__(self)
        require_number("the theta of arbitrage", self.theta)
        if self.router not in ("threshold", "oracle"):
            raise SettingsError(f"arbitrage has the router threshold or oracle, not {self.router!r}")
        if not (self.judge.answers and self.judge.prefixes):
            raise SettingsError("arbitrage judges texts step by step: give a scorer of beginnings and answers")

    def follow(self, growth: Growth) -> Asking[list[Sequence]]:
        second, node = Second(growth, self.model, self.dtype), growth.root
        yield from growth.read(node.seq)
        while not node.finished:
            drafted = yield from second.write(node)
            yield from growth.read(drafted.seq)
            step = self._by_both if self.router == "oracle" else self._by_threshold
            node = yield from step(growth, node, drafted)
            count("kept" if node is drafted else "escalated")
        return growth.close([node.seq])

    def _by_threshold(self, growth: Growth, node: Node, drafted: Node) -> Asking[Node]:
        judged = yield from growth.judge([drafted])
        if judged and drafted.scores[-1] >= self.theta:
            return drafted
        (own,) = yield from growth.extend([node])
        return own

    def _by_both(self, growth: Growth, node: Node, drafted: Node) -> Asking[Node]:
        (own,) = yield from growth.extend([node])
        judged = yield from growth.judge([drafted, own])
        if own not in judged:
            return drafted
        if drafted not in judged:
            return own
        advantage = own.scores[-1] - drafted.scores[-1]
        if advantage > self.theta:
            count("wasted", advantage <= 0)
            return own
        return drafted
