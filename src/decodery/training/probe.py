"""Train probes: whether an answer is wrong, read off hidden states of the prompt or of the answer's own tokens."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.threads import one_thread
from decodery.llm.llm import LLM
from decodery.monitors.factcheckmate import Shift
from decodery.monitors.los import LOSHead
from decodery.monitors.probe import Probe
from decodery.monitors.threshold import Threshold

from .activations import Answered, Questions, Sites
from .evaluation import ALONE, Evaluation, MonitorContext, keep_evaluated
from .kind import Run, kind, option
from .loop import content, drawn, even_plan
from .loop import train as learn
from .ranking import auroc, part_of, parts, require_kinds
from .shift import train_shift
from .tensors import float_tensor, mlp, through

Rows = Literal["prompt", "new"]
Part = TypeVar("Part", Probe, LOSHead)
Scores = Callable[[Part, Ordered[Answered]], list[float]]
INNER: dict[Rows, tuple[int, ...]] = {"prompt": (256,), "new": (128,)}
"""Widths of the hidden layers: FactCheckmate's and TruthPrInt's."""
_EVERY, _BATCH = 20, 64
_SET_BY = "calibration"
"""The part of the texts by which thresholds are set."""
_UNLIKE = 0.05
"""The share of texts like those learned from that are taken for others at most."""


def train_probe(
    answers: Ordered[Answered],
    sites: Ordered[str],
    rows: Rows,
    *,
    rate: float = 0.1,
    inner: tuple[int, ...] | None = None,
    steps: int = 400,
    lr: float = 1e-3,
    seed: int = 0,
    context: MonitorContext = ALONE,
) -> Probe:
    """The probe of the hook point that ranks wrong answers of the validation part highest (AUROC).

    All figures are in `facts`. Answers are split by group.

    Args:
        rows: "prompt" for one row per question, the mean of the prompt's rows beside the last; "new" for the row of
            each token, labelled as its answer is.
        rate: Of right answers that the threshold flags at most, each by its highest score, set on the calibration part.
        steps: Of AdamW with weight decay 1e-2 on binary cross-entropy. The one that ranks validation best is kept.
    """
    wrong = np.array([each.wrong for each in answers])
    require_kinds(wrong, parts(list(map(_group, answers)), seed))
    swept: dict[str, float] = {}
    best: tuple[float, str, dict[str, torch.Tensor]] | None = None
    for site in sites:
        found, value = _fit(answers, site, rows, INNER[rows] if inner is None else inner, steps, lr, seed, context)
        swept[site] = round(value, 4)
        if best is None or value > best[0]:
            best = value, site, found
    assert best is not None
    value, site, tensors = best
    unset = Probe(tensors, site, rows, context.unset(rate))
    # What reads the prompt alone has its one score whatever the answer's length.
    kind = replace(context, tokens=None) if rows == "prompt" else context
    threshold = kind.threshold(worst(unset, harmless(answers, seed)), rate)
    about = {
        **context.facts,
        "answers": len(answers),
        "wrong": round(float(wrong.mean()), 4),
        "selection": swept,
        "inputs": inputs_like(unset, [rows_of(each, site, rows) for each in part_of(answers, _group, seed, _SET_BY)]),
    }
    return Probe(tensors, site, rows, threshold, about | {"seed": seed}, context.model)


def trial(train: Callable[..., Part], score: Scores[Part]) -> Evaluation[Answered, Part]:
    """How a probe or a LOS-Net is tested, beside lengths and the model's own doubt.

    Args:
        score: Of each answer, the one that decides whether its monitor flags it.
    """
    return Evaluation[Answered, Part](
        train,
        score,
        label=lambda each: each.wrong,
        group=_group,
        relabel=lambda one, other: replace(one, wrong=other.wrong),
        baselines={
            "length of the prompt": lambda each: len(each.question.prompt),
            "length of the answer": lambda each: len(each.tokens),
            "mean log-probability": lambda each: -float(each.signatures[:, -5].mean()),
        },
        limit=lambda part: part.threshold.value,
        words=lambda each: " ".join([each.question.prompt, *map(str, each.tokens)]),
    )


def harmless(answers: Ordered[Answered], seed: int) -> list[Answered]:
    """What a threshold is set on: the right ones of the calibration part."""
    return [each for each in part_of(answers, _group, seed, _SET_BY) if not each.wrong]


def _group(each: Answered) -> str:
    return each.question.group


def rows_of(answer: Answered, site: str, rows: str) -> torch.Tensor:
    """What a probe reads of an answer.

    Shape:
        [n, width]
    """
    return answer.prompt[site][None] if rows == "prompt" else answer.new[site]


def inputs_like(probe: Probe, texts: Ordered[torch.Tensor]) -> dict[str, Any]:
    """How far rows of texts like those learned from are from their mean, but for `rate` of them.

    Args:
        probe: What standardises rows.
        texts: [n, width] rows of each text that nothing was learned from, of both kinds.

    Returns:
        The "limit" of `Probe.distance` over a text, its "rate", and the number of "texts".
    """
    apart = [float(probe.distance(rows).max()) for rows in texts]
    rate = max(_UNLIKE, 1 / (len(apart) + 1))
    return {"limit": Threshold.calibrated(apart, rate, "").value, "rate": round(rate, 4), "texts": len(apart)}


def worst(probe: Probe, answers: Ordered[Answered]) -> list[float]:
    """The highest score of each answer, as its monitor computes it."""
    rows = [rows_of(each, probe.site, probe.pool) for each in answers]
    if not rows:
        return []
    return [float(each.max()) for each in probe.score(torch.cat(rows)).split([len(each) for each in rows])]


@one_thread()
def _fit(
    answers: Ordered[Answered],
    site: str,
    rows: str,
    inner: tuple[int, ...],
    steps: int,
    lr: float,
    seed: int,
    context: MonitorContext,
) -> tuple[dict[str, torch.Tensor], float]:
    """Tensors of the best probe at a hook point, and how well it ranks the answers of the validation part."""
    learned, held = (part_of(answers, _group, seed, name) for name in ("train", "validation"))
    states = [rows_of(each, site, rows) for each in learned]
    labels = float_tensor([float(y.wrong) for x, y in zip(states, learned, strict=True) for _ in x])
    data = torch.cat(states).float()
    mean, scale = data.mean(dim=0), data.std(dim=0).clamp_min(1e-3)
    data = (data - mean) / scale
    draws = torch.Generator().manual_seed(seed)
    tensors = mlp((data.shape[1], *inner, 1), draws, 0.1)

    def loss(step: int) -> torch.Tensor:
        batch = drawn(len(data), _BATCH, seed, step)
        return torch.nn.functional.binary_cross_entropy_with_logits(through(tensors, data[batch])[:, 0], labels[batch])

    def made() -> dict[str, torch.Tensor]:
        return {**{name: tensor.detach() for name, tensor in tensors.items()}, "mean": mean, "scale": scale}

    def ranks() -> dict[str, float]:
        probe = Probe(made(), site, rows, Threshold(0.5, 0.5, 0, ""))
        return {"auroc": auroc(worst(probe, held), [each.wrong for each in held])}

    history = learn(
        tensors,
        loss,
        even_plan(steps, lr, weight_decay=1e-2, validate_every=min(_EVERY, steps)),
        context.out,
        validate=ranks,
        metric="auroc",
        higher=True,
        settings={"rows": content([data, labels]), "site": site, "inner": list(inner), "seed": seed},
        progress=context.progress,
        what=f"training the probe of {site}",
        own=True,
    )
    assert history.best is not None
    return made(), history.best


@dataclass(frozen=True)
class ProbeSettings:
    """What a probe reads, and what is trained beside it.

    Attributes:
        rows: Rows to read. prompt: for factcheckmate. new: each token of the answer, for truthprint.
    """

    rows: Rows = "prompt"
    intervene: bool = option(False, "Also train what factcheckmate adds to the states of the last layer.")


def _shift(run: Run, answers: Ordered[Answered], seed: int, chat: bool) -> None:
    """Train and keep what is added to states, on the answers that the probe learned from."""
    learned, lm = part_of(answers, _group, seed, "train"), LLM(run.load("float32"))
    found = train_shift(lm, learned, chat=chat, seed=seed, context=MonitorContext(facts=run.facts, **run.kept))
    found.save(run.out / Shift.FILE)


def _ready(run: Run) -> str:
    given = run.of(ProbeSettings)
    name = "factcheckmate" if given.rows == "prompt" else "truthprint"
    return f"The probe is ready: --monitor {name}:probe={run.out}{',action=switch' if given.intervene else ''}"


@kind(_ready, (Questions(), ProbeSettings(), Sites()), "--rows prompt --out probe", model="to watch")
def _probe(run: Run) -> dict[str, Any]:
    """Train a probe that detects wrong answers of MODEL by its hidden states.

    The monitor is factcheckmate, which reads the prompt, or truthprint, which reads each token of the answer. The
    hook point that ranks best on a part of the questions is used.
    """
    given, asked, lm = run.of(ProbeSettings), run.of(Questions), run.lm
    if given.intervene and (given.rows != "prompt" or asked.labelled):
        raise SettingsError("--intervene needs --rows prompt, and questions with answers")
    sites = run.of(Sites).of(lm)
    answers, form = asked.answers(run, sites, 1, whole=given.rows == "new")
    context = MonitorContext.of(run, **form)
    train = partial(train_probe, sites=sites, rows=given.rows, rate=asked.rate, context=context)
    trained, report = trial(train, worst).run(answers, asked.seed, "answers")
    figures = keep_evaluated(trained, report, run.out / Probe.FILE, site=trained.site)
    if given.intervene:
        _shift(run, answers, asked.seed, bool(form["chat"]))
    return figures
