"""Train SVEN's prefixes: two learned pasts, one for programs as they are after a fix and one for those before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decodery.core.errors import PromptError
from decodery.core.noise import nth_seed
from decodery.models.batch import Batch, Segment
from decodery.models.torch.transformer import Transformer
from decodery.models.trained.prefix import KVPrefix, Prefixes

from .fitting import fit
from .held_out import HeldOut, hold_out
from .kind import ARGUMENT, COUNT, NON_NEGATIVE, Bounded, Data, Run, bounded, kind, option
from .kind_data import validation
from .loop import TrainingPlan, batches, content
from .programs import MOST_TOKENS, LabelledProgram, ProgramPair, built_in_pairs, programs_of, read_pairs
from .tensors import even
from .traced import TracedCache, differentiable

CONTROLS = ("secure", "unsafe")
"""What the prefixes are called: that of programs after the fix, and before it."""
_HELD_OUT = 8
"""Of so many pairs one is held out."""


@dataclass(frozen=True)
class LinearDecayPlan(TrainingPlan):
    """A plan as published: AdamW whose learning rate falls linearly from its first step on."""

    lr: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.999)

    def rate(self, step: int) -> float:
        return self.lr * (1 - step / self.steps)


@dataclass(frozen=True)
class SVENRecipe(Bounded):
    """How prefixes learn: as published for the smallest model, but for fewer epochs."""

    length: int = bounded(5, COUNT, "Positions of a prefix.")
    epochs: float = 4.0
    lr: float = option(1e-2, "Initial learning rate.")
    contrast: float = bounded(4.0, NON_NEGATIVE, "Weight of the contrast with the other prefix.")
    kl: float = bounded(1.6, NON_NEGATIVE, "Weight of the divergence where nothing changed.")
    dropout: float = bounded(0.1, "[0, 1)", "Share of the numbers of a prefix that is left out in a step.")
    batch: int = option(2, "Programs of a step.")
    seed: int = option(0, "Random seed of the order and the split.")


@dataclass(frozen=True)
class SVENLosses:
    """What `losses_of` a program are, each a mean in nats."""

    language: torch.Tensor
    contrast: torch.Tensor
    kl: torch.Tensor
    right: torch.Tensor  # Share of changed tokens that its prefix favours


def losses_of(
    own: torch.Tensor, other: torch.Tensor, base: torch.Tensor, targets: torch.Tensor, changed: torch.Tensor
) -> SVENLosses:
    """Losses of one program, from logits [n, vocab] under its own prefix, the other one and none.

    language: -log P_own of changed tokens; contrast: -log P_own / (P_own + P_other) of them; kl: KL(base || own) +
    KL(base || other) where nothing changed.

    Args:
        targets: [n] the tokens that follow.
        changed: [n] bool.
    """
    own, other, base = (each.log_softmax(dim=-1) for each in (own, other, base))
    index = targets[changed, None]
    ours, theirs = own[changed].gather(1, index)[:, 0], other[changed].gather(1, index)[:, 0]
    kept = base[~changed]
    distance = (kept.exp() * (2 * kept - own[~changed] - other[~changed])).sum(dim=-1)
    return SVENLosses(
        language=-ours.mean(),
        contrast=(torch.logaddexp(ours, theirs) - ours).mean(),
        kl=distance.mean(),
        right=(ours > theirs).float().mean(),
    )


class SVENTrainee:
    """The model with what it says of every program on its own, and the prefixes that learn."""

    def __init__(self, model: Transformer, recipe: SVENRecipe) -> None:
        self.model = model
        self.recipe = recipe
        empty = KVPrefix.zeros(model.config, recipe.length).data.to(model.device)
        self.parameters = {name: empty.clone().requires_grad_(True) for name in CONTROLS}
        self._states: dict[LabelledProgram, torch.Tensor] = {}

    def prefixes(self, step: int | None) -> list[torch.Tensor]:
        """Both prefixes; in a step of training some of their numbers are left out, always the same ones."""
        parameters, share = [self.parameters[name] for name in CONTROLS], self.recipe.dropout
        if step is None or share == 0:
            return parameters
        generator = torch.Generator().manual_seed(nth_seed(self.recipe.seed * 1_000_003, step))
        masks = [(even(generator, *each.shape) >= share).to(each) / (1 - share) for each in parameters]
        return [each * mask for each, mask in zip(parameters, masks, strict=True)]

    def losses(self, programs: Sequence[LabelledProgram], step: int | None = None) -> list[SVENLosses]:
        """Of every program, all in one pass."""
        pasts, segments = self.prefixes(step), []
        for program in programs:
            n = len(program.tokens) - 1
            for control in (program.control, 1 - program.control):
                cache = TracedCache(pasts[control].to(self.model.dtype), -pasts[control].shape[3])
                segments.append(Segment(np.arange(n), program.tokens[:-1], cache=cache))
        scores = self.model.forward(Batch(segments))
        found = []
        for number, program in enumerate(programs):
            targets = torch.from_numpy(program.tokens[1:]).to(self.model.device)
            changed = torch.from_numpy(program.changed[1:]).to(self.model.device)
            own, other = scores.of(2 * number), scores.of(2 * number + 1)
            found.append(losses_of(own, other, self.alone(program), targets, changed))
        return found

    @torch.no_grad()
    def alone(self, program: LabelledProgram) -> torch.Tensor:
        """Logits [n - 1, vocab] without a prefix.

        What is kept of a program is its last states, which are small.
        """
        if program not in self._states:
            last, n = self.model.config.num_layers, len(program.tokens) - 1
            segment = Segment(np.arange(n), program.tokens[:-1], logit_rows=[])
            self._states[program] = self.model.forward(Batch([segment]), taps=[last]).hidden[last]
        return self.model.head(self._states[program])

    def total(self, losses: Sequence[SVENLosses]) -> torch.Tensor:
        """The mean over programs of what is minimised."""
        weighed = [each.language + self.recipe.contrast * each.contrast + self.recipe.kl * each.kl for each in losses]
        return torch.stack(weighed).mean()

    @torch.no_grad()
    def figures(self, programs: Sequence[LabelledProgram]) -> dict[str, float]:
        """The losses of programs that were not learned from."""
        found = [self.losses([program])[0] for program in programs]
        means = {name: float(torch.stack([getattr(each, name) for each in found]).mean()) for name in vars(found[0])}
        return {"loss": float(self.total(found)), **means}


def train_sven(run: Run, pairs: Sequence[ProgramPair]) -> Prefixes:
    """Train the prefixes "secure" and "unsafe" on pairs, for `sven`. Only the prefixes learn.

    One pair in eight is held out, and the step with the least loss on half of these is what remains.
    """
    target, recipe = run.floating, run.of(SVENRecipe)
    model = differentiable(target.model, "prefixes")
    # Both programs of a pair have most of their text in common.
    found = [(each, number) for number, pair in enumerate(pairs) for each in programs_of(target.tokenizer, [pair])]
    split = hold_out([number for _, number in found], _HELD_OUT)
    programs, others = ([found[at][0] for at in part] for part in split)
    if len(pairs) < _HELD_OUT or not programs or not others:
        raise PromptError(
            f"{len(pairs)} pairs leave nothing to learn from or nothing to validate with: give at least {_HELD_OUT}, "
            f"none longer than {MOST_TOKENS} tokens"
        )
    trainee, known = SVENTrainee(model, recipe), HeldOut.of(others, [found[at][1] for at in split[1]], "pairs")
    batch = batches(len(programs), recipe.batch, recipe.seed)
    steps = max(1, round(recipe.epochs * len(programs) / recipe.batch))
    settings = {
        "recipe": vars(recipe),
        "pairs": content([[pair.before, pair.after] for pair in pairs]),
        "dtype": target.dtype,
    }
    fitted = fit(
        run,
        known,
        trainee.parameters,
        lambda step: trainee.total(trainee.losses([programs[number] for number in batch(step)], step)),
        trainee.figures,
        LinearDecayPlan(steps, lr=recipe.lr, validate_every=max(1, len(programs) // (2 * recipe.batch))),
        unit="programs",
        settings=settings,
        what="training prefixes",
    )
    counts = {"pairs": len(pairs), "programs": len(programs), "steps": fitted.history.step}
    facts = fitted.facts(recipe, vocabulary=model.config.vocabulary, **counts)
    learned = {name: KVPrefix(each.detach().cpu()) for name, each in trainee.parameters.items()}
    prefixes = Prefixes(learned, facts, model.fingerprint)
    prefixes.save(run.out / Prefixes.FILE)
    return prefixes


@dataclass(frozen=True)
class Fixes(Data):
    """Programs before and after a fix."""

    NOTE = """PAIRS holds one JSON object a line, {"before": ..., "after": ...}: the same program before and after a
    fix. The default is 100 built-in pairs about security. One pair in eight is held out."""

    pairs: Path | None = field(default=None, metadata=ARGUMENT)


@kind(
    f"The prefixes are ready: --logits-source sven:control={CONTROLS[0]},prefix={{out}}",
    (Fixes(), SVENRecipe()),
    "--out prefixes",
    model="to steer",
    file=Prefixes.FILE,
)
def _sven(run: Run) -> Mapping[str, Any]:
    """Train two short prefixes that steer MODEL towards programs after a fix, or before it. Only they are trained."""
    given = run.of(Fixes).pairs
    pairs = read_pairs(given) if given else built_in_pairs(100)
    return validation(train_sven(run, pairs))
