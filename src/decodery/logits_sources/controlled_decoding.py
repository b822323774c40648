"""Controlled decoding: tokens are scored by the model's distribution and by the value of the resulting prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register, resolve
from decodery.core.requirements import Requirements
from decodery.models.batch import Segment
from decodery.models.hooks import Tap
from decodery.models.protocol import LanguageModel, Reader
from decodery.sampling.logits_processor import require_number
from decodery.step.forward_request import ForwardCoroutine, ForwardResult, score
from decodery.step.logits_source import EXCLUDED, LogitsSource
from decodery.step.scorer import Candidates, Scorer, judge

from .contexts import Blend, Member, Part


@register(
    "controlled-decoding",
    paper="Controlled Decoding from Language Models (2023)",
    guarantee="the best distribution token by token for its distance to the model's, if the values are exact",
    requirements=(
        "a prefix scorer, such as value-head(head=FILE) of `decodery train value -m MODEL TEXTS --out FILE`",
    ),
)
@dataclass(frozen=True)
class ControlledDecoding(LogitsSource):
    """Weighs the model's most likely tokens by exp(strength x value of the prefix with the token).

    Cost: if the scorer reads hidden states, a second pass with k rows per row; if it reads tokens, no pass.

    Attributes:
        value: A scorer of prefixes, as in value-head(head=value.safetensors).
        strength: Lambda of the paper; 0 is the model's distribution, truncated to its k most likely tokens.
        k: Number of most likely tokens that are candidates; all others are excluded.
    """

    value: Scorer | str
    strength: float = 1.0
    k: int = 10

    def __post_init__(self) -> None:
        require_number("the strength of controlled-decoding", self.strength)
        if self.k < 1:
            raise SettingsError(f"controlled-decoding: k must be at least 1, not {self.k}")
        object.__setattr__(self, "value", resolve("scorer", self.value))

    @property
    def requirements(self) -> Requirements:
        return Requirements(taps=self.scorer.requirements.taps, trees=bool(self.scorer.requirements.taps))

    @property
    def scorer(self) -> Scorer:
        assert isinstance(self.value, Scorer)
        return self.value

    def over(self, model: LanguageModel, prompt: Sequence[int]) -> Reader:
        self.scorer.fits(model)
        return _Controlled((Member("model", model),), len(prompt), value=self.scorer, strength=self.strength, k=self.k)


@dataclass(frozen=True)
class _Controlled(Blend):
    value: Scorer = field(kw_only=True)
    strength: float = field(kw_only=True)
    k: int = field(kw_only=True)

    def composed(self, part: Part, taps: Sequence[Tap]) -> ForwardCoroutine[ForwardResult]:
        given = yield from part.read(0, part.everything(), taps)
        if not part.output.any():
            return given
        rows = torch.from_numpy(part.output)
        law = given.logits[rows].log_softmax(dim=-1)
        logp, tokens = law.topk(min(self.k, self.vocab_size), dim=-1)
        worth = yield from self._values(part, tokens)
        logits = given.logits.clone()
        logits[rows] = (law - EXCLUDED).scatter_(1, tokens, logp + self.strength * worth.to(logp))
        return replace(given, logits=logits)

    def _values(self, part: Part, tokens: torch.Tensor) -> ForwardCoroutine[torch.Tensor]:
        """The values [m, k] of the prefixes of m output rows, each extended by its candidate tokens [m, k]."""
        if self.strength == 0.0:
            return torch.zeros(tokens.shape, dtype=torch.float32, device="cpu")
        states: dict[Tap, torch.Tensor] = {}
        if self.value.requirements.taps:
            children = _children(part, tokens.cpu().numpy())
            states = (yield from score(self.members[0].model, children, self.value.requirements.taps, "value")).hidden
        above = [part.prefix(row) for row in part.wanted[part.output].tolist()]
        start = part.contexts.prompt_length
        outputs = [[*above[i][start:], token] for i, row in enumerate(tokens.tolist()) for token in row]
        begun = Candidates(above[0][:start], outputs, [False] * len(outputs), states, model=self.members[0].model)
        return (yield from judge(self.value, begun)).view(tokens.shape)


def _children(part: Part, tokens: np.ndarray) -> Segment:
    """A segment of candidate tokens [m, k] as children of the part's m output rows, without logits."""
    reader, n = part.contexts.readers[0], len(part.segment)
    parents = np.repeat(part.wanted[part.output], tokens.shape[1])
    first = reader.lag + n
    mask = np.zeros((len(parents), first + len(parents)), dtype=bool)
    mask[:, : reader.lag] = True
    mask[:, reader.lag : first] = part.segment.seen()[parents]
    mask[np.arange(len(parents)), first + np.arange(len(parents))] = True
    return Segment(
        part.segment.positions[parents] + 1,
        tokens.reshape(-1),
        mask=mask,
        cache=reader.cache,
        logit_rows=[],
        retained=first,
    )
