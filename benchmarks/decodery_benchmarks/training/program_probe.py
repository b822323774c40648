"""Train probes that read the state of a program off the states of the model that writes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.noise import nth_seed
from decodery.core.threads import one_thread
from decodery.engine.engine import Engine
from decodery.engine.monitoring import monitor_states
from decodery.engine.request import Request
from decodery.engine.schedule import Limits
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.store import Progress, silent
from decodery.models.protocol import LanguageModel
from decodery.monitors.probe import Probe
from decodery.monitors.recorder import Recorder
from decodery.monitors.threshold import Threshold
from decodery.sampling.sampler import Sampler
from decodery.step.sequence import Sequence
from decodery.training.evaluation import Evaluation
from decodery.training.ranking import parts
from decodery_benchmarks.puzzles import drawn
from decodery_benchmarks.puzzles.alphabet import END_ID, encoded, tokenizer
from decodery_benchmarks.puzzles.robot import ACTIONS, FACINGS, Robot, State, given

_TOGETHER, _BATCH, _EVERY = 32, 256, 50
OTHER_MEANINGS = ("lrm", "rml", "mrl", "lmr", "mmr")
"""Other meanings of m, l and r: two that turn all of them round, two that exchange a pair, and one under which two
words mean the same."""


@dataclass(frozen=True, slots=True, eq=False)
class WrittenProgram:
    """What a model wrote for a prompt. rows: {site: [tokens, width]}, those that its tokens were chosen at.

    right: whether it leads where it should; doubt: the mean of -log p over its tokens.
    """

    prompt: str
    text: str
    right: bool
    doubt: float
    rows: dict[str, torch.Tensor]

    def states(self, robot: Robot, meaning: str = ACTIONS) -> list[State]:
        """The state that each row's token leads to; the program's end leads nowhere else."""
        found = robot.run(given(self.prompt)[0], self.text, meaning)
        return [*found, found[-1]]


def write_programs(
    model: LanguageModel,
    robot: Robot,
    count: int,
    sites: Ordered[str],
    *,
    split: str = "validation",
    each: int = 1,
    temperature: float = 0.0,
    seed: int = 0,
    progress: Progress = silent,
) -> list[WrittenProgram]:
    """What the model writes for `count` prompts, `each` times, without what is no finished program."""
    engine, found = (
        Engine(model, detokenizer=tokenizer().stream, limits=Limits(texts=_TOGETHER)),
        list[WrittenProgram](),
    )
    prompts = [prompt for prompt in islice(drawn(robot, split, seed), count) for _ in range(each)]
    for first in range(0, len(prompts), _TOGETHER):
        asked = prompts[first : first + _TOGETHER]
        texts = []
        for number, prompt in enumerate(asked):
            request = Request(
                encoded(prompt),
                robot.length,
                Sampler.from_settings(temperature=temperature),
                eos_ids=(END_ID,),
                seed=nth_seed(seed, first + number),
                monitors=[Recorder(tuple(sites), 1)],
            )
            texts.append(engine.submit(request))
        engine.run(texts)
        for prompt, seq in zip(asked, texts, strict=True):
            if (program := _program(robot, prompt, seq, sites)) is not None:
                found.append(program)
        progress("writing programs", first + len(asked), len(prompts))
    return found


def _program(robot: Robot, prompt: str, seq: Sequence, sites: Ordered[str]) -> WrittenProgram | None:
    assert seq.text is not None
    text = seq.text.text
    if seq.finish_reason != "stop" or not text or set(text) - set(ACTIONS):
        return None
    _, seen = monitor_states(seq)[0]
    rows = {site: torch.stack([hidden[site] for _, hidden in seen]) for site in sites}
    doubt = -float(torch.stack([numbers[-5] for numbers, _ in seen]).mean())
    return WrittenProgram(prompt, text, robot.verify(prompt, text), doubt, rows)


@torch.no_grad()
def reread(model: LanguageModel, programs: Ordered[WrittenProgram], sites: Ordered[str]) -> list[WrittenProgram]:
    """The same programs with the rows that another model has of them, while it reads what it did not write."""
    found = []
    for each in programs:
        tokens, first = encoded(each.prompt + each.text), len(encoded(each.prompt)) - 1
        segment = Segment.chunk(tokens, model.new_cache(), logit_rows=[])
        hidden = model.forward(Batch([segment]), taps=list(sites)).hidden
        found.append(replace(each, rows={site: hidden[site][first:].float() for site in sites}))
    return found


def train_program_probe(
    programs: Ordered[WrittenProgram],
    robot: Robot,
    sites: Ordered[str],
    *,
    model: str = "",
    meaning: str = ACTIONS,
    inner: tuple[int, ...] = (),
    ahead: int = 0,
    rate: float = 0.1,
    steps: int = 600,
    lr: float = 3e-3,
    seed: int = 0,
    facts: Mapping[str, Any] | None = None,
) -> Probe:
    """The probe of the site at which the states of validation programs are read best; all sites in `facts`.

    meaning: what the actions do to the states that are learned: another semantics has to be learned by a probe of its
    own, of the same size and from the same rows. inner: widths of hidden layers, () for a linear probe. ahead: learn
    the state so many tokens later. Programs are split by `split`; the threshold is set on right programs of the
    calibration part. Raises SettingsError where there are too few.
    """
    of = split(programs, seed)
    if min(map(len, of.values())) < 1 or len(of) < 4 or len(of["train"]) < 8:
        raise SettingsError(f"{len(programs)} programs are too few to learn from and to test on: write more")
    sizes = {"x": robot.side, "y": robot.side, "facing": FACINGS}
    best: tuple[float, str, dict[str, torch.Tensor]] | None = None
    swept = {}
    for site in sites:
        data, labels = rows_and_states(of["train"], robot, site, meaning, ahead)
        held = rows_and_states(of["validation"], robot, site, meaning, ahead)
        tensors, value = _fit(data, labels, held, sizes, inner, steps, lr, seed)
        swept[site] = round(value, 4)
        if best is None or value > best[0]:
            best = value, site, tensors
    assert best is not None
    _, site, tensors = best
    about = {**(facts or {}), "fields": sizes, "programs": len(programs), "selection": swept, "seed": seed}
    about |= {"right": round(float(np.mean([each.right for each in programs])), 4)}
    unset = Probe(tensors, site, "new", Threshold(0.5, rate, 0, ""), about, model)
    harmless = [each for each in of["calibration"] if each.right]
    named = "right programs of the model's own"
    threshold = Threshold.calibrated(misses(unset, harmless), rate, named)
    about["always"] = Threshold.calibrated(misses(unset, harmless, always=True), rate, named).facts()
    return Probe(tensors, site, "new", threshold, about, model)


def split(programs: Ordered[WrittenProgram], seed: int) -> dict[str, list[WrittenProgram]]:
    """Programs by part, split by prompt. A test program whose text another part has, too, is left out."""
    part = parts([each.prompt for each in programs], seed)
    found: dict[str, list[WrittenProgram]] = {}
    for each, own in zip(programs, part, strict=True):
        found.setdefault(own, []).append(each)
    seen = {each.text for name, own in found.items() if name != "test" for each in own}
    return found | {"test": [each for each in found.get("test", []) if each.text not in seen]}


def misses(probe: Probe, programs: Ordered[WrittenProgram], *, always: bool = False) -> list[float]:
    """The score of each finished program, as its monitor comes by it; always: the highest of its beginnings' scores."""
    found = []
    for each in programs:
        likely = probe.likely(each.rows[probe.site] if always else each.rows[probe.site][-1:])
        goal = given(each.prompt)[1]
        reached = torch.stack([part[:, wanted] for part, wanted in zip(likely, goal, strict=True)]).prod(dim=0)
        found.append(1 - float(reached.min()))
    return found


def evaluated(
    programs: Ordered[WrittenProgram], robot: Robot, train: Callable[[Ordered[WrittenProgram]], Probe], seed: int
) -> tuple[Probe, dict[str, Any]]:
    """A probe of programs, and its report; see `Evaluation.run`.

    Args:
        programs: what is learned from and tested on.
        robot: what they are for.
        train: makes the probe.
        seed: of the split and of the control.

    Returns:
        The probe, and its report of programs: which ones lead elsewhere. Under "states" stands of each field how many
        states it reads rightly, each class weighed alike, beside the most frequent one at that place of a program.
    """
    trial = Evaluation[WrittenProgram, Probe](
        train,
        misses,
        label=lambda each: not each.right,
        group=lambda each: each.prompt,
        # Begun elsewhere, so that none of its states is where it leads.
        relabel=lambda one, other: replace(one, prompt=other.prompt, right=other.right),
        baselines={
            "length": lambda each: len(each.text),
            "mean log-probability": lambda each: each.doubt,
        },
        limit=lambda probe: probe.threshold.value,
        words=lambda each: " ".join(each.text),
    )
    of = split(programs, seed)
    probe, report = trial.run([each for own in of.values() for each in own], seed, "programs")
    learned, test = of["train"], of["test"]
    known, usual = accuracies(probe, test, robot), _by_place(learned, test, robot)
    states = {name: {"read": round(known[name], 4), "most frequent at its place": usual[name]} for name in known}
    return probe, report | {"states": states}


def read_by_seed(
    programs: Ordered[WrittenProgram],
    robot: Robot,
    seeds: Ordered[int],
    *,
    further: Ordered[WrittenProgram] = (),
    meaning: str = ACTIONS,
    ahead: int = 0,
    **settings: Any,
) -> list[dict[str, float]]:
    """Of each seed how well the fields of distinct test programs are read (`accuracies`) by a probe of its own.

    further: programs that are only learned from; settings: of `train_program_probe`.
    """
    found = []
    for seed in seeds:
        how: dict[str, Any] = {"meaning": meaning, "ahead": ahead, "seed": seed, **settings}
        probe = train_program_probe([*programs, *further], robot, tuple(programs[0].rows), **how)
        found.append(accuracies(probe, split(programs, seed)["test"], robot, meaning, ahead))
    return found


def controls(
    programs: Ordered[WrittenProgram], untrained: Ordered[WrittenProgram], robot: Robot, seeds: Ordered[int]
) -> dict[str, dict[str, Any]]:
    """How well states are read under the language's semantics, under others, and off random weights.

    untrained: the same programs with rows of a model of random weights. Each row is the mean over fields of the
    balanced accuracy on distinct test programs, and the same by seed.
    """
    ways = {"its own semantics": (programs, ACTIONS), "random weights": (untrained, ACTIONS)}
    ways |= {f"other semantics {meaning}": (programs, meaning) for meaning in OTHER_MEANINGS}
    found = {}
    for name, (rows, meaning) in ways.items():
        by_seed = [float(np.mean(list(each.values()))) for each in read_by_seed(rows, robot, seeds, meaning=meaning)]
        found[name] = {"read": round(float(np.mean(by_seed)), 4), "by seed": [round(each, 4) for each in by_seed]}
    return found


def _by_place(learned: Ordered[WrittenProgram], test: Ordered[WrittenProgram], robot: Robot) -> dict[str, float]:
    """Of every field the share that is told by the place in the program alone, each class weighed alike."""
    seen = [states for each in learned for states in enumerate(each.states(robot)[:-1])]
    found = {}
    for at, name in enumerate(("x", "y", "facing")):
        counts: dict[int, Counter[int]] = {}
        for place, state in seen:
            counts.setdefault(place, Counter())[state[at]] += 1
        most = {place: count.most_common(1)[0][0] for place, count in counts.items()}
        pairs = [
            (most.get(place, 0), state[at]) for each in test for place, state in enumerate(each.states(robot)[:-1])
        ]
        guesses, labels = torch.tensor(pairs, dtype=torch.int64, device="cpu").T
        found[name] = round(_balanced(guesses, labels), 4)
    return found


def accuracies(
    probe: Probe, programs: Ordered[WrittenProgram], robot: Robot, meaning: str = ACTIONS, ahead: int = 0
) -> dict[str, float]:
    """Of every field: the share of states that are read rightly, each class weighed alike."""
    rows, labels = rows_and_states(programs, robot, probe.site, meaning, ahead)
    guesses = [part.argmax(dim=1) for part in probe.likely(rows)]
    return {name: _balanced(guesses[at], labels[:, at]) for at, name in enumerate(probe.fields)}


def rows_and_states(
    programs: Ordered[WrittenProgram], robot: Robot, site: str, meaning: str = ACTIONS, ahead: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, width] rows of actions, and [n, 3] the states that they, or the token `ahead` of them, lead to."""
    rows, labels = [], list[State]()
    for each in programs:
        states = each.states(robot, meaning)[:-1]
        count = len(states) - ahead
        if count > 0:
            rows.append(each.rows[site][:count])
            labels += states[ahead:]
    return torch.cat(rows), torch.tensor(labels, dtype=torch.int64, device="cpu")


def _balanced(guesses: torch.Tensor, labels: torch.Tensor) -> float:
    shares = [float((guesses[labels == kind] == kind).double().mean()) for kind in labels.unique()]
    return float(np.mean(shares))


@one_thread()
def _fit(
    data: torch.Tensor,
    labels: torch.Tensor,
    held: tuple[torch.Tensor, torch.Tensor],
    fields: dict[str, int],
    inner: tuple[int, ...],
    steps: int,
    lr: float,
    seed: int,
) -> tuple[dict[str, torch.Tensor], float]:
    """Tensors of the probe, and the mean over fields of its balanced accuracy on what was held out."""
    data = data.float()
    mean, scale = data.mean(dim=0), data.std(dim=0).clamp_min(1e-3)
    given_rows, draws = (data - mean) / scale, torch.Generator().manual_seed(seed)
    sizes, tensors = [data.shape[1], *inner, sum(fields.values())], dict[str, torch.Tensor]()
    for number, (into, out) in enumerate(pairwise(sizes)):
        tensors[f"weight.{number}"] = (
            torch.randn(out, into, generator=draws, dtype=torch.float32, device="cpu") / into**0.5
        ).requires_grad_()
        tensors[f"bias.{number}"] = torch.zeros(out, requires_grad=True, dtype=torch.float32, device="cpu")
    optimizer = torch.optim.AdamW(tensors.values(), lr=lr, weight_decay=1e-2)
    best, kept = -1.0, dict[str, torch.Tensor]()
    for step in range(steps):
        batch = torch.randint(len(data), (_BATCH,), generator=draws, device="cpu")
        logits = given_rows[batch]
        for number in range(len(sizes) - 1):
            logits = logits @ tensors[f"weight.{number}"].T + tensors[f"bias.{number}"]
            logits = logits.relu() if number + 2 < len(sizes) else logits
        losses = [
            torch.nn.functional.cross_entropy(part, labels[batch, at])
            for at, part in enumerate(logits.split(list(fields.values()), dim=1))
        ]
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
        if (step + 1) % _EVERY:
            continue
        now = {name: tensor.detach().clone() for name, tensor in tensors.items()} | {"mean": mean, "scale": scale}
        probe = Probe(now, "", "new", Threshold(0.5, 0.5, 0, ""), {"fields": fields})
        guesses = [part.argmax(dim=1) for part in probe.likely(held[0])]
        value = float(np.mean([_balanced(guess, held[1][:, at]) for at, guess in enumerate(guesses)]))
        if value > best:
            best, kept = value, now
    return kept, best
