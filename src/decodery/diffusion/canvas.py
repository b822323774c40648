"""A text that is written out of order: a prompt, and places after it that hold the mask token until then."""

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
        """How much information the pass wrote: over all of them it is that of the text, whatever the order."""
        return -float(self.logprobs.sum())


@dataclass
class Checks:
    """What it took to hold a canvas to a constraint.

    Attributes:
        tried: Tokens that were to be written.
        refused: Of these.
        known: Tokens that needed no look, because the last filling had them.
        recovered: Passes that wrote a token of a filling in place of one that was wanted.
        asked: Tokens that the constraint was asked about.
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
        limit: How many tokens are wanted; the canvas may be longer, where a model's last block is.
        eos_ids: End tokens.
        seed: Decides what is left to chance.
        written: [L] the number of the pass that wrote each token, -1 in the prompt and where nothing is written yet.
        passes: So far.
        rows: Fed to the model in them.
        pairs: Of rows and keys that attention compared, in one layer.
        experts: That passes read, of all layers of a mixture together.
        rounds: What was written, in order.
        trace: What its passes took.
        checks: What a constraint took, None without one.
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
        """An empty canvas of `length` tokens after a prompt, or to the end of the model's last block.

        Args:
            model: What will fill it.
            prompt: Token ids.
            length: Tokens that are wanted.
            eos_ids: End tokens.
            seed: See `Canvas`.

        Raises:
            PromptError, SettingsError: If the model cannot fill it.
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
            raise PromptError("the prompt holds the mask token, which stands for what is to be written: leave it out")
        whole = len(ids) + length
        if config.block_length is not None:
            whole = -(-whole // config.block_length) * config.block_length
        if whole > config.max_positions:
            raise PromptError(
                f"a prompt of {len(ids)} tokens and a canvas of {whole - len(ids)} go beyond the model's context of "
                f"{config.max_positions}: shorten one of them"
            )
        tokens = np.concatenate((ids, np.full(whole - len(ids), config.mask_id, dtype=np.int64)))
        return cls(tokens, len(ids), config.mask_id, length, frozenset(eos_ids), seed)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def masked(self) -> np.ndarray:
        """[L] bool: where nothing is written yet."""
        found: np.ndarray = self.tokens == self.mask_id
        return found

    def open(self, start: int, end: int) -> np.ndarray:
        """[m] positions of [start, end) where nothing is written yet, ascending."""
        return start + np.flatnonzero(self.masked[start:end])

    def write(self, positions: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Fill places that are open, in the pass that was the last.

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
        """Take back what is written at these positions."""
        self.tokens[positions], self.written[positions] = self.mask_id, -1

    def resize(self, length: int) -> None:
        """Make the canvas so many tokens long, prompt included: cut, or open at its new end."""
        more = max(length - len(self), 0)
        self.tokens = np.concatenate((self.tokens[:length], np.full(more, self.mask_id)))
        self.written = np.concatenate((self.written[:length], np.full(more, -1)))

    @property
    def ended(self) -> bool:
        """Whether the result is final: an end is written and nothing before it is open."""
        end = self.end
        return end is not None and not self.masked[self.prompt_length : end].any()

    @property
    def end(self) -> int | None:
        """The position of the first end token that is written, None where there is none."""
        if not self.eos_ids:
            return None
        found = np.flatnonzero(np.isin(self.tokens[self.prompt_length :], list(self.eos_ids)))
        return self.prompt_length + int(found[0]) if len(found) else None

    @property
    def output(self) -> list[int]:
        """What is to be returned: up to the first end token and with it, or up to the limit."""
        last, end = self.prompt_length + self.limit, self.end
        if end is not None:
            last = min(last, end + 1)
        return [int(token) for token in self.tokens[self.prompt_length : last]]
