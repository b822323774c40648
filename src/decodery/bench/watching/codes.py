"""M3, a random finite-state machine: what codes stand for in a model that was trained with them, and forcing them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ...lm import LM
from ...model.batch import Batch, Segment
from ...model.sites import Intervention
from ...model.store import Progress
from ...model.transformer import Transformer
from ...monitor.codebook import Codebooks, coding
from ...train.codebook import train_codebook
from ...train.puzzle_model import Shape, random_transformer
from .figures import Row
from .settings import WatchSettings

NAME = "codes"
_STATES, _EDGES, _WALK, _STEPS, _CODES = 30, 5, 16, 600, 200
_SITES = ("mlp_out.0", "mlp_out.1")
_SHAPE = Shape(64, 2, 4, 176, 64)


def measure(lm: LM, settings: WatchSettings, work: Path, progress: Progress) -> tuple[list[Row], list[Row], list[str]]:
    """Models and codes are trained here, with codes and without; nothing of the watched model is used."""
    random = np.random.default_rng(settings.seed)
    machine = np.stack([random.choice(_STATES, _EDGES, replace=False) for _ in range(_STATES)])
    plain = random_transformer(_SHAPE, settings.seed)
    coded = random_transformer(_SHAPE, settings.seed)
    draw = walks(machine)
    _train(plain, draw, settings.seed, progress)
    books = train_codebook(
        coded, draw, _SITES, codes=_CODES, k=1, steps=_STEPS, lr=1e-3, whole=True, seed=settings.seed, progress=progress
    )
    acts: list[Row] = [
        {"testbed": NAME, "what": "without codes", "next state allowed": allowed(plain, machine, ()), "loss": None}
        | _NOTHING,
        {
            "testbed": NAME,
            "what": f"codes at {' and '.join(_SITES)}",
            "next state allowed": allowed(coded, machine, coding(books)),
            "loss": books.facts["loss"],
        }
        | _of_states(coded, books, machine, random),
    ]
    for name, moved in _forced(coded, books, machine, random).items():
        acts.append({"testbed": NAME, "what": name, "next state allowed": None, "loss": None} | _NOTHING | moved)
    note = (
        f"codes: {_STATES} states with {_EDGES} edges each, two digits a state; a guess by chance is allowed "
        f"with {_EDGES / _STATES:.3f}; precision and recall of each state's best code; forcing: the chance of a first "
        "digit that the forced state allows"
    )
    return [], acts, [note]


_NOTHING: Row = {"precision": None, "recall": None, "codes in use": None, "forced state followed": None}


def walks(machine: np.ndarray, count: int = 64) -> Callable[[torch.Generator], torch.Tensor]:
    """`draw` of random walks, [count, 2 * states] digits."""

    def draw(draws: torch.Generator) -> torch.Tensor:
        states = np.empty((count, _WALK), dtype=np.int64)
        steps = torch.randint(_EDGES, (count, _WALK), generator=draws).numpy()
        states[:, 0] = torch.randint(_STATES, (count,), generator=draws).numpy()
        for at in range(1, _WALK):
            states[:, at] = machine[states[:, at - 1], steps[:, at]]
        return torch.from_numpy(np.stack((states // 10, states % 10), axis=-1).reshape(count, -1))

    return draw


def _train(model: Transformer, draw: Callable[[torch.Generator], torch.Tensor], seed: int, progress: Progress) -> None:
    from torch.nn.functional import cross_entropy

    from ...train.cut import parameters
    from ...train.puzzle_model import predicted

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


def allowed(model: Transformer, machine: np.ndarray, changes: tuple[Intervention, ...]) -> float:
    """The chance that the model gives to next states that the machine allows, both digits, over new walks."""
    found = []
    for walk in walks(machine, 24)(torch.Generator().manual_seed(99)).tolist():
        chances, _ = _rows(model, walk, changes, [])
        state = walk[-4] * 10 + walk[-3]
        first = chances[-3]
        total = 0.0
        for digit in {int(after) // 10 for after in machine[state]}:
            second, _ = _rows(model, [*walk[:-2], digit], changes, [])
            own = [int(after) % 10 for after in machine[state] if after // 10 == digit]
            total += float(first[digit] * second[-1][own].sum())
        found.append(total)
    return round(float(np.mean(found)), 4)


def _of_states(model: Transformer, books: Codebooks, machine: np.ndarray, random: np.random.Generator) -> Row:
    """Of every state the code that tells it best, at the rows of its second digit."""
    states, ids = _seen(model, books, machine)
    values = [_best(states, ids, state) for state in range(_STATES)]
    return {
        "precision": round(float(np.mean([precision for precision, _, _ in values])), 4),
        "recall": round(float(np.mean([recall for _, recall, _ in values])), 4),
        "codes in use": int(sum(len(np.unique(each)) for each in ids)),
        "forced state followed": None,
    }


def _seen(model: Transformer, books: Codebooks, machine: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """[rows] states, and of every site [rows] codes."""
    states, ids = list[int](), [list[int]() for _ in _SITES]
    taps = [f"given.{tap}" for tap in _SITES]
    for walk in walks(machine, 96)(torch.Generator().manual_seed(7)).tolist():
        _, hidden = _rows(model, walk, coding(books), taps)
        states += [walk[at] * 10 + walk[at + 1] for at in range(0, len(walk), 2)]
        for number, tap in enumerate(taps):
            ids[number] += books.ids(number, hidden[tap])[1::2, 0, 0].tolist()
    return np.array(states), [np.array(each) for each in ids]


def _best(states: np.ndarray, ids: list[np.ndarray], state: int) -> tuple[float, float, tuple[int, int]]:
    """Precision, recall, and site and code, of what tells a state best by the mean of the two."""
    found = (0.0, 0.0, (0, 0))
    for number, own in enumerate(ids):
        for code in np.unique(own[states == state]):
            hits = float(((own == code) & (states == state)).sum())
            precision, recall = hits / (own == code).sum(), hits / (states == state).sum()
            if precision + recall > found[0] + found[1]:
                found = (float(precision), float(recall), (number, int(code)))
    return found


def _forced(model: Transformer, books: Codebooks, machine: np.ndarray, random: np.random.Generator) -> dict[str, Row]:
    """Force the code of another state at the end of a walk, or any code: is what follows that state likelier?"""
    states, ids = _seen(model, books, machine)
    best = {state: _best(states, ids, state)[2] for state in range(_STATES)}
    shares: dict[str, list[float]] = {"no code forced": [], "the other state's code": [], "a random code": []}
    for walk in walks(machine, 48)(torch.Generator().manual_seed(11)).tolist():
        other = int(random.integers(_STATES))
        digits = sorted({int(after) // 10 for after in machine[other]})
        number, code = best[other]
        anyone = int(random.choice(np.unique(ids[number])))
        for name, edit in (("no code forced", None), ("the other state's code", code), ("a random code", anyone)):
            changes = coding(books) if edit is None else _at_the_end(books, number, edit, len(walk) - 1)
            chances, _ = _rows(model, walk, changes, [])
            shares[name].append(float(chances[-1][digits].sum()))
    return {name: {"forced state followed": round(float(np.mean(own)), 4)} for name, own in shares.items()}


def _at_the_end(books: Codebooks, number: int, code: int, position: int) -> tuple[Intervention, ...]:
    plain, forced = coding(books), coding(books, [(number, 0, code)])

    def change(at: int) -> Intervention:
        def last(rows: torch.Tensor, segment: Segment) -> torch.Tensor:
            wanted = torch.from_numpy(np.asarray(segment.positions) == position)[:, None]
            return torch.where(wanted, forced[at].change(rows, segment), plain[at].change(rows, segment))

        return Intervention(plain[at].site, last)

    return tuple(change(at) for at in range(len(plain)))
