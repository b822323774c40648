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
from decodery.models.loaders.load import LoadedModel
from decodery.models.loaders.store import Progress, silent
from decodery.models.protocol import LanguageModel, OpenModel, is_open
from decodery.models.trained.exits import CONTINUE, EXIT, HEADS, STOP, ExitHeads, unit

from .card import Card, check_of
from .corpus import Corpus
from .exits import ExitChecks, ExitTexts, Places
from .kind import Kind, Run
from .kind_data import CutFiles, cut_texts
from .loop import History, TrainingPlan, batches, train

check_folder = check_of(HEADS, "holds no heads of early exits")
_CLASSIFIER_EPOCHS, _CLASSIFIER_LR = 5, 1e-3


@dataclass(frozen=True)
class SECRecipe:
    """How the heads of `sec` learn.

    The classifier then sees the texts five times, as in the paper.

    Attributes:
        every: Layers between two checks.
        rank: Rank of the correction of the head at a check.
        outputs: Tokens that the corrections learn with, the most frequent ones of the texts first.
        lr: Peak learning rate.
        seed: Random seed of the initial weights and the order.
    """

    every: int = 5
    rank: int = 16
    outputs: int = 4096
    epochs: float = 2.0
    batch: int = 4
    lr: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.every, self.rank, self.outputs, self.batch) < 1 or not self.epochs > 0 or not self.lr > 0:
            raise SettingsError("sec needs every, rank, outputs and batch of at least 1, and epochs and lr above 0")


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


def train_sec(
    target: LoadedModel,
    model: LanguageModel,
    corpus: Corpus,
    out: Path,
    *,
    recipe: SECRecipe | None = None,
    command: str = "",
    progress: Progress = silent,
) -> ExitHeads:
    """Train heads for `target` on correct texts and write them to the folder `out`, for `sec`.

    Interrupted, it goes on from its last checkpoint in `out` when called again.

    Args:
        model: The same one in floating point, through whose head gradients go.
        corpus: Such as `data.cut_files` makes, of which every tenth text is held out.

    Raises:
        SettingsError: For a model that is not in floating point or cannot be left early, and for too few texts.
    """
    recipe = recipe or SECRecipe()
    check_folder(out)
    if not (is_open(model) and model.capabilities.gradients):
        raise SettingsError("heads are trained over a model in floating point: load it with dtype='float32'")
    checks = ExitChecks(target, recipe.every)
    reading = checks.read(corpus, out / "states", progress)
    heads, history = _train_heads(model, reading, recipe, out / "heads", progress)
    before = reading.said(reading.held, None, progress)
    after = reading.said([*reading.learned, *reading.held], heads, progress)
    taught = {number: labels(_right(reading[number], after[number])) for number in after}
    classifier = _train_classifier(reading, taught, recipe, out / "classifier", progress)
    facts: dict[str, Any] = {
        "model": target.name,
        "vocabulary": target.model.config.vocabulary,
        "command": command,
        "texts": len(corpus),
        "steps": history.step,
        "layers": [*checks.layers, target.model.config.num_layers],
        "validation": _figures(reading, before, after, taught, classifier),
        "recipe": asdict(recipe),
    }
    down, up = heads.down.cpu(), heads.up.cpu()
    found = ExitHeads(recipe.every, classifier, down, up, facts, target.model.fingerprint)
    found.save(out / HEADS)
    Card(
        f"Exit heads of {target.name}",
        f"-m {target.name} --logits-source sec:heads=THIS_FOLDER",
        "Texts change, and may end early: quality is traded for layers. Nothing about the model itself was trained.",
        f"{len(corpus)} texts, a tenth of them held out.",
        command,
        "On held-out texts, by the layers that a token went through",
        {
            name: dict(zip(facts["layers"], facts["validation"][name], strict=False))
            for name in ("right with the plain head", "right with the corrected head", "classifier right")
        },
        f"Ending: {facts['validation']['stop']}. Leaving: {facts['validation']['exit']}.",
    ).write(out)
    return found


def _right(places: Places, said: torch.Tensor) -> torch.Tensor:
    """[n, checks + 1] bool, see `labels`."""
    return torch.cat((said, places.last[:, None]), dim=1) == places.following[:, None]


def _train_heads(
    model: OpenModel, reading: ExitTexts, recipe: SECRecipe, out: Path, progress: Progress
) -> tuple[ExitHeads, History]:
    """Corrections that begin as none, by the sum of the checks' cross-entropies; the classifier knows nothing yet."""
    hidden, count, generator = model.config.hidden_size, len(reading.checks), torch.Generator().manual_seed(recipe.seed)
    down = (
        torch.randn(count, recipe.rank, hidden, generator=generator, dtype=torch.float32, device="cpu") / hidden**0.5
    ).to(model.device)
    learned = {
        "down": down,
        "up": torch.zeros(count, hidden, recipe.rank, device=model.device, dtype=torch.float32),
    }
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

    def validate() -> dict[str, float]:
        return {"cross_entropy": float(loss(reading.held)) / count}

    chosen = batches(len(reading.learned), recipe.batch, recipe.seed)
    steps = max(1, round(recipe.epochs * len(reading.learned) / recipe.batch))
    history = train(
        learned,
        lambda step: loss([reading.learned[number] for number in chosen(step)]),
        TrainingPlan(steps, lr=recipe.lr, validate_every=max(1, steps // 4)),
        out,
        validate=validate,
        metric="cross_entropy",
        settings={"recipe": asdict(recipe), "corpus": reading.corpus.facts},
        progress=progress,
        what="training heads",
    )
    nothing = torch.zeros(3, hidden, dtype=torch.float32, device="cpu")
    return ExitHeads(recipe.every, nothing, learned["down"].detach(), learned["up"].detach()), history


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
    chosen = torch.tensor([*tokens, *islice(others, most - len(tokens))], dtype=torch.int64, device="cpu").sort().values
    place = torch.full((vocab_size,), -1, dtype=torch.int64, device="cpu")
    place[chosen] = torch.arange(len(chosen), device="cpu")
    return chosen, place


def _train_classifier(
    reading: ExitTexts, taught: Mapping[int, torch.Tensor], recipe: SECRecipe, out: Path, progress: Progress
) -> torch.Tensor:
    """[3, hidden] by cross-entropy, of which a check counts the more the later it is."""
    checks = len(reading.checks)
    share = torch.arange(1, checks + 1, dtype=torch.float32, device="cpu")
    share /= share.sum()
    classifier = torch.zeros(
        3, reading[reading.learned[0]].states.shape[-1], requires_grad=True, dtype=torch.float32, device="cpu"
    )

    def loss(numbers: Sequence[int]) -> torch.Tensor:
        states = torch.cat([unit(reading[number].states).float() for number in numbers])
        wanted = torch.cat([taught[number] for number in numbers])
        each = cross_entropy((states @ classifier.T).transpose(1, 2), wanted, reduction="none")
        return (each * share).sum(dim=1).mean()

    def validate() -> dict[str, float]:
        return {"cross_entropy": float(loss(reading.held))}

    chosen = batches(len(reading.learned), recipe.batch, recipe.seed)
    steps = max(1, round(_CLASSIFIER_EPOCHS * len(reading.learned) / recipe.batch))
    train(
        {"classifier": classifier},
        lambda step: loss([reading.learned[number] for number in chosen(step)]),
        TrainingPlan(steps, lr=_CLASSIFIER_LR, validate_every=max(1, steps // 4)),
        out,
        validate=validate,
        metric="cross_entropy",
        settings={"recipe": asdict(recipe), "corpus": reading.corpus.facts},
        progress=progress,
        what="training a classifier",
    )
    return classifier.detach()


def _figures(
    reading: ExitTexts,
    before: Mapping[int, torch.Tensor],
    after: Mapping[int, torch.Tensor],
    taught: Mapping[int, torch.Tensor],
    classifier: torch.Tensor,
) -> dict[str, Any]:
    """Of held-out texts, by check: how often head, corrected head and most likely classes are right."""
    following = torch.cat([reading[number].following for number in reading.held])[:, None]
    plain, heads, wanted = (torch.cat([each[n] for n in reading.held]) for each in (before, after, taught))
    whole = torch.cat([reading[number].last for number in reading.held])[:, None] == following
    said = torch.cat([(unit(reading[n].states).float() @ classifier.T).argmax(dim=-1) for n in reading.held])

    def shares(found: torch.Tensor) -> list[float]:
        return [round(each, 4) for each in found.double().mean(dim=0).tolist()]

    def right(kind: int) -> float | None:
        """How often a class is right where it is the most likely one; None where it is nowhere."""
        chosen = wanted[said == kind]
        return round(float((chosen == kind).double().mean()), 4) if len(chosen) else None

    return {
        "right with the plain head": [*shares(plain == following), *shares(whole)],
        "right with the corrected head": [*shares(heads == following), *shares(whole)],
        "classifier right": shares(said == wanted),
        "stop": {"of all": float(f"{(wanted == STOP).double().mean():.4f}"), "where said": right(STOP)},
        "exit": {"of all": float(f"{(wanted == EXIT).double().mean():.4f}"), "where said": right(EXIT)},
    }


def _learn(run: Run) -> dict[str, Any]:
    corpus = cut_texts(run)
    found = train_sec(run.loaded, run.learning, corpus, run.out, recipe=run.of(SECRecipe), **run.how)
    return dict(found.facts["validation"])


KINDS = {
    "sec": Kind(
        """Train checks that tell which layers of MODEL know the next token, for the source sec.

        FILES are texts like those that MODEL will write, such as programs. Corrections of the head and a classifier are
        trained; MODEL does not change. One text in ten is held out.""",
        _learn,
        "The heads are ready: --logits-source sec:heads={out}",
        (CutFiles(length=128), SECRecipe()),
        "code.txt --out heads",
        model="to leave early",
        check=check_folder,
    )
}
