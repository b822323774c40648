"""Passes of heads at fixed shapes, recorded once and replayed, draft what ordinary passes draft."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import pytest
import torch

from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.cache import page_pool
from decodery.models.cache.device_tables import DeviceTables
from decodery.models.torch.paged_rows import PagedRows
from decodery.models.torch.transformer import Transformer
from decodery.sampling import Sampler
from decodery.speculative.drafters import dflash
from decodery.speculative.drafters.dflash import DFlashHead
from decodery.speculative.heads.block import BlockRows
from decodery.speculative.heads.drafter import TrainedDrafter
from decodery.speculative.heads.fixed_shapes import HeadPasses, HeadStep, LayerRows
from decodery.speculative.heads.head import TrainedHead
from decodery.speculative.heads.layered import LayeredHead
from decodery.testing import tiny_transformer
from far import Watched, moved
from methods import DRAFTERS
from recordings import heads_at_fixed_shapes, recording

KINDS = ["eagle-3", "msd", "mtp", "p-eagle", "dflash", "dspark"]
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 4, 5], [9], [3, 3, 2, 1], [7, 1], *([each, 2, 1] for each in range(6))]
SAMPLER = Sampler.from_settings(temperature=0.8, top_p=0.9)
pytestmark = pytest.mark.usefixtures("pools_of_pytorch")


def shaken(name: str, **layer: Any) -> TrainedDrafter:
    """A drafter whose head has numbers of its own everywhere, and a layer that is changed."""
    drafter = DRAFTERS[name](tiny_transformer(0, num_layers=4))
    assert isinstance(drafter, TrainedDrafter) and drafter.trained is not None
    own = drafter.trained
    tensors = {
        part: each * (1 + 0.1 * (each.double() * 37).sin().to(each)) if each.is_floating_point() else each
        for part, each in own.tensors.items()
    }
    settings = {**own.settings, "layer": {**own.settings["layer"], **layer}}
    return replace(drafter, head=TrainedHead(own.kind, tensors, settings))


def drafts(drafter: TrainedDrafter, *, more: int = 0, device: str = "cpu") -> list[Any]:
    """What was written and drafted after three prompts, and after `more` that come later."""
    target = tiny_transformer(0, num_layers=4)
    engine = Engine(Transformer(target.config, moved(target.weights, device)))

    def submit(first: int, last: int) -> list[Any]:
        return [
            engine.submit(
                Request(
                    PROMPTS[seed], sampler=SAMPLER, seed=seed, drafter=drafter, max_new_tokens=11,
                    return_draft_trees=True,
                )
            )
            for seed in range(first, last)
        ]  # fmt: skip

    texts = submit(0, 3)
    while more and not all(any(step.nodes for step in text.trace.steps) for text in texts):
        engine.step()
    texts += submit(3, 3 + more)
    engine.run(texts)
    return [(text.generated, [step.tree and step.tree.tokens for step in text.trace.steps]) for text in texts]


@pytest.mark.parametrize("name", KINDS)
def test_recorded_passes_draft_what_ordinary_ones_draft(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for drafter in (shaken(name), replace(shaken(name), tree_policy=None)):
        expected = drafts(drafter)
        with monkeypatch.context() as patch:
            heads_at_fixed_shapes(patch)
            recorded = recording(patch)
            assert drafts(drafter) == expected
        assert any(shape.texts > 1 for shape in recorded) and len(set(recorded)) == len(recorded) < 12
        # All rows of a block are read at once: those of what a text grows by are not as many whose logits are wanted.
        assert name != "p-eagle" or any(shape.outputs > shape.texts for shape in recorded)
    assert sum(len(tree) for _, trees in expected for tree in trees if tree is not None) > 20


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="capturing graphs needs a CUDA device")
@pytest.mark.parametrize("name", KINDS)
def test_replayed_graphs_draft_what_ordinary_passes_draft(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for drafter in (shaken(name), replace(shaken(name), tree_policy=None)):
        found = drafts(drafter, device="cuda")
        with monkeypatch.context() as patch:
            patch.setattr(LayeredHead, "fixed", None)
            assert drafts(drafter, device="cuda") == found


def sliding(name: str, **settings: bool) -> TrainedDrafter:
    """A drafter of blocks of two layers, one of which slides."""
    drafter = shaken(name)
    assert drafter.trained is not None
    own = drafter.trained
    layer = {**own.settings["layer"], "sliding": 3}
    tensors = {part.replace("layer_0.", "layer_1."): each for part, each in own.tensors.items()} | {**own.tensors}
    about = {**own.settings, **settings, "layer": layer, "further": [own.settings["layer"]]}
    return replace(drafter, head=TrainedHead(own.kind, tensors, about))


@pytest.mark.parametrize("name", ["dflash", "dspark"])
@pytest.mark.parametrize("from_anchor", [True, False])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_blocks_see_the_same_through_windows(
    name: str, from_anchor: bool, bidirectional: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = sliding(name, window_from_anchor=from_anchor, bidirectional=bidirectional)
    expected = drafts(drafter)
    assert expected != drafts(shaken(name))
    heads_at_fixed_shapes(monkeypatch)
    recorded = recording(monkeypatch)
    assert drafts(drafter) == expected and recorded


@pytest.mark.parametrize("wrong", ["causal", "over", "unread"])
def test_blocks_that_see_something_else_are_noticed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that do not see those after them or lie over the text of the same pass, and features that are not read."""
    drafter, through = shaken("dflash"), DFlashHead.through
    expected = drafts(drafter)
    heads_at_fixed_shapes(monkeypatch)
    if wrong == "causal":
        monkeypatch.setattr(BlockRows, "visible", lambda rows, layer, before: layer.visible(5, before, None))
    elif wrong == "over":
        monkeypatch.setattr(dflash, "BlockRows", lambda held, at, fresh, **more: BlockRows(held, at, fresh=0, **more))
    else:
        monkeypatch.setattr(DFlashHead, "through", lambda head, features, *others: through(head, features * 0, *others))
    assert drafts(drafter) != expected


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_texts_and_their_blocks_are_one_pass_and_one_copy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = sliding(name)
    expected, copies, attended, passes = drafts(drafter), list[int](), list[int](), list[tuple[int, int]]()
    fill, attend, run = HeadStep.fill, PagedRows.attend, HeadPasses.run

    def filled(step: HeadStep, *inputs: Any) -> None:
        before = watched.uploads
        fill(step, *inputs)
        copies.append(watched.uploads - before)

    def attends(rows: PagedRows, *inputs: Any) -> torch.Tensor:
        attended.append(1)
        return attend(rows, *inputs)

    def runs(fixed: HeadPasses, head: Any, texts: Any, *inputs: Any) -> Any:
        attended.clear()
        found = run(fixed, head, texts, *inputs)
        passes.append((len(texts), len(attended)))
        return found

    heads_at_fixed_shapes(monkeypatch)
    for owner, part, new in ((HeadStep, "fill", filled), (PagedRows, "attend", attends), (HeadPasses, "run", runs)):
        monkeypatch.setattr(owner, part, new)
    with Watched() as watched:
        assert drafts(drafter, device="meta:0") == expected
    # Of each text what is new of it, and its block.
    assert (6, 2) in passes and {layers for _, layers in passes} == {2} and set(copies) == {1}


@pytest.mark.parametrize("layer", [{"window": 4}, {"sliding": 3}], ids=str)
def test_windows_hide_the_same_of_a_text(layer: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = shaken("eagle-3", **layer)
    expected = drafts(drafter)
    assert expected != drafts(shaken("eagle-3"))
    heads_at_fixed_shapes(monkeypatch)
    recorded = recording(monkeypatch)
    assert drafts(drafter) == expected and recorded


def test_what_a_graph_reads_is_captured_anew_where_it_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of eleven texts have no room where those of three lie."""
    drafter = shaken("eagle-3")
    expected = drafts(drafter, more=8)
    heads_at_fixed_shapes(monkeypatch)
    recorded = recording(monkeypatch)
    assert drafts(drafter, more=8) == expected and len(set(recorded)) < len(recorded)
    # Where it does not, tables that grow are read where they lay before.
    monkeypatch.setattr(page_pool, "_pools", WeakValueDictionary())
    monkeypatch.setattr(DeviceTables, "generation", property(lambda tables: 0, lambda tables, number: None), False)
    with pytest.raises(IndexError):
        drafts(drafter, more=8)


def test_rows_that_see_more_of_a_tree_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail."""
    drafter, real = shaken("eagle-3"), LayerRows.see
    expected = drafts(drafter)
    heads_at_fixed_shapes(monkeypatch)

    def see(rows: LayerRows, bits: np.ndarray, windows: list[int | None]) -> None:
        real(replace(rows, seen=[np.ones_like(each) for each in rows.seen]), bits, windows)

    monkeypatch.setattr(LayerRows, "see", see)
    assert drafts(drafter) != expected
