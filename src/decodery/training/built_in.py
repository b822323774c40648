"""What kinds of training learn from where nothing is given: words, questions, programs and parts of prompts.

All of it was written for this purpose and comes from no data set; what passages say of names and figures is made up.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def _all() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((files(__package__) / "built_in.json").read_text(encoding="utf-8"))
    return found


def built_in_data(name: str) -> Any:
    """What `built_in.json` has under a name; it is not to be changed."""
    return _all()[name]
