"""A model that says what a script tells it to, and remembers what it was asked."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import Any, cast

from decodery.core.conversation import Prompt
from decodery.core.errors import ServerError
from decodery.engine.writing import WholeTexts, cut, end, keep, own
from decodery.llm.llm import LLM
from decodery.models.loaders.load import LoadedModel
from decodery.models.tokenizers.pieces import PROMPT, unseen
from decodery.sampling.temperature import Temperature
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence, TokenLogprob

_WORD = re.compile(r"\s*\S+|\s+")


@dataclass(frozen=True)
class Asked:
    """One request. prompt: a text or messages; text: all of it in one. number: how many came before it."""

    prompt: Prompt
    stop: tuple[str, ...]
    temperature: float
    seed: int
    max_tokens: int
    number: int

    @property
    def text(self) -> str:
        return _whole(self.prompt)


@dataclass(frozen=True)
class Said:
    """An answer. likely: log-probabilities of its first token's alternatives, by text. gone: the server goes away
    after the text, so that it is not whole.
    """

    text: str
    likely: Mapping[str, float] = field(default_factory=dict)
    gone: bool = False


Script = Callable[[Asked], "str | Said"]


class ScriptedLLM(LLM):
    """An `LLM` without a network or weights. script: the answer to a request, by any of it, as a function or as a list
    by number. asked: all requests so far, in order. context: words of a prompt and its text at most; None for any.

    Words are its tokens, a word a pass.
    """

    def __init__(self, script: Script | Ordered[str | Said], context: int | None = None) -> None:
        self.script: Script = script if callable(script) else lambda asked: script[asked.number]
        self.asked: list[Asked] = []
        model = _Scripted(self)
        self._bounded = context is not None
        if context is not None:
            model.config = unseen(model.name, context)
        super().__init__(LoadedModel(model, cast(Any, model.pieces), None, "scripted", "float32"))

    def encode(self, prompt: Any, **form: Any) -> list[int]:
        return [PROMPT] * max(1, len(_WORD.findall(_whole(prompt)))) if self._bounded else [PROMPT]

    def request(self, tokens: Ordered[int], **settings: Any) -> Any:
        return super().request(tokens, **{"drafter": None} | settings)


def _whole(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)


class _Scripted(WholeTexts):
    def __init__(self, lm: ScriptedLLM) -> None:
        super().__init__("a scripted model", logprobs=True)
        self.lm = lm

    def advance(self, seq: Sequence) -> ForwardCoroutine[None]:
        """A word of the text, or its end."""
        state = own(seq, self.name)
        if state is None:
            said = self._answer(seq)
            keep(seq, (said, _WORD.findall(said.text)))
            return
        said, left = state
        if left:
            seq.trace.ledger.tokens += 1
            first = [] if seq.request.logprobs is None or seq.position else [self._told(said, left[0])]
            if (yield from self.grow(seq, [left.pop(0)], first)):
                return
        if not left:
            cut(seq, ServerError("a scripted model went away")) if said.gone else end(seq, "stop")

    def _answer(self, seq: Sequence) -> Said:
        conversation = seq.request.conversation
        processors = [processor.t for processor in seq.request.sampler.processors if isinstance(processor, Temperature)]
        asked = Asked(
            prompt="" if conversation is None else conversation.prompt,
            stop=() if seq.text is None else seq.text.stop,
            temperature=processors[0] if processors else 1.0,
            seed=seq.request.seed,
            max_tokens=seq.request.max_new_tokens,
            number=len(self.lm.asked),
        )
        self.lm.asked.append(asked)
        said = self.lm.script(asked)
        return Said(said) if isinstance(said, str) else said

    def _told(self, said: Said, piece: str) -> TokenLogprob:
        top = [(self.pieces.id_of(text), logprob) for text, logprob in said.likely.items()]
        return TokenLogprob(self.pieces.id_of(piece), said.likely.get(piece, 0.0), top)
