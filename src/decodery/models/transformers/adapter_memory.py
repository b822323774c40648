"""How a model of `transformers` is run: with rows of keys and values, with snapshots of its state, or read anew.

Each way is tried on random tokens, the one that allows most first. A way counts if chunks, single tokens and what
follows a rejected draft have the logits of one plain call over the whole text.
"""

from __future__ import annotations

import numpy as np
import torch

from decodery.core.errors import UnsupportedModel

from ..batch import Segment
from .adapter_call import INSTEAD, ModelCalls
from .adapter_rows import RowMemory
from .adapter_shapes import text_config
from .adapter_states import StateMemory, TokenMemory
from .adapter_trial import LIMITS, alike, distances, may_branch, random_tokens, trial_length

_CHUNKS = (1, 1, 5, 1, 3)
"""Rows of the passes after the first chunk."""
_KEPT = (1, 1, 2, 1, 3)
"""How many of them are accepted."""
_NOISE = 0.02
"""How far logits of chunks in low precision may be off in any case."""


def choose_memory(calls: ModelCalls) -> RowMemory | TokenMemory:
    """The way to run a model that allows most.

    Args:
        calls: The model.

    Raises:
        UnsupportedModel: If its logits change from call to call, or with the tokens that follow.
    """
    for windowed in (True, False):
        try:
            rows = RowMemory(calls, windowed=windowed)
            rows.trees = may_branch(rows)
            return rows
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception:  # whatever a model's own code raises, as it is tried, means that it cannot be run so
            continue
    trial = _Trial(calls)
    for placed in (False, True) if "position_ids" in calls.accepts else (False,):
        for chunks in (True, False):
            if trial.holds(placed=placed, chunks=chunks):
                return StateMemory(calls, trial.config, placed=placed, chunks=chunks)
    return TokenMemory(calls, trial.config)


class _Trial:
    """A random text and its logits by plain calls.

    Raises:
        UnsupportedModel: If these are no logits to compare with.
    """

    def __init__(self, calls: ModelCalls) -> None:
        self.calls, name = calls, calls.name
        try:
            probe = calls.run_anew(random_tokens(calls, 2), [1])
            self.config = text_config(calls.hf_model, probe.shape[-1])
            most = min(trial_length(calls), self.config.max_positions - 2)
            self.tokens = random_tokens(calls, most)
            self.first = most - sum(_KEPT)
            self.whole = self._anew(most)
            again, begun = self._anew(most), [self._anew(n)[-1:] for n in (self.first, self.first + 2)]
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            raise UnsupportedModel(f"{name} fails where it reads a text ({what}): {INSTEAD}") from error
        if not alike(again, self.whole, calls.dtype):
            raise UnsupportedModel(f"{name} gives other logits each time it reads the same tokens: {INSTEAD}")
        if not alike(torch.cat(begun), self.whole[[0, 2]], calls.dtype):
            raise UnsupportedModel(
                f"{name} gives a token other logits when others follow it, as models that are not causal and experts "
                f"that drop tokens do: {INSTEAD}"
            )

    def _anew(self, n: int) -> torch.Tensor:
        """Logits of the first n tokens, from the end of the first chunk on."""
        return self.calls.run_anew(self.tokens[:n], range(self.first - 1, n))

    def holds(self, *, placed: bool, chunks: bool) -> bool:
        """Whether passes after snapshots have the logits of a plain call."""
        got = self._read(placed=placed, chunks=chunks)
        if got is None or not alike(got, self.whole, self.calls.dtype):
            return False
        if not chunks or self.calls.dtype in LIMITS:
            return True
        # Rounding in low precision would hide that a chunk leaves part of a state out, single tokens do not.
        single = self._read(placed=placed, chunks=False)
        noise = 0.0 if single is None else 2 * float(distances(single, self.whole).max())
        return float(distances(got, self.whole).max()) <= max(noise, _NOISE)

    def _read(self, *, placed: bool, chunks: bool) -> torch.Tensor | None:
        """The logits of `whole` by passes after snapshots; None where these fail."""
        try:
            memory = StateMemory(self.calls, self.config, placed=placed, chunks=chunks)
            cache, other, got = memory.new_cache(), memory.new_cache(), []
            for size, kept in zip((self.first, *_CHUNKS), (self.first, *_KEPT), strict=True):
                start = cache.next_position
                drafted = np.concatenate([self.tokens[start : start + kept], self.tokens[: size - kept]])
                rows = memory.run(Segment.chunk(drafted, cache))
                got.append(rows[:kept] if start else rows[kept - 1 : kept])
                cache.keep(range(kept))
                # A model that keeps something outside of its cache would mix the texts up.
                memory.run(Segment.chunk(self.tokens[: 2 + len(got)], other))
                other.keep(range(2 + len(got)))
            return torch.cat(got)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception:  # as above
            return None
