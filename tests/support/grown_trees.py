"""What the nodes of a grown tree should have been drawn from: laws and noise worked out path by path."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from decodery.core import noise
from decodery.core.requirements import Requirements
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.sampling import Sampler
from decodery.speculative.acceptance.coupled import Coupled
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.trees.caterpillar import Caterpillar
from decodery.speculative.trees.clover import Selection
from decodery.speculative.trees.dyspec import DySpec
from decodery.speculative.trees.eagle_2 import EAGLE2
from decodery.speculative.trees.fixed_tree import FixedTree
from decodery.speculative.trees.k_chains import KChains
from decodery.speculative.trees.rsd_c import RSDC
from decodery.speculative.trees.rsd_s import RSDS
from decodery.speculative.trees.sequoia import Sequoia
from decodery.speculative.trees.specinfer import SpecInfer
from decodery.step.acceptance_rule import AcceptanceRule
from decodery.step.draft_tree import DraftTree
from decodery.step.forward_request import run_sync
from decodery.step.sequence import Sequence
from decodery.step.tree_drafter import TreeDrafter
from decodery.step.tree_policy import TreePolicy
from decodery.testing import TableModel

GROWTHS: dict[str, TreePolicy] = {
    "fixed-tree": FixedTree(),
    "specinfer": SpecInfer((3, 2, 2)),
    "k-chains": KChains(3, 4),
    "sequoia": Sequoia(),
    "eagle-2": EAGLE2(width=4),
    "dyspec": DySpec(),
    "dyspec, by level": DySpec(threshold=0.02),
    "caterpillar": Caterpillar(length=4, stop=0.05, nodes=12),
    "clover": Selection(nodes=9),
    "rsd-c": RSDC((3, 2, 2)),
    "rsd-s": RSDS(4, 4),
}
GREEDY, WARM = Sampler.from_settings(), Sampler.from_settings(temperature=0.8)


@dataclass(frozen=True)
class Drawing(Coupled):
    """Takes no notice of the distributions it asks for: drafts are drawn as for rules that compare with them."""

    requirements = Requirements(laws=True)


def begun(
    growth: TreePolicy | None,
    sampler: Sampler = WARM,
    *,
    rule: AcceptanceRule | None = None,
    seed: int = 0,
    vocab: int = 6,
) -> tuple[DraftModel, Sequence]:
    """A drafter of a random table's and a sequence that has read its prompt."""
    drafter = DraftModel(TableModel(vocab, seed=seed, order=3), tree_policy=growth)
    engine = Engine(TableModel(vocab, seed=seed + 1000))
    settings = {"sampler": sampler, "drafter": drafter, "acceptance_rule": rule or Coupled(), "seed": seed}
    seq = engine.submit(Request([1, 2, seed % vocab], max_new_tokens=40, **settings))  # type: ignore[arg-type]
    engine.step()
    return drafter, seq


def path_tokens(tree: DraftTree) -> dict[int, tuple[int, ...]]:
    return {node: tuple(tree.tokens[tree.path(node)].tolist()) for node in range(len(tree))}


def law_after(drafter: TreeDrafter, seq: Sequence, path: tuple[int, ...], *, shaped: bool = True) -> np.ndarray:
    """Log-probabilities [vocab] after a path, asked for alone."""
    tree = DraftTree.chain(seq.last_token, path)
    return run_sync(drafter.expand(seq, tree, [len(path)], shaped=shaped))[0].double().numpy()


def noise_after(seq: Sequence, path: tuple[int, ...]) -> np.ndarray:
    """What the children of a path are drawn with."""
    tokens = torch.arange(seq.request.vocab_size)
    if not seq.request.acceptance_rule.requirements.laws:
        return noise.gumbel(seq.request.seed, seq.position + len(path), tokens).numpy()
    place = noise.mix(seq.position)
    for token in path:
        place = noise.mix(place, token)
    return noise.gumbel(seq.request.seed, place, tokens, noise.DRAFT).numpy()


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    return list(path_tokens(tree).values())[1:]
