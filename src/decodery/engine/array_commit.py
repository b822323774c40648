"""What becomes of a step of the texts in arrays: tokens, ledgers, traces, and what drafters learn of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from itertools import repeat
from time import perf_counter

from decodery.core.threads import one_thread
from decodery.core.trace import Step
from decodery.models.step_arrays import StepArrays
from decodery.models.torch_state import in_plain_state
from decodery.step.draft_batch import DraftBatch

from .accounting import OWN
from .array_text import STEPS, TOKENS, ArrayText
from .commit import logprobs

_Choices = list[tuple[int, int]]
_Reported = tuple[ArrayText, int, int]
"""A text whose log-probabilities are asked for, the row that predicted a token of it, and the token."""


@dataclass(slots=True)
class ArrayTimes:
    """When the parts of a step began.

    Attributes:
        begin: Of the step.
        proposed: After its drafts.
        scored: After its pass.
        rows: Of that pass.
        texts: Tasks that shared the pass.
    """

    begin: float
    proposed: float
    scored: float
    rows: int
    texts: int


def commit(
    steps: StepArrays,
    texts: Ordered[ArrayText],
    drafts: Ordered[DraftBatch],
    times: ArrayTimes,
    passes: int,
    *,
    drafting: bool = True,
) -> bool:
    """Append the step's tokens to the texts, and let drafters learn of it.

    Args:
        steps: The batch after the step.
        texts: Those in it.
        drafts: The batches of their drafts.
        times: Of the step.
        passes: Of the model before it.
        drafting: Whether these took part in the step; False where all of them rest.

    Returns:
        Whether a text has ended.
    """
    n, scored = len(texts), times.scored
    propose, score = times.proposed - times.begin, scored - times.proposed
    plain, chosen, share = steps.plain, steps.chosen_tokens(), score / max(times.rows, 1)
    # Of a step without drafts this is all there is to know; what has left the caches takes most of the time here.
    accepted = None if plain else steps.accepted[:n].tolist()
    failed: dict[int, Exception] = {}
    for batch in drafts:
        failed |= batch.failed
    trees = Trees(steps, n) if steps.rows > n else None
    experts = steps.experts.tolist() if steps.experts is not None else None
    ended: list[int] = []
    reported: list[_Reported] = []
    recorded: dict[int, Step] = {}
    looked: dict[int, _Choices] = {}
    appended = plain and not failed
    if appended:
        deque(map(list.append, map(TOKENS, texts), chosen), 0)
    for place, text in enumerate(texts):
        count = 0 if accepted is None else accepted[place]
        if count < 0:
            choices = look(steps, place, text)
            if choices is None:
                steps.kept[place] = 0
                ended.append(place)
                continue
            looked[place], count, chosen[place] = choices, int(steps.accepted[place]), int(steps.chosen[place])
        if failed and place in failed:
            fail(steps, place, text, count, failed[place])
            ended.append(place)
            continue
        text.cache.next_position += count + 1
        ledger, run = text.ledger, text.run
        size = 1 if trees is None else trees.sizes[place]
        if trees is not None and size > 1:
            recorded[place] = trees.commit(place, text, looked)
            if text.logprobs is not None:
                reported += trees.reported(place, text)
        else:
            token = chosen[place]
            if not appended:
                text.tokens.append(token)
            text.length += 1
            ledger.tokens += 1
            stream = text.stream
            if text.monitors is not None:
                text.watch(token, steps, int(steps.first[place]))
            elif stream is not None and stream.lazy and token not in text.eos and text.length < text.most:
                stream.waiting.append(token)
            elif stream is not None or token in text.eos or text.length >= text.most:
                text.end(token)
            if not appended and text.logprobs is not None:
                reported.append((text, int(steps.first[place]), token))
            if text.stateful:
                text.after(token)
        # A call for each text would take longer than this.
        if OWN in ledger.passes:
            ledger.passes[OWN] += 1
            ledger.rows[OWN] += size
            ledger.seconds[OWN] += share * size
        else:
            ledger.spend(OWN, size, share * size, first=True)
        if experts is not None:
            ledger.counts["experts"] = ledger.counts.get("experts", 0) + experts[place]
        run.served = passes + 1
        run.depth += 1
        if run.depth > ledger.depth:
            ledger.depth = run.depth
        if text.windowed:
            text.cache.release_passed()
        seq = text.seq
        if text.drafts:
            seq.observed = text.length - 1
        if seq.finish_reason is not None:
            ended.append(place)
    if appended:
        reported = [(text, place, chosen[place]) for place, text in enumerate(texts) if text.logprobs is not None]
    if reported:
        report(steps, reported)
        ended += [place for place in range(n) if place not in ended and texts[place].seq.finish_reason is not None]
    for batch in drafts if drafting or ended else ():
        for place, error in learn(batch, steps, ended).items():
            texts[place].seq.fail(error)
            ended.append(place)
    took, shared = perf_counter() - scored, times.texts
    # Texts without drafts have the same to record.
    step = Step(0, 0, 1, 1, False, propose, score, 0.0, took, shared, [], None)
    deque(map(list.append, map(STEPS, texts), repeat(step)), 0)
    for place, step in recorded.items():
        step.propose, step.score, step.commit, step.sequences = propose, score, took, shared
        texts[place].steps[-1] = step
    return bool(ended)


class Trees:
    """What became of the trees of a step: the arrays as lists, made once for all texts.

    Args:
        steps: The batch after the step.
        texts: How many are in it.
    """

    def __init__(self, steps: StepArrays, texts: int) -> None:
        self.sizes: list[int] = steps.sizes[:texts].tolist()
        self._steps = steps
        self._first, self._kept = steps.first[:texts].tolist(), steps.kept[:texts].tolist()
        self._emitted: list[int] = steps.emitted[: steps.rows].tolist()
        self._choices: _Choices = [*map(tuple, steps.choices[: steps.rows].tolist())]
        self._counts = steps.choice_counts[:texts].tolist()

    def commit(self, place: int, text: ArrayText, looked: dict[int, _Choices]) -> Step:
        """Append what was accepted of a text's tree, up to the first token that ends the text.

        Args:
            place: The text's number in the batch.
            text: The text.
            looked: The choices of texts that Python has chosen for.
        """
        first, kept, size = self._first[place], self._kept[place], self.sizes[place]
        if place in looked:
            kept = int(self._steps.kept[place])
            run, choices = self._steps.emitted[first : first + kept].tolist(), looked[place]
        else:
            run = self._emitted[first : first + kept]
            choices = self._choices[first : first + self._counts[place]]
        taken, stream = kept, text.stream
        if (
            (stream is None or stream.lazy)
            and text.monitors is None
            and text.length + kept < text.most
            and text.eos.isdisjoint(run)
        ):
            # No token can end the text, and nothing waits for it: all are taken at once.
            text.tokens += run
            if stream is not None:
                stream.waiting += run
            text.ledger.tokens += kept
            text.length += kept
            if text.stateful:
                for token in run:
                    text.after(token)
        elif (taken := text.emit(run, self._steps, lambda number: self._row(first, number))) < kept:
            text.rows.cut(kept - taken)
            self._steps.kept[place] = taken
        step = Step(size - 1, taken - (taken == kept), taken, size)
        step.choices = choices
        return step

    def reported(self, place: int, text: ArrayText) -> list[_Reported]:
        """The tokens that `commit` has just appended, with their rows."""
        first, kept = self._first[place], int(self._steps.kept[place])
        tokens = text.tokens[len(text.tokens) - kept :]
        return [(text, self._row(first, number), token) for number, token in enumerate(tokens)]

    def _row(self, first: int, number: int) -> int:
        """The row that predicted the token of a number in a text whose rows begin at `first`."""
        return first + (int(self._steps.paths[first + number - 1]) if number else 0)


@in_plain_state
@one_thread()
def report(steps: StepArrays, reported: Ordered[_Reported]) -> None:
    """Add the log-probabilities of tokens to those of their texts; texts whose own cannot be made end.

    Args:
        steps: The batch after the step.
        reported: The tokens, those of each text in order.
    """
    for top in {text.logprobs for text, _, _ in reported}:
        chosen = [each for each in reported if each[0].logprobs == top]
        rows = [row for _, row, _ in chosen]
        try:
            found = logprobs(steps.logits[rows], [token for _, _, token in chosen], top or 0)
        except Exception as error:
            for text in {id(text): text for text, _, _ in chosen}.values():
                text.seq.fail(error)
            continue
        deque(map(list.append, [text.seq.token_logprobs for text, _, _ in chosen], found), 0)


def fail(steps: StepArrays, place: int, text: ArrayText, count: int, error: Exception) -> None:
    """End a text whose drafter failed: nothing of the step stays."""
    text.rows.keep(count + 1)
    text.rows.cut(count + 1)
    steps.kept[place] = 0
    text.seq.fail(error)


@in_plain_state
def look(steps: StepArrays, place: int, text: ArrayText) -> _Choices | None:
    """See `ArrayText.look`."""
    return text.look(steps, place)


def learn(batch: DraftBatch, steps: StepArrays, ended: Ordered[int]) -> dict[int, Exception]:
    """What went wrong, by text; an error that ends all of its texts is that of each."""
    try:
        return batch.learn(steps, ended)
    except Exception as error:
        return dict.fromkeys(batch.places, error)
