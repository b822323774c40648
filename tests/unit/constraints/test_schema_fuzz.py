"""Random schemas and values: the engine accepts nothing that the package `jsonschema` calls invalid.

DECODERY_SCHEMAS: how many schemas are tried; `make fuzz` tries many.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from decodery.constraints import JSONSchema
from decodery.core.errors import ConstraintError
from languages import BYTES, accepts, written
from random_schemas import Maker, is_valid, orders, validator

SCHEMAS = int(os.environ.get("DECODERY_SCHEMAS", "240"))
SHARDS = 4
VALUES, WALKS = 10, 3


def differences(seed: int, counts: Counter[str]) -> Iterator[tuple[str, Any, str]]:
    """What the engine and the package disagree about: ("weaker" or "stronger", schema, text)."""
    maker = Maker(seed)
    counts["schemas"] += 1
    try:
        constraint = JSONSchema(maker.schema, mode="strict").compile(BYTES)
    except ConstraintError:
        counts["refused"] += 1
        return
    judge = validator(maker.schema)
    for _ in range(WALKS):
        try:
            text = written(constraint, maker.chance)
        except ConstraintError:
            counts["too complex"] += 1
            continue
        if text is not None:
            counts["texts"] += 1
            if not is_valid(judge, text):
                yield "weaker", maker.schema, text
    for _ in range(VALUES):
        value = maker.value(maker.schema)
        texts = [*orders(value)]
        accepted = next((text for text in texts if accepts(constraint, text)), None)
        counts["values"] += 1
        valid = is_valid(judge, texts[0])
        counts["valid values"] += valid
        if accepted is not None and not valid:
            yield "weaker", maker.schema, accepted
        elif valid and accepted is None and not _excused(value):
            yield "stronger", maker.schema, texts[0]


def _excused(value: Any) -> bool:
    """Whether a value holds an integer that is documented not to be written."""
    numbers = re.findall(r"\d{16,}", json.dumps(value))
    return any(int(number) >= 2**53 for number in numbers)


@pytest.mark.parametrize("shard", range(SHARDS))
def test_nothing_invalid_is_accepted(shard: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(shard, SCHEMAS, SHARDS):
        for kind, schema, text in differences(seed, counts):
            counts[kind] += 1
            assert kind != "weaker", f"seed {seed}: {json.dumps(schema)} lets pass {text}"
    print(dict(counts))
    assert counts["refused"] < counts["schemas"] / 2 and counts["valid values"] > counts["schemas"]


def _spoilt(schema: Any, chance: random.Random) -> Any:
    """A schema of which one value somewhere is something else."""
    if not isinstance(schema, dict | list) or not schema or chance.random() < 0.2:
        return chance.choice([None, True, -1, 1.5, 10**400, "x", "#", "a(", [], {}, [{}], [[]], {"a": 1}, {"$ref": 1}])
    keys = list(schema) if isinstance(schema, dict) else range(len(schema))
    key = chance.choice(keys)
    done: Any = dict(schema) if isinstance(schema, dict) else list(schema)
    done[key] = _spoilt(schema[key], chance)
    return done


@pytest.mark.parametrize("shard", range(SHARDS))
def test_spoilt_schemas_end_in_a_sentence(shard: int) -> None:
    refused = 0
    for seed in range(shard, SCHEMAS, SHARDS):
        maker = Maker(seed)
        try:
            JSONSchema(_spoilt(maker.schema, maker.chance)).compile(BYTES)
        except ConstraintError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > SCHEMAS / SHARDS / 4


def test_schemas_people_wrote_are_kept(data: Path) -> None:
    rows = [json.loads(line) for line in (data / "jsonschemabench_dev.jsonl").read_text("utf-8").splitlines()]
    schemas = [row["schema"] for row in rows if len(json.dumps(row["schema"])) < 3000]
    texts, chance = 0, random.Random(1)
    for schema in schemas[:: max(1, 16 * 240 // SCHEMAS)]:
        try:
            constraint = JSONSchema(schema, mode="strict").compile(BYTES)
        except ConstraintError:
            continue
        judge = validator(schema)
        for text in (written(constraint, chance, 600) for _ in range(2)):
            texts += text is not None
            assert text is None or is_valid(judge, text), f"{json.dumps(schema)} lets pass {text}"
    assert texts > 50
