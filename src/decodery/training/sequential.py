"""Train what judges conversations as they grow, and conversations in which no single turn gives anything away."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.engine.monitoring import monitor_states
from decodery.llm.llm import LLM
from decodery.models.loaders.store import Progress, silent
from decodery.monitors.probe import Probe
from decodery.monitors.recorder import Recorder
from decodery.monitors.turns import TurnRecorder, Turns

from .activations import Answered, Sites
from .built_in import built_in_data
from .checkable import CheckableQuestion
from .evaluation import ALONE, CHOSE_NOTHING, Evaluation, MonitorContext, keep_evaluated
from .held_out import compared
from .kind import ARGUMENT, Data, Run, kind, option
from .labelled import LabelledChat, decoded, is_labelled, read_chats
from .lines import read_objects
from .probe import train_probe, worst
from .ranking import part_of
from .tensors import zeros

INGREDIENTS = tuple(built_in_data("ingredients"))
_TRIPLES = 20


@dataclass(frozen=True, slots=True)
class Talk:
    """What a user says, turn by turn.

    Attributes:
        said: The messages up to the user's last turn, where they are known with their answers; then only the whole is
            labelled, and of a conversation that is looked for nothing is learned from its beginnings.
    """

    turns: tuple[str, ...]
    completes: int | None  # The turn, from 0, after which the whole is what is looked for, None for never
    group: str  # What must not be both learned from and tested on
    said: tuple[dict[str, str], ...] = ()

    @classmethod
    def labelled(cls, chat: LabelledChat) -> Talk:
        """A conversation with a label of its own, up to the user's last turn."""
        last = max(number for number, each in enumerate(chat.messages) if each["role"] == "user")
        said = chat.messages[: last + 1]
        turns = tuple(each["content"] for each in said if each["role"] == "user")
        return cls(turns, len(turns) - 1 if chat.label else None, chat.group, said)

    def messages(self) -> list[dict[str, str]]:
        """As a chat that ends with the user's last turn."""
        if self.said:
            return list(self.said)
        found = []
        for turn in self.turns:
            found += [{"role": "user", "content": turn}, {"role": "assistant", "content": "Done."}]
        return found[:-1]


def triples() -> list[tuple[str, ...]]:
    """The secret sets: whoever has all of one is what is looked for."""
    random, found = np.random.default_rng(0), list[tuple[str, ...]]()
    while len(found) < _TRIPLES:
        drawn = tuple(sorted(random.choice(INGREDIENTS, 3, replace=False).tolist()))
        if drawn not in found:
            found.append(drawn)
    return found


def built_in_talks(count: int, seed: int = 0, *, injected: int = 0) -> list[Talk]:
    """Shopping lists of 4 to 8 things, half of which hold a secret triple.

    They come in fours: two that hold a triple, and the same two with one member of each exchanged for the other's. So
    what a single turn holds has the same distribution in both kinds, and no judge of single turns can tell them.
    """
    random, secret, found = np.random.default_rng(seed), triples(), list[Talk]()
    while len(found) < count:
        one, other = (list(secret[at]) for at in random.choice(len(secret), 2, replace=False))
        size = int(random.integers(4, 9))
        rest = [str(each) for each in random.choice(INGREDIENTS, size - 3, replace=False)]
        order = random.permutation(size).tolist()
        made = []
        for kept, last, positive in (
            (one, one[2], True),
            (other, other[2], True),
            (one, other[2], False),
            (other, one[2], False),
        ):
            things = [*kept[:2], last, *rest]
            made.append(([things[at] for at in order], positive))
        if any(len(set(things)) < size or (_complete(things) is not None) != positive for things, positive in made):
            continue
        group, asks = f"talk {len(found)}", random.choice(built_in_data("asks for ingredients"), size).tolist()
        places = sorted(random.integers(0, size, injected).tolist(), reverse=True)
        between = random.choice(built_in_data("other turns"), injected).tolist()
        for things, _ in made:
            turns, completes = [ask.format(thing) for ask, thing in zip(asks, things, strict=True)], _complete(things)
            for place, other_turn in zip(places, between, strict=True):
                turns.insert(place, other_turn)
                completes = completes + 1 if completes is not None and place <= completes else completes
            found.append(Talk(tuple(turns), completes, group))
    return found[:count]


def _complete(things: Ordered[str]) -> int | None:
    """The place of the thing that completes some triple first."""
    ends = [max(things.index(each) for each in triple) for triple in triples() if set(triple) <= set(things)]
    return min(ends, default=None)


def read_talks(path: Path) -> list[Talk]:
    """Of a file of JSON lines {"turns": [text, ...], "completes": number or null, "group": text}.

    Or of conversations with labels, see `read_chats`.
    """
    if is_labelled(path):
        return [Talk.labelled(each) for each in read_chats(path)]

    def read(entry: dict[str, Any]) -> Talk | None:
        given, completes, group = entry.get("turns"), entry.get("completes"), entry["group"]
        turns = tuple(given) if isinstance(given, list) else ()
        fine = bool(turns) and all(isinstance(each, str) and each.strip() for each in turns) and isinstance(group, str)
        known = completes is None or (type(completes) is int and 0 <= completes < len(turns))
        return Talk(turns, completes, group) if fine and known else None

    form = '{"turns": [text, ...], "completes": number or null, "group": text}, whose turns count from 0'
    return read_objects(path, form, read)


@dataclass(frozen=True, slots=True, eq=False)
class ReadConversation:
    """A talk as the model read it."""

    talk: Talk
    states: tuple[dict[str, torch.Tensor], ...]  # {site: [2 * width]} at the end of every turn, see `Turns`
    doubt: float = 0.0  # -log p of the first token that the model would answer, in nats


def hear(lm: LLM, talks: Ordered[Talk], sites: Ordered[str], progress: Progress = silent) -> list[ReadConversation]:
    """Let the model read them, as it would answer them."""
    found, watching = list[ReadConversation](), [TurnRecorder(tuple(sites)), Recorder((), 1)]
    how: dict[str, Any] = {"max_new_tokens": 1, "drafter": None, "monitor": watching, "ignore_eos": True}
    texts = decoded(lm, (lm.request_for(talk.messages(), **how) for talk in talks))
    for number, (talk, seq) in enumerate(zip(talks, texts, strict=True)):
        turns: Turns = monitor_states(seq)[0]
        _, ((numbers, _),) = monitor_states(seq)[1]
        found.append(ReadConversation(talk, turns.found, -float(numbers[-5])))
        progress("reading conversations", number + 1, len(talks))
    return found


def judged(heard: Ordered[ReadConversation]) -> list[Answered]:
    """Every beginning of every conversation as an example, "wrong" once the pattern is complete."""
    found = []
    for each in heard:
        unlabelled = len(each.states) - 1 if each.talk.said and each.talk.completes is not None else 0
        for number, states in enumerate(each.states[unlabelled:], start=unlabelled):
            wrong = each.talk.completes is not None and number >= each.talk.completes
            asked = CheckableQuestion(each.talk.turns[number], "", each.talk.group, "talk", f"{number}")
            rows = {site: row.float() for site, row in states.items()}
            none = zeros(0, 5)
            found.append(Answered(asked, wrong, [], none, rows, {}))
    return found


def highest(probe: Probe, heard: Ordered[ReadConversation]) -> list[float]:
    """The score of each conversation, as its monitor comes by it."""
    return [float(probe.score(torch.stack([states[probe.site] for states in each.states])).max()) for each in heard]


def train_sequential(
    heard: Ordered[ReadConversation],
    sites: Ordered[str],
    *,
    rate: float = 0.1,
    seed: int = 0,
    context: MonitorContext = ALONE,
) -> Probe:
    """A probe that tells complete beginnings from others.

    Its threshold is of whole conversations, as chats.

    Args:
        rate: Of conversations that never become what is looked for, those flagged at some turn at most, set on the
            calibration part.
    """
    found = train_probe(judged(heard), sites, "prompt", rate=rate, seed=seed, context=context)
    calibration = part_of(heard, lambda each: each.talk.group, seed, "calibration")
    harmless = [each for each in calibration if each.talk.completes is None]
    return replace(found, threshold=replace(context, chat=True).threshold(highest(found, harmless), rate))


def evaluated(heard: Ordered[ReadConversation], train: Callable[..., Probe], seed: int) -> tuple[Probe, dict[str, Any]]:
    """A probe of conversations, and its report; see `Evaluation.run`.

    Returns:
        Under "turns" stands how well it tells whether a beginning is complete, which the number of turns alone may tell
        nearly as well.
    """
    trial = Evaluation[ReadConversation, Probe](
        train,
        highest,
        label=lambda each: each.talk.completes is not None,
        group=lambda each: each.talk.group,
        relabel=relabelled,
        baselines={
            "number of turns": lambda each: len(each.talk.turns),
            "length in words": lambda each: sum(len(turn.split()) for turn in each.talk.turns),
            "log-probability of the answer's first token": lambda each: each.doubt,
        },
        limit=lambda probe: probe.threshold.value,
        words=lambda each: " ".join(each.talk.turns),
    )
    probe, report = trial.run(heard, seed, "conversations")
    turns = Evaluation[Answered, Probe](
        lambda items: probe,
        worst,
        label=lambda each: each.wrong,
        group=lambda each: each.question.group,
        relabel=lambda one, other: one,
        baselines={
            "number of the turn": lambda each: float(each.question.stratum),
            "length of the turn": lambda each: len(each.question.prompt),
        },
    )
    found = compared(*turns.tested(probe, judged(heard), seed))
    return probe, report | {"turns": {"tested on": CHOSE_NOTHING, **found}}


def relabelled(one: ReadConversation, other: ReadConversation) -> ReadConversation:
    """A conversation that is complete where another one is, or at its end where it has fewer turns."""
    place = other.talk.completes
    completes = None if place is None else min(place, len(one.talk.turns) - 1)
    return replace(one, talk=replace(one.talk, completes=completes))


@dataclass(frozen=True)
class Conversations(Data):
    """Conversations to learn from."""

    NOTE = """CONVERSATIONS holds one JSON object a line, {"turns": [text, ...], "completes": number or null, "group":
    text}: the turns of a user, and the number (from 0) of the turn that completes it. The default is built-in shopping
    lists, some of which hold a secret triple of items. Or it holds your own conversations with labels, {"messages":
    [...], "label": true or false, "group": text}."""

    conversations: Path | None = field(default=None, metadata=ARGUMENT)
    count: int = option(400, "Number of built-in conversations.")
    rate: float = option(0.1, "Maximum rate of false alarms.")
    seed: int = option(0, "Random seed of conversations, split and training.")

    def talks(self) -> list[Talk]:
        """The conversations."""
        if self.conversations is None:
            return built_in_talks(self.count, self.seed)
        return read_talks(self.conversations)

    def check(self) -> None:
        if self.count < 1:
            raise SettingsError(f"--count is at least 1, not {self.count}")
        self.talks()


@kind(
    "The probe is ready: --monitor sequential:probe={out}",
    (Conversations(), Sites()),
    "--out probe",
    model="that reads the conversations",
)
def _sequential(run: Run) -> dict[str, Any]:
    """Train a probe that detects when a conversation as a whole is what you look for, for the monitor sequential."""
    asked, lm = run.of(Conversations), run.lm
    sites = run.of(Sites).of(lm)
    context = MonitorContext.of(run, data=str(asked.conversations or "built-in conversations"))
    heard = hear(lm, asked.talks(), sites, run.progress)
    train = partial(train_sequential, sites=sites, rate=asked.rate, context=context)
    trained, report = evaluated(heard, train, asked.seed)
    return keep_evaluated(trained, report, run.out / Probe.FILE, site=trained.site)
