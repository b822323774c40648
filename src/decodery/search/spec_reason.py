"""SpecReason: a small model writes the steps, and the model itself rewrites those that it does not find good."""

from __future__ import annotations

from dataclasses import dataclass

from decodery.core.errors import SettingsError
from decodery.core.ledger import count
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.models.loaders.named import Precision
from decodery.models.protocol import LanguageModel
from decodery.sampling.logits_processor import require_count, require_number
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.scorer import Scorer
from decodery.step.sequence import Sequence

from .judged import JudgedSearch
from .second import SecondModel
from .steps import Growth, Stepped

_ASKED = (
    'rating(question="\n\nHow correct and logically valid is the last step, from 0 to 9? Say one digit.\nScore: ",'
    "words=0|1|2|3|4|5|6|7|8|9,values=0/1/2/3/4/5/6/7/8/9,how=argmax)"
)


@register(
    "spec-reason",
    paper="SpecReason: Fast and Accurate Inference-Time Compute via Speculative Reasoning (2025)",
    guarantee="lossy: threshold above all scores is the model's own plain decoding, below them the second model's",
    requirements=("a second model with the same vocabulary, or the one that comes with the target",),
    texts=("delimiter",),
)
@dataclass(frozen=True)
class SpecReason(Stepped, JudgedSearch):
    """Lets a second model write each step, scores it, and keeps it at or above the threshold.

    Of a judged step the model reads the rows once, and of the question on a fork; the trace counts steps "kept" and
    "rewritten", and its tree says who wrote each. What the published code does to markers of thinking within a step,
    and to steps that repeat the one before, is not done here.

    Attributes:
        scorer: By default the model itself is asked for a digit, in one token after the step; its most likely token
            counts, and what is no digit is 0. Any scorer of beginnings and answers will do.
        step_tokens, delimiter, rounds: See step-beam.
        model, dtype: The second model, as for the drafter draft-model; it needs the same tokens. Where a server writes,
            it is the URL of another one, as in model=http://localhost:8001 or with #NAME after it.
        threshold: What a score must reach; a step that does not is left, and the model writes it from the same place
            with the same noise, by the request's drafter, budget and rule: with draft-model of the same second model
            both kinds of speculation work together.
        first: Steps that the model writes without asking.
    """

    scorer: Scorer | str = _ASKED
    step_tokens: int = 512
    rounds: int = 150
    model: LanguageModel | str | None = None
    dtype: Precision = "auto"
    threshold: float = 7.0
    first: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        JudgedSearch.__post_init__(self)
        require_number("the threshold of spec-reason", self.threshold)
        require_count("first of spec-reason", self.first)
        if not (self.judge.answers and self.judge.prefixes):
            raise SettingsError("spec-reason judges texts step by step: give a scorer of beginnings and answers")

    @property
    def requirements(self) -> Requirements:
        return Requirements.merged((Requirements(continues=True), self.judge.requirements))

    def follow(self, growth: Growth) -> ForwardCoroutine[list[Sequence]]:
        second, node = SecondModel(growth, self.model, self.dtype), growth.root
        yield from growth.read(node.seq)
        while not node.finished:
            if node.depth >= self.first:
                drafted = yield from second.write(node)
                yield from growth.read(drafted.seq)
                judged = yield from growth.judge([drafted])
                if judged and drafted.scores[-1] >= self.threshold:
                    count("kept")
                    node = drafted
                    growth.settle([node])
                    continue
                count("rewritten")
            (node,) = yield from growth.extend([node])
            growth.settle([node])
        return growth.close([node.seq])
