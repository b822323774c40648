"""The static index of methods: what exists, and which module has it, known without importing or parsing any of them.

`tools/method_index.py` writes `methods.json` from the sources, and `make lint` checks that it is up to date.
"""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

FAMILIES = {
    "drafter": "speculative.drafters",
    "tree-policy": "speculative.trees",
    "acceptance-rule": "speculative.acceptance",
    "continuous-acceptance": "speculative.acceptance.continuous",
    "logits-processor": "sampling",
    "logits-source": "logits_sources",
    "draft-length": "speculative.draft_length",
    "constraint": "constraints",
    "search": "search",
    "scorer": "scorers",
    "suggestion": "extras.superposed",
    "simultaneous": "extras.simultaneous",
    "diffusion": "diffusion",
    "diffusion-cache": "diffusion.cache",
    "expert-sharing": "diffusion.experts",
    "cache-policy": "kv_cache",
    "monitor": "monitors",
    "compression": "compression",
    "training": "training",
}
"""By family: the package, below this one, that has its base class and its methods."""
BASES = {
    "step.drafter": "drafter",
    "step.tree_policy": "tree-policy",
    "step.acceptance_rule": "acceptance-rule",
    "step.logits_source": "logits-source",
    "step.draft_length_policy": "draft-length",
    "step.scorer": "scorer",
    "step.cache_policy": "cache-policy",
    "step.monitor": "monitor",
    "sampling.logits_processor": "logits-processor",
}
"""By module, below this one: the family of the base class there, where it lies below its package."""
FAMILY_OF = {package: family for family, package in FAMILIES.items()} | BASES


def is_base(module: str) -> bool:
    """Whether a module has the base class of a family."""
    own = module.removeprefix(f"{__name__.partition('.')[0]}.")
    return own in BASES or own in {f"{package}.base" for package in FAMILIES.values()}


@dataclass(frozen=True)
class Description:
    """What one method says of itself. paper and year are None where there is no source.

    Attributes:
        requirements, provides: Its tables in words, see `core.requirements`; requirements end with what it was
            registered with.
        slower: See `registry.register`.
        ready: Whether it runs with its defaults on any model that has what its table requires: no trained part, second
            model or setting has to be given.
    """

    name: str
    family: str
    paper: str | None
    year: int | None
    guarantee: str
    lossless: bool
    requirements: tuple[str, ...]
    provides: tuple[str, ...]
    slower: bool
    ready: bool
    summary: str

    def as_dict(self) -> dict[str, Any]:
        """What `decodery methods --json` prints of it."""
        values = {field.name: getattr(self, field.name) for field in fields(Description)}
        return values | {"requirements": list(self.requirements), "provides": list(self.provides)}


_OF_THE_TEXT = ("a prompt that", "a prompt with", "drafts with", "logits of", "the log-probabilities", "nothing but")
"""How requirements begin that a prompt, a request or most models meet: no part has to be trained or named for them."""


def facts(
    name: str,
    *,
    paper: str = "",
    guarantee: str = "",
    lossless: bool = False,
    requirements: Any = (),
    doc: str | None = None,
    slower: bool = False,
    lacking: bool = False,
    tables: tuple[tuple[str, ...], tuple[str, ...]] = ((), ()),
) -> dict[str, Any]:
    """The fields of a `Description` except the family.

    They come from the arguments of `register`, the docstring and the tables.

    Args:
        lacking: Whether a setting has no default.
    """
    year = re.search(r"\((\d{4})\)\s*$", paper)
    return {
        "name": name,
        "paper": paper or None,
        "year": int(year[1]) if year else None,
        "guarantee": guarantee or ("the output distribution is unchanged" if lossless else "changes the output"),
        "lossless": lossless,
        "requirements": (*tables[0], *requirements),
        "provides": tables[1],
        "slower": slower,
        "ready": not lacking and all(each.startswith(_OF_THE_TEXT) for each in requirements),
        "summary": inspect.cleandoc(doc or "").partition("\n")[0],
    }


class Entry(NamedTuple):
    """Where a method is: the module that defines it, and the name of its class there."""

    described: Description
    module: str
    cls: str


_SCALARS = tuple({field.name for field in fields(Description)} - {"family", "requirements", "provides"})


@cache
def _index() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((files(__package__) / "methods.json").read_text(encoding="utf-8"))
    return found


@cache
def catalogue(family: str) -> dict[str, Entry]:
    """By name, sorted: the methods a family's package defines; no module is imported."""
    return {
        each["name"]: Entry(
            Description(
                family=family,
                requirements=tuple(each["requirements"]),
                provides=tuple(each["provides"]),
                **{field: each[field] for field in _SCALARS},
            ),
            each["module"],
            each["cls"],
        )
        for each in _index()[family]["methods"]
    }


@cache
def shown(family: str) -> dict[str, str]:
    """What a family's package exports: by name, sorted, the module that defines it.

    These are its methods' classes and the names in `__all__` of its modules. No module is imported.
    """
    return dict(_index()[family]["exports"])
