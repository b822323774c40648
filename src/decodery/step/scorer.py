"""Base class of scorers, which rate the quality of finished texts or of prefixes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import isgeneratorfunction
from typing import Self

import numpy as np
import torch

from decodery.core.abstract import Contract
from decodery.core.errors import SettingsError
from decodery.core.ledger import charged
from decodery.core.requirements import Requirements
from decodery.models.cache.cache import KVCache
from decodery.models.hooks import Tap
from decodery.models.protocol import Reader
from decodery.models.tokenizers.tokenizer import Tokenizer

from .forward_request import ForwardCoroutine, as_coroutine, off_loop
from .scorer_calls import ScorerCalls

__all__ = ["Candidates", "Scorer", "judge", "log_scores"]


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Texts after one prompt, to be scored together.

    Attributes:
        prompt: Token ids.
        outputs: m lists of token ids after the prompt, without end tokens.
        finished: For each output, whether it is a finished answer; False for a prefix.
        hidden: By tap, [m, hidden] states of the last tokens, where the scorer requires them.
        texts: The outputs as text, if already decoded.
        decode: Token ids to text, None without a tokenizer.
        model: The model for scorers that need forward passes.
        states: Caches of the outputs, each at least up to the end of the prompt; they may be forked but not changed.
            None to read everything.
        begins: Number of ids in each output before its last step, None where texts are not written in steps.
        calls: Opens texts after the scorer's own prompts; None where the prompt is only known as token ids.
        role: Name of `model` in the ledger where it is not the model that writes.
        logprobs: Log-probability of each token as a server reported it; None where the model itself is available.
    """

    prompt: Sequence[int]
    outputs: Sequence[Sequence[int]]
    finished: Sequence[bool]
    hidden: Mapping[Tap, torch.Tensor] = field(default_factory=dict)
    texts: Sequence[str] | None = None
    decode: Callable[[Sequence[int]], str] | None = None
    model: Reader | None = None
    states: Sequence[KVCache] | None = None
    begins: Sequence[int] | None = None
    calls: ScorerCalls | None = None
    role: str = ""
    logprobs: Sequence[Sequence[float]] | None = None

    def __len__(self) -> int:
        return len(self.outputs)

    def of(self, numbers: Sequence[int]) -> Candidates:
        """The candidates with these indices, in this order."""
        return replace(
            self,
            outputs=[self.outputs[n] for n in numbers],
            finished=[self.finished[n] for n in numbers],
            hidden={tap: states[list(numbers)] for tap, states in self.hidden.items()},
            texts=None if self.texts is None else [self.texts[n] for n in numbers],
            states=None if self.states is None else [self.states[n] for n in numbers],
            begins=None if self.begins is None else [self.begins[n] for n in numbers],
            logprobs=None if self.logprobs is None else [self.logprobs[n] for n in numbers],
        )


class Scorer(Contract):
    """Rates texts: a higher score is better.

    Fields are settings; one instance serves many requests.

    A score depends only on the prompt and the candidate, not on other candidates, earlier calls or time.
    """

    @property
    def prefixes(self) -> bool:
        """Whether it can score prefixes of texts."""
        return True

    @property
    def answers(self) -> bool:
        """Whether it can score finished texts."""
        return True

    @property
    def writes(self) -> bool:
        """Whether it generates texts, such as a judge's, to score others."""
        return False

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest possible score."""
        return -float("inf"), float("inf")

    @property
    def log(self) -> bool:
        """Whether scores are natural logarithms of weights; if not, they are the weights."""
        return False

    @property
    def apart(self) -> bool:
        """Whether it uses its own prompts of question and answer, which any model can read."""
        return False

    @property
    def blocks(self) -> bool:
        """Whether `score` and `remark` may be slow or wait, so that they run in a worker thread."""
        return True

    @property
    def requirements(self) -> Requirements:
        """Its requirements; `taps` for hidden states of the candidates' last tokens."""
        return Requirements()

    def bind(self, tokenizer: Tokenizer) -> Self:
        """Return the scorer with its texts converted to tokens; called before a search begins."""
        return self

    def fits(self, model: Reader) -> None:
        """Raise SettingsError if it cannot score texts of this model."""
        return

    def remark(self, prompt: str, text: str) -> str:
        """Describe the errors of a finished text, for the prompt of the next attempt.

        Args:
            prompt: Text before the answer.
            text: A finished text.

        Returns:
            The description, "" if there is none.
        """
        return ""

    @abstractmethod
    def score(self, candidates: Candidates) -> torch.Tensor | ForwardCoroutine[torch.Tensor]:
        """[m] scores, as a tensor, a list or an array.

        It is a coroutine if it needs forward passes, see `decodery.step.forward_request`. Call it through `judge`.
        """


def judge(scorer: Scorer, candidates: Candidates) -> ForwardCoroutine[torch.Tensor]:
    """Score the candidates, and record the cost in the ledger of the request.

    Args:
        scorer: The scorer.
        candidates: The candidates.

    Returns:
        [m] scores.

    Raises:
        SettingsError: If the scorer does not score this kind of candidates, or its scores are invalid.
    """
    for kind, known, wanted in (
        ("answers", scorer.answers, any(candidates.finished)),
        ("beginnings", scorer.prefixes, not all(candidates.finished)),
    ):
        if wanted and not known:
            raise SettingsError(f"{type(scorer).__name__} does not score {kind}: use a scorer that does")
    if missing := [tap for tap in scorer.requirements.taps if tap not in candidates.hidden]:
        raise SettingsError(
            f"{type(scorer).__name__} reads hidden states after layer {missing[0]}, which are not at hand here: use it "
            "with controlled-decoding or controlled-blocks"
        )
    if not len(candidates):
        return torch.empty(0, dtype=torch.float64, device="cpu")
    charged().scorer_calls += len(candidates)
    found = yield from scores_of(scorer, candidates)
    if tuple(found.shape) != (len(candidates),) or bool(found.isnan().any()) or bool((found == torch.inf).any()):
        raise SettingsError(
            f"{type(scorer).__name__} must give each of {len(candidates)} candidates a number or -inf, and gave "
            f"{found.tolist()}"
        )
    return found


def _as_scores(scorer: Scorer, given: object) -> torch.Tensor:
    """Convert the result of a scorer, which may be a list or an array, to a floating-point tensor."""
    try:
        found = given if isinstance(given, torch.Tensor) else torch.from_numpy(np.array(given, dtype=np.float64))
    except (TypeError, ValueError) as error:
        raise SettingsError(
            f"{type(scorer).__name__} must give a tensor, an array or a list of numbers, and gave {given!r:.100}"
        ) from error
    return found if found.is_floating_point() else found.double()


def scores_of(scorer: Scorer, candidates: Candidates) -> ForwardCoroutine[torch.Tensor]:
    """Call a scorer; a blocking one runs in a worker thread.

    Args:
        scorer: Used on one thread at a time.
        candidates: The candidates.

    Returns:
        [m] scores.
    """
    if isgeneratorfunction(type(scorer).score) or not scorer.blocks:
        return _as_scores(scorer, (yield from as_coroutine(scorer.score(candidates))))
    given = yield from off_loop(partial(scorer.score, candidates), scorer)
    return _as_scores(scorer, (yield from as_coroutine(given)))


def remark_of(scorer: Scorer, prompt: str, text: str) -> ForwardCoroutine[str]:
    """Call `Scorer.remark`; a blocking scorer runs in a worker thread.

    Args:
        scorer: Used on one thread at a time.
        prompt: Text before the answer.
        text: A finished text.

    Returns:
        The remark.
    """
    if type(scorer).remark is Scorer.remark or not scorer.blocks:
        return scorer.remark(prompt, text)
    return (yield from off_loop(partial(scorer.remark, prompt, text), scorer))


def log_scores(scorer: Scorer, scores: torch.Tensor) -> torch.Tensor:
    """[m] float64 natural logarithms of the weights that these scores stand for.

    Raises:
        SettingsError: If a weight is negative.
    """
    scores = scores.double()
    if scorer.log:
        return scores
    if bool((scores < 0).any()):
        raise SettingsError(
            f"{type(scorer).__name__} gave {float(scores.min()):.4g}, and a weight is no less than 0: use a scorer of "
            "weights or of their logarithms"
        )
    return scores.log()
