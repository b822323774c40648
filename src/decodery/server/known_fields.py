"""Fields of other servers: those without effect here, those refused by name, and unknown ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import islice
from typing import Any

from pydantic import AliasChoices, BaseModel

from .errors import invalid

_IRRELEVANT = frozenset(
    [
        *("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "verbosity", "reasoning_effort", "cache_prompt", "id_slot", "slot_id"),
        *("timings_per_token", "return_tokens", "request_id"),
        *("chat_template_content_format", "guided_decoding_backend", "t_max_predict_ms", "t_max_prompt_ms"),
        *("n_keep", "parse_tool_calls", "reasoning_format"),
        # Schemas are always enforced, and streams hold nothing but the text.
        *("response_format.json_schema.strict", "response_format.json_schema.description", "tools.function.strict"),
        *("functions.strict", "stream_options.include_obfuscation"),
        # Of tools that the server runs itself, which this one has none of.
        "max_tool_calls",
    ]
)
"""Fields that change no text here, whatever they say, by their paths."""

_CONSTRAINTS = "use structured_outputs with json, regex, choice or grammar, or response_format"
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "modalities": ((["text"],), "this server writes text"),
    "audio": ((), "this server writes text"),
    "web_search_options": ((), "this server searches nothing"),
    "use_beam_search": ((False,), 'give "decodery": {"search": "beam:width=4"}'),
    "length_penalty": ((1, 1.0), "it belongs to beam search, which has settings of its own"),
    "early_stopping": ((False,), "it belongs to beam search, which has settings of its own"),
    "include_stop_str_in_output": ((False,), "a stop string is cut from the text"),
    "skip_special_tokens": ((True,), "special tokens are not part of a text"),
    "spaces_between_special_tokens": ((True,), "special tokens are not part of a text"),
    "add_generation_prompt": ((True,), "use continue_final_message to go on with the last message"),
    "add_special_tokens": ((False,), "the chat template writes the special tokens"),
    "documents": (([],), "put documents into a message"),
    "chat_template": ((), "the model's own template is used"),
    "rank_fields": ((["text"],), "documents are ranked by their text"),
    "priority": ((0,), "keys take turns, and requests of a key are served in order"),
    "cache_salt": ((), "prompts are shared within a key only: use a key for each tenant"),
    "allowed_token_ids": (([],), _CONSTRAINTS),
    "bad_words": (([],), "give logit_bias of -100 for their tokens"),
    "logits_processors": (([],), 'give "decodery": {"sampler": [...]}'),
    "return_tokens_as_token_ids": ((False,), "POST /tokenize gives the tokens of a text"),
    "return_token_ids": ((False,), "POST /tokenize gives the tokens of a text"),
    "structural_tag": ((), _CONSTRAINTS),
    "guided_whitespace_pattern": ((), 'give "decodery": {"constraint": "json-schema:schema=...,whitespace=compact"}'),
    "grammar": (("",), "GBNF is not read here: give structured_outputs with a Lark grammar"),
    "samplers": ((), 'give "decodery": {"sampler": [...]}, in the order that they are applied'),
    "n_probs": ((0,), "give logprobs"),
    "dry_penalty_last_n": ((-1,), "DRY looks at the whole text"),
    "repeat_last_n": ((-1,), "repetition_penalty counts the whole text"),
    "dynatemp_range": ((0, 0.0), 'give "decodery": {"sampler": ...}; GET /decodery/methods lists samplers'),
    "tfs_z": ((1, 1.0), 'give "decodery": {"sampler": ...}; GET /decodery/methods lists samplers'),
    "n_indent": ((0,), _CONSTRAINTS),
    "regex": (("",), _CONSTRAINTS),
    "ebnf": (("",), _CONSTRAINTS),
    "top_n_sigma": ((0, 0.0, -1, -1.0), 'give "decodery": {"sampler": ...}; GET /decodery/methods lists samplers'),
    "lora_path": (("",), "serve the model with its adapter"),
    "top_logprobs": ((0,), "logprobs is the number in a completion, and a response reports none"),
    "conversation": ((), "give previous_response_id, or all items in input"),
    "mcp_servers": (([],), "this server calls no other servers"),
    "lora": (([],), "serve the model with its adapter"),
    "image_data": (([],), "this server reads text"),
    "mm_processor_kwargs": (({},), "this server reads text"),
    "kv_transfer_params": (({},), "this server holds its own cache"),
    "vllm_xargs": (({},), "methods and their settings stand in the object decodery"),
}
"""By name: the values that say nothing, and what to do instead of any other."""


_MEANT = {
    **dict.fromkeys(("max_new_tokens", "max_length", "max_tokens_to_sample", "num_predict"), ("max_tokens", "give {}")),
    "stop_sequences": ("stop", "give {}"),
    "random_seed": ("seed", "give {}"),
    "do_sample": ("temperature", "give {}, 0 to be greedy"),
    "enable_thinking": ("chat_template_kwargs", 'give {} with {{"enable_thinking": ...}}'),
    "messages": ("prompt", "POST /v1/chat/completions takes messages"),
    "prompt": ("messages", "POST /v1/completions takes a prompt"),
    "input": ("messages", "POST /v1/responses takes input"),
}
"""By the name of a field: the one in its place here, and what to do. Refused where the request lacks that, too."""
_COMPARED = 64
"""Unknown fields of a request that are compared with known ones, which takes a tenth of a millisecond each."""


def refuse_misnamed(found: Mapping[str, Any], kind: type[BaseModel]) -> None:
    """Raise ApiError for an unknown field that stands for one which the request lacks, or resembles it.

    Args:
        found: The request's JSON.
        kind: The fields that are read.
    """
    names = _names(kind)
    given = {names[name] for name in found.keys() & names.keys()}
    known = names.keys() | _IRRELEVANT | _REFUSED.keys()
    for name in islice((name for name in found if name not in known), _COMPARED):
        meant, advice = _MEANT.get(name, ("", ""))
        near = [meant] if meant else difflib.get_close_matches(name[:80], names, n=1, cutoff=0.88)
        if near and near[0] in names and names[near[0]] not in given:
            wrong = f"there is no field {name[:80]!r}"
            raise invalid(
                f"{wrong}: {advice.format(meant)}" if meant else f"{wrong}: did you mean {near[0]}?", name[:80]
            )


def refuse_by_name(found: Mapping[str, Any], kind: type[BaseModel]) -> None:
    """Raise ApiError for a field of other servers that is not supported and would change the answer.

    Args:
        found: The request's JSON.
        kind: The fields that are read.
    """
    for name in (found.keys() & _REFUSED.keys()) - _names(kind).keys():
        neutral, advice = _REFUSED[name]
        value = found[name]
        if value is not None and not any(type(value) is type(each) and value == each for each in neutral):
            raise invalid(f"{name} is not supported: {advice}", name)


def unknown_fields(found: Mapping[str, Any], body: BaseModel) -> list[str]:
    """The fields of a request that were not read, as paths, each once.

    Args:
        found: The request's JSON.
        body: What was read of it.
    """
    known = _IRRELEVANT | _REFUSED.keys()
    return sorted({path for path in _unread(found, body) if path not in known})


def _unread(found: Mapping[str, Any], body: BaseModel) -> Iterator[str]:
    names = _names(type(body))
    for key, given in found.items():
        if key not in names:
            yield key
            continue
        value = getattr(body, names[key])
        pairs = (
            zip(given, value, strict=False) if isinstance(value, list) and isinstance(given, list) else [(given, value)]
        )
        for each, made in pairs:
            if isinstance(made, BaseModel) and isinstance(each, Mapping):
                yield from (f"{key}.{inner}" for inner in _unread(each, made))


@cache
def _names(kind: type[BaseModel]) -> dict[str, str]:
    """The fields of a request by what they may be called in JSON."""
    fields = kind.model_fields.items()
    return {alias: name for name, field in fields for alias in _aliases(name, field.validation_alias)}


def _aliases(name: str, alias: Any) -> list[str]:
    if isinstance(alias, AliasChoices):
        return [str(choice) for choice in alias.choices]
    return [alias] if isinstance(alias, str) else [name]
