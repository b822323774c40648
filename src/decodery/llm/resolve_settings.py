"""What the settings of a text name becomes methods: its drafter, its source, its sampler, what it goes on from."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import replace
from typing import Any

from decodery.core.errors import SettingsError
from decodery.core.registry import method_of, resolve
from decodery.engine.output import Output
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.sampling.logits_processor import LogitsProcessor
from decodery.sampling.sampler import CHANCE, Sampler
from decodery.speculative.drafters.predicted_output import PredictedOutput
from decodery.speculative.heads.recognise import head_place, published_drafter
from decodery.step.cache_policy import CachePolicy
from decodery.step.drafter import Drafter
from decodery.step.logits_source import LogitsSource
from decodery.step.monitor import Monitor
from decodery.step.sequence import KeptText, Sequence


def resolve_drafter(drafter: Drafter | str | None) -> Drafter | None:
    """A drafter by name, or by the folder of its head; None and "none" mean no speculation."""
    if drafter is None or drafter == "none":
        return None
    if isinstance(drafter, str) and (place := head_place(drafter)) is not None:
        return published_drafter(place)
    return resolve("drafter", drafter)


def with_predicted_output(
    drafter: Drafter | str | None, predicted: Callable[[], Ordered[int]] | None
) -> Drafter | None:
    """The drafter of a request that may have a predicted output.

    Args:
        drafter: As it was given. `auto`, the default, leaves the choice to this function.
        predicted: Makes the tokens of the predicted output; None where there is none.

    Returns:
        The drafter `predicted-output` where there is such a text, else the drafter that was given.

    Raises:
        SettingsError: A drafter was given that does not use a predicted output.
    """
    found = resolve_drafter(drafter)
    if predicted is None:
        return found
    if drafter == "auto":
        return PredictedOutput(tuple(predicted()))
    if isinstance(found, PredictedOutput):
        return replace(found, tokens=tuple(predicted()))
    if found is None:
        raise SettingsError("a predicted output needs a drafter: leave out drafter, or leave out the predicted output")
    known = method_of(found)
    name = type(found).__name__ if known is None else known.name
    raise SettingsError(
        f"the drafter {name} does not use a predicted output: leave out drafter, or give "
        f"predicted-output:drafter={name}"
    )


def resolve_logits_source(
    logits_source: LogitsSource | str | None, encode: Callable[[str], list[int]]
) -> LogitsSource | None:
    """A source by name, its texts turned into tokens; None and "none" mean the model alone."""
    if logits_source is None or logits_source == "none":
        return None
    resolved: LogitsSource = resolve("logits-source", logits_source)
    return resolved.encoded(encode)


def resolve_cache_policy(cache_policy: CachePolicy | str | None) -> CachePolicy | None:
    """A cache policy by name; None and "none" mean that all is kept and read."""
    if cache_policy is None or cache_policy == "none":
        return None
    found: CachePolicy = resolve("cache-policy", cache_policy)
    return found


def resolve_monitors(monitor: Monitor | str | Ordered[Monitor | str] | None) -> tuple[Monitor, ...]:
    """Monitors by name, one or several; None and "none" mean no monitor."""
    given = [monitor] if isinstance(monitor, str | Monitor) else monitor or ()
    return tuple(resolve("monitor", each) for each in given if each != "none")


def resolve_carrier(search: Any) -> Any:
    """A search by name, of those that write a message into a text and read it back."""
    method = resolve("search", search)
    if not hasattr(method, "read"):
        known = method_of(method)
        name = known.name if known is not None else type(method).__name__
        raise SettingsError(f"{name} carries no message: use the search coupling")
    return method


def build_sampler(
    sampler: Sampler | LogitsProcessor | str | Ordered[Any] | None,
    temperature: float | None,
    min_new_tokens: int,
    eos: Ordered[int],
    shortcuts: dict[str, Any],
) -> Sampler:
    """The sampler that the settings of one request describe."""
    if sampler is None:
        return Sampler.from_settings(
            temperature=0.0 if temperature is None else temperature,
            min_new_tokens=min_new_tokens,
            eos_ids=tuple(eos),
            **shortcuts,
        )
    given = [name for name, value in {"temperature": temperature, **shortcuts}.items() if value is not None]
    if given or min_new_tokens:
        raise SettingsError(f"give either sampler or {', '.join(given or ['min_new_tokens'])}, not both")
    return sampler if isinstance(sampler, Sampler) else Sampler(sampler)


def check_lengths(least: int, most: int) -> None:
    """Refuse a text that has to be longer than it may be. Raises SettingsError."""
    if least > most > 0:
        raise SettingsError(f"min_new_tokens is {least} and max_new_tokens {most}: give a larger max_new_tokens")


def stop_ids(given: Ordered[int], vocab_size: int) -> tuple[int, ...]:
    """Tokens that end a text.

    Raises:
        SettingsError: For ids that the model lacks.
    """
    if wrong := [id for id in given if not 0 <= id < vocab_size]:
        raise SettingsError(f"stop_token_ids has {wrong[0]}, and this model's tokens are 0 to {vocab_size - 1}")
    return tuple(given)


def stop_tokens(stop: Ordered[Any], tokenizer: Tokenizer) -> dict[int, str]:
    """The stop strings that are special tokens, by id.

    Raises:
        SettingsError: If one only holds such a token.
    """
    found: dict[int, str] = {}
    for string in stop:
        spelled = tokenizer.spelled.search(string) if tokenizer.spelled and isinstance(string, str) else None
        id = tokenizer.token_id(spelled[0]) if spelled else None
        if spelled is None or id is None:
            continue
        if spelled[0] != string:
            raise SettingsError(
                f"stop {string!r} holds the special token {spelled[0]!r} beside other text, and a text shows none: "
                "give the token alone"
            )
        found[id] = string
    return found


def warn_of_idle(settings: Mapping[str, Any]) -> None:
    """Warn of settings that change nothing because the most likely token is always taken.

    Args:
        settings: of a request, by name.
    """
    idle = [name for name, neutral in CHANCE.items() if settings.get(name) not in (None, neutral)]
    if idle and not settings.get("temperature") and settings.get("sampler") is None:
        warnings.warn(
            f"{', '.join(idle)} changes nothing at temperature 0, which always takes the most likely token: set a "
            "temperature above 0, such as 0.7, or leave it out",
            stacklevel=3,
        )


def left_by(earlier: Output | Sequence | None) -> Sequence | KeptText | None:
    """What an earlier text left to go on from."""
    if not isinstance(earlier, Output):
        return earlier
    if earlier.kept is None:
        raise SettingsError("that output kept nothing to go on from: ask for it with return_cache=True")
    return earlier.kept
