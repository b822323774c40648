"""String formats as patterns, where the engine's own let too much pass."""

from __future__ import annotations

_YEAR = r"(?:\d{3}[1-9]|\d{2}[1-9]\d|\d[1-9]\d{2}|[1-9]\d{3})"
_LEAP = r"(?:\d{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_MONTH_DAY = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
)
DATE = f"(?:{_YEAR}-{_MONTH_DAY}|{_LEAP}-02-29)"
CLOCK = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d+)?"
ZONE = r"(?:[zZ]|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_TIME = rf"(?:{CLOCK}{ZONE}|23:59:60(?:\.\d+)?(?:[zZ]|[+-]00:00))"
_LABEL = "A(?:A|HA|HHA|H(?:AH|-A)H{0,58}A)?".replace("A", "[A-Za-z0-9]").replace("H", "[A-Za-z0-9-]")
FORMATS = {
    "date": f"^{DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{DATE}[tT]{_TIME}$",
    "hostname": rf"^{_LABEL}(?:\.{_LABEL})*$",
}
"""Formats of which the engine lets too much pass: a 29 February of any year, leap seconds at any time, host names of
any length or with hyphens where only encoded names have them."""
ENGINE_FORMATS = frozenset(["duration", "email", "ipv4", "ipv6", "uri", "uuid"])
"""Formats that the engine enforces."""
