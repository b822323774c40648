"""`decodery info`: what this installation and this machine are, for a look and for bug reports."""

from __future__ import annotations

import json
from typing import Any

import click

from decodery.core.errors import SettingsError

from .command import command, option

_CAN = ("exact_rows", "states", "interventions", "layer_plans", "policies", "gradients")
"""Capabilities, by the names that are shown."""


@command(example="info --json")
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@option("-m", "--model", metavar="MODEL", help="Load a model, and say what it can do as well.")
def info(as_json: bool, model: str | None) -> None:
    """Show versions, processor, kernels, the effect of int8, the sandbox of generated programs, and the models."""
    facts = collect() | ({} if model is None else _capabilities(model))
    if as_json:
        click.echo(json.dumps(facts, indent=2, ensure_ascii=False))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        click.echo(f"{name:<{width}}  {shown or 'none'}")


def collect() -> dict[str, Any]:
    """All facts by name: texts, numbers and lists of texts."""
    from decodery.core.machine import describe
    from decodery.models.loaders import package_index as embedded
    from decodery.models.loaders import store

    models = [
        f"{model} ({what.summary}, {what.size / 1e6:.0f} MB)"
        for model, what in embedded.EMBEDDED.items()
        if embedded.is_pulled(model)
    ]
    return {**describe(), "int8": _int8(), "sandbox": _sandbox(), "cache": str(store.home()), "models": models}


def _capabilities(name: str) -> dict[str, Any]:
    """What a model can do."""
    from decodery.models.loaders.load import load
    from decodery.speculative.drafters.found_models import chosen_model
    from decodery.speculative.heads.found import chosen_head

    loaded = load(name)
    model, can = loaded.model, loaded.model.capabilities
    drafts = "trees" if can.trees else "chains" if can.chains else "none: each row is a call of its own"
    return {
        "model": f"{loaded.name} ({model.config.family}, {loaded.dtype})",
        "runs": "through transformers" if hasattr(model, "hf_model") else "natively",
        "keeps": getattr(model, "keeps", "keys and values"),
        "drafts": drafts,
        "advisers": [*chosen_head(model)[1], *chosen_model(model)[1]],
        "hook points": sorted(can.sites),
        "can": [name for name in _CAN if getattr(can, name)],
    }


def _sandbox() -> list[str]:
    """Who holds generated programs to what here, tried out."""
    from decodery.scorers.sandbox import protection

    try:
        found = protection()
    except (SettingsError, OSError) as error:
        return [str(error)]
    who = {"kernel": "the kernel", "guard": "Python alone, against accidents only", "nothing": "nothing"}
    held = {name: [what for what, holder in found.items() if holder == name] for name in who}
    return [f"{who[name]} refuses or bounds {', '.join(what)}" for name, what in held.items() if what]


def _int8() -> list[str]:
    """What dtype="int8" brings on this machine, by model: as measured, else what it reads less."""
    from decodery.step.pass_cost import measured

    models: dict[str, dict[str, str]] = {}
    for model, curve in measured():
        times = "/".join(f"{curve.seconds(rows) * 1e3:.1f}" for rows in (1, 8, 16))
        models.setdefault(model["config"], {})[model["precision"]] = times
    both = [times for times in models.values() if "int8" in times and len(times) > 1]
    if not both:
        return ["reads half of bfloat16's bytes per pass; decodery bench --pass measures what that brings here"]
    return [
        "ms per pass over 1/8/16 rows: " + ", ".join(f"{name} {text}" for name, text in sorted(times.items()))
        for times in both
    ]
