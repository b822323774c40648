"""Train the heads of `sec`: what each check would say, and who leaves there or ends the text.

When Neural Code Completion Models Size up the Situation: Cheaper and Faster Completion through Dynamic Model Inference
(2024). First the corrections of the head learn to say a text's next token at every check; then it is seen which checks
do, and a classifier learns that. The model itself stays as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from decodery.core.errors import SettingsError
from decodery.models.loaders.store import Progress
from decodery.models.protocol import OpenModel, is_open
from decodery.models.trained.exits import CONTINUE, EXIT, HEADS, STOP, ExitHeads, unit

from .corpus import Corpus
from .exits import ExitChecks, ExitTexts, Places
from .held_out import Measured
from .kind import COUNT, Bounded, Run, bounded, kind, option
from .kind_data import CutFiles, cut_texts, validation
from .loop import History
from .tensors import int_tensor, normal, zeros

_CLASSIFIER_EPOCHS, _CLASSIFIER_LR = 5, 1e-3


@dataclass(frozen=True)
class SECRecipe(Bounded):
    """How the heads of `sec` learn.

    The classifier then sees the texts five times, as in the paper.

    Attributes:
        outputs: Tokens that the corrections learn with, the most frequent ones of the texts first.
    """

    every: int = bounded(5, COUNT, "Layers between two checks.")
    rank: int = bounded(16, COUNT, "Rank of the correction of the head at a check.")
    outputs: int = bounded(4096, COUNT)
    epochs: float = 2.0
    batch: int = 4
    lr: float = option(1e-3, "Peak learning rate.")
    seed: int = option(0, "Random seed of the initial weights and the order.")


def labels(right: torch.Tensor) -> torch.Tensor:
    """What every check should have said: [n, checks] of `STOP`, `EXIT` and `CONTINUE`.

    From the first check that is right on a row should leave; where nobody is right the text should end. As published,
    it does not matter that a later check may be wrong again.

    Args:
        right: [n, checks + 1] bool, whether the next token is what each check's head says, and what the whole model
            says.
    """
    seen = right.cummax(dim=1).values
    found = torch.where(seen[:, :-1], EXIT, CONTINUE)
    found[~seen[:, -1]] = STOP
    return found


def train_sec(run: Run, corpus: Corpus) -> ExitHeads:
    """Train heads on correct texts, of which every tenth is held out, for `sec`."""
    target, model, out, recipe, progress = run.loaded, run.learning, run.out, run.of(SECRecipe), run.progress
    if not (is_open(model) and model.capabilities.gradients):
        raise SettingsError("heads are trained over a model in floating point: load it with dtype='float32'")
    checks = ExitChecks(target, recipe.every)
    reading = checks.read(corpus, out / "states", progress)
    heads, history = _train_heads(model, reading, recipe, out / "heads", progress)
    before = reading.said(reading.held, None, progress)
    after = reading.said([*reading.learned, *reading.held], heads, progress)
    taught = {number: labels(_right(reading[number], after[number])) for number in after}
    classifier = _train_classifier(reading, taught, recipe, out / "classifier", progress)
    mixed = _shuffled(taught, reading.learned, recipe.seed)
    control = _train_classifier(reading, mixed, recipe, out / "control", progress, "training the control")
    facts: dict[str, Any] = {
        **run.facts,
        "vocabulary": target.model.config.vocabulary,
        "texts": len(corpus),
        "steps": history.step,
        "layers": [*checks.layers, target.model.config.num_layers],
        "validation": _figures(reading, before, after, taught, classifier, control),
        "recipe": asdict(recipe),
    }
    down, up = heads.down.cpu(), heads.up.cpu()
    found = ExitHeads(recipe.every, classifier, down, up, facts, target.model.fingerprint)
    found.save(out / HEADS)
    return found


def _shuffled(taught: Mapping[int, torch.Tensor], learned: Sequence[int], seed: int) -> dict[int, torch.Tensor]:
    """The classes of the texts that are learned from, shuffled over all of their places."""
    rows = torch.cat([taught[number] for number in learned])
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed), device="cpu")]
    parts = rows.split([len(taught[number]) for number in learned])
    return {**taught, **dict(zip(learned, parts, strict=True))}


def _right(places: Places, said: torch.Tensor) -> torch.Tensor:
    """[n, checks + 1] bool, see `labels`."""
    return torch.cat((said, places.last[:, None]), dim=1) == places.following[:, None]


def _train_heads(
    model: OpenModel, reading: ExitTexts, recipe: SECRecipe, out: Path, progress: Progress
) -> tuple[ExitHeads, History]:
    """Corrections that begin as none, by the sum of the checks' cross-entropies; the classifier knows nothing yet."""
    hidden, count, generator = model.config.hidden_size, len(reading.checks), torch.Generator().manual_seed(recipe.seed)
    down = (normal(generator, count, recipe.rank, hidden) / hidden**0.5).to(model.device)
    learned = {"down": down, "up": torch.zeros(count, hidden, recipe.rank, device=model.device, dtype=torch.float32)}
    tokens, place = _outputs(reading, recipe.outputs, model.vocab_size, generator)
    project = model.projection(tokens.to(model.device))

    def loss(numbers: Sequence[int]) -> torch.Tensor:
        found = [reading[number] for number in numbers]
        wanted = place[torch.cat([each.following for each in found])]
        states = torch.cat([each.states for each in found])[wanted >= 0].to(model.device, model.dtype)
        wanted, total = wanted[wanted >= 0].to(model.device), torch.zeros((), device=model.device, dtype=torch.float32)
        for check in range(count):
            x = model.final_norm(states[:, check])
            corrected = x + (x @ learned["down"][check].T.to(x.dtype)) @ learned["up"][check].T.to(x.dtype)
            total = total + cross_entropy(project(corrected).float(), wanted, reduction="sum") / max(1, len(wanted))
        return total

    how = _settings(reading, recipe, progress, "training heads")
    history = reading.train(learned, loss, out, epochs=recipe.epochs, lr=recipe.lr, share=1 / count, **how)
    nothing = zeros(3, hidden)
    return ExitHeads(recipe.every, nothing, learned["down"].detach(), learned["up"].detach()), history


def _settings(reading: ExitTexts, recipe: SECRecipe, progress: Progress, what: str) -> dict[str, Any]:
    """What both trainings have in common."""
    made = {"recipe": asdict(recipe), "corpus": reading.corpus.facts}
    return {"batch": recipe.batch, "seed": recipe.seed, "settings": made, "progress": progress, "what": what}


def _outputs(
    reading: ExitTexts, most: int, vocab_size: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens to learn with: the most frequent that follow, then any, so that the others do not rise unseen.

    And [vocab_size] their places, -1 for all the rest.
    """
    seen: Counter[int] = Counter()
    for number in reading.learned:
        seen.update(reading[number].following.tolist())
    others = (
        token for token in torch.randperm(vocab_size, generator=generator, device="cpu").tolist() if token not in seen
    )
    tokens = [token for token, _ in seen.most_common(most)]
    chosen = int_tensor([*tokens, *islice(others, most - len(tokens))]).sort().values
    place = torch.full((vocab_size,), -1, dtype=torch.int64, device="cpu")
    place[chosen] = torch.arange(len(chosen), device="cpu")
    return chosen, place


def _train_classifier(
    reading: ExitTexts,
    taught: Mapping[int, torch.Tensor],
    recipe: SECRecipe,
    out: Path,
    progress: Progress,
    what: str = "training a classifier",
) -> torch.Tensor:
    """[3, hidden] by cross-entropy, of which a check counts the more the later it is."""
    checks = len(reading.checks)
    share = torch.arange(1, checks + 1, dtype=torch.float32, device="cpu")
    share /= share.sum()
    classifier = zeros(3, reading[reading.learned[0]].states.shape[-1]).requires_grad_()

    def loss(numbers: Sequence[int]) -> torch.Tensor:
        states = torch.cat([unit(reading[number].states).float() for number in numbers])
        wanted = torch.cat([taught[number] for number in numbers])
        each = cross_entropy((states @ classifier.T).transpose(1, 2), wanted, reduction="none")
        return (each * share).sum(dim=1).mean()

    how = _settings(reading, recipe, progress, what)
    reading.train({"classifier": classifier}, loss, out, epochs=_CLASSIFIER_EPOCHS, lr=_CLASSIFIER_LR, **how)
    return classifier.detach()


def _figures(
    reading: ExitTexts,
    before: Mapping[int, torch.Tensor],
    after: Mapping[int, torch.Tensor],
    taught: Mapping[int, torch.Tensor],
    classifier: torch.Tensor,
    control: torch.Tensor,
) -> dict[str, Any]:
    """A report: how often the classifier is right, and the heads' most likely tokens, by check."""
    usual = torch.cat([taught[number] for number in reading.learned]).mode(dim=0).values

    def classes(number: int, weights: torch.Tensor | None) -> torch.Tensor:
        if weights is None:
            return usual.expand(taught[number].shape)
        return (unit(reading[number].states).float() @ weights.T).argmax(dim=-1)

    def right(weights: torch.Tensor | None) -> Measured:
        def share(some: Sequence[int]) -> dict[str, float]:
            hits = torch.cat([(classes(number, weights) == taught[number]).flatten() for number in some])
            return {"right": float(hits.double().mean())}

        return reading.known.measured(share, "right", lambda number: float(taught[number].numel()))

    tested = reading.known.tested
    following = torch.cat([reading[number].following for number in tested])[:, None]
    whole = torch.cat([reading[number].last for number in tested])[:, None] == following
    heads = {"plain": before, "corrected": after}
    by_check = {
        name: (torch.cat([each[number] for number in tested]) == following).double().mean(dim=0).tolist()
        for name, each in heads.items()
    }
    wanted, said = (torch.cat([taught[n] for n in tested]), torch.cat([classes(n, classifier) for n in tested]))

    def where(kind: int) -> float | None:
        """How often a class is right where it is the most likely one; None where it is nowhere."""
        chosen = wanted[said == kind]
        return round(float((chosen == kind).double().mean()), 4) if len(chosen) else None

    own = right(classifier)
    for name, shares in by_check.items():
        own[f"right with the {name} head"] = [round(each, 4) for each in [*shares, float(whole.double().mean())]]
    for name, act in (("stop", STOP), ("exit", EXIT)):
        own |= {f"{name}, of all": float((wanted == act).double().mean()), f"{name}, right where said": where(act)}
    return reading.known.report(own, {"the most frequent class of a check": right(None)}, control=right(control))


@kind(
    "The heads are ready: --logits-source sec:heads={out}",
    (CutFiles(length=128), SECRecipe()),
    "code.txt --out heads",
    model="to leave early",
    file=HEADS,
)
def _sec(run: Run) -> Mapping[str, Any]:
    """Train checks that tell which layers of MODEL know the next token, for the source sec.

    FILES are texts like those that MODEL will write, such as programs. Corrections of the head and a classifier are
    trained; MODEL does not change. One text in ten is held out.
    """
    return validation(train_sec(run, cut_texts(run)))
