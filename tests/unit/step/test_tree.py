"""The algebra of draft trees, against slow definitions on random trees."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decodery.step.draft_tree import DraftTree, Entered


@st.composite
def trees(draw: st.DrawFn, root: int = 0, vocab: int = 4) -> DraftTree:
    """Random trees without equal siblings."""
    tokens, parents, seen = [root], [-1], set()
    for _ in range(draw(st.integers(0, 12))):
        key = draw(st.integers(0, len(tokens) - 1)), draw(st.integers(0, vocab - 1))
        if key not in seen:
            seen.add(key)
            parents.append(key[0])
            tokens.append(key[1])
    return DraftTree(np.array(tokens), np.array(parents))


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    """Every node as the tokens from the root down to it."""
    return {tuple(int(tree.tokens[node]) for node in tree.path(each)) for each in range(len(tree))}


@given(trees())
def test_depths_masks_and_paths_follow_the_parents(tree: DraftTree) -> None:
    tree.validate()
    mask = tree.ancestor_mask()
    for node in range(len(tree)):
        chain = tree.path(node)
        assert tree.depths[node] == len(chain)
        assert set(np.flatnonzero(mask[node])) == {0, node, *chain}
        for child in tree.children(node):
            assert tree.child(node, int(tree.tokens[child])) == child
    assert sum(len(tree.children(node)) for node in range(len(tree))) == len(tree) - 1


@given(trees(), trees())
def test_merging_is_the_union_of_paths(left: DraftTree, right: DraftTree) -> None:
    both = left.merge(right)
    both.validate()
    assert paths(both) == paths(left) | paths(right)
    assert paths(right.merge(left)) == paths(both)
    assert len(both.merge(left)) == len(both)
    assert len(left.merge(DraftTree.root(0))) == len(left)


@given(trees(), st.data())
def test_pruning_keeps_what_still_hangs_on_the_root(tree: DraftTree, data: st.DataObject) -> None:
    keep = np.array(data.draw(st.lists(st.booleans(), min_size=len(tree), max_size=len(tree))))
    pruned = tree.prune(keep)
    pruned.validate()
    kept = [node for node in range(len(tree)) if all(keep[each] for each in tree.path(node))]
    assert paths(pruned) == {tuple(int(tree.tokens[n]) for n in tree.path(node)) for node in kept}


def test_a_chain_is_a_tree() -> None:
    chain = DraftTree.chain(7, [1, 2, 3])
    assert chain.is_chain and chain.depths.tolist() == [0, 1, 2, 3]
    assert (chain.ancestor_mask() == np.tri(4, dtype=bool)).all()
    assert paths(DraftTree.from_paths(7, [(1, 2), (1, 3)])) == {(), (1,), (1, 2), (1, 3)}


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [([1], [0]), ([1, 2], [-1, 1]), ([1, 2], [-1, -1]), ([1, 2, 2], [-1, 0, 0]), ([1, 2], [-1])],
    ids=["root with a parent", "own parent", "two roots", "equal siblings", "missing parent"],
)
def test_what_is_no_tree_is_refused(tokens: list[int], parents: list[int]) -> None:
    with pytest.raises(ValueError):
        DraftTree(np.array(tokens), np.array(parents)).validate()


def test_trees_of_different_tokens_do_not_merge() -> None:
    with pytest.raises(ValueError, match="different last tokens 1 and 2"):
        DraftTree.root(1).merge(DraftTree.root(2))


def test_equal_draws_are_one_node_drawn_twice() -> None:
    tree = DraftTree(np.array([9, 1, 2, 1]), np.array([-1, 0, 0, 1]), "sampled", draws={0: [1, 2, 1], 1: [3]})
    tree.validate()
    assert tree.drawn(0) == [1, 2, 1] and tree.drawn(1) == [3] and tree.drawn(2) == []
    assert DraftTree.from_paths(9, [(1,), (2,)]).drawn(0) == [1, 2]
    pruned = tree.prune(np.array([True, False, True, True]))
    assert pruned.drawn(0) == [1] and pruned.tokens.tolist() == [9, 2]


def test_a_tree_made_of_another_has_been_through_no_layer() -> None:
    tree = replace(DraftTree.chain(1, [2, 3]), entered=Entered(1, torch.zeros(3, 4)))
    made = (
        tree.extended([[2, 3, 4]]),
        tree.prune(np.array([True, True, False])),
        tree.merge(DraftTree.chain(1, [5])),
        tree.with_mask_nodes(np.array([0, 0, 1]), torch.zeros(1, 4)),
    )
    assert [each.entered for each in made] == [None] * 4 and tree.entered is not None


@given(trees())
def test_a_trunk_is_the_chain_of_first_children(tree: DraftTree) -> None:
    trunk, node = tree.trunk(), 0
    trunk.validate()
    assert trunk.is_chain
    for token in trunk.tokens[1:]:
        node = int(tree.children(node)[0])
        assert token == tree.tokens[node]
    assert len(tree.children(node)) == 0


def test_a_trunk_keeps_what_its_nodes_were_drawn_with() -> None:
    laws = {node: torch.full((4,), 0.25) * (node + 1) for node in (0, 1, 2)}
    draws = {0: [2, 1, 2]}
    tree = DraftTree(
        np.array([9, 1, 2, 3, 0]), np.array([-1, 0, 0, 2, 1]), "sampled", np.array([0.0, -1, -2, -3, -4]), laws, draws
    )
    trunk = tree.trunk()
    assert trunk.tokens.tolist() == [9, 2, 3] and trunk.origin == "sampled"
    assert trunk.logq is not None and trunk.logq.tolist() == [0.0, -2, -3]
    assert trunk.drawn(0) == [1] and trunk.distributions[0] is laws[0] and trunk.distributions[1] is laws[2]
    with_mask_nodes = DraftTree.chain(1, [2]).with_mask_nodes(np.array([1, 1]), torch.zeros(1, 4))
    assert with_mask_nodes.trunk().tokens.tolist() == [1, 2] and with_mask_nodes.trunk().inputs is None
