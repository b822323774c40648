"""A draft: a tree of tokens that may follow the last token, which is its root."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch

from decodery.core.requirements import Origin
from decodery.models.hooks import Tap
from decodery.models.protocol import EmbeddingModel

MASK_TOKEN = -1
"""In place of a token, at nodes that read an embedding of their own."""
Change = Callable[[torch.Tensor, "DraftTree"], torch.Tensor]
"""Given the states [n, width] of a tree's nodes somewhere in a pass, and the tree: what they are from there on."""


@dataclass(frozen=True, eq=False)
class Entered:
    """How far a drafter has brought the nodes of its tree through the target's own layers.

    Attributes:
        layer: How many layers the nodes have passed.
        states: [n, hidden] after `layer` layers, whose keys and values stand in the text's cache as tentative rows, in
            this order and no others.
    """

    layer: int
    states: torch.Tensor


@dataclass(frozen=True, repr=False)
class DraftTree:
    """Tokens in topological order: node 0 is the last token, every parent stands before its children.

    Attributes:
        tokens, parents: [n] int64, parents[0] == -1.
        origin: How siblings arose, which decides the rules that may verify them: "deterministic" (a function of the
            prefix), "sampled" (independent draws) or "without-replacement". Siblings stand in the order they were drawn
            in.
        logq: [n] float64, log-probability each node was drawn with.
        distributions: {node: [vocab] float64 probabilities its children were drawn from}.
        draws: {node: its children in draw order, once per draw}, for nodes of a sampled tree where equal draws became
            one child; see `drawn`.
        inputs: [k, hidden] the embeddings that the k nodes read whose token is UNKNOWN, in their order; None where
            every token is known. Such nodes ask what comes after a token not known yet. They are children of no node:
            rules never see them, and what they are scored with is for the drafter.
        changes: What changes the states of such nodes on their way through the model, by hook point, see
            `models.hooks`.
        entered: Where scoring may go on, of exactly these nodes; a tree made of this one has none.
    """

    tokens: np.ndarray
    parents: np.ndarray
    origin: Origin = "deterministic"
    logq: np.ndarray | None = None
    distributions: dict[int, torch.Tensor] = field(default_factory=dict)
    draws: dict[int, list[int]] = field(default_factory=dict)
    inputs: torch.Tensor | None = None
    changes: Mapping[Tap, Change] = field(default_factory=dict)
    entered: Entered | None = None

    @classmethod
    def root(cls, last_token: int) -> DraftTree:
        """No draft: the last token alone."""
        return cls(np.array([last_token], dtype=np.int64), np.array([-1], dtype=np.int64))

    @classmethod
    def chain(
        cls,
        last_token: int,
        drafted: Sequence[int] | np.ndarray,
        *,
        origin: Origin = "deterministic",
        logq: np.ndarray | None = None,
        distributions: dict[int, torch.Tensor] | None = None,
    ) -> DraftTree:
        """One token after another after the last token.

        Args:
            last_token: The last token, which becomes the root.
            drafted: Token ids below it, in order.
            origin, logq, distributions: See `DraftTree`.
        """
        tokens = np.concatenate(([last_token], np.asarray(drafted, dtype=np.int64)))
        parents = np.arange(-1, len(tokens) - 1, dtype=np.int64)
        return cls(tokens, parents, origin, logq, distributions or {})

    @classmethod
    def from_paths(cls, last_token: int, paths: Iterable[Sequence[int]], nodes: int | None = None) -> DraftTree:
        """The trie of several continuations of the last token.

        Args:
            last_token: The last token, which becomes the root.
            paths: Token ids of each continuation.
            nodes: How many drafted nodes it may have; what is beyond them is left out, last paths first.
        """
        tree = cls.root(last_token).extended(paths)
        if nodes is None or len(tree) <= nodes + 1:
            return tree
        # Nodes stand in the order of the paths, parents first.
        return cls(tree.tokens[: nodes + 1], tree.parents[: nodes + 1])

    def extended(self, paths: Iterable[Sequence[int]]) -> DraftTree:
        """This tree and further continuations of the last token; the nodes there are keep their numbers.

        How the new ones arose is not told apart from the others.
        """
        tokens, parents, index = self.tokens.tolist(), self.parents.tolist(), dict(self._index)
        for path in paths:
            node = 0
            for token in path:
                key = (node, token)
                if key not in index:
                    index[key] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                node = index[key]
        longer = np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64)
        return replace(self, tokens=longer[0], parents=longer[1], logq=None, entered=None)

    def with_mask_nodes(
        self, counts: np.ndarray, inputs: torch.Tensor, changes: Mapping[Tap, Change] | None = None
    ) -> DraftTree:
        """This tree, of known tokens, and after each of its nodes a chain of nodes without a token.

        The chains stand after all other nodes, in the order of those they hang on.

        Args:
            counts: [n] how long the chains are.
            inputs: [longest, hidden] what the first, second, ... node of a chain reads.
            changes: See `DraftTree`.
        """
        owners = np.arange(len(self)).repeat(counts)
        places = np.arange(len(owners)) - (np.cumsum(counts) - counts).repeat(counts)
        parents = np.where(places == 0, owners, len(self) + np.arange(len(owners)) - 1)
        return replace(
            self,
            tokens=np.concatenate((self.tokens, np.full(len(owners), MASK_TOKEN))),
            parents=np.concatenate((self.parents, parents)),
            logq=None if self.logq is None else np.concatenate((self.logq, np.full(len(owners), -np.inf))),
            inputs=inputs[torch.from_numpy(places)] if len(owners) else None,
            changes=changes or {},
            entered=None,
        )

    def __repr__(self) -> str:
        return f"DraftTree({len(self) - 1} drafted tokens, depth {self.depths.max()}, {self.origin})"

    def __len__(self) -> int:
        return len(self.tokens)

    def validate(self, vocab_size: int | None = None) -> None:
        """Raise ValueError if the arrays are no tree of distinct siblings in topological order.

        All tokens but those of mask nodes must be in the vocabulary.
        """
        n = len(self.tokens)
        if n == 0 or len(self.parents) != n or self.parents[0] != -1:
            raise ValueError("a tree needs a root with parent -1 and one parent per token")
        above = self.parents[1:]
        if n > 1 and not ((above >= 0) & (above < np.arange(1, n))).all():
            raise ValueError("every node but the root needs a parent that stands before it")
        # Most trees have all their tokens, and nothing is sorted out.
        known = self.tokens if self.tokens.min() >= 0 else self.tokens[self.tokens != MASK_TOKEN]
        if n - len(known) != (0 if self.inputs is None else len(self.inputs)):
            raise ValueError("every node without a token needs an embedding that it reads")
        if vocab_size is not None and not 0 <= known.min() <= known.max() < vocab_size:
            raise ValueError(f"token ids lie outside the vocabulary of {vocab_size}")
        if self.origin != "sampled" and len(self._index) != n:
            raise ValueError("siblings must carry distinct tokens")

    @cached_property
    def depths(self) -> np.ndarray:
        """[n] distance from the root."""
        if self.is_chain:
            return np.arange(len(self))
        depths = np.zeros(len(self), dtype=np.int64)
        ancestors = self.parents.copy()
        while (alive := ancestors >= 0).any():
            depths += alive
            ancestors = np.where(alive, self.parents[ancestors], -1)
        return depths

    @cached_property
    def is_chain(self) -> bool:
        return bool((self.parents == np.arange(-1, len(self) - 1)).all())

    def ancestor_mask(self) -> np.ndarray:
        """[n, n] bool: row i marks node i and its ancestors."""
        n = len(self)
        if self.is_chain:
            return np.tri(n, dtype=bool)
        mask = np.eye(n, dtype=bool)
        nodes, ancestors = np.arange(n), self.parents.copy()
        while (alive := ancestors >= 0).any():
            mask[nodes[alive], ancestors[alive]] = True
            ancestors = np.where(alive, self.parents[ancestors], -1)
        return mask

    @cached_property
    def _index(self) -> dict[tuple[int, int], int]:
        pairs = zip(self.parents.tolist(), self.tokens.tolist(), strict=True)
        return dict(zip(pairs, range(len(self)), strict=True))

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that carries `token`, if there is one."""
        return self._index.get((node, token))

    def children(self, node: int) -> np.ndarray:
        """Children of `node` in the order they were drawn in."""
        return np.flatnonzero((self.parents == node) & (self.tokens != MASK_TOKEN))

    def asked(self, node: int) -> list[int]:
        """The chain of nodes without a token after `node`."""
        chain: list[int] = []
        while (child := self.child(node, MASK_TOKEN)) is not None:
            chain.append(child)
            node = child
        return chain

    @cached_property
    def chains(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All mask nodes, the known node that each one's chain follows, and their positions in it.

        Each is [k]; the first node of a chain has place 0.
        """
        nodes = np.flatnonzero(self.tokens == MASK_TOKEN)
        owners, places = self.parents[nodes], np.zeros(len(nodes), dtype=np.int64)
        while (inside := self.tokens[owners] == MASK_TOKEN).any():
            owners, places = np.where(inside, self.parents[owners], owners), places + inside
        return nodes, owners, places

    def embedded(self, model: EmbeddingModel) -> torch.Tensor:
        """[n, hidden] what `model` reads at the nodes: token embeddings, and `inputs` if given."""
        rows = model.embed_tokens(torch.from_numpy(self.tokens.clip(min=0)).to(model.device))
        if self.inputs is not None:
            rows[torch.from_numpy(self.tokens == MASK_TOKEN)] = self.inputs.to(rows)
        return rows

    def drawn(self, node: int) -> list[int]:
        """Children of `node` in draw order, once per draw: a token that was drawn twice stands there twice."""
        return self.draws[node] if node in self.draws else self.children(node).tolist()

    def path(self, node: int) -> list[int]:
        """Nodes from below the root down to `node`; empty for the root."""
        nodes = []
        while node > 0:
            nodes.append(node)
            node = int(self.parents[node])
        return nodes[::-1]

    def on(self, device: torch.device) -> DraftTree:
        """The tree with its distributions on a device: a draft model may have another one than the target."""
        if all(law.device == device for law in self.distributions.values()):
            return self
        return replace(self, distributions={node: law.to(device) for node, law in self.distributions.items()})

    def trunk(self) -> DraftTree:
        """The chain of first children, each drawn once: what is left of the tree where rows may not branch."""
        if self.is_chain:
            return self
        nodes = [0]
        while below := self.drawn(nodes[-1]):
            nodes.append(below[0])
        laws = {place: self.distributions[node] for place, node in enumerate(nodes) if node in self.distributions}
        logq = None if self.logq is None else self.logq[nodes]
        return DraftTree(self.tokens[nodes], np.arange(-1, len(nodes) - 1), self.origin, logq, laws)

    def prune(self, keep: np.ndarray) -> DraftTree:
        """The tree of the nodes marked in `keep` [n] bool whose ancestors are marked too.

        The root always stays. Which sampled siblings survive must not depend on their tokens, or sampling rules are
        biased.
        """
        kept = keep.copy()
        kept[0] = True
        for _ in range(int(self.depths.max())):
            kept[1:] &= kept[self.parents[1:]]
        nodes = np.flatnonzero(kept)
        place = np.full(len(self) + 1, -1, dtype=np.int64)
        place[nodes] = np.arange(len(nodes))
        logq = None if self.logq is None else self.logq[nodes]
        laws = {int(place[node]): law for node, law in self.distributions.items() if kept[node]}
        draws = {
            int(place[node]): [int(place[child]) for child in children if kept[child]]
            for node, children in self.draws.items()
            if kept[node]
        }
        inputs = self.inputs
        if inputs is not None:
            with_mask_nodes = kept[self.tokens == MASK_TOKEN]
            inputs = inputs[torch.from_numpy(with_mask_nodes)] if with_mask_nodes.any() else None
        parents = place[self.parents[nodes]]
        return DraftTree(self.tokens[nodes], parents, self.origin, logq, laws, draws, inputs, self.changes)

    def merge(self, other: DraftTree) -> DraftTree:
        """Union of the paths of both trees, by longest shared prefix; a deterministic tree.

        Raises:
            ValueError: If the roots differ.
        """
        if self.tokens[0] != other.tokens[0]:
            raise ValueError(f"trees of different last tokens {self.tokens[0]} and {other.tokens[0]}")
        tokens, parents, index = self.tokens.tolist(), self.parents.tolist(), dict(self._index)
        place = {-1: -1}
        for node, (token, parent) in enumerate(zip(other.tokens.tolist(), other.parents.tolist(), strict=True)):
            key = (place[parent], token)
            if key not in index:
                index[key] = len(tokens)
                tokens.append(token)
                parents.append(key[0])
            place[node] = index[key]
        read = [] if self.inputs is None else [self.inputs]
        if other.inputs is not None:
            with_mask_nodes = np.flatnonzero(other.tokens == MASK_TOKEN).tolist()
            read.append(
                other.inputs[
                    torch.tensor([place[node] >= len(self) for node in with_mask_nodes], dtype=torch.bool, device="cpu")
                ]
            )
        inputs = torch.cat(read) if read else None
        arrays = np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64)
        return DraftTree(*arrays, inputs=inputs, changes={**other.changes, **self.changes})
