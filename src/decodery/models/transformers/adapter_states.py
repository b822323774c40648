"""Models of `transformers` that keep a state of their own: recurrent, convolution, latent, indexed, or nothing at all.

The cache of a text holds its tokens. What the model makes of them follows from the tokens, so that it is kept beside
them as snapshots: copies of the model's own cache after some of the tokens. A pass goes on from the longest snapshot
that fits and runs the tokens after it once more; whatever was rejected, cut or forked, the state is that of the text.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from decodery.core.errors import UnsupportedModel

from ..batch import Segment
from ..cache.cache import KVCache
from ..config import ModelConfig
from ..hooks import Hooks
from .adapter_call import INSTEAD, ModelCalls
from .adapter_shapes import STATE_NAMES, TOKEN_WIDTH

_REPLAYED = 16
"""Accepted tokens that are run again with the next rows; more of them take a pass of their own."""
_ANEW = 16
"""One call over so many rows costs less than single calls over one row each."""
_APPENDING = (DynamicLayer, DynamicSlidingWindowLayer)
"""Layers that make new tensors of keys and values when they grow, so that copies may share them."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """What a model keeps after some tokens.

    Attributes:
        tokens: [n] ids.
        state: The model's own cache, which stays unchanged.
        nbytes: Of its tensors.
    """

    tokens: np.ndarray
    state: Any
    nbytes: int

    def begins(self, tokens: np.ndarray) -> bool:
        """Whether a text begins with its tokens."""
        n = len(self.tokens)
        return n <= len(tokens) and bool((self.tokens == tokens[:n]).all())


class TokenMemory:
    """The cache of a text holds its tokens, and each pass makes of them what it needs; rows are chains.

    This class keeps nothing else: every pass reads the whole text.

    Args:
        calls: The model.
        config: Its sizes.
        placed: Whether the model is given positions, or counts them itself.
    """

    trees = False
    chains = True
    keeps = "nothing"

    def __init__(self, calls: ModelCalls, config: ModelConfig, *, placed: bool = False) -> None:
        self.calls, self.config, self.placed = calls, config, placed

    def new_cache(self) -> KVCache:
        return KVCache(1, 1, TOKEN_WIDTH, dtype=torch.float32, device="cpu")

    @torch.no_grad()
    def run(self, segment: Segment, hooks: Hooks | None = None) -> torch.Tensor:
        """Logits [m, vocab] float32 of the requested rows of one segment."""
        self._refuse(segment)
        cache = self.new_cache() if segment.cache is None else segment.cache
        cache.reserve(segment.positions, segment.retained)
        tokens, n = torch.as_tensor(segment.tokens), len(segment)
        rows = torch.zeros(n, 1, TOKEN_WIDTH, dtype=torch.float32, device="cpu")
        rows[:, 0, 0] = tokens
        cache.write(0, rows, torch.zeros_like(rows))
        known = cache.view(0)[0][0, :, 0].numpy().astype(np.int64)
        if not np.array_equal(segment.positions, np.arange(len(known) - n, len(known))):
            raise UnsupportedModel(
                f"{self.calls.name} reads its tokens in order, and positions {segment.positions} "
                f"do not follow {len(known) - n} tokens: use drafters that propose chains"
            )
        wanted = range(n) if segment.logit_rows is None else segment.logit_rows
        with nullcontext() if hooks is None else self.calls.recording(hooks, n):
            return self._logits(cache, known, n, [int(row) for row in wanted])

    def _logits(self, cache: KVCache, tokens: np.ndarray, n: int, wanted: Sequence[int]) -> torch.Tensor:
        """Logits of some of the last `n` rows of a text."""
        first = len(tokens) - n
        positions = np.arange(len(tokens)) if self.placed else None
        return self.calls.run_anew(tokens, [first + row for row in wanted], positions=positions)

    def _refuse(self, segment: Segment) -> None:
        cache, name = segment.cache, self.calls.name
        if segment.states is not None:
            raise UnsupportedModel(
                f"{name} keeps {self.keeps} of its own, which embeddings cannot stand in: give tokens"
            )
        if cache is not None and (cache.evicted or cache.policy is not None or cache.prefix):
            raise UnsupportedModel(f"{name} keeps {self.keeps} of its own: leave cache policies and prefixes out")


class StateMemory(TokenMemory):
    """A `TokenMemory` that goes on from snapshots of what the model itself keeps.

    Args:
        calls, config, placed: As there.
        chunks: Whether a call may read several tokens after a state, or one at a time.
    """

    keeps = "states"

    def __init__(self, calls: ModelCalls, config: ModelConfig, *, placed: bool, chunks: bool) -> None:
        super().__init__(calls, config, placed=placed)
        self.chains = chunks
        self._argument = next((name for name in STATE_NAMES if name in calls.accepts), "")
        if not self._argument or not calls.takes_use_cache:
            raise UnsupportedModel(f"{calls.name} takes no cache: {INSTEAD}")

    def _logits(self, cache: KVCache, tokens: np.ndarray, n: int, wanted: Sequence[int]) -> torch.Tensor:
        first, known = len(tokens) - n, cache.states.known.get(0, [])
        base = self._longest(known, tokens[:first])
        content = self._longest(known, tokens[: cache.length])
        begins = 0 if base is None else len(base.tokens)
        if first - begins > (_REPLAYED if self.chains else 0):
            base = self._after(base, tokens[:first], [])[1]
            begins = first
        logits, after = self._after(base, tokens, [first + row - begins for row in wanted])
        kept = {id(each): each for each in (content, base, after) if each is not None}
        cache.states.known[0] = [(len(each.tokens), each) for each in kept.values()]
        return logits

    def _after(self, base: Snapshot | None, tokens: np.ndarray, wanted: Sequence[int]) -> tuple[torch.Tensor, Snapshot]:
        """Logits of some rows after a snapshot, counted from it, and what the model keeps after the tokens."""
        begins = 0 if base is None else len(base.tokens)
        n, state = len(tokens) - begins, None if base is None else _copied(base.state)
        if base is None or self.chains:
            logits, state = self._call(state, tokens[begins:], begins, wanted)
        elif len(tokens) < _ANEW * n:
            return self._after(None, tokens, [begins + row for row in wanted])
        else:
            found = []
            for at in range(begins, len(tokens)):
                row, state = self._call(state, tokens[at : at + 1], at, [0])
                found.append(row)
            logits = torch.cat(found)[list(wanted)]
        return logits, Snapshot(tokens.copy(), state, sum(each.nbytes for each in _tensors(state, set())))

    def _call(self, state: Any, tokens: np.ndarray, start: int, wanted: Sequence[int]) -> tuple[torch.Tensor, Any]:
        given: dict[str, Any] = {"input_ids": self.calls.ids(tokens), "use_cache": True}
        if state is not None:
            given[self._argument] = state
        if self.placed:
            given["position_ids"] = self.calls.positions(np.arange(start, start + len(tokens)))
        logits, output = self.calls.logits(given, wanted)
        after = next((found for name in STATE_NAMES if (found := getattr(output, name, None)) is not None), None)
        if after is None:
            raise UnsupportedModel(f"{self.calls.name} returns no cache: {INSTEAD}")
        return logits, after

    @staticmethod
    def _longest(known: Sequence[tuple[int, Any]], tokens: np.ndarray) -> Snapshot | None:
        """The snapshot after most tokens of those that a text begins with."""
        fit = [each for _, each in known if isinstance(each, Snapshot) and each.begins(tokens)]
        return max(fit, key=lambda each: len(each.tokens), default=None)


def _copied(state: Any) -> Any:
    """A copy of what a model keeps, which may be changed; keys and values that are only appended to are shared."""
    shared: dict[int, Any] = {}
    for layer in getattr(state, "layers", ()):
        if type(layer) in _APPENDING:
            shared |= {id(each): each for each in (layer.keys, layer.values) if each is not None}
    return copy.deepcopy(state, shared)


def _tensors(state: Any, met: set[int]) -> Iterator[torch.Tensor]:
    """All tensors in what a model keeps, each once."""
    if id(state) in met:
        return
    met.add(id(state))
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for each in state.values():
            yield from _tensors(each, met)
    elif isinstance(state, list | tuple):
        for each in state:
            yield from _tensors(each, met)
    elif hasattr(state, "__dict__"):
        yield from _tensors(vars(state), met)
