"""A text that is written out of order: a prompt, and after it positions that hold the mask token until written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from decodery.core.errors import PromptError, SettingsError
from decodery.core.trace import Trace
from decodery.models.protocol import Reader

__all__ = ["Canvas", "Checks", "Round"]


@dataclass(frozen=True, slots=True)
class Round:
    """What one pass wrote.

    Attributes:
        positions, tokens: [n].
        logprobs: [n], of the tokens when they were written, in nats.
    """

    positions: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray

    @property
    def nats(self) -> float:
        """Information that the pass wrote, in nats; the sum over all passes is that of the text, in any order."""
        return -float(self.logprobs.sum())


@dataclass
class Checks:
    """Counts of the checks that kept a canvas within a constraint.

    Attributes:
        tried: Tokens that the policy chose.
        refused: Tokens of these that were refused.
        known: Tokens accepted without a check, because the last filling contained them.
        recovered: Passes that wrote a token of a filling in place of a chosen one.
        asked: Tokens that were checked against the constraint.
    """

    tried: int = 0
    refused: int = 0
    known: int = 0
    recovered: int = 0
    asked: int = 0


@dataclass(eq=False)
class Canvas:
    """A working text.

    Attributes:
        tokens: [L] int64, the prompt and after it what is written, or the mask token.
        prompt_length: Tokens of the prompt.
        mask_id: The mask token.
        limit: Number of requested tokens; the canvas is longer where the model's last block is.
        eos_ids: End tokens.
        seed: Seed of all draws.
        written: [L] number of the pass that wrote each token, -1 in the prompt and at open positions.
        passes: Forward passes so far.
        rows: Rows that these passes computed.
        pairs: Pairs of a row and a key that attention computed, in one layer.
        experts: Experts that the passes read, over all layers of a mixture.
        rounds: The tokens that each pass wrote, in order.
        trace: Steps and cost of the passes.
        checks: Counts of the constraint's checks, None without a constraint.
    """

    tokens: np.ndarray
    prompt_length: int
    mask_id: int
    limit: int
    eos_ids: frozenset[int] = frozenset()
    seed: int = 0
    written: np.ndarray = field(init=False)
    passes: int = 0
    rows: int = 0
    pairs: int = 0
    experts: int = 0
    rounds: list[Round] = field(default_factory=list)
    trace: Trace = field(default_factory=Trace)
    checks: Checks | None = None

    def __post_init__(self) -> None:
        self.written = np.full(len(self.tokens), -1, dtype=np.int64)

    @classmethod
    def of(
        cls,
        model: Reader,
        prompt: Sequence[int],
        length: int,
        *,
        eos_ids: Sequence[int] = (),
        seed: int = 0,
    ) -> Canvas:
        """Make an empty canvas of `length` tokens after a prompt, rounded up to the model's blocks.

        Args:
            model: The model that will fill it.
            prompt: Token ids.
            length: Number of requested tokens.
            eos_ids: End tokens.
            seed: See `Canvas`.

        Raises:
            PromptError: If the prompt has invalid tokens, or prompt and canvas exceed the model's context.
            SettingsError: If the model cannot fill a canvas, or `length` is below 1.
        """
        config = model.config
        if config.causal:
            raise SettingsError(
                "this model writes from left to right: leave out diffuse, load a diffusion model, or if it was adapted "
                'to fill masks, load it with masking="mask=TOKEN"'
            )
        if config.mask_id is None:
            raise SettingsError('this model\'s files name no mask token: load it with masking="mask=TOKEN"')
        ids = np.asarray(prompt, dtype=np.int64)
        if length < 1:
            raise SettingsError(f"a canvas needs room for at least one token, not {length}")
        if len(ids) and not 0 <= ids.min() <= ids.max() < model.vocab_size:
            raise PromptError(f"the prompt has token ids outside the model's vocabulary of {model.vocab_size}")
        if (ids == config.mask_id).any():
            raise PromptError("the prompt has the mask token, which marks positions to be filled: leave it out")
        whole = len(ids) + length
        if config.block_length is not None:
            whole = -(-whole // config.block_length) * config.block_length
        if whole > config.max_positions:
            raise PromptError(
                f"a prompt of {len(ids)} tokens and a canvas of {whole - len(ids)} exceed the model's context of "
                f"{config.max_positions}: shorten one of them"
            )
        tokens = np.concatenate((ids, np.full(whole - len(ids), config.mask_id, dtype=np.int64)))
        return cls(tokens, len(ids), config.mask_id, length, frozenset(eos_ids), seed)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def masked(self) -> np.ndarray:
        """[L] bool, true at open positions."""
        found: np.ndarray = self.tokens == self.mask_id
        return found

    def open(self, start: int, end: int) -> np.ndarray:
        """[m] open positions of [start, end), ascending."""
        return start + np.flatnonzero(self.masked[start:end])

    def write(self, positions: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Write tokens of the last pass at open positions.

        Args:
            positions: [n].
            tokens: [n] ids.
            logprobs: [n] in nats.
        """
        if not self.masked[positions].all():
            raise ValueError(f"some of the positions {positions.tolist()} are written already")
        self.tokens[positions] = tokens
        self.written[positions] = self.passes - 1
        self.rounds.append(Round(positions, tokens, logprobs))

    def reopen(self, positions: np.ndarray) -> None:
        """Replace the tokens at these positions by masks."""
        self.tokens[positions], self.written[positions] = self.mask_id, -1

    def resize(self, length: int) -> None:
        """Cut or extend the canvas to `length` tokens, prompt included; new positions are open."""
        more = max(length - len(self), 0)
        self.tokens = np.concatenate((self.tokens[:length], np.full(more, self.mask_id)))
        self.written = np.concatenate((self.written[:length], np.full(more, -1)))

    @property
    def ended(self) -> bool:
        """Whether the output is final: an end token is written and no position before it is open."""
        end = self.end
        return end is not None and not self.masked[self.prompt_length : end].any()

    @property
    def end(self) -> int | None:
        """Position of the first written end token, None where there is none."""
        if not self.eos_ids:
            return None
        found = np.flatnonzero(np.isin(self.tokens[self.prompt_length :], list(self.eos_ids)))
        return self.prompt_length + int(found[0]) if len(found) else None

    @property
    def output(self) -> list[int]:
        """The tokens to return: up to and with the first end token, or up to the limit."""
        last, end = self.prompt_length + self.limit, self.end
        if end is not None:
            last = min(last, end + 1)
        return [int(token) for token in self.tokens[self.prompt_length : last]]
