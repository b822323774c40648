"""Searches by particles write the texts that they wrote when these were recorded: the same seeds draw the same."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decodery.core.errors import ConstraintError
from decodery.core.noise import draw, mix
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.sampling import Sampler
from decodery.sampling.constraint import Constrained, Constraint
from decodery.search.entropic_particle_filter import EntropicParticleFilter
from decodery.search.parallel_tempering import ParallelTempering
from decodery.search.particle_filter import ParticleFilter
from decodery.search.particle_gibbs import ParticleGibbs
from decodery.search.smc import SMC
from decodery.step.scorer import Candidates, Scorer
from decodery.testing import TableModel
from toy_world import PLAIN, Psi
from toy_world import search as search_blocks

RECORDS = Path(__file__).with_name("particle_records.json")
SEEDS = (0, 1, 2, 5)


class Reward(Scorer):
    """A reward in (0, 1) for every text."""

    def score(self, candidates: Candidates) -> torch.Tensor:
        rewards = [0.05 + 0.9 * draw(mix(5, *output), 0) for output in candidates.outputs]
        return torch.tensor(rewards, dtype=torch.float64)


class TwoThenThree(Constraint):
    """1 or 2, then 3, then the end."""

    def init(self, prompt: Sequence[int]) -> int:
        return 0

    def allowed(self, state: int) -> np.ndarray:
        return np.isin(np.arange(4), ((1, 2), (3,), (0,))[min(state, 2)])

    def advance(self, state: int, token: int) -> int:
        return state + 1

    def is_complete(self, state: int) -> bool:
        return state >= 2


STEPPED = {"delimiter": (3,), "step_tokens": 1, "rounds": 8}
STEPS = {
    "filter": ParticleFilter(Reward(), particles=6, **STEPPED),
    "systematic": ParticleFilter(
        Reward(), particles=6, resampling="systematic", ended="freeze", potential="prob", **STEPPED
    ),
    "telescoping": ParticleFilter(
        Reward(), particles=6, accumulation="telescoping", choose="vote", answer="whole", **STEPPED
    ),
    "gibbs": ParticleGibbs(Reward(), particles=3, sweeps=3, reward_temperature=2.0, **STEPPED),
    "pooled": ParticleGibbs(Reward(), particles=3, sweeps=3, pool=True, **STEPPED),
    "tempering": ParallelTempering(Reward(), particles=3, sweeps=3, temperatures=(1.0, 3.0), **STEPPED),
    "annealed": EntropicParticleFilter(Reward(), particles=6, annealing="entropy", least=1.0, **STEPPED),
    "base": EntropicParticleFilter(Reward(), particles=6, annealing="base", least=1.0, early=1.0, **STEPPED),
    "fresh": EntropicParticleFilter(Reward(), particles=4, lookahead="fresh", **STEPPED),
    "reuse": EntropicParticleFilter(Reward(), particles=4, lookahead="reuse", resampling="multinomial", **STEPPED),
    "reuse once": EntropicParticleFilter(Reward(), particles=4, lookahead="reuse", double_count=False, **STEPPED),
}
BLOCKS = {
    "plain": SMC(8, 2, potential=Psi(), moves=0),
    "moves": SMC(8, 2, potential=Psi(), moves=2, threshold=1.0),
    "powered": SMC(8, 1, "powered", 2.0, Psi(), lookahead=2, rollout_temperature=0.6, moves=1, threshold=1.0),
    "mixed": SMC(8, 2, potential=Psi(), strict=False, moves=1, threshold=1.0),
}
FORKED = {"sampler": Sampler((Constrained(TwoThenThree()), *PLAIN.processors)), "eos_ids": (0,)}
CONSTRAINED = {"answers": SMC(6), "drawn": SMC(6, answer="draw"), "alone": SMC(1), "guarded": SMC(4, accepts=3)}


def of_steps(name: str, seed: int) -> list[Any]:
    request = Request([1], sampler=PLAIN, seed=seed, max_new_tokens=6, eos_ids=(0,))
    found = STEPS[name].run(Engine(TableModel(4, order=3)), request)
    counts = found[0].trace.ledger.counts
    drawn = [counts[each] for each in ("resamplings", "effective", "ancestors", "log_normaliser") if each in counts]
    return [[text(seq) for seq in found], [seq.score for seq in found], drawn]


def of_blocks(name: str, seed: int) -> list[Any]:
    found = search_blocks(BLOCKS[name], seed=seed)
    amounts = [found.log_normaliser, *(found.counts[each] for each in ("resamplings", "moves", "moved", "restarts"))]
    return [[text(seq) for seq in found.sequences], found.log_weights.tolist(), amounts]


def constrained(name: str, seed: int) -> list[Any]:
    try:
        found = CONSTRAINED[name].run(
            Engine(TableModel(4, order=2)), Request([1], **FORKED, max_new_tokens=3, seed=seed)
        )
    except ConstraintError as error:
        return [[str(error)[:30]], [], []]
    counts = found[0].trace.ledger.counts
    return [[text(seq) for seq in found], [seq.score for seq in found], [counts["checks"], counts["rejections"]]]


def text(seq: Any) -> str:
    return "".join(map(str, seq.generated))


METHODS = {
    **{f"steps {name}": partial(of_steps, name) for name in STEPS},
    **{f"blocks {name}": partial(of_blocks, name) for name in BLOCKS},
    **{f"constrained {name}": partial(constrained, name) for name in CONSTRAINED},
}


@pytest.mark.filterwarnings("ignore:all . texts come from one")
@pytest.mark.parametrize("name", METHODS)
def test_seeds_draw_the_texts_and_weights_that_were_recorded(name: str) -> None:
    for seed, (texts, *amounts) in zip(SEEDS, json.loads(RECORDS.read_text())[name], strict=True):
        found, *numbers = METHODS[name](seed)
        assert found == texts
        for one, other in zip(numbers, amounts, strict=True):
            assert len(one) == len(other)
            assert all(math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9) for a, b in zip(one, other, strict=True))


if __name__ == "__main__" and sys.argv[1:] == ["record"]:
    RECORDS.write_text(json.dumps({name: [of(seed) for seed in SEEDS] for name, of in METHODS.items()}) + "\n")
