"""Who may use a server."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decodery.core.errors import SettingsError

from .errors import ApiError

_MOST_FILE = 1 << 20
NOBODY = ""
"""Whose requests are where no keys are asked for."""


class Keys:
    """The keys of a server.

    Args:
        secrets: Name by secret; none lets everybody.
    """

    def __init__(self, secrets: Mapping[str, str]) -> None:
        self._names = [(_digest(secret), name) for secret, name in secrets.items()]

    def owner(self, authorization: str | None) -> str:
        """The name of the key in an `Authorization` header.

        Raises:
            ApiError: Without one that is known.
        """
        if not self._names:
            return NOBODY
        scheme, _, rest = (authorization or "").strip().partition(" ")
        given = _digest(rest.strip() if scheme.lower() == "bearer" else (authorization or "").strip())
        # All are compared, in the same time each, so that nothing can be learnt from how long it takes.
        found = [name for digest, name in self._names if hmac.compare_digest(digest, given)]
        if not found:
            message = "this server requires an API key: send it as `Authorization: Bearer KEY`"
            raise ApiError(401, message, kind="authentication_error", code="invalid_api_key")
        return found[0]


def read_keys(path: Path) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """Names by secret, and defaults by name, of a file with one key per line.

    A line is `SECRET`, `NAME SECRET`, or `NAME SECRET {"temperature": 0.7}` with fields for requests that leave them
    out. Lines that begin with # are left out.

    Raises:
        SettingsError: For a file that cannot be read, has no key, or has defaults that no request could have.
    """
    from .key_defaults import KeyDefaults

    try:
        if path.stat().st_size > _MOST_FILE:
            raise SettingsError(f"{path} is larger than 1 MiB: it should hold one key per line")
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read the keys in {path}: {error}") from error
    found: dict[str, str] = {}
    defaults: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split(maxsplit=2)
        if not words or words[0].startswith("#"):
            continue
        name, secret = (f"key-{number}", words[0]) if len(words) == 1 else words[:2]
        if secret.startswith("{"):
            raise SettingsError(f"{path}, line {number}: defaults need a name before the key, as in NAME KEY {{...}}")
        if secret in found:
            raise SettingsError(f"{path}, line {number}: this key is {found[secret]!r} already: give each its own")
        found[secret] = name
        if len(words) < 3:
            continue
        try:
            defaults[name] = json.loads(words[2])
            KeyDefaults(defaults[name])
        except (ValueError, RecursionError, ApiError) as error:
            said = error.message if isinstance(error, ApiError) else "after the key stands no JSON object"
            raise SettingsError(
                f"{path}, line {number}: {said}: a line is a key, a name and a key, or these and "
                'defaults such as {"temperature": 0.7}'
            ) from error
    if not found:
        raise SettingsError(f"{path} has no key: write one per line")
    return found, defaults


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()
