"""RAPID's rule: speculative sampling against a target that has been moved towards its drafter."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from decodery.core import noise
from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.step.acceptance_rule import AcceptanceRule, Accepted, NodeDistributions
from decodery.step.draft_tree import DraftTree
from decodery.step.sequence import Sequence


def augmented(law: torch.Tensor, q: torch.Tensor, eta: float, alpha: float) -> torch.Tensor:
    """Logits [vocab] float64 of the target moved by eta * (q - p).

    Only tokens with q of at least `alpha` times its largest count.

    Args:
        law: [vocab] target logits after its processors, p their softmax.
        q: [vocab] the drafter's probabilities. It is one gradient step of size eta on the target's logits that makes
            KL(q || p) smaller.
    """
    law = law.double()
    step = torch.where(q >= alpha * q.max(), q - law.softmax(dim=-1), 0.0)
    return law + eta * step


def acceptance(p: torch.Tensor, moved: torch.Tensor, q: torch.Tensor, token: int) -> tuple[float, torch.Tensor]:
    """Acceptance probability of a token drawn from q, and the distribution [vocab] emitted otherwise.

    The residual is norm(p - min(q, moved), 0 where negative).

    Args:
        p, moved, q: [vocab] float64 probabilities of the target, the moved target and the drafter.
    """
    accept = 1.0 if moved[token] >= q[token] else float(moved[token] / q[token])
    rest = (p - torch.minimum(q, moved)).clamp_min(0.0)
    mass = float(rest.sum())
    return accept, (rest / mass if mass > 1e-12 else p)


def emitted_law(p: torch.Tensor, moved: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """[vocab] distribution of the token emitted after a draft from q; p itself where moved is p."""
    kept = torch.minimum(q, moved)
    _, rest = acceptance(p, moved, q, 0)
    return kept + (1.0 - kept.sum()) * rest


@register(
    "rapid",
    paper="Long-Context Inference with Retrieval-Augmented Speculative Decoding (2025)",
    guarantee="lossy for eta > 0: drafted positions follow min(q, p^) + (1 - its sum) * norm((p - min(q, p^))+)",
)
@dataclass(frozen=True)
class Rapid(AcceptanceRule):
    """Accepts a token with probability min(1, p^/q), p^ being the target moved by `eta` to the drafter.

    A rejected token gives way to a draw from norm((p - min(q, p^))+); after an accepted draft the target's own
    distribution is drawn from. Source: John-AI-Lab/RAPID (2025), whose tasks have eta 5 to 50.

    Attributes:
        eta: Size of the step; 0 is the lossless rejection rule.
        alpha: Only tokens with at least this share of the drafter's largest probability are moved. At temperature 0 a
            token is accepted if it is the argmax of the moved logits, else the target's argmax is emitted.
    """

    eta: float = 10.0
    alpha: float = 0.1

    requirements = Requirements(drafts=("sampled",), laws=True)

    def __post_init__(self) -> None:
        if not 0 <= self.eta < math.inf or not 0 <= self.alpha <= 1:
            raise SettingsError("rapid needs a finite eta >= 0 and alpha between 0 and 1")

    def choose(self, tree: DraftTree, laws: NodeDistributions, seq: Sequence) -> Accepted:
        path: list[int] = []
        node = 0
        while True:
            law = laws.rows([node])[0]
            p, position = law.double().softmax(dim=-1), laws.position(node)
            accepted, rest = False, p
            if len(children := tree.children(node)):
                q, token = tree.distributions[node], int(tree.tokens[children[0]])
                moved = augmented(law, q, self.eta, self.alpha)
                if seq.request.sampler.greedy:
                    accepted = token == int(moved.argmax())
                else:
                    accept, rest = acceptance(p, moved.softmax(dim=-1), q, token)
                    accepted = noise.draw(seq.request.seed, position, stream=noise.ACCEPT) < accept
            if not accepted:
                return Accepted(
                    path, laws.picks([node])[0] if seq.request.sampler.greedy else _draw(rest, seq, position)
                )
            node = int(children[0])
            path.append(node)


def _draw(law: torch.Tensor, seq: Sequence, position: int) -> int:
    return int(noise.gumbel_argmax(law.log()[None], seq.request.seed, [position], stream=noise.RESIDUAL)[0])
