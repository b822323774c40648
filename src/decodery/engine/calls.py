"""Texts that a search has written after prompts of its own: judges, critics, rounds of feedback."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from collections.abc import Sequence as Ordered
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from decodery.core.conversation import Conversation, Prompt
from decodery.core.errors import ContextFull, ServerError, SettingsError
from decodery.core.ledger import charged
from decodery.core.noise import nth_seed
from decodery.core.trace import Trace
from decodery.models.loaders.store import Progress, silent
from decodery.models.protocol import LanguageModel, Reader
from decodery.sampling.constraint import Constrained, constrained
from decodery.sampling.sampler import Sampler
from decodery.speculative.acceptance.coupled import Coupled
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence
from decodery.step.writer import writes

from .recorded import RecordedTexts
from .request import Request
from .schedule import share_prompt

if TYPE_CHECKING:
    from .engine import Engine

SECOND = "second"
"""What other models than the request's go by in the ledger."""
_JUDGED, _COMPARED = 1 << 63, 1 << 62
"""So far from those of texts that answer are the seeds of texts that judge, and of those that others are compared with.
"""


class Calls:
    """Opens and writes texts after other prompts than a request's own.

    All that are requested at once share passes; equal prompts are read once.

    Args:
        conversation: Of the request, from which other prompts are made.
        reader: Who reads what scorers ask, the writer but for a second model's.
        trace: Of all texts that answer, which share the ledger of the request; of those that judge it tells
            `judge_calls`, `judge_tokens_in` and `judge_tokens_out`.
        standing: What would be the answer if nothing more came, best first.
        complete: Whether nothing was left out that was to be asked; the caller keeps them up to date.
        remembered: What scorers have found out for this prompt.
    """

    def __init__(self, engine: Engine, request: Request, conversation: Conversation) -> None:
        self.engine, self.request, self.conversation = engine, request, conversation
        self.reader: Reader = engine.model
        self.trace = Trace()
        self.standing: list[Sequence] = []
        self.complete = True
        self.remembered: dict[Hashable, Any] = {}
        self._answered = self._judged = 0

    def read_by(self, reader: Reader, encode: Callable[[Prompt], list[int]]) -> Calls:
        """The same for scorers that are to ask a second model.

        Args:
            encode: Its tokens of a prompt.
        """
        clone = copy(self)
        clone.reader, clone.conversation = reader, replace(self.conversation, encode=encode)
        return clone

    def answer(
        self,
        prompts: Ordered[Conversation],
        progress: Progress = silent,
        *,
        sampler: Sampler | None = None,
        writer: LanguageModel | None = None,
    ) -> ForwardCoroutine[list[Sequence]]:
        """A text for each prompt, as the request would be answered there, at seeds that count up from its own.

        Args:
            sampler: In place of the request's.
            writer: A model with the same tokens in place of the request's.
        """
        self.engine.check_width(len(prompts))
        first, self._answered = self._answered, self._answered + len(prompts)
        request = copy(self.request)
        request.reuse, request.sampler = None, sampler or request.sampler
        seeds = [nth_seed(self.request.seed, first + n) for n in range(len(prompts))]
        texts = [self._open(request, each, seed, writer) for each, seed in zip(prompts, seeds, strict=True)]
        self.trace.ledger = texts[0].trace.ledger if texts else self.trace.ledger
        yield from self._write(texts, self.trace, progress)
        return texts

    def judge(
        self,
        prompts: Ordered[Conversation],
        *,
        most: int | None = None,
        logprobs: int | None = None,
        sampler: Sampler | None = None,
        constraint: Any = None,
        progress: Progress = silent,
        writer: LanguageModel | None = None,
    ) -> ForwardCoroutine[list[Sequence]]:
        """What a judge or critic writes after each prompt, without the request's constraint and stop strings.

        Args:
            most: Tokens of each, those of the request by default.
            logprobs: As in `Request`.
            sampler: Greedy by default.
            constraint: What holds the texts to a form, as a name or a language.
            writer: See `answer`.
        """
        self.engine.check_width(len(prompts))
        first, self._judged = self._judged, self._judged + len(prompts)
        request = copy(self.request)
        if constrained(request.sampler.processors):
            # What came along with the constraint goes with it.
            request.drafter, request.acceptance_rule = None, Coupled()
        request.conversation = request.reuse = request.search = request.logits_source = None
        request.stop, request.logprobs = (), logprobs
        request.sampler = Sampler.from_settings() if sampler is None else free(sampler)
        if constraint is not None:
            form = Constrained(self.conversation.compile(constraint))
            request.sampler = Sampler((form, *request.sampler.processors))
        request.max_new_tokens = most or request.max_new_tokens
        seed = nth_seed(self.request.seed, _JUDGED)
        texts = [self._open(request, each, nth_seed(seed, first + n), writer) for n, each in enumerate(prompts)]
        read = charged().counts.get("prompt_tokens", 0)
        yield from self._write(texts, Trace(ledger=charged()), progress)
        counts, own = charged().counts, sum(seq.request.prompt_length for seq in texts)
        for name, amount in (
            ("judge_calls", len(texts)),
            ("judge_tokens_in", charged().counts.get("prompt_tokens", 0) - read if writes(self.engine.model) else own),
            ("judge_tokens_out", sum(len(seq.generated) for seq in texts)),
        ):
            counts[name] = counts.get(name, 0) + amount
        return texts

    def reference(self, n: int) -> ForwardCoroutine[list[Sequence]]:
        """n answers of the request as it is, to compare others with: at seeds of their own, and discarded."""
        self.engine.check_width(n)
        seed = nth_seed(self.request.seed, _COMPARED)
        texts = [self._open(self.request, self.conversation, nth_seed(seed, number)) for number in range(n)]
        yield from self._write(texts, Trace(ledger=charged()), silent)
        return texts

    def fits(self, said: Conversation, room: int = 1) -> bool:
        """Whether so many tokens can be written after a prompt.

        A server alone knows what fits there: it says no.
        """
        return len(said.tokens()) + room <= self.engine.model.config.max_positions

    def _open(self, request: Request, said: Conversation, seed: int, writer: LanguageModel | None = None) -> Sequence:
        if request.prompt_embeds is not None:
            raise SettingsError(
                "this search continues other prompts, which have no embeddings of this one: use another search, or a "
                "prompt of tokens alone"
            )
        clone = copy(request)
        clone.prompt, clone.seed, clone.conversation = said.tokens(), seed, said
        if writer is None or writer is self.engine.model:
            return self.engine.open(clone)
        if (room := writer.config.max_positions) < len(clone.prompt) + clone.max_new_tokens:
            raise ContextFull(
                f"{len(clone.prompt)} tokens and {clone.max_new_tokens} new ones are more than the {room} that another "
                "model of this search reads: request fewer new tokens"
            )
        clone.drafter = clone.draft_length = clone.logits_source = clone.cache_policy = None
        clone.acceptance_rule, clone.monitors = Coupled(), ()
        seq = self.engine.open(clone)
        seq.cache = writer.new_cache()
        seq.rebind(model=writer, role=SECOND)
        return seq

    def _write(self, texts: list[Sequence], trace: Trace, progress: Progress) -> ForwardCoroutine[None]:
        """All of them to their ends. Those that are left unfinished by an error are cancelled."""
        firsts: dict[tuple[int, int], Sequence] = {}
        for seq in texts:
            owner = firsts.setdefault((id(seq.request.conversation), id(seq.request.model)), seq)
            seq.scheduling.prompt_owner = None if owner is seq else owner
        recorded = RecordedTexts(texts)
        try:
            while active := [seq for seq in texts if not seq.finished]:
                waiting = [seq for seq in active if seq.scheduling.prompt_owner is not None]
                ready = [seq for seq in active if seq.scheduling.prompt_owner is None]
                yield from self.engine.write(ready, trace)
                for seq in recorded.growing(ready):
                    recorded.note(seq)
                for seq in waiting:
                    assert seq.scheduling.prompt_owner is not None
                    share_prompt(seq, seq.scheduling.prompt_owner)
                progress("writing", max(seq.position for seq in active), texts[0].request.max_new_tokens)
        finally:
            for seq in texts:
                seq.cancel()
        if cut := [seq for seq in texts if not seq.complete]:
            whole = [seq for seq in texts if seq.complete]
            self.standing = self.standing or whole or [seq for seq in cut if seq.generated]
            raise cut[0].error or ServerError("a server went away in the middle of a text")


def free(sampler: Sampler) -> Sampler:
    """The same without what constrains a text."""
    return Sampler(processor for processor in sampler.processors if not isinstance(processor, Constrained))
