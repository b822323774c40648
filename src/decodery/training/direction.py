"""Directions of hidden states: what tells a label of sentences, and their principal components."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decodery.compression.base import transformable
from decodery.core.errors import SettingsError
from decodery.core.threads import one_thread
from decodery.engine.monitoring import monitor_states
from decodery.llm.llm import LLM
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.load import LoadedModel
from decodery.models.loaders.store import Progress, silent
from decodery.models.protocol import LanguageModel
from decodery.models.torch.transformer import Transformer
from decodery.monitors.probe import Probe
from decodery.monitors.recorder import Recorder
from decodery.monitors.threshold import Threshold

from .activations import Sites
from .checkable import capitals
from .cut import parameters
from .evaluation import ALONE, NOWHERE, Evaluation, MonitorContext, doubt_of, keep_evaluated
from .kind import ARGUMENT, Data, Run, kind, option
from .labelled import LabelledChat, is_labelled, read_chats, reread
from .lines import read_labelled
from .probe import inputs_like
from .ranking import auroc, logistic, part_of, parts
from .tensors import zeros

_RANDOM_AT_MOST = 2e9
"""Parameters of the largest model that is read with random weights, too: it is loaded in 32 bits for that."""
ASKED = "Say something."
"""What the sentences are answers to."""


@dataclass(frozen=True, slots=True)
class Statement:
    """A sentence and its label."""

    text: str
    label: bool
    group: str  # What must not be both learned from and tested on


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
    """Of a file of JSON lines {"text": text, "label": true or false, "group": text}.

    A group may be left out.
    """
    return [Statement(*each) for each in read_labelled(path, "text", "label")]


def read_answers(
    lm: LLM, chats: Ordered[LabelledChat], sites: Ordered[str], progress: Progress = silent
) -> list[ReadStatement]:
    """Answers with labels of their own, as the monitor has them at their end."""
    found = []
    for chat, text in zip(chats, reread(lm, chats, [Recorder(tuple(sites), 1)], progress), strict=True):
        _, seen = monitor_states(text)[0]
        # The row that the first token is chosen at is the prompt's last one.
        rows = seen[1:]
        states = {site: torch.stack([hidden[site] for _, hidden in rows]).mean(dim=0) for site in sites}
        doubt = -float(torch.stack([numbers[-5] for numbers, _ in seen]).mean())
        found.append(ReadStatement(Statement(chat.answer, chat.label, chat.group), states, len(rows), doubt))
    return found


def _before(lm: LLM) -> list[int]:
    """What stands before a statement."""
    if lm.chat_template is None:
        return lm.encode(ASKED + "\n")
    return lm.encode([{"role": "user", "content": ASKED}])


@dataclass(frozen=True, slots=True, eq=False)
class ReadStatement:
    """A statement as the model read it."""

    statement: Statement
    states: Mapping[str, torch.Tensor]  # {site: [width]}, means of its rows
    tokens: int
    doubt: float  # The mean of -log p over them, in nats


@torch.no_grad()
def read_by(
    lm: LLM, statements: Ordered[Statement], sites: Ordered[str], progress: Progress = silent
) -> list[ReadStatement]:
    """The statements as the model reads them, each as the answer to `ASKED`."""
    prompt, found = _before(lm), list[ReadStatement]()
    for each in statements:
        text = lm.tokenizer.encode(each.text, special=False)
        rows = range(len(prompt) - 1, len(prompt) + len(text) - 1)
        segment = Segment.chunk([*prompt, *text], lm.model.new_cache(), logit_rows=list(rows))
        scores = lm.model.forward(Batch([segment]), taps=list(sites))
        states = {site: scores.hidden[site][len(prompt) :].float().cpu().mean(dim=0) for site in sites}
        found.append(ReadStatement(each, states, len(text), doubt_of(scores.logits, text)))
        progress("reading statements", len(found), len(statements))
    return found


def trial(train: Callable[..., Probe]) -> Evaluation[ReadStatement, Probe]:
    """How an axis is tested."""

    def score(axis: Probe, items: Ordered[ReadStatement]) -> list[float]:
        rows = torch.stack([each.states[axis.site] for each in items])
        return (axis.logits(rows)[:, 0] * axis.facts["way"]).tolist()

    return Evaluation[ReadStatement, Probe](
        train,
        score,
        label=lambda each: each.statement.label,
        group=lambda each: each.statement.group,
        relabel=lambda one, other: replace(one, statement=replace(one.statement, label=other.statement.label)),
        baselines={"length": lambda each: each.tokens, "mean log-probability": lambda each: each.doubt},
        words=lambda each: each.statement.text,
    )


def axis_by(read: Ordered[ReadStatement], kind: str, *, seed: int = 0, **settings: Any) -> Probe:
    """`best_axis` of statements that were read, with their distances from their mean and their lengths."""
    states = {site: torch.stack([each.states[site] for each in read]) for site in read[0].states}
    found = best_axis(states, [each.statement for each in read], kind, seed=seed, **settings)
    others = part_of(read, lambda each: each.statement.group, seed, "calibration")
    if not others:
        return found
    inputs = inputs_like(found, [each.states[found.site][None] for each in others])
    tokens = int(np.median([each.tokens for each in others]))
    return replace(found, facts={**found.facts, "inputs": {**inputs, "tokens": tokens}})


def best_axis(
    states: Mapping[str, torch.Tensor],
    statements: Ordered[Statement],
    kind: str = "lr",
    *,
    seed: int = 0,
    context: MonitorContext = ALONE,
) -> Probe:
    """The axis of the hook point that separates the validation labels best, in either sign.

    It is learned from the part "train" of `ranking.parts`. `facts` hold all hook points as "selection", and as "way" -1
    where the label stands at the low end.
    """
    part = parts([each.group for each in statements], seed)
    learned, chosen = part == "train", part == "validation"
    labels = np.array([each.label for each in statements])
    if min(len(set(labels[learned])), len(set(labels[chosen]))) < 2:
        raise SettingsError("an axis needs statements of both labels, from several groups")
    swept, best = dict[str, float](), dict[str, Probe]()
    for site, rows in states.items():
        found = axis_of(rows[torch.from_numpy(learned)], labels[learned].tolist(), kind, site, seed, context)
        swept[site] = auroc(found.logits(rows[torch.from_numpy(chosen)])[:, 0].tolist(), labels[chosen].tolist())
        best[site] = found
    site = max(swept, key=lambda each: max(swept[each], 1 - swept[each]))
    about = {**best[site].facts, "statements": len(statements), "way": 1 if swept[site] >= 0.5 else -1}
    about["selection"] = {name: round(max(value, 1 - value), 4) for name, value in swept.items()}
    threshold = replace(best[site].threshold, chat=context.chat)
    return Probe(best[site].tensors, site, "answer", threshold, about, context.model)


@one_thread()
def axis_of(
    rows: torch.Tensor, labels: Ordered[bool], kind: str, site: str, seed: int = 0, context: MonitorContext = ALONE
) -> Probe:
    """A direction of rows [n, width], as a probe whose logit is the standardised projection.

    Args:
        kind: "lr", logistic regression on the labels; "pc3", the third principal component. Its threshold is one
            nothing is above.
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
        "bias.0": zeros(1),
    }
    about = {**context.facts, "axis": kind, "variance": share, "seed": seed}
    return Probe(tensors, site, "answer", Threshold(NOWHERE, 0.5, 0, ""), about, context.model)


def _logistic(data: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The direction [width] that tells labels [n] of rows [n, width], with a penalty that keeps it small."""
    scale = data.std(dim=0).clamp_min(1e-6)
    given = torch.nn.functional.pad(data / scale, (0, 1), value=1.0)
    how: dict[str, Any] = {"max_iter": 100, "line_search_fn": "strong_wolfe"}
    return logistic(given, labels, 0.5 / len(data), constant=True, **how)[:-1] / scale


@dataclass(frozen=True)
class Statements(Data):
    """Statements to learn from."""

    NOTE = """STATEMENTS holds one JSON object a line, {"text": ..., "label": true or false, "group": text}; half of
    them are for training. The default is right and wrong capitals. Or it holds your own texts with labels, {"messages":
    [...], "label": true or false, "group": text}, whose last answer is read."""

    statements: Path | None = field(default=None, metadata=ARGUMENT)
    kind: str = option("lr", "lr: the direction that separates the labels. pc1, pc2, ...: a principal component.")
    seed: int = option(0, "Random seed of the split.")

    def check(self) -> None:
        if self.statements is not None and not is_labelled(self.statements):
            read_statements(self.statements)

    def read(self, lm: LLM, sites: Ordered[str], progress: Progress) -> list[ReadStatement]:
        """What the model reads."""
        if self.statements is not None and is_labelled(self.statements):
            return read_answers(lm, read_chats(self.statements, answers=True), sites, progress)
        found = built_in_statements(self.seed) if self.statements is None else read_statements(self.statements)
        return read_by(lm, found, sites, progress)


@torch.no_grad()
def scrambled(loaded: LoadedModel, seed: int) -> LoadedModel:
    """The same model with the entries of each of its tensors in a random order."""
    draws = torch.Generator().manual_seed(seed)
    for tensor in parameters(transformable(loaded.model)).values():
        tensor.requires_grad_(False)
        order = torch.randperm(tensor.numel(), generator=draws, device="cpu").to(tensor.device)
        tensor.copy_(tensor.flatten()[order].view_as(tensor))
    return loaded


def _small(model: LanguageModel) -> bool:
    """Whether a model can be read with random weights, too."""
    config = model.config
    of_layers = config.num_layers * config.hidden_size * (4 * config.hidden_size + 3 * config.intermediate_size)
    small = of_layers + config.vocab_size * config.hidden_size <= _RANDOM_AT_MOST
    return small and isinstance(model, Transformer) and config.usual and not config.experts


@kind(
    "The direction is ready: --monitor neurofeedback:axis={out}",
    (Statements(), Sites()),
    "--kind lr --out direction",
    model="whose hidden states are read",
)
def _direction(run: Run) -> dict[str, Any]:
    """Find a direction of the hidden states of MODEL that separates STATEMENTS, for the monitor neurofeedback.

    The hook point that separates the labels best on a part of the statements is used. A principal component ignores
    the labels. The printed figures are those of the rest.
    """
    asked, lm = run.of(Statements), run.lm
    read, chat = asked.read(lm, run.of(Sites).of(lm), run.progress), lm.chat_template is not None
    train = partial(axis_by, kind=asked.kind, context=MonitorContext.of(run, chat=chat))
    others = {}
    if _small(lm.model):
        random = LLM(scrambled(run.load("float32"), asked.seed))
        others["random weights"] = asked.read(random, run.of(Sites).of(lm), run.progress)
    trained, report = trial(train).run(read, asked.seed, "statements", others)
    more = {"site": trained.site, "variance": trained.facts["variance"]}
    return keep_evaluated(trained, report, run.out / Probe.FILE, **more)
