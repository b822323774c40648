"""What a decoder remembers of a source that an encoder has read: keys and values of cross-attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class CrossMemory:
    """Keys and values of the source's tokens, of every layer of the decoder.

    Attributes:
        data: [layers, 2 (keys, values), heads, m, head_dim].
        states: [m, hidden], the encoder's, of which they are made and others may draft. It is never written to: what
            shares it, forks of a cache above all, may keep it, and a source that grows makes a longer one.
    """

    data: torch.Tensor
    states: torch.Tensor

    @property
    def length(self) -> int:
        """Tokens of the source."""
        return self.data.shape[3]

    @property
    def bytes(self) -> int:
        return self.data.nbytes + self.states.nbytes

    def extended(self, more: CrossMemory) -> CrossMemory:
        """This memory with that of the tokens after it."""
        return CrossMemory(torch.cat([self.data, more.data], dim=3), torch.cat([self.states, more.states]))
