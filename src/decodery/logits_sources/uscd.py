"""Uncertainty-aware selective contrastive decoding: uncertain predictions are contrasted with a weaker prompt."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from decodery.core.registry import register
from decodery.models.hooks import Tap
from decodery.models.protocol import LanguageModel, Reader
from decodery.sampling.entropy import row_sums
from decodery.sampling.logits_processor import require_number
from decodery.step.forward_request import ForwardCoroutine, ForwardResult, gather
from decodery.step.logits_source import EXCLUDED, LogitsSource, token_ids

from .contexts import Blend, Member, Part

__all__ = ["without_examples"]


@register(
    "uscd",
    paper="Improving Code Generation by Uncertainty-Aware Selective Contrastive Decoding (2024)",
    guarantee="the model's distribution wherever it is confident",
    requirements=("a poorer prompt",),
    texts=("lame",),
)
@dataclass(frozen=True)
class USCD(LogitsSource):
    """Subtracts the model's prediction after a weakened prompt, only where the model is uncertain.

    The defaults are those of the published script; its argument parser has 0.0035 (confident 0.392) and plausible 1/3.

    Attributes:
        lame: The weakened prompt, a text or token ids: the prompt without its input-output examples, which
            `without_examples` removes from Python docstrings.
        confident: If the collision mass sum p^2 is above this, the model's distribution is unchanged. The published
            bound is on the standard deviation theta of p over the vocabulary, 0.005 for 32,000 tokens; sum p^2 =
            theta^2 (V - 1) + 1 / V is equivalent for any vocabulary size V.
        plausible: Tokens with at least this multiple of the mean probability 1 / V are candidates. Their score is log(p
            - weight q), where that is defined; if it is for none, the model's distribution is used.
        weight: Weight of the weakened prompt's probability q.
        deferred: Whether to read the weakened prompt only when a step needs it: fewer rows, in more passes. The text is
            the same.
    """

    lame: str | tuple[int, ...]
    confident: float = 0.8
    plausible: float = 2 / 3
    weight: float = 0.7
    deferred: bool = False

    def __post_init__(self) -> None:
        require_number("the confident of uscd", self.confident, least=0.0)
        require_number("the plausible of uscd", self.plausible, least=0.0)
        require_number("the weight of uscd", self.weight, least=0.0)

    def encoded(self, encode: Callable[[str], list[int]]) -> USCD:
        return replace(self, lame=tuple(encode(self.lame))) if isinstance(self.lame, str) else self

    def over(self, model: LanguageModel, prompt: Sequence[int]) -> Reader:
        lame = token_ids(self.lame, "uscd", "lame", model.vocab_size)
        members = (Member("prompt", model), Member("lame", model, lame))
        return _Selective(members, len(prompt), settings=replace(self, lame=()))


@dataclass(frozen=True)
class _Selective(Blend):
    settings: USCD = field(kw_only=True)

    def composed(self, part: Part, taps: Sequence[Tap]) -> ForwardCoroutine[ForwardResult]:
        settings, everything = self.settings, part.everything()
        if settings.deferred:
            given = yield from part.read(0, everything, taps)
        else:
            lame = part.only(1, part.wanted[part.output])
            given, poorer = yield from gather([part.read(0, everything, taps), part.read(1, lame)])
        unsure = part.output.copy()
        if unsure.any():
            unsure[unsure] = collision_mass(given.logits[torch.from_numpy(unsure)]) <= settings.confident
        if not unsure.any():
            return given
        if settings.deferred:
            poorer = yield from part.read(1, part.only(1, part.wanted[unsure]))
            against = poorer.logits
        else:
            against = poorer.logits[torch.from_numpy(unsure[part.output])]
        rows, logits = torch.from_numpy(unsure), given.logits.clone()
        logits[rows] = contrast(given.logits[rows], against, settings.weight, settings.plausible)
        part.contexts.note({int(row): ("contrasted tokens",) for row in part.wanted[unsure]})
        return replace(given, logits=logits)


def collision_mass(logits: torch.Tensor) -> np.ndarray:
    """Sum of p^2 of every row of `logits` [n, vocab], float64: near 1 if confident, near 0 if not."""
    return row_sums(logits.softmax(dim=-1).square()).cpu().numpy()


def contrast(given: torch.Tensor, poorer: torch.Tensor, weight: float, plausible: float) -> torch.Tensor:
    """Log-scores [n, vocab] log(p - weight q) of plausible tokens.

    Rows without a positive p - weight q are those of `given`.
    """
    p, q = given.softmax(dim=-1), poorer.softmax(dim=-1)
    scores = (p - weight * q).masked_fill(p < plausible / p.shape[-1], 0.0)
    kept = scores > 0
    contrasted = torch.where(kept, scores, 1.0).log()
    contrasted = torch.where(kept, contrasted, given.log_softmax(dim=-1) - EXCLUDED)
    return torch.where(kept.any(dim=-1, keepdim=True), contrasted, given)


def without_examples(prompt: str) -> str:
    """A Python prompt without the interactive examples (`>>> ...` and their output) of its docstrings."""
    return re.sub(r"(?m)^[ \t]*>>>.*\n(?:(?![ \t]*(?:>>>|\"\"\"|'''))[ \t]*\S.*\n)*", "", prompt)
