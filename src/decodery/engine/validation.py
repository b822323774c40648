"""The one place that says what does not go together: what every part of a request needs, and who does not give it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any

from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.core.registry import method_of
from decodery.core.requirements import Requirements, in_words
from decodery.models.hooks import hook_point
from decodery.models.protocol import LanguageModel
from decodery.sampling.constraint import Constrained, constrained
from decodery.sampling.logits_processor import Stage
from decodery.speculative.acceptance.coupled import Coupled
from decodery.step.writer import writes

if TYPE_CHECKING:
    from .request import Request

_LACKS = "{} needs {}, which {} does not give: use another {}, or a model that this package runs itself"
_NAMES = sorted(
    (each.name for each in fields(Requirements)), key=("rows", "logprobs", "continues").__contains__, reverse=True
)
"""What everything else rests on comes first."""
_OF_MODEL = (
    *(
        "rows",
        "logprobs",
        "continues",
        "taps",
        "keys",
        "trees",
        "states",
        "changes",
        "layer_plans",
        "policies",
        "parts",
        "exact_rows",
    ),
    *("gradients", "source", "costs"),
)
_IN_SPITE_OF_SOURCES = ("trees", "rows", "logprobs", "continues", "costs")
"""What a model gives is had through any source."""


def refuse(request: Request, model: LanguageModel | None = None) -> None:
    """Raise where a part of a request needs what another one, or the model, does not give.

    Args:
        model: What the engine decodes with; None looks at the request alone.

    Raises:
        SettingsError, UnsupportedModel: If the model lacks it, with one sentence: which part needs what, who does not
            give it, what to do.
    """
    if request.search is not None and request.monitors:
        raise SettingsError(
            f"monitors watch a text that is written once, and the search {name_of(request.search)} follows several: "
            "leave one of the two out"
        )
    for role, part in _parts(request):
        requirements = (
            Requirements.merged((part.requirements, part.of_action)) if role == "monitor" else part.requirements
        )
        if model is not None and writes(model) and _acts_on_rows(role, part):
            requirements = Requirements(rows=True)
        for name, value in _asked(requirements):
            if name in _OF_MODEL:
                _refuse_model(request, model, role, part, name, value)
            elif name == "ends" and isinstance(part, Constrained) and part.constraint.stops:
                continue
            elif found := _lacking(request, name, value):
                giver, advice = found
                words = in_words(name, value)
                raise SettingsError(f"{_who(role, part)} needs {words}, which {giver} does not give: {advice}")


@cache
def _asked(requirements: Requirements) -> tuple[tuple[str, Any], ...]:
    """What a table asks for at all, in the order it is looked at."""
    return tuple((name, value) for name in _NAMES if (value := getattr(requirements, name)))


def _parts(request: Request) -> Iterator[tuple[str, Any]]:
    """Role of everything that takes part, and the part."""
    for processor in request.sampler.processors:
        yield "constraint" if isinstance(processor, Constrained) else "processor", processor
    for role in ("acceptance_rule", "drafter", "draft_length", "logits_source", "search", "cache_policy"):
        if (part := getattr(request, role)) is not None:
            yield role, part
    for monitor in request.monitors:
        yield "monitor", monitor


def _of_model(model: LanguageModel) -> str:
    return "a model that only writes texts" if writes(model) else type(model).__name__


def _acts_on_rows(role: str, part: Any) -> bool:
    """Whether a part sees the rows of a text as they are scored, whatever else it needs."""
    return role in ("constraint", "drafter", "draft_length", "logits_source", "monitor") or (
        role == "acceptance_rule" and not isinstance(part, Coupled)
    )


def _who(role: str, part: Any) -> str:
    return "the constraint" if role == "constraint" else f"the {_said(role)} {name_of(part)}"


def _said(role: str) -> str:
    return "draft length policy" if role == "draft_length" else role.replace("_", " ")


def _refuse_model(request: Request, model: LanguageModel | None, role: str, part: Any, name: str, value: Any) -> None:
    """What is needed of the model, and of the source in its place."""
    words, source = in_words(name, value), request.logits_source
    # Sources pass rows on as they stand to each other.
    if (
        source is not None
        and role != "logits_source"
        and name not in _IN_SPITE_OF_SOURCES
        and not getattr(source.provides, name)
    ):
        whose, out = f"the logits source {name_of(source)}", "leave the logits source out, or "
        if source.provides.source:
            # What its encoder reads cannot be left out.
            whose, out = "a model with an encoder", ""
        raise SettingsError(
            f"{_who(role, part)} needs {words}, which {whose} does not give: {out}use another {_said(role)}"
        )
    if (
        role != "cache_policy"
        and name in ("keys", "layer_plans")
        and (kv := request.cache_policy) is not None
        and not getattr(kv.provides, name)
    ):
        raise SettingsError(
            f"{_who(role, part)} needs {words}, which the cache policy {name_of(kv)} does not give: leave the "
            f"policy out, or use another {_said(role)}"
        )
    if model is None or name == "keys":
        return
    if name == "taps":
        for tap in value:
            try:
                place = hook_point(tap, model.config.num_layers)
            except SettingsError as error:
                words = "hidden states that this model does not have, so use what was made for it"
                raise SettingsError(f"{_who(role, part)} needs {words}: {error}") from error
            if place.name != "residual" and place.name not in model.capabilities.sites:
                words = f"the hidden states at {tap}"
                raise UnsupportedModel(_LACKS.format(_who(role, part), words, _of_model(model), _said(role)))
    elif name == "gradients" and model.capabilities.parts and not model.capabilities.gradients:
        raise UnsupportedModel(
            f"{_who(role, part)} needs gradients, which passes over quantized and packed weights do not have: load the "
            "model with dtype=float32"
        )
    elif name == "costs" and not model.capabilities.costs:
        raise UnsupportedModel(
            f"{_who(role, part)} goes by what passes take, which differs between the processes of a split model: use "
            "prompt-lookup, or leave tensor_parallel_size out"
        )
    elif not getattr(model.capabilities, name):
        field = f" (no server has a request field for {words})" if name == "rows" else ""
        whom = f"{_of_model(model)}{field if writes(model) else ''}"
        raise UnsupportedModel(_LACKS.format(_who(role, part), words, whom, _said(role)))


def _lacking(request: Request, name: str, value: Any) -> tuple[str, str] | None:
    """Who of a request does not give what is needed, and what to do; None where all is well."""
    drafter, rule, processors = request.drafter, request.acceptance_rule, request.sampler.processors
    if name in ("drafts", "pauses", "draft_states") and drafter is not None:
        given = getattr(drafter.provides, name)
        if not given or (name == "drafts" and set(given) - set(value)):
            kinds = f", whose drafts are {' or '.join(given)}," if name == "drafts" else ""
            return f"the drafter {name_of(drafter)}{kinds}", _DRAFTERS[name]
    elif name in ("checked", "mask") and constrained(processors) and not getattr(rule.provides, name):
        return f"the acceptance rule {name_of(rule)}", _RULES[name]
    elif name in ("greedy", "chance") and request.sampler.greedy != (name == "greedy"):
        return "the sampler", _SAMPLERS[name]
    elif name == "law" and (without := [processor for processor in processors if not processor.provides.law]):
        return f"the processor {name_of(without[0])}", "leave one of the two out"
    elif name == "plain" and (bent := [processor for processor in processors if processor.stage <= Stage.EDIT]):
        found = "a constraint" if isinstance(bent[0], Constrained) else f"the processor {name_of(bent[0])}"
        return found, "leave masks, penalties and constraints out"
    elif name == "ends" and request.stop:
        return "a text with stop strings", "leave stop out"
    elif name == "alone":
        return _drafting(request)
    return None


_DRAFTERS = {
    "drafts": "use the coupled rule or another drafter",
    "pauses": "use a drafter that draws token by token, such as draft-model",
    "draft_states": "draft with draft-model alone",
}
_RULES = {
    "checked": "use a lossless rule, such as coupled",
    "mask": "leave it out, or use the coupled rule with a constraint that has a mask and excludes what it forbids",
}
_SAMPLERS = {
    "greedy": "use temperature 0, with masks and penalties alone",
    "chance": "give a temperature, such as 1",
}


def _drafting(request: Request) -> tuple[str, str] | None:
    """What of a request is there for drafts alone."""
    if request.drafter is not None:
        return f"the drafter {name_of(request.drafter)}", "leave the drafter out, or give None"
    if request.draft_length is not None:
        return f"the draft length policy {name_of(request.draft_length)}", "leave the draft length policy out"
    found = constrained(request.sampler.processors)
    # A constraint without a mask brings this rule along.
    stands_in = found is not None and not found[1].provides.mask and not request.acceptance_rule.provides.mask
    if not isinstance(request.acceptance_rule, Coupled) and not stands_in:
        return f"the acceptance rule {name_of(request.acceptance_rule)}", "leave the acceptance rule out"
    return None


def name_of(part: Any) -> str:
    """What a part is registered as, its class's name where it is not.

    Of a composite its parts' names as well.
    """
    method = method_of(part)
    name = type(part).__name__ if method is None else method.name
    inner = [name_of(each) for each in getattr(part, "parts", ())]
    return f"{name}({', '.join(inner)})" if inner else name
