"""Whether a model of `transformers` reads rows after a cache as it reads them all anew, tried on random tokens.

Models differ in how they take positions, masks and caches, and none says so: a window that counts slots of the cache is
right for every chain and wrong for a tree, whose siblings stand in slots of their own at one position. So each model is
put to the test before its first text. Chunks and single tokens must give what one plain call gives, after more tokens
than the longest window of at most 512; a tree must give what its paths give as chains. What rows depend on is asked of
the gradients: exact zeros in any precision, also after longer windows, whose slots are filled with nothing.

It reads about twice as many tokens as that window and 150 more, at most 1300, and differentiates three passes of eight
rows per window. Windows that a cache cannot exceed in a quarter of the weights' memory are not
tried: those models decode chains alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicLayer

from decodery.core.errors import UnsupportedModel

from ..batch import Segment
from ..cache.cache import KVCache
from .adapter_call import INSTEAD, ModelCalls
from .adapter_shapes import windows_of

if TYPE_CHECKING:
    from .adapter_rows import RowMemory

_CONTEXT, _LONGEST, _MARGIN = 32, 512, 24
_FREE_BYTES = 1 << 28
"""Memory that slots may take in any case."""
_CHUNKS = (1, 1, 5, 1, 3)
"""Rows of the passes after the first chunk, whose logits are compared."""
_PARENTS = (-1, 0, 0, 1, 2, 2, 5, 3)
LIMITS = {torch.float32: 1e-3, torch.float64: 1e-3}
"""How far rows may be off in high precision."""
_COARSE_LIMIT = 0.05


def may_branch(model: RowMemory) -> bool:
    """Whether rows of a pass may branch; chains are right where this returns at all.

    Raises:
        UnsupportedModel: If a chain after a cache gives other logits than all of its tokens read anew.
    """
    trial, name = _Trial(model), model.calls.name
    if not trial.chains_agree():
        raise UnsupportedModel(f"{name} does not read tokens after a cache as it reads them all at once: {INSTEAD}")
    branches = trial.branches_agree(model.new_cache()) and trial.branches_agree(trial.cache)
    for slots in trial.contexts:
        if not trial.has_memory(slots):
            branches = False
            continue
        chain = trial.sees(slots)
        if not torch.equal(chain, trial.sees(slots, masked=False)):
            raise UnsupportedModel(f"{name} does not read {slots} tokens as its configuration says: {INSTEAD}")
        branches = branches and trial.branches_see(slots, chain)
    return branches


class _Trial:
    """Random tokens, always the same ones, and a cache that comes to hold them.

    contexts: numbers of slots to look after, one of them beyond each window that a text can exceed.
    """

    def __init__(self, model: RowMemory) -> None:
        self.model = model
        most = model.config.max_positions - len(_PARENTS)
        self.contexts = sorted({min(slots, most) for slots in _contexts(model.calls, most)})
        length = max(slots for slots in self.contexts if slots <= _LONGEST + _MARGIN)
        drawn = random_tokens(model.calls, length + len(_PARENTS))
        self.tokens, self.nodes = drawn[:length], drawn[length:]
        self.mask = np.eye(len(_PARENTS), dtype=bool)
        for node, parent in enumerate(_PARENTS[1:], start=1):
            self.mask[node] |= self.mask[parent]
        self.depths = self.mask.sum(axis=1) - 1
        self.cache = model.new_cache()

    def chains_agree(self) -> bool:
        """Whether chunks and single tokens give what a plain call gives; the cache holds all tokens then."""
        first = len(self.tokens) - sum(_CHUNKS)
        rows = range(first - 1, len(self.tokens))
        got = []
        for size in (first, *_CHUNKS):
            start = self.cache.next_position
            wanted = None if start else [size - 1]
            got.append(self.model.run(Segment.chunk(self.tokens[start : start + size], self.cache, wanted)))
            self.cache.keep(range(size))
        return self._begins_alike() and self._alike(torch.cat(got), self.model.calls.run_anew(self.tokens, rows))

    def _begins_alike(self) -> bool:
        """Whether positions begin where ours do, which shows best in a pass that is the same in all else."""
        text = self.tokens[:_CONTEXT]
        places = np.arange(len(text)), None
        ours, theirs = (self.model.calls.run_anew(text, [len(text) - 1], positions=each) for each in places)
        return bool((ours - theirs).abs().max() <= 1e-2)

    def branches_agree(self, cache: KVCache) -> bool:
        """Whether the nodes of a tree give what their paths give, read as chains after the same cache."""
        got = self.model.run(self._tree(cache))
        apart = [node for node, depth in enumerate(self.depths.tolist()) if depth < node]
        paths = [Segment.chunk(self.nodes[self.mask[node]], cache, [int(self.depths[node])]) for node in apart]
        alone = [self.model.run(path) for path in paths]
        cache.keep([])
        return self._alike(got[apart], torch.cat(alone))

    def branches_see(self, slots: int, chain: torch.Tensor) -> bool:
        """Whether nodes depend on the slots that a chain's rows of their depths do, and on their own path alone."""
        tree = self.sees(slots, branching=True)
        own, n = torch.from_numpy(self.mask), len(self.mask)
        return torch.equal(tree, torch.cat((own, chain[torch.from_numpy(self.depths), n:]), dim=1))

    def has_memory(self, slots: int) -> bool:
        """Whether so many slots are little beside the weights."""
        weights = sum(weight.nbytes for weight in self.model.calls.hf_model.parameters())
        # Models repeat keys and values for all heads that share them.
        return slots * self.cache.slot_bytes * self.model.copies <= max(_FREE_BYTES, weights // 4)

    @torch.enable_grad()
    def sees(self, slots: int, *, branching: bool = False, masked: bool = True) -> torch.Tensor:
        """What rows depend on: [n, n + layers * slots] bool, the rows of the pass and every layer's slots before it.

        The rows are the tree that is tried, or a chain of its nodes. masked: with our mask, not the model's own.
        """
        model = self.model
        # It stands for slots of all layers, and holds none of them.
        stand_in = KVCache(1, 1, 1)
        stand_in.reserve(np.arange(slots))
        stand_in.wrote([0])
        stand_in.keep(range(slots))
        segment = self._tree(stand_in) if branching else Segment.chunk(self.nodes, stand_in)
        stand_in.reserve(segment.positions)
        rows = model.calls.embed(torch.from_numpy(self.nodes).to(model.calls.device)).detach().requires_grad_()
        pairs = model.no_rows(slots)
        values = [given.requires_grad_() for _, given in pairs]
        layers = Cache(layers=[_Given(keys, given) for keys, given in pairs])
        logits = model.call(segment, stand_in, layers, rows, masked=masked)
        weights = torch.from_numpy(np.random.default_rng(1).standard_normal(logits.shape[1])).to(logits)
        found = []
        for outcome in (logits * weights).sum(dim=-1):
            slopes = torch.autograd.grad(outcome, [rows, *values], retain_graph=True, allow_unused=True)
            read = [
                torch.zeros(slots, dtype=torch.float32, device="cpu")
                if slope is None
                else slope[0].abs().sum(dim=(0, 2))
                for slope in slopes[1:]
            ]
            found.append(torch.cat([slopes[0].abs().sum(dim=-1), *(part.to(slopes[0]) for part in read)]) > 0)
        return torch.stack(found).cpu()

    def _tree(self, cache: KVCache) -> Segment:
        return Segment(cache.next_position + self.depths, self.nodes, mask=self.mask, cache=cache)

    def _alike(self, got: torch.Tensor, wanted: torch.Tensor) -> bool:
        return alike(got, wanted, self.model.calls.dtype)


def distances(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """How far rows of logits [n, vocab] are from others, [n], relative to these."""
    # What a model rules out altogether would hide all else.
    said = (wanted > -1e4) & (wanted < 1e4)
    return ((got - wanted) * said).nan_to_num(torch.inf).norm(dim=-1) / (wanted * said).norm(dim=-1)


def alike(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether rows of logits [n, vocab] are the same but for rounding.

    In low precision that can send single rows of a mixture to another expert, so that most rows have to do.

    Args:
        got, wanted: Rows of logits.
        dtype: What the model computes in.
    """
    far, limit = distances(got, wanted), LIMITS.get(dtype)
    return bool(far.median() <= _COARSE_LIMIT) if limit is None else bool(far.max() <= limit)


def random_tokens(calls: ModelCalls, n: int) -> np.ndarray:
    """Always the same random ids [n] of text: none that a configuration names, as it does those of images."""
    config = calls.hf_model.config
    named = {**config.to_dict(), **config.get_text_config(decoder=True).to_dict()}
    special = {value for name, value in named.items() if "token_i" in name and isinstance(value, int)}
    size = min(calls.hf_model.get_input_embeddings().weight.shape[0], config.get_text_config(decoder=True).vocab_size)
    text = np.setdiff1d(np.arange(size), [*special])
    return np.random.default_rng(0).choice(text, n)


def trial_length(calls: ModelCalls) -> int:
    """More tokens than the longest window or period of at most `_LONGEST`."""
    return max(slots for slots in _contexts(calls, 1 << 30, periods=True) if slots <= _LONGEST + _MARGIN)


def _contexts(calls: ModelCalls, most: int, *, periods: bool = False) -> set[int]:
    """Numbers of tokens beyond each window that a text of so many can exceed."""
    windows = windows_of(calls.hf_model.config.get_text_config(decoder=True), periods=periods)
    return {_CONTEXT, *(window + _MARGIN for window in windows if window < most)}


class _Given(DynamicLayer):
    """A layer of a cache that holds these keys and values, [1, kv_heads, slots, head_dim] each."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
