"""Retrieval in rounds: follow-up questions, each with documents of its own, until the answer is written."""

from __future__ import annotations

import re
from dataclasses import dataclass

from decodery.core.conversation import Conversation
from decodery.core.errors import SettingsError
from decodery.core.ledger import count
from decodery.core.registry import register
from decodery.engine.calls import Calls
from decodery.models.loaders.store import Progress
from decodery.sampling.constraint import Constrained, constrained
from decodery.sampling.sampler import Sampler
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence
from decodery.step.writer import writes

from .documents import Demonstration, Documents, demonstrations, library
from .drag import listed, require_sizes
from .pipeline import Pipeline
from .verdicts import TRIES, spoken

FOLLOW_UP, INTERMEDIATE, FINAL = "Follow up:", "Intermediate answer:", "So the final answer is:"
_LINE_TOKENS = 32
"""Room that a line has at least, beside documents."""
_LINE = re.compile(rf"[\s*]*({FOLLOW_UP}|{INTERMEDIATE}|{FINAL})\**([^\n]*)")


@register(
    "iter-drag",
    paper="Inference Scaling for Long-Context Retrieval Augmented Generation (2024)",
    guarantee="none; what is written is one of three kinds of lines",
    requirements=("documents", "a prompt that is text or chat"),
)
@dataclass(frozen=True)
class IterDRAG(Pipeline):
    """Asks follow-up questions line by line, finds documents for each, and ends with a final answer.

    A line is a follow-up question, an intermediate answer or the final answer, and nothing else: a model that is run
    here is held to that by a constraint, and what a server writes is asked for again where it is none of them, 10 times
    at most in all where texts are drawn, and then taken for the final answer; each is counted as `malformed`. The text
    found is the final answer alone. The trace counts `context_tokens`, those read in all calls, and `retrievals`.
    Documents that have come first are left out once the context has no room for all and a line after them, which is
    counted as `outgrown`; where there is no room without any, the last intermediate answer is what is found.

    Attributes:
        documents, examples, k, m, most_words: As for drag; the steps of an example are shown with it.
        n: follow-up questions at most, after which the final answer is asked for.
    """

    documents: str | Documents
    examples: str | tuple[Demonstration, ...] = ()
    k: int = 5
    m: int = 0
    n: int = 5
    most_words: int = 700

    def __post_init__(self) -> None:
        require_sizes("iter-drag", k=self.k, m=self.m, n=self.n)
        if self.m > len(demonstrations(self.examples)):
            raise SettingsError(
                f"iter-drag shows {self.m} of {len(demonstrations(self.examples))} examples: give more of them"
            )
        library(self.documents, self.most_words)

    def follow(self, calls: Calls, progress: Progress) -> ForwardCoroutine[list[Sequence]]:
        if constrained(calls.request.sampler.processors) is not None:
            raise SettingsError("iter-drag constrains what is written itself: leave the constraint out")
        found, question = library(self.documents, self.most_words), calls.conversation.question
        shown = [self._example(each) for each in demonstrations(self.examples)[: self.m]]
        documents, lines, asked = found.best(question, self.k), list[str](), 0
        after: tuple[str, ...] = (FOLLOW_UP, FINAL)
        while True:
            allowed = after if asked < self.n or after == (INTERMEDIATE,) else (FINAL,)
            behind = "".join([f"Question: {question}\n", *lines, _asked(allowed)])
            said = calls.conversation.asking("".join([*shown, listed(documents), behind]))
            while documents and not calls.fits(said, min(_LINE_TOKENS, calls.request.max_new_tokens)):
                count("outgrown")
                documents = documents[1:]
                said = calls.conversation.asking("".join([*shown, listed(documents), behind]))
            text = yield from self._line(calls, said, allowed, progress)
            kind, answer = _read(text, allowed)
            if kind == FINAL:
                return [text]
            lines.append(f"{kind} {answer}\n")
            if kind == FOLLOW_UP:
                asked += 1
                count("retrievals")
                known = set(documents)
                documents += [each for each in found.best(answer, self.k) if each not in known]
                after = (INTERMEDIATE,)
            else:
                calls.standing, after = [text], (FOLLOW_UP, FINAL)
            progress("iter-drag", asked, self.n)

    def _example(self, each: Demonstration) -> str:
        found = library(self.documents, self.most_words)
        steps = "".join(f"{FOLLOW_UP} {asked}\n{INTERMEDIATE} {said}\n" for asked, said in each.steps)
        documents = listed(found.best(each.question, self.k))
        return f"{documents}Question: {each.question}\n{steps}{FINAL} {each.answer}\n\n"

    def _line(
        self, calls: Calls, said: Conversation, allowed: tuple[str, ...], progress: Progress
    ) -> ForwardCoroutine[Sequence]:
        sampler = calls.request.sampler
        if not writes(calls.engine.model):
            from decodery.constraints.regex import Regex

            pattern = f"({'|'.join(allowed)}) [^\\n]+\\n?"
            sampler = Sampler((Constrained(said.compile(Regex(pattern))), *sampler.processors))
        for _ in range(1 if calls.request.sampler.greedy else TRIES):
            (text,) = yield from calls.answer([said], progress, sampler=sampler)
            count("context_tokens", text.request.prompt_length)
            if _found(text, allowed) is not None:
                break
            count("malformed")
        return text


def _asked(allowed: tuple[str, ...]) -> str:
    kinds = " or ".join(f'"{each}"' for each in allowed)
    return f"\nWrite the next line and nothing else. It begins with {kinds}."


def _found(text: Sequence, allowed: tuple[str, ...]) -> tuple[str, str] | None:
    """Kind and content of a line; None where it is none of these kinds."""
    found = _LINE.match(spoken(text))
    return (found[1], found[2].strip()) if found is not None and found[1] in allowed else None


def _read(text: Sequence, allowed: tuple[str, ...]) -> tuple[str, str]:
    """Kind and content of a line; its text becomes the answer alone where it holds one."""
    assert text.text is not None
    found = _found(text, allowed)
    if found is None:
        # Whoever was to say what an intermediate answer is has said it in other words.
        return (INTERMEDIATE if allowed == (INTERMEDIATE,) else FINAL), " ".join(spoken(text).split())
    if found[0] != FOLLOW_UP:
        text.text.replace(found[1])
    return found
