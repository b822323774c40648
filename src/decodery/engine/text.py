"""One text's part in the loop: a turn reads unread tokens, or proposes, asks for scores, chooses and commits."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import cast

import torch

from decodery.core.requirements import Requirements
from decodery.core.trace import RecordedTree, Step
from decodery.models.batch import Segment
from decodery.models.hooks import OF_OUTPUTS, HookPoint, Intervention, Tap, hook_point
from decodery.models.layer_plan import WHOLE, LayerPlan
from decodery.models.protocol import EmbeddingModel
from decodery.speculative.acceptance.coupled import Coupled
from decodery.step.acceptance_rule import AcceptanceRule, Accepted, NodeDistributions, OpenQuestion
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter, VerificationFeedback
from decodery.step.embedded import reading
from decodery.step.forward_request import ForwardCoroutine, ForwardResult, as_coroutine, off_loop, score
from decodery.step.sequence import Sequence
from decodery.step.wanted import Wanted
from decodery.step.writer import writes

from .commit import commit, logprobs
from .monitoring import monitors_of
from .preempt import caches_of

_RULE = Coupled()


@dataclass(frozen=True, slots=True)
class StepBudget:
    """What a turn may take of a pass.

    Attributes:
        rows: Unread tokens at most.
        budget: Of what it drafts, where it drafts.
    """

    rows: int
    budget: Budget


def unread(seq: Sequence) -> int:
    """Tokens of a text that its cache does not hold; 1 where only the last token is left."""
    return len(seq.tokens) - seq.cache.next_position


def expect(seq: Sequence) -> None:
    """Let the caches that a text reads through take memory for what it has to read at once."""
    for cache in caches_of(seq):
        cache.expect(len(seq.tokens))


def reads(seq: Sequence) -> bool:
    """Whether the next turn reads on, and does not draft.

    A text's first token is drafted where an encoder's source is all that the drafter goes by.
    """
    if (missing := unread(seq)) > 1 or seq.position:
        return missing > 1
    request = seq.request
    requirements = Requirements() if request.drafter is None else request.drafter.requirements
    shown = (
        requirements.prompt or requirements.prompt_taps or bool(request.monitors) or request.cache_policy is not None
    )
    return shown or not requirements.source


def run_step(seq: Sequence, step_budget: StepBudget) -> ForwardCoroutine[None]:
    """One turn of a text.

    Where it ends early by an error or because it is closed, nothing tentative is left.
    """
    if writes(seq.request.model):
        yield from seq.request.model.advance(seq)
        return
    expect(seq)
    if (question := seq.request.sampler.question(seq.processor_states)) is not None:
        yield from off_loop(question)
    try:
        yield from _read(seq, step_budget.rows) if reads(seq) else _write(seq, step_budget.budget)
    finally:
        seq.cache.keep([])


def _read(seq: Sequence, rows: int) -> ForwardCoroutine[None]:
    """Read a chunk of unread tokens; the last one of a prompt gives the first token of the text.

    Tokens that were read before, and lost with the cache, change nothing but the cache.
    """
    start, missing, request, monitors = seq.cache.next_position, unread(seq), seq.request, monitors_of(seq)
    requirements = Requirements() if request.drafter is None else request.drafter.requirements
    shows = (requirements.prompt or requirements.prompt_taps) and start >= seq.observed
    all_rows = shows and requirements.prompt
    if all_rows and request.chunk is not None:
        rows = min(rows, request.chunk)
    end = len(seq.tokens) if seq.position == 0 else len(seq.tokens) - 1
    # Rows that are read again are shown once: drafters and monitors may have observed different parts of them.
    seen = (seq.observed, 0 if monitors is None else monitors.read_to)
    end = min([end, *(known for known in seen if start < known)])
    chunk = seq.tokens[start : min(end, start + rows)]
    decides = len(chunk) == missing
    unreported = request.prompt_logprobs is not None and len(seq.prompt_token_logprobs) < request.prompt_length - 1
    all_rows = all_rows or (unreported and start + len(chunk) > len(seq.prompt_token_logprobs))
    wanted = None if all_rows else ([len(chunk) - 1] if decides else [])
    segment = reading(seq, chunk, wanted)
    segment.interventions = seq.interventions
    step = Step(rows=len(chunk), prefill=True)
    if decides:
        yield from _decide(seq, segment, DraftTree.root(chunk[-1]), step, 0.0, shown=chunk if shows else None)
        if request.cache_policy is not None and seq.position and not seq.finished:
            yield from as_coroutine(request.cache_policy.settle(seq))
        return
    taps = [
        *(requirements.taps if shows else ()),
        *(monitors.requirements.taps if monitors is not None and monitors.reads else ()),
    ]
    scored = yield from score(request.model, segment, [*dict.fromkeys(taps)], request.role)
    seq.trace.steps.append(step)
    seq.writable(scored.logits)
    _report_prompt(seq, scored.logits, start)
    if monitors is not None:
        monitors.read(seq, scored.hidden, start, len(chunk))
    seq.cache.keep(range(len(chunk)))
    if shows:
        assert request.drafter is not None
        request.drafter.observe(seq, _chunk_seen(chunk, scored.logits, scored.hidden, [], start))
        seq.observed = start + len(chunk)


def _write(seq: Sequence, budget: Budget) -> ForwardCoroutine[None]:
    """Propose, score, choose, commit."""
    tree, begin, request = DraftTree.root(seq.last_token), perf_counter(), seq.request
    drafter = request.drafter
    skips = drafter is not None and request.draft_length is None and drafter.skips_step(seq, budget)
    if drafter is not None and seq.remaining > 1 and not skips and request.model.capabilities.chains:
        tree = yield from as_coroutine(drafter.propose(seq, budget))
        check_draft(tree, seq, budget)
        tree = tree.on(request.model.device)
        if not request.model.capabilities.trees:
            tree = tree.trunk()
    drafting = perf_counter() - begin
    step = Step(nodes=len(tree) - 1, rows=len(tree))
    layer_plan = _layer_plan(tree, seq)
    yield from _decide(seq, _segment(tree, seq, layer_plan), tree, step, drafting, layer_plan=layer_plan, skips=skips)


def _decide(
    seq: Sequence,
    segment: Segment,
    tree: DraftTree,
    step: Step,
    drafting: float,
    shown: list[int] | None = None,
    layer_plan: LayerPlan = WHOLE,
    skips: bool = False,
) -> ForwardCoroutine[None]:
    """Score a segment whose last rows are the tree's nodes, let the rule choose, and commit what it accepts.

    shown: the prompt tokens of the segment, where the drafter is to see their rows. layer_plan: which layers score
    it. skips: whether the drafter skips this step.
    """
    request, monitors, first = seq.request, monitors_of(seq), len(segment) - len(tree)
    drafter, rule = request.drafter, request.acceptance_rule
    observes = drafter is not None and (not step.prefill or shown is not None)
    monitored = () if monitors is None else monitors.requirements.taps
    drafting_taps = drafter.requirements.taps if drafter is not None and observes else ()
    taps = [*dict.fromkeys((*rule.requirements.taps, *drafting_taps, *monitored))]
    beside = drafter.ahead(seq, tree) if drafter is not None and seq.remaining > 1 and not skips else None
    wanted = _wanted(seq, tree) if request.model.device.type != "cpu" else None
    scored = yield from score(request.model, segment, taps, request.role, layer_plan, beside, wanted)
    begin = perf_counter()
    seq.writable(scored.logits)
    seq.trace.steps.append(step)
    if step.prefill:
        start = seq.cache.next_position
        _report_prompt(seq, scored.logits, start)
        if monitors is not None and monitors.read(seq, scored.hidden, start, len(segment)):
            # What changes rows from the prompt's end on changes its last one already: that is read once more.
            seq.cache.keep(range(len(segment) - 1))
            if shown is not None and len(shown) > 1:
                assert drafter is not None
                hidden = {tap: rows[:-1] for tap, rows in scored.hidden.items()}
                drafter.observe(seq, _chunk_seen(shown[:-1], scored.logits[:-1], hidden, [], start))
                seq.observed = start + len(shown) - 1
            return
    logits = scored.logits[-len(tree) :]
    if step.prefill and request.cache_policy is not None:
        opening = request.cache_policy.open(seq, len(segment))
        opened = None if opening is None else (yield from opening)
        logits = logits if opened is None else seq.writable(opened)
    known = () if scored.row_choices is None else scored.row_choices.picks
    laws = NodeDistributions(tree, logits, seq, {tap: scored.hidden[tap][-len(tree) :] for tap in taps}, first, known)
    accepted = yield from _chosen(rule, tree, laws, seq)
    # Where the rule asked for more, its passes have steps of their own; the last one decided.
    last = seq.trace.steps[-1]
    last.choose += perf_counter() - begin
    emitted = yield from commit(seq, laws.tree, laws, accepted)
    # The last emitted token is known, but not in the cache.
    kept = accepted.path[: len(emitted) - 1]
    seq.cache.keep([*range(first + 1), *(first + node for node in kept)])
    last.emitted, last.accepted = len(emitted), min(len(accepted.path), len(emitted))
    last.choices = choices_of(laws.tree, accepted.path)
    if request.return_draft_trees:
        path = accepted.path[: last.accepted]
        last.tree = RecordedTree(laws.tree.tokens.tolist(), laws.tree.parents.tolist(), path, emitted)
    if skips and not seq.finished:
        seq.observed = len(seq.tokens) - 1
    elif drafter is not None and observes:
        _observe(seq, drafter, scored, laws, accepted, emitted, drafting, shown)
    if monitors is not None and monitors.requested is not None:
        monitors.roll_back(seq)


def _wanted(seq: Sequence, tree: DraftTree) -> Wanted | None:
    """What is to be known of the tree's rows by the one copy of a pass; None where the rule goes by other things."""
    request = seq.request
    if request.acceptance_rule != _RULE or request.cache_policy is not None or request.logits_source is not None:
        return None
    return Wanted.after(seq, tree, range(len(tree)))


def _chosen(
    rule: AcceptanceRule, tree: DraftTree, laws: NodeDistributions, seq: Sequence
) -> ForwardCoroutine[Accepted]:
    """What the rule accepts; questions of a constraint about drafted tokens are answered beside the loop."""
    while True:
        try:
            return (yield from as_coroutine(rule.choose(tree, laws, seq)))
        except OpenQuestion as error:
            yield from off_loop(error.question)


def _observe(
    seq: Sequence,
    drafter: Drafter,
    scored: ForwardResult,
    laws: NodeDistributions,
    accepted: Accepted,
    emitted: list[int],
    drafting: float,
    shown: list[int] | None,
) -> None:
    """Let the drafter, and the budget, see what became of a step."""
    if shown is not None:
        start = len(seq.tokens) - len(emitted) - len(shown)
        drafter.observe(seq, _chunk_seen(shown, scored.logits, scored.hidden, emitted, start))
        seq.observed = start + len(shown)
        return
    hidden = {tap: laws.hidden[tap] for tap in drafter.requirements.taps}
    start = len(seq.tokens) - len(emitted) - 1
    seen = VerificationFeedback(laws.tree, laws.logits, hidden, accepted.path, emitted, start)
    drafter.observe(seq, seen if drafter.requirements.states else seen.of_tokens())
    seq.observed = len(seq.tokens) - 1
    if seq.request.draft_length is not None:
        seq.request.draft_length.observe(seq, seen, drafting)


def _report_prompt(seq: Sequence, logits: torch.Tensor, start: int) -> None:
    """Note what was asked about the prompt's own tokens. logits: [n, vocab], the first after the token at `start`.

    What is read again, because the cache was given up, is not noted twice.
    """
    known = len(seq.prompt_token_logprobs)
    if seq.request.prompt_logprobs is None or not start <= known < start + len(logits):
        return
    following = seq.tokens[known + 1 : min(start + len(logits) + 1, seq.request.prompt_length)]
    seq.prompt_token_logprobs += logprobs(logits[known - start :], following, seq.request.prompt_logprobs)


def _chunk_seen(
    chunk: list[int], logits: torch.Tensor, hidden: dict[Tap, torch.Tensor], emitted: list[int], start: int
) -> VerificationFeedback:
    """Rows of the prompt, as a chain that came true."""
    tree = DraftTree.chain(chunk[0], chunk[1:])
    return VerificationFeedback(tree, logits, hidden, list(range(1, len(chunk))), emitted, start)


def _layer_plan(tree: DraftTree, seq: Sequence) -> LayerPlan:
    """The layers that are left to score a tree: all, where states of layers already passed are read."""
    if tree.entered is None:
        return WHOLE
    first, layers = tree.entered.layer, seq.request.model.config.num_layers
    request = seq.request
    parts = (request.acceptance_rule, request.drafter, monitors_of(seq))
    read = [hook_point(tap, layers) for part in parts if part is not None for tap in part.requirements.taps]
    changed = [hook_point(change.hook_point, layers) for change in seq.interventions]
    early = any(place.name not in OF_OUTPUTS and place.layer < first for place in (*read, *changed))
    # Rows are not changed any more where they enter.
    early = early or any(place == HookPoint("residual", first) for place in changed)
    return WHOLE if early else LayerPlan(tuple(range(first, layers)))


def _segment(tree: DraftTree, seq: Sequence, layer_plan: LayerPlan) -> Segment:
    """The rows of a tree below what the cache holds, as its first layer on the route reads them."""
    mask, positions = None if tree.is_chain else tree.ancestor_mask(), seq.cache.next_position + tree.depths
    own = seq.interventions
    if tree.entered is not None and layer_plan != WHOLE:
        return Segment(positions, states=tree.entered.states, mask=mask, cache=seq.cache, interventions=own)
    if tree.inputs is not None:
        changes = tuple(
            Intervention(site, lambda rows, segment, change=change: change(rows, tree))  # type: ignore[misc]
            for site, change in tree.changes.items()
        )
        states = tree.embedded(cast(EmbeddingModel, seq.request.model))
        return Segment(positions, states=states, mask=mask, cache=seq.cache, interventions=(*changes, *own))
    return Segment(positions, tree.tokens, mask=mask, cache=seq.cache, interventions=own)


def check_draft(tree: DraftTree, seq: Sequence, budget: Budget) -> None:
    """Raise ValueError for a draft that is no tree, has another root or exceeds its budget.

    Another root would change the text, and a node beyond the budget would read positions that do not exist.
    """
    if not isinstance(tree, DraftTree):
        raise ValueError(
            f"{type(seq.request.drafter).__name__}.propose returned an object of type {type(tree).__name__}: return a "
            "DraftTree, such as DraftTree.chain(seq.last_token, tokens)"
        )
    if len(tree) == 1 and tree.is_chain and tree.tokens[0] == seq.last_token:
        return
    name = type(seq.request.drafter).__name__
    try:
        tree.validate(seq.request.vocab_size)
    except ValueError as error:
        raise ValueError(f"{name} drafted what is no tree of tokens: {error}") from error
    if tree.tokens[0] != seq.last_token or len(tree) - 1 > budget.nodes or int(tree.depths.max()) > budget.depth:
        raise ValueError(
            f"{name} drafted {len(tree) - 1} nodes to depth {tree.depths.max()} below token "
            f"{tree.tokens[0]}; it may draft {budget.nodes} to depth {budget.depth} below {seq.last_token}"
        )
    verified = seq.request.acceptance_rule.requirements.drafts
    if len(tree) > 1 and verified is not None and tree.origin not in verified:
        raise ValueError(
            f"{name} made a {tree.origin} draft, which {type(seq.request.acceptance_rule).__name__} cannot verify"
        )


def choices_of(tree: DraftTree, path: list[int]) -> list[tuple[int, int]]:
    """By visited node that has children: the rank of the accepted one, -1 for none, and their number."""
    found = []
    for node, child in zip([0, *path], [*path, -1], strict=True):
        if len(children := tree.children(node)):
            found.append((int((children == child).argmax()) if child > 0 else -1, len(children)))
    return found
