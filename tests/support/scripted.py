"""Models whose texts are known before they are asked."""

from __future__ import annotations

import torch

from decodery.testing import TableModel


class Scripted(TableModel):
    """Says the next token of a fixed text, prompt included, whatever it reads; the last one for ever."""

    def __init__(self, text: list[int], vocab_size: int = 16) -> None:
        super().__init__(vocab_size)
        self.text = text

    def logits(self, tokens) -> torch.Tensor:
        row = torch.zeros(self.vocab_size, dtype=torch.float64)
        row[self.text[min(len(tokens), len(self.text) - 1)]] = 20.0
        return row


class Unigram(TableModel):
    """A model that ignores what it reads."""

    def logits(self, tokens) -> torch.Tensor:
        return super().logits([])
