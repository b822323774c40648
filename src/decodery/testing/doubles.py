"""Models whose searches have closed forms: one that computes chains with a known rate of errors, and random tables."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from decodery.core.errors import SettingsError
from decodery.core.noise import draw, mix, uniform
from decodery.puzzles.alphabet import ALPHABET, END_ID, VOCABULARY
from decodery.puzzles.base import MARK
from decodery.puzzles.chain import Chain, applied
from decodery.step.scorer import Candidates, Scorer

from .models import TableModel

_NEVER = -1e9
_BEGUN = re.compile(r"(\d+)((?:[+*-]\d+)+)%(\d+)=(.*)")
_STREAM = 98


class ScriptedChain(TableModel):
    """Solves puzzles of `chain`; each step is right with probability 1 - error, else uniformly wrong.

    It goes on from its own results, right or wrong, and writes texts of one length.

    Args:
        error: Probability that a step is wrong, 0 to 1.
        operations, modulus: Of the puzzles; the modulus is at most 10, so that a result is one token.
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
        """Probability of a right text if every step is the best of m by a perfect scorer.

        It takes as many steps as m texts.
        """
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


class Tabular(TableModel):
    """A random model over few tokens, with a uniformly drawn distribution for every text.

    Texts of a fixed length can be enumerated: see `law`.

    Args:
        vocab_size: Tokens.
        length: Tokens of the longest text.
        seed: Decides the distributions.
    """

    def __init__(self, vocab_size: int = 4, length: int = 4, seed: int = 0) -> None:
        if vocab_size**length > 1 << 14:
            raise SettingsError(f"{vocab_size}^{length} texts are too many to enumerate: at most {1 << 14}")
        super().__init__(vocab_size, order=length + 64, seed=seed)
        self.length = length

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        noise = uniform(self.seed, mix(*map(int, tokens)), torch.arange(self.vocab_size, device="cpu"), stream=_STREAM)
        # Exponential numbers, normalised, are an even draw from the simplex.
        return (-noise.log()).log().log_softmax(-1)

    def law(self, prompt: Sequence[int]) -> tuple[list[tuple[int, ...]], torch.Tensor]:
        """All texts after the prompt, and their probabilities [texts] float64."""
        texts = list(itertools.product(range(self.vocab_size), repeat=self.length))
        rows = {
            begun: self.logits([*prompt, *begun])
            for at in range(self.length)
            for begun in {text[:at] for text in texts}
        }
        sums = [sum(float(rows[text[:at]][token]) for at, token in enumerate(text)) for text in texts]
        return texts, torch.tensor(sums, dtype=torch.float64, device="cpu").exp()


@dataclass(frozen=True)
class TabularReward(Scorer):
    """A number between 0 and 1 for every text and every beginning, drawn evenly by a hash of its tokens."""

    seed: int = 0

    bounds = 0.0, 1.0

    def score(self, candidates: Candidates) -> torch.Tensor:
        found = [draw(mix(self.seed, *candidates.prompt, *output), 1) for output in candidates.outputs]
        return torch.tensor(found, dtype=torch.float64, device="cpu")


def best_of_law(law: torch.Tensor, scores: torch.Tensor, n: int) -> torch.Tensor:
    """[texts] distribution of the best scored of n draws from `law`.

    F^n less what lies below, F being the scores' distribution. Of texts with equal scores the one drawn first wins, so
    that they share their chance as they share their mass.

    Args:
        law: [texts] probabilities.
        scores: [texts].
        n: Draws.
    """
    below = torch.stack([law[scores < score].sum() for score in scores])
    level = torch.stack([law[scores == score].sum() for score in scores])
    return ((below + level) ** n - below**n) * law / level
