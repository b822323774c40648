"""One small training loop: AdamW, warm-up and cosine, checkpoints, and exact resumption after an interruption."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch

from decodery.core.errors import NumericalError, SettingsError
from decodery.models.loaders.fields import parse_json, read_json
from decodery.models.loaders.store import Progress, silent

from .kept_files import keep, kept

CHECKPOINT = "checkpoint.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
_BETWEEN = 20
"""How many times as long as the last checkpoint took passes before the next one."""


@dataclass(frozen=True)
class TrainingPlan:
    """How to train.

    Attributes:
        lr: At its peak, after `warmup` of the steps; it ends at `final` of that, along a cosine.
        clip: Largest norm of the gradient, infinity for any.
        validate_every: Steps between validations.
        patience: Validations without gain after which it ends; None for all of the steps.
        save_seconds: Minimum time between checkpoints.
    """

    steps: int
    lr: float = 1e-3
    warmup: float = 0.03
    final: float = 0.1
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    validate_every: int = 100
    save_seconds: float = 30.0
    patience: int | None = None

    def __post_init__(self) -> None:
        if self.steps < 1 or self.validate_every < 1:
            raise SettingsError("a training run needs at least one step, and validate_every of at least 1")
        if not self.lr > 0 or not 0 <= self.warmup <= 1 or not 0 <= self.final <= 1 or not self.clip > 0:
            raise SettingsError("lr and clip must be positive, warmup and final between 0 and 1")

    def rate(self, step: int) -> float:
        """The learning rate of step `step`, counted from 0."""
        rising = max(1, round(self.warmup * self.steps))
        if step < rising:
            return self.lr * (step + 1) / rising
        along = (step - rising) / max(1, self.steps - rising)
        return self.lr * (self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * along)))


def even_plan(steps: int, lr: float, weight_decay: float = 0.0, **settings: Any) -> TrainingPlan:
    """A plan with one learning rate and gradients of any norm, as small parts are trained."""
    even = {"warmup": 0.0, "final": 1.0, "betas": (0.9, 0.999), "clip": math.inf}
    return TrainingPlan(steps, lr, weight_decay=weight_decay, **{**even, **settings})


@dataclass
class History:
    """What a run has come to.

    Attributes:
        step: Steps done.
        best: The best value of the metric so far, at step `best_step`.
        losses: {step: mean training loss since the last validation}.
        metrics: {step: {name: value}}.
        total: The sum of the `counted` training losses since the last validation.
    """

    step: int = 0
    best: float | None = None
    best_step: int = 0
    losses: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    total: float = 0.0
    counted: int = 0

    @property
    def before(self) -> dict[str, float]:
        """The metrics before the first step, rounded."""
        return rounded(self.metrics["0"])

    @property
    def figures(self) -> dict[str, float]:
        """The metrics of the best step, rounded."""
        return rounded(self.metrics[str(self.best_step)])


def rounded(figures: Mapping[str, Any], digits: int = 4) -> dict[str, Any]:
    """Figures as they are printed and kept."""
    return {name: round(value, digits) if isinstance(value, float) else value for name, value in figures.items()}


def train(
    parameters: Mapping[str, torch.Tensor],
    loss: Callable[[int], torch.Tensor],
    plan: TrainingPlan,
    out: Path | None,
    *,
    validate: Callable[[], Mapping[str, float]] | None = None,
    metric: str = "",
    higher: bool = False,
    enough: Callable[[Mapping[str, float]], bool] = lambda values: False,
    shares: Mapping[str, float] | None = None,
    settings: Mapping[str, object] | None = None,
    progress: Progress = silent,
    what: str = "training",
    saved: Callable[[Mapping[str, torch.Tensor], History], None] = lambda best, history: None,
    own: bool = False,
) -> History:
    """Train `parameters` in place, and leave in them the values that were best on validation.

    Args:
        parameters: What learns, by name; gradients are gathered while it is trained.
        loss: The loss of step s, a scalar that depends on `parameters`, s and nothing else: with batches that are a
            function of the step (see `batches`) a run that was interrupted gives the same bits as one that was not.
        out: The folder of the checkpoint; None to keep none.
        validate: Called every `plan.validate_every` steps, at the start and at the end, without gradients; None for the
            values of the last step in place of the best ones.
        metric: The name among its values that decides, the lowest being best unless `higher`.
        enough: Of these values, whether to end before the last step, with the parameters as they are then.
        shares: Of the plan's rate, what parameters of these names learn at in place of all of it.
        settings: Whatever else the run depends on; a checkpoint of other settings is refused.
        progress: Told how many steps of how many are done.
        own: Whether the checkpoint has a folder of its own in `out` for these settings, as where a command trains
            several parts.
        saved: Called after each checkpoint, with the values that are best so far.

    Raises:
        NumericalError: If the loss is no longer finite.
    """
    made = json.dumps({"plan": asdict(plan), "metric": metric, **(settings or {})}, sort_keys=True)
    if out is not None and own:
        out = out / content(made)[:16]
    for value in parameters.values():
        value.requires_grad_(True)
    optimizer = _optimizer(parameters, plan, shares or {})
    best = {name: value.detach().clone() for name, value in parameters.items()}
    path, history = None if out is None else out / CHECKPOINT, History()
    if path is not None and path.is_file():
        history = _restore(path, made, parameters, best, optimizer)
    saved_step, save_at, stepping = history.step, monotonic() + plan.save_seconds, False

    def over() -> bool:
        """Whether the run ends after this step, which is validated first if that is due and has not been done."""
        last, at = history.step == plan.steps, str(history.step)
        if history.step % plan.validate_every and not last:
            return False
        if at not in history.metrics:
            with torch.no_grad():
                values = {} if validate is None else {name: float(value) for name, value in validate().items()}
            if (
                validate is None
                or history.best is None
                or (values[metric] > history.best if higher else values[metric] < history.best)
            ):
                for name, value in parameters.items():
                    best[name].copy_(value.detach())
                history.best, history.best_step = values.get(metric), history.step
            if history.counted:
                history.losses[at] = history.total / history.counted
            # The metrics come last: a run that was interrupted in here validates the step again.
            history.total, history.counted, history.metrics[at] = 0.0, 0, values
        waited = (history.step - history.best_step) // plan.validate_every
        return last or enough(history.metrics[at]) or (plan.patience is not None and waited >= plan.patience)

    def save() -> None:
        nonlocal saved_step, save_at
        if path is not None:
            begun = monotonic()
            _save(path, made, history, parameters, best, optimizer)
            saved_step = history.step
            saved(best, history)
            save_at = monotonic() + max(plan.save_seconds, _BETWEEN * (monotonic() - begun))

    try:
        ended = over()
        while not ended:
            for group in optimizer.param_groups:
                group["lr"] = plan.rate(history.step) * group["share"]
            value = loss(history.step)
            if not torch.isfinite(value):
                raise NumericalError(f"the loss is {float(value.detach())} in step {history.step}: use a smaller lr")
            optimizer.zero_grad(set_to_none=True)
            value.backward()
            torch.nn.utils.clip_grad_norm_(list(parameters.values()), plan.clip)
            stepping = True
            optimizer.step()
            # Inside a caller's autocast, copies of the weights before this step would serve all later ones.
            torch.clear_autocast_cache()
            history.step += 1
            history.total, history.counted = history.total + float(value.detach()), history.counted + 1
            stepping = False
            ended = over()
            if ended or monotonic() > save_at:
                save()
            progress(what, history.step, plan.steps)
    except KeyboardInterrupt:
        # Parameters that a step of the optimizer has changed in part are not kept.
        if history.step > saved_step and not stepping:
            save()
        raise
    with torch.no_grad():
        for name, tensor in parameters.items():
            tensor.copy_(best[name])
            tensor.requires_grad_(False)
    return history


def batches(count: int, size: int, seed: int) -> Callable[[int], list[int]]:
    """Which of `count` items make up the batch of step s.

    All once in a random order, then all in another one, ...
    """
    if count < 1 or size < 1:
        raise SettingsError(f"there is nothing to make batches of: {count} texts, {size} per batch")
    orders: dict[int, np.ndarray] = {}

    def order(epoch: int) -> np.ndarray:
        if epoch not in orders:
            for old in [each for each in orders if each < epoch - 1]:
                del orders[old]
            orders[epoch] = np.random.default_rng([seed, epoch]).permutation(count)
        return orders[epoch]

    def batch(step: int) -> list[int]:
        return [int(order(at // count)[at % count]) for at in range(step * size, (step + 1) * size)]

    return batch


def _optimizer(
    parameters: Mapping[str, torch.Tensor], plan: TrainingPlan, shares: Mapping[str, float]
) -> torch.optim.AdamW:
    groups: dict[tuple[float, float], list[torch.Tensor]] = {}
    for name, tensor in parameters.items():
        # Gains and biases are not pulled towards zero.
        decay = plan.weight_decay if tensor.ndim > 1 else 0.0
        groups.setdefault((decay, shares.get(name, 1.0)), []).append(tensor)
    options = [{"params": tensors, "weight_decay": decay, "share": share} for (decay, share), tensors in groups.items()]
    return torch.optim.AdamW(options, lr=plan.lr, betas=plan.betas)


def drawn(count: int, size: int, seed: int, step: int) -> torch.Tensor:
    """[size] which of `count` items make up the batch of a step, drawn with replacement."""
    return torch.from_numpy(np.random.default_rng([seed, step]).integers(count, size=size))


def content(data: object) -> str:
    """SHA-256 of what was learned from, JSON or tensors, for the settings of a run."""
    return hashlib.sha256(json.dumps(data, default=_digest).encode()).hexdigest()


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def known_figures(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What is in the JSON file of an earlier run with the same settings; nothing without a file.

    Raises:
        SettingsError: For a file of other settings.
    """
    if not path.is_file():
        return {}
    found = read_json(path)
    if not isinstance(found, dict) or any(found.get(each) != value for each, value in settings.items()):
        raise SettingsError(f"{path} was begun with other settings: name another folder, or repeat them")
    return found


def _save(
    path: Path,
    made: str,
    history: History,
    parameters: Mapping[str, torch.Tensor],
    best: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
) -> None:
    """One file with all there is, so that its parts never come from two different steps."""
    tensors = {f"now.{name}": value.detach().contiguous() for name, value in parameters.items()}
    tensors |= {f"best.{name}": value.contiguous() for name, value in best.items()}
    for name, value in parameters.items():
        state = optimizer.state[value]
        tensors |= {f"{moment}.{name}": state[moment].contiguous() for moment in _MOMENTS}
    keep(path, tensors, made, history=json.dumps(asdict(history)))


def _restore(
    path: Path,
    made: str,
    parameters: Mapping[str, torch.Tensor],
    best: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
) -> History:
    with kept(path, made) as (tensors, about), torch.no_grad():
        history = History(**parse_json(about["history"], "history"))
        for name, tensor in parameters.items():
            tensor.copy_(tensors[f"now.{name}"])
            best[name].copy_(tensors[f"best.{name}"])
            optimizer.state[tensor] = {
                moment: tensors[f"{moment}.{name}"].to(tensor.device if moment != "step" else "cpu", copy=True)
                for moment in _MOMENTS
            }
    return history
