"""The entropy at which AdaDec pauses, learned from where a model's first choice is wrong on texts that are right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.store import Progress, silent
from decodery.models.protocol import LanguageModel
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.sampling.entropy import entropy

from .held_out import HeldOut, bootstrap, hold_out
from .kind import ARGUMENT, Data, Run, kind
from .lines import named_texts, read_objects
from .ranking import logistic
from .tensors import int_tensor

_CHUNK = 128
_HELD_OUT = 5
"""One solution in so many is held out."""


@dataclass(frozen=True)
class EntropyThreshold:
    """An entropy threshold and what it was learned from.

    Attributes:
        weight, bias: Of the logistic regression P(right) = sigmoid(weight * H + bias).
    """

    tau: float  # The entropy in nats above which the first choice is more likely wrong than right
    weight: float
    bias: float
    cutoff: float  # The probability that tau stands for
    accuracy: float  # Of telling right from wrong by it, on a balanced part that chose nothing; 0.5 is chance.
    interval: tuple[float, float]  # Of the accuracy, 95 %, over texts
    tested: int
    texts: int  # How many the tested tokens are of
    tokens: int  # How many were looked at, and wrong: how many of these were not the model's first choice
    wrong: int


def read_solutions(path: Path) -> list[tuple[str, ...]]:
    """Pairs (prompt, solution) of a file of JSON lines {"prompt", "solution" or "canonical_solution"}."""

    def read(entry: dict[str, Any]) -> tuple[str, ...] | None:
        return named_texts({"solution": entry.get("canonical_solution"), **entry}, "prompt", "solution")

    return read_objects(path, '{"prompt": text, "solution": text}', read)


@torch.no_grad()
def observe(
    model: LanguageModel, tokenizer: Tokenizer, solutions: Iterable[Sequence[str]], progress: Progress = silent
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Entropies [n] in nats before tokens of solutions, whether each is the first choice, and its prompt.

    One reading of every prompt with its solution; what does not fit the model's context is left out.
    """
    pairs, entropies, right, texts = list(solutions), [], [], list[int]()
    numbers = {prompt: number for number, (prompt, _) in enumerate(pairs)}
    for done, (prompt, solution) in enumerate(pairs):
        progress("reading solutions", done, len(pairs))
        tokens = tokenizer.encode(prompt + solution)[: model.config.max_positions]
        first = len(tokenizer.encode(prompt))
        cache = model.new_cache()
        for start in range(0, len(tokens) - 1, _CHUNK):
            chunk = tokens[start : min(start + _CHUNK, len(tokens) - 1)]
            rows = [row for row in range(len(chunk)) if start + row + 1 >= first]
            logits = model.forward(Batch([Segment.chunk(chunk, cache, logit_rows=rows)])).logits.float()
            cache.keep(range(len(chunk)))
            if rows:
                following = int_tensor([tokens[start + row + 1] for row in rows])
                entropies += entropy(logits.log_softmax(dim=-1)).flatten().tolist()
                right += (logits.argmax(dim=-1).cpu() == following).tolist()
                texts += [numbers[prompt]] * len(rows)
    progress("reading solutions", len(pairs), len(pairs))
    return np.array(entropies), np.array(right, dtype=bool), np.array(texts)


def fit(entropies: np.ndarray, right: np.ndarray, texts: np.ndarray, *, seed: int = 0) -> EntropyThreshold:
    """The threshold from entropies [n] and whether the first choice was right, classes balanced.

    A fifth of the texts is held out. Of one half of it the cut-off of 0.01 to 0.99 tells most right, the middle one of
    equals. The accuracy is that on the other half.

    Args:
        texts: What each token is of.
    """
    size = int(min(right.sum(), (~right).sum()))
    if size < 20:
        raise SettingsError(f"only {size} tokens are of the rarer kind, right or wrong, and 20 are needed: give more")
    draw = np.random.default_rng(seed)
    names = draw.permutation(np.unique(texts))
    learned, held = hold_out(names.tolist(), _HELD_OUT)
    halves = HeldOut.of(held)
    training, choosing, testing = (
        _balanced(right, np.flatnonzero(np.isin(texts, names[part])), draw)
        for part in (learned, halves.choosing, halves.tested)
    )
    if len(held) < 2 or not min(map(len, (training, choosing, testing))):
        raise SettingsError(
            f"{len(names)} solutions leave nothing to test: each part of them needs right and wrong tokens, give more"
        )
    rows, labels = torch.from_numpy(entropies[training]).double(), torch.from_numpy(right[training]).double()
    rows = torch.stack([rows, torch.ones_like(rows)], dim=1)
    weight, bias = logistic(rows, labels, 1e-9, line_search_fn="strong_wolfe").tolist()
    if weight >= 0:
        raise SettingsError("this model is not surer where it is right: no threshold of the entropy can be learned")
    cutoffs = np.arange(1, 100) / 100
    taus = (np.log(cutoffs / (1 - cutoffs)) - bias) / weight
    scores = ((entropies[choosing] < taus[:, None]) == right[choosing]).mean(axis=1)
    best = np.flatnonzero(scores == scores.max())
    chosen = int(best[len(best) // 2])
    tested = (entropies[testing] < taus[chosen]) == right[testing]
    sizes, hits = (np.bincount(texts[testing], counts) for counts in (None, tested))
    known = sizes > 0
    low, high = bootstrap((hits[known] / sizes[known]).tolist(), sizes[known].tolist())
    return EntropyThreshold(
        *(float(taus[chosen]), weight, bias, float(cutoffs[chosen]), float(tested.mean()), (low, high), len(tested)),
        texts=int(known.sum()),
        tokens=len(right),
        wrong=int((~right).sum()),
    )


def _balanced(right: np.ndarray, tokens: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """As many of these tokens that were right as wrong, drawn at random."""
    kinds = [draw.permutation(tokens[right[tokens] == kind]) for kind in (False, True)]
    return np.concatenate([kind[: min(map(len, kinds))] for kind in kinds])


@dataclass(frozen=True)
class Solutions(Data):
    """Right solutions."""

    solutions: Path = field(default=Path(), metadata=ARGUMENT)

    def check(self) -> None:
        read_solutions(self.solutions)


@kind(
    lambda run: f"The threshold is ready: --acceptance-rule adadec:tau={run.made.tau:.3f}",
    (Solutions(),),
    "solutions.jsonl",
    model="whose threshold is fitted",
    out="",
)
def _adadec_thresholds(run: Run) -> dict[str, Any]:
    """Fit the entropy above which the first choice of MODEL is more often wrong than right.

    SOLUTIONS holds one JSON object a line, {"prompt": ..., "solution": ...}; the key "canonical_solution" works
    too. The threshold is for the acceptance rule adadec.
    """
    pairs, loaded = read_solutions(run.of(Solutions).solutions), run.loaded
    run.made = found = fit(*observe(loaded.model, loaded.tokenizer, pairs, run.progress))
    said = {"tested on": f"{found.tested} tokens of {found.texts} prompts that chose nothing, as many right as wrong"}
    return {**said, **asdict(found), "baselines": {"always the same": {"accuracy": 0.5}}}
