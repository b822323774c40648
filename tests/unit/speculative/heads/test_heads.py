"""Draft heads: what they read of a text, step by step, is what they were trained on, and drafts change nothing."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from covering import covering
from decodery.core.errors import CorruptFile, SettingsError
from decodery.core.registry import methods
from decodery.core.topk import topk
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.drafts import SHIPPED
from decodery.sampling.sampler import Sampler
from decodery.speculative.drafters.eagle_3 import EAGLE3
from decodery.speculative.heads.drafter import HeadDrafter, TrainedDrafter, head_kind, head_named
from decodery.speculative.heads.grown import DraftHead, Nodes
from decodery.speculative.heads.head import Heard, TextItems, TrainedHead
from decodery.speculative.heads.parts import Parts
from decodery.speculative.heads.reading import HeadReading
from decodery.speculative.heads.recurrent import RecurrentHead
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence
from decodery.step.tree_drafter import TreeDrafter
from decodery.testing import check_identical, tiny_transformer
from decodery.testing.models import to_int8
from methods import DRAFTERS, SOURCES

TARGET = tiny_transformer(0, num_layers=4)
TRAINED = [name for name, make in DRAFTERS.items() if isinstance(make(TARGET), TrainedDrafter)]
HEADS = [name for name, make in DRAFTERS.items() if isinstance(make(TARGET), HeadDrafter)]
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
"""Long enough for every kind to read some of it and to be unrolled over the rest."""
STEPS = 3


def shaken(name: str) -> TrainedHead:
    """A head with random numbers everywhere: parts that begin as zeros or ones are put to the test as well."""
    drafter = DRAFTERS[name](TARGET)
    assert isinstance(drafter, HeadDrafter) and drafter.trained is not None
    trained, random = drafter.trained, torch.Generator().manual_seed(1)
    tensors = {
        part: tensor + 0.3 * torch.randn(tensor.shape, generator=random, dtype=tensor.dtype) / tensor.shape[-1] ** 0.5
        if tensor.is_floating_point()
        else tensor
        for part, tensor in trained.tensors.items()
    }
    return TrainedHead(trained.kind, tensors, trained.settings)


def head_of(name: str) -> DraftHead:
    return head_kind(name)(shaken(name), TARGET)


def in_int8(drafter: Drafter, vocabulary: torch.Tensor) -> TrainedDrafter:
    """The same drafter with its head in int8, speaking these tokens."""
    assert isinstance(drafter, TrainedDrafter) and drafter.trained is not None
    tensors = Parts(drafter.trained.tensors).quantized() | {"vocabulary": vocabulary}
    return replace(drafter, head=TrainedHead(drafter.trained.kind, tensors, drafter.trained.settings))


def states_of(head: DraftHead, tokens: list[int]) -> dict[int | str, torch.Tensor]:
    batch = Batch([Segment.chunk(tokens, TARGET.new_cache())])
    return TARGET.forward(batch, taps=head.taps).hidden


def read(head: DraftHead, tokens: list[int], pieces: list[int]) -> tuple[object, torch.Tensor]:
    """What a head makes of a text in pieces that end at these places: its memory, and the logits of what follows."""
    states, memory, first, logits = states_of(head, tokens), head.begin(), 0, torch.empty(0)
    for end in pieces:
        own = {tap: rows[first:end] for tap, rows in states.items()}
        logits = head.read(memory, own, torch.tensor(tokens[first + 1 : end + 1]), np.arange(first, end))
        first = end
    return memory, logits


@pytest.mark.parametrize("name", HEADS)
def test_what_is_drafted_step_by_step_is_what_training_unrolls(name: str) -> None:
    head = head_of(name)
    n = len(TEXT) - STEPS
    states = {tap: rows[None, :n] for tap, rows in states_of(head, TEXT).items()}
    guesses = head.unroll(states, torch.tensor([TEXT[1:]]), STEPS)
    for end in range(3, n + 1):
        memory, logits = read(head, TEXT, [end])
        drafted = [logits]
        for step in range(1, STEPS):
            row, mask = np.array([step - 2]), np.ones((1, step), dtype=bool)
            token = torch.tensor([TEXT[end + step]])
            drafted.append(head.grow(memory, token, row, np.array([step]), mask)[0])
        for guess, found in zip(guesses, drafted, strict=True):
            expected = head.project(guess.spoken[0, end - 1 : end])[0]
            assert float((expected - found).abs().max()) < 1e-9


@pytest.mark.parametrize("name", HEADS)
def test_what_was_read_does_not_hang_on_the_pieces(name: str) -> None:
    head, end = head_of(name), 11
    once, logits = read(head, TEXT, [end])
    for pieces in ([1, end], [4, 5, 9, end], list(range(1, end + 1))):
        memory, found = read(head, TEXT, pieces)
        assert float((found - logits).abs().max()) < 1e-9
        # What is remembered is the same as well: drafts go on from it.
        grown = [
            head.grow(each, torch.tensor([7]), np.array([-1]), np.array([1]), np.ones((1, 1), dtype=bool))
            for each in (deepcopy(once), memory)
        ]
        assert float((grown[0] - grown[1]).abs().max()) < 1e-9


@pytest.mark.parametrize(
    "spec",
    ["chimera", "clover", "dflash", "dflash:block=16", "dspark", "dspark:block=16", "hydra", "medusa", "p-eagle"],
)
def test_training_teaches_every_depth_that_is_drafted(spec: str) -> None:
    kind, shape = head_named(spec)
    tensors, settings = kind.untrained(TARGET, 0, **shape)
    head = kind(TrainedHead(kind.kind, tensors, settings), TARGET)
    assert head.unrolled(1.0) == head.reach < 20


JOINT = [name for name in HEADS if head_kind(name).joint]


@pytest.mark.parametrize("name", JOINT)
def test_texts_in_one_pass_get_what_each_gets_alone(name: str) -> None:
    """Texts of several lengths, read and drafted on side by side; a text that fails leaves the others as they were."""
    head, texts = head_of(name), [TEXT[:4], TEXT[2:], [7, 7]]

    def item(memory: object, text: list[int]) -> TextItems:
        return memory, states_of(head, text[:-1]), torch.tensor(text[1:]), np.arange(len(text) - 1)

    def nodes(memory: object, count: int) -> Nodes:
        ones = np.ones(count, dtype=np.int64)
        return Nodes(memory, torch.arange(count), -ones, ones, np.eye(count, dtype=bool))

    memories = [head.begin() for _ in texts]
    broken = (head.begin(), {tap: rows[:, :-1] for tap, rows in states_of(head, [1]).items()}, torch.tensor([2]))
    with pytest.raises(RuntimeError):
        head.read_all([*map(item, memories, texts), (*broken, np.arange(1))])
    found = head.read_all(list(map(item, memories, texts)))
    grown = head.grown(list(map(nodes, memories, (2, 1, 3))))
    for row, own, text, count in zip(found, grown, texts, (2, 1, 3), strict=True):
        alone = head.begin()
        assert float((row - head.read(*item(alone, text))).abs().max()) < 1e-9
        assert float((own - head.grow(*nodes(alone, count))).abs().max()) < 1e-9


def test_a_block_that_fails_leaves_its_text_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    head, memories = head_of("p-eagle"), [head_of("p-eagle").begin() for _ in range(2)]
    assert isinstance(head, RecurrentHead)
    item = states_of(head, TEXT[:4]), torch.tensor(TEXT[1:5]), np.arange(4)
    real, passes = head._passed, list[int]()

    def second_fails(rows: Any, *given: Any) -> Any:
        passes.append(len(rows))
        if len(passes) == 2:
            raise MemoryError
        return real(rows, *given)

    monkeypatch.setattr(head, "_passed", second_fails)
    with pytest.raises(MemoryError):
        head.read_all([(memories[0], *item)])
    found = [head.read_all([(memory, *item)]) for memory in memories]
    assert torch.equal(*found) and torch.equal(*(memory.below for memory in memories))


def test_heads_of_one_pass_for_all_texts() -> None:
    assert {"dflash", "dspark", "eagle", "eagle-3", "mtp", "p-eagle"} <= {*JOINT}


@pytest.mark.parametrize("name", HEADS)
def test_nodes_see_their_own_path_alone(name: str) -> None:
    head = head_of(name)
    # Two branches, side by side and each by itself.
    tokens, parents = np.array([TEXT[8], 7, 9, 4, 2]), np.array([-1, 0, 0, 1, 2])
    tree = DraftTree(tokens, parents)

    def reading() -> HeadReading:
        memory, logits = read(head, TEXT, [8])
        return HeadReading(head, memory, root=Heard(logits))

    found = torch.cat([reading().after(tree, [1, 2]), reading().after(tree, [3, 4])])
    for branch in ([1, 3], [2, 4]):
        alone = reading()
        chain = DraftTree.chain(TEXT[8], tokens[branch].tolist())
        for place, node in enumerate(branch, start=1):
            expected = alone.after(chain, [place])[0]
            assert float((expected - found[node - 1]).abs().max()) < 1e-9


# How a prompt is cut up is the same for all that read texts in the same way.
@pytest.mark.parametrize(("name", "chunk"), [*((name, 3) for name in HEADS), ("eagle-3", 512)])
def test_the_engine_shows_a_head_all_it_is_to_read(name: str, chunk: int) -> None:
    """After every step a head knows of the text what it would if it read all of it anew."""
    head, compared = shaken(name), 0
    drafter = type(DRAFTERS[name](TARGET))(head)

    class Watching(Engine):
        def check(self, seq: Sequence) -> None:
            nonlocal compared
            reading = deepcopy(seq.states[seq.request.drafter])
            found = reading.after(DraftTree.root(seq.last_token), [0])[0]
            _, expected = read(reading.head, seq.tokens, [len(seq.tokens) - 1])
            assert float((found - expected).abs().max()) < 1e-8
            compared += 1

    engine = Watching(TARGET, prefill_chunk=chunk)
    texts = [
        engine.submit(Request(prompt, max_new_tokens=8, drafter=drafter)) for prompt in ([1, 2, 3, 4, 5, 6, 7], [9])
    ]
    while any(not seq.finished for seq in texts):
        engine.step()
        for seq in texts:
            if seq.position and not seq.finished:
                engine.check(seq)
    assert compared > 4


@pytest.mark.parametrize("name", HEADS)
def test_int8_texts_are_those_of_plain_decoding(name: str) -> None:
    """With heads in int8 as well, as files hold them."""
    target = to_int8(tiny_transformer(0, num_layers=4))
    drafter = in_int8(DRAFTERS[name](TARGET), torch.arange(0, 64, 2, dtype=torch.int32))
    check_identical(target, [[1, 2, 3], [5] * 8], drafter=drafter, max_new_tokens=16, seeds=(0,))


@pytest.mark.parametrize("name", TRAINED)
def test_a_past_that_was_learned_changes_drafts_and_no_text(name: str) -> None:
    target = tiny_transformer(0)
    settings = {"logits_source": SOURCES["sven"](target), "max_new_tokens": 10, "seeds": (0,), "tested": "drafted"}
    check_identical(target, [[1, 2, 3]], drafter=DRAFTERS[name](target), **settings)


# One that reads its states, one that runs its layers, one that looks into its cache.
@pytest.mark.parametrize("name", ["eagle-3", "kangaroo", "longspec"])
def test_texts_of_the_embedded_model_are_those_of_plain_decoding(name: str, smollm2_int8) -> None:
    model = smollm2_int8.model
    drafter = in_int8(DRAFTERS[name](model), torch.arange(0, model.vocab_size, 8, dtype=torch.int32))
    prompt = smollm2_int8.encode("Name three rivers.")
    check_identical(model, [prompt], drafter=drafter, max_new_tokens=8, seeds=(0,), tested="drafted")


def test_a_head_is_refused_where_it_does_not_belong(tmp_path) -> None:
    trained = shaken("eagle-3")
    path = tmp_path / "head.safetensors"
    TrainedHead("eagle-3", trained.tensors, trained.settings, model="another").save(path)
    with pytest.raises(SettingsError, match="trained for another model"):
        Engine(TARGET).submit(Request([1], drafter=EAGLE3(str(path))))
    TrainedHead("medusa", trained.tensors, trained.settings).save(path)
    with pytest.raises(SettingsError, match="a head for medusa, not for eagle-3: use the drafter medusa"):
        EAGLE3(str(tmp_path))
    path.write_bytes(b"nothing")
    with pytest.raises(CorruptFile, match="train one with `decodery train head -m MODEL`"):
        EAGLE3(str(path))
    with pytest.raises(SettingsError, match="prompt-lookup has no head to train"):
        head_kind("prompt-lookup")


def whole_laws(
    self: TreeDrafter, seq: Sequence, tree: DraftTree, nodes: list[int], k: int, *, shaped: bool = True
) -> ForwardCoroutine[tuple[np.ndarray, np.ndarray]]:
    return topk((yield from self.expand(seq, tree, nodes, shaped=shaped)), k)


def whole_chain(self: TreeDrafter, seq: Sequence, drafted: list[int], length: int) -> ForwardCoroutine[DraftTree]:
    return (yield from self._chain(seq, drafted, Budget(length, length), length))


@pytest.mark.parametrize(
    ("name", "temperature", "growth"),
    covering(list(product(
        ["eagle-3", "hydra"], [0.0, 0.7, 1.0], [None, "eagle-2:nodes=9,width=3,depth=3", "fixed-tree:branching=3/2/1"]
    ))),
)  # fmt: skip
def test_trees_are_those_of_whole_distributions(
    name: str, temperature: float, growth: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, words = shaken(name), torch.arange(0, TARGET.vocab_size, 2, dtype=torch.int32)
    head = TrainedHead(name, {**trained.tensors, "vocabulary": words}, trained.settings)

    def trees(penalty: float | None) -> list[tuple[list[int], list[int]]]:
        sampler = Sampler.from_settings(temperature=temperature, repetition_penalty=penalty)
        drafter = replace(DRAFTERS[name](TARGET), head=head, tree_policy=growth)  # type: ignore[call-arg]
        engine = Engine(TARGET)
        seq = engine.submit(Request(TEXT, max_new_tokens=12, sampler=sampler, drafter=drafter, return_draft_trees=True))
        engine.run([seq])
        return [(list(step.tree.tokens), list(step.tree.parents)) for step in seq.trace.steps if step.tree]

    found = [trees(None), trees(1.3)]
    for kind in (TreeDrafter, HeadDrafter):
        monkeypatch.setattr(kind, "most_likely", whole_laws)
    monkeypatch.setattr(TreeDrafter, "_most_likely_chain", whole_chain)
    assert found == [trees(None), trees(1.3)]
    assert max(len(tokens) for tokens, _ in found[0]) > 3


def test_only_heads_that_come_with_the_package_are_said_to() -> None:
    kinds = {each.name: each for each in methods("drafter") if issubclass(each.cls, TrainedDrafter)}
    said = {name for name, each in kinds.items() if "comes with" in " ".join(each.requirements)}
    told = {name for name, each in kinds.items() if "comes along" in " ".join((each.cls.__doc__ or "").split())}
    assert said == told == {path.stem for path in SHIPPED["smollm2-draft"].glob("*.safetensors")} & set(kinds)
    assert said == {"eagle-3"}
