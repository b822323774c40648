"""Python types: every text that may be written can be parsed, and what could not is refused by name."""

from __future__ import annotations

import dataclasses
import enum
import random
import sys
import typing
import uuid
from collections import Counter, OrderedDict
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import pytest
import typing_extensions
from pydantic import BaseModel, Field

from decodery.constraints import PythonType
from decodery.core.errors import ConstraintError, DecoderyError
from languages import BYTES, accepts, written


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Size(enum.StrEnum):
    BIG = "big"


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"]
    friends: list[Annotated[Cat | Dog, Field(discriminator="kind")]] = []


class Film(typing_extensions.TypedDict, total=False):
    name: typing_extensions.Required[str]
    year: int


@dataclasses.dataclass
class Point:
    x: float
    when: timedelta
    seen: dict[date, Decimal] = dataclasses.field(default_factory=dict)


class Shop(BaseModel):
    model_config = pydantic.ConfigDict(str_strip_whitespace=True)
    name: Annotated[str, Field(min_length=2, max_length=5)]
    price: Annotated[Decimal, Field(max_digits=5, decimal_places=2, ge=0)]
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    site: pydantic.HttpUrl | None = None


TYPES: dict[str, Any] = {
    "Decimal": Decimal,
    "Decimal of digits": Annotated[Decimal, Field(max_digits=4)],
    "Decimal of places": Annotated[Decimal, Field(decimal_places=1, gt=0, lt=3)],
    "Decimal in steps": Annotated[Decimal, Field(multiple_of=Decimal("0.25"), le=2)],
    "float": float,
    "float that is finite": pydantic.FiniteFloat,
    "float between": Annotated[float, Field(gt=0, le=0.5)],
    "int": Annotated[int, Field(gt=-5, multiple_of=3)],
    "complex": complex,
    "timedelta": timedelta,
    "datetime": datetime,
    "NaiveDatetime": pydantic.NaiveDatetime,
    "AwareDatetime": pydantic.AwareDatetime,
    "date": date,
    "time": time,
    "HttpUrl": pydantic.HttpUrl,
    "AnyUrl": pydantic.AnyUrl,
    "WebsocketUrl": pydantic.WebsocketUrl,
    "PostgresDsn": pydantic.PostgresDsn,
    "UUID": uuid.UUID,
    "UUID4": pydantic.UUID4,
    "text without space around": Annotated[str, pydantic.StringConstraints(strip_whitespace=True, min_length=3)],
    "text of classes": Annotated[str, Field(pattern=r"^\W\d\S$")],
    "bytes": bytes,
    "SecretStr": pydantic.SecretStr,
    "Path": Path,
    "keys: int": dict[int, str],
    "keys: float": dict[float, bool],
    "keys: bool": dict[bool, int],
    "keys: Decimal": dict[Decimal, None],
    "keys: date": dict[date, int],
    "keys: UUID": dict[uuid.UUID, int],
    "keys: Enum": dict[Colour, int],
    "keys: Literal": dict[Literal["a.", "b"], int],
    "keys: pattern": dict[Annotated[str, Field(pattern="^[ab]{2}$")], int],
    "keys: length": dict[Annotated[str, Field(max_length=2)], int],
    "keys: text": dict[str, int],
    "Counter": Counter[int],
    "OrderedDict": OrderedDict[int, None],
    "ByteSize": pydantic.ByteSize,
    "Literal of an Enum of texts": Literal[Size.BIG, 1, None],
    "tuple": tuple[int, Colour, Literal[True]],
    "tagged union": Annotated[Cat | Dog, Field(discriminator="kind")],
    "TypedDict": Film,
    "dataclass": Point,
    "model": Shop,
    "union": int | list[Decimal] | None,
}


@pytest.mark.parametrize("name", TYPES)
def test_every_text_of_a_type_can_be_parsed(name: str) -> None:
    kind = PythonType(TYPES[name], "compact", mode="strict")
    constraint, chance = kind.compile(BYTES), random.Random(name)
    texts = [text for text in (written(constraint, chance) for _ in range(14)) if text is not None]
    assert len(texts) >= 4
    for text in texts:
        kind.parse(text)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (dict[int, str], '{"12":"a","-3":""}'),
        (Decimal, "12.50"),
        (timedelta, '"P1DT2H30M"'),
        (pydantic.HttpUrl, '"https://www.example.org/a/b?c=d#e"'),
        (pydantic.NaiveDatetime, '"2024-02-29T12:00:00"'),
        (Annotated[Cat | Dog, Field(discriminator="kind")], '{"kind":"dog","friends":[{"kind":"cat","lives":1}]}'),
        (Shop, '{"name":"ab","price":9.99,"pet":{"kind":"cat"},"site":"http://a.example.org"}'),
    ],
)  # fmt: skip
def test_what_one_expects_may_be_written(kind: Any, text: str) -> None:
    constraint = PythonType(kind, "compact", mode="strict").compile(BYTES)
    PythonType(kind).parse(text)
    assert accepts(constraint, text)


class Pair(enum.Enum):
    ONE = (1, 2)


class Later(BaseModel):
    when: pydantic.FutureDate


REFUSED: dict[str, Any] = {
    "Json holds JSON": pydantic.Json[int],
    "b'x' as a literal": Literal[b"x"],
    "Colour.RED: 'red'> as a literal": Literal[Colour.RED],
    "2\\) as a literal": Pair,
    "all decimal places": Annotated[Decimal, Field(max_digits=2, decimal_places=2)],
    "date with now_op=future": Later,
    "timedelta with gt=": Annotated[timedelta, Field(gt=timedelta(1))],
    "'uniqueItems'": set[int],
    "keys of pydantic's type 'datetime'": dict[datetime, int],
    "format 'ipvanyaddress'": pydantic.IPvAnyAddress,
    "no JSON schema that can": typing.Callable[[], int],
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_could_not_be_parsed_is_refused_by_name(reason: str) -> None:
    with pytest.raises(ConstraintError, match=reason):
        PythonType(REFUSED[reason]).compile(BYTES)


def test_the_typed_dict_of_python_works_or_is_refused_in_a_sentence() -> None:
    kind = PythonType(typing.TypedDict("Film", {"name": str}), "compact")
    if sys.version_info >= (3, 12):
        assert kind.parse('{"name":"a"}') == {"name": "a"}
        return
    for use in (lambda: kind.compile(BYTES), lambda: kind.parse("{}")):
        with pytest.raises(DecoderyError, match=r"typing_extensions.TypedDict"):
            use()
