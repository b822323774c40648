"""What exact rules accept and what they emit instead: pure functions of probabilities, float64 [vocab] each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Ordered

import torch

from decodery.core import noise
from decodery.step.acceptance_rule import Accepted, NodeDistributions
from decodery.step.draft_tree import DraftTree
from decodery.step.sequence import Sequence

Tests = Iterator[tuple[float, torch.Tensor]]
"""What a rule makes of the draws at a node, in turn: the probability that each is accepted where none before it was,
and what those before it left of the target's law. The last pair is (0, the law of what is emitted if none is accepted).
"""

_NOTHING = 1e-12
"""A residual of less mass is rounding: the laws are equal, and a rejection has probability zero."""


def acceptance(p: torch.Tensor, q: torch.Tensor, token: int) -> float:
    """min(1, p / q) of a token that was drawn from q; 0 where p is."""
    wanted, drawn = float(p[token]), float(q[token])
    return wanted / drawn if wanted < drawn else float(wanted > 0.0)


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """norm(max(p - q, 0)), the distribution of what is emitted after a rejection.

    p where both are equal up to rounding.
    """
    return positive(p - q, p)


def positive(rest: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    """`rest` without its negative entries, in place and normalised.

    `otherwise` where only rounding is left.
    """
    mass = float(rest.clamp_min_(0.0).sum())
    return rest.div_(mass) if mass > _NOTHING else otherwise


def without(law: torch.Tensor, token: int) -> torch.Tensor:
    """`law` without a token, normalised; `law` itself where nothing else is in it."""
    rest = law.clone()
    rest[token] = 0.0
    mass = float(rest.sum())
    return rest.div_(mass) if mass > 0.0 else law


def sampled_law(p: torch.Tensor, q: torch.Tensor, token: int) -> tuple[float, torch.Tensor]:
    """Acceptance probability of one child drawn from q, and the distribution of the token emitted instead."""
    return acceptance(p, q, token), residual(p, q)


def point_mass_law(p: torch.Tensor, tokens: Ordered[int]) -> tuple[list[float], torch.Tensor]:
    """The same for deterministic children in order: conditional acceptance of each, then the rest.

    Each child is accepted with what the remaining distribution gives it and taken out when it is not.
    """
    rest, accepts = p.clone(), []
    for token in tokens:
        accepts.append(float(rest[token]))
        rest[token] = 0.0
        mass = float(rest.sum())
        if mass <= _NOTHING:
            return accepts + [1.0] * (len(tokens) - len(accepts)), p
        rest /= mass
    return accepts, rest


def recursive_law(p: torch.Tensor, draws: Iterable[tuple[int, torch.Tensor | None]]) -> Tests:
    """The tests of draws one after another, each against what the ones before it left of p.

    Every distribution is computed when it is asked for: a walk that accepts the first draw pays for nothing else.

    Args:
        draws: Tokens in draw order, each with the probabilities it was drawn from, or None for a token that was not
            drawn by chance.
    """
    rest = p
    for token, q in draws:
        yield (float(rest[token]) if q is None else acceptance(rest, q, token)), rest
        rest = without(rest, token) if q is None else residual(rest, q)
    yield 0.0, rest


def draw(law: torch.Tensor, seed: int, position: int) -> int:
    """A token from `law` by the request's noise for what is drawn after a rejection."""
    return int(noise.gumbel_argmax(law.log()[None], seed, [position], stream=noise.RESIDUAL)[0])


def walk(
    tree: DraftTree,
    laws: NodeDistributions,
    seq: Sequence,
    tests: Callable[[torch.Tensor, list[int], torch.Tensor], Tests],
) -> Accepted:
    """Walk `tree` from its root, testing the draws at every node that is reached.

    Children that were not drawn by chance count as point masses.

    Args:
        tests: Of the target's distribution there, the tokens in draw order and the distribution they were drawn from.
    """
    path: list[int] = []
    node = 0
    while True:
        p, position, children = laws.probabilities(node), laws.position(node), tree.drawn(node)
        tokens = [int(tree.tokens[child]) for child in children]
        chance = tokens and tree.origin != "deterministic"
        each = tests(p, tokens, tree.distributions[node]) if chance else recursive_law(p, ((t, None) for t in tokens))
        for number, (child, (accept, _)) in enumerate(zip(children, each, strict=False)):
            if noise.draw(seq.request.seed, position, number, stream=noise.ACCEPT) < accept:
                path.append(child)
                node = child
                break
        else:
            _, rest = next(each)
            return Accepted(path, draw(rest, seq.request.seed, position))
