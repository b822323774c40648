"""Constraint to JSON texts from which a Python type can be built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from decodery.core.errors import ConstraintError, SettingsError
from decodery.core.registry import register
from decodery.models.tokenizers.vocabulary import Vocabulary

from .base import ConstraintSpec
from .engine import GrammarConstraint
from .json_schema import JSONSchema
from .python_schema import closed, generator


@register(
    "python-type",
    guarantee="every finished text is valid under the type's JSON schema, and `parse` builds the value from it",
    requirements=("pydantic",),
)
@dataclass(frozen=True)
class PythonType(ConstraintSpec):
    """Writes JSON for a pydantic model, a dataclass, a TypedDict or a type such as list[int].

    Where pydantic's own schema allows texts that pydantic cannot read (keys of dict[int, str], Decimal, timedelta, web
    addresses, tagged unions ...), a tighter schema is used; types without one are refused by name. Validators written
    in Python are only checked by `parse`.

    Attributes:
        type: The type of the value, which `parse(text)` returns.
        whitespace: See json-schema.
    """

    type: Any
    whitespace: Literal["flexible", "compact"] = "flexible"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.type, str):
            raise SettingsError("python-type needs a type, not its name: build it in Python")

    def json_schema(self) -> JSONSchema:
        """The type as a JSON schema."""
        schema = self._built(lambda adapter: adapter.json_schema(schema_generator=generator()))
        return JSONSchema(closed(schema), self.whitespace, mode=self.mode)

    def compile(self, vocabulary: Vocabulary) -> GrammarConstraint:
        return self.json_schema().compile(vocabulary)

    def parse(self, text: str) -> Any:
        """Build the value from a text. Raises pydantic.ValidationError if a validator rejects it."""
        return self._built(lambda adapter: adapter).validate_json(text)

    def _built(self, then: Callable[[Any], Any]) -> Any:
        """What pydantic makes of the type. Raises ConstraintError for types it has no schema for."""
        try:
            from pydantic import TypeAdapter
            from pydantic.errors import PydanticUserError
        except ImportError as error:
            raise SettingsError("python-type needs pydantic: run `pip install 'decodery[constrain]'`") from error
        try:
            return then(TypeAdapter(self.type))
        except (PydanticUserError, TypeError, ImportError, ConstraintError) as error:
            reason = str(error).partition("\n")[0]
            raise ConstraintError(
                f"the type {self.type!r} has no JSON schema that can be enforced: {reason}"
            ) from error
