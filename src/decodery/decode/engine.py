"""The loop: propose, score, choose, commit, over all active sequences at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from time import perf_counter

import numpy as np
import torch

from ..budget.base import MOST_NODES, Budget
from ..budget.cost import CONTEXT, cost_curve
from ..core.memory import Memory
from ..core.sequence import Sequence
from ..core.text import Detokenizer, TextStream
from ..core.trace import Step
from ..core.tree import TokenTree
from ..draft.base import Observation
from ..errors import DecoderyError, PromptError, SettingsError
from ..model.batch import Batch, Scores, Segment
from ..model.cache import KVCache
from ..model.protocol import LanguageModel
from ..verify.base import Accepted, Laws, Undecided
from .commit import commit
from .request import Request

_COSTED_ROWS = 1024


@dataclass(slots=True)
class _Turn:
    """One sequence's part in a pass. The tree's nodes are the last rows of the segment.

    prefill: the rows are unread tokens, not a draft. drafting: seconds the draft took. scores: of the pass it took part
    in, as segment `number`. asked: its rule asked for the rows. laws: None where unread tokens remain, so that nothing
    is chosen.
    """

    seq: Sequence
    segment: Segment
    tree: TokenTree
    prefill: bool
    decides: bool
    drafting: float = 0.0
    scores: Scores | None = None
    number: int = 0
    asked: bool = False
    laws: Laws | None = None
    accepted: Accepted | None = None
    emitted: int = 0

    @property
    def logits(self) -> torch.Tensor:
        """[m, vocab] of the rows whose logits the segment wants."""
        assert self.scores is not None
        return self.scores.of(self.number)

    def hidden(self, layer: int) -> torch.Tensor:
        """[n, hidden] of the segment's rows after `layer` layers."""
        assert self.scores is not None
        return self.scores.hidden_of(self.number, layer)


class Engine:
    """Decodes any number of sequences with one model. Every `step` is one pass over all of them.

    Sequences whose requests name a source of logits of their own are scored by what that source makes of the model:
    one pass for each distinct one.

    Prompts are read in chunks of `prefill_chunk` tokens; sequences that read and sequences that write share passes.
    detokenizer: makes a text stream per sequence; without it sequences have tokens only. memory: what drafters remember
    from sequence to sequence; its own by default. pass_seconds: as in `Budget`, by the tokens
    in the cache; measured by default.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        detokenizer: Callable[[], Detokenizer] | None = None,
        prefill_chunk: int = 512,
        memory: Memory | None = None,
        pass_seconds: Callable[[int], np.ndarray] | None = None,
    ) -> None:
        self.model = model
        self.memory = memory or Memory()
        self.prefill_chunk = prefill_chunk
        self._detokenizer = detokenizer
        self._active: list[Sequence] = []
        self._costs: tuple[np.ndarray, np.ndarray] | None = None
        self._pass_seconds = pass_seconds or self._measured

    def submit(self, request: Request, *, like: Sequence | None = None) -> Sequence:
        """Start a sequence. like: one already submitted with the same prompt, whose prefill it shares."""
        seq = self.open(request)
        if like is not None and (like.tokens[: like.prompt_length] != seq.tokens or like.source != seq.source):
            raise SettingsError(
                "a sequence can share the prefill of another one only if their prompts are the same, and their sources"
            )
        seq.like = like
        if seq.budget is not None:
            seq.budget_state = seq.budget.start(seq)
        if seq.drafter is not None:
            seq.draft_state = seq.drafter.start(seq)
            if seq.drafter.weighs_cost or (seq.budget is not None and seq.budget.weighs_cost):
                self._pass_seconds(len(seq.tokens))
        self._active.append(seq)
        return seq

    def open(self, request: Request) -> Sequence:
        """A sequence of which nothing is read yet, for a caller that decodes it without this engine's steps."""
        prompt = [int(token) for token in request.prompt]
        _check_prompt(prompt, self.model)
        model = self.model if request.source is None else request.source.over(self.model, prompt)
        _check_prompt(prompt, model)
        taps = (*request.rule.taps, *(request.drafter.taps if request.drafter else ()))
        deepest, layers = max(taps, default=0), model.config.num_layers
        if deepest > layers:
            raise SettingsError(
                f"hidden states after layer {deepest} are asked for, and the model has {layers} layers: use what was "
                "trained for this model"
            )
        seq = Sequence(
            tokens=prompt,
            prompt_length=len(prompt),
            cache=_resume(request, prompt) or model.new_cache(),
            sampler=request.sampler,
            rule=request.rule,
            drafter=request.drafter,
            vocab_size=model.vocab_size,
            model=model,
            detokenizer=self._detokenizer,
            seed=request.seed,
            max_new_tokens=min(request.max_new_tokens, model.config.max_positions - len(prompt)),
            eos_ids=frozenset(request.eos_ids),
            logprobs=request.logprobs,
            memory=self.memory,
            budget=request.budget,
            source=request.source,
        )
        if self._detokenizer is not None:
            seq.text = TextStream(self._detokenizer(), request.stop)
        seq.sampler_state = seq.sampler.init(prompt)
        return seq

    def run(self, sequences: Iterable[Sequence]) -> None:
        """Step until all of these are finished; then raise the error of the first that failed, if one did."""
        asked = list(sequences)
        while any(not seq.finished for seq in asked):
            if not self.step() and any(not seq.finished for seq in asked):
                raise ValueError("some of these sequences were not submitted to this engine")
        for seq in asked:
            if seq.error is not None:
                raise seq.error

    @torch.no_grad()
    def step(self) -> list[Sequence]:
        """One pass over all active sequences; returns those it advanced. Finished ones leave the engine."""
        self._active = [seq for seq in self._active if not seq.finished]
        times = [perf_counter()]
        turns = [turn for seq in self._active if self._ready(seq) if (turn := self._propose_safely(seq))]
        if not turns:
            return []
        times.append(perf_counter())
        _score(turns)
        times.append(perf_counter())
        for turn in turns:
            if turn.decides:
                _choose(turn)
        times.append(perf_counter())
        for turn in turns:
            _commit(turn)
        times.append(perf_counter())
        for turn in turns:
            turn.seq.trace.steps.append(_record(turn, times, len(turns)))
        self._active = [seq for seq in self._active if not seq.finished]
        return [turn.seq for turn in turns]

    def _ready(self, seq: Sequence) -> bool:
        """Whether the sequence can take part; a shared prompt is taken over once its owner has read it."""
        if seq.like is None:
            return True
        owner, shared = seq.like.cache, seq.prompt_length - 1
        if owner.next_position >= shared:
            seq.cache = owner.fork()
            seq.cache.truncate(shared)
            if seq.slots is not None:
                seq.cache.provide(seq.slots)
        elif not seq.like.finished:
            return False
        seq.like = None
        return True

    def _propose_safely(self, seq: Sequence) -> _Turn | None:
        """`_propose`; a sequence that cannot go on is finished with its error, and the others never notice."""
        try:
            return self._propose(seq)
        except DecoderyError as error:
            seq.fail(error)
            return None

    def _propose(self, seq: Sequence) -> _Turn:
        """The rows this sequence feeds: a chunk of unread tokens, or its draft tree."""
        cache, drafter = seq.cache, seq.drafter
        unread = len(seq.tokens) - cache.next_position
        if seq.asked is not None:
            return _Turn(seq, _segment(seq.asked.tree, seq), seq.asked.tree, False, True, asked=True)
        if unread > 1 or seq.position == 0:
            reads = drafter is not None and drafter.reads_prompt
            most = min(self.prefill_chunk, seq.chunk) if reads and seq.chunk else self.prefill_chunk
            chunk = seq.tokens[cache.next_position :][:most]
            decides = len(chunk) == unread
            if reads:
                rows = None
            else:
                rows = [len(chunk) - 1] if decides else []
            segment = Segment.chunk(chunk, cache, logit_rows=rows)
            return _Turn(seq, segment, TokenTree.root(chunk[-1]), True, decides)
        tree, begin = TokenTree.root(seq.pending), perf_counter()
        if drafter is not None and seq.remaining > 1:
            budget = self._budget(seq)
            tree = drafter.propose(seq, budget)
            _check_draft(tree, seq, budget)
        drafting = perf_counter() - begin
        return _Turn(seq, _segment(tree, seq), tree, False, True, drafting)

    def _budget(self, seq: Sequence) -> Budget:
        """How much the sequence may draft in this step."""
        # The bonus token needs a place too, so a draft is never deeper than what is left but one.
        limit = Budget(
            MOST_NODES,
            seq.remaining - 1,
            len(self._active),
            partial(self._pass_seconds, len(seq.tokens)),
            measured=self._pass_seconds == self._measured,
        )
        policy = seq.budget
        if policy is None:
            return limit
        if policy.asks:
            limit = replace(limit, ask=partial(policy.goes_on, seq))
        return policy.bound(seq, limit, self._active)

    def _measured(self, context: int) -> np.ndarray:
        """Times of passes over 0, 1, 2, ... rows of this model behind `context` tokens; measured when first asked."""
        if self._costs is None:
            curve = cost_curve(self.model)
            rows = np.maximum(np.arange(_COSTED_ROWS), 1)
            self._costs = np.array([curve.seconds(n) for n in rows]), curve.token + curve.row_token * rows
        near, token = self._costs
        return near + max(0, context - CONTEXT) * token


def _check_prompt(prompt: list[int], model: LanguageModel) -> None:
    limit, vocab = model.config.max_positions, model.vocab_size
    if not prompt:
        raise PromptError("the prompt is empty: give at least one token")
    if len(prompt) >= limit:
        raise PromptError(
            f"the prompt has {len(prompt)} tokens and the model's context {limit}: shorten it so that at least "
            "one new token fits"
        )
    if not 0 <= min(prompt) <= max(prompt) < vocab:
        raise PromptError(f"the prompt has token ids outside the model's vocabulary of {vocab}")


def _segment(tree: TokenTree, seq: Sequence) -> Segment:
    mask, positions = None if tree.is_chain else tree.ancestor_mask(), seq.cache.next_position + tree.depths
    if tree.inputs is not None:
        return Segment(positions, embeddings=tree.embedded(seq.model), mask=mask, cache=seq.cache)
    return Segment(positions, tree.tokens, mask=mask, cache=seq.cache)


def _score(turns: list[_Turn]) -> None:
    """One pass of every distinct model over the turns that are scored by it."""
    groups: dict[LanguageModel, list[_Turn]] = {}
    for turn in turns:
        groups.setdefault(turn.seq.model, []).append(turn)
    for model, members in groups.items():
        taps = {tap for turn in members if turn.seq.drafter for tap in turn.seq.drafter.taps}
        taps |= {tap for turn in members if turn.decides for tap in turn.seq.rule.taps}
        scores = model.forward(Batch([turn.segment for turn in members]), taps=sorted(taps))
        for number, turn in enumerate(members):
            turn.scores, turn.number = scores, number


def _commit(turn: _Turn) -> None:
    seq, rows = turn.seq, len(turn.segment)
    if seq.error is not None:
        seq.cache.keep([])
        return
    if turn.laws is None or turn.accepted is None:
        # Where the rule asked for more, the pending token stays pending.
        seq.cache.keep(range(rows if seq.asked is None else rows - len(turn.tree)))
        emitted: list[int] = []
    else:
        emitted = commit(seq, turn.tree, turn.laws, turn.accepted)
        first = rows - len(turn.tree)
        # The last emitted token is the new pending one: known, but not in the cache.
        kept = turn.accepted.path[: len(emitted) - 1]
        seq.cache.keep([*range(first + 1), *(first + node for node in kept)])
    turn.emitted = len(emitted)
    if seq.drafter is not None and (seq.drafter.reads_prompt if turn.prefill else seq.asked is None):
        seen = _observation(turn, emitted)
        seq.drafter.observe(seq, seen)
        if seq.budget is not None and not turn.prefill and not turn.asked:
            seq.budget.observe(seq, seen, turn.drafting)


def _choose(turn: _Turn) -> None:
    """Let the sequence's rule walk its tree, whose nodes are the last rows of its segment."""
    nodes = len(turn.tree)
    hidden = {tap: turn.hidden(tap)[-nodes:] for tap in turn.seq.rule.taps}
    laws = Laws(turn.tree, turn.logits[-nodes:], turn.seq, hidden)
    try:
        found = turn.seq.rule.choose(turn.tree, laws, turn.seq)
        if isinstance(found, Undecided):
            turn.seq.asked = found
        else:
            turn.accepted, turn.laws, turn.seq.asked = found, laws, None
    except DecoderyError as error:
        turn.seq.fail(error)


def _check_draft(tree: TokenTree, seq: Sequence, budget: Budget) -> None:
    """A draft with another root would change the text; one beyond its budget, read positions that do not exist."""
    if tree.tokens[0] != seq.pending or len(tree) - 1 > budget.nodes or int(tree.depths.max()) > budget.depth:
        raise ValueError(
            f"{type(seq.drafter).__name__} drafted {len(tree) - 1} nodes to depth {tree.depths.max()} below token "
            f"{tree.tokens[0]}; it may draft {budget.nodes} to depth {budget.depth} below {seq.pending}"
        )


def _observation(turn: _Turn, emitted: list[int]) -> Observation:
    taps = turn.seq.drafter.taps if turn.seq.drafter else ()
    hidden = {tap: turn.hidden(tap) for tap in taps}
    tree, path = turn.tree, [] if turn.accepted is None else turn.accepted.path
    if turn.prefill and turn.segment.tokens is not None:
        tokens = turn.segment.tokens
        tree, path = TokenTree.chain(int(tokens[0]), tokens[1:]), list(range(1, len(tokens)))
    return Observation(tree, turn.logits, hidden, path, emitted, start=int(turn.segment.positions[0]))


def _record(turn: _Turn, times: list[float], sequences: int) -> Step:
    propose, score, choose, commit_ = (after - before for before, after in pairwise(times))
    path = [] if turn.accepted is None else turn.accepted.path
    counts = dict(turn.seq.cache.counts)
    turn.seq.cache.counts.clear()
    if turn.asked:
        counts |= {"extra_passes": 1, "extra_rows": len(turn.segment)}
    return Step(
        nodes=len(turn.tree) - 1,
        accepted=min(len(path), turn.emitted),
        emitted=turn.emitted,
        rows=len(turn.segment),
        prefill=turn.prefill,
        propose=propose,
        score=score,
        choose=choose,
        commit=commit_,
        sequences=sequences,
        counts=counts,
        choices=[] if turn.accepted is None else _choices(turn.tree, path),
    )


def _choices(tree: TokenTree, path: list[int]) -> list[tuple[int, int]]:
    """Of every visited node that has children: the rank of the accepted one, -1 for none, and their number."""
    found = []
    for node, child in zip([0, *path], [*path, -1], strict=True):
        if len(children := tree.children(node)):
            found.append((int((children == child).argmax()) if child > 0 else -1, len(children)))
    return found


def _resume(request: Request, prompt: list[int]) -> KVCache | None:
    """The earlier sequence's cache, cut to the tokens both share; at least the last prompt token is read again.

    None where there is none, or where a source may have read something else in the prompt's place.
    """
    earlier = request.reuse
    if earlier is None or earlier.source is not None or request.source is not None:
        return None
    shared = 0
    for ours, theirs in zip(prompt[:-1], earlier.tokens, strict=False):
        if ours != theirs:
            break
        shared += 1
    cache = earlier.cache.fork()
    cache.truncate(min(shared, cache.next_position))
    return cache
