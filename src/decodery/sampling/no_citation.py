"""No citations: tokens that would complete an n-gram of the model's tuning texts are excluded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.models.trained.artifact import Artifact, TrainedPart, expect

from .logits_processor import Context, LogitsProcessor, Stage
from .masks import exclude

Tail = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Citations(TrainedPart):
    """Texts whose n-grams must not be written.

    Attributes:
        tokens: [n] int32 tokens of all texts, one after the other.
        bounds: [m + 1] int64 bounds of the m texts in `tokens`.
    """

    KIND = "set of texts not to be cited"
    FILE = "citations.safetensors"
    MADE = "make one with `decodery train hyperfit -m MODEL FILES --out DIR`"

    tokens: np.ndarray
    bounds: np.ndarray
    _followers: dict[int, dict[Tail, np.ndarray]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, texts: Sequence[np.ndarray]) -> Citations:
        return cls(
            np.concatenate(texts).astype(np.int32), np.cumsum([0, *(len(text) for text in texts)]).astype(np.int64)
        )

    def artifact(self) -> Artifact:
        tensors = {"tokens": torch.from_numpy(self.tokens), "bounds": torch.from_numpy(self.bounds)}
        return Artifact(self.KIND, tensors)

    @classmethod
    def from_artifact(cls, found: Artifact) -> Citations:
        tokens, bounds = found.tensors["tokens"], found.tensors["bounds"]
        expect((tokens.dtype, bounds.dtype) == (torch.int32, torch.int64) and tokens.ndim == bounds.ndim == 1)
        expect(int(bounds[0]) == 0 and int(bounds[-1]) == len(tokens))
        expect(not bool((bounds.diff() < 0).any()) and not bool((tokens < 0).any()))
        return cls(tokens.numpy(), bounds.numpy())

    def followers(self, size: int) -> dict[Tail, np.ndarray]:
        """Ids, ascending, that followed each run of size - 1 tokens within a text; computed once per size."""
        if size not in self._followers:
            found: dict[Tail, set[int]] = {}
            for first, end in zip(self.bounds[:-1].tolist(), self.bounds[1:].tolist(), strict=True):
                text = self.tokens[first:end].tolist()
                for at in range(len(text) - size + 1):
                    found.setdefault(tuple(text[at : at + size - 1]), set()).add(text[at + size - 1])
            self._followers[size] = {tail: np.array(sorted(ids), dtype=np.int64) for tail, ids in found.items()}
        return self._followers[size]


@register(
    "no-citation",
    paper="The Hyperfitting Phenomenon: Sharpening and Stabilizing LLMs for Open-Ended Text Generation (2024)",
    guarantee="no n-gram of these texts is completed, unless no other token is possible",
    requirements=("the texts",),
)
@dataclass(frozen=True)
class NoCitation(LogitsProcessor):
    """Excludes every token that would complete an n-gram of the model's tuning texts.

    An n-gram that begins in the prompt counts too.

    Attributes:
        texts: `Citations`, or their file or folder, which `decodery train hyperfit` writes beside its model.
        size: Tokens per n-gram; 1 excludes all tokens of the texts.
    """

    texts: Citations | str | None = None
    size: int = 5
    stage = Stage.MASK
    stateful = True
    hears_logprobs = False

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or self.size < 1:
            raise SettingsError(f"no-citation: size must be at least 1 token, not {self.size!r}")

    @cached_property
    def _followers(self) -> dict[Tail, np.ndarray]:
        return Citations.load(self.texts, "no-citation:texts").followers(self.size)

    @property
    def neutral(self) -> bool:
        return not self._followers

    def process(self, logits: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
        if self.neutral or not contexts:
            return logits
        known, vocab = self._followers, logits.shape[-1]
        nothing = np.empty(0, dtype=np.int64)
        banned = [known.get(context.state, nothing) for context in contexts]
        return exclude(logits, [ids[ids < vocab] for ids in banned]) if any(map(len, banned)) else logits

    def init(self, prompt: Sequence[int]) -> Tail:
        # `init` is called first, so an error in the texts is raised before the prompt is read.
        _ = self._followers
        return self._cut(tuple(map(int, prompt[-self.size :])))

    def advance(self, state: Tail, token: int, logprob: float) -> Tail:
        return self._cut((*state, token))

    def _cut(self, tail: Tail) -> Tail:
        return tail[len(tail) - min(len(tail), self.size - 1) :]
