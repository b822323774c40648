"""What a request comes to: texts for the engine, and the form of the answer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from decodery.core.abstract import Contract
from decodery.core.noise import nth_seed
from decodery.diffusion.texts import Fill
from decodery.engine.request import Request
from decodery.models.protocol import LanguageModel
from decodery.search.base import Search

from .job import FinishedText, Update
from .reading import Reading

Asked = TypeVar("Asked", Request, Fill)


class Form(Contract):
    """The form of one request's answers.

    Attributes:
        prefix: Of their ids.
        whole, chunk: What OpenAI calls such objects.
    """

    prefix: str
    whole: str
    chunk: str

    def of(self, text: FinishedText) -> FinishedText:
        """What of a text the client asked for."""
        return text

    def reasoning_tokens(self, text: FinishedText) -> int:
        """Tokens of the text's reasoning part."""
        return 0

    @abstractmethod
    def choice(self, index: int, text: FinishedText) -> dict[str, Any]:
        """A whole text as an element of `choices`."""

    @abstractmethod
    def opening(self, index: int) -> list[dict[str, Any]]:
        """What a stream begins with, for each choice."""

    @abstractmethod
    def grown(self, index: int, news: Update) -> list[dict[str, Any]]:
        """What a stream says of a text that goes on."""

    @abstractmethod
    def ended(self, index: int, news: Update, text: FinishedText) -> list[dict[str, Any]]:
        """What a stream says of a text that ends."""


@dataclass
class ReadForm(Form):
    """The form of what is read and not continued.

    Attributes:
        item: An element of `choices`, from its number and what was read.
    """

    prefix: str
    item: Callable[[int, FinishedText], dict[str, Any]]

    whole, chunk = "list", "list"

    def choice(self, index: int, text: FinishedText) -> dict[str, Any]:
        return self.item(index, text)

    def opening(self, index: int) -> list[dict[str, Any]]:
        return []

    def grown(self, index: int, news: Update) -> list[dict[str, Any]]:
        return []

    def ended(self, index: int, news: Update, text: FinishedText) -> list[dict[str, Any]]:
        return [self.choice(index, text)]


@dataclass(frozen=True)
class Plan:
    """The requests that one call of the API makes.

    Attributes:
        requests: Prompt by prompt, `n` of each; of a search one of each prompt, for its `n` best.
        include_usage: End a stream with the totals.
        models: That read each text: the server's, and those that draft.
    """

    requests: Sequence[Request | Fill | Reading]
    n: int
    form: Form
    search: Search | None = None
    stream: bool = False
    include_usage: bool = False
    models: int = 1


def models_of(request: Request | Fill, target: LanguageModel) -> int:
    """How many models read a text of this request."""
    drafter = request.drafter if isinstance(request, Request) else None
    return 1 if drafter is None else 1 + len(drafter.auxiliary_models(target))


def several(request: Asked, n: int) -> list[Asked]:
    """A request and `n` - 1 more like it, whose seeds count up."""
    found = [request]
    found += [replace(request, seed=nth_seed(request.seed, number)) for number in range(1, n)]
    return found
