"""What a scorer is: it says how good texts are that a model has written, begun or finished."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import isgeneratorfunction
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from decodery.core.abstract import Contract
from decodery.core.errors import SettingsError
from decodery.core.ledger import charged
from decodery.core.requirements import Requirements
from decodery.models.cache.cache import KVCache
from decodery.models.hooks import Tap
from decodery.models.protocol import Reader

from .forward_request import ForwardCoroutine, as_coroutine, off_loop
from .scorer_calls import ScorerCalls

if TYPE_CHECKING:
    from decodery.models.tokenizers.tokenizer import Tokenizer

__all__ = ["Candidates", "Scorer", "judge", "log_scores"]


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Texts after one prompt, to be scored together.

    Attributes:
        prompt: Token ids.
        outputs: m lists of the ids that were written after it, end tokens left out.
        finished: Of each, whether it is an answer or a beginning.
        hidden: {tap: [m, hidden]} states of the last tokens, where the scorer needs them.
        texts: The outputs as text if known already.
        decode: Ids to text, None without a tokenizer.
        model: What reads for scorers that ask.
        states: What it has read of each output's text at least up to the prompt's end, to be forked and never changed;
            None to read all of it.
        begins: How many ids of each output stand before its last step, None where texts do not grow by steps.
        calls: Opens texts after prompts of a scorer's own; None where the prompt is token ids alone.
        role: What `model` goes by in the ledger where it is not the writer.
        logprobs: What a server said of the log-probability of each token; None where the model itself is at hand.
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
        """Some of them, in this order."""
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
    """How good texts are: higher is better, whatever is counted.

    Fields are settings; one instance serves many.

    A score depends on the prompt and the candidate alone, not on what else is scored with it, when, or how often.
    """

    @property
    def prefixes(self) -> bool:
        """Whether beginnings can be scored."""
        return True

    @property
    def answers(self) -> bool:
        """Whether finished texts can be scored."""
        return True

    @property
    def writes(self) -> bool:
        """Whether it writes texts of its own beside those that it scores."""
        return False

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the largest score there can be."""
        return -float("inf"), float("inf")

    @property
    def log(self) -> bool:
        """Whether scores are natural logarithms of weights; else they are the weights themselves."""
        return False

    @property
    def apart(self) -> bool:
        """Whether it is read after prompts of its own, of question and answer, which any model can be asked."""
        return False

    @property
    def blocks(self) -> bool:
        """Whether `score` and `remark` may take long, or wait for something: other texts then go on meanwhile."""
        return True

    @property
    def requirements(self) -> Requirements:
        """What it must find: by `taps`, hidden states of the candidates' last tokens."""
        return Requirements()

    def bind(self, tokenizer: Tokenizer) -> Self:
        """The same with its texts turned into tokens; called before a search begins."""
        return self

    def fits(self, model: Reader) -> None:
        """Raise SettingsError where texts of this model cannot be scored."""
        return

    def remark(self, prompt: str, text: str) -> str:
        """What is wrong with a finished text, for the writer of the next one.

        The text is "" if nothing is known.

        Args:
            prompt: Text before the answer.
            text: A finished text.
        """
        return ""

    @abstractmethod
    def score(self, candidates: Candidates) -> torch.Tensor | ForwardCoroutine[torch.Tensor]:
        """[m] scores, as a tensor, a list or an array.

        It is a generator if a model has to be asked, see `decodery.step.forward_request`. Call it through `judge`.
        """


def judge(scorer: Scorer, candidates: Candidates) -> ForwardCoroutine[torch.Tensor]:
    """[m] scores of the candidates, entered in the ledger of the request.

    Args:
        scorer: What scores.
        candidates: What is scored.

    Raises:
        SettingsError: For candidates of a kind that this scorer does not score, and for scores that are none.
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
    """What a scorer gave, which may be a list of numbers or an array, as a tensor of floating point."""
    try:
        found = given if isinstance(given, torch.Tensor) else torch.from_numpy(np.array(given, dtype=np.float64))
    except (TypeError, ValueError) as error:
        raise SettingsError(
            f"{type(scorer).__name__} must give a tensor, an array or a list of numbers, and gave {given!r:.100}"
        ) from error
    return found if found.is_floating_point() else found.double()


def scores_of(scorer: Scorer, candidates: Candidates) -> ForwardCoroutine[torch.Tensor]:
    """What a scorer says; a plain function runs beside the driver's loop.

    Args:
        scorer: Used on one thread at a time.
        candidates: What is scored.

    Returns:
        [m] scores.
    """
    if isgeneratorfunction(type(scorer).score) or not scorer.blocks:
        return _as_scores(scorer, (yield from as_coroutine(scorer.score(candidates))))
    given = yield from off_loop(partial(scorer.score, candidates), scorer)
    return _as_scores(scorer, (yield from as_coroutine(given)))


def remark_of(scorer: Scorer, prompt: str, text: str) -> ForwardCoroutine[str]:
    """What a scorer remarks on a text, see `Scorer.remark`, beside the driver's loop.

    Args:
        scorer: Used on one thread at a time.
        prompt: Before the text.
        text: A finished text.

    Returns:
        The remark.
    """
    if type(scorer).remark is Scorer.remark or not scorer.blocks:
        return scorer.remark(prompt, text)
    return (yield from off_loop(partial(scorer.remark, prompt, text), scorer))


def log_scores(scorer: Scorer, scores: torch.Tensor) -> torch.Tensor:
    """[m] float64: natural logarithms of the weights that these scores are.

    Raises:
        SettingsError: For negative ones.
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
