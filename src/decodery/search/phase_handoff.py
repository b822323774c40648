"""Phase hand-off: one model begins a text, and another one goes on with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..core.ask import Asking
from ..core.ledger import count
from ..core.needs import Needs
from ..core.sequence import Sequence
from ..errors import SettingsError
from ..model.named import Precision
from ..model.protocol import LanguageModel
from ..registry import register
from .second import Second
from .steps import Growth, Node, Stepped


@register(
    "phase-handoff",
    paper="Collaborative Decoding Makes Visual Auto-Regressive Modeling Efficient (2024)",
    guarantee="lossy: nothing is verified; one phase is plain decoding, by whichever model begins",
    needs=("a second model with the same vocabulary, or the one that comes with the target",),
    texts=("delimiter",),
)
@dataclass(frozen=True)
class PhaseHandoff(Stepped):
    """Lets the model write the beginning of a text, and a second one all that follows; nothing is verified.

    step_tokens: how many tokens a phase has, fewer where a `delimiter` ends it before. rounds: phases, which the models
    write in turn, the last one to the text's end; with 1 whoever begins writes all. begins: who that is, the "model",
    as published for images by their scales, or the "second" one. model, dtype: the second model, as for the drafter
    draft-model; it needs the same tokens. Both draw with the noise of the text, and penalties see all of it; the model
    writes by the request's drafter, budget and rule. A model reads what the other one wrote in one go, and before the
    last phase the one that has finished gives back the memory of its keys and values. 64 tokens are no published
    number: in the original 8 of 10 scales of an image are the large model's. Handing over by difficulty is not here,
    and of sampling both phases have the request's.
    """

    delimiter: str | tuple[int, ...] | None = None
    step_tokens: int = 64
    rounds: int = 2
    begins: Literal["model", "second"] = "model"
    model: LanguageModel | str | None = None
    dtype: Precision = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.begins not in ("model", "second"):
            raise SettingsError(f"phase-handoff begins with the model or the second one, not {self.begins!r}")

    @property
    def needs(self) -> Needs:
        return Needs(rows=True)

    def follow(self, growth: Growth) -> Asking[list[Sequence]]:
        second, node = Second(growth, self.model, self.dtype), growth.root
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


def _forget(*nodes: Node) -> None:
    """What the text's own model has read is of no use any more."""
    for node in nodes:
        node.seq.cache.truncate(0)
