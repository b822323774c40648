"""Wrong values in any field: an answer or a refusal that says so, and never an error of the server."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from decodery.server.fields import ChatRequest, CompletionRequest, Methods
from serving import SECONDS, serving, tiny_lm

WRONG: list[Any] = [
    *(
        None,
        True,
        -1,
        0,
        2**70,
        1e308,
        -0.5,
        "",
        "x",
        "\ud800",
        [],
        [None],
        [[]],
        {},
        {"a": None},
        {"type": "function"},
    ),
    *([2**40], ["\x00"], {"type": "json_schema", "json_schema": {"schema": 3}}, {"regex": "(" * 50}, "beam:width=2"),
]
KINDS: list[tuple[str, type[BaseModel], dict[str, Any]]] = [
    ("/v1/chat/completions", ChatRequest, {"messages": [{"role": "user", "content": "x"}]}),
    ("/v1/completions", CompletionRequest, {"prompt": "x"}),
]


def bodies(kind: type[BaseModel], base: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    """A request for each field with a few of the wrong values; fields of `decodery` as well."""
    chance, found = random.Random(seed), list[dict[str, Any]]()
    for name in kind.model_fields:
        found += [{**base, "max_tokens": 2, name: value} for value in chance.sample(WRONG, 3)]
    for name in Methods.model_fields:
        found += [{**base, "max_tokens": 2, "decodery": {name: value}} for value in chance.sample(WRONG, 2)]
    return found


@pytest.mark.parametrize("path", [path for path, _, _ in KINDS])
def test_wrong_values_are_refused_by_name(path: str) -> None:
    kind, base = next((kind, base) for known, kind, base in KINDS if known == path)
    with serving(tiny_lm(), max_texts=4, seconds=5.0) as (_, url), httpx.Client(timeout=SECONDS) as http:
        for seed, body in enumerate(bodies(kind, base, 7)):
            body = {name: value for name, value in body.items() if name != "stream"}
            answer = http.post(url + path, content=json.dumps(body), headers={"Content-Type": "application/json"})
            assert answer.status_code < 500, (seed, body, answer.text)
            if answer.status_code != 200:
                assert answer.json()["error"]["message"], body
        assert http.get(f"{url}/health").status_code == 200
