"""Neurofeedback: whether a model can report where its own states lie, from examples in its prompt, and move them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from ...lm import LM
from ...model.batch import Batch, Segment
from ...model.store import Progress
from ...train.axes import ASKED, axis_of, best_axis, built_in_statements, halves, said
from ...train.ranking import auroc
from .control import SYSTEM, controlled
from .figures import Judged, Row, detection, logistic, word_scores
from .settings import WatchSettings

NAME, CONTROL = "feedback", "feedback, control"
_EXAMPLES, _FIRST = 32, 16
_KINDS = ("lr", "pc1", "pc8")


def measure(lm: LM, settings: WatchSettings, work: Path, progress: Progress) -> tuple[list[Row], list[Row], list[str]]:
    """Each trial shows sentences with labels; the model's choice between the two is read before each label."""
    statements = built_in_statements(settings.seed)
    layers = lm.model.config.num_layers
    sites = tuple(dict.fromkeys(f"resid_post.{min(layers * at // 4, layers - 1)}" for at in range(1, 5)))
    states = said(lm, [each.text for each in statements], sites, progress)
    learned, trials = halves(statements, settings.seed), max(6, settings.prompts // 80)
    labels, own = np.array([each.label for each in statements]), torch.from_numpy(learned)
    rows, acts, notes = list[Row](), list[Row](), list[str]()
    best = best_axis(states, statements, "lr", seed=settings.seed)
    notes.append(f"feedback: the label is told along lr at {best.facts['validation']} of the half not learned from")
    axes = {
        kind: axis_of(states[best.site][own], labels[learned].tolist(), kind, best.site, seed=settings.seed)
        for kind in _KINDS
    }
    free = np.flatnonzero(~learned)
    for kind, axis in axes.items():
        values = axis.logits(states[best.site])[:, 0].numpy()
        centre = float(np.median(values[free]))
        found: dict[str, list[tuple[float, bool, str]]] = {}
        growth: dict[int, list[bool]] = {}
        for trial in range(trials):
            random = np.random.default_rng((settings.seed, trial))
            shown = random.choice(free, _EXAMPLES, replace=False)
            # Labels are set at the trial half's own middle, so that half of them are 1.
            given = values[shown] > centre
            for name, told in (("report", given), ("report, shuffled labels", random.permutation(given))):
                leads = _leads(lm, [statements[at].text for at in shown], told.tolist())
                for at in range(_EXAMPLES):
                    if at >= _FIRST:
                        found.setdefault(name, []).append((leads[at], bool(told[at]), f"{trial}"))
                    if name == "report":
                        growth.setdefault(at, []).append((leads[at] > 0) == told[at])
            if len(set(given[:_FIRST])) == 2:
                data = states[best.site][shown].double()
                data = torch.cat(
                    (
                        (data - data[:_FIRST].mean(dim=0)) / data[:_FIRST].std(dim=0).clamp_min(1e-6),
                        torch.ones(_EXAMPLES, 1),
                    ),
                    dim=1,
                )
                weight = logistic(data[:_FIRST], torch.tensor(given[:_FIRST], dtype=torch.float64))
                texts = [statements[at].text for at in shown]
                bags = word_scores(texts[:_FIRST], given[:_FIRST].tolist(), texts[_FIRST:])
                for at in range(_FIRST, _EXAMPLES):
                    found.setdefault("ideal observer of the states", []).append(
                        (float(data[at] @ weight), bool(given[at]), f"{trial}")
                    )
                    found.setdefault("observer of the words", []).append(
                        (bags[at - _FIRST], bool(given[at]), f"{trial}")
                    )
            progress(f"reporting along {kind}", trial + 1, trials)
        for name, each in found.items():
            scores, told_labels, groups = zip(*each, strict=True)
            rows.append(detection(NAME, f"{kind}: {name}", [Judged(scores, told_labels, groups, groups)]))
        shares = {
            n: float(np.mean([hit for at in range(n, 2 * n) for hit in growth[at]]))
            for n in (1, 2, 4, 8, 16)
            if 2 * n <= _EXAMPLES
        }
        acts.append(
            {
                "testbed": NAME,
                "what": f"reporting along {kind}, site {best.site}",
                "trials": trials,
                "variance": axis.facts["variance"],
                **{f"accuracy, {n} to {2 * n - 1} examples": round(share, 3) for n, share in shares.items()},
                "label of sentences": round(auroc(values[free].tolist(), labels[free].tolist()), 3),
            }
        )
    projected = {kind: axis.logits(states[best.site])[free, 0].numpy() for kind, axis in axes.items()}
    moved = controlled(lm, [statements[at] for at in free], projected, axes, trials, settings.seed, progress)
    return rows, acts + [{"testbed": CONTROL, **each} for each in moved], notes


@torch.no_grad()
def _leads(lm: LM, texts: list[str], labels: list[bool]) -> list[float]:
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
