"""Neurofeedback: whether a model can report where its own states lie, from examples in its prompt, and move them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from decodery.llm.llm import LLM
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.store import Progress
from decodery.monitors.probe import Probe
from decodery.training.direction import ASKED, Statement, axis_of, best_axis, built_in_statements, read_by
from decodery.training.ranking import auroc, logistic, parts, word_scores

from .control import SYSTEM, controlled
from .figures import Judged, Row, detection
from .settings import WatchSettings

NAME, CONTROL = "feedback", "feedback, control"
_EXAMPLES, _FIRST = 32, 16
_COMPONENTS = (1, 2, 4, 8, 32)
"""Of states of some hundred sentences: later ones hold hardly anything. Narrow models have fewer."""
_CONTROLLED = ("lr", "pc1", "pc8")
"""Axes whose states are to be moved too, and whose labels are shuffled for comparison."""
_Told = list[tuple[float, bool, str]]
"""Score, label, and the trial it is of."""


def measure(lm: LLM, settings: WatchSettings, work: Path, progress: Progress) -> tuple[list[Row], list[Row], list[str]]:
    """Each trial shows sentences with labels; the model's choice between the two is read before each label.

    Labels go by the sentence's place along an axis: what tells its truth, at every depth, and components of the states
    at the depth where truth is told best.
    """
    statements = built_in_statements(settings.seed)
    layers = lm.model.config.num_layers
    depths = [f"resid_post.{min(layers * at // 4, layers - 1)}" for at in range(1, 5)]
    sites = tuple(dict.fromkeys(("embed", *depths)))
    read = read_by(lm, statements, sites, progress)
    states = {site: torch.stack([each.states[site] for each in read]) for site in sites}
    learned = parts([each.group for each in statements], settings.seed) == "train"
    trials = max(6, settings.prompts // 80)
    labels, own = np.array([each.label for each in statements]), torch.from_numpy(learned)
    free = np.flatnonzero(~learned)
    best = best_axis(states, statements, "lr", seed=settings.seed)

    def axis(kind: str, site: str) -> Probe:
        return axis_of(states[site][own], labels[learned].tolist(), kind, site, seed=settings.seed)

    few = min(int(own.sum()), lm.model.config.hidden_size)
    axes = {kind: axis(kind, best.site) for kind in ("lr", *(f"pc{number}" for number in _COMPONENTS if number < few))}
    others = {f"lr at {site}": axis("lr", site) for site in states if site != best.site}
    rows, acts = list[Row](), list[Row]()
    for kind, own_axis in (axes | others).items():
        place = own_axis.logits(states[own_axis.site])[:, 0].numpy()
        found, growth = _reported(
            lm, statements, states[own_axis.site], place, free, trials, settings.seed, shuffled=kind in _CONTROLLED
        )
        for name, each in found.items():
            scores, told, groups = zip(*each, strict=True)
            rows.append(detection(NAME, f"{kind}: {name}", [Judged(scores, told, groups, groups)]))
        acts.append(
            {
                "testbed": NAME,
                "what": f"reporting along {kind.partition(' ')[0]}, site {own_axis.site}",
                "trials": trials,
                "variance": own_axis.facts["variance"],
                **{f"accuracy, {n} to {2 * n - 1} examples": round(share, 3) for n, share in growth.items()},
                "label of sentences": round(auroc(place[free].tolist(), labels[free].tolist()), 3),
            }
        )
        progress("reporting along axes", len(acts), len(axes) + len(others))
    moved_along = {kind: axes[kind] for kind in _CONTROLLED}
    projected = {kind: each.logits(states[best.site])[free, 0].numpy() for kind, each in moved_along.items()}
    moved = controlled(lm, [statements[at] for at in free], projected, moved_along, trials, settings.seed, progress)
    notes = [f"feedback: the label is told along lr at {best.facts['selection']} of the half not learned from"]
    return rows, acts + [{"testbed": CONTROL, **each} for each in moved], notes


def _reported(
    lm: LLM,
    statements: list[Statement],
    states: torch.Tensor,
    place: np.ndarray,
    free: np.ndarray,
    trials: int,
    seed: int,
    *,
    shuffled: bool,
) -> tuple[dict[str, _Told], dict[int, float]]:
    """What is told of labels after 16 examples and more, by who tells it, and the model's accuracy by examples seen.

    states: [statements, width] that the axis reads; place: [statements] along it; free: what it was not learned from.
    """
    found: dict[str, _Told] = {}
    growth: dict[int, list[bool]] = {}
    centre = float(np.median(place[free]))
    for trial in range(trials):
        random = np.random.default_rng((seed, trial))
        shown = random.choice(free, _EXAMPLES, replace=False)
        texts = [statements[at].text for at in shown]
        # Labels are set at the trial half's own middle, so that half of them are 1.
        given = place[shown] > centre
        told_of = {"report": given}
        if shuffled:
            told_of["report, shuffled labels"] = random.permutation(given)
        for name, told in told_of.items():
            leads = _leads(lm, texts, told.tolist())
            own = [(leads[at], bool(told[at]), f"{trial}") for at in range(_FIRST, _EXAMPLES)]
            found.setdefault(name, []).extend(own)
            if name == "report":
                for at in range(_EXAMPLES):
                    growth.setdefault(at, []).append((leads[at] > 0) == told[at])
        if len(set(given[:_FIRST])) == 2:
            for name, scores in _observed(texts, states[shown].double(), given).items():
                own = [(score, bool(label), f"{trial}") for score, label in zip(scores, given[_FIRST:], strict=True)]
                found.setdefault(name, []).extend(own)
    shares = {
        n: float(np.mean([hit for at in range(n, 2 * n) for hit in growth[at]]))
        for n in (1, 2, 4, 8, 16)
        if 2 * n <= _EXAMPLES
    }
    return found, shares


def _observed(texts: list[str], states: torch.Tensor, given: np.ndarray) -> dict[str, list[float]]:
    """What logistic regression makes of the first examples: of their states [examples, width], and of their words."""
    data = (states - states[:_FIRST].mean(dim=0)) / states[:_FIRST].std(dim=0).clamp_min(1e-6)
    data = torch.cat((data, torch.ones(_EXAMPLES, 1, dtype=torch.float32, device="cpu")), dim=1)
    weight = logistic(data[:_FIRST], torch.tensor(given[:_FIRST], dtype=torch.float64, device="cpu"))
    return {
        "ideal observer of the states": (data[_FIRST:] @ weight).tolist(),
        "observer of the words": word_scores(texts[:_FIRST], given[:_FIRST].tolist(), texts[_FIRST:]),
    }


@torch.no_grad()
def _leads(lm: LLM, texts: list[str], labels: list[bool]) -> list[float]:
    """By how much, in nats, 1 leads 0 where the label of each sentence comes."""
    turns = [{"role": "system", "content": SYSTEM}]
    for text, label in zip(texts, labels, strict=True):
        turns += [{"role": "user", "content": ASKED}, {"role": "assistant", "content": f"{text} [Score: {int(label)}]"}]
    tokens = lm.encode(turns)
    ids = [lm.tokenizer.encode(str(label), special=False)[0] for label in (0, 1)]
    stream, written, places = lm.tokenizer.stream(), "", []
    for at, token in enumerate(tokens):
        if written.rstrip(" ").endswith("[Score:") and token in ids:
            places.append(at)
        written += stream.push([token])
    segment = Segment.chunk(tokens, lm.model.new_cache(), logit_rows=[at - 1 for at in places])
    logits = lm.model.forward(Batch([segment])).logits.float()
    return [float(row[ids[1]] - row[ids[0]]) for row in logits]
