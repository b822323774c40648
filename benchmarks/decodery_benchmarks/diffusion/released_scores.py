"""ParallelBench's scores, by the names that its configurations give them: 0 to 1 for a text and its answer.

Sentences are scored with a judge. The published evaluation asks LanguageTool for mistakes and BERTScore for the
meaning, a Java program and a model of 1.4 GB; here a chat model is asked both, so figures of those tasks compare only
with figures of the same judge.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Protocol

from decodery.constraints import Choice
from decodery.core.errors import CorruptFile
from decodery.llm.llm import LLM

Score = Callable[[str, Any], float]

JUDGED = ("sentence_to_words_score", "summary_score", "paraphrase_score")


class Judge(Protocol):
    """What tells whether a sentence is right."""

    def grammatical(self, text: str) -> float:
        """1 for a text without mistakes, else 0."""
        ...

    def alike(self, text: str, other: str) -> float:
        """1 for two texts of one meaning, else 0."""
        ...


class ModelJudge:
    """A chat model that answers yes or no.

    Args:
        lm: The model.

    Attributes:
        said: By question, what it answered.
    """

    def __init__(self, lm: LLM) -> None:
        self._lm = lm
        self.said: dict[str, float] = {}

    def grammatical(self, text: str) -> float:
        """See `Judge`."""
        return self._asked(f"Is this English text free of mistakes in spelling and grammar?\n\n{text}")

    def alike(self, text: str, other: str) -> float:
        """See `Judge`."""
        return self._asked(f"Do these two sentences mean the same?\n\n1. {text}\n2. {other}")

    def _asked(self, question: str) -> float:
        if question not in self.said:
            turn = {"role": "user", "content": f"{question}\n\nAnswer yes or no."}
            # A choice of the two words: the judge cannot answer with anything else.
            answer = self._lm.chat([turn], max_new_tokens=8, constraint=Choice(("yes", "no")))
            self.said[question] = float(answer.text == "yes")
        return self.said[question]


def score_of(metric: str, judge: Judge | None) -> Score:
    """The score of this published name.

    Raises:
        CorruptFile: For a name that the published tasks do not use.
    """
    if metric in JUDGED:
        assert judge is not None
        return {
            "sentence_to_words_score": lambda text, answer: _with_words(text, answer, judge),
            "summary_score": lambda text, answer: _summary(text, answer, judge),
            "paraphrase_score": lambda text, answer: _paraphrase(text, answer, judge),
        }[metric]
    if metric not in _PLAIN:
        raise CorruptFile(f"there is no score {metric!r} here; there are {', '.join([*_PLAIN, *JUDGED])}")
    return _PLAIN[metric]


def items_of(text: str) -> list[str]:
    """The items of the last list in a text, without quotes; brackets may be left out."""
    inside = text.rsplit("[", 1)[-1].split("]", 1)[0]
    return [item.strip('" ') for item in inside.strip("[]").split(",") if item.strip()]


def _same(text: str, answer: str) -> float:
    return float(items_of(text) == items_of(answer))


def _shuffled(text: str, answer: dict[str, Any]) -> float:
    found, items = items_of(text), answer["input"]
    return float(sorted(found) == sorted(items) and found != items)


def _only_one(answer: dict[str, Any]) -> None:
    if answer.get("n_words", 1) != 1:
        raise CorruptFile("only tasks that change one item are scored, as the published ones are")


def _inserted(text: str, answer: dict[str, Any]) -> float:
    _only_one(answer)
    found = items_of(text)
    if answer["word"] not in found:
        return 0.0
    found.remove(answer["word"])
    return float(found == answer["input"])


def _removed(text: str, answer: dict[str, Any]) -> float:
    _only_one(answer)
    found, items = items_of(text), answer["input"]
    return float(any(found == items[:place] + items[place + 1 :] for place in range(len(items))))


def _replaced(text: str, answer: dict[str, Any]) -> float:
    _only_one(answer)
    found, items, word = items_of(text), list(answer["input"]), answer["word"]
    if len(found) != len(items) or word not in found:
        return 0.0
    items[found.index(word)] = word
    return float(found == items)


def _latin_square(text: str, answer: dict[str, Any]) -> float:
    symbols = answer["symbols"]
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    rows = [row for row in rows if set(row) == set(symbols)][: len(symbols)]
    # As released: lines of other symbols count for nothing, and of too long rows the first columns count.
    columns = list(zip(*rows, strict=False))
    return float(len(rows) == len(symbols) and all(set(column) == set(symbols) for column in columns))


def _sudoku(text: str, answer: str) -> float:
    rows = [re.findall(r"\d", line) for line in text.replace(" ", "").replace(",", "").splitlines()]
    wanted = [list(line) for line in answer.split()]
    return float([row for row in rows if len(row) == len(wanted)] == wanted)


def _with_words(text: str, answer: dict[str, Any], judge: Judge) -> float:
    return judge.grammatical(text) if text.strip() and all(word in text for word in answer["words"]) else 0.0


def _summary(text: str, answer: dict[str, Any], judge: Judge) -> float:
    from rouge_score.rouge_scorer import RougeScorer

    if not text.strip():
        return 0.0
    found = RougeScorer(["rougeL"], use_stemmer=True).score(answer["summary"].strip(), text.strip())
    return float(found["rougeL"].fmeasure) * judge.grammatical(text.strip())


def _paraphrase(text: str, answer: dict[str, Any], judge: Judge) -> float:
    from sacrebleu import corpus_bleu

    if not text.strip():
        return 0.0
    copied = corpus_bleu([text.strip()], [[answer["text"]]], smooth_method="none").score / 100
    return (1 - copied) * judge.alike(text.strip(), answer["text"]) * judge.grammatical(text.strip())


_PLAIN: dict[str, Score] = {
    "list_match_score": _same,
    "list_shuffle_score": _shuffled,
    "list_random_insert_score": _inserted,
    "list_random_remove_score": _removed,
    "list_random_replace_score": _replaced,
    "latin_square_score": _latin_square,
    "sudoku_score": _sudoku,
}
