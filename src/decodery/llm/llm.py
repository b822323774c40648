"""A language model as its user sees it: a prompt in, text out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Ordered
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, Unpack, overload
from weakref import ref

from decodery.core.conversation import Message, Prompt
from decodery.core.errors import SettingsError
from decodery.core.noise import nth_seed
from decodery.core.registry import resolve
from decodery.core.settings import checked
from decodery.core.trace import Trace
from decodery.diffusion.base import DiffusionDecoder
from decodery.diffusion.held import Hold
from decodery.diffusion.lave import LAVE
from decodery.diffusion.texts import Fill, Filling
from decodery.engine.engine import Engine
from decodery.engine.monitoring import monitor_reports
from decodery.engine.output import Output, Piece
from decodery.engine.schedule import Limits
from decodery.extras.simultaneous.base import SourceStream, StreamOutput, stream_outputs
from decodery.extras.superposed.ngrams import NGrams, ngrams_for
from decodery.extras.superposed.superposed import Draft, Superposition, superpose
from decodery.models.cache.own_caches import bare
from decodery.models.loaders.store import Progress, silent
from decodery.step.sequence import KeptText, Sequence

from .chat_answer import answered, chat_constraint
from .checked import checked as checked_text
from .model_trace import ModelTrace
from .other_names import OTHER_NAMES
from .prompt_request import PromptRequests, naming
from .prompts import conversations, single
from .prompts import each as each_prompt
from .resolve_settings import resolve_carrier
from .sampling_params import ChatSettings, GenerateSettings, RequestSettings, SamplingParams, merged
from .search_records import search_record
from .texts import MOST_TEXTS, all_outputs, outputs, submit

AnyPrompt = Prompt | Ordered[int]


class LLM(PromptRequests):
    """A loaded model with its tokenizer and chat template, as `decodery.load` returns it.

    Attributes:
        name: What the model is called.
        dtype: Precision of its weights.
        chat_template: Turns messages into a prompt; None where the model has none.
        memory: What drafters have learned from its texts.
    """

    def __new__(cls, *loaded: Any, **options: Any) -> Self:
        # Elsewhere a class of this name loads the model that it is given the name of.
        if "model" in options or (loaded and isinstance(loaded[0], str)):
            named = options["model"] if "model" in options else loaded[0]
            raise SettingsError(f"load makes an LLM: call decodery.load({named!r})")
        return super().__new__(cls)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, dtype={self.dtype!r}, context={self.model.config.max_positions})"

    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompt: Iterator[AnyPrompt], sampling_params: SamplingParams | None = None, *, n: int = 1,
        **settings: Unpack[GenerateSettings],
    ) -> Iterator[Output]: ...  # fmt: skip
    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompt: AnyPrompt, sampling_params: SamplingParams | None = None, *, n: Literal[1] = 1,
        **settings: Unpack[GenerateSettings],
    ) -> Output: ...  # fmt: skip
    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompt: AnyPrompt, sampling_params: SamplingParams | None = None, *, n: int,
        **settings: Unpack[GenerateSettings],
    ) -> Output | list[Output]: ...  # fmt: skip
    @overload
    def generate(
        self, prompt: Iterable[AnyPrompt], sampling_params: SamplingParams | None = None, *, n: int = 1,
        **settings: Unpack[GenerateSettings],
    ) -> list[Output]: ...  # fmt: skip
    @checked(elsewhere=OTHER_NAMES)
    def generate(
        self,
        prompt: AnyPrompt | Iterable[AnyPrompt],
        sampling_params: SamplingParams | None = None,
        *,
        n: int = 1,
        apply_chat_template: bool = True,
        return_cache: bool = False,
        **settings: Unpack[RequestSettings],
    ) -> Output | list[Output] | Iterator[Output]:
        """Decode a prompt to the end.

        A text becomes one turn of the user where the model has a chat template, unlike in vLLM and `transformers`.
        Pass `apply_chat_template=False` to continue the text as it is. Token ids are never changed.

        Up to `MOST_TEXTS` texts are decoded together, and each is what it would be alone.

        Args:
            prompt: A text, chat messages or token ids, or any iterable of such prompts.
            sampling_params: Settings for several calls; keyword arguments take precedence.
            n: Number of samples of each prompt; sample i has seed `seed + i`, modulo 2^64.
            apply_chat_template: Whether a text becomes one turn of the user. False continues the text as it is.
            return_cache: Let outputs keep the KV cache, so that a later text with the same beginning continues from
                there (`reuse=output`). It takes the memory of the whole text until the output is freed.
            **settings: See `request`.

        Returns:
            An output; a list of outputs for several prompts or n > 1, prompt by prompt. An iterator of prompts gives
            an iterator of outputs in the same order: prompts are taken as texts end, in the memory of `MOST_TEXTS`.

        Raises:
            SettingsError: For a setting that does not exist or has a wrong value.
        """
        given, form = merged(sampling_params, settings), {"apply_chat_template": apply_chat_template}
        only = single(prompt)
        prompts: Iterable[Any] = each_prompt(prompt) if only is None else [only]
        engine, finish = self.engine(), partial(self.output, return_cache=return_cache)
        texts = (submit(self, engine, each, n, form, given) for each in prompts)
        if isinstance(prompt, Iterator):
            return outputs(engine, texts, finish)
        # All prompts are read before the first text is decoded, so that a wrong one costs nothing.
        found = all_outputs(engine, texts, finish)
        return found if only is None or n > 1 else found[0]

    @overload
    def chat(
        self, messages: Ordered[Message], sampling_params: SamplingParams | None = None, *, n: Literal[1] = 1,
        **settings: Unpack[ChatSettings],
    ) -> Output: ...  # fmt: skip
    @overload
    def chat(
        self, messages: Ordered[Message], sampling_params: SamplingParams | None = None, *, n: int,
        **settings: Unpack[ChatSettings],
    ) -> Output | list[Output]: ...  # fmt: skip
    @overload
    def chat(
        self, messages: Iterable[Ordered[Message]], sampling_params: SamplingParams | None = None, *, n: int = 1,
        **settings: Unpack[ChatSettings],
    ) -> list[Output]: ...  # fmt: skip
    @checked(elsewhere=OTHER_NAMES)
    def chat(
        self,
        messages: Ordered[Message] | Iterable[Ordered[Message]],
        sampling_params: SamplingParams | None = None,
        *,
        n: int = 1,
        tools: Ordered[Mapping[str, Any]] | None = None,
        tool_choice: str = "auto",
        thinking_token_budget: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        return_cache: bool = False,
        **settings: Unpack[RequestSettings],
    ) -> Output | list[Output]:
        """Answer one conversation, or several.

        Outputs have `reasoning`, `content` and `tool_calls` beside `text`, which is all of it.

        Args:
            messages: `{"role": ..., "content": ...}` each; or a list of such lists, which are decoded together.
            sampling_params: Settings for several calls; keyword arguments take precedence.
            n: Number of answers to each conversation; answer i has seed `seed + i`, modulo 2^64.
            tools: Functions that the model may call, as JSON schemas in the form of the OpenAI API. Calls follow them.
            tool_choice: "auto", "required", "none", or the name of the one to call.
            thinking_token_budget: Maximum number of tokens of reasoning, of a model that writes such a part; an
                answer's constraint begins after it.
            chat_template_kwargs: Variables for the chat template, such as {"enable_thinking": False}.
            continue_final_message: Go on with the last message, which the assistant began.
            return_cache: See `generate`.
            **settings: See `request`.

        Returns:
            An output; a list of outputs for several conversations or n > 1, conversation by conversation.

        Raises:
            PromptError: For messages that the chat template does not accept.
            SettingsError: For a model without a chat template, or a wrong setting.
        """
        given, (prompts, many) = merged(sampling_params, settings), conversations(messages)
        tools = None if tool_choice == "none" else tools
        form: dict[str, Any] = {
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
            "continue_final_message": continue_final_message,
        }
        marks = None if self.reasoning_marks(()) is None else self.reasoning_marks(self.encode(prompts[0], **form))
        constraint, marks = chat_constraint(
            given.pop("constraint", None), tools or (), tool_choice, marks, thinking_token_budget
        )
        if constraint is not None:
            given["constraint"] = self._compiled(constraint)
        engine = self.engine()
        texts = (submit(self, engine, each, n, form, given) for each in prompts)
        written = all_outputs(engine, texts, partial(self.output, return_cache=return_cache))
        found = [answered(each, marks, calls=bool(tools)) for each in written]
        return found if many or n > 1 else found[0]

    @checked(elsewhere=OTHER_NAMES)
    def stream(
        self,
        prompt: AnyPrompt,
        sampling_params: SamplingParams | None = None,
        *,
        apply_chat_template: bool = True,
        return_cache: bool = False,
        **settings: Unpack[RequestSettings],
    ) -> Iterator[Piece]:
        """Decode a prompt piece by piece.

        Closing the iterator cancels; for the arguments see `generate`.

        Args:
            prompt: As for `generate`, one of them.
        """
        engine, form = self.engine(), {"apply_chat_template": apply_chat_template}
        seq = submit(self, engine, prompt, 1, form, merged(sampling_params, settings))[0].seq
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
        prompt: AnyPrompt,
        search: Any,
        *,
        scorer: Any = None,
        apply_chat_template: bool = True,
        progress: Progress = silent,
        record: str | Path | None = None,
        **settings: Unpack[RequestSettings],
    ) -> list[Output]:
        """The texts that a search finds, best first, with their `score`; their trace counts the whole search.

        Args:
            prompt: As for `generate`, one of them.
            search: An instance or a name, as in "beam:width=4"; `decodery.methods("search")` lists them.
            scorer: Of a search that is named, where no text could say which, as in dc.scorers.TextScore(function).
            progress: Called with what is done, step by step.
            record: A file that keeps each text and score as it comes, of searches over samples, over steps and of
                pipelines. The same search begun again with it goes on from there, to the same result.
            settings: See `request`; no drafter unless one is given, which searches that score their branches by
                themselves refuse.
        """
        further = {} if scorer is None else {"scorer": scorer}
        method = resolve("search", search, **further).bind(self.tokenizer)
        given: dict[str, Any] = {"drafter": None, **settings}
        request = self.request_for(prompt, apply_chat_template=apply_chat_template, **given)
        with nullcontext() if record is None else search_record(record, self, method, request) as request.record:
            return [self.output(seq) for seq in method.run(self.engine(), request, progress)]

    @checked()
    @naming
    def diffuse(
        self,
        prompt: AnyPrompt | Iterable[AnyPrompt],
        method: Any = "static",
        *,
        n: int = 1,
        apply_chat_template: bool = True,
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
        only, engine = single(prompt), self.engine()
        fill = self.fill([], method, max_new_tokens, temperature=temperature, constraint=constraint)
        read = partial(self.encode, apply_chat_template=apply_chat_template, allow_special=allow_special)
        fills = [replace(fill, prompt=read(each)) for each in (each_prompt(prompt) if only is None else [only])]
        seeds = [nth_seed(seed, number) for number in range(n)]
        fillings = [self.begin(engine, replace(each, seed=each_seed)) for each in fills for each_seed in seeds]
        engine.run([each.work for each in fillings])
        found = [each.output() for each in fillings]
        return found if only is None or n > 1 else found[0]

    def simultaneous(
        self, chunks: Iterable[str | Ordered[int]], method: Any = "local-agreement", *, trace: Trace | None = None
    ) -> Iterator[StreamOutput]:
        """Write while a source arrives, chunk by chunk: what is committed after each, and what is guessed.

        The model must read its source in blocks, as those of `python benchmarks/train.py seq2seq --block` do; the last
        chunk ends the source.

        Args:
            chunks: Texts, or token ids.
            method: An instance or a name, as in "stability:lookback=3"; `decodery.methods("simultaneous")` lists them.
            trace: Counts passes and rows.
        """
        stream = SourceStream.of(self.model, self.tokenizer.eos_ids)
        stream.trace = trace or stream.trace
        return stream_outputs(self.engine(), self.tokenizer, resolve("simultaneous", method), stream, chunks)

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
        self,
        prompt: AnyPrompt,
        message: str | bytes,
        *,
        search: Any = "coupling",
        apply_chat_template: bool = True,
        progress: Progress = silent,
        **settings: Unpack[RequestSettings],
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
        return self.search(prompt, method, apply_chat_template=apply_chat_template, progress=progress, **settings)[0]

    def stego_decode(
        self,
        prompt: AnyPrompt,
        text: str | Ordered[int],
        length: int,
        *,
        search: Any = "coupling",
        apply_chat_template: bool = True,
        **settings: Unpack[RequestSettings],
    ) -> Any:
        """Decode the message in a text that `stego_encode` wrote.

        Args:
            prompt: As given to `stego_encode`.
            text: The text, or its token ids.
            length: Bytes of the message.
            search, apply_chat_template, settings: As given to `stego_encode`.

        Returns:
            A `decodery.search.DecodedMessage`.
        """
        tokens = self.tokenizer.encode_after(text) if isinstance(text, str) else list(text)
        given: dict[str, Any] = {"drafter": None, **settings}
        form = {"apply_chat_template": apply_chat_template, "allow_special": given.pop("allow_special", False)}
        request = self.request(self.encode(prompt, **form), **given)
        return resolve_carrier(search).bind(self.tokenizer).read(self.engine(), request, tokens, length)

    def suggestions(
        self,
        prompt: AnyPrompt,
        k: int = 3,
        *,
        max_new_tokens: int = 10,
        ngrams: NGrams | None = None,
        settings: Superposition | None = None,
        apply_chat_template: bool = False,
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
        tokens = self.encode(prompt, apply_chat_template=apply_chat_template)
        known = ngrams or ngrams_for(self.model.config.vocabulary)
        settings = settings or Superposition.published(k)
        form: dict[str, Any] = {"ngrams": known + NGrams.count([tokens]), "eos_ids": self.tokenizer.eos_ids}
        writing = superpose(self.model, tokens, k, length=max_new_tokens, settings=settings, **form)
        found = self.engine().finish(writing)
        return [replace(draft, text=self._continuation(tokens, draft.tokens)) for draft in found]

    def ngrams(self, texts: Iterable[str]) -> NGrams:
        """Counts of n-grams in `texts`, for `suggestions`."""
        return NGrams.count(self.tokenizer.encode(text, special=False) for text in texts)

    @checked()
    @naming
    def trace(self, prompt: AnyPrompt, *, apply_chat_template: bool = False) -> ModelTrace:
        """One pass over a prompt, whose hidden states are read and changed in a `with` block.

        Args:
            prompt: As for `generate`, one of them.
            apply_chat_template: Whether a text becomes one turn of the user first.

        Returns:
            The pass, which runs where the block ends.
        """
        return ModelTrace(self.model, self.encode(prompt, apply_chat_template=apply_chat_template))

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
        # Monitors that wait may still end the text.
        monitors = tuple(monitor_reports(seq))
        if seq.error is not None:
            raise seq.error
        assert seq.finish_reason is not None and seq.text is not None
        bent = seq.interventions or seq.request.prompt_embeds is not None
        output = Output(
            text=seq.text.text,
            tokens=seq.generated,
            prompt_tokens=seq.tokens[: seq.request.prompt_length],
            finish_reason=seq.finish_reason,
            stopped_by=seq.stopped_by,
            seed=seq.request.seed,
            trace=seq.trace,
            logprobs=seq.token_logprobs if seq.request.logprobs is not None else None,
            score=seq.score,
            complete=seq.complete,
            # A cache whose rows were steered, or were no tokens, is no plain reading of its tokens.
            kept=KeptText(seq.tokens, seq.cache, seq.request.logits_source, ref(bare(seq.request.model)))
            if return_cache and not bent
            else None,
            monitors=monitors,
            context_full=seq.context_full,
        )
        return checked_text(output, seq.request.sampler, tries)

    def _continuation(self, prompt: list[int], tokens: list[int]) -> str:
        stream = self.tokenizer.stream()
        stream.push(prompt)
        return stream.push(tokens) + stream.finish()
