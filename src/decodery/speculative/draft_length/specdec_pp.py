"""SpecDec++: stop once a rejection has become likely, as a small trained head on the draft model's states judges."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch.nn.functional import rms_norm, silu

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.models.config import TOKENS
from decodery.models.loaders.fields import Anything, Kind, Named
from decodery.models.protocol import Reader
from decodery.models.trained.artifact import Artifact, TrainedPart, expect
from decodery.step.draft_length_policy import Budget, DraftLengthPolicy, Outlook
from decodery.step.sequence import Sequence

_SURE = 1e-6


@dataclass(eq=False)
class AcceptanceHead(TrainedPart):
    """How likely the target accepts a drafted token, judged by the draft model's state after reading it.

    Attributes:
        blocks: Residual layers x + silu(W x + b), W [hidden, hidden] and b [hidden], each with weights of its own.
        output: [2, hidden] and [2], the scores of rejected and accepted. All float32. The state is taken before the
            model's final norm and brought to unit mean square first.
        vocab_size: Of the draft model it was trained for.
        facts: How it was trained and how good it is.
        model: `fingerprint` of that draft model, "" where it is not known.
    """

    KIND = "acceptance head"
    FILE = "acceptance.safetensors"
    MADE = "make one with decodery train acceptance -m MODEL"
    FACTS: ClassVar[Mapping[str, Kind]] = {"vocab_size": TOKENS, "trained": Named(Anything(), 1 << 10)}

    blocks: list[tuple[torch.Tensor, torch.Tensor]]
    output: tuple[torch.Tensor, torch.Tensor]
    vocab_size: int
    facts: dict[str, Any] = field(default_factory=dict)
    model: str = ""

    @classmethod
    def random(cls, hidden: int, vocab_size: int, *, depth: int = 3, seed: int = 0) -> AcceptanceHead:
        """An untrained head of `depth` blocks."""
        generator = torch.Generator().manual_seed(seed)

        def matrix(rows: int) -> torch.Tensor:
            return torch.randn(rows, hidden, generator=generator, dtype=torch.float32, device="cpu") / hidden**0.5

        blocks = [(matrix(hidden), torch.zeros(hidden, dtype=torch.float32, device="cpu")) for _ in range(depth)]
        return cls(blocks, (matrix(2), torch.zeros(2, dtype=torch.float32, device="cpu")), vocab_size)

    @property
    def hidden_size(self) -> int:
        return self.output[0].shape[1]

    def parameters(self) -> dict[str, torch.Tensor]:
        """All tensors by name."""
        named = {"output.weight": self.output[0], "output.bias": self.output[1]}
        for number, (weight, bias) in enumerate(self.blocks):
            named |= {f"blocks.{number}.weight": weight, f"blocks.{number}.bias": bias}
        return named

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., 2] unnormalised log-probabilities of rejection and acceptance, of states [..., hidden]."""
        x = rms_norm(hidden.float(), hidden.shape[-1:], None, 1e-6)
        for weight, bias in self.blocks:
            x = x + silu(x @ weight.T + bias)
        return x @ self.output[0].T + self.output[1]

    def acceptance(self, hidden: torch.Tensor) -> float:
        """The probability that the token is accepted whose state [hidden] this is; never quite 0 or 1."""
        scores = self.scores(hidden.to(self.output[0].device))
        return min(max(float(torch.sigmoid(scores[1] - scores[0])), _SURE), 1 - _SURE)

    def artifact(self) -> Artifact:
        """In bfloat16."""
        tensors = {name: value.detach().bfloat16() for name, value in self.parameters().items()}
        facts = {"vocab_size": self.vocab_size, "trained": self.facts}
        return Artifact(self.KIND, tensors, facts, self.model)

    @classmethod
    def from_artifact(cls, found: Artifact) -> AcceptanceHead:
        tensors = {name: tensor.float() for name, tensor in found.tensors.items()}
        depth = sum(name.endswith(".weight") for name in tensors) - 1
        blocks = [(tensors[f"blocks.{at}.weight"], tensors[f"blocks.{at}.bias"]) for at in range(depth)]
        output = tensors["output.weight"], tensors["output.bias"]
        head = cls(blocks, output, found.facts["vocab_size"], found.facts["trained"], found.model)
        hidden = head.hidden_size
        shapes = [(2, hidden), (2,), *[(hidden, hidden), (hidden,)] * depth]
        expect([tuple(each.shape) for each in head.parameters().values()] == shapes)
        return head


@register(
    "specdec++",
    paper="SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths (2024)",
    lossless=True,
    requirements=("a head made by `decodery train acceptance -m MODEL --out DIR`",),
)
@dataclass(frozen=True)
class SpecDecPP(DraftLengthPolicy):
    """Ends a chain once the chance that a token of it will be rejected exceeds a threshold.

    The head judges a token once the draft model has read it, so the newest token goes to verification unjudged. The
    published code shares one weight matrix among all blocks of its head and tests u <= p / q; here the blocks are
    independent and the rule tests u < p / q.

    Attributes:
        head: An `AcceptanceHead`, or the folder or file decodery train acceptance made for the draft model that drafts.
        threshold: 1 never stops, 0 stops as soon as there is a judgement.
        shortest, longest: Bounds that hold whatever the head says.
    """

    head: AcceptanceHead | str
    threshold: float = 0.7
    shortest: int = 2
    longest: int = 20

    requirements = Requirements(pauses=True, draft_states=True)

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise SettingsError(f"specdec++ needs a threshold between 0 and 1, not {self.threshold}")
        if not 0 <= self.shortest <= self.longest or self.longest < 1:
            raise SettingsError("specdec++ needs 0 <= shortest <= longest, and longest >= 1")
        object.__setattr__(self, "head", AcceptanceHead.load(self.head))

    @property
    def trained(self) -> AcceptanceHead:
        assert isinstance(self.head, AcceptanceHead)
        return self.head

    def fits(self, model: Reader) -> None:
        self.trained.refuse_other(model, "train one for the draft model in use")

    def start(self, seq: Sequence) -> list[float]:
        """One number: the chance that nothing judged so far in this step will be rejected."""
        if self.trained.vocab_size != seq.request.vocab_size:
            raise SettingsError(
                f"the acceptance head is for {self.trained.vocab_size} tokens and the model has "
                f"{seq.request.vocab_size}: train one for the draft model in use with decodery train acceptance "
                "-m MODEL"
            )
        return [1.0]

    def bound(self, seq: Sequence, limit: Budget, batch: Ordered[Sequence]) -> Budget:
        seq.states[self][0] = 1.0
        return replace(limit, depth=min(self.longest, limit.depth))

    def goes_on(self, seq: Sequence, outlook: Outlook) -> bool:
        # After the first draw the draft model has read no drafted token yet: there is nothing to judge by.
        if outlook.drawn >= 2:
            assert outlook.hidden is not None
            if len(outlook.hidden) != self.trained.hidden_size:
                raise SettingsError(
                    f"the acceptance head reads states of {self.trained.hidden_size} numbers and the draft model has "
                    f"{len(outlook.hidden)}: train one for this draft model with decodery train acceptance -m MODEL"
                )
            seq.states[self][0] *= self.trained.acceptance(outlook.hidden)
        return outlook.drawn < self.shortest or 1 - seq.states[self][0] <= self.threshold
