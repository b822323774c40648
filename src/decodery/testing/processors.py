"""The invariants of logits processors: the distribution at a position never depends on other rows or calls."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence as Ordered
from typing import Any

import numpy as np
import torch

from decodery.sampling.logits_processor import Context, LogitsProcessor

from .running import LawBroken

Text = tuple[Ordered[int], Ordered[int]]
"""A prompt and what was written after it."""


def check_logits_processor(
    processor: LogitsProcessor, *, vocab_size: int = 64, texts: Ordered[Text] | None = None, seed: int = 0
) -> None:
    """Check that a processor is pure, independent of other rows, and revives no excluded token.

    The processor is called at every position of each text as the text grows, each time with a side branch that is not
    taken. Then new copies of it are called at all positions: one by one in reverse, together, and together in another
    order. All results must be equal to the bit, and `-inf` must stay `-inf`.

    Args:
        processor: The processor under test.
        vocab_size: Vocabulary size of the random logits.
        texts: Texts on which the processor has an effect; by default random ones, half of which repeat themselves.
        seed: Seed of logits and texts.

    Raises:
        LawBroken: If an invariant does not hold, or a processor that is not declared neutral changed no row.
    """
    backwards, together, shuffled = (copy.deepcopy(processor) for _ in range(3))
    random = np.random.default_rng(seed)
    walked = _Walk(processor, vocab_size, random)
    for number, (prompt, written) in enumerate(texts or _random_texts(vocab_size, random)):
        walked.text(list(prompt), list(written), number)
    rows, contexts = torch.cat(walked.rows), walked.contexts
    expected = torch.cat(walked.answers)
    _require_effect(processor, rows, expected)
    for at in reversed(range(len(rows))):
        _require_equal(
            _ask(backwards, rows[at : at + 1], contexts[at : at + 1]),
            expected[at : at + 1],
            f"{processor} depends on earlier calls: declare what it remembers as a state, which advance leaves "
            "as it is",
        )
    order = random.permutation(len(rows)).tolist()
    for asked, places in ((together, list(range(len(rows)))), (shuffled, order)):
        _require_equal(
            _ask(asked, rows[places], [contexts[at] for at in places]),
            expected[places],
            f"{processor} changes its answer for a row with the rows beside it: a row may depend on itself and "
            "its context only",
        )


class _Walk:
    """The answers along growing texts. rows, answers: [1, vocab] each; contexts: what was asked about."""

    def __init__(self, processor: LogitsProcessor, vocab_size: int, random: np.random.Generator) -> None:
        self.processor = processor
        self.vocab_size = vocab_size
        self.random = random
        self.rows: list[torch.Tensor] = []
        self.answers: list[torch.Tensor] = []
        self.contexts: list[Context] = []

    def text(self, prompt: list[int], written: list[int], seed: int) -> None:
        state = self.processor.init(prompt)
        if not self.processor.stateful and state != ():
            raise LawBroken(f"{self.processor} has a state and does not say so: set stateful = True")
        for place in range(len(written) + 1):
            row = self._row(written[place : place + 1])
            context = Context(len(prompt), prompt + written[:place], state, seed)
            answer = self._answer(row, context)
            if place < len(written):
                state = self._advance(row, context, answer, written[place])

    def _row(self, following: list[int]) -> torch.Tensor:
        """Logits [1, vocab] from flat to peaked, a third of them excluded, but not the tokens that follow."""
        scale = (0.1, 1.0, 3.0, 8.0)[len(self.rows) % 4]
        row = torch.from_numpy(self.random.standard_normal((1, self.vocab_size))).float() * scale
        excluded = torch.from_numpy(self.random.random((1, self.vocab_size)) < 1 / 3)
        excluded[0, following] = False
        excluded[0, row.argmax()] = False
        return row.masked_fill(excluded, -math.inf)

    def _answer(self, row: torch.Tensor, context: Context) -> torch.Tensor:
        first = _ask(self.processor, row, [context])
        kept = first.clone()
        again = _ask(self.processor, row, [context])
        _require_equal(
            again,
            kept,
            f"{self.processor} gives another result when called again: it has an undeclared state or draws at random",
        )
        if _shares(first, again):
            raise LawBroken(f"{self.processor} returns the same memory twice: make a new tensor for every answer")
        self.rows.append(row)
        self.contexts.append(context)
        self.answers.append(kept)
        return kept

    def _advance(self, row: torch.Tensor, context: Context, answer: torch.Tensor, token: int) -> Any:
        """The state after `token`; neither it nor a branch that is left may change the one before."""
        hears = self.processor.stateful and self.processor.hears_logprobs
        logprobs = row[0].log_softmax(dim=-1) if hears else torch.full_like(row[0], math.nan)
        other = next(each for each in row[0].topk(2).indices.tolist() if each != token)
        for branch in (other, token):
            after = self.processor.advance(context.state, branch, float(logprobs[branch]))
            if not self.processor.stateful and after is not context.state:
                raise LawBroken(f"{self.processor} has a state and does not say so: set stateful = True")
            _require_equal(
                _ask(self.processor, row, [context]),
                answer,
                f"advance of {self.processor} changes the state it is given: return a new one",
            )
        return after


def _ask(processor: LogitsProcessor, rows: torch.Tensor, contexts: Ordered[Context]) -> torch.Tensor:
    """What the processor makes of `rows` [n, vocab]; both are checked."""
    given, histories = rows.clone(), [list(context.tokens) for context in contexts]
    answer = processor.process(given, contexts)
    if not torch.equal(given, rows) or histories != [context.tokens for context in contexts]:
        raise LawBroken(f"{processor} changes in place what it is given: return a new tensor")
    if answer.shape != rows.shape or answer.dtype != rows.dtype:
        raise LawBroken(
            f"{processor} makes {list(answer.shape)} {answer.dtype} of {list(rows.shape)} {rows.dtype}: keep both"
        )
    if answer is not given and _shares(answer, given):
        raise LawBroken(f"{processor} returns a view of the logits: return these themselves, or a new tensor")
    if (answer[rows == -math.inf] != -math.inf).any():
        raise LawBroken(f"{processor} revives an excluded token: what is -inf stays -inf")
    if not answer.amax(dim=-1).isfinite().all():
        raise LawBroken(
            f"{processor} leaves a row that is no law: keep at least one finite logit, and none that is NaN"
        )
    return answer


def _require_effect(processor: LogitsProcessor, rows: torch.Tensor, answers: torch.Tensor) -> None:
    changed = not torch.equal(rows, answers)
    if changed and processor.neutral:
        raise LawBroken(f"{processor} is declared neutral and changes logits")
    if not changed and not processor.neutral:
        raise LawBroken(
            f"{processor} changed none of {len(rows)} rows, so nothing was put to the test: give other texts"
        )


def _require_equal(got: torch.Tensor, expected: torch.Tensor, broken: str) -> None:
    if not torch.equal(got, expected):
        raise LawBroken(broken)


def _shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _random_texts(vocab_size: int, random: np.random.Generator) -> list[Text]:
    """Eight texts of ragged lengths, every other one of three tokens only, so that it repeats itself."""
    found: list[Text] = []
    for number in range(8):
        most = 3 if number % 2 else vocab_size
        prompt, written = (random.integers(0, most, random.integers(1, top)).tolist() for top in (20, 7))
        found.append((prompt, written))
    return found
