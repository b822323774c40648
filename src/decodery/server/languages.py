"""What an answer may be: response formats, structured outputs, tools and constraints of a request as one language."""

from __future__ import annotations

from typing import Any

from decodery.constraints import Choice, Grammar, JSONSchema, Regex
from decodery.constraints.base import ConstraintSpec
from decodery.constraints.tool_calls import ToolCalls
from decodery.core.errors import SettingsError
from decodery.core.registry import resolve
from decodery.llm.chat_answer import callable_tools

from .errors import invalid
from .fields import ChatRequest, Shared, StructuredOutputs
from .messages import tools_in_use
from .request_preprocessor import RequestPreprocessor
from .tool_fields import AllowedChoice, Tool


def language_of(preprocessor: RequestPreprocessor, body: Shared) -> ConstraintSpec | None:
    """The language of a request's answers, None where they are free.

    Raises:
        ApiError: For several languages, and for one that is larger than the server allows.
    """
    found = [*_guided(preprocessor, body)]
    chat = body if isinstance(body, ChatRequest) else None
    tools = [] if chat is None else tools_in_use(chat)
    if (format_ := _response_format(preprocessor, body)) is not None:
        found.append(format_)
    if body.decodery is not None and body.decodery.constraint is not None:
        preprocessor.check_description(body.decodery.constraint, "decodery.constraint")
        found.append(resolve("constraint", body.decodery.constraint))
    if len(found) > 1:
        raise invalid(
            "an answer follows one of response_format, structured_outputs, guided_..., json_schema and "
            "decodery.constraint: leave the others out"
        )
    if (own := preprocessor.settings.constraint) is not None:
        if found or tools:
            raise invalid("this server constrains every answer: leave response_format, constraints and tools out")
        return own
    if chat is None or not tools:
        return found[0] if found else None
    return _calls(preprocessor, chat, tools, found[0] if found else None)


def drop_stop(body: Shared, language: ConstraintSpec | None) -> None:
    """Leave out stop strings where the language ends a text, and say so: nothing ends JSON before its end."""
    calls = isinstance(language, ToolCalls) and (language.required or language.answer is not None)
    if body.stop is not None and (calls or isinstance(language, JSONSchema)):
        body.stop = None
        body.ignore([*body.ignored, "stop"])


def _response_format(preprocessor: RequestPreprocessor, body: Shared) -> ConstraintSpec | None:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return JSONSchema({"type": "object"})
    if wanted.json_schema is None:
        raise invalid("response_format: json_schema is missing", "response_format.json_schema")
    return _schema(preprocessor, wanted.json_schema.schema_, "response_format")


def _guided(preprocessor: RequestPreprocessor, body: Shared) -> list[ConstraintSpec]:
    """The languages that other servers' fields give."""
    found: list[ConstraintSpec] = []
    asked = [(body.structured_outputs, "structured_outputs")] if body.structured_outputs is not None else []
    guided = {"json": body.guided_json, "regex": body.guided_regex, "choice": body.guided_choice}
    guided["grammar"] = body.guided_grammar
    for name, value in guided.items():
        if value is not None:
            asked.append((StructuredOutputs.model_validate({name: value}), f"guided_{name}"))
    if body.json_schema is not None:
        asked.append((StructuredOutputs.model_validate({"json": body.json_schema}), "json_schema"))
    for outputs, field in asked:
        given = {
            name: value for name in StructuredOutputs.model_fields if (value := getattr(outputs, name)) is not None
        }
        if len(given) != 1:
            raise invalid(f"{field} has one of json, regex, choice, grammar and json_object, not {len(given)}", field)
        ((name, value),) = given.items()
        found.append(_structured(preprocessor, name, value, field))
    return found


def _structured(preprocessor: RequestPreprocessor, name: str, value: Any, field: str) -> ConstraintSpec:
    if name == "schema_":
        return _schema(preprocessor, value, field)
    if name == "json_object":
        return JSONSchema({"type": "object"})
    texts = value if name == "choice" else [value]
    preprocessor.check_description("".join(texts), field)
    if name == "choice":
        return Choice(tuple(texts))
    return Regex(value) if name == "regex" else Grammar(value)


def _schema(preprocessor: RequestPreprocessor, schema: dict[str, Any] | str, field: str) -> JSONSchema:
    language = JSONSchema(schema)
    assert isinstance(language.schema, str)
    preprocessor.check_description(language.schema, field)
    return language


def _calls(
    preprocessor: RequestPreprocessor, body: ChatRequest, tools: list[Tool], answer: ConstraintSpec | None
) -> ConstraintSpec:
    """Calls of tools. answer: what a text without calls is, where that is not free."""
    chosen = body.choice_of_tools
    if answer is not None and not isinstance(answer, JSONSchema):
        raise invalid("beside tools an answer follows a JSON schema, and no other constraint", "tools")
    if isinstance(chosen, AllowedChoice):
        tools, chosen = _allowed(tools, chosen), chosen.allowed_tools.mode
    choice = "auto" if chosen is None else chosen if isinstance(chosen, str) else chosen.function.name
    given = [tool.model_dump(exclude_none=True) for tool in tools]
    several, schema = body.parallel_tool_calls is not False, None if answer is None else answer.schema
    try:
        calls = callable_tools(given, choice, several=several, answer=schema)
    except SettingsError as error:
        raise invalid(str(error), "tool_choice" if "tool_choice" in str(error) else "tools") from error
    assert isinstance(calls.tools, str)
    preprocessor.check_description(calls.tools, "tools")
    return calls


def _allowed(tools: list[Tool], choice: AllowedChoice) -> list[Tool]:
    """The tools that a choice allows, in their order. Raises ApiError for one that is none."""
    known, names = {tool.function.name for tool in tools}, {each.function.name for each in choice.allowed_tools.tools}
    if unknown := sorted(names - known):
        raise invalid(
            f"tool_choice allows {unknown[0]!r}, which is no tool here: use {sorted(known)[0]!r}", "tool_choice"
        )
    return [tool for tool in tools if tool.function.name in names]
