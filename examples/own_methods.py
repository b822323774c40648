"""Methods of one's own of every other kind, each in a few lines and each checked by its laws.

Run it with `python examples/own_methods.py`; `decodery methods --import examples/own_methods.py` lists them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

import decodery as dc
from decodery.extend import (
    AcceptanceRule,
    Accepted,
    Blend,
    Budget,
    Candidates,
    Constrained,
    Constraint,
    ConstraintSpec,
    Context,
    Drafter,
    DraftTree,
    Engine,
    ForwardCoroutine,
    ForwardResult,
    LanguageModel,
    LogitsProcessor,
    LogitsSource,
    Member,
    NodeDistributions,
    Part,
    Reader,
    Request,
    Requirements,
    Sampler,
    Scorer,
    Segment,
    Stage,
    Vocabulary,
    check_batch,
    check_constraint,
    check_identical,
    check_scorer,
    check_state,
    decode,
    gather,
    register,
    score,
    score_all,
    tiny_transformer,
)


@register("calm")
@dataclass(frozen=True)
class Calm(LogitsProcessor):
    """A processor that remembers: the more the last tokens surprised, the sharper the distribution.

    strength: by how much logits grow per nat of the average surprise, of which every token takes 0.9 away.
    """

    strength: float = 0.2

    stage = Stage.TEMPERATURE
    stateful = True

    def init(self, prompt: Sequence[int]) -> float:
        return 0.0

    def advance(self, state: float, token: int, logprob: float) -> float:
        return 0.9 * state - 0.1 * logprob

    def process(self, logits: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
        surprise = logits.new_tensor([context.state for context in contexts])
        return logits * (1.0 + self.strength * surprise[:, None])


@register("two-memories")
@dataclass(frozen=True)
class TwoMemories(LogitsSource):
    """A source: the mean of what the model says after the whole prompt and after its last tokens alone.

    last: how many tokens of the prompt the second context begins with.
    """

    last: int = 4

    def over(self, model: LanguageModel, prompt: Sequence[int]) -> Reader:
        short = tuple(prompt[-self.last :])
        return _Mean((Member("prompt", model), Member("short", model, short)), len(prompt))


@dataclass(frozen=True)
class _Mean(Blend):
    def composed(self, part: Part, taps: Sequence[int]) -> ForwardCoroutine[ForwardResult]:
        # Asked together, both contexts are rows of one pass. Rows of the prompt have no counterpart in the second.
        both = [part.read(0, part.everything(), taps), part.read(1, part.only(1, part.wanted[part.output]))]
        whole, short = yield from gather(both)
        if not part.output.any():
            return whole
        rows, logits = torch.from_numpy(part.output), whole.logits.clone()
        logits[rows] = (whole.logits[rows].log_softmax(dim=-1) + short.logits.log_softmax(dim=-1)) / 2
        return replace(whole, logits=logits)


@register("at-most")
@dataclass(frozen=True)
class AtMost(ConstraintSpec):
    """A constraint: any text of at most so many tokens. It is said without a model, and compiled for its tokens."""

    tokens: int = 8

    def compile(self, vocabulary: Vocabulary) -> Constraint:
        return Counting(self.tokens, vocabulary.size, vocabulary.eos_ids)


@dataclass(frozen=True)
class Counting(Constraint):
    """The state is how many tokens may still come; a state is never changed, only followed by another."""

    tokens: int
    size: int
    ends: tuple[int, ...]

    def init(self, prompt: Sequence[int]) -> int:
        return self.tokens

    def allowed(self, state: int) -> np.ndarray:
        mask = np.full(self.size, state > 0)
        mask[list(self.ends)] = True
        return mask

    def advance(self, state: int, token: int) -> int:
        return 0 if token in self.ends else state - 1

    def is_complete(self, state: int) -> bool:
        return True


@register("varied")
@dataclass(frozen=True)
class Varied(Scorer):
    """A scorer: a text weighs the more, the more different tokens it has. It looks at tokens alone."""

    def score(self, candidates: Candidates) -> torch.Tensor:
        return torch.tensor([float(len(set(output))) for output in candidates.outputs])


@register("doubtful")
@dataclass(frozen=True)
class Doubtful(Scorer):
    """A scorer that asks the model: how much it would be surprised if the text ended with this token.

    token: its id.
    """

    token: int = 0

    @property
    def log(self) -> bool:
        return True

    def score(self, candidates: Candidates) -> ForwardCoroutine[torch.Tensor]:
        assert candidates.model is not None
        texts = [[*candidates.prompt, *output] for output in candidates.outputs]
        segments = [Segment.chunk(text, candidates.model.new_cache(), logit_rows=[len(text) - 1]) for text in texts]
        found = yield from score_all(candidates.model, segments)
        return torch.stack([-scored.logits[0].log_softmax(dim=-1)[self.token] for scored in found])


@register("short-sighted", lossless=True)
@dataclass(frozen=True)
class ShortSighted(Drafter):
    """A drafter that asks for a pass: it drafts what the model itself says after the last few tokens alone."""

    window: int = 8

    def propose(self, seq: Any, budget: Budget) -> ForwardCoroutine[DraftTree]:
        if min(budget.nodes, budget.depth) < 1:
            return DraftTree.root(seq.pending)
        text = seq.tokens[-self.window :]
        segment = Segment.chunk(text, seq.model.new_cache(), logit_rows=[len(text) - 1])
        scored = yield from score(seq.model, segment, role="draft")
        return DraftTree.chain(seq.pending, [int(scored.logits[0].argmax())])


@register("second-thought", guarantee="the likeliest token, or the second where the model is surer of what follows")
@dataclass(frozen=True)
class SecondThought(AcceptanceRule):
    """A rule that asks for a pass: where two tokens are close, it reads on after both before it takes one.

    margin: how many nats apart they may be.
    """

    margin: float = 0.5

    requirements = Requirements(greedy=True)

    def choose(self, tree: DraftTree, laws: NodeDistributions, seq: Any) -> ForwardCoroutine[Accepted]:
        best = laws.rows([0])[0].log_softmax(dim=-1).topk(2)
        tokens = best.indices.tolist()
        if seq.remaining == 1 or float(best.values[0] - best.values[1]) > self.margin:
            return Accepted([], tokens[0])
        yield from laws.grow([(token,) for token in tokens])
        sure = [float(laws.probabilities(laws.tree.child(0, token)).max()) for token in tokens]
        return Accepted([], tokens[sure.index(max(sure))])


if __name__ == "__main__":
    model, prompts = tiny_transformer(), [[1, 2, 3], [5] * 6 + [7, 8, 9] * 4]
    drawn = Sampler([dc.sampling.Temperature(0.8), Calm()])
    check_identical(model, prompts, drafter=dc.speculative.drafters.PromptLookup(), sampler=drawn)
    check_batch(model, prompts, drafter=ShortSighted(), sampler=drawn, logits_source=TwoMemories())
    check_state(model, prompts, drafter=ShortSighted(), logits_source=TwoMemories())
    check_batch(model, prompts, acceptance_rule=SecondThought())

    constraint = Counting(8, model.vocab_size, ends=(0,))
    check_constraint(constraint, eos_ids=[0])
    (text,) = decode(model, prompts[:1], sampler=Sampler([Constrained(constraint)]), eos_ids=[0])
    assert len(text.generated) <= 9

    request = Request(prompts[0], max_new_tokens=8, sampler=drawn)
    for scorer in (Varied(), Doubtful()):
        check_scorer(scorer, model, [(prompts[0], [4, 4, 5]), (prompts[0], [6])])
    for search in (dc.search.SMC(potential=Varied(), particles=4), dc.search.ControlledBlocks("doubtful", samples=3)):
        print(search.run(Engine(model), request)[0].generated)
    (drafted,) = decode(model, prompts[1:], drafter=ShortSighted(), logits_source=TwoMemories())
    print(f"{drafted.trace.tokens_per_pass:.2f} tokens per pass")
