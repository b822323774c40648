"""Train a router for `arbitrage`: both models write every step, and which was better is what it learns to foresee."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.noise import nth_seed
from decodery.core.registry import resolve
from decodery.core.trace import Trace
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.loaders.store import Progress, silent
from decodery.models.protocol import LanguageModel
from decodery.search.arbitrage import Arbitrage
from decodery.search.base import Search
from decodery.search.router import RouterHead

from .data import read_prompts
from .held_out import HeldOut, Measured
from .kind import ARGUMENT, PLAIN, Data, Run, kind, option
from .loop import content, even_plan
from .loop import train as learn
from .ranking import interval, ranked
from .tensors import bool_tensor, float_tensor, int_tensor
from .value import states_of

_INNER, _LR = 32, 1e-2
_HELD_OUT = 4
"""One text in so many is held out; every other one of these chooses the best step."""


@dataclass(frozen=True)
class Decisions:
    """What both models did, step by step."""

    states: torch.Tensor  # [n, hidden] the second model's, at the last token of its step
    escalated: torch.Tensor  # [n] bool, whether the larger model wrote the step before
    advantage: torch.Tensor  # [n] how much more the larger model's step is worth
    text: torch.Tensor  # [n] which text it was in

    def of(self, rows: torch.Tensor) -> Decisions:
        """Some of them."""
        return Decisions(self.states[rows], self.escalated[rows], self.advantage[rows], self.text[rows])

    @property
    def shuffled(self) -> Decisions:
        """The same with the advantage of other steps."""
        order = torch.randperm(len(self.advantage), generator=torch.Generator().manual_seed(0), device="cpu")
        return replace(self, advantage=self.advantage[order])


def decisions(
    engine: Engine, second: LanguageModel, requests: Ordered[Request], *, progress: Progress = silent
) -> Decisions:
    """Those of texts that the oracle of `arbitrage` has written.

    Args:
        requests: Each with a search `arbitrage:router=oracle` that names the second model.
    """
    states, escalated, advantage, texts = list[torch.Tensor](), list[bool](), list[float](), list[int]()
    for number, request in enumerate(requests):
        assert isinstance(request.search, Search)
        trace = request.search.run(engine, request)[0].trace
        parts = trace.grown
        for drafted, own in zip(range(0, len(parts), 2), range(1, len(parts), 2), strict=False):
            mine, theirs = parts[own].score, parts[drafted].score
            if mine is None or theirs is None:
                continue
            before = parts[drafted].parent
            states.append(states_of(second, request.prompt, _text(trace, drafted), second.config.num_layers)[-1])
            escalated.append(before >= 0 and not parts[before].author)
            advantage.append(mine - theirs)
            texts.append(number)
        progress("writing steps with both models", number + 1, len(requests))
    if not states:
        raise SettingsError("a router has no step to learn from: give prompts whose steps the scorer can judge")
    return Decisions(torch.stack(states), bool_tensor(escalated), float_tensor(advantage), int_tensor(texts))


def fit_router(
    found: Decisions,
    tap: int,
    model: str = "",
    *,
    steps: int = 300,
    seed: int = 0,
    out: Path | None = None,
    progress: Progress = silent,
) -> tuple[RouterHead, dict[str, Any]]:
    """The router that predicts best on some held-out texts which of two steps is better.

    Its report is of others. The figure is Spearman's correlation of its probabilities with the advantage. Both kinds of
    steps weigh the same.
    """
    router, control = (_fitted(each, tap, model, steps, seed, out, progress) for each in (found, found.shuffled))
    test = found.of(found.text % (2 * _HELD_OUT) == 2 * _HELD_OUT - 1)
    places = torch.tensor([int((test.text[:at] == text).sum()) for at, text in enumerate(test.text)], device="cpu")

    def tested(scores: torch.Tensor) -> Measured:
        known = scores.tolist(), test.advantage.tolist(), list(map(str, test.text.tolist())), _spearman
        edges = [round(each, 4) for each in interval(*known)]
        return ranked({"spearman": spearman(scores, test.advantage), "interval of spearman": edges}, "spearman", *known)

    known = HeldOut([0], list(dict.fromkeys(test.text.tolist())))
    report = known.report(
        tested(router.better(test.states, test.escalated)),
        {"the step before was escalated": tested(test.escalated.float()), "place in the text": tested(places.float())},
        control=tested(control.better(test.states, test.escalated)),
    )
    better = round(float((found.advantage > 0).double().mean()), 4)
    return router, {"steps": len(found.text), "better": better, **report}


def _fitted(
    found: Decisions, tap: int, model: str, steps: int, seed: int, out: Path | None, progress: Progress
) -> RouterHead:
    held = found.text % _HELD_OUT == _HELD_OUT - 1
    train, others = found.of(~held), found.of(found.text % (2 * _HELD_OUT) == _HELD_OUT - 1)
    labels = (train.advantage > 0).double()
    if not 0 < int(labels.sum()) < len(labels) or min(len(others.text), int(held.sum()) - len(others.text)) < 2:
        raise SettingsError(
            "a router learns from steps of which some are better by the larger model and some are not, in at least "
            f"{2 * _HELD_OUT} texts: give more or other prompts, or another scorer"
        )
    rows = torch.cat([train.states.double(), train.escalated.double()[:, None]], dim=1)
    mean, spread = rows.mean(dim=0), rows.std(dim=0).clamp_min(1e-3)
    rows = (rows - mean) / spread
    generator = torch.Generator().manual_seed(seed)
    width = rows.shape[1]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")

    parts = {
        "weight": random(_INNER, width) / width**0.5,
        "bias": torch.zeros(_INNER, dtype=torch.float64, device="cpu"),
        "out": random(_INNER) / _INNER**0.5,
        "out_bias": torch.zeros((), dtype=torch.float64, device="cpu"),
    }
    weights = torch.where(labels > 0, 0.5 / labels.mean(), 0.5 / (1 - labels.mean()))

    def loss(step: int) -> torch.Tensor:
        logits = torch.tanh(rows @ parts["weight"].T + parts["bias"]) @ parts["out"] + parts["out_bias"]
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, weight=weights)

    def made() -> RouterHead:
        # What the states were divided by goes into the weights.
        scaled = parts["weight"] / spread
        tensors = (scaled, parts["bias"] - scaled @ mean, parts["out"], parts["out_bias"])
        first, second, third, fourth = (each.detach().clone().float() for each in tensors)
        return RouterHead(first, second, third, fourth, tap, model)

    def rank(of: Decisions) -> float:
        return spearman(made().better(of.states, of.escalated), of.advantage)

    learn(
        parts,
        loss,
        even_plan(steps, _LR, weight_decay=1e-2, validate_every=min(10, steps)),
        out,
        validate=lambda: {"spearman": rank(others)},
        metric="spearman",
        higher=True,
        settings={"decisions": content([found.states, found.escalated, found.advantage, found.text]), "seed": seed},
        progress=progress,
        own=True,
    )
    return made()


def _spearman(one: np.ndarray, other: np.ndarray) -> float:
    return spearman(torch.from_numpy(one), torch.from_numpy(other))


def spearman(one: torch.Tensor, other: torch.Tensor) -> float:
    """The correlation of ranks, ties at their mean; 0 where one of the two is constant."""
    ranks = torch.stack([_ranks(one.double()), _ranks(other.double())])
    ranks -= ranks.mean(dim=1, keepdim=True)
    scale = ranks.norm(dim=1).prod()
    return float(ranks[0] @ ranks[1] / scale) if scale > 0 else 0.0


def _ranks(values: torch.Tensor) -> torch.Tensor:
    """[n] how many are less, and half of the others that are equal."""
    ordered = values.sort().values
    return (torch.searchsorted(ordered, values) + torch.searchsorted(ordered, values, right=True)).double() / 2


def _text(trace: Trace, number: int) -> list[int]:
    """What was written up to the end of this part."""
    part = trace.grown[number]
    return [*(_text(trace, part.parent) if part.parent >= 0 else []), *part.tokens]


@dataclass(frozen=True)
class RouterSettings(Data):
    """What two models write, and who judges it.

    Attributes:
        second: The smaller model, which writes each step first; the shipped draft model by default.
    """

    prompts: Path = field(default=Path(), metadata=ARGUMENT)
    second: str | None = None
    scorer: str = option("", "A scorer of steps, such as value-head(head=FILE).", required=True)
    delimiter: str = option("\n\n", "Text that ends a step.")
    step_tokens: int = option(128, "Maximum tokens of a step.")
    max_new_tokens: int = option(256, "Maximum tokens of a text.")
    temperature: float = option(0.0, "Sampling temperature of the steps.")
    apply_chat_template: bool = option(True, "The prompts are plain text, without the chat template.", **PLAIN)
    seed: int = option(0, "Random seed of texts and training.")


@kind(
    "The router is ready: --search arbitrage:router={out},theta=0.5",
    (RouterSettings(),),
    'prompts.txt --scorer "value-head(head=value.safetensors)" --out router.safetensors',
    model="that rewrites steps",
    out="file",
)
def _router(run: Run) -> dict[str, Any]:
    """Train a router that predicts where MODEL would write a better step than a smaller model did.

    Both models write every step of a text after each line of PROMPTS. The scorer chooses the better step. One text
    in eight chooses the best training step. On another one in eight the router is rated by how well it ranks steps
    by the gain of MODEL (Spearman).
    """
    given, lm = run.of(RouterSettings), run.lm
    how: dict[str, Any] = {"delimiter": given.delimiter, "step_tokens": given.step_tokens, "model": given.second}
    search = Arbitrage(resolve("scorer", given.scorer), router="oracle", **how).bind(lm.tokenizer)
    requests = []
    for number, line in enumerate(read_prompts(given.prompts)):
        request = lm.request(
            lm.encode(line, apply_chat_template=given.apply_chat_template),
            max_new_tokens=given.max_new_tokens,
            temperature=given.temperature,
            drafter=None,
            seed=nth_seed(given.seed, number),
            apply_chat_template=given.apply_chat_template,
        )
        request.search = search
        requests.append(request)
    small = search.second(lm.model)
    found = decisions(lm.engine(), small, requests, progress=run.progress)
    learned, report = fit_router(found, small.config.num_layers, small.fingerprint, seed=given.seed, **run.kept)
    learned.save(run.out)
    return report
