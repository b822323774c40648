"""From a prompt and settings by name to tokens and a request."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from functools import cached_property, partial
from typing import Any

from .budget.base import MOST_NODES, Policy
from .core.conversation import Conversation, Prompt
from .core.embedded import Embeddings
from .core.memory import Memory
from .core.sequence import Sequence
from .decode.request import Request
from .draft.base import Drafter
from .errors import PromptError, SettingsError
from .kv.base import CachePolicy
from .model.encoder_decoder import EncoderDecoder
from .model.load import LoadedModel
from .model.vocabulary import Vocabulary
from .monitor.base import Monitor
from .output import Output
from .registry import resolve
from .resolving import (
    build_sampler,
    left_by,
    resolve_drafter,
    resolve_kv,
    resolve_monitors,
    resolve_source,
)
from .sample.base import Warp
from .sample.constraint import Constrained, Constraint
from .sample.sampler import Sampler
from .settings import checked
from .source.base import Source
from .source.reads import Reads
from .verify.base import Rule

DRY_BREAKERS = ("\n", ":", '"', "*")
"""Where repetitions end unless a request says otherwise."""


class Asking:
    """A loaded model with its tokenizer and chat template, and what is asked of it.

    memory: what drafters have learned from its texts.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self.chat = loaded.chat
        self.name = loaded.name
        self.dtype = loaded.dtype
        self.memory = Memory()

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """Token ids of a prompt: rendered as a chat turn where the model has a chat template, unless raw.

        prompt: a text, or chat messages `{"role": ..., "content": ...}`.
        """
        if not prompt:
            raise PromptError("the prompt is empty: give the model something to read")
        if isinstance(prompt, str):
            if raw or self.chat is None:
                return self.tokenizer.encode(prompt)
            prompt = [{"role": "user", "content": prompt}]
        elif self.chat is None or raw:
            raise SettingsError("chat messages need a model with a chat template; give a text as the prompt")
        return self.tokenizer.encode(self.chat.render(prompt), special=False)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The bytes behind every token of the model."""
        return Vocabulary.of(self.tokenizer, self.model.vocab_size)

    @checked(Sampler.from_settings, but=("eos_ids",))
    def request(
        self,
        tokens: Ordered[int],
        *,
        max_new_tokens: int = 256,
        temperature: float | None = None,
        sampler: Sampler | Warp | str | Ordered[Any] | None = None,
        drafter: Drafter | str | None = "auto",
        rule: Rule | str = "coupled",
        budget: Policy | str | None = None,
        max_nodes: int = MOST_NODES,
        seed: int = 0,
        stop: str | Ordered[str] = (),
        ignore_eos: bool = False,
        min_new_tokens: int = 0,
        logprobs: int | None = None,
        reuse: Output | Sequence | None = None,
        source: Source | str | None = None,
        kv: CachePolicy | str | None = None,
        monitor: Monitor | str | Ordered[Monitor | str] | None = None,
        raw: bool = False,
        trees: bool = False,
        constraint: Any = None,
        embeddings: Any = (),
        placeholder: str = "<image>",
        **shortcuts: Any,
    ) -> Request:
        """A request with everything resolved from names.

        temperature and shortcuts (top_k, top_p, min_p, typical, epsilon, eta, top_h, xtc, mirostat, repetition_penalty,
        presence_penalty, frequency_penalty, dry, no_repeat_ngram, logit_bias, order: see `Sampler.from_settings`) build
        the usual sampler; `sampler` takes a warp or several in its place. dry_breakers: texts here, as in llama.cpp.
        drafter, rule, budget: an instance or a name as in "prompt-lookup:length=5"; without a drafter there is no
        speculation, without a budget the drafter alone decides how much it drafts. max_nodes: drafted tokens per step
        at most, whatever both want. source: what makes the logits, as in "guidance:scale=1.5"; None is the model alone.
        kv: what of the text's keys and values is kept and read, as in "h2o:budget=0.3"; None is all of them.
        monitor: what watches the text, one or several, as in "los:head=DIR,action=stop", or None; `Output.monitors`
        says what they found.
        A model with an encoder reads the tokens with that, and writes a text of its own; it has no other source.
        raw: whether the source's texts are plain, as prompts may be. trees: keep the draft of every step in the trace,
        see `decodery.picture`.
        constraint: what may be written, such as `JSONSchema(schema)`, a name with settings, or a `Constraint` of one's
        own; a text that finishes with "stop" is then always complete, one cut by its length need not be. A drafter
        also drafts what the constraint forces. Constraints without a mask go with the rule awrs in place of coupled.
        embeddings: what the model reads in the place of each `placeholder`, a token of its own, in the prompt: tensors
        [n, hidden], such as what a vision tower makes of images; or all of it placed already, as `Embeddings`.
        """
        eos = () if ignore_eos else self.tokenizer.eos_ids
        placed = embeddings if isinstance(embeddings, Embeddings) else None
        if placed is None and len(embeddings):
            standing = self.tokenizer.token_id(placeholder)
            if standing is None:
                raise PromptError(f"{placeholder!r} is no token of this model: name one that stands for embeddings")
            tokens, placed = Embeddings.placed(tokens, standing, embeddings)
        if isinstance(self.model, EncoderDecoder) and not isinstance(source, Reads):
            if source is not None:
                raise SettingsError("the prompt is this model's source of logits: leave source out")
            tokens, source = [self.model.config.start_id], Reads(tuple(tokens))
        if shortcuts.get("dry"):
            breakers = shortcuts.get("dry_breakers")
            shortcuts["dry_breakers"] = self.vocabulary.holding(DRY_BREAKERS if breakers is None else breakers)
        built = build_sampler(sampler, temperature, min_new_tokens, eos, shortcuts)
        if constraint is not None:
            if ignore_eos:
                raise SettingsError("a constrained text ends where it is complete: leave out ignore_eos")
            built = Sampler((Constrained(self._compiled(constraint)), *built.warps))
        return Request(
            tokens,
            max_new_tokens=max_new_tokens,
            sampler=built,
            drafter=resolve_drafter(drafter),
            rule=resolve("verify", rule),
            budget=None if budget is None else resolve("budget", budget),
            max_nodes=max_nodes,
            seed=seed,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            eos_ids=tuple(eos),
            logprobs=logprobs,
            reuse=left_by(reuse),
            source=resolve_source(source, lambda text: self.encode(text, raw=raw)),
            kv=resolve_kv(kv),
            trees=trees,
            monitors=resolve_monitors(monitor),
            embeddings=placed,
        )

    def request_for(
        self, prompt: Prompt, *, raw: bool = False, tokens: Ordered[int] | None = None, **settings: Any
    ) -> Request:
        """A `request` that knows what its prompt was made of, as some searches and models behind servers must.

        tokens: the prompt's, where they are known already.
        """
        request = self.request(tokens or self.encode(prompt, raw=raw), **{"raw": raw} | settings)
        request.conversation = self.conversation(prompt, raw=raw)
        return request

    def conversation(self, prompt: Prompt, *, raw: bool = False) -> Conversation:
        """A prompt before it is rendered, of which others can be made. raw: those are plain texts, too."""
        return Conversation(prompt, partial(self.encode, raw=raw), self._compiled, raw=raw or self.chat is None)

    def _compiled(self, constraint: Any) -> Constraint:
        if isinstance(constraint, Constraint):
            return constraint
        return resolve("constrain", constraint).compile(self.vocabulary)
