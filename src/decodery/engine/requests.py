"""Texts as they begin: checked, with nothing of them read yet."""

from __future__ import annotations

from collections.abc import Callable

from decodery.core.errors import ContextFull, PromptError, SettingsError
from decodery.models.cache.cache import KVCache
from decodery.models.protocol import LanguageModel, Reader
from decodery.models.tokenizers.vocabularies import padding_of
from decodery.step.bound_request import BoundRequest
from decodery.step.detokenizer import Detokenizer, TextStream
from decodery.step.drafter_memory import Memory
from decodery.step.sequence import Sequence
from decodery.step.writer import writes

from .monitoring import TextMonitors
from .request import Request


def opened(
    request: Request, target: LanguageModel, memory: Memory, detokenizer: Callable[[], Detokenizer] | None
) -> Sequence:
    """A text of which nothing is read yet.

    Args:
        memory: What drafters remember beyond it, unless the request has its own.

    Raises:
        PromptError, SettingsError, UnsupportedModel: If `target` cannot serve the request.
    """
    prompt = [int(token) for token in request.prompt]
    _check_order(target)
    model: Reader = target if request.cache_policy is None else request.cache_policy.over(target, len(prompt))
    _check_prompt(prompt, model)
    request = request.bind(target)
    if request.logits_source is not None:
        model = request.logits_source.over(target, prompt)
        _check_prompt(prompt, model)
    request.acceptance_rule.fits(model)
    cache_namespace = request.cache_namespace
    if request.prompt_embeds is not None:
        if request.logits_source is not None:
            raise SettingsError(
                "a source reads the prompt's tokens in contexts of its own, and this prompt holds embeddings: leave "
                "the source out"
            )
        request.prompt_embeds.check(prompt, model)
        # The same tokens beside other embeddings are another prompt.
        cache_namespace += request.prompt_embeds.digest
    bound = BoundRequest(
        prompt_length=len(prompt),
        model=model,
        vocab_size=model.vocab_size,
        sampler=request.sampler,
        acceptance_rule=request.acceptance_rule,
        drafter=request.drafter,
        draft_length=request.draft_length,
        max_draft_tokens=request.max_draft_tokens,
        logits_source=request.logits_source,
        cache_policy=request.cache_policy,
        monitors=tuple(request.monitors),
        detokenizer=detokenizer,
        seed=request.seed,
        # A text that comes to the end of the context ends by "length", and its `context_full` says so.
        max_new_tokens=min(request.max_new_tokens, model.config.max_positions - len(prompt)),
        eos_ids=frozenset(request.eos_ids),
        logprobs=request.logprobs,
        prompt_logprobs=request.prompt_logprobs,
        return_draft_trees=request.return_draft_trees,
        record=request.record,
        memory=memory if request.memory is None else request.memory,
        cache_namespace=cache_namespace,
        conversation=request.conversation,
        prompt_embeds=request.prompt_embeds,
        user_spans=getattr(request.prompt, "user_spans", None),
        padding=None if writes(target) else padding_of(target),
    )
    seq = Sequence(bound, prompt, _resumed(request, prompt, model), processor_states=bound.sampler.init(prompt))
    if detokenizer is not None:
        lag = max((monitor.rollback_tokens for monitor in request.monitors), default=0)
        stream = detokenizer()
        # What stands before decides how a text begins: with the space of its first word, or the rest of a character.
        stream.push(prompt)
        seq.text = TextStream(stream, request.stop, lag, stop_tokens=request.stop_tokens)
    if bound.monitors:
        for monitor in bound.monitors:
            monitor.fits(model)
        seq.states[bound.monitors] = TextMonitors(bound.monitors, seq)
    return seq


def _check_order(model: Reader) -> None:
    if not model.config.causal:
        raise SettingsError(
            "this is a diffusion model, which fills a canvas and does not write from left to right: give a way to fill "
            'it, as in diffuse="threshold" or --diffuse threshold'
        )


def _check_prompt(prompt: list[int], model: Reader) -> None:
    limit, vocab = model.config.max_positions, model.vocab_size
    if not prompt:
        raise PromptError("the prompt is empty: give at least one token")
    if len(prompt) >= limit:
        raise ContextFull(
            f"the prompt has {len(prompt)} tokens and the model's context {limit}: shorten it so that at least "
            'one new token fits, or read it with cache_policy="streaming-llm", which goes on beyond the context'
        )
    if not 0 <= min(prompt) <= max(prompt) < vocab:
        raise PromptError(f"the prompt has token ids outside the model's vocabulary of {vocab}")


def _resumed(request: Request, prompt: list[int], model: Reader) -> KVCache:
    """The earlier sequence's cache, cut to the tokens both share; at least the last prompt token is read again.

    An empty one where there is none, where a source may have read something else in the prompt's place, where a cache
    policy or a monitor has to see the prompt read, where all of the prompt has to be read, or where either holds
    embeddings.
    Raises SettingsError for what another model has read.
    """
    earlier, fresh = request.reuse, model.new_cache()
    if earlier is None or request.logits_source is not None:
        return fresh
    known: Reader | None
    if isinstance(earlier, Sequence):
        bound = earlier.request
        source, known, embeds = bound.logits_source, bound.model, bound.prompt_embeds
    else:
        source, known, embeds = earlier.logits_source, earlier.model(), None
    if source is not None:
        return fresh
    if known != model:
        raise SettingsError(
            "reuse goes on from what another model has read (another checkpoint, or this one in another precision or "
            "loaded once more): give an output of this model"
        )
    most = fresh.takes(len(prompt))
    if not most or request.prompt_logprobs is not None:
        return fresh
    if request.prompt_embeds is not None or embeds is not None:
        return fresh
    if any(monitor.requirements.prompt_taps or monitor.requirements.changes for monitor in request.monitors):
        return fresh
    if not isinstance(earlier.cache, KVCache) or earlier.cache.evicted:
        return fresh
    shared = 0
    for ours, theirs in zip(prompt[:-1], earlier.tokens, strict=False):
        if ours != theirs:
            break
        shared += 1
    cache = earlier.cache.beginning(min(shared, most, earlier.cache.untouched))
    cache.policy = fresh.policy
    return cache
