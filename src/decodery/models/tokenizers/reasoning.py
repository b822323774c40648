"""What a model thinks before it answers, apart from the answer."""

from __future__ import annotations

from dataclasses import dataclass

MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
"""What stands before and after it: of Qwen, DeepSeek and most others; Magistral; Seed-OSS."""


@dataclass(frozen=True)
class ReasoningMarks:
    """How a model marks what it thinks.

    Attributes:
        begin, end: What stands before and after it.
        inside: Whether a text begins within it, as the prompt ends with `begin`.
    """

    begin: str
    end: str
    inside: bool = False


def marks_of(template: str, prompt: str) -> ReasoningMarks | None:
    """The marks of a model, None for one that writes none.

    Args:
        template: The source of its chat template.
        prompt: The end of the prompt.
    """
    for begin, end in MARKS:
        if end in template:
            return ReasoningMarks(begin, end, prompt.rstrip().endswith(begin))
    return None


class ReasoningSplitter:
    """Splits a text that comes in pieces into what was thought and what is answered.

    A text thinks at its beginning or not at all; marks elsewhere are text.

    Args:
        marks: See `ReasoningMarks`.

    Attributes:
        reasoned: Whether there was a reasoning part so far.
    """

    def __init__(self, marks: ReasoningMarks) -> None:
        self._marks = marks
        self.reasoned = marks.inside
        self._inside: bool | None = True if marks.inside else None
        """None: nothing is said yet."""
        self._rest, self._begins = "", True

    @property
    def answering(self) -> bool:
        """Whether all that follows is the answer."""
        return self._inside is False

    def push(self, text: str, *, final: bool = False) -> tuple[str, str]:
        """What the text so far adds to what was thought, and to the answer.

        Args:
            text: The next piece.
            final: Whether it is the last one, of which nothing is held back.
        """
        self._rest += text
        if self._inside is None:
            said = self._rest.lstrip()
            if said.startswith(self._marks.begin):
                self._inside, self.reasoned, self._rest = True, True, said[len(self._marks.begin) :]
            elif final or not self._marks.begin.startswith(said):
                self._inside, self._begins = False, False
            else:
                return "", ""
        thought = ""
        if self._inside:
            thought, found, after = self._rest.partition(self._marks.end)
            if not found:
                held = 0 if final else _begun(self._rest, self._marks.end)
                thought, self._rest = self._rest[: len(self._rest) - held], self._rest[len(self._rest) - held :]
                return self._without_begin(thought), ""
            self._inside, self._rest, thought = False, after, self._without_begin(thought)
            self._begins = True
        said, self._rest = self._rest, ""
        return thought, self._without_begin(said)

    def _without_begin(self, text: str) -> str:
        """Without the line breaks that stand after a mark."""
        if self._begins:
            text = text.lstrip("\n")
            self._begins = not text
        return text


def _begun(text: str, mark: str) -> int:
    """How many characters at the end of a text may begin a mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)


def read_reasoning(text: str, marks: ReasoningMarks | None) -> tuple[str, str]:
    """What a whole text thinks, and what it answers."""
    return ("", text) if marks is None else ReasoningSplitter(marks).push(text, final=True)
