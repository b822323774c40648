"""Adaptive weighted rejection sampling as a rule: constrained tokens without a mask."""

from __future__ import annotations

from dataclasses import dataclass

from decodery.core.errors import ConstraintError
from decodery.core.ledger import count
from decodery.core.registry import register
from decodery.core.requirements import Provides
from decodery.sampling.awrs import CheckedSampler, TokenTrial, first_accepted, in_order
from decodery.step.acceptance_rule import AcceptanceRule, Accepted, NodeDistributions
from decodery.step.draft_tree import DraftTree
from decodery.step.sequence import Sequence


@register(
    "awrs",
    paper="Fast Controlled Generation from Language Models with Adaptive Weighted Rejection Sampling (2025)",
    guarantee="seed-identical: the same tokens as constrained plain decoding with the same seed, whatever drafted them",
    lossless=True,
)
@dataclass(frozen=True)
class AWRS(AcceptanceRule):
    """Tries tokens in the order of their noise until the constraint accepts one; no mask is computed.

    Each is an exact draw from the model's distribution cut to what is allowed, and it costs one check more than tokens
    were rejected: the fewer, the more the model agrees with the constraint. The ledger counts `checks` and
    `rejections`. For constraints whose check of one token costs less than their mask, a `checker` above all; without a
    constraint it is the coupled rule. The weights of the paper, which correct towards the distribution over whole
    texts, are used by the search `smc`.
    """

    provides = Provides(checked=True)

    def choose(self, tree: DraftTree, laws: NodeDistributions, seq: Sequence) -> Accepted:
        checks = CheckedSampler(seq.request.sampler)
        path: list[int] = []
        node = 0
        while True:
            token = _draw(checks, laws, node, seq)
            child = tree.child(node, token)
            if child is None:
                return Accepted(path, token)
            path.append(child)
            node = child


def _draw(checks: CheckedSampler, laws: NodeDistributions, node: int, seq: Sequence) -> int:
    laws.require_answers([node])
    context = laws.context(node)
    law = checks.law(laws.row(node)[None], [context])[0]
    seed = None if seq.request.sampler.greedy else seq.request.seed
    trial: TokenTrial = first_accepted(in_order(law, seed, context.position), checks.accept(context))
    checked, rejected = trial.checks, trial.rejections
    if trial.token is None:
        law, asked = checks.relaxed(law, laws.row(node).float(), context)
        trial = first_accepted(in_order(law, seed, context.position), lambda token: True)
        checked, rejected = checked + asked, rejected + asked
    count("checks", checked)
    count("rejections", rejected)
    if trial.token is None:
        raise ConstraintError(
            "no token the model could write is accepted here: the constraint accepts the beginning of a text that "
            "nothing can complete"
        )
    return trial.token
