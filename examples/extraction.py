"""Extraction as code: the schema is Python classes, the answer a list of their instances, checked before it is written.

The representation is that of KnowCoder (2024); the constraint is ours: every answer parses, names only classes of the
schema with arguments of the right kind, and every string is a span of the sentence. Nothing is ever executed.

Run it with `python examples/extraction.py`.
"""

import ast
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import decodery as dc


@dataclass(frozen=True)
class Entity:
    """A thing the sentence names."""

    name: str


@dataclass(frozen=True)
class Relation:
    """What holds between two entities."""

    head_entity: Entity
    tail_entity: Entity


@dataclass(frozen=True)
class Event:
    """What happens, as the word that says so; everything that takes part is a list of entities."""

    trigger: str


class Human(Entity):
    """Description: a person. Examples: "Marie Curie", "the surgeon"."""


class Scientist(Human):
    """Description: a person who does research. Examples: "the chemist"."""


class City(Entity):
    """Description: a town or a city. Examples: "Warsaw", "Lima"."""


class Organization(Entity):
    """Description: a company, school or other body. Examples: "the Sorbonne", "Acme"."""


@dataclass(frozen=True)
class PlaceOfBirth(Relation):
    """Description: where a person was born."""

    head_entity: Human
    tail_entity: City


@dataclass(frozen=True)
class Employer(Relation):
    """Description: whom a person works for."""

    head_entity: Human
    tail_entity: Organization


@dataclass(frozen=True)
class Founding(Event):
    """Description: somebody sets up a company. Examples: "founded", "started"."""

    founder: list[Human]
    organization: list[Organization]


CLASSES = (Human, Scientist, City, Organization, PlaceOfBirth, Employer, Founding)

Example = tuple[str, str]
"""A sentence and its answer."""


@dataclass(frozen=True)
class Found:
    """One extracted object. spans: where each of its strings stands in the sentence, as (start, end) pairs."""

    value: Any
    spans: dict[str, list[tuple[int, int]]]


def prompt(sentence: str, classes: tuple[type, ...] = CLASSES, examples: Sequence[Example] = ()) -> str:
    """The schema as source code, solved examples, the task, and the sentence."""
    lines = []
    bases = dict.fromkeys(base for cls in classes for base in cls.__mro__[-2:0:-1] if base not in classes)
    for cls in (*bases, *classes):
        arguments = ", ".join(f"{name}: {_spelled(hint)}" for name, hint in hints(cls).items())
        parent = "" if cls in bases else f"({cls.__bases__[0].__name__})"
        lines.append(
            f'class {cls.__name__}{parent}:\n    """{cls.__doc__}"""\n    def __init__(self, {arguments}): ...\n'
        )
    task = '"""\nInstantiate all objects of these classes that the following sentence names.\n"""'
    for text, answer in examples:
        lines.append(f"{task}\n{_assigned(text)}\n{answer}\n")
    return "\n".join([*lines, task, _assigned(sentence), ""])


def _assigned(sentence: str) -> str:
    return f"sentence = {json.dumps(sentence, ensure_ascii=False)}"


def _spelled(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).replace(f"{__name__}.", "")


def hints(cls: type) -> dict[str, Any]:
    """The constructor's arguments and their types, in order."""
    types = get_type_hints(cls)
    return {field.name: types[field.name] for field in fields(cls)}


def words(sentence: str) -> list[str]:
    """The pieces a span is made of: words, signs and the blanks between them."""
    return re.findall(r"\w+|\s+|[^\w\s]", sentence)


def grammar(sentence: str, classes: tuple[type, ...] = CLASSES) -> dc.constraints.Grammar:
    """What may be answered: a list of constructor calls, typed by the hints, on spans of the sentence.

    A span is made of whole words and begins with one; a list has 12 objects at most, one within an object 4.
    """
    # Written as in a Python literal: a quote or a backslash of the sentence is escaped.
    pieces = [json.dumps(word, ensure_ascii=False)[1:-1] for word in words(sentence)]
    rules = [
        'start: "results = [" (item ("," item){0,11} "\\n")? "]"',
        'item: "\\n    " (' + " | ".join(cls.__name__.lower() for cls in classes) + ")",
        'text: "\\"" SPAN "\\""',
        f"SPAN: %regex {json.dumps({'substring_chunks': pieces}, ensure_ascii=False)} & /\\w(?s:.*)/",
    ]
    for cls in classes:
        arguments = [_argument(name, hint, classes) for name, hint in hints(cls).items()]
        rules.append(f'{cls.__name__.lower()}: "{cls.__name__}(" ' + ' ", " '.join(arguments) + ' ")"')
    return dc.constraints.Grammar("\n".join(rules))


def _argument(name: str, hint: Any, classes: tuple[type, ...]) -> str:
    if hint is str:
        return "text"
    if get_origin(hint) is list:
        one = _argument(name, *get_args(hint), classes)
        return f'"{name}=[" ({one} (", " {one}){{0,3}})? "]"'
    wanted = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return "(" + " | ".join(cls.__name__.lower() for cls in classes if issubclass(cls, wanted)) + ")"


def parse(answer: str, sentence: str, classes: tuple[type, ...] = CLASSES) -> list[Found]:
    """The objects of an answer. Raises ValueError for anything but calls of these classes on spans of the sentence."""
    known = {cls.__name__: cls for cls in classes}
    try:
        (statement,) = ast.parse(answer).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the answer is not one Python statement: {error}") from error
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.List):
        raise ValueError("the answer is not a list")
    return [_built(node, sentence, known) for node in statement.value.elts]


def _built(node: ast.expr, sentence: str, known: dict[str, type]) -> Found:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in known:
        raise ValueError(f"{ast.unparse(node)} is not an object of the schema")
    cls = known[node.func.id]
    wanted = hints(cls)
    # Lists are given by name, all else by place.
    named = [name for name, hint in wanted.items() if get_origin(hint) is list]
    if len(node.args) != len(wanted) - len(named) or [each.arg for each in node.keywords] != named:
        takes = ", ".join(f"{name}=[...]" if name in named else name for name in wanted)
        raise ValueError(f"{cls.__name__} takes ({takes}), not {ast.unparse(node)}")
    values: list[Any] = []
    spans: dict[str, list[tuple[int, int]]] = {}
    for hint, argument in zip(wanted.values(), [*node.args, *(each.value for each in node.keywords)], strict=True):
        if get_origin(hint) is list:
            if not isinstance(argument, ast.List):
                raise ValueError(f"{ast.unparse(argument)} is not a list")
            value: Any = [_value(each, *get_args(hint), sentence, known, spans) for each in argument.elts]
        else:
            value = _value(argument, hint, sentence, known, spans)
        values.append(value)
    return Found(cls(*values), spans)


def _value(
    node: ast.expr, hint: Any, sentence: str, known: dict[str, type], spans: dict[str, list[tuple[int, int]]]
) -> Any:
    """A span or an object of the type `hint`; where its strings stand goes to `spans`."""
    if isinstance(node, ast.Constant):
        value = node.value
        places = offsets(value, sentence) if isinstance(value, str) else []
        if not places:
            raise ValueError(f"{value!r} is not a span of the sentence")
        spans[value] = places
    else:
        found = _built(node, sentence, known)
        value = found.value
        spans |= found.spans
    if not isinstance(value, hint):
        raise ValueError(f"{ast.unparse(node)} is not of the type {_spelled(hint)}")
    return value


def offsets(text: str, sentence: str) -> list[tuple[int, int]]:
    """Where the text stands in the sentence as whole words, from left to right without overlaps."""
    wanted, whole = words(text), words(sentence)
    found: list[tuple[int, int]] = []
    start = 0
    for at, word in enumerate(whole):
        if wanted and whole[at : at + len(wanted)] == wanted and (not found or start >= found[-1][1]):
            found.append((start, start + len(text)))
        start += len(word)
    return found


def extract(lm: dc.LLM, sentence: str, classes: tuple[type, ...] = CLASSES, **settings: Any) -> list[Found]:
    """What the sentence names. A list that was cut by its length is an error, never a part of an answer."""
    output = lm.generate(prompt(sentence, classes), constraint=grammar(sentence, classes), **settings)
    if output.finish_reason != "stop":
        raise ValueError("the answer is longer than max_new_tokens")
    return parse(output.text, sentence, classes)


if __name__ == "__main__":
    text = 'Ada Okafor, born in Lima, runs "Acme" with Marie.'
    out = dc.load("smollm2").generate(prompt(text), constraint=grammar(text), max_new_tokens=200)
    print(out.text)
    if out.finish_reason == "stop":
        for each in parse(out.text, text):
            print(each)
    print(f"{out.finish_reason}; {out.trace.tokens_per_pass:.2f} tokens per pass")
