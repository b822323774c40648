"""M3, a random finite-state machine: what codes stand for in a model that was trained with them, and forcing them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from decodery.llm.llm import LLM
from decodery.models.batch import Batch, Segment
from decodery.models.hooks import Intervention
from decodery.models.loaders.store import Progress
from decodery.models.torch.transformer import Transformer
from decodery.monitors.codebook import Codebooks, coding
from decodery.training.codebook import CodebookSettings, train_codebook
from decodery.training.evaluation import MonitorContext
from decodery_benchmarks.training.puzzle_model import TransformerShape, random_transformer

from .figures import Row, of_the_mean
from .settings import WatchSettings

NAME = "codes"
_STATES, _EDGES, _WALK, _STEPS, _CODES = 30, 5, 16, 3000, 200
_SITES = ("head_out.0", "mlp_out.0", "head_out.1", "mlp_out.1")
_SHAPE = TransformerShape(64, 2, 4, 176, 64)


def measure(lm: LLM, settings: WatchSettings, work: Path, progress: Progress) -> tuple[list[Row], list[Row], list[str]]:
    """Models and codes are trained here, with codes and without; nothing of the watched model is used."""
    found: dict[str, list[Row]] = {}
    for seed in range(settings.seed, settings.seed + settings.rounds):
        for name, row in _measured(seed, progress).items():
            found.setdefault(name, []).append(row)
    acts = [{"testbed": NAME, "what": name, **_mean(rows)} for name, rows in found.items()]
    note = (
        f"codes: {settings.rounds} machines of {_STATES} states with {_EDGES} edges each, two digits a state, and "
        f"models of their own; chance is allowed with {_EDGES / _STATES:.3f}; precision and recall of each state's "
        "best code; forcing: at all sites and heads, in the row of a walk's last digit: the chance of next states that "
        "the forced state allows, and the Jensen-Shannon divergence (nats) of their law from that state's successors"
    )
    return [], acts, [note]


_COLUMNS = (
    *("next state allowed", "loss", "precision", "recall", "codes in use", "forced state followed"),
    "divergence from its successors",
)


def _measured(seed: int, progress: Progress) -> dict[str, Row]:
    """One machine's figures, by what was done."""
    random = np.random.default_rng(seed)
    machine = np.stack([random.choice(_STATES, _EDGES, replace=False) for _ in range(_STATES)])
    plain, coded = (random_transformer(_SHAPE, seed) for _ in range(2))
    draw = walks(machine)
    _train(plain, draw, seed, progress)
    given = CodebookSettings(_SITES, codes=_CODES, k=1, steps=_STEPS, lr=1e-3, seed=seed)
    books = train_codebook(coded, draw, given, whole=True, context=MonitorContext(progress=progress))
    found: dict[str, Row] = {
        "without codes": {"next state allowed": allowed(plain, machine, ())},
        f"codes at {' and '.join(_SITES)}": {
            "next state allowed": allowed(coded, machine, coding(books)),
            "loss": float(books.facts["loss"]),
            **_of_states(coded, books, machine),
        },
        **_forced(coded, books, machine, random),
    }
    return found


def _mean(rows: list[Row]) -> Row:
    """Of every figure the mean over seeds, and the interval of what is asked: what is allowed, or followed."""
    found: Row = {}
    for name in _COLUMNS:
        values = np.array([row[name] for row in rows if name in row], dtype=float)
        found[name] = round(float(values.mean()), 4) if len(values) else None
    asked = "next state allowed" if "next state allowed" in rows[0] else "forced state followed"
    low, high = of_the_mean(np.array([row[asked] for row in rows]))
    return found | {"95 % of what is allowed or followed": f"{low:.3f} to {high:.3f}"}


def walks(machine: np.ndarray, count: int = 64) -> Callable[[torch.Generator], torch.Tensor]:
    """`draw` of random walks, [count, 2 * states] digits."""

    def draw(draws: torch.Generator) -> torch.Tensor:
        states = np.empty((count, _WALK), dtype=np.int64)
        steps = torch.randint(_EDGES, (count, _WALK), generator=draws, device="cpu").numpy()
        states[:, 0] = torch.randint(_STATES, (count,), generator=draws, device="cpu").numpy()
        for at in range(1, _WALK):
            states[:, at] = machine[states[:, at - 1], steps[:, at]]
        return torch.from_numpy(np.stack((states // 10, states % 10), axis=-1).reshape(count, -1))

    return draw


def _train(model: Transformer, draw: Callable[[torch.Generator], torch.Tensor], seed: int, progress: Progress) -> None:
    from torch.nn.functional import cross_entropy

    from decodery.models.torch.side_by_side import predicted
    from decodery.training.cut import parameters

    draws = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(list(parameters(model).values()), lr=1e-3)
    for step in range(_STEPS):
        tokens = draw(draws)
        loss = cross_entropy(predicted(model, tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        progress("training without codes", step + 1, _STEPS)


@torch.no_grad()
def _rows(
    model: Transformer, tokens: list[int], changes: tuple[Intervention, ...], taps: list[str]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    segment = replace(
        Segment.chunk(tokens, model.new_cache(), logit_rows=list(range(len(tokens)))), interventions=changes
    )
    scores = model.forward(Batch([segment]), taps=taps)
    return scores.logits.float().softmax(dim=-1), {str(tap): rows for tap, rows in scores.hidden.items()}


def nexts(model: Transformer, walk: list[int], changes: tuple[Intervention, ...]) -> torch.Tensor:
    """[states + 1] float64: the chance of each next state after a walk, both digits, and that of no state at all."""
    first = _rows(model, walk, changes, [])[0][-1].double()
    found = torch.zeros(100, dtype=torch.float64, device="cpu")
    for digit in range(-(-_STATES // 10)):
        second = _rows(model, [*walk, digit], changes, [])[0][-1].double()
        found[digit * 10 : digit * 10 + 10] = first[digit] * second[:10]
    return torch.cat((found[:_STATES], 1 - found[:_STATES].sum(dim=0, keepdim=True)))


def allowed(model: Transformer, machine: np.ndarray, changes: tuple[Intervention, ...]) -> float:
    """The chance that the model gives to next states that the machine allows, both digits, over new walks."""
    found = [
        float(nexts(model, walk[:-2], changes)[machine[walk[-4] * 10 + walk[-3]]].sum())
        for walk in walks(machine, 24)(torch.Generator().manual_seed(99)).tolist()
    ]
    return round(float(np.mean(found)), 4)


def _of_states(model: Transformer, books: Codebooks, machine: np.ndarray) -> Row:
    """Of every state the code that tells it best, at the rows of its second digit."""
    states, ids = _seen(model, books, machine)
    values = [
        max((_best(states, own, state) for own in ids.values()), key=lambda found: found[0] + found[1])
        for state in range(_STATES)
    ]
    return {
        "precision": round(float(np.mean([precision for precision, _, _ in values])), 4),
        "recall": round(float(np.mean([recall for _, recall, _ in values])), 4),
        "codes in use": int(sum(len(np.unique(each)) for each in ids.values())),
    }


_Place = tuple[int, int]
"""The number of a site, and a group of it: a head, or 0."""


def _seen(model: Transformer, books: Codebooks, machine: np.ndarray) -> tuple[np.ndarray, dict[_Place, np.ndarray]]:
    """[rows] states, and of every place [rows] codes."""
    states, ids = list[int](), dict[_Place, list[int]]()
    taps = [f"given.{tap}" for tap in _SITES]
    for walk in walks(machine, 96)(torch.Generator().manual_seed(7)).tolist():
        _, hidden = _rows(model, walk, coding(books), taps)
        states += [walk[at] * 10 + walk[at + 1] for at in range(0, len(walk), 2)]
        for number, tap in enumerate(taps):
            found = books.ids(number, hidden[tap])[1::2, :, 0]
            for group in range(found.shape[1]):
                ids.setdefault((number, group), []).extend(found[:, group].tolist())
    return np.array(states), {place: np.array(each) for place, each in ids.items()}


def _best(states: np.ndarray, ids: np.ndarray, state: int) -> tuple[float, float, int]:
    """Precision and recall of the code of a place that tells a state best by the sum of the two, and that code."""
    found = (0.0, 0.0, 0)
    for code in np.unique(ids[states == state]):
        hits = float(((ids == code) & (states == state)).sum())
        precision, recall = hits / (ids == code).sum(), hits / (states == state).sum()
        if precision + recall > found[0] + found[1]:
            found = float(precision), float(recall), int(code)
    return found


def _forced(model: Transformer, books: Codebooks, machine: np.ndarray, random: np.random.Generator) -> dict[str, Row]:
    """Force the codes of another state at the end of a walk, or any codes: does what follows that state come?

    Several places hold the state, so each gets the code that tells the other state best there.
    """
    states, ids = _seen(model, books, machine)
    shares: dict[str, list[tuple[float, float]]] = {}
    for walk in walks(machine, 48)(torch.Generator().manual_seed(11)).tolist():
        other = int(random.integers(_STATES))
        wanted = torch.bincount(torch.from_numpy(machine[other]), minlength=_STATES + 1).double() / _EDGES
        told = {place: _best(states, own, other)[2] for place, own in ids.items()}
        anyone = {place: int(random.choice(np.unique(own))) for place, own in ids.items()}
        for name, codes in (("no code forced", {}), ("the other state's codes", told), ("random codes", anyone)):
            given = nexts(model, walk, _at_the_end(books, codes, len(walk) - 1))
            shares.setdefault(name, []).append((float(given[wanted > 0].sum()), divergence(given, wanted)))
    return {name: dict(zip(_COLUMNS[-2:], np.mean(own, axis=0).tolist(), strict=True)) for name, own in shares.items()}


def divergence(one: torch.Tensor, other: torch.Tensor) -> float:
    """Jensen and Shannon's, in nats, of two laws [n]."""
    middle = (one + other) / 2
    apart = [(each * (each.clamp_min(1e-12) / middle.clamp_min(1e-12)).log()).sum() for each in (one, other)]
    return float(sum(apart)) / 2


def _at_the_end(books: Codebooks, codes: Mapping[_Place, int], position: int) -> tuple[Intervention, ...]:
    """The codes of all rows in their places, and these in the row of one position."""
    plain, forced = coding(books), coding(books, [(*place, code) for place, code in codes.items()])

    def change(at: int) -> Intervention:
        def last(rows: torch.Tensor, segment: Segment) -> torch.Tensor:
            wanted = torch.from_numpy(np.asarray(segment.positions) == position)[:, None]
            return torch.where(wanted, forced[at].change(rows, segment), plain[at].change(rows, segment))

        return Intervention(plain[at].hook_point, last)

    return tuple(change(at) for at in range(len(plain)))
