"""Demonstration-based retrieval: a question after documents, and after examples that have documents of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decodery.core.errors import SettingsError
from decodery.core.ledger import count
from decodery.core.registry import register
from decodery.engine.calls import Calls
from decodery.models.loaders.store import Progress
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence as Text

from .documents import Demonstration, Documents, demonstrations, library
from .pipeline import Pipeline

__all__ = ["Demonstration", "Documents"]


@register(
    "drag",
    paper="Inference Scaling for Long-Context Retrieval Augmented Generation (2024)",
    guarantee="none; k=0 and m=0 is plain decoding",
    requirements=("documents", "a prompt that is text or chat"),
)
@dataclass(frozen=True)
class DRAG(Pipeline):
    """Writes one text after the k documents most similar to the question and m worked examples.

    Found by BM25, where the paper has an embedding model. The trace counts `context_tokens`, the tokens read in all
    calls, and k and m should fit the model's context.

    Attributes:
        documents: `Documents`, or a file: of paragraphs, or .jsonl with a "text" a line.
        examples: `Demonstration`s, or a .jsonl file with "question" and "answer" a line; the first m are shown, each
            with k documents for its own question. The best document stands nearest to its question.
        k: Documents before the question.
        m: Worked examples before the question.
        most_words: Of a document, the rest is cut.
    """

    documents: str | Documents
    examples: str | tuple[Demonstration, ...] = ()
    k: int = 5
    m: int = 0
    most_words: int = 700

    def __post_init__(self) -> None:
        require_sizes("drag", k=self.k, m=self.m)
        if self.m > len(demonstrations(self.examples)):
            raise SettingsError(
                f"drag shows {self.m} of {len(demonstrations(self.examples))} examples: give more of them"
            )
        library(self.documents, self.most_words)

    def follow(self, calls: Calls, progress: Progress) -> ForwardCoroutine[list[Text]]:
        found = library(self.documents, self.most_words)
        shown = [
            f"{listed(found.best(each.question, self.k))}Question: {each.question}\nAnswer: {each.answer}\n\n"
            for each in demonstrations(self.examples)[: self.m]
        ]
        question = calls.conversation.question
        prompt = (
            f"{''.join(shown)}{listed(found.best(question, self.k))}{'Question: ' * bool(shown or self.k)}{question}"
        )
        texts = yield from calls.answer([calls.conversation.asking(prompt)], progress)
        count("context_tokens", texts[0].request.prompt_length)
        return texts


def listed(documents: Sequence[str]) -> str:
    return "".join(f"Document: {each}\n\n" for each in documents)


def require_sizes(name: str, **sizes: int) -> None:
    """Raise SettingsError for a size that is no integer from 0 on."""
    for key, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise SettingsError(f"{name} needs a {key} of 0 or more, not {value!r}")
