"""What a chat has beside messages: tools that may be called, a reasoning part, and both read from the answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from dataclasses import replace
from typing import Any

from decodery.constraints.base import ConstraintSpec
from decodery.constraints.json_schema import JSONSchema
from decodery.constraints.reasoning import Reasoning
from decodery.constraints.tool_calls import END, MARK, FunctionCall, ToolCalls, read_calls
from decodery.core.errors import SettingsError
from decodery.core.registry import resolve
from decodery.engine.output import Output
from decodery.models.tokenizers.reasoning import ReasoningMarks, read_reasoning
from decodery.sampling.constraint import Constraint

_TOOL_PROMPT = (
    "You may call tools. Their signatures, as JSON:\n<tools>\n{tools}\n</tools>\n"
    'To call one, answer with:\n<tool_call>\n{{"name": NAME, "arguments": OBJECT}}\n</tool_call>'
)
"""For models whose template says nothing of tools."""


def described(
    messages: Ordered[Mapping[str, Any]], tools: Ordered[Mapping[str, Any]], template: str
) -> tuple[list[Mapping[str, Any]], Ordered[Mapping[str, Any]] | None]:
    """The messages and the tools as a chat template takes them.

    Where it has no form for tools, the system message describes them, and calls and results are texts.

    Args:
        messages: The messages.
        tools: Tools that the answer may call.
        template: The source of the chat template.
    """
    if "tools" in template:
        return list(messages), tools or None
    turns = [_plain_turn(message) for message in messages]
    if tools:
        lines = (json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
        text = _TOOL_PROMPT.format(tools="\n".join(lines))
        if turns and turns[0].get("role") == "system":
            turns[0] = {**turns[0], "content": f"{turns[0]['content']}\n\n{text}"}
        else:
            turns.insert(0, {"role": "system", "content": text})
    return turns, None


def _plain_turn(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message for a template that has no form for calls and results."""
    said = message.get("content") or ""
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{said}\n</tool_response>"}
    if not (calls := message.get("tool_calls")):
        return message
    functions = [json.dumps(call.get("function", call), ensure_ascii=False) for call in calls]
    written = [f"{MARK}\n{function}\n{END}" for function in functions]
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**others, "content": "\n".join(filter(None, [said, *written]))}


def callable_tools(
    tools: Ordered[Mapping[str, Any]], choice: str, *, several: bool = True, answer: Any = None
) -> ToolCalls:
    """The constraint of an answer that may call tools.

    Args:
        tools: Tools in the form of OpenAI's API.
        choice: "auto", "required", or the name of the one to call.
        several: Whether there may be more than one call.
        answer: A JSON schema that an answer without calls follows; None leaves it free.

    Raises:
        SettingsError: For a tool that is not among them, and for two of one name.
    """
    functions = [tool.get("function", tool) for tool in tools]
    names = [str(function.get("name")) for function in functions]
    if len(set(names)) < len(names):
        raise SettingsError("two tools have the same name: give each a name of its own")
    named = choice not in ("auto", "required")
    if named and choice not in names:
        raise SettingsError(f"tool_choice names {choice!r}, which is no tool here: use auto, required or {names[0]!r}")
    kept = [function for function, name in zip(functions, names, strict=True) if not named or name == choice]
    given = [{"name": each.get("name"), "parameters": each.get("parameters")} for each in kept]
    return ToolCalls(given, required=choice != "auto", several=several and not named, answer=answer)


def reasoned(
    language: ConstraintSpec | None, marks: ReasoningMarks | None, budget: int | None, *, asked: bool = False
) -> tuple[ConstraintSpec | None, ReasoningMarks | None]:
    """The constraint of a text that may begin with a reasoning part.

    Args:
        language: What the answer follows, None where it is free.
        marks: How the model marks its reasoning, None where it does not.
        budget: Maximum number of tokens of reasoning.
        asked: Whether reasoning was asked for, so that a bound answer has one, too.

    Returns:
        The constraint, and the marks by which the text is read; None where it is an answer from its first token.
    """
    if marks is None:
        return language, None
    calls = isinstance(language, ToolCalls) and not language.required and language.answer is None
    if not (language is None or calls or marks.inside or asked or budget is not None):
        return language, None
    if language is None and budget is None:
        return None, marks
    return Reasoning(marks.begin, marks.end, budget, language), marks


def chat_constraint(
    given: Any, tools: Ordered[Mapping[str, Any]], choice: str, marks: ReasoningMarks | None, budget: int | None
) -> tuple[Any, ReasoningMarks | None]:
    """As `reasoned`, of what Python's `chat` takes as constraint, tools and `tool_choice`."""
    if budget is not None and budget < 0:
        raise SettingsError(f"thinking_token_budget is a number of tokens, 0 or more, not {budget}")
    if not tools and choice not in ("auto", "none"):
        raise SettingsError(f"tool_choice={choice!r} chooses among tools: give tools, or leave it out")
    if isinstance(given, Constraint):
        if tools or budget is not None:
            raise SettingsError("a compiled constraint goes without tools and thinking_token_budget: give its language")
        return given, None
    language = (
        JSONSchema(given) if isinstance(given, Mapping) else None if given is None else resolve("constraint", given)
    )
    if tools:
        if language is not None and not isinstance(language, JSONSchema):
            raise SettingsError("beside tools an answer follows a JSON schema, and no other constraint")
        language = callable_tools(tools, choice, answer=None if language is None else language.schema)
    if language is not None and not isinstance(language, ConstraintSpec):
        return language, None
    return reasoned(language, marks, budget)


def read_answer(text: str, marks: ReasoningMarks | None, *, calls: bool) -> tuple[str, str, list[FunctionCall]]:
    """What a text reasons, what it answers, and the tools that it calls."""
    thought, said = read_reasoning(text, marks)
    return (thought, *(read_calls(said) if calls else (said, [])))


def answered(output: Output, marks: ReasoningMarks | None, *, calls: bool) -> Output:
    """An output of `chat` with its parts."""
    thought, said, called = read_answer(output.text, marks, calls=calls)
    return replace(output, reasoning=thought, content=said, tool_calls=tuple(called))
