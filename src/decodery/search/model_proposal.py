"""Particles drawn from a model: one pass per token over all that grow."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from itertools import count as numbers_from
from typing import Any

import numpy as np
import torch

from decodery.core.ledger import count
from decodery.core.noise import PARTICLE, REPEAT, draw, gumbel_argmax, mix
from decodery.core.threads import one_thread
from decodery.sampling.awrs import CheckedSampler, TokenTrial, weighted
from decodery.sampling.logits_processor import Context
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.scorer import Scorer, judge, log_scores
from decodery.step.sequence import Sequence

from .base import Branches, candidates, choose, written
from .marks import TextSnapshot
from .population import Particle, TokenBlock


@dataclass
class Branch(Particle):
    """A particle over a sequence.

    Attributes:
        logits: [vocab] after its last token, None while that is not read.
    """

    seq: Sequence = field(kw_only=True)
    logits: torch.Tensor | None = None
    marks: list[TextSnapshot] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.seq.finished


class ModelProposal:
    """Branches of one prompt.

    Args:
        block: Tokens per block.
        potential: None for weight 1.
        strength: What its log-weights are multiplied by.
        powered: Whether the model's own probabilities are wanted.
        accepts, max_rejects: Of the constraint's weights, see `decodery.sampling.awrs`.
    """

    def __init__(
        self,
        branches: Branches,
        *,
        block: int,
        potential: Scorer | None,
        strength: float,
        powered: bool,
        accepts: int,
        max_rejects: float,
    ) -> None:
        self.branches = branches
        self.block = block
        self.potential = potential
        self.strength = strength
        self.powered = powered
        self.accepts = accepts
        self.max_rejects = max_rejects
        self.seed = branches.root.request.seed
        self._checks = CheckedSampler(branches.root.request.sampler)
        self._streams = numbers_from()
        self._first: torch.Tensor | None = None

    def start(self, count: int) -> ForwardCoroutine[list[Branch]]:
        """Particles that stand after the prompt."""
        self._first = (yield from self.branches.score([self.branches.root]))[0]
        return [Branch(seq=self._parted(self.branches.root), logits=self._first) for _ in range(count)]

    def fork(self, particle: Branch) -> Branch:
        seq = self._parted(particle.seq)
        blocks = [TokenBlock(each.mass, each.request, each.model, each.drawn) for each in particle.blocks]
        return Branch(blocks, particle.value, seq=seq, logits=particle.logits, marks=list(particle.marks))

    def cut(self, particle: Branch, block: int) -> Branch:
        clone, mark = self.fork(particle), particle.marks[block]
        seq = clone.seq
        mark.restore(seq)
        clone.logits = self._first if seq.position == 0 else None
        # What the last token leads to is known of the prompt alone; elsewhere that token is read again.
        seq.cache.truncate(mark.length - (clone.logits is None))
        clone.blocks, clone.marks = clone.blocks[:block], clone.marks[:block]
        return clone

    def extend(
        self, particles: Ordered[Branch], length: int | None, temperature: float = 1.0
    ) -> ForwardCoroutine[None]:
        def growing() -> list[Branch]:
            return [each for each in particles if each.alive and not each.finished]

        while active := [each for each in growing() if length is None or each.seq.position < length]:
            yield from self._read(active)
            self._step(active, temperature)
        # Forks of what stands here share what their last token leads to.
        yield from self._read(growing())

    def potentials(self, particles: Ordered[Branch]) -> ForwardCoroutine[list[float]]:
        found, potential = [0.0] * len(particles), self.potential
        if potential is None:
            return found
        which = [number for number, each in enumerate(particles) if each.finished or potential.prefixes]
        if which:
            scores = yield from judge(potential, candidates([particles[number].seq for number in which]))
            for number, weight in zip(which, log_scores(potential, scores).tolist(), strict=True):
                found[number] = self.strength * weight
        return found

    def _parted(self, seq: Sequence) -> Sequence:
        """A fork with a seed of its own: hashed, so that requests of neighbouring seeds have none in common."""
        clone = seq.fork()
        clone.rebind(seed=mix(self.seed, PARTICLE, next(self._streams)))
        return clone

    def _read(self, particles: Ordered[Branch]) -> ForwardCoroutine[None]:
        unread = [each for each in particles if each.logits is None]
        if unread:
            rows = yield from self.branches.score([each.seq for each in unread])
            for each, row in zip(unread, rows, strict=True):
                each.logits = row

    @one_thread()
    def _step(self, active: Ordered[Branch], temperature: float) -> None:
        """One token for each."""
        logits = torch.stack([each.logits for each in active if each.logits is not None])
        contexts = [each.seq.context() for each in active]
        laws = self._checks.law(logits, contexts)
        request = laws.double().log_softmax(dim=-1)
        model = (
            self._checks.law(logits, contexts, shaped=False).double().log_softmax(dim=-1) if self.powered else request
        )
        drawn_from = laws if temperature == 1 else laws / temperature
        drawn = request if temperature == 1 else drawn_from.double().log_softmax(dim=-1)
        for number, each in enumerate(active):
            if each.seq.position % self.block == 0:
                each.blocks.append(TokenBlock())
                each.marks.append(TextSnapshot.of(each.seq))
            trial, block = self._draw(each.seq, drawn_from[number], contexts[number]), each.blocks[-1]
            block.mass += trial.log_weight
            self._count(checks=trial.checks, rejections=trial.rejections)
            if trial.token is None or trial.log_weight == -math.inf:
                block.mass = -math.inf
                continue
            block.request += float(request[number, trial.token])
            block.model += float(model[number, trial.token])
            block.drawn += float(drawn[number, trial.token])
            choose(each.seq, trial.token, logits[number])
            each.logits = None

    def _draw(self, seq: Sequence, law: torch.Tensor, context: Context) -> TokenTrial:
        """A token and the weight of what it stands for: of all tokens, of those accepted, or of the end tokens.

        Where one token is left, it is an end token: a text that was cut is none of those that are aimed at.
        """
        position, constraint = seq.position, self._checks.constraint
        if seq.remaining == 1 and seq.request.eos_ids:
            if not self._checks.is_complete(context):
                return TokenTrial(None, -math.inf, 1, 1)
            ends = torch.full_like(law, -torch.inf)
            ids = sorted(seq.request.eos_ids)
            ends[ids] = law[ids]
            mass = float(law.double().log_softmax(dim=-1)[ids].logsumexp(dim=-1))
            if mass == -math.inf:
                return TokenTrial(None, mass, 0, 0)
            return TokenTrial(_pick(ends, seq), mass, int(constraint is not None), 0)
        if constraint is None:
            return TokenTrial(_pick(law, seq), 0.0, 0, 0)
        return weighted(
            *(law, self._checks.accept(context), seq.request.seed, position),
            uniform=_uniforms(seq.request.seed, position),
            accepts=self.accepts,
            max_rejects=self.max_rejects,
        )

    def _count(self, **amounts: int) -> None:
        for name, amount in amounts.items():
            if amount:
                count(name, amount)


def _pick(law: torch.Tensor, seq: Sequence) -> int:
    return int(gumbel_argmax(law[None], seq.request.seed, [seq.position])[0])


def _uniforms(seed: int, position: int) -> Callable[[], float]:
    numbers = numbers_from()
    return lambda: draw(seed, position, next(numbers), REPEAT)


def same_texts(sequences: Ordered[Sequence]) -> np.ndarray:
    """[n] number of the first sequence with the same text (the same tokens, where there is no tokenizer)."""
    first: dict[Any, int] = {}
    keys = [tuple(written(seq)) if seq.text is None else seq.text.text for seq in sequences]
    return np.array([first.setdefault(key, number) for number, key in enumerate(keys)])
