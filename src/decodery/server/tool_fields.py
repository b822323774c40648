"""Tools in requests, and which of them an answer calls."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StrictStr


class FunctionSpec(BaseModel):
    """A function that may be called.

    Attributes:
        parameters: A JSON schema of an object.
    """

    name: Annotated[StrictStr, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """A tool that may be called."""

    type: Literal["function"]
    function: FunctionSpec


class ChosenFunction(BaseModel):
    """The name of a function."""

    name: StrictStr


class ChosenTool(BaseModel):
    """The tool that has to be called."""

    type: Literal["function"]
    function: ChosenFunction


class AllowedTools(BaseModel):
    """Some of the tools.

    Attributes:
        mode: Whether one has to be called.
        tools: Which.
    """

    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Field(min_length=1, max_length=128)]


class AllowedChoice(BaseModel):
    """The tools that may be called; the prompt describes the others as well."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools
