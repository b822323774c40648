"""What a draft head is: trained tensors, bound to the target whose states it reads and whose words it speaks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from decodery.core.errors import CorruptFile, SettingsError, UnsupportedModel
from decodery.core.threads import one_thread
from decodery.models.hooks import Tap
from decodery.models.loaders import hub
from decodery.models.loaders.fields import Kind, Listed, Number, Record, Text, Whole
from decodery.models.protocol import OpenModel, Reader, is_open
from decodery.models.torch.one_pass import to_device
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense, Linear
from decodery.models.trained.artifact import Artifact, refuse_other, remembered, sampled

from . import checkpoint
from .parts import Parts

HEAD = "head.safetensors"
KIND = "draft head"
MADE = "train one with `decodery train head -m MODEL`"
_MOST_HEADS, _MOST_RANKS = 64, 64
OWN_EMBEDDING = "embed_tokens"
"""The table that a published head brings: left out where it is the target's."""
_EMBEDDING_LIMIT = 0.1
"""How far it may be from the target's, of its length: targets keep theirs in fewer bits, or in other ones."""
EMBEDDED: Tap = "embedded"
"""Beside the states at taps, [n, 1 + hidden]: whether an embedding stands after each, and which."""


@dataclass(frozen=True, eq=False)
class TrainedHead:
    """A head as a file holds it.

    Attributes:
        kind: The drafter it is for, such as "eagle-3".
        settings: The shape it was given.
        facts: How it was made and what it is worth, as plain JSON.
        model: `fingerprint` of its target, "" where any fits.
    """

    kind: str
    tensors: Mapping[str, torch.Tensor]
    settings: Mapping[str, Any]
    facts: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""

    def save(self, path: Path) -> None:
        """Write a safetensors file, whole or not at all."""
        about = {"head": self.kind, "settings": dict(self.settings), "made": dict(self.facts)}
        Artifact(KIND, self.tensors, about, self.model).save(path)

    @classmethod
    def load(cls, path: str | Path) -> TrainedHead:
        """Read what `save` wrote, or a published head, from a file (GGUF too), a folder or a Hub id.

        Raises:
            ModelNotFound, CorruptFile, UnsupportedModel: For anything else.
        """
        from . import gguf_head, published

        whole = Path(path).expanduser()
        if not whole.exists() and hub.is_hub_id(str(path)):
            whole = checkpoint.from_hub(str(path), HEAD)
        if whole.suffix == ".gguf":
            return gguf_head.gguf_head(whole)
        if not (whole / HEAD).is_file() and (whole / checkpoint.CONFIG).is_file():
            return published.published(whole)
        return _load(whole / HEAD if whole.is_dir() else whole)


@remembered
def _load(path: Path) -> TrainedHead:
    rates = Listed(Listed(Number(0.0, 1.0), _MOST_RANKS), _MOST_HEADS)
    kinds: dict[str, Kind] = {
        "head": Text(64),
        "settings": Record({"heads": Whole(1, _MOST_HEADS)}),
        "made": Record({"rates": rates}),
    }
    found = Artifact.read(path, KIND, MADE, kinds)
    return TrainedHead(found.facts["head"], found.tensors, found.facts["settings"], found.facts["made"], found.model)


@dataclass(frozen=True, eq=False)
class Guess:
    """A step along known texts.

    Attributes:
        spoken: [b, n, hidden], for `project`.
        features: [b, n, hidden], to go on from.
    """

    spoken: torch.Tensor
    features: torch.Tensor


@dataclass(frozen=True, slots=True)
class Seen:
    """Rows of a pass that became text: the states of all its rows {tap: [., width]}, which of them.

    The tokens that followed each, and where the first of the states stands in the text.
    """

    hidden: Mapping[Tap, torch.Tensor]
    rows: Ordered[int]
    tokens: list[int]
    start: int

    def states(self, tap: Tap) -> torch.Tensor:
        """[n, width]"""
        # Most of the time what was drafted first was right, and nothing has to be gathered.
        every, last = self.hidden[tap], self.rows[-1]
        first = last + 1 - len(self.rows)
        if self.rows[0] == first:
            return every[first : last + 1]
        return every[to_device(np.array(self.rows, dtype=np.int64), every.device)]


@dataclass(frozen=True, slots=True)
class Heard:
    """What a head expects after the last token it has read: logits [outputs].

    Attributes:
        best: The most likely tokens and their probabilities, where they are known without the logits.
    """

    logits: torch.Tensor
    best: tuple[list[int], list[float]] | None = None


class BoundHead(ABC):
    """A trained head of one kind beside its target.

    Args:
        kind: The drafter's name.
        sees_embeddings: Whether its states hold `EMBEDDED`, too, of a prompt that holds embeddings.
        taught: How many steps it is unrolled over in training.
        lead: How many places a token's state stands after the one that is known with it: 0, or 1 where the target is to
            read a token, too, before the head guesses on.
        anchored: After which share of a text's states it guesses in a step of its training; None: after all of them.
        model: The target.
        parts: The head's own tensors, which work in `dtype`.
    """

    kind: ClassVar[str]
    sees_embeddings: ClassVar[bool] = False
    taught: ClassVar[int] = 4
    lead: ClassVar[int] = 0
    anchored: ClassVar[float | None] = None

    def __init__(self, trained: TrainedHead, model: Reader) -> None:
        if not is_open(model):
            raise UnsupportedModel(
                f"a head for {self.kind} needs a target whose embeddings and vocabulary projection can be called "
                "apart, which this model does not offer: use one that this package runs itself"
            )
        refuse_other(f"this head for {self.kind}", trained.model, model, MADE)
        self.model: OpenModel = model
        self.trained = trained
        self.taps = self.reads(trained)
        self.dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
        own = self._embeds_by_itself(trained, model)
        self.parts = Parts(
            {
                name: each.to(model.device, self.dtype if each.is_floating_point() else None)
                for name, each in trained.tensors.items()
                if own or not name.startswith(OWN_EMBEDDING)
            }
        )
        if (ids := trained.tensors.get("vocabulary")) is not None and not (
            ids.ndim == 1 and len(ids) and int(ids.min()) >= 0 and int(ids.max()) < model.vocab_size
        ):
            raise CorruptFile(f"this head for {self.kind} has tokens that the model does not have: {MADE}")
        if (words := trained.settings.get("tokens", model.vocab_size)) != model.vocab_size:
            raise SettingsError(
                f"this head for {self.kind} is for a model of {words} tokens, and this one has {model.vocab_size}: use "
                "the model it was made for"
            )
        words = model.vocab_size if ids is None else len(ids)
        for name, each in trained.tensors.items():
            if name.startswith("lm_head") and name.endswith("weight") and len(each) != words:
                raise SettingsError(
                    f"this head for {self.kind} speaks {len(each)} words, and this model has {words}: use the model it "
                    "was made for"
                )

    @classmethod
    def _embeds_by_itself(cls, trained: TrainedHead, model: OpenModel) -> bool:
        """Whether a head brings an embedding that is not its target's.

        Raises:
            SettingsError: The embedding has fewer tokens than the model.
        """
        own = trained.tensors.get(f"{OWN_EMBEDDING}.weight")
        if own is None:
            return False
        if len(own) < model.vocab_size:
            raise SettingsError(
                f"this head for {cls.kind} has embeddings of {len(own)} tokens, and this model has {model.vocab_size}: "
                "use the model it was made for"
            )
        if own.shape[-1] != model.config.hidden_size:
            return True
        places = sampled(own.device, model.vocab_size)
        wanted, found = model.embed_tokens(places).float(), own[places].float()
        return float((found - wanted).norm()) > _EMBEDDING_LIMIT * float(wanted.norm())

    @classmethod
    @abstractmethod
    def reads(cls, trained: TrainedHead) -> tuple[Tap, ...]:
        """Where such a head reads the target's states."""

    @classmethod
    def watches(cls, trained: TrainedHead) -> tuple[Tap, ...]:
        """Those of `reads` that it is shown while it drafts; what the target keeps of the others is at hand."""
        return cls.reads(trained)

    @classmethod
    @abstractmethod
    def untrained(cls, model: Transformer, seed: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Floating point tensors and settings of a head to be trained, from `model` where possible."""

    @property
    def reach(self) -> int:
        """How many tokens it can draft in a row, one per part of the setting `heads`."""
        return self.trained.settings.get("heads", 1 << 30)

    @property
    def learns(self) -> bool:
        """Whether what it does now is learned from."""
        return torch.is_grad_enabled() and any(each.requires_grad for each in self.parts.tensors.values())

    def unrolled(self, along: float) -> int:
        """How many steps it is unrolled over when `along` of its training, from 0 to 1, is done."""
        return self.taught

    @abstractmethod
    def unroll(self, states: dict[Tap, torch.Tensor], tokens: torch.Tensor, steps: int) -> list[Guess]:
        """Draft along known texts, for training.

        States are {tap: [b, n, width]}, tokens [b, n + steps - 1]. Token [b, i + j] stands j + 1 - lead places after
        state [b, i]. Guess j is about what stands after that token.
        """

    def unroll_at(
        self, states: dict[Tap, torch.Tensor], tokens: torch.Tensor, steps: int, anchors: torch.Tensor
    ) -> list[Guess]:
        """`unroll` after some states alone.

        Args:
            anchors: [m] the states, in order.
        """
        return [
            Guess(each.spoken[:, anchors], each.features[:, anchors]) for each in self.unroll(states, tokens, steps)
        ]

    def regret(self, guesses: list[Guess], states: dict[Tap, torch.Tensor], known: torch.Tensor) -> torch.Tensor:
        """What is to be made small beside the distance of the guesses, a scalar.

        Args:
            known: [b, n], states of a text.
        """
        return torch.zeros((), dtype=torch.float32, device="cpu")

    def acceptance(self, spoken: torch.Tensor) -> torch.Tensor | None:
        """How sure the head is of its guesses [n], as logits; None where it has no part for that.

        Args:
            spoken: [n, width], what `project` takes.
        """
        return None

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """[n] ids -> [n, hidden]: the target's embeddings, or the head's own."""
        tokens = tokens.to(self.model.device, non_blocking=True)
        if self.own_embedding:
            return self.parts.rows(OWN_EMBEDDING, tokens)
        return self.model.embed_tokens(tokens).to(self.dtype)

    @property
    def own_embedding(self) -> bool:
        """Whether tokens are embedded by a table of the head's own."""
        return f"{OWN_EMBEDDING}.weight" in self.parts

    def project(self, spoken: torch.Tensor, step: int = 0) -> torch.Tensor:
        """[n, hidden] -> logits [n, outputs], by the target's own vocabulary projection.

        Published heads may bring one, or one for every step, which is how many guesses were made on the way.
        """
        return self.projection(step)(spoken)

    def projection(self, step: int = 0) -> Linear:
        """The layer that `project` is."""
        for name in (f"lm_head.{step}", "lm_head"):
            if f"{name}.weight" in self.parts:
                return self.parts.linear(name)
        return self.shared

    def fits(self, width: int) -> None:
        """Raise SettingsError where the head was made for states of another width."""
        if width != self.model.config.hidden_size:
            raise SettingsError(
                f"this head for {self.kind} is for a model of width {width}, and this one has "
                f"{self.model.config.hidden_size}: use the model it was made for"
            )

    @cached_property
    def vocabulary(self) -> torch.Tensor | None:
        """[outputs] int64, the tokens it can draft; None: all of the target's."""
        return self.parts["vocabulary"].long() if "vocabulary" in self.parts else None

    @cached_property
    def words(self) -> np.ndarray | None:
        """`vocabulary` on the processor."""
        return None if self.vocabulary is None else self.vocabulary.cpu().numpy()

    @cached_property
    def shared(self) -> Linear:
        """The target's vocabulary projection onto the tokens that can be drafted."""
        found = self.model.projection(self.vocabulary)
        return Dense(found.weight.to(self.dtype)) if isinstance(found, Dense) else found

    @one_thread()
    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """[n, outputs] -> [n, vocab], -inf for tokens it cannot draft."""
        if self.vocabulary is None:
            return logits
        every = logits.new_full((len(logits), self.model.vocab_size), -torch.inf)
        return every.index_copy_(1, self.vocabulary, logits)


TextItems = tuple[Any, dict[Tap, torch.Tensor], torch.Tensor, np.ndarray]
"""A text's memory, and the states, tokens and positions of `DraftHead.read`."""
