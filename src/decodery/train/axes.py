"""Directions of hidden states: what tells a label of sentences, and their principal components."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import CorruptFile, SettingsError
from ..model.batch import Batch, Segment
from ..model.store import Progress, silent
from ..model.threads import one_thread
from ..monitor.probe import Probe
from ..monitor.threshold import Threshold
from .checkable import capitals
from .lines import read_json_lines
from .ranking import auroc

if TYPE_CHECKING:
    from ..lm import LM

ASKED = "Say something."
"""What the sentences are answers to."""


@dataclass(frozen=True, slots=True)
class Statement:
    """A sentence and its label. group: what must not be both learned from and tested on."""

    text: str
    label: bool
    group: str


def built_in_statements(seed: int = 0) -> list[Statement]:
    """Capitals, each once rightly and once with another country's."""
    random, pairs = np.random.default_rng(seed), list(capitals().items())
    found = []
    for number, (country, capital) in enumerate(pairs):
        other = pairs[(number + int(random.integers(1, len(pairs)))) % len(pairs)][1]
        for city, right in ((capital, True), (other, False)):
            found.append(Statement(f"The capital of {country} is {city}.", right, country))
    return [found[at] for at in random.permutation(len(found))]


def read_statements(path: Path) -> list[Statement]:
    """Of a file of JSON lines {"text": text, "label": true or false, "group": text}; a group may be left out."""
    found = []
    for number, entry in read_json_lines(path):
        known = entry if isinstance(entry, dict) else {}
        text, label, group = known.get("text"), known.get("label"), known.get("group", f"line {number}")
        if not isinstance(text, str) or not text or not isinstance(label, bool) or not isinstance(group, str):
            raise CorruptFile(f'line {number} of {path} is not {{"text": text, "label": true or false, "group": text}}')
        found.append(Statement(text, label, group))
    return found


@torch.no_grad()
def said(lm: LM, texts: Ordered[str], sites: Ordered[str], progress: Progress = silent) -> dict[str, torch.Tensor]:
    """{site: [texts, width]} float32: the mean of the rows of each text, as the answer to `ASKED`."""
    prompt = lm.encode([{"role": "user", "content": ASKED}] if lm.chat else ASKED + "\n", raw=not lm.chat)
    found: dict[str, list[torch.Tensor]] = {site: [] for site in sites}
    for number, text in enumerate(texts):
        tokens = [*prompt, *lm.tokenizer.encode(text, special=False)]
        segment = Segment.chunk(tokens, lm.model.new_cache(), logit_rows=[])
        hidden = lm.model.forward(Batch([segment]), taps=list(sites)).hidden
        for site in sites:
            found[site].append(hidden[site][len(prompt) :].float().cpu().mean(dim=0))
        progress("reading statements", number + 1, len(texts))
    return {site: torch.stack(rows) for site, rows in found.items()}


def halves(statements: Ordered[Statement], seed: int = 0) -> np.ndarray:
    """[n] bool: which are learned from; all of one group are, or none."""
    names = sorted({each.group for each in statements})
    chosen = set(np.random.default_rng(seed).permutation(names)[: len(names) // 2].tolist())
    return np.array([each.group in chosen for each in statements])


def best_axis(
    states: Mapping[str, torch.Tensor],
    statements: Ordered[Statement],
    kind: str = "lr",
    *,
    model: str = "",
    seed: int = 0,
    facts: Mapping[str, Any] | None = None,
) -> Probe:
    """The axis of the site at which the labels of the other half are told best, either way round for a component."""
    learned = halves(statements, seed)
    labels = np.array([each.label for each in statements])
    if min(len(set(labels[learned])), len(set(labels[~learned]))) < 2:
        raise SettingsError("an axis needs statements of both labels, from several groups")
    swept, best = dict[str, float](), dict[str, Probe]()
    for site, rows in states.items():
        own = torch.from_numpy(learned)
        found = axis_of(rows[own], labels[learned].tolist(), kind, site, model, seed, facts)
        value = auroc(found.logits(rows[~own])[:, 0].tolist(), labels[~learned].tolist())
        swept[site], best[site] = round(max(value, 1 - value), 4), found
    site = max(swept, key=lambda each: swept[each])
    about = {**best[site].facts, "validation": swept, "statements": len(statements)}
    return Probe(best[site].tensors, site, "answer", best[site].threshold, about, model)


@one_thread()
def axis_of(
    rows: torch.Tensor,
    labels: Ordered[bool],
    kind: str,
    site: str,
    model: str = "",
    seed: int = 0,
    facts: Mapping[str, Any] | None = None,
) -> Probe:
    """A direction of rows [n, width], as a probe whose logit is the projection in standard deviations of these rows.

    kind: "lr", logistic regression on the labels; "pc3", the third principal component. Its threshold is one nothing is
    above. Raises SettingsError for another kind.
    """
    data = rows.double()
    mean = data.mean(dim=0)
    if kind == "lr":
        direction = _logistic(data - mean, torch.tensor(list(labels), dtype=torch.double, device="cpu"))
        share = None
    elif kind.startswith("pc") and kind[2:].isdecimal() and 1 <= int(kind[2:]) <= min(rows.shape) - 1:
        _, sizes, directions = torch.linalg.svd(data - mean, full_matrices=False)
        number = int(kind[2:]) - 1
        direction = directions[number]
        # Which way round a component points is chance: its largest entry points up.
        direction = direction * direction[direction.abs().argmax()].sign()
        share = round(float(sizes[number] ** 2 / sizes.square().sum()), 6)
    else:
        raise SettingsError(f"an axis is lr, or pc1 to pc{min(rows.shape) - 1} of {len(rows)} sentences, not {kind}")
    spread = ((data - mean) @ direction).std().clamp_min(1e-9)
    tensors = {
        "mean": mean.float(),
        "scale": torch.ones(len(mean), dtype=torch.float32, device="cpu"),
        "weight.0": (direction / spread).float()[None],
        "bias.0": torch.zeros(1, dtype=torch.float32, device="cpu"),
    }
    about = {**(facts or {}), "axis": kind, "variance": share, "seed": seed}
    return Probe(tensors, site, "answer", Threshold(1e9, 0.5, 0, ""), about, model)


def _logistic(data: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The direction [width] that tells labels [n] of rows [n, width], with a penalty that keeps it small."""
    scale = data.std(dim=0).clamp_min(1e-6)
    given = torch.cat((data / scale, torch.ones(len(data), 1, dtype=data.dtype, device="cpu")), dim=1)
    weight = torch.zeros(given.shape[1], dtype=data.dtype, requires_grad=True, device="cpu")
    optimizer = torch.optim.LBFGS([weight], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        fit = torch.nn.functional.binary_cross_entropy_with_logits(given @ weight, labels)
        value = fit + 0.5 * weight[:-1].square().sum() / len(data)
        value.backward()
        return value

    optimizer.step(loss)
    return weight.detach()[:-1] / scale
