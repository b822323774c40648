"""Policies that change what is stored, or read rows of their own: merging, integers, pseudo tokens, drafting."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch

from decodery.core.errors import CorruptFile, SettingsError
from decodery.kv_cache.d2o import D2O
from decodery.kv_cache.dapq import DapQ
from decodery.kv_cache.double_sparsity import DoubleSparsity
from decodery.kv_cache.h2o import H2O
from decodery.kv_cache.quantized import Block, Codes, Quantized, Storing
from decodery.models.batch import Batch, Segment
from decodery.models.cache.attention_policy import Attention, AttentionPolicy
from decodery.models.torch.attention import attend
from decodery.models.trained.artifact import Artifact
from decodery.models.trained.key_channels import KeyChannels
from decodery.speculative.drafters.compressed_cache import CompressedCache
from decodery.step.cache_policy import shared_out
from decodery.testing import check_identical, decode, tiny_transformer, to_int8
from decodery.training.key_channels import calibrate

MODEL = tiny_transformer(0)
PROMPT = np.random.default_rng(4).integers(0, 64, 30).tolist()
TEXT = np.random.default_rng(5).integers(0, 64, 22).tolist()


def test_merging_is_what_a_loop_does() -> None:
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, 9, 4, generator=generator, dtype=torch.float64)
    chosen = np.zeros((2, 9), dtype=bool)
    chosen[0, [0, 2, 5, 8]] = chosen[1, [1, 2, 3, 4]] = True
    for merge in ("softmax", "mean"):
        method = D2O(merge=merge)  # type: ignore[arg-type]
        for known in (None, np.array([0.9, -0.5])):
            found_keys, found_values, tau = method.folded(keys, values, chosen, known)
            for head in range(2):
                kept, gone = np.flatnonzero(chosen[head]), np.flatnonzero(~chosen[head])
                unit = keys[head] / keys[head].norm(dim=-1, keepdim=True)
                near = {i: max((float(unit[i] @ unit[c]), -c) for c in kept) for i in gone}
                mean = sum(u for u, _ in near.values()) / len(near)
                limit = mean if known is None else 0.7 * mean + 0.3 * known[head]
                assert tau[head] == pytest.approx(limit)
                for place, c in enumerate(kept):
                    joins = [(i, u) for i, (u, target) in near.items() if -target == c and u >= limit]
                    for part, found in ((keys[head], found_keys[head]), (values[head], found_values[head])):
                        if merge == "softmax":
                            total = sum(math.exp(u) for _, u in joins) + math.e
                            wanted = sum((math.exp(u) * part[i] for i, u in joins), math.e * part[c]) / total
                        else:
                            wanted = sum((u * part[i] for i, u in joins), part[c]) / (len(joins) + 1)
                        assert torch.allclose(found[place], wanted, atol=1e-12)


def test_what_is_like_its_target_changes_nothing() -> None:
    keys = torch.randn(1, 3, 4, dtype=torch.float64).repeat(1, 2, 1)
    chosen = np.array([[True] * 3 + [False] * 3])
    for merge in ("softmax", "mean"):
        kept_keys, kept_values, _ = D2O(merge=merge).folded(keys, 2 * keys, chosen, None)  # type: ignore[arg-type]
        assert torch.allclose(kept_keys, keys[:, :3]) and torch.allclose(kept_values, 2 * keys[:, :3])


def test_layers_share_a_budget() -> None:
    for mean, weights in ((0.3, [1.0, 1, 1]), (0.4, [8.0, 1, 1, 1]), (0.9, [1.0, 5, 5]), (1.0, [1.0, 9])):
        shares = shared_out(np.array(weights), mean)
        assert shares.mean() == pytest.approx(mean) and shares.min() >= 0.01 and shares.max() <= 1
    # Dropping alone is H2O, where layers get the same and no first tokens are safe.
    drop = D2O(0.4, merge="none", sinks=0, dense=0)
    plain, other = (decode(MODEL, [PROMPT], cache_policy=kv, max_new_tokens=1)[0] for kv in (drop, H2O(0.4)))
    assert plain.cache.view(0)[0].equal(other.cache.view(0)[0])


class Rounded(AttentionPolicy):
    """Reads everything, old tokens as their groups are rounded."""

    merges = True

    def __init__(self, method: Quantized) -> None:
        self.method = method

    def merge(self, attention: Attention) -> torch.Tensor:
        assert attention.context is not None
        context, positions = attention.context.clone(), attention.segment.positions
        for row, position in enumerate(positions.tolist()):
            keys, values = (part[:, : position + 1].clone().numpy() for part in (attention.keys, attention.values))
            size, bits = self.method.group, self.method.bits
            groups = max(position + 1 - self.method.residual, 0) // size if position >= len(PROMPT) else 0
            for part, axis in ((keys, 1), (values, 2)):
                for group in range(groups):
                    at = slice(group * size, (group + 1) * size)
                    low, high = part[:, at].min(axis, keepdims=True), part[:, at].max(axis, keepdims=True)
                    step = (high - low) / (2**bits - 1)
                    part[:, at] = low + step * np.round((part[:, at] - low) / step)
            own = attend(attention.queries[row : row + 1], *map(torch.from_numpy, (keys, values)), None, 1.0)
            context[row] = own.view(context[row].shape)
        return context


@pytest.mark.parametrize("method", [Quantized(4, 4, 6), Quantized(8, 5, 9)], ids=str)
def test_whole_numbers_are_read_as_they_are_rounded(method: Quantized) -> None:
    found = []
    for policy in (Rounded(method), method.state(MODEL, len(PROMPT)), None):
        cache = MODEL.new_cache()
        cache.policy = policy
        logits = []
        for part in (PROMPT[:11], PROMPT[11:], TEXT[:9], TEXT[9:10], TEXT[10:]):
            logits.append(MODEL.forward(Batch([Segment.chunk(part, cache)])).logits)
            cache.keep(range(len(part)))
        found.append((torch.cat(logits), cache))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-4, rtol=0)
    assert not torch.allclose(found[2][0], found[1][0], atol=1e-3, rtol=0)
    stored = method.sealed(52)
    state = found[1][1].policy
    assert found[1][1].head_lengths.tolist() == [[52 - stored] * 2] * 2
    ranges = 2 * (stored // method.group * 8 + stored) * 4
    assert state.bytes == 2 * 2 * (2 * stored * 8 * method.bits // 8 + ranges), "two layers of two heads"
    with pytest.raises(ValueError, match="cannot be cut"):
        found[1][1].truncate(3)


def test_codes_meet_the_ends_of_their_range() -> None:
    numbers = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    for bits in (4, 8):
        back = Codes.of(numbers.mT, bits).numbers().mT
        assert (back - numbers).abs().max() <= (numbers.amax(1) - numbers.amin(1)).max() / (2**bits - 1) / 2 + 1e-6
        for end, known in ((back.amax(1), numbers.amax(1)), (back.amin(1), numbers.amin(1))):
            assert torch.allclose(end, known, atol=1e-6)
    assert Codes.of(torch.ones(1, 3, 2), 8).numbers().equal(torch.ones(1, 3, 2))


@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_are_the_same_however_groups_come(bits: Literal[4, 8]) -> None:
    """So that a row reads the same bits whether its groups were stored one by one or are new to its pass."""
    state = Quantized(bits, 2, 1).state(MODEL, 1)
    assert isinstance(state, Storing)
    keys, values = torch.randn(2, 2, 150, 8, generator=torch.Generator().manual_seed(0))
    one_by_one: list[Block] = []
    for first in range(0, 150, 2):
        one_by_one = state._extended(one_by_one, keys, values, np.arange(first, first + 2))
    once = state._extended([], keys, values, np.arange(150))
    assert [block.groups for block in once] == [block.groups for block in one_by_one] == [32, 32, 11]
    queries = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1)).double()
    for one, other in zip(once, one_by_one, strict=True):
        scores = one.scores(queries)
        assert scores.equal(other.scores(queries))
        # What is computed of codes is what their numbers give.
        plain = queries @ one.keys.numbers().transpose(1, 2).flatten(2).double()
        assert torch.allclose(scores, plain, atol=1e-5)
        assert torch.allclose(one.read(plain), plain @ one.values.numbers().flatten(1, 2).double(), atol=1e-4)


class Watching(AttentionPolicy):
    observes = True

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []

    def observe(self, attention: Attention) -> None:
        assert attention.weights is not None
        self.weights.append(attention.weights)


@pytest.mark.parametrize("content", ["last", "copy", 7])
def test_pseudo_tokens_decide_and_leave_nothing(content: str | int) -> None:
    method = DapQ(12, queries=5, content=content, kernel=3, recent=2)  # type: ignore[arg-type]
    (text,) = decode(MODEL, [PROMPT], cache_policy=method, max_new_tokens=1)
    # A text of one token is finished with its prompt: a longer one is compressed.
    assert text.cache.head_lengths.tolist() == [[30, 30]] * 2
    (text,) = decode(MODEL, [PROMPT], cache_policy=method, max_new_tokens=2)
    pseudo = {"last": PROMPT[-1:] * 5, "copy": PROMPT[-5:]}.get(str(content), [7] * 5)
    cache = MODEL.new_cache()
    cache.policy = watch = Watching()
    MODEL.forward(Batch([Segment.chunk([*PROMPT, *pseudo], cache)]))
    for layer in range(2):
        kept = text.cache.view(layer)[0]
        assert kept.shape[1] == 13
        for head in range(2):
            paid = watch.weights[layer][2 * head : 2 * head + 2, 30:, :30].mean(dim=(0, 1)).numpy()
            near = {j: paid[max(j - 1, 0) : j + 2].sum() / 3 for j in range(28)}
            best = sorted(sorted(near, key=lambda j: (-near[j], j))[:10])
            assert torch.allclose(kept[head, :12], cache.view(layer)[0][head, [*best, 28, 29]], atol=1e-12)
    whole = decode(MODEL, [PROMPT], cache_policy=replace(method, budget=1.0), max_new_tokens=16)[0]
    assert whole.generated == decode(MODEL, [PROMPT], max_new_tokens=16)[0].generated


def test_a_model_drafts_for_itself_under_a_policy() -> None:
    exact = to_int8(MODEL)
    (small, full) = (
        check_identical(
            exact, [PROMPT], drafter=CompressedCache(cache_policy=kv, length=3), seeds=(0,), max_new_tokens=20
        )[0]
        for kv in ("h2o:budget=0.3", "h2o:budget=1.0")
    )
    assert full.trace.tokens_per_pass > 3.5 > small.trace.tokens_per_pass, "all that is kept is drafted right"
    with pytest.raises(SettingsError, match="pseudo tokens"):
        CompressedCache(cache_policy="dapq")


def test_channels_are_calibrated_and_kept(tmp_path: object) -> None:
    from pathlib import Path

    folder = Path(str(tmp_path))
    found = calibrate(MODEL, [PROMPT, TEXT])
    cache = MODEL.new_cache()
    cache.policy = watch = Asking()
    worth = torch.zeros(2, 2, 2, 8, dtype=torch.float64), torch.zeros(2, 2, 8, dtype=torch.float64)
    for tokens in (PROMPT, TEXT):
        cache = MODEL.new_cache()
        cache.policy = watch = Asking()
        MODEL.forward(Batch([Segment.chunk(tokens, cache)]))
        for layer, (queries, keys) in enumerate(watch.seen):
            worth[0][layer] += queries.abs().sum(0).view(2, 2, 8)
            worth[1][layer] += keys.abs().sum(1)
    both = (worth[0] * worth[1][:, :, None]).sum(2)
    pairs = both[..., :4] + both[..., 4:]
    assert found.order[..., ::2].equal(pairs.argsort(dim=-1, descending=True))
    assert found.order[..., 1::2].equal(found.order[..., ::2] + 4)
    found.save(folder / KeyChannels.FILE)
    kv = DoubleSparsity(8, calibration=str(folder), dense_layers=0)
    ours, theirs = (
        decode(MODEL, [PROMPT], cache_policy=each, max_new_tokens=8)[0] for each in (kv, replace(kv, calibration=found))
    )
    assert ours.generated == theirs.generated
    with pytest.raises(SettingsError, match="decodery train kv double-sparsity"):
        decode(MODEL, [PROMPT], cache_policy="double-sparsity")
    with pytest.raises(SettingsError, match="another model"):
        decode(tiny_transformer(1), [PROMPT], cache_policy=kv)
    Artifact("set of key channels", {"order": torch.zeros(2, 2, 8, dtype=torch.int32)}).save(folder / "bad")
    with pytest.raises(CorruptFile):
        KeyChannels.load(folder / "bad")


class Asking(AttentionPolicy):
    def __init__(self) -> None:
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def select(self, attention: Attention) -> None:
        self.seen.append((attention.queries, attention.keys))
