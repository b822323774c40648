"""JSON texts that a Python type can be built from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ConstraintError, SettingsError
from ..model.vocabulary import Vocabulary
from ..registry import register
from .base import Language
from .engine import GrammarConstraint
from .json_schema import JSONSchema


@register(
    "python-type",
    guarantee="every finished text is valid under the type's JSON schema, and `parse` builds the value from it",
    needs=("pydantic",),
)
@dataclass(frozen=True)
class PythonType(Language):
    """Writes JSON for a pydantic model, a dataclass, a TypedDict or a type such as list[int].

    type: what the value is to be; `parse(text)` gives it. Validators written in Python are checked by `parse` alone.
    whitespace: see json-schema.
    """

    type: Any
    whitespace: Literal["flexible", "compact"] = "flexible"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.type, str):
            raise SettingsError("python-type needs a type, not its name: build it in Python")

    def json_schema(self) -> JSONSchema:
        """The type as a JSON schema."""
        from pydantic import PydanticSchemaGenerationError
        from pydantic.json_schema import PydanticInvalidForJsonSchema

        try:
            schema = self._adapter().json_schema()
        except (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema, TypeError) as error:
            reason = str(error).partition("\n")[0]
            raise ConstraintError(f"the type {self.type!r} has no JSON schema: {reason}") from error
        return JSONSchema(_closed(schema), self.whitespace, mode=self.mode)

    def compile(self, vocabulary: Vocabulary) -> GrammarConstraint:
        return self.json_schema().compile(vocabulary)

    def parse(self, text: str) -> Any:
        """The value a text stands for. Raises pydantic.ValidationError where a validator objects."""
        return self._adapter().validate_json(text)

    def _adapter(self) -> Any:
        try:
            from pydantic import TypeAdapter
        except ImportError as error:
            raise SettingsError("python-type needs pydantic: run `pip install pydantic`") from error
        return TypeAdapter(self.type)


def _closed(schema: Any) -> Any:
    """The schema with nothing in its objects but the fields they list, which is all a value is built from."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    done = {
        key: each if key in ("const", "enum", "default", "examples") else _closed(each) for key, each in schema.items()
    }
    if "properties" in done and done.get("type") == "object":
        done.setdefault("additionalProperties", False)
    return done
