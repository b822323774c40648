"""What a round measures one after the other: conversations, and cases of several prompts of one length at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from decodery.core.errors import SettingsError
from decodery.llm.llm import LLM
from decodery.sampling.constraint import Constraint

from .record import Prompt
from .settings import QUALITATIVE, THROUGHPUT, Settings
from .structured import Schema
from .workloads import (
    OWN,
    TIERS,
    Question,
    digest_of,
    documents,
    find,
    own_questions,
    questions,
    read_rows,
    refuse_placeholders,
)

_FEW, _PER_CASE = 40, 8
_ASK = "\n\nContinue this text."
_MOST_CHARACTERS = 8
"""Of a token, on average."""


class Unit(Protocol):
    """turns: how many prompts follow each other; concurrency: how many are decoded at once.

    constraint: what answers are held to, None where they are free.
    """

    @property
    def turns(self) -> int: ...

    @property
    def concurrency(self) -> int: ...

    @property
    def constraint(self) -> Constraint | None: ...

    def key(self, turn: int) -> Prompt: ...

    def messages(self, turn: int, answers: Sequence[list[list[int]]]) -> str | list[dict[str, str]] | None:
        """The one prompt of a turn before it is rendered; None for token ids, and for several."""
        ...

    def prompts(self, turn: int, answers: Sequence[list[list[int]]]) -> list[list[int]] | None:
        """Token ids of the prompts of a turn, after plain decoding's outputs of the turns before; None: too long."""
        ...


@dataclass
class Conversation:
    """One question, turn by turn. room: longest prompt that leaves place for the answer."""

    question: Question
    lm: LLM
    room: int
    concurrency: int = 1
    constraint: Constraint | None = None

    @property
    def turns(self) -> int:
        return len(self.question.turns)

    def key(self, turn: int) -> Prompt:
        question = self.question
        return Prompt(question.workload, question.category, QUALITATIVE, question.id, turn)

    def messages(self, turn: int, answers: Sequence[list[list[int]]]) -> str | list[dict[str, str]]:
        texts = [self.lm.tokenizer.decode(answer[0]) for answer in answers]
        if self.lm.chat_template is None:
            said = [content for _, content in self.question.before]
            said += [text for pair in zip(self.question.turns, texts, strict=False) for text in pair]
            return "\n\n".join([*said, self.question.turns[turn]])
        found = [{"role": role, "content": content} for role, content in self.question.before]
        for question, answered in zip(self.question.turns, texts, strict=False):
            found += [{"role": "user", "content": question}, {"role": "assistant", "content": answered}]
        return [*found, {"role": "user", "content": self.question.turns[turn]}]

    def prompts(self, turn: int, answers: Sequence[list[list[int]]]) -> list[list[int]] | None:
        tokens = self.lm.encode(self.messages(turn, answers))
        return [tokens] if len(tokens) <= self.room else None


@dataclass
class Case:
    """Prompts of one entropy tier, all `length` tokens long, `concurrency` of them at once."""

    workload: str
    tier: str
    length: int
    concurrency: int
    tokens: list[list[int]]
    turns: int = 1
    constraint: Constraint | None = None

    def key(self, turn: int) -> Prompt:
        category = f"{self.length} tokens, {self.concurrency} at once"
        return Prompt(self.workload, category, THROUGHPUT, f"{self.tier}, {category}")

    def messages(self, turn: int, answers: Sequence[list[list[int]]]) -> None:
        return None

    def prompts(self, turn: int, answers: Sequence[list[list[int]]]) -> list[list[int]]:
        return self.tokens


def make_units(lm: LLM, settings: Settings, schemas: Sequence[Schema] = ()) -> tuple[list[Unit], list[str]]:
    """Everything to measure, and a sentence for whatever had to be left out. schemas: see `compile_schemas`."""
    constraints = {schema.question: schema.constraint for schema in schemas}
    room = lm.model.config.max_positions - settings.max_new_tokens
    data = None if settings.data is None else Path(settings.data)
    units: list[Unit] = []
    notes: list[str] = []
    for workload in settings.workloads:
        if QUALITATIVE in settings.splits:
            if workload == OWN:
                assert settings.file is not None
                path = Path(settings.file)
                if settings.digest and digest_of(path) != settings.digest:
                    raise SettingsError(f"{path} has changed since its result was begun: measure it anew, as FILE")
                found = own_questions(path, settings.prompts)
            else:
                built_in = workload in ("built-in", "copy")
                found = questions(workload, data, settings.prompts or (None if built_in else _FEW))
            if refused := sum(question.id in constraints and not constraints[question.id] for question in found):
                notes.append(f"{workload}: {refused} schemas cannot be enforced in full and are not decoded")
            whole: list[Unit] = [
                Conversation(question, lm, room, constraint=constraints.get(question.id) if question.schema else None)
                for question in found
                if not question.schema or constraints.get(question.id)
            ]
            fitting = [unit for unit in whole if unit.prompts(0, []) is not None]
            if len(fitting) < len(whole):
                notes.append(f"{workload}: {len(whole) - len(fitting)} questions are too long for the model's context")
            units += fitting
        if THROUGHPUT in settings.splits:
            cases, left_out = _cases(lm, workload, settings, data, room)
            units += cases
            notes += left_out
    if not units:
        raise SettingsError(f"nothing is left to measure ({'; '.join(notes)}): choose shorter prompts")
    return units, notes


def _cases(lm: LLM, workload: str, settings: Settings, data: Path | None, room: int) -> tuple[list[Case], list[str]]:
    count = settings.prompts or _PER_CASE
    cases: list[Case] = []
    notes: list[str] = []
    for length in settings.input_tokens:
        if length > room:
            notes.append(f"throughput: {length} tokens and an answer are longer than the model's context")
            continue
        tiers = _speed_texts(data, length) if workload == "speed" else _texts(workload, count, length)
        for tier, texts in tiers.items():
            tokens = [prompt for text in texts if (prompt := fixed_length(lm, text, length)) is not None][:count]
            if len(tokens) < max(settings.concurrency):
                notes.append(f"throughput: {len(tokens)} texts of the tier {tier} have {length} tokens")
            cases += [
                Case(workload, tier, length, concurrency, tokens)
                for concurrency in settings.concurrency
                if concurrency <= len(tokens)
            ]
    return cases, notes


def _texts(workload: str, count: int, length: int) -> dict[str, list[str]]:
    """`count` texts per tier: a built-in document, each time begun at another paragraph.

    It follows itself until there are `length` tokens.
    """
    if workload != "built-in":
        raise SettingsError(f"the throughput split takes its texts from built-in or speed, not from {workload}")
    texts: dict[str, list[str]] = {}
    for tier, document in documents().items():
        parts = document.split("\n\n")
        starts = [index * len(parts) // count for index in range(count)]
        times = 1 + length * _MOST_CHARACTERS // len(document)
        texts[tier] = ["\n\n".join([*parts[start:], *parts[:start]] * times) for start in starts]
    return texts


def _speed_texts(data: Path | None, length: int) -> dict[str, list[str]]:
    """SPEED-Bench's texts that are cut to this length: its sets are named after thousands of tokens."""
    size = f"throughput_{length // 1024 or 1}k"
    rows = read_rows(find("speed", data, (f"speed/{size}*.jsonl", f"speed/{size}/*.parquet", f"{size}*.jsonl")))
    refuse_placeholders(rows)
    texts: dict[str, list[str]] = {}
    for row in rows:
        tier = next((tier for tier in TIERS if str(row["category"]).startswith(tier)), "mixed")
        texts.setdefault(tier, []).append(str(row["turns"][0]))
    return texts


def fixed_length(lm: LLM, text: str, length: int) -> list[int] | None:
    """Exactly `length` tokens that ask to continue `text`, cut at its end; None where the text is too short."""
    whole, other = (lm.encode(begin + _ASK) for begin in (text, "."))
    same = 0
    while same < min(len(whole), len(other)) and whole[-1 - same] == other[-1 - same]:
        same += 1
    if len(whole) < length or same >= length:
        return None
    return whole[: length - same] + whole[len(whole) - same :]
