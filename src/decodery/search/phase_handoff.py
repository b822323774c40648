"""Phase hand-off: one model begins a text, and another one goes on with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from decodery.core.errors import SettingsError
from decodery.core.ledger import count
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.loaders.named import Precision
from decodery.models.loaders.store import Progress, silent
from decodery.models.protocol import LanguageModel
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence, TokenLogprob

from .pool import require_count
from .second import SecondModel
from .step_nodes import Node
from .steps import Growth, Stepped

_LIKELY = 20
"""Tokens whose probabilities an entropy is made of."""


@register(
    "phase-handoff",
    paper="Collaborative Decoding Makes Visual Auto-Regressive Modeling Efficient (2024)",
    guarantee="lossy: nothing is verified; one phase is plain decoding, by whichever model begins",
    requirements=("a second model with the same vocabulary, or the one that comes with the target",),
    texts=("delimiter",),
)
@dataclass(frozen=True)
class PhaseHandoff(Stepped):
    """Lets the model write the beginning of a text, and a second one all that follows.

    Nothing is verified. Both draw with the noise of the text, and penalties see all of it; the model writes by the
    request's drafter, budget and rule. A model reads what the other one wrote in one go, and before the last phase the
    one that has finished gives back the memory of its keys and values. Of sampling both models have the request's
    settings.

    Attributes:
        step_tokens: How many tokens a phase has, fewer where a `delimiter` ends it before.
        rounds: Phases, which the models write in turn, the last one to the text's end; with 1 the model that begins
            writes all.
        begins: Who that is, the "model", as published for images by their scales, or the "second" one.
        below: The model's phase also ends where the entropy of what it draws from, averaged over the last `window`
            tokens of the phase, has fallen below so many nats.
        above: The second model's where its own has risen above. That is of the model's own distribution, whatever the
            sampler makes of it, of its 20 most likely tokens and the others as one. rounds counts these phases, too.
        window: Tokens that entropies are averaged over.
        model, dtype: The second model, as for the drafter draft-model; it needs the same tokens. 64 tokens are no
            published number: in the original 8 of 10 scales of an image are the large model's.
    """

    delimiter: str | tuple[int, ...] | None = None
    step_tokens: int = 64
    rounds: int = 2
    begins: Literal["model", "second"] = "model"
    below: float | None = None
    above: float | None = None
    window: int = 8
    model: LanguageModel | str | None = None
    dtype: Precision = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.begins not in ("model", "second"):
            raise SettingsError(f"phase-handoff begins with the model or the second one, not {self.begins!r}")
        require_count(self._name, "window", self.window)
        if any(limit is not None and not limit >= 0 for limit in (self.below, self.above)):
            raise SettingsError("phase-handoff takes entropies of at least 0 nats for below and above")

    @property
    def requirements(self) -> Requirements:
        return Requirements(rows=True)

    def find(self, engine: Engine, request: Request, progress: Progress = silent) -> ForwardCoroutine[list[Sequence]]:
        if self.below is None and self.above is None:
            return (yield from super().find(engine, request, progress))
        wanted = request.logprobs
        noted = replace(request, logprobs=max(_LIKELY, wanted or 0))
        found = yield from super().find(engine, noted, progress)
        for seq in found:
            seq.rebind(logprobs=wanted)
            for each in seq.token_logprobs:
                each.top = each.top[: wanted or 0]
        return found

    def ends(self, seq: Sequence) -> Callable[[Sequence], bool]:
        limit, falls = (self.above, False) if seq.request.role else (self.below, True)
        end, begin = super().ends(seq), len(seq.token_logprobs)

        def held(text: Sequence) -> bool:
            if limit is None or len(text.token_logprobs) - begin < self.window or end(text):
                return end(text)
            mean = math.fsum(map(entropy, text.token_logprobs[-self.window :])) / self.window
            return mean < limit if falls else mean > limit

        return held

    def follow(self, growth: Growth) -> ForwardCoroutine[list[Sequence]]:
        second, node = SecondModel(growth, self.model, self.dtype), growth.root
        while not node.finished:
            if self._by_model(node):
                (node,) = yield from growth.extend([node])
            else:
                if node.depth + 1 == self.rounds:
                    _forget(growth.root, node)
                node = yield from second.write(node)
            count("handed", not node.finished)
        return growth.close([node.seq])

    def _by_model(self, node: Node) -> bool:
        return (node.depth % 2 == 0) == (self.begins == "model")


def entropy(token: TokenLogprob) -> float:
    """Entropy in nats of the distribution that a token was drawn from, rare tokens taken as one."""
    told = [how for _, how in token.top]
    rest = max(1.0 - math.fsum(map(math.exp, told)), 0.0)
    return -math.fsum(math.exp(how) * how for how in told) - (rest * math.log(rest) if rest > 0 else 0.0)


def _forget(*nodes: Node) -> None:
    """What the text's own model has read is of no use any more."""
    for node in nodes:
        node.seq.cache.truncate(0)
