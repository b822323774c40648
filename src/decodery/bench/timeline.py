"""Every pass of one generation: what was drafted, what was kept. Recorded apart from the runs that are timed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from decodery.engine.engine import Engine
from decodery.llm.llm import LLM
from decodery.llm.resolve_settings import resolve_drafter
from decodery.speculative.acceptance.coupled import Coupled
from decodery.step.acceptance_rule import Accepted, NodeDistributions
from decodery.step.draft_length_policy import MOST_NODES
from decodery.step.draft_tree import MASK_TOKEN, DraftTree
from decodery.step.sequence import Sequence

_MOST_PASSES = 400


@dataclass(frozen=True)
class _Recorded(Coupled):
    """The coupled rule, with every tree and what became of it written down."""

    passes: list[tuple[DraftTree, Accepted]] = field(default_factory=list, compare=False)

    def choose(self, tree: DraftTree, laws: NodeDistributions, seq: Sequence) -> Accepted:
        accepted = super().choose(tree, laws, seq)
        self.passes.append((tree, accepted))
        return accepted


def record_timeline(
    lm: LLM,
    prompt: list[int],
    method: str,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    max_draft_tokens: int = MOST_NODES,
) -> dict[str, Any]:
    """Decode `prompt` once more. first: the text of the token that prefill gave; passes: per pass the drafted `tokens`
    (texts), their `parents` (0 is the last token), the `accepted` ones (indices, 1 is the first drafted), and the
    text of the `bonus` token.
    """
    rule = _Recorded()
    request = lm.request(
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        drafter=resolve_drafter(method),
        max_draft_tokens=max_draft_tokens,
        seed=seed,
    )
    engine = Engine(lm.model, detokenizer=lm.tokenizer.stream)
    seq = engine.submit(dataclasses.replace(request, acceptance_rule=rule))
    engine.run([seq])
    # The first choice is prefill's. What the last pass accepted beyond the end of the text was not emitted.
    (_, first), *decoding = rule.passes
    passes, left = [], len(seq.generated) - 1
    for tree, accepted in decoding[:_MOST_PASSES]:
        path = accepted.path[:left]
        bonus = lm.tokenizer.piece(accepted.bonus) if left > len(path) else b""
        left -= len(path) + 1
        passes.append(
            {
                "tokens": [_shown(lm, token) for token in tree.tokens[1:].tolist()],
                "parents": tree.parents[1:].tolist(),
                "accepted": path,
                "bonus": _text(bonus),
            }
        )
    return {"first": _text(lm.tokenizer.piece(first.bonus)), "passes": passes}


def _shown(lm: LLM, token: int) -> str:
    return "?" if token == MASK_TOKEN else _text(lm.tokenizer.piece(token))


def _text(piece: bytes) -> str:
    return piece.decode("utf-8", errors="replace")
