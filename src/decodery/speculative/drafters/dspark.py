"""DSpark: DFlash's block, with a small Markov head that knows the token before, and a confidence head."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.models.hooks import Tap
from decodery.models.protocol import Reader
from decodery.models.torch.one_pass import to_device
from decodery.models.torch.transformer import Transformer
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence
from decodery.step.tree_policy import TreePolicy

from ..heads.block import BlockMemory
from ..heads.drafter import HeadDrafter
from ..heads.grown import DraftHead, Nodes
from ..heads.head import Guess, TrainedHead
from ..heads.reading import HeadReading
from .dflash import DFlashHead

_RANK = 256
_CONFIDENCE = "confidence.weight"
_VARIANTS = ("vanilla", "gated", "rnn")


class DSparkHead(DFlashHead):
    """The logits of a row get a bias of low rank, made of the token that is drafted before it.

    So a prediction depends on the path above it. The Markov head is plain, gated by the row, or recurrent over the
    path. What `project` takes is a row beside what the bias is made of.
    """

    kind = "dspark"

    def __init__(self, trained: TrainedHead, model: Reader) -> None:
        super().__init__(trained, model)
        self.variant: str | None = trained.settings["markov"]
        self.primed: bool = trained.settings["primed"]
        for name in ("markov_out.weight", "markov_out.scale"):
            # A head that is to be trained begins with a row for every token.
            if self.vocabulary is not None and len(self.parts.tensors.get(name, ())) > len(self.vocabulary):
                self.parts.tensors[name] = self.parts[name][self.vocabulary]

    @property
    def rank(self) -> int:
        return self.parts["markov_in.weight"].shape[1]

    @classmethod
    def untrained(
        cls,
        model: Transformer,
        seed: int,
        *,
        layers: int = 1,
        block: int = 7,
        rank: int = _RANK,
        markov: str = "vanilla",
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        if markov not in _VARIANTS:
            raise SettingsError(f"dspark has no Markov head {markov!r}: name one of {', '.join(_VARIANTS)}")
        tensors, settings = super().untrained(model, seed, layers=layers, block=block)
        random, like = torch.Generator().manual_seed(seed), tensors["fc.weight"]
        hidden, words = model.config.hidden_size, model.vocab_size

        def drawn(*shape: int) -> torch.Tensor:
            found = torch.randn(*shape, generator=random, dtype=torch.float32, device="cpu") / shape[-1] ** 0.5
            return found.to(like)

        rank = min(rank, hidden)
        tensors["markov_in.weight"] = drawn(words, rank)
        # The bias begins as nothing. Its outputs are those of the projection, which may be fewer than the tokens.
        tensors["markov_out.weight"] = torch.zeros(words, rank, dtype=torch.float32, device="cpu").to(like)
        if markov == "gated":
            tensors["markov_gate.weight"] = drawn(rank, hidden + rank)
        elif markov == "rnn":
            tensors["markov_step.weight"] = drawn(3 * rank, hidden + 2 * rank)
        # It begins with one half for all. What the plain bias is made of is the token before, as the layout has it.
        width = hidden + rank if markov == _VARIANTS[0] else hidden
        tensors[_CONFIDENCE] = torch.zeros(1, width, dtype=torch.float32, device="cpu").to(like)
        tensors["confidence.bias"] = torch.zeros(1, dtype=torch.float32, device="cpu").to(like)
        return tensors, settings | {"from_anchor": True, "heads": block, "markov": markov, "primed": False}

    def roots(self, memories: Ordered[BlockMemory], anchors: torch.Tensor) -> torch.Tensor:
        rows = super().roots(memories, anchors)
        if self.variant is None:
            return rows
        states = rows.new_zeros(len(rows), self.rank)
        if self.primed:
            states, _ = self._bias(torch.cat([memory.opened for memory in memories]), anchors, states)
        states, made = self._bias(rows, anchors, states)
        for memory, state in zip(memories, states, strict=True):
            memory.states = state[None]
        return torch.cat((rows, made), dim=1)

    @property
    def by_depth(self) -> bool:
        return self.variant is None

    def ahead(self, memories: Ordered[BlockMemory]) -> list[torch.Tensor] | None:
        return super().ahead(memories) if self.by_depth else None

    def computed(self, memory: BlockMemory) -> bool:
        return self.by_depth and super().computed(memory)

    def grow_all(self, nodes: Ordered[Nodes]) -> list[torch.Tensor]:
        if self.variant is None:
            return super().grow_all(nodes)
        device, sizes = nodes[0].memory.guessed.device, [len(each.tokens) for each in nodes]
        rows = torch.cat([each.memory.guessed[to_device(each.depths, device)] for each in nodes])
        known = [each.memory.states[: 1 + each.mask.shape[1] - len(each.tokens)] for each in nodes]
        before = [own[to_device(each.above + 1, device)] for each, own in zip(nodes, known, strict=True)]
        tokens = torch.cat([each.tokens for each in nodes]).to(device, non_blocking=True)
        states, made = self._bias(rows, tokens, torch.cat(before))
        for each, own, fresh in zip(nodes, known, states.split(sizes), strict=True):
            each.memory.states = torch.cat((own, fresh))
        return list(self.project(torch.cat((rows, made), dim=1)).split(sizes))

    def project(self, spoken: torch.Tensor, step: int = 0) -> torch.Tensor:
        rows = spoken[..., : self.shape.hidden]
        if self.variant is None:
            return super().project(rows, step)
        return super().project(rows, step) + self.parts.linear("markov_out")(spoken[..., self.shape.hidden :])

    def unroll_at(
        self, states: dict[Tap, torch.Tensor], tokens: torch.Tensor, steps: int, anchors: torch.Tensor
    ) -> list[Guess]:
        rows = self.blocks(states, tokens, anchors)
        b, m = rows.shape[:2]
        if self.variant is None:
            return [Guess(each, each) for each in rows[:, :, self.first :][:, :, :steps].unbind(dim=2)]
        state = rows.new_zeros(b * m, self.rank)
        if self.primed:
            state, _ = self._bias(rows[:, :, 0].flatten(0, 1), tokens[:, anchors].flatten(), state)
        guesses = []
        for step in range(min(steps, rows.shape[2] - self.first)):
            own = rows[:, :, self.first + step].flatten(0, 1)
            state, made = self._bias(own, tokens[:, anchors + step].flatten(), state)
            spoken = torch.cat((own, made), dim=1).view(b, m, -1)
            guesses.append(Guess(spoken, spoken))
        return guesses

    def acceptance(self, spoken: torch.Tensor) -> torch.Tensor | None:
        if _CONFIDENCE not in self.parts:
            return None
        width = self.parts.inputs("confidence")
        if width > self.shape.hidden and self.variant != _VARIANTS[0]:
            # It reads the token before, of which `spoken` holds what the bias makes of it.
            return None
        return self.parts.linear("confidence")(spoken[:, :width])[:, 0]

    def confidence(self, memory: BlockMemory, tree: DraftTree) -> np.ndarray:
        """The predicted probability [nodes] that a node of a tree is accepted with all above it.

        Args:
            memory: What was read of the text.
            tree: Rooted at its last token, with drafted ones.
        """
        found = np.ones(len(tree))
        above, depths = tree.parents[1:], tree.depths[1:] - 1
        rows = memory.guessed[to_device(depths, memory.guessed.device)]
        if self.parts.inputs("confidence") > self.shape.hidden:
            before = to_device(tree.tokens[above], rows.device)
            rows = torch.cat((rows, self.parts.rows("markov_in", before)), dim=1)
        own = self.parts.linear("confidence")(rows)[:, 0].sigmoid().tolist()
        for node, (parent, chance) in enumerate(zip(above.tolist(), own, strict=True), start=1):
            found[node] = found[parent] * chance
        return found

    def _bias(
        self, rows: torch.Tensor, before: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [n, hidden], the tokens [n] before theirs and states [n, rank] -> next states, what the bias is of."""
        embedded = self.parts.rows("markov_in", before)
        if self.variant == "gated":
            gate = self.parts.linear("markov_gate")(torch.cat((rows, embedded), dim=1)).sigmoid()
            return states, gate * embedded
        if self.variant == "rnn":
            joined = self.parts.linear("markov_step")(torch.cat((states, embedded, rows), dim=1))
            gate, fresh, output = joined.chunk(3, dim=1)
            gate = gate.sigmoid()
            return gate * states + (1 - gate) * fresh.tanh(), output.tanh()
        return states, embedded


@register(
    "dspark",
    paper="DSpark: Confidence-Scheduled Speculative Decoding with Semi-Autoregressive Generation (2026)",
    lossless=True,
    requirements=("hidden states of every token", "a head made by decodery train head --kind dspark"),
)
@dataclass(frozen=True)
class DSpark(HeadDrafter):
    """Drafts a block of tokens in one pass, each with a bias by the token drafted before it.

    Predictions depend on the path, so trees need no independence of their levels. Heads with a confidence head can cut
    a draft by what it expects to be accepted. Scope: the request; memory: keys and values of the head's layers.

    Attributes:
        min_confidence: A node is dropped where the product of confidences on its path is less; 0 drops none. None: as
            many nodes stay as give most expected tokens per second by what passes take on this machine.
        length: Tokens of a chain, at most as many as a block predicts.
        tree_policy: How a tree is grown, a chain of `length` where it is None.
        head: A file or folder made by `decodery train head`, a folder or Hub id as SpecForge or vLLM's `speculators`
            publish them or a `TrainedHead`.
    """

    kind: ClassVar[type[DraftHead]] = DSparkHead

    min_confidence: float | None = 0.0
    length: int = field(default=15, kw_only=True)
    tree_policy: TreePolicy | str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        least = self.min_confidence
        if least is not None and not 0 <= least < 1:
            raise SettingsError(f"dspark needs min_confidence from 0 to below 1, or None, not {least}")
        if least != 0 and self.trained is not None and _CONFIDENCE not in self.trained.tensors:
            raise SettingsError(
                f"dspark with min_confidence={least} needs a head with a confidence head, and this one has none: leave "
                "min_confidence out, or train the head again"
            )

    @property
    def requirements(self) -> Requirements:
        return Requirements.merged((super().requirements, Requirements(costs=self.min_confidence is None)))

    def propose(self, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        tree = yield from super().propose(seq, budget)
        if self.min_confidence == 0 or len(tree) < 2:
            return tree
        reading: HeadReading = seq.states[self]
        head = reading.head
        assert isinstance(head, DSparkHead)
        chances = head.confidence(reading.memory, tree)
        if self.min_confidence is not None:
            return tree.prune(chances >= self.min_confidence)
        return tree.prune(_paying(chances, budget))


def _paying(chances: np.ndarray, budget: Budget) -> np.ndarray:
    """Which nodes [nodes] bool stay: of the most likely ones as many as give most tokens per second."""
    # A node is at most as likely as the one above it, which stands before it.
    order = np.argsort(-chances, kind="stable")
    best = int((chances[order].cumsum() / budget.drafted(len(order) - 1)).argmax())
    kept = np.zeros(len(chances), dtype=bool)
    kept[order[: best + 1]] = True
    return kept
