"""What was measured of one prompt under one method, over all rounds; the rows of a result are made from these."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from decodery.core.errors import CorruptFile

from .lossless import Difference
from .metrics import Timed, merge
from .subject import PARTS, Run, Subject

_DIGITS = 7
"""Of times in seconds, in a result file."""


@dataclass(frozen=True)
class Prompt:
    """Which prompt: turn `turn` of a question, or one case of the throughput split, in which `turn` is 0."""

    workload: str
    category: str
    split: str
    question: str
    turn: int = 0


@dataclass
class Record:
    """One prompt, or the `prompts` of a case, under one method. Lists hold one entry per round; the first round's
    counts are the reported ones.

    emitted: {tokens: passes}, parts: seconds of the four steps, both over all rounds. checked, identical, excused:
    outputs compared with plain decoding's, see `lossless`; difference: the first that is not identical. outputs: token
    ids of every prompt decoded, kept for plain decoding and where another text was written. timeline: see `timeline`.
    structured: of an answer held to a schema, see `structured.judged`. right: whether the answer is, None where
    nothing tells.
    """

    method: str
    store: str
    dtype: str
    prompt: Prompt
    prompt_tokens: int
    prompts: int = 1
    new_tokens: list[int] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    prefill_seconds: list[float] = field(default_factory=list)
    emitted: dict[int, int] = field(default_factory=dict)
    parts: dict[str, float] | None = None
    checked: int = 0
    identical: int = 0
    excused: int = 0
    difference: dict[str, Any] | None = None
    outputs: list[list[int]] | None = None
    timeline: dict[str, Any] | None = None
    structured: dict[str, Any] | None = None
    right: bool | None = None

    @classmethod
    def of(cls, subject: Subject, prompt: Prompt, prompts: list[list[int]]) -> Record:
        return cls(subject.name, subject.store, subject.dtype, prompt, len(prompts[0]), len(prompts))

    def add(self, run: Run) -> None:
        """Take in one more round."""
        self.new_tokens.append(run.new_tokens)
        self.passes.append(run.passes)
        self.rows.append(run.rows)
        self.seconds.append(round(run.seconds, _DIGITS))
        self.prefill_seconds.append(round(run.prefill_seconds, _DIGITS))
        self.emitted = merge([self.emitted, run.emitted])
        if run.parts is not None:
            parts = self.parts or dict.fromkeys(PARTS, 0.0)
            self.parts = {part: round(parts[part] + run.parts[part], _DIGITS) for part in PARTS}

    def check(self, difference: Difference | None, output: list[int]) -> None:
        """Take in how one output compares with plain decoding's."""
        self.checked += 1
        self.identical += difference is None
        if difference is not None:
            self.excused += difference.excused
            if self.difference is None:
                self.difference = asdict(difference)
                self.outputs = [output]

    def to_dict(self) -> dict[str, Any]:
        """As the result file keeps it: the prompt's fields beside the others."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        prompt = values.pop("prompt")
        values["emitted"] = {str(tokens): count for tokens, count in self.emitted.items()}
        return {**prompt, **values}

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Record:
        """Raises CorruptFile for what `to_dict` has not written."""
        try:
            values = dict(raw)
            prompt = Prompt(**{each.name: values.pop(each.name) for each in fields(Prompt)})
            values["emitted"] = {int(tokens): int(count) for tokens, count in values["emitted"].items()}
            return cls(prompt=prompt, **values)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptFile(f"the result file holds a generation that cannot be read ({error})") from error


def timed(records: list[Record]) -> Timed | None:
    """One question's cost under one method from the records of its turns; None where nothing was decoded."""
    rounds = min((len(record.seconds) for record in records), default=0)
    tokens = [sum(record.new_tokens[index] for record in records) for index in range(rounds)]
    seconds = [sum(record.seconds[index] for record in records) for index in range(rounds)]
    if not rounds or min(tokens) == 0 or min(seconds) <= 0.0:
        return None
    return Timed(tokens[0], tuple(time / count for time, count in zip(seconds, tokens, strict=True)))
