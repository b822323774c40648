"""A model that solves chains with a known rate of errors."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch

from decodery.core.errors import SettingsError
from decodery.testing import TableModel

from .alphabet import ALPHABET, END_ID, VOCABULARY
from .base import MARK
from .chain import Chain, applied

_NEVER = -1e9
_BEGUN = re.compile(r"(\d+)((?:[+*-]\d+)+)%(\d+)=(.*)")


class ScriptedChain(TableModel):
    """Solves puzzles of `chain`, each step right with probability 1 - error, otherwise with a uniformly wrong residue.

    It goes on from its own results, right or wrong, and writes texts of one length. operations, modulus: of the
    puzzles; the modulus is at most 10, so that a result is one token.
    """

    def __init__(self, error: float, operations: int, modulus: int = 10) -> None:
        if not 0 <= error <= 1 or not 2 <= modulus <= 10:
            raise SettingsError("a scripted chain needs an error between 0 and 1, and a modulus from 2 to 10")
        super().__init__(VOCABULARY)
        self.error, self.puzzle = error, Chain(operations, modulus)

    def solves(self, n: int = 1) -> float:
        """The chance that one of n texts is right."""
        return 1 - (1 - (1 - self.error) ** self.puzzle.operations) ** n

    def solves_by_steps(self, m: int) -> float:
        """The chance that the text is right of which every step is the best of m, by a scorer that knows: as many steps
        are written as for m texts."""
        return (1 - self.error**m) ** self.puzzle.operations

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        text = "".join(ALPHABET[token] for token in tokens if token < END_ID)
        begun = _BEGUN.fullmatch(text)
        row = torch.full((self.vocab_size,), _NEVER, dtype=torch.float64, device="cpu")
        if begun is None or tokens[-1] == END_ID:
            row[END_ID] = 0.0
            return row
        value, written, modulus = int(begun[1]), begun[4], self.puzzle.modulus
        for sign, operand in re.findall(r"([+*-])(\d+)", begun[2]):
            head = f"{value}{sign}{operand}="
            if len(written) < len(head):
                row[ALPHABET.index(head[len(written)])] = 0.0
                return row
            right, written = applied(value, sign, int(operand), modulus), written[len(head) :]
            if not written:
                row[:modulus] = math.log(self.error / (modulus - 1)) if self.error else _NEVER
                row[right] = math.log(1 - self.error) if self.error < 1 else _NEVER
                return row
            if len(written) == 1:
                row[ALPHABET.index(self.puzzle.delimiter)] = 0.0
                return row
            value, written = int(written[0]), written[2:]
        tail = f"{MARK}{value}"
        row[ALPHABET.index(tail[len(written)]) if len(written) < len(tail) else END_ID] = 0.0
        return row
