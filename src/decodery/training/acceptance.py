"""SpecDec++'s head: from a draft model's states to the chance that the target accepts the tokens it has drafted."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from decodery.core.errors import SettingsError
from decodery.core.noise import nth_seed
from decodery.models.batch import Batch, Scores, Segment
from decodery.models.loaders.named import named
from decodery.models.loaders.store import Progress
from decodery.models.protocol import LanguageModel
from decodery.models.tokenizers.vocabularies import fitted
from decodery.speculative.draft_length.specdec_pp import AcceptanceHead

from .card import check_folder
from .corpus import Corpus, TrainingText, check_texts, turns_of
from .held_out import HeldOut, Measured
from .kept_files import keep, kept
from .kind import NON_NEGATIVE, POSITIVE, Bounded, Run, bounded, kind, option
from .kind_data import OwnTexts, own_texts
from .loop import History, TrainingPlan, batches, content, train
from .tensors import int_tensor

_FORMAT = 2
"""Another one where the same texts are judged in another way: kept states go on only with the same."""
_SHARD = 32
"""Texts whose states are kept in one file."""

Examples = tuple[torch.Tensor, torch.Tensor]
"""A draft model's states [n, hidden] float32 after tokens it drew, and the chances [n] that the target accepts them."""


@dataclass(frozen=True)
class AcceptanceRecipe(Bounded):
    """How a head is trained; the published numbers, with a schedule for thousands of tokens, not millions.

    Attributes:
        rejected: Weight of a rejection in the loss, 6 as published. With 1 the predicted probabilities are unbiased,
            which is better where most drafts are rejected.
        kept: Share of positions where the text's own token stays in place of the draft's.
    """

    depth: int = bounded(3, NON_NEGATIVE, "Residual blocks of the head.")
    rejected: float = bounded(6.0, POSITIVE)
    kept: float = bounded(0.15, "[0, 1)")
    epochs: float = option(5.0, "Training epochs.")
    lr: float = 3e-4
    batch: int = option(256, "Drafted tokens of a step.")
    seed: int = option(0, "Random seed of texts and training.")


def train_acceptance(run: Run, draft: LanguageModel, corpus: Corpus) -> dict[str, Any]:
    """Train a head for `draft` drafting for the model of a run, on texts that this one has written.

    The folder of the run is what `SpecDecPP` takes.

    Returns:
        A report (`HeldOut.report`) of "loss", the weighted cross-entropy above that of a perfect judge (nats per judged
        token), and "acceptance", the mean chance of acceptance; and "tokens", how many were judged in all.
    """
    recipe, target, out = run.of(AcceptanceRecipe), run.loaded.model, run.out
    check_folder(out, AcceptanceHead.FILE)
    draft = fitted(draft, target)
    check_texts(len(corpus))
    made = f"{_FORMAT} {corpus.facts} {_fingerprint(draft)} {recipe.kept} {recipe.seed}"
    examples = list(_examples(target, draft, corpus, out / "states", recipe, made, run.progress))
    learned, held_out = ([n for n in numbers if len(examples[n][1])] for numbers in corpus.split())
    if not learned or not held_out:
        raise SettingsError("the texts hold no token that the draft model could have drafted: write longer ones")
    states, labels = _joined([examples[n] for n in learned])
    known = HeldOut.of([examples[n] for n in held_out], corpus.prompts(held_out))

    def trained(labels: torch.Tensor, what: str) -> tuple[AcceptanceHead, History]:
        head = AcceptanceHead.random(states.shape[1], draft.vocab_size, depth=recipe.depth, seed=recipe.seed)
        head.model = draft.fingerprint
        # It begins as the best judge that always says the same, so that it can only get better.
        head.output[0].zero_()
        head.output[1].copy_(_best(labels.mean(), recipe.rejected))
        steps = max(1, round(recipe.epochs * len(labels) / recipe.batch))
        order = batches(len(labels), min(recipe.batch, len(labels)), recipe.seed)

        def loss(step: int) -> torch.Tensor:
            rows = order(step)
            return weighted_loss(head.scores(states[rows]), labels[rows], recipe.rejected)

        history = train(
            head.parameters(),
            loss,
            TrainingPlan(steps, lr=recipe.lr, weight_decay=0.1, validate_every=max(1, steps // 20)),
            run.training,
            validate=lambda: {"loss": _judged(known.choosing, head.scores, recipe)["loss"]},
            metric="loss",
            settings={"recipe": repr(recipe), "made": made, "labels": content([labels])},
            progress=run.progress,
            what=what,
            own=True,
        )
        return head, history

    head, _ = trained(labels, "training")
    mixed = labels[torch.from_numpy(np.random.default_rng(recipe.seed).permutation(len(labels)))]
    control, _ = trained(mixed, "training the control")
    always = _best(labels.mean(), recipe.rejected)

    def tested(scores: Callable[[torch.Tensor], torch.Tensor]) -> Measured:
        return known.measured(
            lambda some: _judged(some, scores, recipe), "loss", lambda each: float(_weights(each[1], recipe).sum())
        )

    report = known.report(
        tested(head.scores),
        {"always the same": tested(lambda rows: always.expand(len(rows), 2))},
        control=tested(control.scores),
    )
    report["tokens"] = sum(len(each) for _, each in examples)
    head.facts.update(report, **asdict(recipe), **run.facts, draft=run.of(Drafted).draft)
    head.save(out / AcceptanceHead.FILE)
    return report


def _joined(examples: Sequence[Examples]) -> Examples:
    states, labels = (torch.cat(each) for each in zip(*examples, strict=True))
    return states, labels


def _judged(
    examples: Sequence[Examples], scores: Callable[[torch.Tensor], torch.Tensor], recipe: AcceptanceRecipe
) -> dict[str, float]:
    """The loss of scores of states above the least possible, and the mean chance of acceptance."""
    states, labels = _joined(examples)
    least = weighted_loss(_best(labels, recipe.rejected), labels, recipe.rejected)
    found = weighted_loss(scores(states), labels, recipe.rejected)
    return {"loss": float(found - least), "acceptance": float(labels.mean())}


def _weights(labels: torch.Tensor, recipe: AcceptanceRecipe) -> torch.Tensor:
    return labels + recipe.rejected * (1 - labels)


def weighted_loss(scores: torch.Tensor, labels: torch.Tensor, rejected: float) -> torch.Tensor:
    """Mean cross-entropy of soft labels [n] under scores [n, 2], with rejections weighted.

    Scores are of rejected and accepted.
    """
    odds = scores[:, 1] - scores[:, 0]
    refused = 1 - labels
    total = -(labels * logsigmoid(odds) + rejected * refused * logsigmoid(-odds)).sum()
    return total / (labels.sum() + rejected * refused.sum())


def _best(labels: torch.Tensor, rejected: float) -> torch.Tensor:
    """[..., 2] the scores that lose least on soft labels [...]."""
    sure = (labels / (labels + rejected * (1 - labels))).clamp(1e-6, 1 - 1e-6)
    return torch.stack((torch.zeros_like(sure), sure.logit()), dim=-1)


@torch.no_grad()
def judged(
    target: LanguageModel, draft: LanguageModel, text: TrainingText, *, temperature: float, kept: float, seed: int
) -> Examples:
    """One text's examples.

    At each position after the prompt the draft draws a token from what it expects after the text so far; its label is
    min(1, p / q). Then the draft reads the text with these in place of the text's own, but for a share `kept` of them,
    and its states after its own tokens are taken: labels are those of a pure prefix, states those of a mixed one, as
    published.

    Args:
        temperature: The one the text was written at; at 0 both models take their most likely token.
    """
    tokens = np.asarray(text.tokens, dtype=np.int64)
    first, random = max(text.written, 1), torch.Generator().manual_seed(seed)
    rows = list(range(first - 1, len(tokens) - 1))
    own = torch.from_numpy(tokens[first:])
    p, q = (_law(_read(model, tokens, rows).logits, temperature) for model in (target, draft))
    drawn = torch.multinomial(q, 1, generator=random)[:, 0] if len(rows) else own
    at = torch.arange(len(rows), device="cpu")
    labels = (p[at, drawn] / q[at, drawn]).clamp_max(1.0)
    mixed = torch.rand(len(rows), generator=random, dtype=torch.float32, device="cpu") >= kept
    changed = tokens.copy()
    changed[first:] = torch.where(mixed, drawn, own).numpy()
    last = draft.config.num_layers
    states = _read(draft, changed, [], (last,)).hidden[last].float().cpu()[first:]
    return states[mixed], labels[mixed].float()


def _read(model: LanguageModel, tokens: np.ndarray, rows: list[int], taps: tuple[int, ...] = ()) -> Scores:
    return model.forward(Batch([Segment.chunk(tokens, model.new_cache(), logit_rows=rows)]), taps=taps)


def _law(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = logits.cpu().float()
    if temperature == 0:
        return torch.zeros_like(logits).scatter_(1, logits.argmax(dim=1, keepdim=True), 1.0)
    return (logits / temperature).softmax(dim=1)


def _examples(
    target: LanguageModel,
    draft: LanguageModel,
    corpus: Corpus,
    folder: Path,
    recipe: AcceptanceRecipe,
    made: str,
    progress: Progress,
) -> Iterator[Examples]:
    """Every text's examples, in order; what has been computed before, `made` of the same, is read from `folder`."""
    temperatures = corpus.facts.get("temperatures", [1.0])
    turns = list(turns_of(corpus.prompts(range(len(corpus)))))
    for begin in range(0, len(corpus), _SHARD):
        path, numbers = folder / f"{begin // _SHARD:05d}.safetensors", range(begin, min(begin + _SHARD, len(corpus)))
        if not path.is_file():
            found = []
            for number in numbers:
                temperature = float(temperatures[turns[number] % len(temperatures)])
                seed = nth_seed(recipe.seed, number)
                found.append(
                    judged(target, draft, corpus[number], temperature=temperature, kept=recipe.kept, seed=seed)
                )
                progress("judging drafts", number + 1, len(corpus))
            tensors = {
                "states": torch.cat([states for states, _ in found]).half(),
                "labels": torch.cat([labels for _, labels in found]),
                "sizes": int_tensor([len(labels) for _, labels in found]),
            }
            keep(path, tensors, made)
        progress("judging drafts", numbers[-1] + 1, len(corpus))
        with kept(path, made) as (tensors, _):
            sizes = tensors["sizes"].tolist()
            examples = list(zip(tensors["states"].float().split(sizes), tensors["labels"].split(sizes), strict=True))
        yield from examples


def _fingerprint(model: LanguageModel) -> str:
    """What tells a model from others, one that was not loaded too: the tokens it finds most likely after a few."""
    rows = list(range(16))
    likely = _read(model, np.arange(16) % model.vocab_size, rows).logits.topk(min(8, model.vocab_size)).indices
    return hashlib.sha256(likely.cpu().numpy().tobytes()).hexdigest()


@dataclass(frozen=True)
class Drafted:
    """Whose acceptance is learned."""

    draft: str = option("smollm2-draft", "The draft model whose hidden states are read.")


@kind(
    "The head is ready: --draft-length specdec++:head={out}",
    (OwnTexts(300, max_new_tokens=96), Drafted(), AcceptanceRecipe(seed=1)),
    "--draft smollm2-draft --out head",
    model="to draft for",
    file=AcceptanceHead.FILE,
)
def _acceptance(run: Run) -> dict[str, Any]:
    """Train a head that predicts whether MODEL accepts a drafted token, for the policy specdec++.

    It needs the drafter draft-model with a length such as 20. Take another seed than for the draft model. If most
    drafts are rejected, use --rejected 1.
    """
    drafting = named(run.of(Drafted).draft)
    return train_acceptance(run, drafting, own_texts(run, "text", top=0))
