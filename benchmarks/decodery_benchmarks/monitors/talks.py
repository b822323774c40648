"""Conversations of which no single turn tells anything: judged as they grow, and turn by turn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from decodery.llm.llm import LLM
from decodery.models.loaders.store import Progress
from decodery.training.ranking import logistic, parts, word_scores
from decodery.training.sequential import ReadConversation, built_in_talks, hear, highest, relabelled, train_sequential

from .figures import Judged, Row, detection
from .judge import Judge
from .settings import WatchSettings

NAME = "talks"
_INJECTED = (0, 2, 6)


def measure(lm: LLM, settings: WatchSettings, work: Path, progress: Progress) -> tuple[list[Row], list[Row], list[str]]:
    """Learned without injected turns, tested without and with some."""
    layers = lm.model.config.num_layers
    sites = tuple(dict.fromkeys(f"resid_post.{min(layers * at // 5, layers - 1)}" for at in range(1, 6)))
    # Fewer leave a calibration part of some seed too small for the rate.
    count = max(300, settings.prompts // 4)
    heard = hear(lm, built_in_talks(count, settings.seed), sites, progress)
    others = {
        injected: hear(lm, built_in_talks(max(32, count // 6), settings.seed + 1, injected=injected), sites, progress)
        for injected in _INJECTED[1:]
    }
    found: dict[str, list[Judged]] = {}
    turns, tokens = [], {"whole": 0, "incremental": 0}
    for each in heard:
        lengths = np.cumsum([len(turn.split()) for turn in each.talk.turns])
        tokens["whole"] += int(lengths.sum())
        tokens["incremental"] += int(lengths[-1])
    # Nothing of it is trained: one part is enough to tell what it is worth.
    part = parts([each.talk.group for each in heard], settings.seed)
    kinds = {kind: [each.talk for each in heard if (each.talk.completes is not None) == kind] for kind in (True, False)}
    shots = [kinds[True][0], kinds[False][0]]
    shown = {each.group for each in shots}
    asked = [each for each, own in zip(heard, part, strict=True) if own == "test" and each.talk.group not in shown]
    judges = {"prompted judge, zero-shot": Judge(lm), "prompted judge, few-shot": Judge(lm, shots)}
    for name, judge in judges.items():
        verdicts = list[list[float]]()
        for number, each in enumerate(asked):
            verdicts.append(judge.scores(each.talk.turns))
            progress(name, number + 1, len(asked))
        found[name] = [_judged(asked, [max(own) for own in verdicts])]
        found[f"{name}, last verdict"] = [_judged(asked, [own[-1] for own in verdicts])]
    for seed in range(settings.seed, settings.seed + settings.rounds):
        part = parts([each.talk.group for each in heard], seed)
        learned, test = (
            [each for each, own in zip(heard, part, strict=True) if own == name] for name in ("train", "test")
        )
        probe = train_sequential(heard, sites, rate=settings.rate, seed=seed)
        meaningless = _shuffled(heard, seed)
        empty = train_sequential(meaningless, sites, rate=settings.rate, seed=seed)
        asked = [each for each, own in zip(meaningless, part, strict=True) if own == "test"]
        labels = [each.talk.completes is not None for each in learned]
        by_words = {
            "bag of words, last turn": [each.talk.turns[-1] for each in (*learned, *test)],
            "bag of words, all turns": [" ".join(each.talk.turns) for each in (*learned, *test)],
        }
        limit = probe.threshold.value
        told = {
            "sequential": _judged(test, highest(probe, test), limit),
            "sequential, shuffled labels": _judged(asked, highest(empty, asked)),
            **{f"sequential, {n} injected": _judged(own, highest(probe, own), limit) for n, own in others.items()},
            **{
                name: _judged(test, word_scores(texts[: len(learned)], labels, texts[len(learned) :]))
                for name, texts in by_words.items()
            },
            "surface": _judged(test, _surface(learned, labels, test)),
        }
        for name, judged in told.items():
            found.setdefault(name, []).append(judged)
        for each in test:
            if each.talk.completes is not None:
                scores = [
                    highest(probe, [ReadConversation(each.talk, each.states[: at + 1])])[0]
                    for at in range(len(each.states))
                ]
                first = next((at for at, score in enumerate(scores) if score > limit), None)
                turns.append(None if first is None else first - each.talk.completes)
        progress("judging conversations", seed - settings.seed + 1, settings.rounds)
    stopped = [turn for turn in turns if turn is not None]
    act = {
        "testbed": NAME,
        "what": "flagging what completes",
        "conversations": len(turns),
        "flagged before it completes": sum(turn < 0 for turn in stopped),
        "at the turn": sum(turn == 0 for turn in stopped),
        "later": sum(turn > 0 for turn in stopped),
        "never": len(turns) - len(stopped),
        "words judged, whole history each turn": tokens["whole"],
        "words judged, as they come": tokens["incremental"],
    }
    read = ", ".join(f"{judge.rows} tokens ({name})" for name, judge in judges.items())
    note = f"talks: the prompted judges read {len(asked)} conversations in {read}, each token once"
    return [detection(NAME, name, seeds) for name, seeds in found.items()], [act], [note]


def _surface(learned: list[ReadConversation], labels: list[bool], asked: list[ReadConversation]) -> list[float]:
    """Logistic regression on the number of turns, and the words of all of them and of the last."""

    def features(heard: list[ReadConversation]) -> torch.Tensor:
        lengths = [[len(turn.split()) for turn in each.talk.turns] for each in heard]
        return torch.tensor(
            [[1.0, len(own), sum(own) / 10, own[-1]] for own in lengths], dtype=torch.double, device="cpu"
        )

    weight = logistic(
        features(learned), torch.tensor([float(each) for each in labels], dtype=torch.double, device="cpu")
    )
    return (features(asked) @ weight).tolist()


def _judged(heard: list[ReadConversation], scores: list[float], limit: float | None = None) -> Judged:
    wrong = [each.talk.completes is not None for each in heard]
    return Judged(
        scores, wrong, [each.talk.group for each in heard], [f"{len(each.talk.turns)}" for each in heard], limit
    )


def _shuffled(heard: list[ReadConversation], seed: int) -> list[ReadConversation]:
    """The same with labels of other conversations."""
    order = np.random.default_rng(seed).permutation(len(heard))
    return [relabelled(each, heard[at]) for each, at in zip(heard, order, strict=True)]
