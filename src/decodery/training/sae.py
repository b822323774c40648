"""Find the attention heads of a behaviour: one sparse autoencoder over what all heads write, read as codes."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.threads import one_thread
from decodery.monitors.sae import HeadCodes

from .evaluation import ALONE, MonitorContext
from .lines import read_labelled
from .loop import content, drawn, even_plan, train
from .tensors import bool_tensor, int_tensor, normal, zeros

_NAMES = ("Mary", "John", "Anna", "Paul", "Lisa", "Mark", "Emma", "Tom", "Kate", "Jack", "Rose", "Adam")
_ROWS = 1024
_PLACES, _THINGS = ("store", "park", "school", "office"), ("drink", "book", "letter", "key")


@dataclass(frozen=True, slots=True)
class BehaviourExample:
    """A prompt after which a behaviour completes, or one of the same form after which it cannot."""

    prompt: str
    positive: bool
    group: str = ""  # What must not be both learned from and tested on


def built_in_examples(count: int, seed: int = 0) -> list[BehaviourExample]:
    """Indirect objects: "When Mary and John went to the store, John gave a drink to".

    Without the behaviour, a third person gives. Half of each kind, the same names in both.
    """
    random = np.random.default_rng(seed)
    drawn = [list(each) for each in permutations(_NAMES, 3)]
    found = []
    for at in random.permutation(len(drawn))[: (count + 1) // 2]:
        one, other, third = drawn[at]
        place, thing = random.choice(_PLACES), random.choice(_THINGS)
        for who, positive in ((other, True), (third, False)):
            text = f"When {one} and {other} went to the {place}, {who} gave a {thing} to"
            found.append(BehaviourExample(text, positive, f"{one} {other} {third}"))
    return found[:count]


def read_examples(path: Path) -> list[BehaviourExample]:
    """Of a file of JSON lines {"prompt": text, "positive": true or false, "group": text}.

    A group may be left out.
    """
    return [BehaviourExample(*each) for each in read_labelled(path, "prompt", "positive")]


def watched(codes: HeadCodes, top: int) -> list[int]:
    """Numbers of the heads that are watched, over all layers."""
    return [layer * codes.facts["heads"] + head for (layer, head), score in codes.ranked()[:top] if score > 0]


def highest(codes: HeadCodes, texts: Ordered[torch.Tensor], top: int) -> list[float]:
    """The highest score of each text, as its monitor comes by it.

    Args:
        texts: [tokens, heads, dim] each.
    """
    order = watched(codes, top)
    return [
        float(shares(codes.tensors["own"], codes.of(rows.flatten(0, 1)).unflatten(0, rows.shape[:2]), order).max())
        for rows in texts
    ]


def train_sae(
    rows: torch.Tensor,
    positive: Ordered[bool],
    *,
    heads: int,
    groups: Ordered[str] | None = None,
    texts: Ordered[torch.Tensor] | None = None,
    rate: float = 0.1,
    top: int = 10,
    features: int = 200,
    sparsity: float = 0.02,
    steps: int = 300,
    lr: float = 1e-3,
    seed: int = 0,
    context: MonitorContext = ALONE,
) -> HeadCodes:
    """Codes of all heads, from half of the groups.

    Examples of the other groups without the behaviour set the threshold.

    Args:
        rows: [examples, layers * heads, dim], see `head_rows`. One autoencoder for all heads, which is what makes them
            comparable: a head that writes much the same everywhere has one code.
        groups: What must not be both learned from and used for the threshold; by default each example by itself.
        texts: What heads write in the whole text of each example, [tokens, layers * heads, dim]: the threshold is set
            on the highest score of each, or without them on that of the example's own row.
        top: Heads that the threshold is for, and pairs of heads that `facts` list as edges.
    """
    labels = bool_tensor(list(positive))
    of = list(range(len(labels))) if groups is None else list(groups)
    kinds: dict[Any, set[bool]] = {}
    for group, label in zip(of, labels.tolist(), strict=True):
        kinds.setdefault(group, set()).add(label)
    # Every other group of those with the behaviour, of those without it, and of those with both kinds.
    known = {each for some in ({True}, {False}, {True, False}) for each in [g for g in kinds if kinds[g] == some][::2]}
    learned = bool_tensor([group in known for group in of])
    if any(len(set(labels[half].tolist())) < 2 for half in (learned, ~learned)):
        raise SettingsError("a behaviour needs at least two groups of examples with it and two without it")
    tensors = _encoder(rows[learned].flatten(0, 1), features, sparsity, steps, lr, seed, context)
    about = {**context.facts, "layers": rows.shape[1] // heads, "heads": heads, "dim": rows.shape[2]}
    unset = HeadCodes(tensors, context.unset(rate), about)
    codes = unset.of(rows.flatten(0, 1)).unflatten(0, rows.shape[:2])
    tensors |= own_codes(codes[learned], labels[learned], features)
    held = HeadCodes(tensors, context.unset(rate), about)
    others = torch.nonzero(~learned & ~labels)[:, 0].tolist()
    values = highest(held, [rows[at][None] if texts is None else texts[at] for at in others], top)
    about |= {
        "examples": len(labels),
        "edges": [
            [*divmod(one, heads), *divmod(other, heads), round(score, 4)]
            for (one, other), score in edges(codes[learned], labels[learned], top)
        ],
        "seed": seed,
    }
    return HeadCodes(tensors, context.threshold(values, rate), about, context.model)


def own_codes(codes: torch.Tensor, positive: torch.Tensor, features: int) -> dict[str, torch.Tensor]:
    """The tensors "own" and "score" of `HeadCodes`.

    Args:
        codes: [examples, heads] of all heads.
        positive: [examples] bool.
    """
    seen = torch.nn.functional.one_hot(codes, features).bool()
    own = seen[positive].any(dim=0) & ~seen[~positive].any(dim=0)
    score = (seen[positive] & own).any(dim=2).double().mean(dim=0)
    return {"own": own, "score": score.float()}


def edges(codes: torch.Tensor, positive: torch.Tensor, top: int) -> list[tuple[tuple[int, int], float]]:
    """The pairs of heads that best indicate a behaviour.

    They are ordered by the share of its examples with codes of both heads that no other example has together.
    """
    others, heads = codes[~positive], codes.shape[1]
    found = torch.zeros(heads, heads, dtype=torch.double, device="cpu")
    for example in codes[positive]:
        same = (others == example).double()
        found += same.T @ same == 0
    first, second = torch.triu_indices(heads, heads, 1)
    scores, order = (found[first, second] / int(positive.sum())).sort(descending=True, stable=True)
    best = zip(first[order[:top]].tolist(), second[order[:top]].tolist(), scores.tolist(), strict=False)
    return [((one, other), score) for one, other, score in best]


def shares(own: torch.Tensor, codes: torch.Tensor, heads: Ordered[int]) -> torch.Tensor:
    """[examples] the share of these heads whose codes are the behaviour's own, as the monitor comes by it."""
    if not heads:
        return torch.zeros(len(codes), dtype=torch.double, device="cpu")
    at = int_tensor(list(heads))
    return own[at, codes[:, at]].double().mean(dim=1)


@one_thread()
def _encoder(
    rows: torch.Tensor, features: int, sparsity: float, steps: int, lr: float, seed: int, context: MonitorContext
) -> dict[str, torch.Tensor]:
    """The encoder's tensors. rows: [n, dim] float32."""
    mean, scale = rows.mean(dim=0), rows.std(dim=0).clamp_min(1e-3)
    whole = (rows - mean) / scale
    draws = torch.Generator().manual_seed(seed)
    weight = normal(draws, features, rows.shape[1]) / rows.shape[1] ** 0.5
    tensors = {"weight": weight, "bias": zeros(features), "out": weight.T.clone(), "shift": torch.zeros_like(mean)}

    def loss(step: int) -> torch.Tensor:
        # All heads of a large model on all examples are tens of thousands of rows.
        given = whole[drawn(len(whole), _ROWS, seed, step)]
        active = (given @ tensors["weight"].T + tensors["bias"]).relu()
        made = active @ tensors["out"].T + tensors["shift"]
        return (made - given).square().mean() + sparsity * active.abs().mean()

    settings = {"rows": content(rows), "sparsity": sparsity, "seed": seed}
    how: dict[str, Any] = {"settings": settings, "progress": context.progress, "what": "training the autoencoder"}
    train(tensors, loss, even_plan(steps, lr), context.out, own=True, **how)
    return {name: tensors[name].detach() for name in ("weight", "bias")} | {"mean": mean, "scale": scale}
