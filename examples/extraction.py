"""Extraction as code: the schema is Python classes, the answer a list of their instances, checked before it is written.

The representation is that of KnowCoder (2024); the constraint is ours: every answer parses, names only classes of the
schema with arguments of the right kind, and every string is a span of the sentence. Nothing is ever executed.

Run it with `python examples/extraction.py`.
"""

import ast
import json
import re
from dataclasses import dataclass, fields
from types import UnionType
from typing import Any, get_args, get_type_hints

import decodery as dc


@dataclass(frozen=True)
class Entity:
    """A thing the sentence names."""

    name: str


class Human(Entity):
    """Description: a person. Examples: "Marie Curie", "the surgeon"."""


class City(Entity):
    """Description: a town or a city. Examples: "Warsaw", "Lima"."""


class Organization(Entity):
    """Description: a company, school or other body. Examples: "the Sorbonne", "Acme"."""


@dataclass(frozen=True)
class PlaceOfBirth:
    """Description: where a person was born."""

    head_entity: Human
    tail_entity: City


@dataclass(frozen=True)
class Employer:
    """Description: whom a person works for."""

    head_entity: Human
    tail_entity: Organization


CLASSES = (Human, City, Organization, PlaceOfBirth, Employer)


@dataclass(frozen=True)
class Found:
    """One extracted object. spans: where each of its strings stands in the sentence, as (start, end) pairs."""

    value: Any
    spans: dict[str, list[tuple[int, int]]]


def prompt(sentence: str, classes: tuple[type, ...] = CLASSES) -> str:
    """The schema as source code, the task, and the sentence."""
    lines = []
    for cls in classes:
        arguments = ", ".join(f"{name}: {hint.__name__}" for name, hint in hints(cls).items())
        base = cls.__bases__[0].__name__
        lines.append(
            f'class {cls.__name__}({base}):\n    """{cls.__doc__}"""\n    def __init__(self, {arguments}): ...\n'
        )
    task = '"""\nInstantiate all objects of these classes that the following sentence names.\n"""'
    return "\n".join([*lines, task, f"sentence = {json.dumps(sentence, ensure_ascii=False)}", ""])


def hints(cls: type) -> dict[str, Any]:
    """The constructor's arguments and their types, in order."""
    types = get_type_hints(cls)
    return {field.name: types[field.name] for field in fields(cls)}


def words(sentence: str) -> list[str]:
    """The pieces a span is made of: words, signs and the blanks between them."""
    return re.findall(r"\w+|\s+|[^\w\s]", sentence)


def grammar(sentence: str, classes: tuple[type, ...] = CLASSES) -> dc.constrain.Grammar:
    """What may be answered: a list of constructor calls, typed by the hints, on spans of the sentence.

    A span is made of whole words and begins with one, and a list has 12 objects at most.
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
        arguments = [_argument(hint, classes) for hint in hints(cls).values()]
        rules.append(f'{cls.__name__.lower()}: "{cls.__name__}(" ' + ' ", " '.join(arguments) + ' ")"')
    return dc.constrain.Grammar("\n".join(rules))


def _argument(hint: Any, classes: tuple[type, ...]) -> str:
    if hint is str:
        return "text"
    wanted = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return "(" + " | ".join(cls.__name__.lower() for cls in classes if issubclass(cls, wanted)) + ")"


def parse(answer: str, sentence: str, classes: tuple[type, ...] = CLASSES) -> list[Found]:
    """The objects of an answer. Raises ValueError for anything but calls of these classes on spans of the sentence."""
    known = {cls.__name__: cls for cls in classes}
    try:
        (statement,) = ast.parse(answer).body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"the answer is not one Python statement: {error}") from error
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.List):
        raise ValueError("the answer is not a list")
    return [_built(node, sentence, known) for node in statement.value.elts]


def _built(node: ast.expr, sentence: str, known: dict[str, type]) -> Found:
    if (
        not isinstance(node, ast.Call)
        or not isinstance(node.func, ast.Name)
        or node.func.id not in known
        or node.keywords
    ):
        raise ValueError(f"{ast.unparse(node)} is not an object of the schema")
    cls = known[node.func.id]
    wanted = hints(cls)
    if len(node.args) != len(wanted) or node.keywords:
        raise ValueError(f"{cls.__name__} takes {len(wanted)} arguments, not {len(node.args)}")
    values, spans = [], {}
    for hint, argument in zip(wanted.values(), node.args, strict=True):
        if isinstance(argument, ast.Constant):
            value = argument.value
            if not isinstance(value, str) or not _is_span(value, sentence):
                raise ValueError(f"{value!r} is not a span of the sentence")
            spans[value] = [(at.start(), at.end()) for at in re.finditer(re.escape(value), sentence)]
        else:
            found = _built(argument, sentence, known)
            value, spans = found.value, spans | found.spans
        if not isinstance(value, hint):
            raise ValueError(f"{ast.unparse(argument)} is not of the type {hint}")
        values.append(value)
    return Found(cls(*values), spans)


def _is_span(text: str, sentence: str) -> bool:
    """Whether the text is made of whole words of the sentence that follow each other."""
    wanted, whole = words(text), words(sentence)
    return bool(wanted) and any(whole[at : at + len(wanted)] == wanted for at in range(len(whole)))


def extract(lm: dc.LM, sentence: str, classes: tuple[type, ...] = CLASSES, **settings: Any) -> list[Found]:
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
