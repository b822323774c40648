"""Classifier-free guidance: the prediction is moved away from that after a negative prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from decodery.core.registry import register
from decodery.models.hooks import Tap
from decodery.models.protocol import LanguageModel, Reader
from decodery.sampling.logits_processor import require_number
from decodery.step.forward_request import ForwardCoroutine, ForwardResult, gather
from decodery.step.logits_source import LogitsSource, token_ids

from .contexts import Blend, Member, Part


@register(
    "guidance",
    paper="Stay on topic with Classifier-Free Guidance (2023)",
    guarantee="the model's distribution at scale 1",
    texts=("negative",),
)
@dataclass(frozen=True)
class Guidance(LogitsSource):
    """Moves every prediction away from the model's prediction after a negative prompt.

    Both contexts continue with the same output. Cost: a second row per row in the same pass, and a second cache.

    Attributes:
        scale: The logits are log q + scale (log p - log q), with p after the prompt and q after the negative one. 1 is
            the model without guidance, 0 the model after the negative prompt.
        negative: The negative prompt, a text (encoded as prompts are) or token ids; None is the prompt's last token, as
            published.
    """

    scale: float = 1.5
    negative: str | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        require_number("the scale of guidance", self.scale)

    def encoded(self, encode: Callable[[str], list[int]]) -> Guidance:
        return replace(self, negative=tuple(encode(self.negative))) if isinstance(self.negative, str) else self

    def over(self, model: LanguageModel, prompt: Sequence[int]) -> Reader:
        negative = (prompt[-1],) if self.negative is None else self.negative
        negative = token_ids(negative, "guidance", "negative", model.vocab_size)
        if self.scale == 1.0:
            return model
        members = (Member("prompt", model), Member("negative", model, negative))
        return _Guided(members, len(prompt), scale=self.scale)


@dataclass(frozen=True)
class _Guided(Blend):
    scale: float = field(kw_only=True)

    def composed(self, part: Part, taps: Sequence[Tap]) -> ForwardCoroutine[ForwardResult]:
        given, against = yield from gather(
            [part.read(0, part.everything(), taps), part.read(1, part.only(1, part.wanted[part.output]))]
        )
        if not part.output.any():
            return given
        guided, logits = torch.from_numpy(part.output), given.logits.clone()
        logits[guided] = guide(given.logits[guided], against.logits, self.scale)
        return replace(given, logits=logits)


def guide(given: torch.Tensor, against: torch.Tensor, scale: float) -> torch.Tensor:
    """Logits [n, vocab] that are `scale` times as far from `against` as `given`, in log-probabilities."""
    p, q = given.log_softmax(dim=-1), against.log_softmax(dim=-1)
    return q + scale * (p - q)
