"""Whether a schema or a grammar has any text at all. Rules that always need another one of themselves have none.

Both answers are least fixed points: first what has a text of its own, then what has one with those, until nothing is
added. "No" is certain. "Yes" need not be: patterns, bounds and literals are left to the
engine.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from decodery.core.errors import ConstraintError

_MOST_STEPS = 300_000
"""Schemas or parts of rules that are looked at; after that every one counts as one that has a text."""
_TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")


def with_values(schemas: dict[str, Any]) -> set[str]:
    """Names of the schemas that some finite value satisfies.

    Args:
        schemas: prepared schemas (see `schema.prepare`) by what a `$ref` to them says.
    """
    return _Values().fixed_point(schemas)


class _Search:
    """A search for the names of what has a text. known: those found so far."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self._steps = 0

    def fixed_point(self, named: dict[str, Any]) -> set[str]:
        before = -1
        while len(self.known) > before:
            before = len(self.known)
            # What was found last is mostly what the ones before it refer to.
            for name in reversed(named):
                if name not in self.known and self.has_text(named[name]):
                    self.known.add(name)
        return self.known

    def has_text(self, each: Any) -> bool:
        self._steps += 1
        return self._steps > _MOST_STEPS or self._judged(each)

    @abstractmethod
    def _judged(self, each: Any) -> bool:
        """Whether it has a text that is made of known ones alone."""


class _Values(_Search):
    """The schemas that have a value."""

    def _judged(self, schema: Any) -> bool:
        if isinstance(schema, bool):
            return schema
        if "$ref" in schema and schema["$ref"] not in self.known:
            return False
        if not all(map(self.has_text, schema.get("allOf", ()))):
            return False
        if any(word in schema and not any(map(self.has_text, schema[word])) for word in ("anyOf", "oneOf")):
            return False
        if "const" in schema or "enum" in schema:
            return bool(schema.get("enum", True))
        types = schema.get("type", _TYPES)
        return any(self._has_value_of(kind, schema) for kind in ([types] if isinstance(types, str) else types))

    def _has_value_of(self, kind: str, schema: Mapping[str, Any]) -> bool:
        if kind == "array":
            count, first = schema.get("minItems", 0), schema.get("prefixItems", ())
            return all(map(self.has_text, first[:count])) and (
                count <= len(first) or self.has_text(schema.get("items", True))
            )
        if kind == "object" and "patternProperties" not in schema:
            listed, others = schema.get("properties", {}), schema.get("additionalProperties", True)
            return all(self.has_text(listed.get(key, others)) for key in schema.get("required", ()))
        return True


_TOKEN = re.compile(
    r"""
      (?P<skip> \s+ | (?: \#|// ) [^\n]* | -> \s* \w+ )
    | (?P<directive> %(?: ignore | import | declare | llguidance ) \b [^\n]* )
    | (?P<schema> %(?: json | regex ) \s* (?= \{ ) )
    | (?P<text> " (?: \\. | [^"\\\n] )* " i? | / (?: \\. | [^/\\\n] )+ / [a-z]* | < [^<>\s]+ > )
    | (?P<head> [?!]? (?P<rule> [A-Za-z_][\w-]* ) (?: \. -?\d+ )? \s* (?: \[ [^\]]* \] )? \s* : )
    | (?P<name> [A-Za-z_][\w-]* )
    | (?P<repeat> [?*+] | ~ \s* (?P<least> \d+ ) (?: \s* \.\. \s* \d+ )?
                        | \{ \s* (?P<least_of> \d* ) \s* (?: , \s* \d* \s* )? \} )
    | (?P<sign> \.\. | [|()\[\]] )
    """,
    re.VERBOSE,
)

_Node = tuple[Any, ...]
"""("text",), ("rule", name), ("all", nodes) or ("any", nodes)."""
_TEXT: _Node = ("text",)


def require_text_of_grammar(rules: str) -> None:
    """Raise ConstraintError where the rule `start` of a Lark grammar has no finite text.

    What this does not read, the engine decides.
    """
    try:
        found = _Grammar(rules).rules
        known = _InhabitedRules(found).fixed_point(found)
    except (_Unread, RecursionError):
        return
    if "start" in found and "start" not in known:
        without = ", ".join(sorted(found.keys() - known)[:5])
        raise ConstraintError(
            f"the grammar allows no text at all: every way through {without} needs one of these rules again; "
            "give them an alternative that ends"
        )


class _InhabitedRules(_Search):
    """The rules of a grammar that have a text."""

    def __init__(self, rules: Mapping[str, _Node]) -> None:
        super().__init__()
        self._rules = rules

    def _judged(self, node: _Node) -> bool:
        kind = node[0]
        if kind == "rule":
            # Imported terminals are not rules of this grammar.
            return node[1] in self.known or node[1] not in self._rules
        return kind == "text" or (all if kind == "all" else any)(map(self.has_text, node[1]))


class _Unread(Exception):
    """Something the reader does not know."""


class _Grammar:
    """The rules of a Lark grammar, without what their terminals match."""

    def __init__(self, text: str) -> None:
        self._tokens = self._read(text)
        self._at = 0
        self.rules: dict[str, _Node] = {}
        while self._at < len(self._tokens):
            kind, name = self._tokens[self._at]
            if kind != "head":
                raise _Unread
            self._at += 1
            node = self._alternatives()
            self.rules[name] = ("any", [self.rules[name], node]) if name in self.rules else node

    @staticmethod
    def _read(text: str) -> list[tuple[str, str]]:
        tokens, at = [], 0
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                raise _Unread
            at, kind = found.end(), str(found.lastgroup)
            if found["schema"] is not None:
                try:
                    _, at = json.JSONDecoder().raw_decode(text, at)
                except ValueError as error:
                    raise _Unread from error
                tokens.append(("text", ""))
            elif found["head"] is not None:
                tokens.append(("head", found["rule"]))
            elif found["repeat"] is not None:
                least = found["least"] or found["least_of"]
                none = found["repeat"] in "?*" or (least is not None and int(least or 0) == 0)
                tokens.append(("repeat", "none" if none else "some"))
            elif kind not in ("skip", "directive"):
                tokens.append((kind, found[0]))
        return tokens

    def _take(self, sign: str) -> bool:
        found = self._at < len(self._tokens) and self._tokens[self._at] == ("sign", sign)
        self._at += found
        return found

    def _alternatives(self) -> _Node:
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        return ("any", options)

    def _sequence(self) -> _Node:
        parts: list[_Node] = []
        while self._at < len(self._tokens):
            kind, text = self._tokens[self._at]
            if kind == "head" or (kind == "sign" and text in ("|", ")", "]")):
                break
            self._at += 1
            if kind in ("text", "name"):
                parts.append(("rule", text) if kind == "name" else _TEXT)
            elif kind == "repeat" and parts:
                parts[-1] = _TEXT if text == "none" else parts[-1]
            elif kind == "sign" and text in ("(", "["):
                node = self._alternatives()
                if not self._take(")" if text == "(" else "]"):
                    raise _Unread
                parts.append(node if text == "(" else _TEXT)
            elif (kind, text) != ("sign", ".."):
                raise _Unread
        return ("all", parts)
