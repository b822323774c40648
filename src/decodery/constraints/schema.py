"""What of JSON Schema can be enforced exactly, and the form the engine gets it in.

The engine must never enforce less than the schema says. What it would leave out, or enforce less of, is refused here by
keyword and place; what means the same in another form is rewritten. The engine's form is of draft 2020-12 and has its
references under `$defs`, each of them read as a schema wherever it lay.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from decodery.core.errors import ConstraintError

from .bounds import bounded, require_common_multiple, require_exact
from .closed import closed, describes_alone
from .disjoint import Prover
from .inhabited import with_values
from .references import References, SchemaLocation, entered
from .size import require_size
from .strings import also, most, with_patterns, with_strings
from .unenforced import Unenforced

_SCHEMA = frozenset(["additionalItems", "additionalProperties", "items"])
_LISTS = frozenset(["allOf", "anyOf", "oneOf", "prefixItems", "items"])
_COUNTS = frozenset(["maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"])
_BESIDE = frozenset(["$ref", "allOf", "anyOf", "const", "enum", "oneOf"])
"""Keywords for which the engine forgets what stands before them when it reads what stands after."""
_ENFORCED = frozenset(
    [
        "$ref",
        "additionalItems",
        "additionalProperties",
        "allOf",
        "anyOf",
        "const",
        "enum",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "items",
        "maxItems",
        "maxLength",
        "maxProperties",
        "maximum",
        "minItems",
        "minLength",
        "minProperties",
        "minimum",
        "multipleOf",
        "oneOf",
        "pattern",
        "patternProperties",
        "prefixItems",
        "properties",
        "required",
        "type",
    ]
)
_IDLE: dict[str, Any] = {
    "uniqueItems": lambda value, schema: value is False or most(schema, "maxItems") <= 1,
    "not": lambda value, schema: value is False,
    "if": lambda value, schema: "then" not in schema and "else" not in schema,
    "then": lambda value, schema: "if" not in schema,
    "else": lambda value, schema: "if" not in schema,
    "dependencies": lambda value, schema: value == {},
    "dependentRequired": lambda value, schema: value == {},
    "dependentSchemas": lambda value, schema: value == {},
    "propertyNames": lambda value, schema: value in (True, {}),
    "contains": lambda value, schema: False,
    "minContains": lambda value, schema: "contains" not in schema,
    "maxContains": lambda value, schema: "contains" not in schema,
    "unevaluatedItems": lambda value, schema: value in (True, {}),
    "unevaluatedProperties": lambda value, schema: value in (True, {}),
    "$dynamicRef": lambda value, schema: False,
    "$recursiveRef": lambda value, schema: False,
}
"""Keywords of any draft that are not enforced, and where they say nothing and can be left out. All that is neither here
nor enforced is a remark to people, or a place for schemas that references point to."""


def prepare(schema: Any, unenforced: Unenforced | None = None, *, closes: bool = True) -> Any:
    """The schema in the form the engine gets.

    Args:
        schema: an object, true or false, of draft 4 to 2020-12.
        unenforced: what may be left out, and afterwards what was; None: nothing.
        closes: Whether an object that lists `properties`, and says nothing of others, has no others.

    Raises:
        ConstraintError: naming what cannot be enforced exactly and may not be left out.
    """
    require_size(schema)
    try:
        return _Preparation(schema, unenforced or Unenforced(), closes).done()
    except RecursionError as error:
        raise ConstraintError("the JSON schema is nested too deeply: make it flatter") from error


class _Preparation:
    """One document on its way to the engine."""

    def __init__(self, document: Any, unenforced: Unenforced, closes: bool) -> None:
        self.unenforced = unenforced
        self.closes = closes
        self.references = References(document)
        # A schema that is part of the description of an object has a form of its own.
        self.names = {(id(document), False): "#"}
        self.waiting: list[tuple[str, Any, SchemaLocation, bool]] = []
        self.shared: dict[str, Any] = {}
        self.alternatives: list[tuple[dict[str, Any], str]] = []
        self.steps: list[float] = []

    def done(self) -> Any:
        document = self.references.document
        root = self.walk(document, self.references.start)
        while self.waiting:
            name, schema, place, part = self.waiting.pop()
            self.shared[name] = self.walk(schema, place, part)
        require_common_multiple(self.steps)
        prover = Prover(lambda reference: root if reference == "#" else self.shared[reference[len("#/$defs/") :]])
        for schema, path in self.alternatives:
            beside = {keyword: value for keyword, value in schema.items() if keyword != "oneOf"}
            if prover.exclude_each_other(schema["oneOf"], beside):
                _say_any(schema)
            elif self.unenforced.allowed:
                self.unenforced.keyword("oneOf", path)
                _say_any(schema)
        known = with_values({"#": root} | {f"#/$defs/{name}": schema for name, schema in self.shared.items()})
        if "#" not in known:
            raise ConstraintError(
                "the JSON schema allows no text at all: every value of it must hold another one of its own kind; make "
                "a property that refers back optional, or let it be null"
            )
        return root | {"$defs": self.shared} if self.shared else root

    def walk(self, schema: Any, around: SchemaLocation, part: bool = False) -> Any:
        """One schema in the engine's form. part: whether others describe the same value as well."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise ConstraintError(f"the JSON schema is wrong at {around.path}: a schema is an object or true or false")
        place = entered(schema, around)
        if "$ref" in schema and place.replaces:
            return {"$ref": self.named(schema["$ref"], place, part)}
        done: dict[str, Any] = {}
        alone = {word for word in _BESIDE if word in schema and not part and describes_alone(schema, word)}
        if self.closes and not part and not alone:
            schema = closed(schema, place, self.references.find)
        for keyword, value in _tuples(schema).items():
            if keyword in _IDLE:
                if not _IDLE[keyword](value, schema):
                    self.unenforced.keyword(keyword, place.path)
            elif keyword in _ENFORCED:
                done[keyword] = self.value(keyword, value, place, keyword in _BESIDE and keyword not in alone)
        _check_literals(done, place.path)
        _check_required(done, place.path)
        if done.get("minProperties", 0) - len(set(done.get("required", ()))) > 1:
            # Of keys the schema does not list, the engine does not know whether one comes twice.
            self.unenforced.keyword("minProperties", place.path)
            del done["minProperties"]
        done = with_strings(bounded(done, place.path), place.path, self.unenforced)
        done = _together(done)
        if "multipleOf" in done:
            self.steps.append(done["multipleOf"])
        if isinstance(done.get("oneOf"), list):
            self.alternatives.append((done, place.path))
        return done

    def value(self, keyword: str, value: Any, place: SchemaLocation, part: bool) -> Any:
        """What a keyword says, in the engine's form. part: as in `walk`, for schemas of the same value."""
        inside = place.at(keyword)
        if keyword == "$ref":
            return self.named(value, place, part)
        if keyword in ("properties", "patternProperties"):
            if not isinstance(value, Mapping):
                raise ConstraintError(f"the JSON schema is wrong at {inside.path}: it must be an object")
            walked = {name: self.walk(each, inside.at(name)) for name, each in value.items()}
            return walked if keyword == "properties" else with_patterns(walked, inside.path)
        if keyword in _LISTS and isinstance(value, list):
            return [self.walk(each, inside.at(number), part) for number, each in enumerate(value)]
        if keyword in _SCHEMA:
            return self.walk(value, inside)
        return _plain(keyword, value, inside.path)

    def named(self, reference: Any, place: SchemaLocation, part: bool) -> str:
        """The engine's reference to what a reference means, which is walked later. part: as in `walk`."""
        target, found = self.references.find(reference, place)
        key = id(target), part and self.closes
        if key not in self.names:
            self._require_end(target, found)
            name = self._free(re.sub(r"\W", "_", found.path.rpartition("/")[2]) or "schema")
            self.names[key] = f"#/$defs/{name}"
            self.shared[name] = None
            self.waiting.append((name, target, found, key[1]))
        return self.names[key]

    def _free(self, name: str) -> str:
        number, found = 1, name
        while found in self.shared:
            number, found = number + 1, f"{name}_{number + 1}"
        return found

    def _require_end(self, target: Any, place: SchemaLocation) -> None:
        """Raise ConstraintError for references that only point to each other."""
        seen: set[int] = set()
        path = place.path
        while isinstance(target, Mapping) and "$ref" in target:
            if id(target) in seen:
                raise ConstraintError(
                    f"the JSON schema's reference {path!r} refers to itself alone and restricts nothing"
                )
            seen.add(id(target))
            target, place = self.references.find(target["$ref"], entered(target, place))


def _plain(keyword: str, value: Any, path: str) -> Any:
    """The value of a keyword that holds no schemas. Raises ConstraintError where it is of the wrong kind."""
    wanted = ""
    if keyword in _COUNTS:
        # A count may be written 2.0.
        value = int(value) if isinstance(value, float) and value.is_integer() else value
        wanted = "" if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else "a count"
    elif keyword == "type":
        names = value if isinstance(value, list) else [value]
        wanted = "" if all(isinstance(name, str) for name in names) else "the name of a type or a list of names"
    elif keyword in _LISTS or keyword == "enum":
        wanted = "" if isinstance(value, list) else "a list"
    if wanted:
        raise ConstraintError(f"the JSON schema is wrong at {path}: it must be {wanted}")
    return value


def _tuples(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with a list of items, and what may follow them, under their names of draft 2020-12."""
    done = {keyword: value for keyword, value in schema.items() if keyword != "additionalItems"}
    if isinstance(schema.get("items"), list):
        if "prefixItems" in schema:
            raise ConstraintError("the JSON schema has both a list of 'items' and 'prefixItems': leave one out")
        done = {"prefixItems" if keyword == "items" else keyword: value for keyword, value in done.items()}
        if "additionalItems" in schema:
            done["items"] = schema["additionalItems"]
    return done


def _together(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with the keywords of one type side by side, in the place of its properties."""
    keywords = [*schema]
    first = keywords[: keywords.index("properties")] if "properties" in schema else []
    before = [keyword for keyword in first if keyword in _BESIDE]
    plain = [keyword for keyword in keywords if keyword not in _BESIDE]
    after = [keyword for keyword in keywords if keyword in _BESIDE and keyword not in before]
    return {keyword: schema[keyword] for keyword in (*before, *plain, *after)}


def _say_any(schema: dict[str, Any]) -> None:
    """Turn "exactly one" into "one of", where that is the same."""
    options = schema.pop("oneOf")
    also(schema, "anyOf", options)


def _check_literals(schema: dict[str, Any], path: str) -> None:
    """Strings the engine may not write: its escapes \\uXXXX would let a known key pass as another one."""
    for keyword in ("const", "enum"):
        if keyword in schema:
            written = json.dumps(schema[keyword], ensure_ascii=False)
            if "\\u00" in written.replace("\\\\", "") or "\x7f" in written:
                raise ConstraintError(f"the JSON schema's {keyword!r} at {path} holds a control character")
            require_exact(schema[keyword], f"{path}/{keyword}")


def _check_required(schema: dict[str, Any], path: str) -> None:
    """Raise ConstraintError where `required` is no list of names."""
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
        raise ConstraintError(
            f"the JSON schema is wrong at {path}/required: it is a list of names, in the schema of the object"
        )
