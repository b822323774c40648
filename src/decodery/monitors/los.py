"""LOS-Net: a small transformer that reads how likely the written tokens and their rivals were."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import nn

from decodery.core.errors import CorruptFile, SettingsError
from decodery.core.registry import register
from decodery.core.threads import one_thread
from decodery.models.loaders.fields import Kind, Whole
from decodery.models.protocol import Reader
from decodery.models.trained.artifact import Artifact, TrainedPart
from decodery.step.monitor import Monitor, Row
from decodery.step.sequence import Sequence

from .signature import Signature
from .threshold import Threshold

__all__ = ["LOSHead"]

MOST_TOKENS = 100
"""Of an answer that are read; what is written after them changes the score no more."""
EVERY = 8
"""Tokens between two evaluations, where nothing else is said."""
_HEADS, _REST = 8, 5
_HELD: Any = {"dtype": torch.float32, "device": "cpu"}
"""What its parameters are made in."""
_State = tuple[tuple[torch.Tensor, ...], float | None]


class LOSNet(nn.Module):
    """The network.

    Of every token it is given those, standardised by the row's own mean and deviation, the taken token's, scaled by its
    rank, and mean and deviation themselves, which the published features lose.

    Args:
        k: How many of a row's largest log-probabilities it is given, 0 for the taken token's alone.
    """

    def __init__(self, k: int, width: int = 64, layers: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.k = k
        self.top = nn.Linear(k, width // 2, **_HELD) if k else None
        self.taken = nn.Parameter(torch.randn(2, width - width // 2, **_HELD) / width**0.5)
        self.row = nn.Linear(2, width, **_HELD)
        self.first = nn.Parameter(torch.randn(width, **_HELD) / width**0.5)
        self.places = nn.Parameter(torch.randn(MOST_TOKENS + 1, width, **_HELD) / width**0.5)
        layer = nn.TransformerEncoderLayer(width, _HEADS, width, dropout, batch_first=True, **_HELD)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, 1, **_HELD)

    def forward(self, numbers: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """[n] logits of being wrong.

        Args:
            numbers: [n, t, k + 5] as `Signature.numbers`.
            lengths: [n] tokens of each.
        """
        top, (logprob, rank, mean, spread) = numbers[..., :-_REST], numbers[..., -_REST:-1].unbind(dim=-1)
        scale = spread.clamp_min(1e-6)
        taken = ((logprob - mean) / scale)[..., None]
        near = taken * self.taken[0] + taken * (2 * (0.5 - rank))[..., None] * self.taken[1]
        if self.top is None:
            found = nn.functional.pad(near, (self.row.out_features - near.shape[-1], 0))
        else:
            found = torch.cat((self.top((top[..., : self.k] - mean[..., None]) / scale[..., None]), near), dim=-1)
        found = found + self.row(torch.stack((mean / 10, spread), dim=-1))
        found = torch.cat((self.first.expand(len(found), 1, -1), found), dim=1) + self.places[: found.shape[1] + 1]
        padding = torch.arange(found.shape[1], device=found.device)[None] > lengths[:, None]
        scored: torch.Tensor = self.out(self.encoder(found, src_key_padding_mask=padding)[:, 0])[:, 0]
        return scored


@dataclass(frozen=True, eq=False)
class LOSHead(TrainedPart):
    """A trained LOS-Net.

    It reads output distributions and no hidden states, and goes with every model.

    Attributes:
        tensors: Its weights.
        threshold: Where it flags.
        facts: Its shape and how it was made.
    """

    KIND = "LOS-Net"
    FILE = "los.safetensors"
    MADE = "make one with `decodery train los -m MODEL QUESTIONS --out DIR`"
    FACTS: ClassVar[Mapping[str, Kind]] = {
        "k": Whole(0, 1 << 20),
        "width": Whole(8, 1 << 12),
        "layers": Whole(1, 16),
        "every": Whole(1, 1 << 20),
    }

    tensors: Mapping[str, torch.Tensor]
    threshold: Threshold
    facts: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def net(self) -> LOSNet:
        """The network, ready to be asked.

        Raises:
            CorruptFile: If these are not its weights.
        """
        facts = self.facts
        net = LOSNet(facts["k"], facts["width"], facts["layers"])
        try:
            net.load_state_dict({name: tensor.float() for name, tensor in self.tensors.items()})
        except RuntimeError as error:
            raise CorruptFile(f"this LOS-Net has other weights than its shape: {self.MADE}") from error
        return net.eval().requires_grad_(False)

    @one_thread()
    def score(self, rows: Ordered[torch.Tensor]) -> float:
        """The probability of a wrong answer.

        Args:
            rows: `Signature.numbers` of its tokens, `MOST_TOKENS` at most.
        """
        numbers = torch.stack(list(rows))[None]
        with torch.no_grad():
            return float(self.net(numbers, torch.tensor([len(rows)], dtype=torch.int64, device="cpu")).sigmoid())

    def highest(self, rows: Ordered[torch.Tensor]) -> float:
        """The highest of the scores that a text has while it is written, which decides whether it is flagged."""
        every = self.facts["every"]
        ends = [*range(every, len(rows), every), len(rows)]
        return max(self.score(rows[:end]) for end in ends)

    def artifact(self) -> Artifact:
        facts = {**self.facts, "threshold": self.threshold.facts()}
        return Artifact(self.KIND, self.tensors, facts)

    @classmethod
    def from_artifact(cls, found: Artifact) -> LOSHead:
        return cls(found.tensors, Threshold.of(found.facts.get("threshold") or {}), found.facts)


@register(
    "los",
    paper="Learning on LLM Output Signatures for gray-box LLM Behavior Analysis (2025)",
    guarantee="read-only: the text is the one without it, until the action is taken",
    lossless=True,
    requirements=("a head made by decodery train los",),
)
@dataclass(frozen=True)
class LOS(Monitor):
    """Scores an answer by a small transformer over the log-probabilities of its tokens and their rivals.

    Up to 100 tokens are read. Unlike the published code it reads raw logits, masks the padding, ranks by the number of
    more likely tokens, and knows each row's mean and deviation. Cost: a sweep over the logits per token; O(tokens k)
    per evaluation.

    Attributes:
        head: A file or folder made by `decodery train los`, or a `LOSHead`.
        every: Tokens between two evaluations, as many as when the head's threshold was set where it is None, or a
            multiple of that; the last token of a text is always evaluated, so that the final score is that of the whole
            answer.
    """

    head: LOSHead | str | None = None
    every: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "head", LOSHead.load(self.head, "los:head"))
        if self.every is not None and self.every < 1:
            raise SettingsError(f"los evaluates every so many tokens, at least 1, not {self.every}")
        if self.threshold is None and self.apart % self.trained.facts["every"]:
            raise SettingsError(
                f"this head's threshold was set on an evaluation every {self.trained.facts['every']} tokens, not "
                f"{self.apart}: leave every out, give a multiple, or a threshold of your own"
            )

    @property
    def trained(self) -> LOSHead:
        assert isinstance(self.head, LOSHead)
        return self.head

    @property
    def apart(self) -> int:
        """Tokens between two evaluations."""
        every: int = self.trained.facts["every"] if self.every is None else self.every
        return every

    @property
    def limit(self) -> float:
        return self.trained.threshold.value if self.threshold is None else self.threshold

    def fits(self, model: Reader) -> None:
        assert self.trained.net is not None

    def check(self, seq: Sequence) -> None:
        self.trained.threshold.check(seq, "los", self.trained.MADE, own=self.threshold is not None)

    def start(self, seq: Sequence) -> _State:
        return (), None

    def observe(self, state: _State, row: Row) -> _State:
        rows, value = state
        if len(rows) < MOST_TOKENS:
            rows = (*rows, Signature.of(row.logits, row.token, self.trained.facts["k"]).numbers())
        due = (row.position + 1) % self.apart == 0 and row.position < MOST_TOKENS + self.apart
        return rows, self.trained.score(rows) if due or row.final else value

    def score(self, state: _State) -> float | None:
        return state[1]
