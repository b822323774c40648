"""JSON schemas of Python types whose every text can be parsed: pydantic's own, tightened where they let more pass.

Pydantic describes many types more loosely than it reads them: keys of `dict[int, str]` are any text, a Decimal is any
text, every URI is a web address. Written by chance, most of those are not parsed. What has no tighter schema here is
refused by name.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from decodery.core.errors import ConstraintError

from .formats import DATE, FORMATS, ZONE

if TYPE_CHECKING:
    from pydantic.json_schema import GenerateJsonSchema

_MOST = 10**15
"""Of numbers that have to be finite or exact: within it they are written without an exponent."""
_CLOCK = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?"
_WHOLE = r"-?(?:0|[1-9]\d{0,17})"
_REAL = r"-?(?:0|[1-9]\d{0,14})(?:\.\d{1,15})?"
_UUID = "^[0-9a-f]{8}-[0-9a-f]{4}-%s[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$"
_TIMES = r"(?:\d{1,4}H(?:\d{1,4}M(?:\d{1,4}S)?)?|\d{1,4}M(?:\d{1,4}S)?|\d{1,4}S)"
_DURATION = rf"^P(?:\d{{1,6}}D(?:T{_TIMES})?|T{_TIMES})$"
_HOST = r"(?:[a-z][a-z0-9]{0,20}\.){1,3}[a-z]{2,3}"
_WAY = r"(?:/[A-Za-z0-9._~-]*)*(?:\?[A-Za-z0-9._~=&-]*)?(?:#[A-Za-z0-9._~-]*)?"
_EMAIL = rf"^[a-z0-9]{{1,30}}(?:\.[a-z0-9]{{1,30}})?@{_HOST}$"
_NO_SPACE_AROUND = r"^(?:\S(?:[\s\S]*\S)?)?$"
_ASCII = r"^[\x00-\x7f]*$"
_LOOSE = {r"^\s*(\d*\.?\d+)\s*(\w+)?": r"^\d{1,9}(?:\.\d{1,3})?(?:[KMGT]i?)?B$"}
"""Patterns of pydantic's own types that let more pass than they read: the size of a ByteSize."""
_KEYS = {
    "bool": "^(?:true|false)$",
    "int": f"^{_WHOLE}$",
    "float": f"^{_REAL}$",
    "decimal": f"^{_REAL}$",
    "date": FORMATS["date"],
    "uuid": _UUID % "4",
}
"""Keys of dictionaries that are no text, by pydantic's name of their type."""
_MOMENTS = ("gt", "ge", "lt", "le", "now_op")


@lru_cache(maxsize=1)
def generator() -> type[GenerateJsonSchema]:
    """Pydantic's generator of schemas with the tighter ones in place."""
    from pydantic.json_schema import GenerateJsonSchema

    class Tighter(GenerateJsonSchema):
        def decimal_schema(self, schema: Any) -> Any:
            return _decimal(schema)

        def float_schema(self, schema: Any) -> Any:
            done = super().float_schema(schema)
            endless = schema.get("allow_inf_nan", self._config.allow_inf_nan is not False)
            return done if endless else _finite(done)

        def complex_schema(self, schema: Any) -> Any:
            return {"type": "string", "pattern": rf"^{_REAL}[+-]{_REAL.removeprefix('-?')}j$"}

        def str_schema(self, schema: Any) -> Any:
            return _text(schema, super().str_schema(schema), self._config)

        def date_schema(self, schema: Any) -> Any:
            _refuse_bounds(schema, "date")
            return super().date_schema(schema)

        def datetime_schema(self, schema: Any) -> Any:
            _refuse_bounds(schema, "datetime")
            return {"type": "string", "pattern": f"^{DATE}T{_CLOCK}{_zone(schema)}$"}

        def time_schema(self, schema: Any) -> Any:
            _refuse_bounds(schema, "time")
            return {"type": "string", "pattern": f"^{_CLOCK}{_zone(schema)}$"}

        def timedelta_schema(self, schema: Any) -> Any:
            _refuse_bounds(schema, "timedelta")
            if self._config.ser_json_timedelta == "float":
                return {"type": "number", "minimum": -(10**9), "maximum": 10**9}
            return {"type": "string", "format": "duration", "pattern": _DURATION}

        def url_schema(self, schema: Any) -> Any:
            return super().url_schema(schema) | {"pattern": _address(schema)}

        def multi_host_url_schema(self, schema: Any) -> Any:
            return super().multi_host_url_schema(schema) | {"format": "uri", "pattern": _address(schema)}

        def json_schema(self, schema: Any) -> Any:
            raise ConstraintError("Json holds JSON inside a text, which cannot be enforced: use the type inside")

        def dict_schema(self, schema: Any) -> Any:
            return self._keyed(schema, super().dict_schema(schema))

        def ordered_dict_schema(self, schema: Any) -> Any:
            return self._keyed(schema, super().ordered_dict_schema(schema))

        def counter_schema(self, schema: Any) -> Any:
            return self._keyed(schema, super().counter_schema(schema))

        def frozendict_schema(self, schema: Any) -> Any:
            return self._keyed(schema, super().frozendict_schema(schema))

        def _keyed(self, schema: Any, done: Any) -> Any:
            texts = _keys(schema, self.resolve_ref_schema(done.pop("propertyNames", {})))
            if texts is None:
                return done
            values = done.pop("patternProperties", {"": done.pop("additionalProperties", True)})
            return done | {"patternProperties": {texts: next(iter(values.values()))}, "additionalProperties": False}

        def enum_schema(self, schema: Any) -> Any:
            _require_plain([member.value for member in schema["members"]])
            return super().enum_schema(schema)

        def literal_schema(self, schema: Any) -> Any:
            _require_plain(schema["expected"])
            return super().literal_schema(schema)

    return Tighter


def closed(schema: Any) -> Any:
    """The schema, its objects restricted to the fields that build them, with tags required."""
    done = _closed(schema)
    for each in _objects(done):
        for target in each.get("discriminator", {}).get("mapping", {}).values():
            found = done.get("$defs", {}).get(target.removeprefix("#/$defs/"), {})
            name = each["discriminator"]["propertyName"]
            if name in found.get("properties", {}) and name not in found.get("required", []):
                found["required"] = [*found.get("required", []), name]
    return done


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    data = ("const", "enum", "default", "examples")
    done = {key: each if key in data else _closed(each) for key, each in schema.items()}
    if "properties" in done and done.get("type") == "object":
        done.setdefault("additionalProperties", False)
    if done.get("type") == "string":
        if done.get("pattern") in _LOOSE:
            done["pattern"] = _LOOSE[done["pattern"]]
        name = str(done.get("format"))
        if name in ("binary", "password", "path"):
            del done["format"]
        elif name == "email":
            done["allOf"] = [*done.get("allOf", []), {"pattern": _EMAIL}]
        elif re.fullmatch(r"uuid\d", name):
            done |= {"format": "uuid", "pattern": _UUID % name[-1]}
    return done


def _objects(schema: Any) -> list[dict[str, Any]]:
    found, waiting = [], [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            found.append(each)
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
    return [each for each in found if isinstance(each.get("discriminator"), dict)]


def _finite(schema: dict[str, Any]) -> dict[str, Any]:
    """A number that is written without an exponent and so with an end to its size."""
    low = {} if "exclusiveMinimum" in schema else {"minimum": -_MOST}
    high = {} if "exclusiveMaximum" in schema else {"maximum": _MOST}
    return low | high | schema


def _decimal(schema: Any) -> dict[str, Any]:
    words = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
    done: dict[str, Any] = {"type": "number"}
    done |= {word: _number(schema[name]) for name, word in words.items() if schema.get(name) is not None}
    digits, places = schema.get("max_digits"), schema.get("decimal_places")
    if digits is not None:
        places = digits // 2 if places is None else places
        if places >= digits:
            raise ConstraintError("a Decimal whose digits are all decimal places cannot be enforced: allow one more")
        most = min(_MOST, 10 ** (digits - places) - 1)
        done["allOf"] = [{"minimum": -most, "maximum": most}]
    steps = [_number(schema["multiple_of"])] if schema.get("multiple_of") is not None else []
    steps += [10**-places if places else 1] if places is not None else []
    done["allOf"] = [*done.get("allOf", []), *({"multipleOf": step} for step in steps)]
    return _finite(done)


def _number(value: Any) -> int | float:
    return int(value) if value == int(value) else float(value)


def _text(schema: Any, done: dict[str, Any], config: Any) -> dict[str, Any]:
    """A text that parsing leaves as it is, under a pattern that means the same there."""
    more = []
    if schema.get("strip_whitespace", config.str_strip_whitespace):
        more.append({"pattern": _NO_SPACE_AROUND})
    if re.search(r"\\[wWsSdD]", str(done.get("pattern", ""))):
        # Pydantic's classes are Unicode's, those of JSON Schema mostly ASCII's: they agree within ASCII.
        more.append({"pattern": _ASCII})
    return done | {"allOf": more} if more else done


def _require_plain(values: list[Any]) -> None:
    for value in values:
        if not isinstance(value, str | int | float | None):
            raise ConstraintError(f"{value!r} as a literal cannot be enforced: JSON has no such value")


def _refuse_bounds(schema: Any, name: str) -> None:
    for word in _MOMENTS:
        if schema.get(word) is not None:
            raise ConstraintError(f"a {name} with {word}={schema[word]} cannot be enforced: leave it out and check it")


def _zone(schema: Any) -> str:
    return "" if schema.get("tz_constraint") == "naive" else ZONE


def _address(schema: Any) -> str:
    schemes = [re.escape(each).replace("\\-", "-") for each in schema.get("allowed_schemes") or ["http", "https"]]
    return rf"^(?:{'|'.join(schemes)})://{_HOST}{_WAY}$"


def _keys(schema: Any, names: dict[str, Any]) -> str | None:
    """The pattern of a dictionary's keys; None: any text is one."""
    keys = schema.get("keys_schema", {"type": "any"})
    kind = keys["type"]
    if "enum" in names or "const" in names:
        options = names.get("enum", [names.get("const")])
        return f"^(?:{'|'.join(re.escape(str(each)) for each in options)})$"
    if kind == "any" or (kind == "str" and set(keys) <= {"type", "strict", "ref", "metadata"}):
        return None
    if kind == "str" and set(keys) <= {"type", "strict", "ref", "metadata", "min_length", "max_length"}:
        return f"^[\\s\\S]{{{keys.get('min_length') or 0},{keys.get('max_length', '')}}}$"
    if kind == "str" and set(keys) <= {"type", "strict", "ref", "metadata", "pattern"}:
        return str(keys["pattern"])
    if kind in _KEYS and not set(keys) - {"type", "strict", "ref", "metadata"}:
        return _KEYS[kind]
    raise ConstraintError(f"a dictionary with keys of pydantic's type {kind!r} and such bounds cannot be enforced")
