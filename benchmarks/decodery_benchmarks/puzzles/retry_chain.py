"""Chained arithmetic with slips that are taken back: the more of them, the more likely one was overlooked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

from .base import MARK
from .chain import Chain, applied, worked

_SLIPS = (0.0, 0.1, 0.3)
"""How likely a step is wrong at first; a text keeps to one of these."""
_NOTICED = 0.8
_RETRACTED = re.compile(r"[^;!]*!")


@dataclass(frozen=True)
class RetryChain(Chain):
    """`chain` whose texts sometimes hold a wrong step, `!`, and the right one: `7*3=2!7*3=1;`.

    Texts to learn from slip at different rates, and overlook one slip in five: length and `!` then tell of errors.
    """

    @property
    def spec(self) -> str:
        return "retry-" + super().spec

    @property
    def length(self) -> int:
        return 2 * super().length

    def solve(self, prompt: str, random: Random) -> str:
        steps, modulus = worked(prompt)
        rate, text, value = random.choice(_SLIPS), "", steps[0][0]
        for _, sign, operand, _ in steps:
            begun, result = f"{value}{sign}{operand}=", applied(value, sign, operand, modulus)
            if random.random() < rate:
                slip = (result + random.randrange(1, modulus)) % modulus
                if random.random() < _NOTICED:
                    text += f"{begun}{slip}!"
                else:
                    result = slip
            text += f"{begun}{result};"
            value = result
        return f"{text}{MARK}{value}"

    def verify(self, prompt: str, text: str) -> bool:
        return super().verify(prompt, _RETRACTED.sub("", text))

    def open(self, prompt: str, text: str) -> bool:
        kept = _RETRACTED.sub("", text)
        if super().open(prompt, kept):
            return True
        # A step that is not ended yet may still be taken back.
        ended, _, last = kept.rpartition(self.delimiter)
        return MARK not in last and super().open(prompt, f"{ended}{self.delimiter}" if ended else "")
