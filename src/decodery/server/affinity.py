"""Which replica a request goes to: by what it begins with, so that what was read of it is there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from .wire import loads

_BEGINNING = 256
"""Characters of a prompt by which it is sent somewhere."""
_AHEAD = 8
"""Requests that a replica may have in progress beyond the least busy one, for the sake of what it remembers."""


def beginning(headers: Mapping[str, str], body: bytes) -> str:
    """What decides where a request goes: a name of its key and of how its prompt begins.

    Empty where it has no prompt. Of a conversation that is what comes up to the user's first turn, which later requests
    of it repeat.
    """
    try:
        found = loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(found, dict):
        return ""
    said = found.get("messages") or found.get("prompt")
    if isinstance(said, list) and all(isinstance(each, dict) for each in said):
        first = next((place for place, each in enumerate(said) if each.get("role") == "user"), 0)
        text = json.dumps([(each.get("role"), each.get("content")) for each in said[: first + 1]])
    elif isinstance(said, list) and isinstance(said[0], str | list):
        text = str(said[0])
    else:
        text = str(said)
    secret = headers.get("authorization", "")
    return hashlib.blake2b(f"{secret}\n{text[:_BEGINNING]}".encode("utf-8", "replace"), digest_size=16).hexdigest()


def ranked(name: str, replicas: Mapping[str, int]) -> list[str]:
    """Replicas for requests of this name, the best one first.

    Each has its own order of them for every name (rendezvous hashing), so that one more or less moves no name but those
    it takes or leaves; replicas that are far busier than the least busy one come last.

    Args:
        replicas: Requests in progress by replica.
    """
    idle = min(replicas.values(), default=0)

    def place(replica: str) -> tuple[bool, bytes]:
        return replicas[replica] > idle + _AHEAD, hashlib.blake2b(f"{name}\n{replica}".encode()).digest()

    return sorted(replicas, key=place)
