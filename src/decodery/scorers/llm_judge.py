"""A language model as a judge: asked for a label, and how likely it finds each is read off."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from decodery.core.errors import SettingsError
from decodery.core.ledger import charged, count
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.models.protocol import Reader
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.scorer import Candidates, Scorer
from decodery.step.scorer_calls import ScorerCalls
from decodery.step.writer import writes

from .reading import read, reader
from .text import texts

_INSTRUCTION = (
    "How good is this answer to the question? Reply with one number from 1 (wrong or useless) to 5 (right and "
    "complete), "
    "and nothing else."
)
_LISTED = 20
"""Likely tokens that servers tell of at most."""


@register(
    "llm-judge",
    paper="Judging LLM-as-a-Judge with MT-Bench and Chatbot Arena (2023)",
    guarantee="none: as good as the judge; a score depends on one text alone",
    requirements=("a prompt that is text or chat",),
    texts=("instruction", "labels"),
)
@dataclass(frozen=True)
class LLMJudge(Scorer):
    """Scores a text by the label that a model gives it when asked, each label counted by its probability.

    The score is the mean by the labels' probabilities, normalised once over all labels, so that judges are compared
    beyond their favourite label, and nothing is drawn. The judge is the model that wrote the text; another one is asked
    by `reward-model`, as in reward-model(scorer=llm-judge,model=FOLDER). After a server only the 20 most likely tokens
    are told of: a label that is not among them counts as the least likely one that is, which is a bound, and as
    `unheard` in the ledger; a text of which none is heard is left out. The ledger also has `judge_calls`,
    `judge_tokens_in` and `judge_tokens_out`.

    Attributes:
        instruction: What the judge is told after question and answer, in a conversation of its own.
        labels: From worst to best, which are worth 0 to 1 in equal steps; each is known by its first token, with or
            without a space before it.
        tokens: First token ids of each label; by default of `labels`, by the tokenizer.
    """

    instruction: str = _INSTRUCTION
    labels: tuple[str, ...] = ("1", "2", "3", "4", "5")
    tokens: tuple[tuple[int, ...], ...] = ()

    requirements = Requirements(logprobs=True)

    def __post_init__(self) -> None:
        if len(self.labels) < 2 or len({label.strip() for label in self.labels} - {""}) < len(self.labels):
            raise SettingsError("llm-judge needs two or more labels, none of them twice or empty")

    @property
    def apart(self) -> bool:
        return True

    @property
    def bounds(self) -> tuple[float, float]:
        return 0.0, 1.0

    def bind(self, tokenizer: Tokenizer) -> LLMJudge:
        firsts = [
            {ids[0] for spelt in (label, f" {label}") if (ids := tokenizer.encode(spelt, special=False))}
            for label in self.labels
        ]
        # A space by itself, as some tokenizers cut it, begins them all.
        common = set.intersection(*firsts)
        return replace(self, tokens=tuple(tuple(sorted(first - common)) for first in firsts))

    def fits(self, model: Reader) -> None:
        if writes(model):
            labels = [label.strip() for label in self.labels]
            if alike := [(a, b) for a in labels for b in labels if a != b and b.startswith(a)]:
                raise SettingsError(
                    f"llm-judge tells labels apart by what a server says first, and {alike[0][0]!r} begins "
                    f"{alike[0][1]!r}: use other labels"
                )
            return
        flat = [token for first in self.tokens for token in first]
        if not all(self.tokens) or not flat or len(set(flat)) < len(flat):
            raise SettingsError(
                "llm-judge distinguishes labels by their first tokens, and some of these are equal: use other labels, "
                "and search through `LLM`"
            )

    def score(self, candidates: Candidates) -> ForwardCoroutine[torch.Tensor]:
        calls = candidates.calls
        if calls is None:
            raise SettingsError("llm-judge writes a prompt of its own, and this one is token ids: search through `LLM`")
        prompts = [self._prompt(calls, text) for text in texts(candidates, None, "llm-judge")]
        self.fits(calls.reader)
        if writes(calls.reader):
            return (yield from self._heard(calls, prompts))
        ids = [calls.conversation.apart(prompt).tokens() for prompt in prompts]
        found = torch.zeros(len(ids), dtype=torch.float64, device="cpu")

        def take(number: int, row: int, logits: torch.Tensor) -> None:
            law = logits[-1].double().log_softmax(dim=-1)
            found[number] = _mean([float(law[list(first)].logsumexp(dim=0)) for first in self.tokens])

        fresh = replace(candidates, prompt=(), outputs=[()] * len(ids), states=None, model=calls.reader)
        yield from read(fresh, reader(fresh, "llm-judge"), ids, [1] * len(ids), take)
        counts = charged().counts
        counts["judge_calls"] = counts.get("judge_calls", 0) + len(ids)
        counts["judge_tokens_in"] = counts.get("judge_tokens_in", 0) + sum(map(len, ids))
        return found

    def _prompt(self, calls: ScorerCalls, answer: str) -> str:
        return f"Question:\n{calls.conversation.task}\n\nAnswer:\n{answer}\n\n{self.instruction}"

    def _heard(self, calls: ScorerCalls, prompts: list[str]) -> ForwardCoroutine[torch.Tensor]:
        """By what a server says of the first token."""
        said = [calls.conversation.apart(prompt) for prompt in prompts]
        found = yield from calls.judge(said, most=1, logprobs=_LISTED)
        scores = []
        for seq in found:
            likely: dict[str, float] = {}
            for each in seq.token_logprobs[:1]:
                stream = seq.request.detokenizer
                assert stream is not None
                likely = {stream().push([token]): logprob for token, logprob in [*each.top, (each.token, each.logprob)]}
            logs = self._logs(likely)
            if max(logs) == -math.inf:
                raise SettingsError(
                    f"the judge was to say one of {', '.join(self.labels)}, and began with {next(iter(likely), '')!r}: "
                    "use a model that answers at once, or another instruction"
                )
            scores.append(_mean(logs))
        return torch.tensor(scores, dtype=torch.float64, device="cpu")

    def _logs(self, likely: Mapping[str, float]) -> list[float]:
        """Log-probability of each label, by those of the tokens that it begins with; all -inf where none is listed.

        A label that is not listed is no more likely than the least likely token that is: that bound stands for it.
        """
        labels = [label.strip() for label in self.labels]
        # What begins several labels tells nothing.
        telling = {
            text: logprob
            for text, logprob in likely.items()
            if text.strip() and sum(label.startswith(text.strip()) for label in labels) == 1
        }
        found = []
        for label in labels:
            own = [logprob for text, logprob in telling.items() if label.startswith(text.strip())]
            count("unheard", not own)
            found.append(math.log(sum(map(math.exp, own))) if own else -math.inf)
        least = min(likely.values(), default=-math.inf) if max(found) > -math.inf else -math.inf
        return [max(each, least) for each in found]


def _mean(logs: list[float]) -> float:
    """The mean worth of labels with these log-probabilities, normalised."""
    top = max(logs)
    weights = [math.exp(each - top) for each in logs]
    return sum(n * weight for n, weight in enumerate(weights)) / (len(logs) - 1) / sum(weights)
