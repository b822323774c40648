"""How likely a question is after a passage: unsupervised reranking of passages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.models.protocol import Reader
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.scorer import Candidates, Scorer
from decodery.step.writer import writes

from .reading import read, reader
from .text import texts

_SHOWN = "Passage: {passage}. Please write a question based on this passage."


@register(
    "question-likelihood",
    paper="Improving Passage Retrieval with Zero-Shot Question Generation (2022)",
    guarantee="none: as good as the model; a score depends on one passage alone",
    requirements=("a prompt that is text or chat",),
    texts=("shown",),
)
@dataclass(frozen=True)
class QuestionLikelihood(Scorer):
    """Scores a passage by the mean log-probability of the question's tokens after it.

    The question is the prompt, and the passage the text that is scored. No training is needed. The server ranks
    documents by it. Cost: the rows of passage and question, in passes that all candidates share.

    Attributes:
        shown: What the model reads before the question, with {passage} where the passage stands.
        encode: Tokens of a text that follows another one; by default the tokenizer's.
    """

    shown: str = _SHOWN
    encode: Callable[[str], list[int]] | None = None

    requirements = Requirements(rows=True)

    def __post_init__(self) -> None:
        if "{passage}" not in self.shown:
            raise SettingsError("question-likelihood shows a passage: write {passage} where it stands in shown")

    @property
    def prefixes(self) -> bool:
        return False

    @property
    def apart(self) -> bool:
        return True

    @property
    def bounds(self) -> tuple[float, float]:
        return -torch.inf, 0.0

    @property
    def log(self) -> bool:
        return True

    def bind(self, tokenizer: Tokenizer) -> QuestionLikelihood:
        return replace(self, encode=tokenizer.encode_after)

    def fits(self, model: Reader) -> None:
        if writes(model):
            raise SettingsError("question-likelihood reads the tokens of a given text: use a model on this machine")

    def score(self, candidates: Candidates) -> ForwardCoroutine[torch.Tensor]:
        calls, name = candidates.calls, "question-likelihood"
        if calls is None or self.encode is None:
            raise SettingsError(f"{name} reads the question as a text, and this one is token ids: search through `LLM`")
        question = self.encode(calls.conversation.task)
        if not question:
            raise SettingsError(f"{name} needs a question, and this one is empty")
        said = [self.shown.replace("{passage}", text) for text in texts(candidates, None, name)]
        passages = [calls.conversation.apart(each).tokens() for each in said]
        found = torch.zeros(len(passages), dtype=torch.float64, device="cpu")

        def take(number: int, row: int, logits: torch.Tensor) -> None:
            first = row + 1 - len(passages[number])
            following = torch.tensor(question[first : first + len(logits)], dtype=torch.int64, device=logits.device)
            found[number] += logits.double().log_softmax(dim=-1).gather(1, following[:, None]).sum().cpu()

        fresh = replace(candidates, states=None, model=calls.reader)
        rows = [[*passage, *question[:-1]] for passage in passages]
        yield from read(fresh, reader(fresh, name), rows, [len(question)] * len(rows), take)
        return (found / len(question)).clamp(max=0.0)
