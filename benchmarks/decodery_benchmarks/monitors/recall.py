"""M1, associative recall: heads found by their codes against those that recall needs, and what more examples bring."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from decodery.llm.llm import LLM
from decodery.models.batch import Batch, Segment
from decodery.models.cache.attention_policy import Attention, AttentionPolicy
from decodery.models.loaders.store import Progress
from decodery.models.torch.side_by_side import predicted
from decodery.models.torch.transformer import Transformer
from decodery.monitors.sae import silencing
from decodery.training.cut import parameters
from decodery.training.ranking import auroc, logistic
from decodery.training.sae import train_sae
from decodery_benchmarks.training.puzzle_model import TransformerShape, random_transformer

from .figures import Row, of_the_mean
from .settings import WatchSettings

NAME = "recall"
_SHAPE = TransformerShape(64, 2, 4, 64, 64)
_KEYS, _PAIRS, _STEPS, _TOKENS = 8, 24, 1000, 1200
_STAGES = ((2, 3), (2, 4), (2, 6), (3, 6), (3, 8), (4, 10), (5, 12), (6, 16), (7, 20), (_KEYS, _PAIRS))
"""Keys and pairs of the texts that are learned from, one after another. In a text of three pairs attention that looks
everywhere already tells a value's own key from the others; from long ones alone recall was not learned in 2,500 steps.
"""
_LEARNED, _ENOUGH = 0.25, 0.03
"""The loss, in nats, below which the next stage begins, and below which the last one ends."""
_FIRST_KEY, _LETTERS, _VALUES = 32, 26, 10
_NEEDED, _SILENCED = 0.1, 3
"""A head is needed where silencing it alone costs this share of what was recalled. So many are silenced together."""


def measure(lm: LLM, settings: WatchSettings, work: Path, progress: Progress) -> tuple[list[Row], list[Row], list[str]]:
    """Models of their own are trained here, one per round; nothing of the watched model is used."""
    told: dict[str, list[float]] = {}
    left: dict[str, list[float]] = {}
    recalled, needed = list[np.ndarray](), list[str]()
    for seed in range(settings.seed, settings.seed + settings.rounds):
        model = _trained(seed, progress)
        recalled.append(by_examples(model, seed))
        whole, heads = _share(model, seed, []), _SHAPE.layers * _SHAPE.heads
        wanted = [whole - _share(model, seed, [head]) > _NEEDED for head in range(heads)]
        needed.append(f"{sum(wanted[: _SHAPE.heads])} and {sum(wanted[_SHAPE.heads :])}")
        ways = _scores(model, seed, settings.rate)
        for name, scores in (ways | {"chance": np.random.default_rng(seed).random(heads)}).items():
            told.setdefault(name, []).append(auroc(scores.tolist(), wanted))
            best = np.argsort(-scores, kind="stable")[:_SILENCED].tolist()
            left.setdefault(name, []).append(_share(model, seed, best))
    growth = np.mean(recalled, axis=0)
    shares = ", ".join(f"{growth[at]:.2f}" for at in range(0, _PAIRS, 4))
    told_again = ", ".join(f"{each[-1]:.3f}" for each in recalled)
    return (
        [],
        [_found(name, told[name], left[name]) for name in told],
        [
            f"recall: {settings.rounds} models of {_SHAPE.layers} layers of {_SHAPE.heads} heads; needed, of the first "
            f"and the second layer: {'; '.join(needed)}",
            f"recall: right values of keys that stood there before, by model: {told_again}",
            f"recall: the positive control of reporting: right values by pairs seen (0, 4, 8, ...): {shares}; chance "
            f"is {1 / _VALUES:.2f}",
        ],
    )


def _found(name: str, values: list[float], left: list[float]) -> Row:
    """values: AUROC of needed heads, by model, nan where all or none are; left: what is recalled without some."""
    known = np.array([value for value in values if not np.isnan(value)])
    low, high = of_the_mean(known)
    return {
        "testbed": NAME,
        "what": f"needed heads by {name}",
        "models": len(known),
        "AUROC": round(float(known.mean()), 3) if len(known) else None,
        "95 %": f"{low:.2f} to {high:.2f}",
        f"recalled without its best {_SILENCED}": round(float(np.mean(left)), 3),
        "by model": ", ".join(f"{value:.2f}" for value in left),
    }


def draw(
    count: int, draws: torch.Generator, several: int = _KEYS, pairs: int = _PAIRS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of one of several keys and its value, which stays the same within a text: [count, 2 * pairs] ids, and
    [count, pairs] bool, whether the key stood there before."""
    keys = torch.rand(count, _LETTERS, generator=draws, dtype=torch.float32, device="cpu").argsort(dim=1)[:, :several]
    values = torch.randint(_VALUES, (count, several), generator=draws, device="cpu")
    which = torch.randint(several, (count, pairs), generator=draws, device="cpu")
    tokens = torch.stack((_FIRST_KEY + keys.gather(1, which), values.gather(1, which)), dim=-1).flatten(1)
    same = (which[:, :, None] == which[:, None]).tril(-1)
    return tokens, same.any(dim=2)


def _trained(seed: int, progress: Progress) -> Transformer:
    """A model that has learned from short texts, and from longer ones as soon as it recalled in those."""
    model, draws = random_transformer(_SHAPE, seed), torch.Generator().manual_seed(seed)
    weights = list(parameters(model).values())
    optimizer = torch.optim.AdamW(weights, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    stage, mean = 0, None
    for step in range(_STEPS):
        several, pairs = _STAGES[stage]
        tokens, known = draw(_TOKENS // (2 * pairs), draws, several, pairs)
        logits = predicted(model, tokens[:, :-1])[:, ::2]
        loss = cross_entropy(logits[known], tokens[:, 1::2][known])
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / 50)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        value = float(loss.detach())
        mean = value if mean is None else 0.9 * mean + 0.1 * value
        progress(f"learning to recall, model {seed}", step + 1, _STEPS)
        if stage + 1 < len(_STAGES):
            stage, mean = (stage + 1, None) if mean < _LEARNED else (stage, mean)
        elif mean < _ENOUGH:
            break
    return model


@torch.no_grad()
def by_examples(model: Transformer, seed: int) -> np.ndarray:
    """[pairs + 1] the share of values told rightly after so many pairs, which rises where a model learns in context;
    and last that of all values whose key stood there before."""
    tokens, known = draw(256, torch.Generator().manual_seed(1000 + seed))
    right = predicted(model, tokens[:, :-1])[:, ::2].argmax(dim=-1) == tokens[:, 1::2]
    return torch.cat((right.double().mean(dim=0), right[known].double().mean()[None])).numpy()


def _asked(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Texts that end in a key, every other one in a key that did not stand there before: [count, 2 * pairs - 1] ids,
    [count] the right value, and [count] bool."""
    draws = torch.Generator().manual_seed(2000 + seed)
    tokens, known = draw(8 * count, draws)
    tokens, known = tokens[known[:, -1]][:count], np.arange(count) % 2 == 0
    for at in np.flatnonzero(~known):
        used = set(tokens[at, :-2:2].tolist())
        free = [key for key in range(_FIRST_KEY, _FIRST_KEY + _LETTERS) if key not in used]
        tokens[at, -2] = free[int(torch.randint(len(free), (1,), generator=draws, device="cpu"))]
    return tokens[:, :-1], tokens[:, -1], known


class Watching(AttentionPolicy):
    """Keeps where the newest row's attention goes, by layer: [heads, slots]."""

    observes = True

    def __init__(self) -> None:
        self.weights: dict[int, torch.Tensor] = {}

    def observe(self, attention: Attention) -> None:
        assert attention.weights is not None
        self.weights[attention.layer] = attention.weights[:, -1].clone()


@torch.no_grad()
def _share(model: Transformer, seed: int, silent: list[int]) -> float:
    """The share of values that are recalled where these heads, in every row, write nothing."""
    tokens, values, known = _asked(256, seed)
    right, changes = 0, silencing([divmod(head, _SHAPE.heads) for head in silent], model.config.head_dim)
    for at in np.flatnonzero(known):
        segment = Segment.chunk(tokens[at].tolist(), model.new_cache(), logit_rows=[tokens.shape[1] - 1])
        row = model.forward(Batch([replace(segment, interventions=changes)])).logits[-1]
        right += int(row.argmax()) == int(values[at])
    return float(right / known.sum())


@torch.no_grad()
def _rows(model: Transformer, tokens: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What heads write at the last key [texts, heads, dim], and where they look from there [heads, slots], by text."""
    config, rows, looks = model.config, list[torch.Tensor](), list[torch.Tensor]()
    taps = [f"head_out.{layer}" for layer in range(config.num_layers)]
    for text in tokens.tolist():
        cache, policy = model.new_cache(), Watching()
        cache.policy = policy
        hidden = model.forward(Batch([Segment.chunk(text, cache, logit_rows=[])]), taps=taps).hidden
        rows.append(torch.cat([hidden[tap][-1].float().view(config.num_heads, config.head_dim) for tap in taps]))
        looks.append(torch.cat([policy.weights[layer] for layer in range(config.num_layers)]))
    return torch.stack(rows), looks


def _scores(model: Transformer, seed: int, rate: float) -> dict[str, np.ndarray]:
    """[heads] how much each way of finding them thinks of every head."""
    tokens, _, known = _asked(96, seed + 500)
    rows, looks = _rows(model, tokens)
    heads, labels = _SHAPE.heads, torch.from_numpy(known)
    random = np.random.default_rng(seed)

    def codes(wanted: np.ndarray) -> np.ndarray:
        found = dict(train_sae(rows, wanted.tolist(), heads=heads, rate=rate, seed=seed).ranked())
        return np.array([found[layer, head] for layer in range(_SHAPE.layers) for head in range(heads)])

    means = (rows[labels].mean(dim=0) - rows[~labels].mean(dim=0)).norm(dim=1)
    # To the value that stood after the same key.
    mass = np.zeros(rows.shape[1])
    for at in np.flatnonzero(known):
        text = tokens[at].tolist()
        places = [place + 1 for place in range(0, len(text) - 1, 2) if text[place] == text[-1]]
        mass += looks[at][:, places].sum(dim=1).numpy()
    return {
        "codes (sae)": codes(known),
        "codes, shuffled labels": codes(random.permutation(known)),
        "difference of means": means.numpy(),
        "a probe's accuracy": np.array([_told(rows[:, head], labels) for head in range(rows.shape[1])]),
        "attention to the value": mass / known.sum(),
    }


def _told(rows: torch.Tensor, labels: torch.Tensor) -> float:
    """The accuracy of logistic regression, learned from one half of the texts, on the other."""
    data = torch.cat(
        (
            (rows - rows.mean(dim=0)) / rows.std(dim=0).clamp_min(1e-6),
            torch.ones(len(rows), 1, dtype=torch.float32, device="cpu"),
        ),
        dim=1,
    )
    half = len(data) // 2
    weight = logistic(data[:half].double(), labels[:half].double())
    return float(((data[half:].double() @ weight > 0) == labels[half:]).double().mean())
