"""GRPO on calibrated rewards: a model learns what wins once the best of several of its texts is taken (InfAlign)."""

from __future__ import annotations

import json
from collections.abc import Sequence as Ordered
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.noise import nth_seed
from decodery.engine.engine import Engine
from decodery.models.loaders.store import Progress, silent, write_text
from decodery.models.protocol import LanguageModel
from decodery.models.torch.transformer import Transformer
from decodery.scorers.infalign import transformed
from decodery.step.scorer import Candidates, Scorer, judge
from decodery.step.sequence import Sequence
from decodery.training.cut import changeable, parameters, quantized
from decodery.training.loop import TrainingPlan, batches, train
from decodery_benchmarks.puzzles import Puzzle, drawn
from decodery_benchmarks.puzzles.alphabet import END_ID, encoded, tokenizer

from .puzzle_model import check_folder, log_probability, save
from .solving import solved

REFERENCE = "reference.json"
_SPARE = 8


@dataclass(frozen=True)
class GRPORecipe:
    """How a model learns from rewards of its own texts.

    Attributes:
        problems: Puzzles that are learned from.
        held: Further ones, for validation.
        group: Texts of a puzzle in a step, `batch` puzzles each.
        calibrate: What a text counts, "none" its reward, else the share of `reference` texts of the untrained model
            that it beats, as it is ("identity") or transformed for taking the best or worst of n, see the scorer
            infalign.
        beta: Nats of distance from the untrained model against a whole reward.
    """

    problems: int = 64
    held: int = 24
    group: int = 8
    reference: int = 32
    calibrate: Literal["none", "identity", "exp", "best-of", "worst-of"] = "best-of"
    n: int = 4
    t: float = 10.0
    beta: float = 0.5
    steps: int = 100
    batch: int = 8
    lr: float = 1e-4
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.problems, self.held, self.reference, self.batch, self.steps, self.n) < 1 or self.group < 2:
            raise SettingsError(
                "grpo needs problems, held, reference, batch, steps and n of at least 1, and groups of at least 2"
            )
        if not self.lr > 0:
            raise SettingsError(f"grpo needs an lr above 0, not {self.lr}")
        if not self.beta > 0:
            raise SettingsError(f"grpo keeps a model near what it was: give a beta above 0, not {self.beta}")


def surrogate(logs: torch.Tensor, base: torch.Tensor, worth: torch.Tensor, beta: float) -> torch.Tensor:
    """[b] losses of groups of g texts.

    Their gradient is on average that of beta * KL(policy || base) - E worth. What the others of its group came to is
    taken off each text's worth. GRPO divides by their spread, too, which would have another optimum than the tilt of
    the distribution by worth / beta that InfAlign speaks of.

    Args:
        logs, base: [b, g] log-probabilities of whole texts under the policy that drew them and the untrained model.
        worth: [b, g].
    """
    gained = worth - beta * (logs.detach() - base)
    others = (gained.sum(dim=1, keepdim=True) - gained) / (gained.shape[1] - 1)
    return -((gained - others) * logs).mean(dim=1)


def win_rate(ours: np.ndarray, theirs: np.ndarray, n: int) -> float:
    """How often the best of n of these rewards beats the best of n of those, each drawn with replacement.

    Ties half.
    """
    values = np.unique(np.concatenate([ours, theirs]))
    below, own = ((each[:, None] < values).mean(axis=0) ** n for each in (theirs, ours))
    up_to, own_up_to = ((each[:, None] <= values).mean(axis=0) ** n for each in (theirs, ours))
    return float(((own_up_to - own) * (below + up_to) / 2).sum())


def train_grpo(
    model: LanguageModel,
    puzzle: Puzzle,
    scorer: Scorer,
    out: Path,
    *,
    recipe: GRPORecipe | None = None,
    command: str = "",
    progress: Progress = silent,
) -> dict[str, float]:
    """Train a copy of `model` on the scores of its own texts, and write it in int8 to `out`.

    Returns what held-out puzzles say of the int8 model that is kept: its mean `reward`, how often the best of n of its
    texts beats that of the untrained one (`win_rate`) and one text another (`win_rate_of_one`), how far it is from that
    (`kl`, nats of a whole text), and the `objective`; and the reward before. Interrupted, it goes on when called again.
    """
    recipe = recipe or GRPORecipe()
    check_folder(out)
    if not isinstance(model, Transformer):
        raise SettingsError("grpo trains models that this package runs itself, such as one of train puzzle-model")
    world = _World(model, puzzle, scorer, out, recipe, progress)
    policy, base = changeable(model), changeable(model)
    batch = batches(recipe.problems, min(recipe.batch, recipe.problems), recipe.seed)

    def loss(step: int) -> torch.Tensor:
        numbers = batch(step)
        # From the weights themselves: steps are smaller than what int8 can tell apart.
        with torch.no_grad():
            groups = world.draw(policy, numbers, recipe.group, step + 1)
        rows = [
            (world.tokens[number], seq.generated)
            for number, group in zip(numbers, groups, strict=True)
            for seq in group
        ]
        with torch.no_grad():
            known = log_probability(base, rows).view(len(numbers), -1)
        worth = [world.worth(number, group) for number, group in zip(numbers, groups, strict=True)]
        logs = log_probability(policy, rows).view(len(numbers), -1)
        return surrogate(logs, known, torch.tensor(np.array(worth), dtype=logs.dtype, device="cpu"), recipe.beta).mean()

    @torch.no_grad()
    def judged(by: Transformer) -> dict[str, float]:
        numbers = range(recipe.problems, recipe.problems + recipe.held)
        groups = world.draw(by, numbers, recipe.reference, 0)
        found: list[tuple[float, ...]] = []
        for number, group in zip(numbers, groups, strict=True):
            rows = [(world.tokens[number], seq.generated) for seq in group]
            kl = float((log_probability(by, rows) - log_probability(base, rows)).mean())
            rewards, worth = world.rewards(number, group), float(world.worth(number, group).mean())
            wins = [win_rate(rewards, world.reference[number], n) for n in (recipe.n, 1)]
            found.append((float(rewards.mean()), *wins, kl, worth - recipe.beta * kl))
        names = ("reward", "win_rate", "win_rate_of_one", "kl", "objective")
        return dict(zip(names, np.mean(found, axis=0).tolist(), strict=True))

    history = train(
        parameters(policy),
        loss,
        TrainingPlan(recipe.steps, lr=recipe.lr, validate_every=max(1, recipe.steps // 5)),
        out / "training",
        validate=lambda: judged(policy),
        metric="objective",
        higher=True,
        settings={"puzzle": repr(puzzle), "scorer": repr(scorer), "recipe": asdict(recipe), "model": model.fingerprint},
        progress=progress,
        what="learning from rewards",
    )
    kept = quantized(policy)
    values = judged(changeable(kept)) | {"reward_before": history.metrics["0"]["reward"]}
    told = f"`{json.dumps(asdict(recipe))}`, by\n\n    {command or 'python benchmarks/train.py grpo'}\n\n"
    told += f"Step {history.best_step} was kept; on {recipe.held} puzzles held out: {values}\n"
    save(kept, out, f"# A model that learned {puzzle.spec} from rewards of its own texts\n\n{told}")
    return values


class _World:
    """Puzzles, and what the untrained model's texts are worth there.

    tokens: prompts; reference: [problems + held] arrays of rewards [reference], ascending, kept in `out`.
    """

    def __init__(
        self, model: Transformer, puzzle: Puzzle, scorer: Scorer, out: Path, recipe: GRPORecipe, progress: Progress
    ) -> None:
        self._puzzle, self._scorer, self._recipe = puzzle, scorer, recipe
        self._engine = Engine(model)
        count = recipe.problems + recipe.held
        self.prompts = list(islice(drawn(puzzle, "train", recipe.seed), count))
        self.tokens = [encoded(prompt) for prompt in self.prompts]
        made, path = f"{model.fingerprint} {puzzle!r} {scorer!r} {recipe.reference} {recipe.seed}", out / REFERENCE
        known = json.loads(path.read_text("utf-8")) if path.is_file() else {}
        rewards = known["rewards"] if known.get("made") == made and len(known["rewards"]) >= count else None
        if rewards is None:
            texts = solved(
                *(model, self.prompts, puzzle.length + _SPARE),
                each=recipe.reference,
                temperature=1.0,
                seed=nth_seed(recipe.seed, 1 << 40),
                progress=progress,
            )
            rewards = [sorted(self.rewards(number, several).tolist()) for number, several in enumerate(texts)]
            write_text(path, json.dumps({"made": made, "rewards": rewards}))
        self.reference = [np.array(each) for each in rewards]

    def draw(self, policy: Transformer, numbers: Ordered[int], each: int, step: int) -> list[list[Sequence]]:
        """Texts of these puzzles, at seeds of their own for each step."""
        prompts, seed = [self.prompts[number] for number in numbers], nth_seed(self._recipe.seed, step << 20)
        return solved(policy, prompts, self._puzzle.length + _SPARE, each=each, temperature=1.0, seed=seed)

    def rewards(self, number: int, texts: Ordered[Sequence]) -> np.ndarray:
        """[m] what the scorer says of answers; 0 for what was cut, which is none."""
        ended = [seq.finish_reason == "stop" for seq in texts]
        outputs = [[token for token in seq.generated if token != END_ID] for seq in texts]
        written = [seq.text.text for seq in texts if seq.text is not None]
        asked = Candidates(self.tokens[number], outputs, [True] * len(texts), texts=written, decode=tokenizer().decode)
        return np.where(ended, self._engine.finish(judge(self._scorer, asked)).numpy(), 0.0)

    def worth(self, number: int, texts: Ordered[Sequence]) -> np.ndarray:
        """[m] what these texts count in training."""
        recipe, rewards = self._recipe, self.rewards(number, texts)
        if recipe.calibrate == "none":
            return rewards
        drawn_from = self.reference[number]
        calibrated = ((drawn_from < rewards[:, None]).mean(axis=1) + (drawn_from <= rewards[:, None]).mean(axis=1)) / 2
        return transformed(calibrated, recipe.calibrate, n=recipe.n, t=recipe.t, beta=recipe.beta)
