"""Who may use a server."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path

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


def read_keys(path: Path) -> dict[str, str]:
    """Name by secret of a file with one key per line: `SECRET`, or `NAME SECRET`.

    Lines that begin with # are left out.

    Raises:
        SettingsError: For a file that cannot be read, or has no key.
    """
    try:
        if path.stat().st_size > _MOST_FILE:
            raise SettingsError(f"{path} is larger than 1 MiB: it should hold one key per line")
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read the keys in {path}: {error}") from error
    found: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2:
            raise SettingsError(f"{path}, line {number}: a line has a key, or a name and a key")
        found[words[-1]] = words[0] if len(words) == 2 else f"key-{number}"
    if not found:
        raise SettingsError(f"{path} has no key: write one per line")
    return found


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()
