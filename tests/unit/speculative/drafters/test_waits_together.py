"""Texts on a device that draft with models and heads wait once for each pass, however many there are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from decodery.core import noise
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Batch
from decodery.models.cuda.graphs import StaticPasses
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense
from decodery.sampling import Sampler
from decodery.sampling.batched import BatchedProcessors, BatchedSampling, batched_processors, batched_sampling
from decodery.speculative.drafters.compressed_cache import CompressedCache
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.drafters.follower import Follower
from decodery.speculative.heads.drafter import TrainedDrafter
from decodery.speculative.heads.head import TrainedHead
from decodery.step import forward_request, level_choice, wanted
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter
from decodery.step.look_ahead import Ahead, Rows
from decodery.step.wanted import RowChoices, Wanted, row_choices_of
from decodery.testing import tiny_transformer
from far import FarTensor, Watched, moved
from methods import DRAFTERS
from recordings import heads_at_fixed_shapes, recording

_tiny = [tiny_transformer(0, num_layers=layers) for layers in (4, 3)]
TARGET, DRAFT = (Transformer(replace(each.config, vocabulary="tiny"), each.weights) for each in _tiny)
GREEDY, NUCLEUS = Sampler.from_settings(temperature=0.0), Sampler.from_settings(temperature=0.8, top_p=0.9)
TOKENS = 12
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 4, 5], [9], [3, 3, 2, 1], [7, 1]]
CHAINED = ["p-eagle", "medusa", "hydra", "clover", "chimera", "falcon", "longspec"]
TREES = {
    "eagle-2": "eagle-2:nodes=24,width=4,depth=3",
    "captured eagle-2": "eagle-2:nodes=40,width=12,depth=4",
    "shape": "fixed-tree:paths=0/1/2/0:0/0:1/2:0/2:0:0/0:1:0",
    "captured rsd-c": "rsd-c:branching=3/2/1/1",
    "sequoia": "sequoia:nodes=12,depth=4,acceptance=0.6/0.3/0.1",
    "rsd-s": "rsd-s:width=4,depth=4",
    "captured rsd-s": "rsd-s:width=4,depth=4",
    "specinfer": "specinfer:expansion=3/2/1",
    "k-chains": "k-chains:k=2,length=4",
}
# Waits of a step at most: for drafts, level by level where they are trees, and for the target's pass.
CASES = [
    ("draft-model, chain", GREEDY, 2),
    ("draft-model, chain", NUCLEUS, 2),
    ("draft-model, captured chain", NUCLEUS, 2),
    ("draft-model, eagle-2", GREEDY, 2),
    ("draft-model, captured eagle-2", NUCLEUS, 2),
    ("draft-model, specinfer", GREEDY, 2),
    ("dflash", GREEDY, 2),
    ("dspark", GREEDY, 8),
    ("dflash, chain", GREEDY, 2),
    ("dflash, chain", NUCLEUS, 2),
    ("dspark, chain", NUCLEUS, 2),
    ("dflash, captured chain", NUCLEUS, 2),
    ("dspark, captured chain", NUCLEUS, 2),
    ("eagle-3, captured chain", NUCLEUS, 2),
    ("eagle-3, tree", GREEDY, 2),
]
# The same of what goes the same ways, with two texts.
OTHERS = [
    *((f"{name}, chain", NUCLEUS, 2) for name in CHAINED),
    *((f"{name}, tree", NUCLEUS, 2) for name in ("medusa", "clover", "chimera", "longspec", "dspark")),
    ("eagle-3, captured tree", NUCLEUS, 2),
    ("dflash, captured eagle-2", GREEDY, 2),
    ("eagle-3, shape", GREEDY, 2),
    ("eagle-3, shape", NUCLEUS, 2),
    ("eagle-3, captured rsd-c", NUCLEUS, 2),
    ("eagle-3, rsd-s", NUCLEUS, 2),
    ("eagle-3, specinfer", NUCLEUS, 2),
    *((f"draft-model, {tree}", NUCLEUS, 2) for tree in ("shape", "sequoia", "captured rsd-s", "specinfer")),
    *((f"draft-model of {size}, {tree}", NUCLEUS, 2) for size in (56, 72) for tree in ("chain", "eagle-2", "sequoia")),
]


def resized(model: Transformer, size: int) -> Transformer:
    """A model with other numbers of tokens: with fewer, or with more that it finds as likely as its first ones."""
    ids, weights = torch.arange(size) % model.vocab_size, model.weights
    assert isinstance(weights.head, Dense)
    changed = replace(weights, embedding=weights.embedding[ids], head=Dense(weights.head.weight[ids]))
    return Transformer(replace(model.config, vocab_size=size), changed)


def made(name: str, device: str) -> Drafter:
    if name.startswith("draft-model"):
        draft = resized(DRAFT, int(size[1])) if (size := re.search(r" of (\d+),", name)) else DRAFT
        model = Transformer(draft.config, moved(draft.weights, device)) if device != "cpu" else draft
        if "captured" in name and device != "cpu":
            model.static = StaticPasses()
        if "chain" in name:
            return DraftModel(model, length=3)
        return DraftModel(model, tree_policy=TREES[name.split(", ")[1]])
    drafter = DRAFTERS[name.split(",")[0]](TARGET)
    assert isinstance(drafter, TrainedDrafter) and drafter.trained is not None
    own = drafter.trained
    # Numbers that count everywhere.
    tensors = {
        part: each * (1 + 0.1 * (each.double() * 37).sin().to(each)) if each.is_floating_point() else each
        for part, each in own.tensors.items()
    }
    drafter = replace(drafter, head=TrainedHead(own.kind, tensors, own.settings))
    if "chain" in name:
        return replace(drafter, tree_policy=None)
    if (tree := name.split(", ")[-1]) in TREES:
        return replace(drafter, tree_policy=TREES[tree])
    return replace(drafter, tree_policy="eagle-2:nodes=24,width=4,depth=3") if "tree" in name else drafter


def of(texts: list[Any]) -> list[Any]:
    """What was written, and the drafts of all steps."""
    return [(text.generated, [step.tree and step.tree.tokens for step in text.trace.steps]) for text in texts]


def waits(name: str, sampler: Sampler, count: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], list[int]]:
    """Texts of so many prompts on a device that is none, and the waits of steps in which all draft equally much."""
    with Watched() as watched:
        monkeypatch.setattr(FarTensor, "tolist", lambda far: [watched.waits.update(["tolist"]), far.near.tolist()][1])
        recorded = recording(monkeypatch)
        if "captured" in name:
            heads_at_fixed_shapes(monkeypatch)
        drafter = made(name, "meta:0")
        engine = Engine(Transformer(TARGET.config, moved(TARGET.weights, "meta:0")))
        asked = [
            engine.submit(
                Request(
                    prompt, sampler=sampler, seed=seed, drafter=drafter, max_new_tokens=TOKENS, return_draft_trees=True
                )
            )
            for seed, prompt in enumerate(PROMPTS[:count])
        ]
        while not all(any(step.nodes for step in text.trace.steps) for text in asked):
            engine.step()
        engine.step()
        counts = []
        while not any(text.finished for text in asked):
            before, left = watched.waits.total(), min(TOKENS - len(text.generated) for text in asked)
            engine.step()
            # A text near its end drafts fewer tokens, which are there before the others'.
            if len({text.trace.steps[-1].nodes for text in asked}) == 1 and (left >= 4 or "eagle-2" not in name):
                counts.append(watched.waits.total() - before)
        engine.run(asked)
        # One token after another of all texts goes through what was recorded for one of them.
        assert len(recorded) < 12 and bool(recorded) == ("captured" in name)
    return of(asked), counts


def written(name: str, sampler: Sampler, count: int) -> list[Any]:
    engine = Engine(TARGET)
    asked = [
        engine.submit(
            Request(
                prompt,
                sampler=sampler,
                seed=seed,
                drafter=made(name, "cpu"),
                max_new_tokens=TOKENS,
                return_draft_trees=True,
            )
        )
        for seed, prompt in enumerate(PROMPTS[:count])
    ]
    engine.run(asked)
    return of(asked)


@pytest.mark.parametrize(("name", "sampler", "passes"), CASES)
def test_a_step_waits_once_a_pass_for_all_texts(
    name: str, sampler: Sampler, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, real = list[int](), BatchedSampling.__init__

    def init(self: BatchedSampling, texts: Sequence[BatchedProcessors]) -> None:
        made.append(len(texts))
        real(self, texts)

    monkeypatch.setattr(BatchedSampling, "__init__", init)
    for count in (1, 5):
        batched_sampling.cache_clear()
        made.clear()
        found, counts = waits(name, sampler, count, monkeypatch)
        assert found == written(name, sampler, count)
        assert counts and max(counts[:-1], default=0) <= passes
        # How texts choose is made once for each number of them that are left, here and in arrays.
        assert len(made) <= 2 * count


@pytest.mark.parametrize(("name", "sampler", "passes"), OTHERS)
def test_other_heads_wait_as_often(name: str, sampler: Sampler, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found, counts = waits(name, sampler, 2, monkeypatch)
    assert found == written(name, sampler, 2) and counts and max(counts[:-1], default=0) <= passes


@pytest.mark.parametrize("policy", ["quest:budget=16", "snapkv:budget=8", "pyramid-kv:budget=8"])
def test_trees_under_a_policy_that_begins_later_are_read_level_by_level(policy: str) -> None:
    tree = "eagle-2:nodes=12,width=3,depth=3"

    def text(device: str) -> list[Any]:
        engine = Engine(Transformer(TARGET.config, moved(TARGET.weights, device)))
        drafter = CompressedCache(policy, tree_policy=tree)
        asked = Request([1, 2, 3] * 8, drafter=drafter, max_new_tokens=8, return_draft_trees=True)
        engine.run([seq := engine.submit(asked)])
        return of([seq])

    here = text("cpu")
    with Watched():
        assert text("meta:0") == here and any(here[0][1])


def test_tokens_that_are_not_those_that_were_chosen_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = waits("draft-model, chain", NUCLEUS, 2, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(Batch, "with_chosen", lambda batch, tokens: tokens)
        found, _ = waits("draft-model, chain", NUCLEUS, 2, monkeypatch)
        assert found != expected and [text for text, _ in found] == [text for text, _ in expected]
    real = noise.keys
    monkeypatch.setattr(wanted, "noise", SimpleNamespace(keys=lambda seeds, places: real(seeds, places + 1)))
    found, _ = waits("draft-model, chain", NUCLEUS, 2, monkeypatch)
    assert found != expected


def test_rows_that_are_read_ahead_and_see_others_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, counts = waits("eagle-3, tree", GREEDY, 2, monkeypatch)
    assert max(counts[:-1]) <= 2
    with monkeypatch.context() as patch:
        patch.setattr(level_choice, "Rows", lambda tokens, above, seen, *rest: Rows(tokens, above, seen | True, *rest))
        found, _ = waits("eagle-3, tree", GREEDY, 2, patch)
    assert found != expected and [text for text, _ in found] == [text for text, _ in expected]
    # What was read is found: else every level is waited for, and says the same.
    monkeypatch.setattr(Ahead, "of", lambda ahead, tokens, parents, nodes, children: None)
    found, counts = waits("eagle-3, tree", GREEDY, 2, monkeypatch)
    assert found == expected and min(counts[:-1]) > 2


@pytest.mark.parametrize("name", ["draft-model, sequoia", "eagle-3, rsd-s", "eagle-3, specinfer"])
def test_trees_that_are_drawn_with_other_noise_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = written(name, NUCLEUS, 2)
    texts = [text for text, _ in expected]
    real = noise.mixed
    shifted = SimpleNamespace(**vars(noise) | {"keys": lambda seeds, places: noise.keys(seeds, places + 1)})
    with monkeypatch.context() as patch:
        patch.setattr(level_choice, "noise", shifted)
        found, _ = waits(name, NUCLEUS, 2, patch)
    assert found != expected and [text for text, _ in found] == texts
    if "specinfer" in name:
        # Draws after the first have noise of their paths' own.
        other = SimpleNamespace(**vars(noise) | {"mixed": lambda state, word: real(state, word) + 1})
        with monkeypatch.context() as patch:
            patch.setattr(level_choice, "noise", other)
            found, _ = waits(name, NUCLEUS, 2, patch)
        assert found != expected and [text for text, _ in found] == texts
    # Trees that are not read ahead are waited for level by level, and are the same.
    monkeypatch.setattr(Ahead, "of", lambda ahead, tokens, parents, nodes, children: None)
    found, counts = waits(name, NUCLEUS, 2, monkeypatch)
    assert found == expected and max(counts) > 2


def no_chain(_: Follower, text: list[int], rows: list[Wanted]) -> Any:
    """Nothing is drawn on the device."""
    yield from ()
    return []


def test_texts_by_themselves_wait_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count can fail."""
    monkeypatch.setattr(Follower, "drawn", no_chain)
    monkeypatch.setattr(forward_request, "row_choices_of", lambda logits, bounds, wanted: [None] * len(wanted))
    found, counts = waits("draft-model, chain", GREEDY, 5, monkeypatch)
    assert found == written("draft-model, chain", GREEDY, 5) and min(counts[:-1]) >= 15


def test_what_texts_are_told_together_is_what_each_finds() -> None:
    random = np.random.default_rng(3)
    samplers = [
        GREEDY,
        NUCLEUS,
        Sampler.from_settings(temperature=1.3, top_k=7),
        Sampler.from_settings(temperature=0.9),
    ]
    engine = Engine(TARGET)
    seqs: list[Any] = [engine.submit(Request([1, 2], sampler=each, seed=seed)) for seed, each in enumerate(samplers)]
    size = TARGET.vocab_size
    for _ in range(20):
        asked, bounds = list[Wanted | None](), [0]
        for seq in seqs:
            n = int(random.integers(1, 6))
            tree = DraftTree.chain(2, random.integers(0, size, n - 1).tolist())
            ranks, draws = int(random.integers(0, 4)), bool(random.random() < 0.6)
            asked.append(Wanted.after(seq, tree, range(n), ranks=ranks, draws=draws))
            # A text may have rows before those that it wants to know of.
            bounds.append(bounds[-1] + n + int(random.integers(0, 3)))
        logits = torch.from_numpy(random.normal(0, 3, (bounds[-1], size))).float()
        for seq, each, found, last in zip(seqs, asked, row_choices_of(logits, bounds, asked), bounds[1:], strict=True):
            if each is None:
                assert found is None
                continue
            assert isinstance(found, RowChoices)
            rows = logits[last - len(each.keys) : last]
            best = rows.softmax(dim=-1).sort(dim=-1, descending=True)
            assert found.ids.shape[1] >= each.ranks
            if each.ranks:
                assert (found.ids == best.indices[:, : found.ids.shape[1]].numpy()).all()
                assert np.allclose(found.chances, best.values[:, : found.ids.shape[1]].numpy(), atol=1e-6)
            if each.processors is None:
                assert not found.picks
                continue
            assert each.processors == batched_processors(seq.request.sampler, size)
            law = seq.request.sampler.law(rows, [seq.context()] * len(rows))
            positions = [seq.position + place for place in range(len(rows))]
            assert found.picks == seq.request.sampler.pick(law, seq.request.seed, positions).tolist()


def test_only_what_is_wanted_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows whose tokens alone are wanted are not sorted, and one look at a row finds the most likely token."""
    engine, sorted_rows, real = Engine(TARGET), list[tuple[int, int]](), torch.Tensor.topk

    def topk(rows: torch.Tensor, k: int, dim: int) -> Any:
        sorted_rows.append((len(rows), k))
        return real(rows, k, dim)

    monkeypatch.setattr(torch.Tensor, "topk", topk)
    seqs: list[Any] = [engine.submit(Request([1, 2], sampler=GREEDY, seed=seed)) for seed in range(3)]
    logits, tree = torch.randn(6, TARGET.vocab_size), DraftTree.chain(2, [3])
    for ranks, expected in (((0, 0, 0), []), ((0, 1, 1), []), ((0, 1, 3), [(4, 3)]), ((3, 0, 0), [(2, 3)])):
        asked = [Wanted.after(seq, tree, range(2), ranks=each) for seq, each in zip(seqs, ranks, strict=True)]
        told = [each for each in row_choices_of(logits, [0, 2, 4, 6], asked) if each is not None]
        assert sorted_rows == expected and [len(each.ids) for each in told] == [2 * (each > 0) for each in ranks]
        assert [pick for each in told for pick in each.picks] == logits.argmax(dim=-1).tolist()
        sorted_rows.clear()
