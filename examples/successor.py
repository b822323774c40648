"""A drafter of your own: registered, run through the checks, and used by name.

Run it with `python examples/successor.py`.
"""

from dataclasses import dataclass

import decodery as dc
from decodery.extend import (
    Budget,
    Drafter,
    DraftTree,
    Requirements,
    Sequence,
    VerificationFeedback,
    check_batch,
    check_identical,
    check_state,
    register,
    tiny_transformer,
)


@register("successor", lossless=True)
@dataclass(frozen=True)
class Successor(Drafter):
    """Drafts the token that the model ranked first the last time it read the same token.

    Attributes:
        length: Tokens drafted per step.
    """

    length: int = 4

    requirements = Requirements(prompt=True)

    def start(self, seq: Sequence) -> dict[int, int]:
        return {}

    def propose(self, seq: Sequence, budget: Budget) -> DraftTree:
        drafted: list[int] = []
        token = seq.states[self].get(seq.last_token)
        while token is not None and len(drafted) < min(self.length, budget.nodes, budget.depth):
            drafted.append(token)
            token = seq.states[self].get(token)
        return DraftTree.chain(seq.last_token, drafted)

    def observe(self, seq: Sequence, seen: VerificationFeedback) -> None:
        # Rejected nodes count, too: their rows hold what the model would have written after them.
        seq.states[self].update(zip(seen.tree.tokens.tolist(), seen.logits.argmax(-1).tolist(), strict=True))


if __name__ == "__main__":
    model, prompts = tiny_transformer(), [[1, 2, 3], [5] * 6 + [7, 8, 9] * 4]
    check_identical(model, prompts, drafter=Successor())
    check_batch(model, prompts, drafter=Successor())
    check_state(model, [prompts[1]], drafter=Successor())

    out = dc.load("smollm2").generate("Explain tides.", max_new_tokens=60, drafter="successor:length=3")
    print(out.text)
    print(f"{out.trace.tokens_per_pass:.2f} tokens per pass")
