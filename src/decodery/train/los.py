"""Train LOS-Net: whether an answer is wrong, by the output signatures of its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from typing import Any

import numpy as np
import torch

from ..errors import SettingsError
from ..model.store import Progress, silent
from ..model.threads import one_thread
from ..monitor.los import MOST_TOKENS, LOSHead, LOSNet
from ..monitor.threshold import Threshold
from .activations import Answered
from .ranking import auroc, parts

_BATCH, _PATIENCE = 64, 30


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
    rate: float = 0.1,
    seed: int = 0,
    data: str = "",
    facts: Mapping[str, Any] | None = None,
    progress: Progress = silent,
) -> LOSHead:
    """The network that ranks the validation part's wrong answers highest (AUROC), stopped after 30 epochs without gain.

    k: log-probabilities of each row that it is given, as many as were collected at most; 0 for the taken token's alone.
    Binary cross-entropy, AdamW; the published rate of 1e-4 is for many more answers. rate: see `train_probe`, and for
    what is raised. Scores are those of whole answers.
    """
    part = parts([each.question.group for each in answers], seed)
    wrong = torch.tensor([float(each.wrong) for each in answers], dtype=torch.float32, device="cpu")
    for name in ("train", "validation"):
        if len(wrong[torch.from_numpy(part == name)].unique()) < 2:
            raise SettingsError(
                f"the {name} part of {len(answers)} answers has no two kinds to tell apart: give more questions, some "
                "of which the model can answer and some not"
            )
    numbers, lengths = padded(answers, k)
    learned, held = (torch.from_numpy(np.flatnonzero(part == name)) for name in ("train", "validation"))
    torch.manual_seed(seed)
    net = LOSNet(k, width, layers, dropout)
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
    random = torch.Generator().manual_seed(seed)
    best, kept, since = -1.0, net.state_dict(), 0
    for epoch in range(epochs):
        net.train()
        for batch in learned[torch.randperm(len(learned), generator=random, device="cpu")].split(_BATCH):
            optimizer.zero_grad()
            found = net(numbers[batch], lengths[batch])
            torch.nn.functional.binary_cross_entropy_with_logits(found, wrong[batch]).backward()
            optimizer.step()
        net.eval()
        with torch.no_grad():
            value = auroc(net(numbers[held], lengths[held]).tolist(), wrong[held].bool().tolist())
        since += 1
        if value > best:
            best, since = value, 0
            kept = {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}
        progress("training LOS-Net", epoch + 1, epochs)
        if since >= _PATIENCE:
            break
    about = {**(facts or {}), "k": k, "width": width, "layers": layers, "seed": seed, "answers": len(answers)}
    about |= {"wrong": round(float(wrong.mean()), 4), "validation": round(best, 4)}
    unset = LOSHead(kept, Threshold(0.5, rate, 0, data), about)
    harmless = [each for each, name in zip(answers, part, strict=True) if name == "calibration" and not each.wrong]
    return LOSHead(kept, Threshold.calibrated(scores(unset, harmless), rate, data), about)


def padded(answers: Ordered[Answered], k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, t, k + 5] signatures with the k largest log-probabilities, 0 behind the ends, and [n] lengths."""
    rows = [_cut(each.signatures, k)[:MOST_TOKENS] for each in answers]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor(
        [len(each) for each in rows], dtype=torch.int64, device="cpu"
    )


def scores(head: LOSHead, answers: Ordered[Answered]) -> list[float]:
    """The score of each whole answer, as its monitor comes by it."""
    return [head.score(list(_cut(each.signatures, head.facts["k"])[:MOST_TOKENS])) for each in answers]


def _cut(signatures: torch.Tensor, k: int) -> torch.Tensor:
    """Signatures with fewer of the largest log-probabilities."""
    had = signatures.shape[-1] - 5
    if k > had:
        raise SettingsError(f"{had} log-probabilities of a row were collected, not {k}: collect more, or ask for fewer")
    return torch.cat((signatures[:, :k], signatures[:, had:]), dim=1)
