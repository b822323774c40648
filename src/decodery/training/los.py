"""Train LOS-Net: whether an answer is wrong, by the output signatures of its tokens."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.noise import nth_seed
from decodery.core.threads import one_thread
from decodery.monitors.los import EVERY, MOST_TOKENS, LOSHead, LOSNet

from .activations import Answered, Questions
from .evaluation import ALONE, MonitorContext, keep_evaluated
from .kind import Run, kind, option
from .loop import batches, content, even_plan, train
from .probe import harmless, trial
from .ranking import parts, require_kinds
from .tensors import float_tensor, int_tensor

_BATCH, _PATIENCE, _STEPS = 64, 30, 400
"""Training ends after so many epochs, and so many steps, without gain."""


@one_thread()
def train_los(
    answers: Ordered[Answered],
    *,
    k: int = 100,
    width: int = 64,
    layers: int = 1,
    dropout: float = 0.3,
    epochs: int = 300,
    lr: float = 1e-3,
    every: int = EVERY,
    rate: float = 0.1,
    seed: int = 0,
    context: MonitorContext = ALONE,
) -> LOSHead:
    """The network with the least cross-entropy on the validation part.

    Args:
        k: log-probabilities of each row that it is given, as many as were collected at most; 0 for the taken token's
            alone. Binary cross-entropy, AdamW; the published rate of 1e-4 is for many more answers. It ends after 30
            epochs without gain, but not before 400 steps without: few answers make short epochs.
        every: Tokens between two evaluations of a text; the threshold is of the highest of them.
    """
    part = parts([each.question.group for each in answers], seed)
    wrong = float_tensor([float(each.wrong) for each in answers])
    require_kinds(wrong.bool().numpy(), part)
    numbers, lengths = padded(answers, k)
    learned, held = (torch.from_numpy(np.flatnonzero(part == name)) for name in ("train", "validation"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = LOSNet(k, width, layers, dropout)
    cost = torch.nn.functional.binary_cross_entropy_with_logits
    size = min(_BATCH, len(learned))
    chosen, per_epoch = batches(len(learned), size, seed), -(-len(learned) // size)

    def loss(step: int) -> torch.Tensor:
        batch = learned[chosen(step)]
        # What is dropped out in a step depends on the step alone.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(nth_seed(seed, step))
            net.train()
            return cost(net(numbers[batch], lengths[batch]), wrong[batch])

    def validate() -> dict[str, float]:
        net.eval()
        return {"cross_entropy": float(cost(net(numbers[held], lengths[held]), wrong[held]))}

    patience = max(_PATIENCE, -(-_STEPS // per_epoch))
    history = train(
        dict(net.named_parameters()),
        loss,
        even_plan(epochs * per_epoch, lr, weight_decay=1e-2, validate_every=per_epoch, patience=patience),
        context.out,
        validate=validate,
        metric="cross_entropy",
        settings={
            "answers": content([numbers, lengths, wrong]),
            "k": k,
            "width": width,
            "layers": layers,
            "seed": seed,
        },
        progress=context.progress,
        what="training LOS-Net",
        own=True,
    )
    kept = {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}
    about = {**context.facts, "k": k, "width": width, "layers": layers, "every": every, "seed": seed}
    about |= {"answers": len(answers), "wrong": round(float(wrong.mean()), 4), "steps": history.step}
    unset = LOSHead(kept, context.unset(rate), about)
    return LOSHead(kept, context.threshold(highest(unset, harmless(answers, seed)), rate), about)


def padded(answers: Ordered[Answered], k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, t, k + 5] signatures with the k largest log-probabilities, 0 after the ends, and [n] lengths."""
    rows = [_cut(each.signatures, k)[:MOST_TOKENS] for each in answers]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), int_tensor([len(each) for each in rows])


def scores(head: LOSHead, answers: Ordered[Answered]) -> list[float]:
    """The score of each whole answer, as its monitor comes by it."""
    return [head.score(list(_cut(each.signatures, head.facts["k"])[:MOST_TOKENS])) for each in answers]


def highest(head: LOSHead, answers: Ordered[Answered]) -> list[float]:
    """The highest score of each answer while it is written, which decides whether its monitor flags it."""
    return [head.highest(list(_cut(each.signatures, head.facts["k"])[:MOST_TOKENS])) for each in answers]


def _cut(signatures: torch.Tensor, k: int) -> torch.Tensor:
    """Signatures with fewer of the largest log-probabilities."""
    had = signatures.shape[-1] - 5
    if k > had:
        raise SettingsError(f"{had} log-probabilities of a row were collected, not {k}: collect more, or ask for fewer")
    return torch.cat((signatures[:, :k], signatures[:, had:]), dim=1)


@dataclass(frozen=True)
class LOSSettings:
    """What LOS-Net reads."""

    k: int = option(100, "Log-probabilities per row that the head reads.")


@kind("The head is ready: --monitor los:head={out}", (Questions(), LOSSettings()), "--out head", model="to watch")
def _los(run: Run) -> dict[str, Any]:
    """Train LOS-Net, which detects wrong answers of MODEL by the probabilities of their tokens."""
    asked, k = run.of(Questions), run.of(LOSSettings).k
    answers, form = asked.answers(run, (), k, whole=True)
    train = partial(train_los, k=k, rate=asked.rate, context=MonitorContext.of(run, **form))
    head, report = trial(train, highest).run(answers, asked.seed, "answers")
    return keep_evaluated(head, report, run.out / LOSHead.FILE)
