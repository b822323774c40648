"""The arguments of `generate` in `transformers` that this package honours; all others are refused by name."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch

from decodery.core.errors import SettingsError
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.step.drafter import Drafter

_REFUSED = {
    "custom_generate": "decodery.integrations.transformers.generate decodes by itself",
    "assistant_tokenizer": "a draft model shares the model's vocabulary",
    "synced_gpus": "every process decodes its own texts",
    "negative_prompt_ids": "use decodery.load and the source guidance for a negative prompt",
    "negative_prompt_attention_mask": "use decodery.load and the source guidance for a negative prompt",
    "token_healing": "use decodery.load and a constraint for the rest of a token",
    "assistant_confidence_threshold": "num_assistant_tokens is the length of every draft",
    "assistant_ensemble_weight": "drafts change no token here",
    "assistant_lookbehind": "a draft model shares the model's vocabulary",
    "target_lookbehind": "a draft model shares the model's vocabulary",
    "num_assistant_tokens_schedule": "num_assistant_tokens is the length of every draft",
    "speculation_type": "name a drafter, as in drafter='prompt-lookup'",
}
"""Arguments that transformers keeps from a function that decodes, or that only change how its assistants draft."""
_REFUSED_FIELDS = {
    "constraints": "use decodery.load and a constraint",
    "force_words_ids": "use decodery.load and a constraint",
    "dola_layers": "use decodery.load and the source dola",
    "assistant_early_exit": "name a drafter, as in drafter='prompt-lookup'",
    "use_mtp": "name a drafter, as in drafter='prompt-lookup'",
}
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_KNOWN = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache_position", "cache", "past_key_values"}
"""Inputs of a model that are honoured, or that only say how it is called."""


def refused_arguments(settings: dict[str, Any]) -> None:
    """Refuse arguments of generate that could have no effect.

    Args:
        settings: All arguments.

    Raises:
        SettingsError: One of them is refused.
    """
    for name, instead in _REFUSED.items():
        if not _unset(settings.get(name)):
            raise SettingsError(f"{name} is not taken here, because {instead}: leave it out")


def refused_cache(implementation: str | None) -> None:
    """Refuse caches of transformers that would change tokens, or that it decodes with by itself.

    Args:
        implementation: `cache_implementation`, as given.

    Raises:
        SettingsError: It is refused.
    """
    if implementation in ("quantized", "paged"):
        raise SettingsError(
            f"cache_implementation={implementation!r} is not taken, because keys and values are kept here as they are "
            "computed: leave it out, or use decodery.load(kv_dtype='int8')"
        )


def drafted_by(settings: dict[str, Any]) -> None:
    """Put a drafter in the place of `assistant_model` and `num_assistant_tokens`.

    Args:
        settings: All arguments, which are changed.

    Raises:
        SettingsError: There is another drafter, or a length without an assistant.
    """
    assistant, length = settings.pop("assistant_model", None), settings.pop("num_assistant_tokens", None)
    if assistant is None:
        if length is not None:
            raise SettingsError(
                "num_assistant_tokens is the length of an assistant's drafts: give assistant_model, too"
            )
        return
    if rival := [name for name in ("drafter", "prompt_lookup_num_tokens") if settings.get(name) is not None]:
        raise SettingsError(f"a text has one drafter: leave out assistant_model or {rival[0]}")
    settings["drafter"] = DraftModel(model=assistant, **({} if length is None else {"length": length}))


def stopped_at(model: Any, config: Any, settings: dict[str, Any]) -> Any:
    """Put a stopping criterion in the place of `stop_strings` and `tokenizer`.

    Args:
        model: The model.
        config: The `generation_config` of the call, or None.
        settings: All other arguments, which are changed.

    Returns:
        The `generation_config` without stop strings.

    Raises:
        SettingsError: There is no tokenizer, or the model's own configuration has stop strings.
    """
    tokenizer, strings = settings.pop("tokenizer", None), settings.pop("stop_strings", None)
    if getattr(model.generation_config, "stop_strings", None) is not None:
        raise SettingsError(
            "stop_strings in model.generation_config are not taken: set them to None there, and give stop_strings="
        )
    if config is not None and config.stop_strings is not None:
        strings = config.stop_strings if strings is None else strings
        config = copy(config)
        config.stop_strings = None
    if strings is not None:
        if tokenizer is None:
            raise SettingsError("stop_strings need the model's tokenizer: give tokenizer=")
        from transformers.generation import StoppingCriteriaList, StopStringCriteria

        others = settings.get("stopping_criteria") or ()
        settings["stopping_criteria"] = StoppingCriteriaList([*others, StopStringCriteria(tokenizer, strings)])
    return config


def looked_up(config: Any, drafter: Any) -> Any:
    """The drafter that `prompt_lookup_num_tokens` asks for, else the one given.

    Args:
        config: The generation config.
        drafter: The drafter that was given.

    Returns:
        The drafter.

    Raises:
        SettingsError: Both ask for one.
    """
    if config.prompt_lookup_num_tokens is None:
        return drafter
    if isinstance(drafter, Drafter) or drafter != "auto":
        raise SettingsError("a text has one drafter: leave out prompt_lookup_num_tokens or drafter")
    return PromptLookup(max_ngram=config.max_matching_ngram_size or 2, length=config.prompt_lookup_num_tokens)


def refused_settings(model: Any, config: Any, prompts: torch.Tensor, given: dict[str, Any]) -> None:
    """Refuse what would not mean here what it means in generate.

    Args:
        model: The model.
        config: The generation config.
        prompts: [n, length] int64, the token ids.
        given: What the model would be given beside them.

    Raises:
        SettingsError: A setting or an input is refused.
    """
    if model.config.is_encoder_decoder or "inputs_embeds" in given:
        raise SettingsError("only prompts of tokens can be decoded here, by models without an encoder")
    if config.num_beams > 1:
        raise SettingsError("generate has no beams here: use decodery.load(...).search(prompt, 'beam:width=4')")
    for name, instead in _REFUSED_FIELDS.items():
        if not _unset(getattr(config, name, None)):
            raise SettingsError(f"{name} is not taken here: {instead}, and leave it out")
    if config.penalty_alpha and (config.top_k or 0) > 1 and not config.do_sample:
        raise SettingsError("penalty_alpha selects contrastive search, which is not supported here: leave it out")
    refused_cache(config.cache_implementation)
    # What transformers calls the argument: from 5.24 on the first.
    for name in ("cache", "past_key_values"):
        if (cache := given.get(name)) is not None and cache.get_seq_length():
            raise SettingsError(f"the cache that was given holds tokens already: leave {name} out")
    if told := [name for name in _OUTPUTS if getattr(config, name)]:
        raise SettingsError(f"{told[0]} is not to be had here: leave it out")
    _refuse_inputs(prompts, given)


def _unset(value: Any) -> bool:
    return value is None or value is False


def _refuse_inputs(prompts: torch.Tensor, given: dict[str, Any]) -> None:
    for name, value in given.items():
        # Tokenizers of several models give types of tokens that are all 0, which is what a model takes without any.
        alike = name == "token_type_ids" and isinstance(value, torch.Tensor) and not value.any()
        if value is not None and name not in _KNOWN and not alike:
            raise SettingsError(f"the model is given token ids alone here: leave {name} out")
    if (positions := given.get("position_ids")) is not None:
        mask = given.get("attention_mask")
        seen = torch.ones_like(prompts) if mask is None else mask
        if not ((positions == seen.cumsum(-1) - 1) | (seen == 0)).all():
            raise SettingsError(
                "tokens have the positions 0, 1, 2 ... after their padding here: leave position_ids out"
            )
