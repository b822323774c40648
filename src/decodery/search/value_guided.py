"""Value-guided search: beams over blocks of tokens, side by side, whose texts vote in the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence

from .pool import require_count
from .step_nodes import Node, distinct
from .steps import Growth, StepSearch


@register(
    "value-guided",
    paper="Value-Guided Search for Efficient Chain-of-Thought Reasoning (2025)",
    guarantee="n=1, width=1 is plain decoding, and rounds=1 weighted-vote; none on quality",
    requirements=("a scorer of beginnings and answers",),
    texts=("delimiter", "pattern"),
)
@dataclass(frozen=True)
class ValueGuided(StepSearch):
    """Draws n blocks of tokens in `lines` beams, keeps the texts of highest value, and takes a vote.

    A step is a block of `step_tokens` tokens, so that no rule for the end of a step of reasoning is needed; a
    delimiter may end it sooner. The published budgets are 64 to 256 blocks a round. The other settings are those of all
    searches over steps, see step-beam. Guidance by a value token by token is the source controlled-decoding.

    Attributes:
        choose: "vote" weights each text's answer by its value.
        n: Blocks in a round.
        width: Blocks after each text that is kept.
        lines: Beams that do not compete, None for as many as keep one text each. A line keeps n / lines / width texts.
            A text that ends leaves its line, and a line ends with its texts.
        scorer: Of beginnings wherever a block ends, and answers, as in value-head(head=FILE).
    """

    delimiter: str | tuple[int, ...] | None = None
    step_tokens: int = 4096
    choose: Literal["best", "vote"] = "vote"
    n: int = 16
    width: int = 2
    lines: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("n", "width"):
            require_count("value-guided", name, getattr(self, name))
        lines = self.lines if self.lines is not None else self.n // self.width
        if lines < 1 or self.n % (lines * self.width):
            raise SettingsError(
                f"value-guided draws width={self.width} blocks after each text of each line: give an n that "
                f"width times lines divides, not {self.n}"
            )

    def follow(self, growth: Growth) -> ForwardCoroutine[list[Sequence]]:
        count = self.lines or self.n // self.width
        each = self.n // count
        lines, ended = [[growth.root]] * count, list[Node]()
        while any(lines):
            lines = [line for line in lines if line]
            # A line that has fewer texts than it may keep divides its blocks among them.
            parents = [line[number % len(line)] for line in lines for number in range(each)]
            drawn = yield from growth.extend(parents)
            judged = {id(node) for node in (yield from growth.judge(drawn))}
            for number, first in enumerate(range(0, len(drawn), each)):
                nodes = [node for node in distinct(drawn[first : first + each]) if id(node) in judged]
                ended += [node for node in nodes if node.finished]
                going = sorted((node for node in nodes if not node.finished), key=lambda node: -self.worth(node))
                lines[number] = going[: each // self.width]
        return (yield from growth.finish(ended))
