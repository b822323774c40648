"""Which methods run on a model as they are, and what the others need: each is tried on a text that is not decoded."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np

from decodery.core.errors import DecoderyError
from decodery.core.method_spec import unmet
from decodery.core.registry import Method
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.protocol import LanguageModel
from decodery.sampling.sampler import Sampler

_ROLES = {
    **{"drafter": "drafter", "acceptance-rule": "acceptance_rule", "draft-length": "draft_length"},
    **{"logits-source": "logits_source", "cache-policy": "cache_policy"},
    **{"monitor": "monitors", "logits-processor": "sampler"},
}
"""The field of a request that takes a method of a family."""
_ROWS = 1024


def readiness(methods: Iterable[Method], model: LanguageModel) -> dict[tuple[str, str], str]:
    """What methods need before a text of a model can use them with their defaults.

    Args:
        methods: of the families that decide how one text is written; others are left out.
        model: what they are for.

    Returns:
        By family and name: one sentence, or "" for a method that is ready.
    """
    engine = Engine(model, pass_seconds=lambda context: np.ones(_ROWS))
    return {(each.family, each.name): _missing(each, engine) for each in methods if each.family in _ROLES}


def slower(method: Method, model: LanguageModel) -> bool:
    """Whether a method was measured slower than plain decoding on the kind of device that a model is on."""
    return method.slower and model.device.type == "cpu"


def _missing(method: Method, engine: Engine) -> str:
    none = dataclasses.MISSING
    given = [each for each in dataclasses.fields(method.cls) if each.init]
    wanted = [each.name for each in given if each.default is none and each.default_factory is none]
    if wanted:
        return f"it needs {unmet(method, wanted)}"
    found = ""
    # Some rules want chance, and some a certain choice.
    for temperature in (0.0, 1.0):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                _open(method.cls(), method.family, engine, temperature)
            return ""
        except DecoderyError as error:
            found = found or str(error)
    return found


def _open(method: Any, family: str, engine: Engine, temperature: float) -> None:
    """Begin a text with a method, of which nothing is read."""
    given: dict[str, Any] = {"sampler": Sampler.from_settings(temperature=temperature)}
    if family == "logits-processor":
        given["sampler"] = Sampler([method])
    else:
        given[_ROLES[family]] = (method,) if family == "monitor" else method
    engine.open(Request([0, 0], max_new_tokens=8, **given))
