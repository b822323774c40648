"""Distil a hidden Markov model from texts that a model has written: Baum-Welch in its scaled form.

Lossless Compression with Probabilistic Circuits (2021) compresses with circuits whose marginals are exact; of those a
hidden Markov model is the one for texts of any length. It sees the tokens met most often, and all others as one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decodery.speculative.stores.hmm import HMM

from .corpus import Corpus
from .held_out import HeldOut, Measured
from .kept_files import keep, kept
from .kind import COUNT, POSITIVE, Bounded, Run, bounded, kind, option
from .kind_data import OwnTexts, own_texts, validation
from .loop import CHECKPOINT

_TEXTS = 64
"""Texts whose chances are held at a time."""


@dataclass(frozen=True)
class HMMRecipe(Bounded):
    """How a hidden Markov model is learned."""

    states: int = bounded(256, COUNT, "Hidden states.")
    tokens: int = bounded(4096, COUNT, "Number of the most frequent tokens that states tell apart.")
    iterations: int = bounded(20, COUNT, "Iterations of expectation-maximization.")
    prior: float = bounded(10.0, POSITIVE, "Weight of the prior, in occurrences of a state.")
    seed: int = option(0, "Random seed of texts and initial weights.")


@dataclass(frozen=True, eq=False)
class ExpectedCounts:
    """What is expected of the states of texts, see `counted`, shaped as in `HMM`."""

    start: torch.Tensor
    transition: torch.Tensor
    emission: torch.Tensor
    likelihood: float

    def most_likely(self, before: HMM, prior: float, common: torch.Tensor) -> HMM:
        """The model that makes these counts most likely.

        With a prior of 0 what no state says is never said again.

        Args:
            common: [K + 1] distribution of all texts.
        """
        even = torch.full_like(self.start, 1 / len(self.start))
        start, transition, emission = (
            _laws(counts + prior * law, old)
            for counts, law, old in (
                (self.start, even, before.start),
                (self.transition, even, before.transition),
                (self.emission, common, before.emission),
            )
        )
        return replace(before, start=start, transition=transition, emission=emission)


def _laws(counts: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Rows of counts as distributions; what was never met stays as it was."""
    sums = counts.sum(dim=-1, keepdim=True)
    return torch.where(sums > 0, counts / sums.clamp(min=torch.finfo(counts.dtype).tiny), before)


def counted(hmm: HMM, texts: Sequence[np.ndarray], *, only_likelihood: bool = False) -> ExpectedCounts:
    """Expected counts of states over texts [n] of columns, by scaled forward-backward recursions."""
    start, transition = torch.zeros_like(hmm.start), torch.zeros_like(hmm.transition)
    said, likelihood = torch.zeros_like(hmm.emission.T), 0.0
    says = hmm.emission.T.contiguous()
    for columns, known in _side_by_side(texts):
        length, count = columns.shape
        # After the end of a text every state is as good, and nothing is counted.
        chances = torch.where(known[..., None], says[columns], 1.0)
        sure, scales = torch.empty_like(chances), chances.new_empty(length, count)
        belief = hmm.start.expand(count, -1)
        for place in range(length):
            seen = belief * chances[place]
            scales[place] = seen.sum(dim=1)
            sure[place] = seen / scales[place, :, None]
            belief = sure[place] @ hmm.transition
        likelihood += float(scales.double().log().sum())
        if only_likelihood:
            continue
        behind = torch.ones_like(chances)
        coming = torch.empty_like(chances)
        for place in range(length - 1, 0, -1):
            coming[place] = chances[place] * behind[place] / scales[place, :, None]
            behind[place - 1] = coming[place] @ hmm.transition.T
        states = (sure * behind)[known]
        said.index_add_(0, columns[known], states)
        start += (sure[0] * behind[0]).sum(dim=0)
        follows = known[1:]
        transition += hmm.transition * (sure[:-1][follows].T @ coming[1:][follows])
    return ExpectedCounts(start, transition, said.T, likelihood)


def _side_by_side(texts: Sequence[np.ndarray]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Texts of like lengths: columns [length, b] int64, zeros after each end, and bool: what is text."""
    order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
    for first in range(0, len(order), _TEXTS):
        part = [texts[number] for number in order[first : first + _TEXTS]]
        columns = np.zeros((len(part[-1]), len(part)), dtype=np.int64)
        known = np.zeros(columns.shape, dtype=bool)
        for number, text in enumerate(part):
            columns[: len(text), number], known[: len(text), number] = text, True
        yield torch.from_numpy(columns), torch.from_numpy(known)


def begun(
    texts: Sequence[np.ndarray], vocab_size: int, recipe: HMMRecipe, vocabulary: str = ""
) -> tuple[HMM, torch.Tensor]:
    """Where learning begins, in float64, and the distribution [K + 1] of all texts.

    A state says one of the commonest tokens half of the time, each state another one, and otherwise what chance made of
    the distribution of all texts: so states differ from the first, and what follows a token is seen at once.

    Args:
        texts: [n] token ids each.
    """
    counts = np.bincount(np.concatenate(texts), minlength=vocab_size)
    kept = np.argsort(-counts, kind="stable")[: min(recipe.tokens, int((counts > 0).sum()))]
    # One more for each of the others: what was never met may come.
    others = torch.from_numpy(counts + 1.0)
    others[kept] = 0.0
    chance = torch.Generator().manual_seed(recipe.seed)
    common = torch.from_numpy(
        np.append(counts[kept], counts.sum() - counts[kept].sum() + (len(kept) < vocab_size)) + 0.0
    )
    common /= common.sum()
    states = recipe.states
    emission = common * torch.rand(states, len(common), generator=chance, dtype=torch.float64, device="cpu")
    emission /= emission.sum(dim=1, keepdim=True)
    own = torch.arange(states, device="cpu") % len(kept)
    emission = emission / 2 + torch.nn.functional.one_hot(own, len(common)) / 2
    transition = 1.0 + torch.rand(states, states, generator=chance, dtype=torch.float64, device="cpu")
    even = torch.full((states,), 1 / states, dtype=torch.float64, device="cpu")
    follows, shares = transition / transition.sum(dim=1, keepdim=True), others / others.sum().clamp(min=1.0)
    return HMM(even, follows, emission, torch.from_numpy(kept), shares, vocabulary), common


def train_hmm(run: Run, corpus: Corpus) -> HMM:
    """Learn a hidden Markov model of texts that the model wrote.

    Every twentieth text is held out. Kept is the iteration that gives one half of these most; the facts tell bits per
    token by iteration. Interrupted, it goes on after its last iteration, and ends the same.
    """
    target, out, recipe = run.loaded, run.out, run.of(HMMRecipe)
    vocab_size = target.model.vocab_size
    learned, held = corpus.split_for(vocab_size, target.name)
    texts = [corpus[number].tokens.astype(np.int64) for number in learned]
    hmm, common = begun(texts, vocab_size, recipe, target.model.config.vocabulary)
    columns = hmm.columns.numpy()
    known = HeldOut.of(held, corpus.prompts(held))
    spelt, judged = [columns[text] for text in texts], [columns[corpus[number].tokens] for number in known.choosing]

    # Of the tokens that share a column, what each has of it, which no iteration changes.
    def within(numbers: Sequence[int]) -> float:
        rare = [hmm.rest[corpus[number].tokens.astype(np.int64)] for number in numbers]
        return float(sum(shares[shares > 0].log().sum() for shares in rare))

    def bits(of: HMM) -> Measured:
        """Bits per token of texts that chose nothing, with an interval."""

        def figures(numbers: list[int]) -> dict[str, float]:
            said = counted(of, [columns[corpus[number].tokens] for number in numbers], only_likelihood=True).likelihood
            size = sum(len(corpus[number].tokens) for number in numbers)
            return {"bits per token": -(said + within(numbers)) / size / float(np.log(2))}

        return known.measured(figures, "bits per token", lambda number: len(corpus[number].tokens))

    path = out / "training" / CHECKPOINT
    made = json.dumps({"recipe": asdict(recipe), "corpus": corpus.facts}, sort_keys=True)
    now, best, objective, judgements = _begun_or_kept(path, made, hmm)
    size = sum(map(len, spelt))
    while len(objective) < recipe.iterations:
        counts = counted(now, spelt)
        objective.append((counts.likelihood + recipe.prior * _log_prior(now, common)) / size)
        now = counts.most_likely(now, recipe.prior, common)
        likelihood = counted(now, judged, only_likelihood=True).likelihood
        nats = (likelihood + within(known.choosing)) / sum(map(len, judged))
        if nats > max(judgements, default=-float("inf")):
            best = _tables(now)
        judgements.append(nats)
        # Copies: what is best may be what is now.
        tensors = {f"now.{name}": table.contiguous().clone() for name, table in _tables(now).items()}
        tensors |= {f"best.{name}": table.contiguous().clone() for name, table in best.items()}
        keep(path, tensors, made, run=json.dumps([objective, judgements]))
        run.progress("learning", len(objective), recipe.iterations)
    facts: dict[str, Any] = {
        "target": target.name,
        "command": run.command,
        "recipe": asdict(recipe),
        "texts": len(corpus),
        "tokens": size,
        "best": int(np.argmax(judgements)) + 1,
        "objective": objective,
        "held": judgements,
        "met": float(np.mean(np.concatenate(judged) < len(hmm.tokens))),
    }
    tables: dict[str, Any] = dict(best)
    facts["validation"] = known.report(bits(replace(hmm, **tables)), {"begun": bits(hmm)})
    single: dict[str, Any] = {name: table.float() for name, table in best.items()}
    found = replace(hmm, **single, rest=hmm.rest.float(), facts=facts)
    found.save(out / HMM.FILE)
    return found


def _log_prior(hmm: HMM, common: torch.Tensor) -> float:
    """What the prior adds to the likelihood, in nats: so the sum of both never falls."""
    even = 1 / len(hmm.start)
    said = torch.where(common > 0, common * hmm.emission.log(), 0.0)
    return float(even * (hmm.start.log().sum() + hmm.transition.log().sum()) + said.sum())


def _tables(hmm: HMM) -> dict[str, torch.Tensor]:
    return {"start": hmm.start, "transition": hmm.transition, "emission": hmm.emission}


def _begun_or_kept(path: Path, made: str, hmm: HMM) -> tuple[HMM, dict[str, torch.Tensor], list[float], list[float]]:
    """How far learning has come: the model now, the best tables, and nats per token before and after each iteration."""
    if not path.is_file():
        return hmm, {}, [], []
    with kept(path, made) as (tensors, about):
        objective, judgements = json.loads(about["run"])
        now, best = ({name: tensors[f"{part}.{name}"] for name in _tables(hmm)} for part in ("now", "best"))
        if any(now[name].shape != table.shape for name, table in _tables(hmm).items()):
            raise ValueError("shapes differ")
        found: dict[str, Any] = now
        return replace(hmm, **found), best, objective, judgements


@kind(
    "{states} states are ready: --drafter hmm:model={out}",
    (OwnTexts(), HMMRecipe()),
    "--states 256 --out hmm",
    model="whose texts are learned",
    file=HMM.FILE,
)
def _hmm(run: Run) -> Mapping[str, Any]:
    """Distil a hidden Markov model from the texts of MODEL, for --drafter hmm:model=DIR."""
    return validation(train_hmm(run, own_texts(run)))
