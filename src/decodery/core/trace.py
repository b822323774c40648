"""What each step did, what all of them spent, and the figures of a whole generation."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from .ledger import Ledger


@dataclass(frozen=True, slots=True)
class RecordedTree:
    """The draft of one step and what became of it.

    Attributes:
        tokens, parents: [n] of its nodes, of which the first is the last token, with parent -1.
        path: The nodes below it that were accepted.
        emitted: What the text grew by, after them the one token that the rule chose.
    """

    tokens: list[int]
    parents: list[int]
    path: list[int]
    emitted: list[int]


@dataclass(slots=True)
class Step:
    """One sequence's part in one pass.

    Attributes:
        nodes: Drafted tokens (the last token not counted).
        accepted: How many of them became text.
        emitted: Tokens the sequence grew by.
        rows: Rows fed to the model. Times are in seconds and those of the whole pass, which the sequences of a batch
            share.
        prefill: The pass read prompt tokens.
        choices: For every node with children that the rule came to, top down, which of them it accepted, counted from 0
            in draw order, -1 for none, and how many it had.
        tree: The draft itself, where the request asked to keep it.
    """

    nodes: int = 0
    accepted: int = 0
    emitted: int = 0
    rows: int = 0
    prefill: bool = False
    propose: float = 0.0
    score: float = 0.0
    choose: float = 0.0
    commit: float = 0.0
    sequences: int = 1
    choices: list[tuple[int, int]] = field(default_factory=list)
    tree: RecordedTree | None = None

    @property
    def seconds(self) -> float:
        return self.propose + self.score + self.choose + self.commit


@dataclass(slots=True)
class Grown:
    """A part of a text that a search had written: an edge of its tree.

    Attributes:
        parent: The number of the part that it goes on from, -1 for the prompt.
        tokens: Its own.
        score: What it was found worth, None if there was no scorer or no answer.
        finish: How the text ended with it, None where it did not.
        author: The model that wrote it, "" for the text's own.
    """

    parent: int
    tokens: list[int]
    score: float | None = None
    finish: str | None = None
    author: str = ""


@dataclass(slots=True, repr=False)
class Trace:
    """All steps of one sequence.

    Figures count decoding alone: prefill passes and the first token stay out.

    Attributes:
        steps: In order. Texts that shared a pass without drafts may have the same object.
        ledger: All that was spent, prefill and other models than the target included.
        grown: What a search has written in parts, in the order it was begun; empty for anything else.
        visits: The part that each of its simulations came to, where a search makes some.
        notes: What a method decided on the way and why, one sentence each.
    """

    steps: list[Step] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    grown: list[Grown] = field(default_factory=list)
    visits: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        figures = f"{self.tokens_per_pass:.2f} tokens per pass, {self.seconds:.2f} s"
        return f"Trace({len(self.steps)} steps, {figures})"

    @property
    def decoding(self) -> list[Step]:
        return [step for step in self.steps if not step.prefill]

    @property
    def passes(self) -> int:
        """Target passes after prefill."""
        return len(self.decoding)

    @property
    def rows(self) -> int:
        """Rows fed to the target after prefill."""
        return sum(step.rows for step in self.decoding)

    @property
    def tokens(self) -> int:
        """Tokens emitted after prefill, the bonus token of every pass included."""
        return sum(step.emitted for step in self.decoding)

    @property
    def tokens_per_pass(self) -> float:
        """Mean tokens a pass adds; 1 for plain decoding, 0 where nothing was decoded."""
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def prefill_seconds(self) -> float:
        return sum(step.seconds for step in self.steps if step.prefill)

    @property
    def decode_seconds(self) -> float:
        return sum(step.seconds for step in self.decoding)

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    @property
    def tokens_per_second(self) -> float:
        """Tokens emitted after prefill by the time spent after prefill."""
        return self.tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def share(self) -> dict[str, float]:
        """Which part of the decoding time each of the four parts took."""
        total = self.decode_seconds or 1.0
        parts = ("propose", "score", "choose", "commit")
        return {part: sum(getattr(step, part) for step in self.decoding) / total for part in parts}

    def summary(self) -> dict[str, Any]:
        """The figures as plain data."""
        return {
            "passes": self.passes,
            "rows": self.rows,
            "tokens_per_pass": round(self.tokens_per_pass, 4),
            "tokens_per_second": round(self.tokens_per_second, 2),
            "seconds": round(self.seconds, 4),
            "prefill_seconds": round(self.prefill_seconds, 4),
            "share": {part: round(value, 4) for part, value in self.share.items()},
            "ledger": self.ledger.summary(),
        }

    def to_dict(self) -> dict[str, Any]:
        """Summary and every step, for files."""
        grown = {"grown": [asdict(part) for part in self.grown]} if self.grown else {}
        visits = {"visits": list(self.visits)} if self.visits else {}
        return {**self.summary(), "steps": [asdict(step) for step in self.steps], **grown, **visits}
