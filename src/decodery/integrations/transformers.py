"""Decoding for models of `transformers` that are in memory already. Imports transformers where it is used.

`decodery.integrations.transformers.generate(model, prompt, ...)` takes the arguments of `model.generate`; the engine of
this package writes the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from decodery.core.errors import SettingsError
from decodery.core.noise import nth_seed
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.transformers.live import Held, language_model
from decodery.sampling import (
    Epsilon,
    Eta,
    MinP,
    NoRepeatNGram,
    RepetitionPenalty,
    Sampler,
    Temperature,
    TopK,
    TopP,
    Typical,
)
from decodery.sampling.logits_processor import Context, LogitsProcessor, Stage
from decodery.step.sequence import Sequence as Text

from .transformers_arguments import (
    drafted_by,
    looked_up,
    refused_arguments,
    refused_cache,
    refused_settings,
    stopped_at,
)

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

__all__ = ["decode", "generate"]

_OWN: dict[str, Callable[[Any], LogitsProcessor]] = {
    "TemperatureLogitsWarper": lambda given: Temperature(given.temperature),
    "TopKLogitsWarper": lambda given: TopK(given.top_k),
    "TopPLogitsWarper": lambda given: TopP(given.top_p),
    "MinPLogitsWarper": lambda given: MinP(given.min_p),
    "TypicalLogitsWarper": lambda given: Typical(given.mass),
    "EpsilonLogitsWarper": lambda given: Epsilon(given.epsilon),
    "EtaLogitsWarper": lambda given: Eta(float(given.epsilon)),
    "RepetitionPenaltyLogitsProcessor": lambda given: RepetitionPenalty(given.penalty),
    "NoRepeatNGramLogitsProcessor": lambda given: NoRepeatNGram(given.ngram_size),
}
"""What this package computes faster, and for the nodes of a tree at once."""
_LOOKING_BACK = ("RepetitionPenaltyLogitsProcessor", "NoRepeatNGramLogitsProcessor")
_REFUSED = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "leave guidance_scale out, and use the source guidance instead",
    "PrefixConstrainedLogitsProcessor": "leave prefix_allowed_tokens_fn out, and use a constraint instead",
}

_HELD = "_decodery"
"""The attribute under which a model keeps its engine, so that both go together."""


def generate(
    model: PreTrainedModel, inputs: torch.Tensor | None = None, generation_config: Any = None, **settings: Any
) -> Any:
    """`model.generate(inputs, generation_config, **settings)`, decoded by this package.

    Args:
        model: A causal language model of transformers.
        inputs: [n, length] int64, the token ids of the prompts; also as `input_ids`.
        generation_config: As in transformers.
        settings: Every other argument of generate, and `drafter`, `rule` and `seed` (see `decode`). `assistant_model`
            drafts `num_assistant_tokens` tokens a step, `prompt_lookup_num_tokens` asks for the drafter prompt-lookup,
            `stop_strings` need `tokenizer`; a streamer gets the prompt and then every token, one by one. Settings of
            transformers' own caches and compilation have no effect, but those that would change tokens.

    Returns:
        What generate returns: [n, length] int64, or an output that holds it as `sequences`.

    Raises:
        SettingsError: An argument could have no effect, or not the one it has in transformers.
        UnsupportedModel: As `decodery.load`.
    """
    refused_arguments(settings)
    drafted_by(settings)
    # Before transformers makes such a cache.
    refused_cache(settings.get("cache_implementation", getattr(generation_config, "cache_implementation", None)))
    generation_config = stopped_at(model, generation_config, settings)
    decoded = partial(decode, streamer=settings.pop("streamer", None))
    return cast(Any, model).generate(inputs, generation_config, custom_generate=decoded, **settings)


def decode(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: Iterable[Any] = (),
    stopping_criteria: Iterable[Any] = (),
    generation_config: GenerationConfig | None = None,
    streamer: Any = None,
    drafter: Any = "auto",
    acceptance_rule: Any = "coupled",
    seed: int | None = None,
    **given: Any,
) -> Any:
    """The tokens of `model.generate(..., custom_generate=decode)`: [n, length] int64, padded after ends.

    Settings beside those of `generate`: drafter and rule, as everywhere in this package, None for no drafter. The seed
    decides the tokens, whatever drafts; greedy tokens are those of transformers where the model's passes do not depend
    on how many rows they have. Logits processors of other kinds than the usual ones are asked about every row on its
    own, and must depend on nothing but what they are given.

    Args:
        input_ids: [n, length] int64.
        seed: Of the first text, drawn from PyTorch's own generator where it is None; text i of n has seed + i.
        given: What the model would be given beside them, of which attention_mask tells the padding.

    Raises:
        SettingsError: For what would not mean here what it means in generate; UnsupportedModel as `decodery.load` does.
            transformers gives this function no streamer, assistant or tokenizer that generate was given: call the
            function `generate` of this module for those.
    """
    assert generation_config is not None
    refused_settings(model, generation_config, input_ids, given)
    if streamer is not None and len(input_ids) > 1:
        raise SettingsError(f"a streamer takes one text, not {len(input_ids)}: leave streamer out, or give one prompt")
    drafter = looked_up(generation_config, drafter)
    processors = list(logits_processor)
    for each in processors:
        if (name := type(each).__name__) in _REFUSED:
            raise SettingsError(f"{name} cannot be called for the nodes of a tree: {_REFUSED[name]}")
    prompts = _prompts(input_ids, given.get("attention_mask"))
    if seed is None:
        seed = int(torch.randint(2**62, (), device="cpu"))
    end = [] if generation_config.do_sample else [Temperature(0.0)]
    samplers = [
        Sampler([*(_warp(each, row[: len(row) - len(prompt)].tolist()) for each in processors), *end])
        for row, prompt in zip(input_ids, prompts, strict=True)
    ]
    longest, ends, others_stop = _stops(stopping_criteria, generation_config.max_length)
    engine = _engine(model)
    texts = [
        engine.submit(
            Request(
                prompt,
                max_new_tokens=max(longest - input_ids.shape[1], 1),
                sampler=samplers[number],
                drafter=drafter,
                acceptance_rule=acceptance_rule,
                seed=nth_seed(seed, number),
                eos_ids=ends,
            )
        )
        for number, prompt in enumerate(prompts)
    ]
    for text, row in zip(texts, input_ids, strict=True):
        padding = row[: len(row) - len(text.tokens)].tolist()
        text.segment_end = _Stop(others_stop, padding, input_ids.device) if others_stop else None
    if streamer is not None:
        streamer.put(input_ids.cpu())
    training = model.training
    model.eval()
    try:
        _run(engine, texts, streamer)
    finally:
        model.train(training)
    found = _padded(input_ids, [text.generated for text in texts], generation_config)
    if generation_config.return_dict_in_generate:
        from transformers.generation.utils import GenerateDecoderOnlyOutput

        return GenerateDecoderOnlyOutput(sequences=cast(Any, found))
    return found


def _engine(model: Any) -> Engine:
    held = model.__dict__.get(_HELD)
    # Whoever moves or casts the model means the same one.
    known = language_model(model)
    if held is None or held.value is None or held.value.model is not known:
        held = model.__dict__[_HELD] = Held(Engine(known))
    engine: Engine = held.value
    return engine


def _prompts(input_ids: torch.Tensor, mask: torch.Tensor | None) -> list[list[int]]:
    """The tokens of each row without its padding."""
    kept = torch.ones_like(input_ids) if mask is None else mask
    prompts = [row[here.bool()].tolist() for row, here in zip(input_ids, kept, strict=True)]
    if not all(prompts):
        raise SettingsError("a prompt is empty: give each row a token that its attention_mask lets through")
    return prompts


def _ends(ids: int | Sequence[int] | None) -> tuple[int, ...]:
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def _stops(criteria: Iterable[Any], longest: int) -> tuple[int, tuple[int, ...], list[Any]]:
    """The length of a row at most, the tokens that end a text, and the criteria that say something else."""
    ends, lengths, others = list[int](), list[int](), list[Any]()
    for each in criteria:
        # By name and whole: a class of the caller's own that goes on from one of them may say something else.
        if type(each).__name__ == "MaxLengthCriteria":
            lengths.append(each.max_length)
        elif type(each).__name__ == "EosTokenCriteria":
            ends += each.eos_token_id.tolist()
        else:
            others.append(each)
    return min(lengths, default=longest), tuple(ends), others


def _warp(processor: Any, padding: list[int]) -> LogitsProcessor:
    """What does the same to a text without the padding that stands before it in its row."""
    name = type(processor).__name__
    left_out = getattr(processor, "prompt_ignore_length", None)
    # What generate makes of a repetition penalty leaves out each row's padding, which is not there here at all.
    whole = isinstance(left_out, torch.Tensor) or (left_out is None and not padding)
    same = whole if name in _LOOKING_BACK else getattr(processor, "min_tokens_to_keep", 1) == 1
    return _OWN[name](processor) if name in _OWN and same else Processed(processor, tuple(padding))


def _run(engine: Engine, texts: list[Text], streamer: Any) -> None:
    """Step until all texts have ended; a streamer is told of the tokens of the only one."""
    shown = 0
    try:
        while any(not text.finished for text in texts):
            engine.step()
            for text in texts:
                if isinstance(text.segment_end, _Stop) and text.segment_end.met:
                    text.cancel()
            if streamer is not None:
                for token in texts[0].generated[shown:]:
                    streamer.put(torch.tensor([token], dtype=torch.int64, device="cpu"))
                shown = len(texts[0].generated)
    finally:
        for text in texts:
            text.cancel()
    for text in texts:
        if text.error is not None:
            raise text.error
    if streamer is not None:
        streamer.end()


def _padded(input_ids: torch.Tensor, texts: list[list[int]], config: Any) -> torch.Tensor:
    pad = config.pad_token_id
    if pad is None:
        pad = next(iter(_ends(config.eos_token_id)), 0)
    longest = max(map(len, texts))
    rows = [[*text, *[int(pad)] * (longest - len(text))] for text in texts]
    return torch.cat([input_ids, torch.tensor(rows, dtype=input_ids.dtype, device=input_ids.device)], dim=-1)


class _Stop:
    """Whether a text ends for a reason that only `transformers` knows, asked after every token of it."""

    def __init__(self, criteria: list[Any], padding: list[int], device: torch.device) -> None:
        self.met = False
        self._criteria = criteria
        self._padding = padding
        self._device = device

    def __call__(self, seq: Text) -> bool:
        tokens = torch.tensor([[*self._padding, *seq.tokens]], dtype=torch.int64, device=self._device)
        self.met = self.met or any(bool(torch.as_tensor(each(tokens, None)).all()) for each in self._criteria)
        return self.met


@dataclass(frozen=True)
class Processed(LogitsProcessor):
    """What a logits processor of `transformers` makes of every row, asked about one after another.

    Attributes:
        padding: What stands before the text where the processor was made for.
    """

    processor: Any
    padding: tuple[int, ...] = ()

    stage: ClassVar[Stage] = Stage.EDIT

    def process(self, logits: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
        """See `LogitsProcessor.processor`."""
        rows = [
            self.processor(
                torch.tensor([[*self.padding, *context.tokens]], dtype=torch.int64, device=row.device),
                row[None].clone(),
            )
            for row, context in zip(logits, contexts, strict=True)
        ]
        return torch.cat(rows)
