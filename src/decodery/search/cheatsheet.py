"""Dynamic Cheatsheet: what the model learned from earlier questions is shown with the next one."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Literal

from decodery.core.conversation import Conversation
from decodery.core.errors import SettingsError
from decodery.core.ledger import count
from decodery.core.registry import register
from decodery.engine.calls import Calls
from decodery.models.loaders.store import Progress
from decodery.sampling.sampler import Sampler
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence

from .memory_file import EMPTY, Sheet, SheetFile, unless_changed
from .pipeline import Pipeline
from .pool import require_count
from .retrieval import Keywords
from .verdicts import characters, verdicts

_TAGGED = re.compile(r"<cheatsheet>(.*?)</cheatsheet>", re.DOTALL)
_TRIES = 4
"""Times that a memory is curated anew because another process has changed it in between."""
_CURATE = (
    "You keep a cheatsheet for a stream of questions: short items with strategies, facts, code and pitfalls that will "
    "help "
    "with later questions of the same kind, each with an example and how often it was used. Keep what is still useful, "
    "correct what was wrong, add what is new, and leave out what is particular to one question. At most {most} "
    "characters."
)
_FORM = "Write the whole new cheatsheet between <cheatsheet> and </cheatsheet>."

Mode = Literal["cumulative", "synthesis", "retrieval", "history", "empty"]


@register(
    "cheatsheet",
    paper="Dynamic Cheatsheet: Test-Time Learning with Adaptive Memory (2025)",
    guarantee="none: what is shown comes from earlier questions alone, and from no labels",
    requirements=("a prompt that is text or chat", "a file"),
)
@dataclass(frozen=True)
class Cheatsheet(Pipeline):
    """Answers with a memory that the model itself keeps across questions, in a file.

    The first questions or lines are not shown where they would leave no room in the context for a whole answer, which
    "memory_cut" counts too. The file is never half written: where another process has changed it in between, the newer
    memory is rewritten, and `conflicts` counts that. The last 1000 questions are kept. Likeness is of words (BM25),
    where the paper has embeddings. No code is run. One text a question, at the request's temperature, and one greedy
    rewriting of at most twice its length.

    Attributes:
        file: The memory of one stream; another stream has another file.
        mode: "cumulative" answers with the memory, and then lets the model rewrite it with question and answer;
            "synthesis" rewrites it first, for this question, from the k earlier questions that are most like it;
            "retrieval" shows those as they are, "history" all of them, "empty" nothing, which is the baseline with the
            same prompt. A rewriting stands between tags, to which a model that is run here is held by a constraint; one
            without them leaves the memory as it was, which is counted as "malformed", and so does one whose prompt
            would outgrow the model's context, which is counted as "outgrown"; of synthesis the earlier questions
            themselves are shown then.
        k: Earlier questions that "synthesis" and "retrieval" use.
        most: Characters of the memory; what goes beyond is cut at a line.
    """

    file: str
    mode: Mode = "cumulative"
    k: int = 3
    most: int = 8000

    def __post_init__(self) -> None:
        require_count("cheatsheet", "k", self.k)
        require_count("cheatsheet", "most", self.most)
        if not self.file:
            raise SettingsError("cheatsheet keeps its memory in a file: name one, as in cheatsheet:file=memory.json")

    def follow(self, calls: Calls, progress: Progress) -> ForwardCoroutine[list[Sequence]]:
        file, question = SheetFile(self.file), calls.conversation.task
        sheet = file.read()
        shown, memory = self._shown(sheet, question), None
        if self.mode == "synthesis":
            memory = yield from self._curated(calls, sheet, _before(shown, question))
            shown = shown if memory is None else memory.split("\n")
        texts = calls.standing = yield from calls.answer([self._prompt(calls, shown)], progress)
        assert texts[0].text is not None
        answer = texts[0].text.text
        for _ in range(_TRIES):
            if self.mode == "cumulative":
                memory = yield from self._curated(calls, sheet, _joined([_pair(question, answer)]))
            if (
                now := file.change(unless_changed(sheet, sheet.after(question, answer, memory)))
            ).version == sheet.version:
                return texts
            sheet = now
            count("conflicts")
            if self.mode == "synthesis":
                memory = yield from self._curated(calls, sheet, _before(self._shown(sheet, question), question))
        # Others write faster than this one reads: what was asked and answered is kept in any case.
        file.change(lambda newest: newest.after(question, answer))
        return texts

    def _shown(self, sheet: Sheet, question: str) -> list[str]:
        """What is shown of the sheet, before anything is rewritten: lines of the memory, or earlier questions."""
        if self.mode == "cumulative":
            return sheet.memory.split("\n")
        if self.mode == "empty" or not sheet.entries:
            return [EMPTY]
        if self.mode == "history":
            return [_pair(*entry) for entry in sheet.entries]
        near = Keywords([asked for asked, _ in sheet.entries]).best(question, self.k)
        # The most alike stands last, nearest to the question.
        return [_pair(*sheet.entries[number]) for number in reversed(near)]

    def _prompt(self, calls: Calls, shown: Ordered[str]) -> Conversation:
        """The question after what is shown: as much of it, from its end, as leaves room for the answer."""

        def asked(parts: int) -> Conversation:
            sheet = _joined(shown[len(shown) - parts :]) or EMPTY
            return calls.conversation.asking(
                "You may use this cheatsheet, made from earlier questions, as far as it helps:\n"
                f"<cheatsheet>\n{sheet}\n</cheatsheet>\n\n{calls.conversation.question}"
            )

        def too_long(parts: int) -> bool:
            return not calls.fits(asked(parts), calls.request.max_new_tokens)

        if not too_long(len(shown)):
            return asked(len(shown))
        count("memory_cut")
        return asked(bisect_left(range(1, len(shown)), True, key=too_long))

    def _curated(self, calls: Calls, sheet: Sheet, about: str) -> ForwardCoroutine[str | None]:
        """The memory as the model rewrites it; None where it writes none."""
        prompt = f"{_CURATE.format(most=self.most)}\n\nThe cheatsheet so far:\n{sheet.memory}\n\n{about}\n\n{_FORM}"
        if not calls.fits(calls.conversation.apart(prompt)):
            count("outgrown")
            return None
        most = 2 * calls.request.max_new_tokens
        form = rf"<cheatsheet>\n([^<]|<[^/]){{1,{min(self.most, characters(most))}}}\n</cheatsheet>"
        greedy = Sampler.from_settings()
        (found,) = yield from verdicts(calls, [prompt], _tagged, form, sampler=greedy, most=most)
        if found is None:
            return None
        memory = found.strip() or EMPTY
        if len(memory) <= self.most:
            return memory
        count("memory_cut")
        head = memory[: self.most]
        return head[: head.rfind("\n")] if "\n" in head else head


def _tagged(said: str) -> str | None:
    """What stands between the first tags."""
    found = _TAGGED.search(said)
    return None if found is None else found[1]


def _pair(question: str, answer: str) -> str:
    return f"Question:\n{question}\nAnswer:\n{answer}\n"


def _joined(parts: Ordered[str]) -> str:
    return "\n".join(parts).strip()


def _before(shown: Ordered[str], question: str) -> str:
    return f"{_joined(shown)}\n\nNext question:\n{question}"
