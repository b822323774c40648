"""A hidden Markov model, distilled from the target's own texts, drafts."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.threads import one_thread
from decodery.step.draft_tree import DraftTree
from decodery.step.sequence import Sequence
from decodery.step.tree_drafter import TreeDrafter

from ..stores.hmm import HMM
from .follower import shared


@dataclass(slots=True)
class BeliefReading:
    """What is believed after a text and after drafts of what follows.

    Attributes:
        tokens: The text that was read.
        beliefs: [S] each, before its first token and after every one of them, so that a text that departs from them
            goes on from where it did.
        drafts: After the paths below the text's last token.
    """

    hmm: HMM
    tokens: list[int] = field(default_factory=list)
    beliefs: list[torch.Tensor] = field(default_factory=list)
    drafts: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, object]) -> BeliefReading:
        # Beliefs are never written to.
        return BeliefReading(self.hmm, list(self.tokens), list(self.beliefs), dict(self.drafts))

    def read(self, text: list[int]) -> None:
        """Read what `text` says that was not read, and forget what it does not say.

        Drafts that became text count.
        """
        known = shared(text, self.tokens)
        if known == len(text) == len(self.tokens) and self.beliefs:
            return
        if known < len(self.tokens) or not self.beliefs:
            self.drafts = {}
        del self.tokens[known:], self.beliefs[known + 1 :]
        if not self.beliefs:
            self.beliefs = [self.hmm.start]
        fresh = tuple(text[known:])
        for count, token in enumerate(fresh, start=1):
            found = self.drafts.get(fresh[:count])
            self.beliefs.append(self.hmm.after(self.beliefs[-1][None], [token])[0] if found is None else found)
            self.tokens.append(token)
        self.drafts = {(): self.beliefs[-1]}

    def behind(self, tree: DraftTree, nodes: Ordered[int]) -> torch.Tensor:
        """[k, S] what is believed after nodes of a tree below the text's last token."""
        paths = [tuple(tree.tokens[tree.path(node)].tolist()) for node in nodes]
        wanted = {path[:count] for path in paths for count in range(len(path) + 1)} - self.drafts.keys()
        # Parents before their children, all of a depth in one product.
        for depth in sorted({len(path) for path in wanted}):
            level = sorted(path for path in wanted if len(path) == depth)
            above = torch.stack([self.drafts[path[:-1]] for path in level])
            self.drafts.update(zip(level, self.hmm.after(above, [path[-1] for path in level]), strict=True))
        return torch.stack([self.drafts[path] for path in paths])


@register(
    "hmm",
    paper="Lossless Compression with Probabilistic Circuits (2021)",
    lossless=True,
    requirements=("a hidden Markov model made by decodery train hmm",),
)
@dataclass(frozen=True)
class HiddenMarkov(TreeDrafter):
    """Drafts from a hidden Markov model of the target's own texts, with exact distributions and no pass.

    A probabilistic circuit whose every marginal can be told, and the smallest one that reads a text of any length: what
    it knows of the text is one chance per state, which every token that is committed moves on. Any node of any tree is
    expanded by two products of states by states and states by tokens. Nothing is learned while drafting. Scope: the
    request; memory: 4 bytes per state and token of the text, so that what is taken back is not read again.

    Attributes:
        model: An `HMM`, or the file or folder of one.
        length, tree_policy: See `draft-model`.
    """

    model: HMM | str | None = None

    def start(self, seq: Sequence) -> BeliefReading:
        if self.model is None:
            raise SettingsError(f"no hidden Markov model comes with this package: {HMM.MADE}")
        hmm = HMM.load(self.model)
        hmm.check(seq.request.model.config)
        return BeliefReading(hmm)

    @one_thread()
    def logits(self, seq: Sequence, tree: DraftTree, nodes: Ordered[int]) -> torch.Tensor:
        reading: BeliefReading = seq.states[self]
        reading.read(seq.tokens)
        rows = reading.hmm.logits(reading.behind(tree, nodes))
        return rows.float().to(seq.request.model.device)

    def forget(self, seq: Sequence) -> None:
        seq.states[self] = BeliefReading(seq.states[self].hmm)
