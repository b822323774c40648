"""The invariants that every constraint must satisfy."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

import numpy as np

from decodery.sampling.constraint import Constraint, packed

from .running import LawBroken


def check_constraint(
    constraint: Constraint,
    eos_ids: Ordered[int],
    *,
    prompt: Ordered[int] = (),
    walks: int = 10,
    length: int = 40,
    seed: int = 0,
) -> list[list[int]]:
    """Check a constraint on random walks through allowed tokens, with side branches that are not taken.

    - A state never changes, and the same text always allows the same tokens.
    - A text may end exactly where it is complete.
    - Forced tokens are the only allowed ones.
    - `bits` are those of the mask.
    - `permits` is true for all allowed tokens, and `accepts` for exactly these.

    Args:
        constraint: The constraint, bound to a vocabulary.
        eos_ids: End tokens.
        prompt: Token ids before the text.
        walks: Number of texts.
        length: Maximum number of tokens of each.
        seed: Seed of the walks.

    Returns:
        The walks.
    """
    random = np.random.default_rng(seed)
    ends = list(eos_ids)
    found: list[list[int]] = []
    for _ in range(walks):
        state = constraint.init(prompt)
        tokens: list[int] = []
        masks: list[np.ndarray] = []
        while len(tokens) < length:
            mask = constraint.allowed(state).copy()
            masks.append(mask)
            ids = np.flatnonzero(mask)
            if not len(ids):
                raise LawBroken(f"after {tokens} nothing is allowed")
            if bool(mask[ends].any()) != constraint.is_complete(state):
                raise LawBroken(f"after {tokens} the text is complete, or it may end, but not both")
            _check_forced(constraint, state, tokens, ids)
            if not np.array_equal(constraint.bits(state, len(mask)), packed(mask)):
                raise LawBroken(f"after {tokens} the bits are not those of the mask")
            # A branch that is not taken, allowed or not, must not change the state.
            constraint.allowed(constraint.advance(state, int(random.choice(ids))))
            constraint.advance(state, int(random.integers(len(mask))))
            if not np.array_equal(constraint.allowed(state), mask):
                raise LawBroken(f"after {tokens} another branch changed what is allowed")
            tokens.append(int(random.choice(ids)))
            state = constraint.advance(state, tokens[-1])
            if tokens[-1] in ends:
                break
        if tokens[-1] in ends and not constraint.is_complete(state):
            raise LawBroken(f"{tokens} ended incomplete")
        _check_again(constraint, prompt, tokens, masks)
        found.append(tokens)
    return found


def _check_forced(constraint: Constraint, state: object, tokens: list[int], ids: np.ndarray) -> None:
    forced = constraint.forced(state, 3)
    if bool(forced) != (len(ids) == 1) or (forced and forced[0] != ids[0]):
        raise LawBroken(f"after {tokens} {forced} is forced, but {len(ids)} tokens are allowed")
    if not all(constraint.permits(state, int(token)) for token in ids[:20]):
        raise LawBroken(f"after {tokens} a token is allowed, but not permitted")


def _check_again(constraint: Constraint, prompt: Ordered[int], tokens: list[int], masks: list[np.ndarray]) -> None:
    state = constraint.init(prompt)
    for token, mask in zip(tokens, masks, strict=True):
        for asked in (*np.flatnonzero(mask)[:5].tolist(), *np.flatnonzero(~mask)[:5].tolist()):
            if constraint.accepts(state, asked) != mask[asked]:
                raise LawBroken(f"token {asked} is allowed by the mask or accepted on its own, but not both")
        if not np.array_equal(constraint.allowed(state), mask):
            raise LawBroken(f"the same text {tokens} allows something else the second time")
        state = constraint.advance(state, token)
