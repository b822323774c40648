"""Policies with a trained part: LServe's gates and the gate of what is written."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from decodery.core.errors import CorruptFile, PromptError, SettingsError, UnsupportedModel
from decodery.kv_cache.lserve import LServe
from decodery.kv_cache.quest import Quest
from decodery.kv_cache.write_gate import WriteGate
from decodery.models.batch import Batch, Segment
from decodery.models.cache.attention_policy import Attention, AttentionPolicy
from decodery.models.cache.cache import KVCache
from decodery.models.trained.artifact import Artifact
from decodery.models.trained.head_gates import HeadGates
from decodery.models.trained.write_gates import WriteGates
from decodery.testing import decode, tiny_transformer, to_int8
from decodery.training.head_gates import GateRecipe, hide_keys
from decodery.training.head_gates import HeadGateTrainee as GateTrainee
from decodery.training.kind import Run
from decodery.training.one_by_one import train_beside
from decodery.training.write_gates import WriteGateRecipe
from decodery.training.write_gates import WriteGateTrainee as WriteTrainee
from tiny_models import tiny_loaded

MODEL = tiny_transformer(0)
TOKENS = np.random.default_rng(8).integers(0, 64, 62)
PROMPT = 39
ONES = [1] * (len(TOKENS) - PROMPT)
GATE = HeadGates(torch.tensor([[0.2, 0.9], [0.8, 0.1]]))


def logits(policy: AttentionPolicy | None, sizes: list[int]) -> tuple[torch.Tensor, KVCache]:
    """Of all tokens, read in passes of these sizes."""
    cache = MODEL.new_cache()
    cache.policy = policy
    found = []
    for size in sizes:
        start = cache.next_position
        found.append(MODEL.forward(Batch([Segment.chunk(TOKENS[start : start + size], cache)])).logits)
        cache.keep(range(size))
    return torch.cat(found), cache


class Served(AttentionPolicy):
    """What LServe reads, token by token after the prompt, by loops; nothing is dropped."""

    def __init__(self, method: LServe, streams: list[list[bool]]) -> None:
        self.method, self.streams = method, streams
        self.pages: dict[tuple[int, int], set[int]] = {}

    def select(self, attention: Attention) -> np.ndarray:
        mask = np.zeros((len(attention.keys), len(attention.segment), attention.seen.shape[-1]), dtype=bool)
        for row, at in enumerate(attention.segment.positions.tolist()):
            for head, streams in enumerate(self.streams[attention.layer]):
                read = self.window(at) if streams else self.chosen(attention, row, at, head)
                mask[head, row, sorted(read)] = True
        return mask

    def window(self, at: int) -> set[int]:
        last = math.ceil(self.method.window * (at + 1)) - self.method.sinks
        return {j for j in range(at + 1) if j < self.method.sinks or j > at - max(last, 1)}

    def chosen(self, attention: Attention, row: int, at: int, head: int) -> set[int]:
        method = self.method
        if at < PROMPT:
            return set(range(at + 1))
        if at == PROMPT or at % method.reuse == 0:
            worth: dict[int, float] = {}
            for page in range(at // method.page):
                parts = []
                for first in range(page * method.page, (page + 1) * method.page, method.logical):
                    keys = attention.keys[head, first : first + method.logical].numpy()
                    for query in attention.queries[row, 2 * head : 2 * head + 2].numpy():
                        parts.append(np.maximum(query * keys.min(0), query * keys.max(0)).sum())
                        assert parts[-1] >= (keys @ query).max() - 1e-9, "it bounds every key of its part"
                worth[page] = max(parts)
            count = max(method.least, math.ceil(math.ceil(method.budget * (at + 1)) / method.page))
            best = sorted(worth, key=lambda page: (-worth[page], page))[: count - 1]
            self.pages[attention.layer, head] = {*best, at // method.page}
        return {j for j in range(at + 1) if j // method.page in self.pages[attention.layer, head]}


@pytest.mark.parametrize(
    "method",
    [
        LServe(0.3, window=0.4, sinks=2, gates=GATE, page=4, logical=2, reuse=4, least=1),
        LServe(0.5, window=0.2, sinks=0, sparsity=0.25, gates=GATE, page=6, logical=3, reuse=2, least=2),
        LServe(0.2, window=0.3, sinks=1, sparsity=0.75, gates=GATE, page=4, logical=4, reuse=1, least=1),
    ],
    ids=str,
)
def test_heads_stream_or_read_pages(method: LServe) -> None:
    order = sorted((float(gate), number) for number, gate in enumerate(GATE.gates.flatten()))
    low = {number for _, number in order[: round(4 * method.sparsity)]}
    streams = [[2 * layer + head in low for head in range(2)] for layer in range(2)]
    wanted, _ = logits(Served(method, streams), [PROMPT, *ONES])
    for sizes in ([PROMPT, *ONES], [13, 26, 7, 1, 12, len(ONES) - 20]):
        found, cache = logits(method.state(MODEL, PROMPT), sizes)
        assert torch.allclose(found, wanted, atol=1e-9, rtol=0)
    plain, _ = logits(None, [PROMPT, *ONES])
    assert not torch.allclose(plain, wanted, atol=1e-3, rtol=0)
    for layer, heads in enumerate(streams):
        for head, is_streaming in enumerate(heads):
            held = int(cache.head_lengths[layer, head])
            assert held <= math.ceil(method.window * 62) + 16 if is_streaming else held == 62
    # Were pages kept for longer than they are said to be, it would be seen.
    other, _ = logits(Served(replace(method, reuse=method.page), streams), [PROMPT, *ONES])
    assert method.reuse == method.page or not torch.allclose(other, wanted, atol=1e-6, rtol=0)


def test_without_streams_and_parts_it_is_quest() -> None:
    served = LServe(0.3, sparsity=0.0, gates=GATE, page=4, logical=4, reuse=1, least=2)
    quest = Quest(0.3, page=4, dense_layers=0, least=2)
    ours, theirs, parts = (
        logits(each.state(MODEL, PROMPT), [PROMPT, *ONES])[0] for each in (served, quest, replace(served, logical=1))
    )
    assert ours.equal(theirs) and not parts.equal(theirs)


def test_gates_are_learned_from_what_streaming_changes(tmp_path: Path) -> None:
    loaded = tiny_loaded()
    texts = [np.random.default_rng(seed).integers(0, 200, 30).tolist() for seed in range(8)]
    recipe = GateRecipe(steps=4, sinks=2, recent=9, price=0.5)
    documents = hide_keys(loaded.tokenizer, texts, keys=2)
    found = train_beside(Run(loaded, tmp_path), GateTrainee(loaded, recipe), documents)
    assert found.gates.min() >= 0 and found.gates.max() <= 1 and not (found.gates == 1).all()
    assert HeadGates.load(tmp_path).gates.equal(found.gates)

    document = documents[0]
    trainee = GateTrainee(loaded, recipe)
    assert trainee.loss(document).item() == pytest.approx(0.5, abs=1e-5), "heads that read everything change nothing"
    for gates in ([[1.0, 0.0], [0.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]):
        mixed, _ = trainee.states(document, trainee.mixed(torch.tensor(gates)))
        sparsity = 1 - sum(map(sum, gates)) / 4
        method = LServe(1.0, window=11, sinks=2, sparsity=sparsity, gates=HeadGates(torch.tensor(gates)))
        cache = loaded.model.new_cache()
        cache.policy = method.state(loaded.model, len(document.tokens))
        segment = Segment.chunk(document.tokens[:-1], cache, logit_rows=document.rows.tolist())
        taken = loaded.model.forward(Batch([segment]), taps=["final_norm"]).hidden["final_norm"]
        assert torch.allclose(mixed, taken, atol=1e-4)
    text = loaded.tokenizer.decode(document.tokens.tolist())
    for word in ("secret number", loaded.tokenizer.decode(document.answers.tolist()).strip()[:5]):
        assert word in text
    with pytest.raises(PromptError, match="too few"):
        train_beside(Run(loaded, tmp_path / "few"), GateTrainee(loaded, recipe), documents[:3])
    with pytest.raises(SettingsError, match="floating point"):
        GateTrainee(replace(loaded, model=to_int8(MODEL)), recipe)


def test_what_is_written_is_stored_where_the_gate_says_so(tmp_path: Path) -> None:
    loaded = tiny_loaded()
    texts = [np.random.default_rng(seed).integers(0, 200, 40).tolist() for seed in range(8)]
    recipe = WriteGateRecipe(steps=24, layer=1, sizes=(12,), rate=0.2, lr=0.02)
    found = train_beside(Run(loaded, tmp_path), WriteTrainee(loaded, recipe), texts)
    stored = WriteTrainee(loaded, recipe).figures(texts)["stored"]
    assert abs(found.facts["validation"]["stored"] - 0.2) < 0.15 < stored - 0.2, "it stores as many as it is to"
    again = WriteGates.load(tmp_path)
    assert again.layer == 1 and all(again.tensors[name].equal(found.tensors[name]) for name in found.tensors)
    # What it learned under is what it is used under: a pass over the whole text, and token by token.
    tokens, prompt = texts[0], 10
    trainee = WriteTrainee(loaded, recipe)
    for name, tensor in trainee.tensors.items():
        tensor.data.copy_(found.tensors[name])
    choosing = trainee.choosing(tokens)
    with torch.no_grad():
        wanted = trainee.behind(tokens, choosing)
    assert choosing.stored is not None
    kept = choosing.stored.bool().numpy()
    gate = replace(found, levels=torch.linspace(-1, 1, 101))
    cache = loaded.model.new_cache()
    cache.policy = WriteGate(0.5, gate).state(loaded.model, prompt)
    rows = []
    for part in (tokens[:prompt], *([each] for each in tokens[prompt:])):
        rows.append(loaded.model.forward(Batch([Segment.chunk(part, cache)])).logits)
        cache.keep(range(len(part)))
    assert torch.allclose(torch.cat(rows)[prompt:].log_softmax(dim=-1), wanted, atol=1e-4)
    assert not kept[prompt:].all() and kept[prompt:].any(), "the gate tells tokens apart"
    assert cache.positions[1, : int(cache.lengths[1])].tolist() == np.flatnonzero(kept).tolist()
    assert int(cache.lengths[0]) == len(tokens) == cache.next_position
    whole = trainee.whole(tokens)
    assert not torch.allclose(whole, wanted, atol=1e-3), "what is not stored is missed"


def test_trained_parts_are_asked_for_and_checked(tmp_path: Path) -> None:
    prompt = TOKENS[:20].tolist()
    for name in ("lserve", "write-gate"):
        with pytest.raises(SettingsError, match=f"decodery train kv {name}"):
            decode(MODEL, [prompt], cache_policy=name)
    with pytest.raises(SettingsError, match="divide a page"):
        LServe(page=64, reuse=3)
    with pytest.raises(SettingsError, match="up to 1"):
        WriteGate(40.0)
    HeadGates(torch.rand(3, 2)).save(tmp_path / HeadGates.FILE)
    with pytest.raises(UnsupportedModel, match="another shape"):
        decode(MODEL, [prompt], cache_policy=f"lserve:gates={tmp_path}")
    HeadGates(torch.rand(2, 2), model=MODEL.fingerprint).save(tmp_path / HeadGates.FILE)
    assert decode(MODEL, [prompt], cache_policy=f"lserve:gates={tmp_path},window=8,sinks=2", max_new_tokens=3)[
        0
    ].generated
    with pytest.raises(SettingsError, match="another model"):
        decode(tiny_transformer(1), [prompt], cache_policy=f"lserve:gates={tmp_path}")
    gate = WriteGates.initial(MODEL.config, 1, (4,))
    for tensors in (
        {"gates": torch.full((2, 2), 2.0)},
        {**gate.tensors, "levels": torch.zeros(3)},
        {**gate.tensors, "levels": gate.levels, "weight.0": torch.zeros(4, 5)},
    ):
        kind = "set of head gates" if "gates" in tensors else "write gate"
        Artifact(kind, tensors, {"layer": 1}).save(tmp_path / WriteGates.FILE)
        with pytest.raises(CorruptFile):
            (HeadGates if "gates" in tensors else WriteGates).load(tmp_path / WriteGates.FILE)
