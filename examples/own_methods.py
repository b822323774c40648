"""One method of every other kind, each short, and each run through its checks.

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
    Attention,
    AttentionPolicy,
    Blend,
    Branches,
    Budget,
    CachePolicy,
    Candidates,
    Canvas,
    Commit,
    Constrained,
    Constraint,
    ConstraintSpec,
    Context,
    Drafter,
    DraftLengthPolicy,
    DraftTree,
    Engine,
    ForwardCoroutine,
    ForwardResult,
    LanguageModel,
    LogitsProcessor,
    LogitsSource,
    Member,
    Monitor,
    NodeDistributions,
    OracleDenoiser,
    Part,
    Progress,
    Reader,
    Request,
    Requirements,
    Row,
    Sampler,
    Scorer,
    Search,
    Segment,
    Stage,
    Tap,
    TreeDrafter,
    TreePolicy,
    UnmaskingPolicy,
    VerificationFeedback,
    View,
    Vocabulary,
    check_batch,
    check_cache_policy,
    check_constraint,
    check_identical,
    check_logits_processor,
    check_scorer,
    check_search,
    check_state,
    choose,
    decode,
    filled,
    gather,
    register,
    run_sync,
    score,
    score_all,
    silent,
    tiny_transformer,
)


@register("calm")
@dataclass(frozen=True)
class Calm(LogitsProcessor):
    """A logits processor with a state: the more unlikely the last tokens were, the sharper the distribution.

    Attributes:
        strength: Growth of the logits per nat of the moving average of -log p, which keeps 0.9 of its value per token.
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
    """A logits source: the mean of two log-probabilities, after the whole prompt and after its last tokens alone.

    Attributes:
        last: Tokens of the prompt in the second context.
    """

    last: int = 4

    def over(self, model: LanguageModel, prompt: Sequence[int]) -> Reader:
        short = tuple(prompt[-self.last :])
        return _Mean((Member("prompt", model), Member("short", model, short)), len(prompt))


@dataclass(frozen=True)
class _Mean(Blend):
    def composed(self, part: Part, taps: Sequence[Tap]) -> ForwardCoroutine[ForwardResult]:
        # Requested together, both contexts are rows of one pass. Rows of the prompt have no counterpart in the second.
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
    """What the user writes: any text of at most `tokens` tokens. `compile` makes a constraint for one vocabulary."""

    tokens: int = 8

    def compile(self, vocabulary: Vocabulary) -> Constraint:
        return Counting(self.tokens, vocabulary.size, vocabulary.eos_ids)


@dataclass(frozen=True)
class Counting(Constraint):
    """The constraint. Its state is the number of tokens that may follow; `advance` returns a new state."""

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
    """A scorer without a model: the number of distinct tokens."""

    def score(self, candidates: Candidates) -> torch.Tensor:
        return torch.tensor([float(len(set(output))) for output in candidates.outputs])


@register("doubtful")
@dataclass(frozen=True)
class Doubtful(Scorer):
    """A scorer that requests forward passes: -log p of one token after the text.

    Attributes:
        token: Id of that token.
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
    """A drafter that requests a forward pass: it drafts the model's own token after the last `window` tokens alone."""

    window: int = 8

    def propose(self, seq: Any, budget: Budget) -> ForwardCoroutine[DraftTree]:
        if min(budget.nodes, budget.depth) < 1:
            return DraftTree.root(seq.last_token)
        text = seq.tokens[-self.window :]
        segment = Segment.chunk(text, seq.request.model.new_cache(), logit_rows=[len(text) - 1])
        scored = yield from score(seq.request.model, segment, role="draft")
        return DraftTree.chain(seq.last_token, [int(scored.logits[0].argmax())])


@register("second-thought", guarantee="the most likely token, or the second where the model is surer of what follows")
@dataclass(frozen=True)
class SecondThought(AcceptanceRule):
    """A rule that requests a forward pass: where two tokens are close, it reads both before it takes one.

    Attributes:
        margin: Largest difference of the two log-probabilities, in nats.
    """

    margin: float = 0.5

    requirements = Requirements(greedy=True)

    def choose(self, tree: DraftTree, laws: NodeDistributions, seq: Any) -> ForwardCoroutine[Accepted]:
        best = laws.rows([0])[0].log_softmax(dim=-1).topk(2)
        tokens = best.indices.tolist()
        if seq.remaining == 1 or float(best.values[0] - best.values[1]) > self.margin:
            return Accepted([], tokens[0])
        yield from laws.grow([(token,) for token in tokens])
        nodes = [laws.tree.children(0)[laws.tree.tokens[laws.tree.children(0)] == token][0] for token in tokens]
        sure = [float(laws.probabilities(int(node)).max()) for node in nodes]
        return Accepted([], tokens[sure.index(max(sure))])


@register("two-firsts", lossless=True)
@dataclass(frozen=True)
class TwoFirsts(TreePolicy):
    """Drafts two chains, one after each of the two most likely next tokens.

    Attributes:
        length: Tokens of each chain.
    """

    length: int = 4

    def grow(self, expander: TreeDrafter, seq: Any, budget: Budget) -> ForwardCoroutine[DraftTree]:
        tree, paths, ends = DraftTree.root(seq.last_token), [list[int]()], [0]
        for level in range(min(self.length, budget.depth, budget.nodes // 2)):
            ids, _ = yield from expander.most_likely(seq, tree, ends, 1 if level else 2)
            paths = [[*path, int(token)] for path, row in zip(paths, ids, strict=True) for token in row]
            ends = list(range(len(tree), len(tree) + len(paths)))
            tree = tree.extended(paths)
        return tree


@register("halving", lossless=True)
@dataclass(frozen=True)
class Halving(DraftLengthPolicy):
    """Doubles the length after a step that accepted its whole draft, and halves it after any other.

    Attributes:
        longest: The longest draft, in tokens.
    """

    longest: int = 16

    def start(self, seq: Any) -> int:
        return 4

    def bound(self, seq: Any, limit: Budget, batch: Sequence[Any]) -> Budget:
        return replace(limit, nodes=min(seq.states[self], limit.nodes))

    def observe(self, seq: Any, seen: VerificationFeedback, seconds: float) -> None:
        whole = len(seen.path) == len(seen.tree) - 1
        seq.states[self] = min(2 * seq.states[self], self.longest) if whole else max(seq.states[self] // 2, 1)


@register("first-tokens", guarantee="k=1 is greedy decoding")
@dataclass(frozen=True)
class FirstTokens(Search):
    """Continues greedily after each of the k most likely first tokens; the most probable text comes first.

    Attributes:
        k: Texts.
    """

    k: int = 3

    requirements = Requirements(rows=True, alone=True, greedy=True, law=True)

    def find(self, engine: Engine, request: Request, progress: Progress = silent) -> ForwardCoroutine[list[Any]]:
        branches = Branches(engine, request, self)
        logits = yield from branches.score([branches.root])
        texts = [branches.root.fork() for _ in range(self.k)]
        for text, token in zip(texts, logits[0].topk(self.k).indices.tolist(), strict=True):
            text.score = float(logits[0].log_softmax(dim=-1)[token])
            choose(text, token, logits[0])
        while running := [text for text in texts if not text.finished]:
            for text, row in zip(running, (yield from branches.score(running)), strict=True):
                text.score = (text.score or 0.0) + float(row.log_softmax(dim=-1).max())
                choose(text, int(row.argmax()), row)
        return branches.finish(sorted(texts, key=lambda text: -(text.score or 0.0)))


@register("recent")
@dataclass(frozen=True)
class Recent(CachePolicy):
    """Reads the first token and the last ones. All keys and values are kept.

    Attributes:
        window: Number of last tokens, the row's own included.
    """

    window: int = 16

    def state(self, model: LanguageModel, prompt: int) -> AttentionPolicy:
        return _Recent(self.window)


class _Recent(AttentionPolicy):
    def __init__(self, window: int) -> None:
        self.window = window

    def select(self, attention: Attention) -> np.ndarray:
        cache, rows = attention.segment.cache, attention.segment.positions
        assert cache is not None
        slots = cache.positions[attention.layer, : attention.seen.shape[-1]]
        return np.asarray((slots < 1) | (rows[:, None] - slots < self.window))


@register("repeats", lossless=True)
@dataclass(frozen=True)
class Repeats(Monitor):
    """Scores a text by how often its last token was written without a break."""

    def start(self, seq: Any) -> tuple[int, int]:
        return -1, 0

    def observe(self, state: tuple[int, int], row: Row) -> tuple[int, int]:
        token, count = state
        return row.token, count + 1 if row.token == token else 1

    def score(self, state: tuple[int, int]) -> float | None:
        return float(state[1]) if state[1] else None


@register("surer-half", guarantee="tokens of one pass do not depend on each other")
@dataclass(frozen=True)
class SurerHalf(UnmaskingPolicy):
    """Writes the half of the open positions that the model is surest of, in every pass."""

    def select(self, view: View, memory: Any) -> tuple[Commit, Any]:
        return view.top((len(view) + 1) // 2), memory


if __name__ == "__main__":
    model, prompts = tiny_transformer(), [[1, 2, 3], [5] * 6 + [7, 8, 9] * 4]
    drawn = Sampler([dc.sampling.Temperature(0.8), Calm()])
    check_logits_processor(Calm())
    check_identical(model, prompts, drafter=dc.speculative.drafters.PromptLookup(), sampler=drawn)
    check_batch(model, prompts, drafter=ShortSighted(), sampler=drawn, logits_source=TwoMemories())
    check_state(model, prompts, drafter=ShortSighted(), logits_source=TwoMemories())
    check_batch(model, prompts, acceptance_rule=SecondThought())
    forked = dc.speculative.drafters.DraftModel(model=tiny_transformer(0, num_layers=1), tree_policy=TwoFirsts())
    check_identical(model, prompts, drafter=forked, draft_length=Halving())
    check_cache_policy(model, prompts, Recent())

    constraint = Counting(8, model.vocab_size, ends=(0,))
    check_constraint(constraint, eos_ids=[0])
    (text,) = decode(model, prompts[:1], sampler=Sampler([Constrained(constraint)]), eos_ids=[0])
    assert len(text.generated) <= 9

    request = Request(prompts[0], max_new_tokens=8, sampler=drawn)
    for scorer in (Varied(), Doubtful()):
        check_scorer(scorer, model, [(prompts[0], [4, 4, 5]), (prompts[0], [6])])
    for search in (dc.search.SMC(potential=Varied(), particles=4), dc.search.ControlledBlocks("doubtful", samples=3)):
        print(search.run(Engine(model), request)[0].generated)
    check_search(model, prompts, FirstTokens(), max_new_tokens=8, eos_ids=(0,))
    check_identical(model, prompts, drafter=ShortSighted(), monitors=[Repeats(threshold=2.0, action="stop")])

    answer = [3, 1, 4, 1, 5]
    denoiser = OracleDenoiser([answer], vocab_size=10)
    canvas = run_sync(filled(denoiser, Canvas.of(denoiser, [2], len(answer)), SurerHalf()))
    assert canvas.tokens[1:].tolist() == answer and canvas.passes == 3

    (drafted,) = decode(model, prompts[1:], drafter=ShortSighted(), logits_source=TwoMemories())
    print(f"{drafted.trace.tokens_per_pass:.2f} tokens per pass")
