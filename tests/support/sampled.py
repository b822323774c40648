"""What tests of searches over samples have in common: a model, a prompt, and scorers."""

from __future__ import annotations

import math
from typing import Any

import torch

from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.sampling import Sampler
from decodery.search.base import Search
from decodery.step.scorer import Candidates, Scorer
from decodery.step.sequence import Sequence
from decodery.testing import tiny_transformer, to_int8
from methods import Even

MODEL, OTHER = to_int8(tiny_transformer(3)), tiny_transformer(1)
"""One whose rows are the same to the bit whatever shares a pass, and another one."""
PROMPT, PLAIN = [5, 9, 2, 9, 5, 9, 2], Sampler.from_settings(temperature=1.0)
SETTINGS: dict[str, Any] = {"max_new_tokens": 12, "eos_ids": (0, 3, 9, 11), "sampler": PLAIN}


class Constant(Scorer):
    bounds = 0.0, 1.0

    def score(self, candidates: Candidates) -> torch.Tensor:
        return torch.full((len(candidates),), 0.4, dtype=torch.float64)


class Failing(Even):
    """Has no score for texts that begin with an even token."""

    def __init__(self, how: str) -> None:
        self.how = how

    def score(self, candidates: Candidates) -> torch.Tensor:
        bad = [output[0] % 2 == 0 for output in candidates.outputs]
        if self.how == "raises" and any(bad):
            raise RuntimeError("the judge is out")
        return super().score(candidates).masked_fill(torch.tensor(bad), math.nan)


def run(search: Search, model: Any = MODEL, seed: int = 7, **settings: Any) -> list[Sequence]:
    return search.run(Engine(model), Request(PROMPT, seed=seed, **SETTINGS | settings))


def plain(n: int, model: Any = MODEL, seed: int = 7, **settings: Any) -> list[list[int]]:
    """What the request writes with its n seeds, one text at a time and without drafts."""
    engine, wanted = Engine(model), SETTINGS | settings
    texts = [engine.submit(Request(PROMPT, seed=number, **wanted)) for number in range(seed, seed + n)]
    engine.run(texts)
    return [seq.generated for seq in texts]


def told(found: list[Sequence]) -> list[tuple[list[int], float | None]]:
    return [(seq.generated, seq.score) for seq in found]


def written_of(text: list[int]) -> list[int]:
    return text[:-1] if text[-1] in SETTINGS["eos_ids"] else text
