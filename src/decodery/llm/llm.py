"""A language model as its user sees it: a prompt in, text out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Ordered
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple, Unpack, overload
from weakref import ref

from decodery.core.conversation import Prompt
from decodery.core.errors import SettingsError
from decodery.core.ledger import Ledger
from decodery.core.noise import nth_seed
from decodery.core.registry import resolve
from decodery.core.settings import checked
from decodery.core.trace import Trace
from decodery.diffusion.base import DiffusionDecoder
from decodery.diffusion.held import Hold
from decodery.diffusion.lave import LAVE
from decodery.diffusion.texts import Fill, Filling
from decodery.engine.engine import Engine
from decodery.engine.output import Output, Piece
from decodery.engine.request import Request
from decodery.engine.schedule import Limits
from decodery.extras.simultaneous.base import Stream, StreamOutput, listening
from decodery.extras.superposed.ngrams import NGrams, ngrams_for
from decodery.extras.superposed.superposed import Draft, Superposition, superpose
from decodery.models.cache.own_caches import bare
from decodery.models.loaders.store import Progress, silent
from decodery.models.mapped_memory import trim
from decodery.step.sequence import KeptText, Sequence

from .checked import another
from .checked import checked as checked_text
from .prompt_request import PromptRequests, naming
from .prompts import each as each_prompt
from .prompts import single
from .resolve_settings import resolve_carrier
from .sampling_params import RequestSettings, SamplingParams, merged

MOST_TEXTS = 32
"""Texts of one call in progress at a time; more of them share passes no better, and each holds keys and values."""
_AHEAD = 8 * MOST_TEXTS
"""Outputs that wait at most for one before them that is longer."""


class LLM(PromptRequests):
    """A loaded model with its tokenizer and chat template.

    Args:
        memory: What drafters have learned from its texts.
    """

    @overload
    def generate(
        self,
        prompt: Iterator[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        n: int = 1,
        raw: bool = False,
        return_cache: bool = False,
        **settings: Unpack[RequestSettings],
    ) -> Iterator[Output]: ...

    @overload
    def generate(
        self,
        prompt: Prompt | Ordered[int] | Ordered[Prompt | Ordered[int]],
        sampling_params: SamplingParams | None = None,
        *,
        n: int = 1,
        raw: bool = False,
        return_cache: bool = False,
        **settings: Unpack[RequestSettings],
    ) -> Output | list[Output]: ...

    @checked()
    def generate(
        self,
        prompt: Prompt | Ordered[int] | Iterable[Prompt | Ordered[int]],
        sampling_params: SamplingParams | None = None,
        *,
        n: int = 1,
        raw: bool = False,
        return_cache: bool = False,
        **settings: Unpack[RequestSettings],
    ) -> Output | list[Output] | Iterator[Output]:
        """Decode a prompt to the end.

        Up to `MOST_TEXTS` texts are decoded together, and each is what it would be alone.

        Args:
            prompt: A text, chat messages or token ids, or any iterable of such prompts.
            sampling_params: Settings for several calls; keyword arguments take precedence.
            n: Number of samples of each prompt; sample i has seed `seed + i`, modulo 2^64.
            raw: Continue a text as it is, without the chat template.
            return_cache: Let outputs keep the KV cache, so that a later text with the same beginning continues from
                there (`reuse=output`). It takes the memory of the whole text until the output is freed.
            **settings: See `request`.

        Returns:
            An output; a list of outputs for several prompts or n > 1, prompt by prompt. An iterator of prompts gives
            an iterator of outputs in the same order: prompts are taken as texts end, in the memory of `MOST_TEXTS`.

        Raises:
            SettingsError: For a setting that does not exist or has a wrong value.
        """
        given = merged(sampling_params, settings)
        only = single(prompt)
        several = only is None
        engine = self.engine()
        prompts: Iterable[Any] = each_prompt(prompt) if several else [only]
        texts = (self._submit(engine, one, n, raw, given) for one in prompts)
        if isinstance(prompt, Iterator):
            return self._outputs(engine, texts, return_cache)
        # What cannot be read is refused before anything is.
        waiting = deque(texts)
        outputs = list(self._outputs(engine, (waiting.popleft() for _ in range(len(waiting))), return_cache))
        return outputs if several or n > 1 else outputs[0]

    @checked()
    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        raw: bool = False,
        return_cache: bool = False,
        **settings: Unpack[RequestSettings],
    ) -> Iterator[Piece]:
        """Decode a prompt piece by piece.

        Closing the iterator cancels; for the arguments see `generate`.

        Args:
            prompt: As for `generate`, one of them.
        """
        engine = self.engine()
        (text,) = self._submit(engine, prompt, 1, raw, merged(sampling_params, settings))
        seq = text.seq
        try:
            while not seq.finished:
                engine.step()
                assert seq.text is not None
                if piece := seq.text.release(final=seq.finished):
                    yield Piece(piece)
        finally:
            seq.cancel()
        yield Piece("", self.output(seq, return_cache=return_cache))

    @checked()
    @naming
    def search(
        self,
        prompt: Prompt,
        search: Any,
        *,
        scorer: Any = None,
        raw: bool = False,
        progress: Progress = silent,
        **settings: Unpack[RequestSettings],
    ) -> list[Output]:
        """The texts that a search finds, best first, with their `score`; their trace counts the whole search.

        Args:
            prompt: As for `generate`, one of them.
            search: An instance or a name, as in "beam:width=4"; `decodery.methods("search")` lists them.
            scorer: Of a search that is named, where no text could say which, as in dc.scorers.TextScore(function).
            progress: Called with what is done, step by step.
            settings: See `request`; no drafter unless one is given, which searches that score their branches by
                themselves refuse.
        """
        further = {} if scorer is None else {"scorer": scorer}
        method = resolve("search", search, **further).bind(self.tokenizer)
        given: dict[str, Any] = {"drafter": None, **settings}
        request = self.request_for(prompt, raw=raw, **given)
        return [self.output(seq) for seq in method.run(self.engine(), request, progress)]

    @checked()
    @naming
    def diffuse(
        self,
        prompt: Prompt | Ordered[int] | Iterable[Prompt | Ordered[int]],
        method: Any = "static",
        *,
        n: int = 1,
        raw: bool = False,
        allow_special: bool = False,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        seed: int = 0,
        constraint: Any = None,
    ) -> Output | list[Output]:
        """Fill a canvas of `max_new_tokens` after a prompt, of a masked diffusion model.

        `Output.trace` counts passes, rows and tokens.

        Args:
            prompt: As for `generate`.
            method: An instance or a name, as in "threshold:tau=0.9,block=32,cache=dual";
                `decodery.methods("diffusion")` lists them.
            n: Samples for each prompt.
            max_new_tokens: Length of the canvas.
            temperature: 0 takes the most likely tokens.
            seed: Decides what is drawn; sample i of n has seed `seed + i`.
            constraint: What may be written, as `request` takes it; the method `lave` sees to it, around the one given.

        Returns:
            The output; a list of outputs for several prompts or for n > 1. All of them share passes, and each is what
            it would be alone.
        """
        if n < 1:
            raise SettingsError(f"n must be at least 1, not {n}")
        only = single(prompt)
        several = only is None
        prompts: list[Any] = list(each_prompt(prompt)) if several else [only]
        fill = self.fill([], method, max_new_tokens, temperature=temperature, constraint=constraint)
        engine = self.engine()
        fillings = [
            self.begin(engine, replace(fill, prompt=tokens, seed=nth_seed(seed, number)))
            for tokens in [self.encode(one, raw=raw, allow_special=allow_special) for one in prompts]
            for number in range(n)
        ]
        engine.run([each.work for each in fillings])
        outputs = [each.output() for each in fillings]
        return outputs if several or n > 1 else outputs[0]

    def simultaneous(
        self, chunks: Iterable[str | Ordered[int]], method: Any = "local-agreement", *, trace: Trace | None = None
    ) -> Iterator[StreamOutput]:
        """Write while a source arrives, chunk by chunk: what is committed after each, and what is guessed.

        The model must read its source in blocks, as those of `decodery train seq2seq --block` do; the last chunk ends
        the source.

        Args:
            chunks: Texts, or token ids.
            method: An instance or a name, as in "stability:lookback=3"; `decodery.methods("simultaneous")` lists them.
            trace: Counts passes and rows.
        """
        found, engine = resolve("simultaneous", method), self.engine()
        stream = Stream.of(self.model, self.tokenizer.eos_ids)
        stream.trace = trace or stream.trace
        coming = iter(chunks)
        chunk = next(coming, None)
        while chunk is not None:
            following = next(coming, None)
            tokens = self.tokenizer.encode(chunk, special=False) if isinstance(chunk, str) else list(chunk)
            job = engine.enter(listening(found, stream, tokens, following is None), stream.trace)
            engine.run([job])
            heard = stream.heard
            whole = self.tokenizer.decode([*heard.committed, *heard.guess])
            text = self.tokenizer.decode(heard.committed)
            yield replace(heard, text=text, guessed=whole.removeprefix(text))
            chunk = following

    @naming
    def fill(
        self,
        tokens: Ordered[int],
        method: Any,
        length: int,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        constraint: Any = None,
    ) -> Fill:
        """A canvas of `length` tokens after a prompt, for `begin`; settings: see `diffuse`."""
        found: DiffusionDecoder = resolve("diffusion", method)
        hold = None if constraint is None else Hold(self._compiled(constraint), self.vocabulary)
        if hold is not None and hold.constraint.after is not None and hold.constraint.after.unenforced:
            raise SettingsError("canvases are not checked when they are full: leave out unenforced=check")
        method = found if hold is None else LAVE.around(found)
        return Fill(list(tokens), length, method, temperature, seed, hold)

    @naming
    def begin(self, engine: Engine, fill: Fill) -> Filling:
        """Let an engine of this model fill a canvas, beside whatever else it does."""
        return Filling(engine, self.model, fill, self.tokenizer.eos_ids, self._continuation)

    def stego_encode(
        self, prompt: Prompt, message: str | bytes, *, search: Any = "coupling", raw: bool = False, **settings: Any
    ) -> Output:
        """A text that carries `message`, which `stego_decode` reads from it; see `decodery.search.Coupling`.

        Args:
            prompt: As for `generate`, one of them.
            message: Bytes, or a text (UTF-8).
            search: Its settings, as in "coupling:key=secret,top_k=50".

        Raises:
            SettingsError: If the message does not fit.
        """
        method = resolve_carrier(search)
        if method.message:
            raise SettingsError("the message is given twice: leave it out of the search's settings")
        method = replace(method, message=message)
        (output,) = self.search(prompt, method, raw=raw, **settings)
        return output

    def stego_decode(
        self,
        prompt: Prompt,
        text: str | Ordered[int],
        length: int,
        *,
        search: Any = "coupling",
        raw: bool = False,
        allow_special: bool = False,
        **settings: Any,
    ) -> Any:
        """The message of `length` bytes in a text that `stego_encode` wrote, as a `decodery.search.Reading`.

        Args:
            prompt: As given to `stego_encode`.
            text: The text, or its token ids.
            length: Bytes of the message.
            search, settings: As given to `stego_encode`.
        """
        tokens = self.tokenizer.encode_after(text) if isinstance(text, str) else list(text)
        prompt_tokens = self.encode(prompt, raw=raw, allow_special=allow_special)
        request = self.request(prompt_tokens, **{"drafter": None} | settings)
        return resolve_carrier(search).bind(self.tokenizer).read(self.engine(), request, tokens, length)

    def suggestions(
        self,
        prompt: Prompt,
        k: int = 3,
        *,
        max_new_tokens: int = 10,
        ngrams: NGrams | None = None,
        settings: Superposition | None = None,
        raw: bool = True,
    ) -> list[Draft]:
        """Short continuations for the passes of one, best first, as an editor's suggestions: lossy.

        Source: Superposed Decoding (2024).

        Args:
            prompt: As for `generate`, one of them.
            k: How many continuations.
            max_new_tokens: Tokens of each.
            ngrams: Counts over texts like those to be completed, see `ngrams`; None: those that come with this package
                for the embedded model, none for others. The prompt's own are counted beside them.
            settings: None for the published ones.
        """
        tokens = self.encode(prompt, raw=raw)
        found = self.engine().finish(
            superpose(
                self.model,
                tokens,
                k,
                length=max_new_tokens,
                settings=settings or Superposition.published(k),
                ngrams=(ngrams or ngrams_for(self.model.config.vocabulary)) + NGrams.count([tokens]),
                eos_ids=self.tokenizer.eos_ids,
            )
        )
        return [replace(draft, text=self._continuation(tokens, draft.tokens)) for draft in found]

    def ngrams(self, texts: Iterable[str]) -> NGrams:
        """What follows what in `texts`, for `drafts`."""
        return NGrams.count(self.tokenizer.encode(text, special=False) for text in texts)

    def engine(self) -> Engine:
        """A fresh engine whose sequences decode their text with this model's tokenizer."""
        limits = Limits(texts=MOST_TEXTS)
        return Engine(self.model, detokenizer=self.tokenizer.stream, memory=self.memory, limits=limits)

    @naming
    def output(self, seq: Sequence, *, return_cache: bool = False, tries: int = 1) -> Output:
        """What a finished sequence became; raises the error that ended it, if one did.

        Args:
            return_cache: See `generate`.
        """
        if seq.error is not None:
            raise seq.error
        assert seq.finish_reason is not None and seq.text is not None
        bent = seq.interventions or seq.prompt_embeds is not None
        output = Output(
            text=seq.text.text,
            tokens=seq.generated,
            prompt_tokens=seq.tokens[: seq.prompt_length],
            finish_reason=seq.finish_reason,
            stopped_by=seq.stopped_by,
            seed=seq.seed,
            trace=seq.trace,
            logprobs=seq.token_logprobs if seq.logprobs is not None else None,
            score=seq.score,
            complete=seq.complete,
            # A cache whose rows were steered, or were no tokens, is no plain reading of its tokens.
            kept=KeptText(seq.tokens, seq.cache, seq.logits_source, ref(bare(seq.model)))
            if return_cache and not bent
            else None,
            monitors=() if seq.watch is None else tuple(seq.watch.told),
            context_full=seq.context_full,
        )
        return checked_text(output, seq.sampler, tries)

    def _continuation(self, prompt: list[int], tokens: list[int]) -> str:
        stream = self.tokenizer.stream()
        stream.push(prompt)
        return stream.push(tokens) + stream.finish()

    def _outputs(self, engine: Engine, texts: Iterator[list[_Text]], return_cache: bool) -> Iterator[Output]:
        """What texts that are submitted prompt by prompt become, in order; each becomes its output as it ends."""
        found, taken, more = deque[_Text | Output](), 0, True
        try:
            while more or found:
                while more and len(found) < _AHEAD and sum(_runs(each) for each in found) < MOST_TEXTS:
                    following = next(texts, None)
                    more = following is not None
                    found += following or ()
                    taken += len(following or ())
                engine.step()
                for place, each in enumerate(found):
                    if not isinstance(each, Output) and each.seq.finished and each.seq.error is None:
                        found[place] = self._ended(engine, each, return_cache)
                while found and not _runs(first := found[0]):
                    del found[0]
                    yield first if isinstance(first, Output) else self.output(first.seq)
        finally:
            if taken > 1:
                # Else what many texts have held stays with the process.
                trim()

    def _ended(self, engine: Engine, text: _Text, return_cache: bool) -> _Text | Output:
        """What a text that has ended becomes: its output, or another try where the check of its constraint fails."""
        output = self.output(text.seq, return_cache=return_cache, tries=text.tries)
        if text.failed is not None:
            output.trace.ledger.add(text.failed)
            output.trace.ledger.counts["discarded"] = text.tries - 1
        further = another(output, text.seq.sampler)
        if further is None:
            return output
        request = copy(text.request)
        request.seed, request.sampler = further
        return _Text(request, engine.submit(request), text.tries + 1, output.trace.ledger)

    @naming
    def _submit(self, engine: Engine, prompt: Any, n: int, raw: bool, settings: dict[str, Any]) -> list[_Text]:
        if n < 1:
            raise SettingsError(f"n must be at least 1, not {n}")
        tokens = self.encode(prompt, raw=raw, allow_special=settings.get("allow_special", False))
        first = self.request_for(prompt, raw=raw, tokens=tokens, **settings)
        seeds = [nth_seed(first.seed, number) for number in range(1, n)]
        others = [self.request_for(prompt, raw=raw, tokens=tokens, **settings | {"seed": seed}) for seed in seeds]
        begun = engine.submit(first)
        return [_Text(first, begun), *(_Text(each, engine.submit(each, like=begun)) for each in others)]


class _Text(NamedTuple):
    """A text in progress, and what was asked for. tries: texts written for it; failed: what earlier ones spent."""

    request: Request
    seq: Sequence
    tries: int = 1
    failed: Ledger | None = None


def _runs(text: _Text | Output) -> bool:
    """Whether a text is still being written."""
    return not isinstance(text, Output) and not text.seq.finished
