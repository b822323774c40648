"""Arbitrage: a small model writes the steps, and the model itself writes those where it would do better."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decodery.core.errors import SettingMissing, SettingsError
from decodery.core.ledger import count
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.models.loaders.named import Precision
from decodery.models.protocol import LanguageModel, Reader
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.sampling.logits_processor import require_number
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.scorer import Scorer
from decodery.step.sequence import Sequence

from .judged import JudgedSearch
from .router import RouterHead
from .second import SecondModel, second_model
from .step_nodes import Node
from .steps import Growth, Stepped


@register(
    "arbitrage",
    paper="Arbitrage: Efficient Reasoning via Advantage-Aware Speculation (2025)",
    guarantee="lossy: with router=oracle no step scores less than the other model's from the same position",
    requirements=(
        "a second model with the same vocabulary, or the one that comes with the target",
        "a scorer of beginnings, or a router made by decodery train router",
    ),
    texts=("delimiter",),
)
@dataclass(frozen=True)
class Arbitrage(Stepped, JudgedSearch):
    """Lets a second model write each step, and the model itself in its place where that is worth it.

    The model writes from the same place with the same noise, by the request's drafter, budget and rule. The trace's
    tree says who wrote each step and what it was worth; steps are counted as "kept", those of the model itself as
    "escalated", and of these as "wasted" those that are worth no more than the step that was left, where both are
    known.

    Attributes:
        scorer: Of beginnings and answers, for these two alone.
        router: A file made by `decodery train router`, or a `RouterHead`, which tells by the second model's state how
            likely the model itself would do better; the step is kept below `theta`, and the model reads nothing until
            it writes. Without one: "threshold" keeps a step whose score reaches `theta` (reward-guided speculation, the
            baseline); "oracle" has both models write it, and takes the model's own where that is worth more by over
            `theta`: no faster, but what any router could reach, and what one is trained on.
        theta: The threshold, see `router`.
        model, dtype: The second model, see spec-reason.
    """

    scorer: Scorer | str | None = None  # type: ignore[assignment]
    rounds: int = 150
    step_tokens: int = 2048
    router: RouterHead | str = "oracle"
    theta: float = 0.0
    model: LanguageModel | str | None = None
    dtype: Precision = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("the theta of arbitrage", self.theta)
        if self.router not in ("threshold", "oracle"):
            if self.scorer is not None:
                raise SettingsError("arbitrage takes a trained router or a scorer, not both: leave one of the two out")
            if isinstance(self.router, str):
                object.__setattr__(self, "router", RouterHead.load(self.router))
            return
        if self.scorer is None:
            raise SettingMissing(
                f"arbitrage compares steps by a scorer where router={self.router}: give one, as in scorer=..."
            )
        JudgedSearch.__post_init__(self)
        if not (self.judge.answers and self.judge.prefixes):
            raise SettingsError("arbitrage judges texts step by step: give a scorer of beginnings and answers")

    def second(self, target: Reader) -> LanguageModel:
        """The second model for texts of `target`."""
        return second_model(self.model, self.dtype, target)

    @property
    def requirements(self) -> Requirements:
        return Requirements(rows=True, taps=() if self.scorer is None else self.judge.requirements.taps)

    def bind(self, tokenizer: Tokenizer) -> Arbitrage:
        return self if self.scorer is None else super().bind(tokenizer)

    def fits(self, model: Reader) -> None:
        if self.scorer is not None:
            super().fits(model)

    def follow(self, growth: Growth) -> ForwardCoroutine[list[Sequence]]:
        second, node = SecondModel(growth, self.model, self.dtype), growth.root
        if isinstance(self.router, RouterHead):
            self.router.fits(second.model)
        else:
            yield from growth.read(node.seq)
        while not node.finished:
            drafted = yield from second.write(node)
            if isinstance(self.router, RouterHead):
                chosen = yield from self._by_router(self.router, growth, second, node, drafted)
            else:
                yield from growth.read(drafted.seq)
                step = self._by_both if self.router == "oracle" else self._by_threshold
                chosen = yield from step(growth, node, drafted)
            node = chosen
            growth.settle([node])
            count("kept" if node is drafted else "escalated")
        yield from growth.read(node.seq)
        return growth.close([node.seq])

    def _by_router(
        self, router: RouterHead, growth: Growth, second: SecondModel, node: Node, drafted: Node
    ) -> ForwardCoroutine[Node]:
        state = yield from second.state(router.tap)
        escalated = node.number >= 0 and not growth.trace.grown[node.number].author
        if float(router.better(state[None], torch.tensor([escalated], dtype=torch.bool, device="cpu"))[0]) < self.theta:
            return drafted
        (own,) = yield from growth.extend([node])
        return own

    def _by_threshold(self, growth: Growth, node: Node, drafted: Node) -> ForwardCoroutine[Node]:
        judged = yield from growth.judge([drafted])
        if judged and drafted.scores[-1] >= self.theta:
            return drafted
        (own,) = yield from growth.extend([node])
        return own

    def _by_both(self, growth: Growth, node: Node, drafted: Node) -> ForwardCoroutine[Node]:
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
