"""A scorer made worse on purpose, in known ways: what searches make of bad reward models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Self

import torch

from decodery.core.errors import SettingsError
from decodery.core.noise import draw, mix
from decodery.core.registry import register
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.sampling.logits_processor import require_number
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.scorer import Candidates, scores_of

from .wrapper import Wrapper

_CLIP = 0.01


@register(
    "corrupted",
    guarantee="the scorer itself, clipped, at the defaults",
    requirements=("a scorer between 0 and 1",),
    texts=("pattern",),
)
@dataclass(frozen=True)
class Corrupted(Wrapper):
    """Distorts the score of another scorer by bias, noise and exploitable patterns.

    The score is sigmoid(confidence x logit(score) + optimism x (1 - t / length) + noise x xi + exploit x [a pattern
    occurs]), t being the tokens written. Scoring again does not average the noise away. The published presets
    (confidence, optimism, noise, exploit): noisy 1, 0, 1.5, 0; overconfident-early 3, 2, 1, 0; hackable 1, 0, 0.5, 3.

    Attributes:
        confidence: Factor of the score's logit; above 1 is overconfidence.
        optimism: Added to the logit of beginnings, less the more tokens are written.
        noise: Standard deviation of a normal number xi that depends on the tokens alone.
        exploit: Added to the logit of a text that holds `pattern`.
        pattern: Token ids or a text.
        length: Tokens at which optimism ends.
        seed: Of the noise.
        scorer: An oracle between 0 and 1, clipped to [0.01, 0.99].
    """

    confidence: float = 1.0
    optimism: float = 0.0
    noise: float = 0.0
    exploit: float = 0.0
    pattern: tuple[int, ...] | str = ()
    length: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("confidence", "optimism", "noise", "exploit"):
            require_number(f"the {name} of corrupted", getattr(self, name))
        super().__post_init__()
        if self.inner.bounds != (0.0, 1.0):
            raise SettingsError("corrupted needs a scorer whose bounds are 0 and 1")
        if self.length < 1 or (self.exploit and not self.pattern):
            raise SettingsError("corrupted needs a length of at least 1, and a pattern where it is to be exploited")

    def bind(self, tokenizer: Tokenizer) -> Self:
        bound = super().bind(tokenizer)
        if not isinstance(self.pattern, str):
            return bound
        return replace(bound, pattern=tuple(tokenizer.encode(self.pattern, special=False)))

    @property
    def bounds(self) -> tuple[float, float]:
        return 0.0, 1.0

    def score(self, candidates: Candidates) -> ForwardCoroutine[torch.Tensor]:
        found = yield from scores_of(self.inner, candidates)
        sound = found.double().cpu().clamp(_CLIP, 1 - _CLIP)
        bent = [self._added(candidates.prompt, output) for output in candidates.outputs]
        return torch.sigmoid(self.confidence * sound.logit() + torch.tensor(bent, dtype=torch.float64, device="cpu"))

    def _added(self, prompt: Sequence[int], output: Sequence[int]) -> float:
        total = self.optimism * max(0.0, 1 - len(output) / self.length)
        if self.noise:
            total += self.noise * NormalDist().inv_cdf(draw(mix(self.seed, *prompt, *output), 0))
        return total + self.exploit * self._holds(output)

    def _holds(self, output: Sequence[int]) -> bool:
        if not self.exploit:
            return False
        if isinstance(self.pattern, str):
            raise SettingsError("corrupted looks for a text: search through `LLM`, or give it token ids")
        ends = range(len(self.pattern), len(output) + 1)
        return any(tuple(output[end - len(self.pattern) : end]) == self.pattern for end in ends)
