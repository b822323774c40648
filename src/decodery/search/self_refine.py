"""Self-refine: the model says what is wrong with its answer and writes it again, until nothing is."""

from __future__ import annotations

import re
from dataclasses import dataclass

from decodery.core.ledger import count
from decodery.core.registry import register
from decodery.engine.calls import Calls
from decodery.models.loaders.store import Progress
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence

from .pipeline import Pipeline
from .pool import require_count
from .verdicts import spoken

_NOTHING = re.compile(r"\[no errors?\]", re.IGNORECASE)
_FEEDBACK = (
    "Task:\n{task}\n\nAnswer:\n{answer}\n\nLook for errors in this answer. If there are none, write [No errors] and "
    "nothing else. Otherwise say in a few sentences what is wrong. Do not write a new answer."
)
_AGAIN = (
    "{question}\n\nAn earlier answer:\n{answer}\n\nWhat is wrong with it:\n{feedback}\n\nWrite a better answer, "
    "complete in itself."
)


@register(
    "self-refine",
    paper="Bag of Tricks for Inference-time Computation of LLM Reasoning (2025); Self-Refine: Iterative Refinement "
    "with Self-Feedback (2023)",
    guarantee="none: right answers may be rewritten into wrong ones",
    requirements=("a prompt that is text or chat",),
)
@dataclass(frozen=True)
class SelfRefine(Pipeline):
    """Writes an answer, then feedback on it and a new answer, until the feedback finds no error.

    The last answer comes first, and those before it after it, newest first. Feedback is written at the request's
    temperature. Where a prompt outgrows the model's context, the last answer stands.

    Attributes:
        iterations: New answers at most, fewer where the feedback says [No errors]; 0 is plain decoding.
    """

    iterations: int = 3

    def __post_init__(self) -> None:
        if self.iterations != 0:
            require_count("self-refine", "iterations", self.iterations)

    def follow(self, calls: Calls, progress: Progress) -> ForwardCoroutine[list[Sequence]]:
        said = calls.conversation
        calls.standing = yield from calls.answer([said], progress)
        for number in range(self.iterations):
            answer = spoken(calls.standing[0])
            asked = said.apart(_FEEDBACK.format(task=said.task, answer=answer))
            (found,) = yield from calls.judge([asked], sampler=calls.request.sampler, progress=progress)
            feedback = spoken(found)
            if _NOTHING.search(feedback):
                break
            again = said.asking(_AGAIN.format(question=said.question, answer=answer, feedback=feedback))
            texts = yield from calls.answer([again], progress)
            calls.standing = [*texts, *calls.standing]
            count("rewritten")
            progress("self-refine", number + 1, self.iterations)
        return calls.standing
