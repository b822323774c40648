"""Texts of the user's own with their labels, read as a monitor reads them while they are written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from decodery.core.errors import CorruptFile, SettingsError
from decodery.engine.monitoring import monitor_reports
from decodery.engine.request import Request
from decodery.llm.llm import LLM
from decodery.models.loaders.store import Progress, silent
from decodery.sampling.banned import Banned
from decodery.speculative.drafters.predicted_output import PredictedOutput
from decodery.step.monitor import Monitor
from decodery.step.sequence import Sequence

from .lines import read_json_lines

_FORM = '{"messages": [{"role": ..., "content": text}, ...], "label": true or false, "group": text}'
_ROLES = ("system", "user", "assistant")
_TOGETHER = 16
"""Texts that are read at a time."""
_AT_ONCE = 32
"""Tokens of an answer that one pass reads."""


@dataclass(frozen=True, slots=True)
class LabelledChat:
    """A conversation, and whether it is what a monitor looks for."""

    messages: tuple[dict[str, str], ...]  # {"role": ..., "content": ...} each
    label: bool
    group: str  # What must not be both learned from and tested on
    line: int = 0

    @property
    def answered(self) -> bool:
        """Whether it ends with an answer of the assistant's."""
        return self.messages[-1]["role"] == "assistant"

    @property
    def prompt(self) -> list[dict[str, str]]:
        """What stands before the last answer; all of it where it ends without one."""
        return list(self.messages[:-1] if self.answered else self.messages)

    @property
    def answer(self) -> str:
        """The last answer, "" where it ends without one."""
        return self.messages[-1]["content"] if self.answered else ""

    def beginnings(self) -> list[LabelledChat]:
        """The conversation up to each answer, and all of it: what a server is asked for, request by request."""
        ends = [number for number, each in enumerate(self.messages, start=1) if each["role"] == "assistant"]
        ends += [] if self.answered else [len(self.messages)]
        return [replace(self, messages=self.messages[:end]) for end in ends]

    def of_unit(self, unit: str) -> list[LabelledChat]:
        """What is scored of it: for the unit "text" itself, for "conversation" its beginnings."""
        return self.beginnings() if unit == "conversation" else [self]


def is_labelled(path: Path) -> bool:
    """Whether a file of JSON lines begins with a conversation, and not with a question or a statement."""
    _, first = next(read_json_lines(path))
    return isinstance(first, dict) and "messages" in first


def read_chats(path: Path, *, answers: bool = False) -> list[LabelledChat]:
    """Conversations with labels of a file of JSON lines.

    Args:
        path: The file; a line is {"messages": [...], "label": true or false, "group": text}, whose group may be left
            out.

    Raises:
        CorruptFile: A line is something else; the error names it.
    """
    found = []
    for number, entry in read_json_lines(path):
        known = entry if isinstance(entry, dict) else {}
        messages, label, group = known.get("messages"), known.get("label"), known.get("group", f"line {number}")
        fine = isinstance(messages, list) and bool(messages) and all(_is_message(each) for each in messages)
        if not fine or not isinstance(label, bool) or not isinstance(group, str) or set(known) - _NAMES:
            raise CorruptFile(f"line {number} of {path} is not {_FORM}, with the roles {', '.join(_ROLES)}")
        assert isinstance(messages, list)
        chat = LabelledChat(tuple(messages), label, group, number)
        if not any(each["role"] == "user" for each in chat.prompt):
            raise CorruptFile(f"line {number} of {path} has no message of the user's before its answer")
        if answers and not chat.answer:
            raise CorruptFile(
                f"line {number} of {path} ends without an answer, and this monitor reads answers: end it with a "
                "message of the assistant's"
            )
        found.append(chat)
    return found


def as_chat(entry: dict[str, Any]) -> LabelledChat | None:
    """The conversation of an object without a label; None where it ends without an answer."""
    messages = entry.get("messages")
    if not isinstance(messages, list) or not messages or not all(_is_message(each) for each in messages):
        return None
    chat = LabelledChat(tuple(messages), False, "")
    return chat if chat.answer and any(each["role"] == "user" for each in chat.prompt) else None


_NAMES = {"messages", "label", "group"}


def _is_message(given: Any) -> bool:
    return (
        isinstance(given, dict)
        and set(given) == {"role", "content"}
        and given["role"] in _ROLES
        and isinstance(given["content"], str)
    )


def reread(
    lm: LLM, chats: Ordered[LabelledChat], monitors: Ordered[Monitor], progress: Progress = silent
) -> Iterator[Sequence]:
    """Each text as the engine writes it, watched by monitors, with the inputs they have in use.

    The engine decodes the last answer of each conversation, token by token the one that is given, after the model's
    chat template and with the token that ends a turn. A conversation without an answer is read, and gets one token.

    Args:
        monitors: They only read: their actions are left out.

    Yields:
        The decoded text of each, in order.

    Raises:
        SettingsError: The model has no chat template, or an answer has no room in its context.
    """
    if lm.chat_template is None:
        raise SettingsError("this model has no chat template, so it reads no messages: choose a chat model")
    reading = [replace(each, action="flag", threshold=math.inf) for each in monitors]

    def request(chat: LabelledChat) -> Request:
        tokens = written_tokens(lm, chat)
        made = lm.request_for(
            chat.prompt,
            max_new_tokens=max(len(tokens), 1),
            sampler=[Banned(written=dict(enumerate(tokens)))],
            drafter=PredictedOutput(tuple(tokens), _AT_ONCE, "prompt-lookup") if tokens else None,
            monitor=reading,
        )
        if len(made.prompt) + len(tokens) > lm.model.config.max_positions:
            raise SettingsError(
                f"the conversation of line {chat.line} has {len(made.prompt) + len(tokens)} tokens and the model's "
                f"context {lm.model.config.max_positions}: shorten it"
            )
        return made

    for number, text in enumerate(decoded(lm, map(request, chats)), start=1):
        progress("reading texts", number, len(chats))
        yield text


def decoded(lm: LLM, requests: Iterable[Request]) -> Iterator[Sequence]:
    """The texts of requests, in order; some of them are decoded together."""
    waiting = iter(requests)
    while some := list(islice(waiting, _TOGETHER)):
        engine = lm.engine()
        texts = [engine.submit(each) for each in some]
        engine.run(texts)
        for text in texts:
            if text.error is not None:
                raise text.error
            yield text


def written_tokens(lm: LLM, chat: LabelledChat) -> list[int]:
    """The tokens of an answer and the one that ends its turn, as the model writes them; else none."""
    if not chat.answered:
        return []
    ends = lm.tokenizer.eos_ids
    # The token that the template ends a turn with, where the model has several.
    turned = lm.encode([*chat.messages, {"role": "user", "content": "."}])
    before = len(lm.encode(chat.prompt))
    end = next((token for token in turned[before:] if token in ends), ends[0] if ends else None)
    return lm.tokenizer.encode_after(chat.answer) + ([] if end is None else [end])


def highest_scores(
    lm: LLM, chats: Ordered[LabelledChat], monitor: Monitor, *, unit: str = "text", progress: Progress = silent
) -> list[float]:
    """The highest score that each text has while it is written, which decides whether it is flagged.

    Args:
        unit: "text" for the last answer of each conversation, "conversation" for all its answers.

    Returns:
        One score for each, -inf where the monitor has none.
    """
    parts = [each.of_unit(unit) for each in chats]
    read = reread(lm, [each for own in parts for each in own], [monitor], progress)
    reports = (monitor_reports(text)[0] for text in read)
    return [
        max((score for _ in own for score in next(reports).scores if score is not None), default=-math.inf)
        for own in parts
    ]
