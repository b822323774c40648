"""Minimum entropy coupling: a message decides which of the likely tokens are written, and can be read back."""

from __future__ import annotations

import hashlib
from copy import copy
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from decodery.core.errors import PromptError, SettingsError
from decodery.core.noise import COUPLE, draw
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.core.threads import one_thread
from decodery.core.topk import topk
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Segment
from decodery.models.loaders.store import Progress, silent
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.sampling.constraint import constrained
from decodery.sampling.logits_processor import require_number
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence

from .base import Branches, Search, choose
from .belief import Belief, join, split

__all__ = ["DecodedMessage"]

_READ_ROWS = 64
"""Rows of a pass that reads, each with the logits of the whole vocabulary."""


@dataclass(frozen=True)
class DecodedMessage:
    """A message read from a text.

    Attributes:
        certainty: The probability that all of it is right.
    """

    message: bytes
    certainty: float


@register(
    "coupling",
    paper="Minimum Entropy Coupling with Bottleneck (2024)",
    guarantee="averaged over all messages, tokens follow the model's distribution within the top_k most likely",
    texts=("message", "key"),
)
@dataclass(frozen=True)
class Coupling(Search):
    """Writes a text whose choice of tokens carries a message.

    Who has the same model and prompt reads it back. Both sides must share the model, its precision, the prompt, masks
    and all settings here.

    Attributes:
        message: Bytes, or a text (UTF-8). Per token, the block of the message that is least settled is coupled with the
            distribution of the next token so that their joint entropy is small; both sides keep the same posterior over
            every block.
        key: A shared secret from which a pad is made that makes any message look uniform, to be used for one message
            only; a message that is not uniform shifts the distribution of the text.
        temperature, top_k: Shape the distribution.
        bits: Size of a block.
        merge: Let tokens that would tell the same carry a second block.
        rate: Share of a block's bits that may act, by the bottleneck map: compressed "once", only that much of the
            message is sent and it is read with errors; per "step", no token tells more and it takes more of them.
        compress: Whether `rate` limits the message "once" or each "step".
        ending: "complete" stops where the message is settled (and what a constraint asks for is complete), "eos" writes
            on to the end. End tokens are not written before the message is settled.
        tokenizer: With it, as `LLM.search` sets it, only tokens are written that a reader of the text finds again.
    """

    message: str | bytes = b""
    key: str = ""
    temperature: float = 1.0
    top_k: int = 50
    bits: Literal[1, 2, 4, 8] = 8
    merge: bool = True
    rate: float = 1.0
    compress: Literal["once", "step"] = "once"
    ending: Literal["complete", "eos"] = "complete"
    tokenizer: Tokenizer | None = None

    requirements = Requirements(rows=True, alone=True, greedy=True, law=True)

    def __post_init__(self) -> None:
        require_number("the temperature of coupling", self.temperature, above=0.0)
        require_number("the rate of coupling", self.rate, above=0.0, most=1.0)
        if not isinstance(self.top_k, int) or self.top_k < 2:
            raise SettingsError(f"coupling needs a choice of tokens: set top_k to 2 or more, not {self.top_k!r}")
        choices = ((self.bits, (1, 2, 4, 8)), (self.compress, ("once", "step")), (self.ending, ("complete", "eos")))
        for value, allowed in choices:
            if value not in allowed:
                raise SettingsError(f"coupling knows {', '.join(map(str, allowed))}, not {value!r}")

    def bind(self, tokenizer: Tokenizer) -> Coupling:
        return replace(self, tokenizer=tokenizer)

    def find(self, engine: Engine, request: Request, progress: Progress = silent) -> ForwardCoroutine[list[Sequence]]:
        message = self.message.encode() if isinstance(self.message, str) else self.message
        if not message:
            raise SettingsError("coupling needs a message to write: set message")
        branches = Branches(engine, request, self)
        seq = branches.root
        belief = self._belief(len(message))
        values = belief.labels[split(self._pad(message), self.bits)]
        while not seq.finished:
            logits = (yield from branches.score([seq]))[0]
            tokens, p = self._law(seq, logits, belief.settled)
            turn = _Sender(seq, values)
            choose(seq, int(tokens[belief.follow(p, turn.pick)]), logits)
            if belief.settled and self.ending == "complete" and not seq.finished and _may_end(seq):
                seq.finish_reason = "stop"
                if seq.text is not None:
                    seq.text.finish()
            progress("coupling", belief.count - belief.open, belief.count)
        if not belief.settled:
            raise SettingsError(
                f"{seq.position} tokens settled {belief.count - belief.open} of the message's {belief.count} blocks: "
                "allow more tokens, send a shorter message, or raise temperature or top_k"
            )
        return branches.finish([seq])

    def read(self, engine: Engine, request: Request, tokens: list[int], length: int) -> DecodedMessage:
        """The message of `length` bytes that the generated `tokens` carry.

        Args:
            request: As when they were written.

        Raises:
            SettingsError: If these settings could not have written the tokens.
        """
        return engine.finish(self._read(engine, request, tokens, length))

    def _read(
        self, engine: Engine, request: Request, tokens: list[int], length: int
    ) -> ForwardCoroutine[DecodedMessage]:
        if length < 1:
            raise SettingsError(f"a message has at least one byte, not {length}")
        if not tokens:
            raise SettingsError("there is no text to read a message from: give what stego_encode wrote")
        branches = Branches(engine, replace(request, max_new_tokens=len(tokens) + 1), self)
        seq = branches.root
        belief, rows = self._belief(length), _KnownTextRows(branches, tokens)
        for token in tokens:
            if belief.settled or seq.finished:
                break
            logits = yield from rows.after(seq)
            candidates, p = self._law(seq, logits, settled=False)
            places = np.flatnonzero(candidates == token)
            if len(places) == 0:
                raise SettingsError(
                    f"token {seq.position} of the text could not have been written like this: use the model, "
                    "precision, prompt and settings it was written with, and the text unchanged"
                )
            belief.follow(p, _Receiver(int(places[0])).pick)
            choose(seq, token, logits)
        blocks, certainty = belief.guess()
        return DecodedMessage(self._pad(join(blocks, self.bits)), certainty)

    def _belief(self, length: int) -> Belief:
        return Belief(8 * length // self.bits, self.bits, self.rate, self.compress, self.merge)

    def _pad(self, message: bytes) -> bytes:
        """The message made uniform by the key's pad, or made plain again."""
        if not self.key:
            return message
        pad = hashlib.shake_256(b"decodery coupling\0" + self.key.encode()).digest(len(message))
        return bytes(a ^ b for a, b in zip(message, pad, strict=True))

    @one_thread()
    def _law(self, seq: Sequence, logits: torch.Tensor, settled: bool) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [k] that may come next, most likely first, and their probabilities [k] float64."""
        law = seq.request.sampler.law(logits[None], [seq.context()])
        if not settled and seq.request.eos_ids:
            law = law.clone()
            law[:, sorted(seq.request.eos_ids)] = -torch.inf
            if bool(torch.isneginf(law).all()):
                raise SettingsError(
                    "the text must end here, before the message is complete: allow longer texts, or send less"
                )
        count = self.top_k
        while True:
            (ids,), (values,) = topk(law, count)
            usable = np.isfinite(values)
            if self.tokenizer is not None:
                usable &= _survive(self.tokenizer, seq.generated, ids.tolist()) | np.isin(
                    ids, list(seq.request.eos_ids)
                )
            if usable.any():
                break
            if count >= seq.request.vocab_size:
                raise PromptError("no token can follow that a reader of the text would find again: give token ids")
            # Where nothing likely survives being read, less likely tokens are asked.
            count *= 2
        ids, values = ids[usable][: self.top_k], values[usable][: self.top_k].astype(np.float64)
        weights = np.exp((values - values[0]) / self.temperature)
        return ids, weights / weights.sum()


def _may_end(seq: Sequence) -> bool:
    """Whether what is written may be left as it is."""
    found = constrained(seq.request.sampler.processors)
    if found is None:
        return True
    number, constraint = found
    return not constraint.requirements.ends or constraint.is_complete(seq.processor_states[number])


class _Sender:
    """Draws the tokens of one position. values: the message's blocks, as labels."""

    def __init__(self, seq: Sequence, values: np.ndarray) -> None:
        self.seq, self.values, self.drawn = seq, values, 0

    def pick(self, group: np.ndarray, joint: np.ndarray, block: int | None) -> int:
        """A token of the group as likely as it is beside the block's true value."""
        heights = np.cumsum(joint[:, 0] if block is None else joint[:, self.values[block]])
        at = draw(self.seq.request.seed, self.seq.position, self.drawn, COUPLE) * heights[-1]
        self.drawn += 1
        return int(np.searchsorted(heights, at, side="right"))


@dataclass(frozen=True)
class _Receiver:
    """Knows the token: its number among the candidates."""

    written: int

    def pick(self, group: np.ndarray, joint: np.ndarray, block: int | None) -> int:
        return int(np.flatnonzero(group == self.written)[0])


class _KnownTextRows:
    """Logits after every token of a text that is known: in long passes where that changes no bit, else as written."""

    def __init__(self, branches: Branches, tokens: list[int]) -> None:
        # Nothing follows the last one.
        self.branches, self.tokens = branches, tokens[:-1]
        self.exact = branches.model.capabilities.exact_rows
        self.first, self.logits = 0, torch.empty(0, dtype=torch.float32, device="cpu")

    def after(self, seq: Sequence) -> ForwardCoroutine[torch.Tensor]:
        """[vocab] after the last token of `seq`."""
        if seq.position == 0 or not self.exact:
            return (yield from self.branches.score([seq]))[0]
        number = seq.position - 1
        if number >= self.first + len(self.logits):
            chunk = self.tokens[number : number + _READ_ROWS]
            (scored,) = yield from self.branches.ask([Segment.chunk(chunk, seq.cache)])
            self.first, self.logits = number, scored.logits
            seq.cache.keep(range(len(chunk)))
        return self.logits[number - self.first]


def _survive(tokenizer: Tokenizer, generated: list[int], candidates: list[int]) -> np.ndarray:
    """[n] bool: which candidates a text is cut into again, with all that stands before them."""
    stream = tokenizer.stream(begins=False)
    begun = stream.push(generated)
    ends = (copy(stream) for _ in candidates)
    texts = [begun + end.push([token]) + end.finish() for token, end in zip(candidates, ends, strict=True)]
    again = tokenizer.encode_all_after(texts)
    return np.array([cut == [*generated, token] for cut, token in zip(again, candidates, strict=True)])
