"""Pairwise judging: a model compares answers two by two, and the one that wins most comes first."""

from __future__ import annotations

import re
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from decodery.core.errors import SettingsError
from decodery.core.ledger import count
from decodery.core.registry import register
from decodery.engine.calls import Calls
from decodery.models.loaders.load import LoadedModel
from decodery.models.loaders.named import Precision, loaded
from decodery.models.loaders.store import Progress
from decodery.models.protocol import LanguageModel
from decodery.sampling.sampler import Sampler
from decodery.scorers.pair_preference import PairPreference
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence

from .pipeline import Pipeline
from .pool import require_count
from .second import second_model
from .verdicts import spoken, verdicts

_VERDICT = re.compile(r"\[([AB])\]")
_ASKED = (
    "Task:\n{task}\n\nAnswer A:\n{first}\n\nAnswer B:\n{second}\n\nWhich answer is better? Write your verdict in "
    "brackets, [A] or [B], and nothing else."
)


@register(
    "pairwise",
    paper="Judging LLM-as-a-Judge with MT-Bench and Chatbot Arena (2023)",
    guarantee="none: as good as the judge; n=1 is plain decoding",
    requirements=("a prompt that is text or chat",),
)
@dataclass(frozen=True)
class Pairwise(Pipeline):
    """Draws n answers and has a judge compare each two of them, in both orders.

    The answer of most wins comes first. A comparison whose two orders disagree, or whose verdict is none, is half a win
    for each. The score is the share of comparisons won, ties go to the first draw. It takes n * (n - 1) verdicts,
    of greedy texts; a judge that runs here is held to the form of a verdict.

    Attributes:
        n: Answers.
        model: The judge: "" is the model that writes. After a server it is the URL of another one, with #NAME where
            that has several models; else a model with the same tokens. A preference model is a folder, of any tokens.
        dtype: Precision of the judge.
        form: "verdict" has a text written; "rlhflow" reads the probabilities of A and B of RLHFlow's pair-preference
            model, whose mean over the other answers and both orders is the score.
    """

    n: int = 4
    model: LoadedModel | LanguageModel | str = ""
    dtype: Precision = "auto"
    form: Literal["verdict", "rlhflow"] = "verdict"

    def __post_init__(self) -> None:
        require_count("pairwise", "n", self.n)
        if self.n > 16:
            raise SettingsError(
                f"pairwise compares each two answers, and {self.n} make {self.n * (self.n - 1)}: 16 at most"
            )
        if self.form not in ("verdict", "rlhflow"):
            raise SettingsError(f"the form of pairwise is verdict or rlhflow, not {self.form!r}")
        if self.form == "rlhflow":
            self._preference()
        elif isinstance(self.model, LoadedModel):
            raise SettingsError("a judge that writes verdicts is given by its name, or as a LanguageModel")

    @property
    def texts_at_once(self) -> int:
        """See `Search.texts_at_once`."""
        return self.n * max(self.n - 1, 1)

    def follow(self, calls: Calls, progress: Progress) -> ForwardCoroutine[list[Sequence]]:
        texts = yield from calls.answer([calls.conversation] * self.n, progress)
        calls.standing = texts
        if self.form == "rlhflow":
            answers = [spoken(seq) for seq in texts]
            chosen = yield from self._preference().preferred(calls.conversation, answers)
            # Its own .5 is no comparison.
            wins = [2 * (sum(row) - 0.5) for row in chosen]
        else:
            wins = yield from self._verdicts(calls, [spoken(seq) for seq in texts], progress)
        count("comparisons", self.n * (self.n - 1))
        for seq, won in zip(texts, wins, strict=True):
            seq.score = won / max(2 * (self.n - 1), 1)
        return sorted(texts, key=lambda seq: -(seq.score or 0.0))

    def _preference(self) -> PairPreference:
        """The preference model.

        Raises:
            SettingsError: Where the judge has no tokenizer and template of its own.
        """
        model = self.model
        if isinstance(model, str) and model and "://" not in model:
            model = loaded(model, self.dtype)
        if not isinstance(model, LoadedModel):
            raise SettingsError(
                "form=rlhflow reads the logits of a preference model: give its folder, as in model=FOLDER, or what "
                "`load` returned"
            )
        return PairPreference(model)

    def _verdicts(self, calls: Calls, answers: Ordered[str], progress: Progress) -> ForwardCoroutine[list[float]]:
        """What each answer wins."""
        assert not isinstance(self.model, LoadedModel)
        pairs = list(combinations(range(self.n), 2))
        orders = [order for pair in pairs for order in (pair, pair[::-1])]
        prompts = [
            _ASKED.format(task=calls.conversation.task, first=answers[first], second=answers[second])
            for first, second in orders
        ]
        writer = second_model(self.model, self.dtype, calls.engine.model) if self.model else None
        greedy = Sampler.from_settings()
        found = yield from verdicts(
            calls, prompts, _winner, r"\[(A|B)\]", sampler=greedy, most=8, progress=progress, writer=writer
        )
        wins = [0.0] * self.n
        for (first, second), verdict in zip(orders, found, strict=True):
            wins[first] += 0.5 if verdict is None else float(verdict == 0)
            wins[second] += 0.5 if verdict is None else float(verdict == 1)
        return wins


def _winner(said: str) -> int | None:
    """0 for A and 1 for B; None where a text says neither, or both."""
    named = set(_VERDICT.findall(said))
    return "AB".index(named.pop()) if len(named) == 1 else None
