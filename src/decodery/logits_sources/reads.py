"""The source text of an encoder-decoder model, which the encoder reads before the decoder writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from decodery.core.errors import PromptError, SettingsError
from decodery.core.requirements import Provides
from decodery.models.batch import Segment
from decodery.models.cache.cache import KVCache
from decodery.models.hooks import Tap
from decodery.models.protocol import Capabilities, LanguageModel, Reader
from decodery.models.torch.encoder_decoder import EncoderDecoder
from decodery.step.encoded import encoded
from decodery.step.forward_request import ForwardCoroutine, ForwardResult, OfOneModel, score
from decodery.step.logits_source import LogitsSource


@dataclass(frozen=True)
class Reads(LogitsSource):
    """Makes the encoder of a model read `tokens`, the source, before its decoder writes the text.

    `LLM` makes one from every prompt of such a model, and the text begins with the model's start token. The source is
    read when the first row of the text is scored, in a pass that texts share. It is read again where the text's memory
    was given up. Forks of a text share its keys and values. Cost: one pass of the encoder over the source, and keys and
    values of the source in every layer of the decoder.
    """

    tokens: tuple[int, ...]

    provides = Provides(taps=True, keys=True, changes=True, source=True)

    @property
    def read(self) -> tuple[int, ...]:
        return self.tokens

    def over(self, model: LanguageModel, prompt: Sequence[int]) -> Reader:
        if not isinstance(model, EncoderDecoder):
            raise SettingsError("this model has no encoder that reads a source: give the source as part of the prompt")
        if not self.tokens:
            raise PromptError("the source is empty: give the encoder at least one token")
        if not 0 <= min(self.tokens) <= max(self.tokens) < model.vocab_size:
            raise PromptError(f"the source has token ids outside the model's vocabulary of {model.vocab_size}")
        return Reading(model, self.tokens)


class Reading(OfOneModel):
    """A decoder whose texts attend to one source."""

    model: EncoderDecoder

    def __init__(self, model: EncoderDecoder, tokens: tuple[int, ...]) -> None:
        self.model, self.tokens = model, tokens

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.model.capabilities, parts=False)

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        return self.model.fingerprint

    def new_cache(self) -> KVCache:
        cache = self.model.new_cache()
        cache.memory_bytes = self.model.memory_bytes(len(self.tokens))
        return cache

    def compose(self, segment: Segment, taps: Sequence[Tap] = (), role: str = "") -> ForwardCoroutine[ForwardResult]:
        """See `Composed`."""
        assert isinstance(segment.cache, KVCache)
        yield from encoded(self.model, self.tokens, segment.cache)
        return (yield from score(self.model, segment, taps, role))
