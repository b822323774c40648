"""Short texts of which every posterior can be enumerated, and particles that are such texts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from decodery.core.noise import PARTICLE, TOKEN, draw, mix
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.sampling import Sampler
from decodery.search.population import Particle, Population, TargetDistribution, TokenBlock
from decodery.search.smc import SMC, Posterior
from decodery.step.forward_request import run_sync
from decodery.step.scorer import Candidates, Scorer
from decodery.testing import TableModel

END, LENGTH = 0, 5


class Chain(TableModel):
    """Three tokens, of which 0 ends a text, with few likely texts: a small total variation is then seen early."""

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        return torch.tensor(((1, 0, 0), (0.1, 0.05, 0.85), (0.55, 0.43, 0.02))[tokens[-1]], dtype=torch.float64).log()


MODEL = Chain(3)


PROMPT = [1]


PLAIN = Sampler.from_settings(temperature=1.0)


def log_psi(text: Sequence[int]) -> float:
    """A potential of whole texts: it likes 2, and an end soon."""
    return 1.2 * sum(token == 2 for token in text) - 0.8 * len(text)


@dataclass
class Toy(Particle):
    """A text of the table model, without caches and passes."""

    text: tuple[int, ...] = ()
    seed: int = 0

    @property
    def finished(self) -> bool:
        return self.text[-1:] == (END,)


class ToyProposal:
    """What `ModelProposal` does to sequences, for texts as tuples: the same draws from the same noise."""

    def __init__(self, block: int, psi: Callable[[Sequence[int]], float] | None, seed: int = 0) -> None:
        self.block, self.psi, self.seed = block, psi, seed
        self.streams = itertools.count()
        self.laws: dict[tuple[tuple[int, ...], float], tuple[list[float], list[float], list[float]]] = {}

    def start(self, count: int) -> list[Toy]:
        return [Toy(seed=mix(self.seed, PARTICLE, next(self.streams))) for _ in range(count)]

    def fork(self, particle: Toy) -> Toy:
        blocks = [TokenBlock(each.mass, each.request, each.model, each.drawn) for each in particle.blocks]
        return Toy(
            blocks,
            particle.value,
            particle.text,
            seed=mix(self.seed, PARTICLE, next(self.streams)),
        )

    def cut(self, particle: Toy, block: int) -> Toy:
        clone = self.fork(particle)
        clone.text, clone.blocks = clone.text[: block * self.block], clone.blocks[:block]
        return clone

    def potentials(self, particles: Sequence[Toy]) -> list[float]:
        if self.psi is None:
            return [0.0] * len(particles)
        return [self.psi(each.text[:-1] if each.finished else each.text) for each in particles]

    def extend(self, particles: Sequence[Toy], length: int | None, temperature: float = 1.0) -> None:
        # In the order in which passes would be shared, so that nothing depends on it.
        while active := [each for each in particles if not each.finished and len(each.text) < (length or LENGTH)]:
            for each in active:
                self._step(each, temperature)

    def _step(self, each: Toy, temperature: float) -> None:
        if len(each.text) % self.block == 0:
            each.blocks.append(TokenBlock())
        row, request, drawn = self._law(each.text, temperature)
        block, position = each.blocks[-1], len(each.text)
        if position == LENGTH - 1:
            token, block.mass = END, block.mass + drawn[END]
        else:
            noise = [-math.log(-math.log(draw(each.seed, position, token, stream=TOKEN))) for token in range(3)]
            token = max(range(3), key=lambda token: row[token] + noise[token])
        block.request += request[token]
        block.model += request[token]
        block.drawn += drawn[token]
        each.text = (*each.text, token)

    def _law(self, text: tuple[int, ...], temperature: float) -> tuple[list[float], list[float], list[float]]:
        key = (text, temperature)
        if key not in self.laws:
            logits = MODEL.logits([*PROMPT, *text]).float()[None]
            tempered = logits if temperature == 1 else logits / temperature
            request, drawn = (each.double().log_softmax(-1)[0].tolist() for each in (logits, tempered))
            self.laws[key] = (tempered[0].tolist(), request, drawn)
        return self.laws[key]


def population(
    count: int, target: TargetDistribution, block: int, moves: int = 0, psi=log_psi, seed: int = 0, **changes
):
    numbers = itertools.count(1)
    found = changes.pop("kind", Population)(
        ToyProposal(block, psi, seed),
        count,
        **{
            **{"target": target, "moving": target, "block": block, "threshold": 0.5, "moves": moves},
            **{"uniform": lambda: draw(seed, next(numbers), stream=9)},
            **changes,
        },
    )
    run_sync(found.run())
    return found


TARGETS = {
    "prefix-only": (TargetDistribution(), 1, 0, {}),
    "powered": (TargetDistribution(2.0), 2, 0, {}),
    "lookahead": (TargetDistribution(rollouts=2, temperature=1.0), 2, 0, {"threshold": 0.9}),
    "moves": (TargetDistribution(), 2, 1, {"threshold": 1.0}),
    "powered, lookahead and moves": (TargetDistribution(2.0, 2, 0.6), 2, 1, {"threshold": 1.0}),
}


class Psi(Scorer):
    """`log_psi` as a scorer."""

    log = True

    def score(self, candidates: Candidates) -> torch.Tensor:
        return torch.tensor([log_psi(output) for output in candidates.outputs], dtype=torch.float64)


def search(smc: SMC, *, seed: int = 0, sampler: Sampler = PLAIN, model=MODEL, length: int = LENGTH) -> Posterior:
    request = Request(PROMPT, sampler=sampler, seed=seed, max_new_tokens=length, eos_ids=(END,))
    return smc.posterior(Engine(model), request)
