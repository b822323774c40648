"""What a target shows of texts while it reads them: hidden states and most likely tokens, computed once and kept."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from decodery.core.topk import logsumexp, topk
from decodery.models.batch import Batch
from decodery.models.hooks import Tap
from decodery.models.loaders.store import Progress, check_room
from decodery.models.protocol import LanguageModel
from decodery.step.embedded import Embeddings, chunk

from .corpus import BYTES, Corpus, TrainingText
from .kept_files import keep, kept

SHARD = 32
"""Texts whose features are kept in one file."""
_PROCESSOR = torch.device("cpu")
_CACHED = 24
"""Shards that are kept in the memory of the processor."""
_TOGETHER = 8
"""Texts that a device reads in one pass; the processor reads them one by one, which takes less memory and no longer."""


@dataclass(frozen=True, eq=False)
class FeatureRows:
    """One text as the target reads it.

    after: [n, 1 + hidden], see `heads.head.EMBEDDED`; None for a text of tokens alone.

    Attributes:
        likely, logprobs: [n, k] int64 and float32, the k tokens the target finds most likely after each, at temperature
            1.
    """

    text: TrainingText
    states: dict[Tap, torch.Tensor]  # {tap: [n, width]} float16 after each of them
    likely: torch.Tensor
    logprobs: torch.Tensor
    behind: torch.Tensor | None = None


class FeatureStore:
    """The features of a corpus in the folder `out`, made where they are missing.

    Shards are read as needed. Of the memory that is free on a GPU at most half is used.

    Args:
        embeddings: What the prompts of the texts hold beside tokens, in turns; none for texts of tokens alone.
    """

    def __init__(
        self,
        target: LanguageModel,
        corpus: Corpus,
        taps: Sequence[Tap],
        out: Path,
        top: int,
        progress: Progress,
        embeddings: Sequence[Embeddings] = (),
        device: torch.device = _PROCESSOR,
    ) -> None:
        self.corpus, self.taps, self.embeddings = corpus, tuple(taps), embeddings
        made = f"{corpus.facts} {target.fingerprint} {list(taps)} {top}"
        self._paths = [out / f"{first // SHARD:05d}.safetensors" for first in range(0, len(corpus), SHARD)]
        missing = [number for number, path in enumerate(self._paths) if not path.is_file()]
        tokens = sum(len(text.tokens) for number in missing for text in _texts(corpus, number))
        check_room(out, tokens * (2 * len(taps) * target.config.hidden_size + BYTES * top))
        for number, path in enumerate(self._paths):
            if not path.is_file():
                held = [self._embeddings(text) for text in range(number * SHARD, (number + 1) * SHARD)]
                _write(path, target, list(_texts(corpus, number)), held, self.taps, top, made)
            progress("reading texts", min((number + 1) * SHARD, len(corpus)), len(corpus))
        self._read = lru_cache(maxsize=_cached(device, self._paths))(
            lambda number: _read(self._paths[number], corpus, number, self.taps, made, device)
        )

    def __len__(self) -> int:
        return len(self.corpus)

    def __getitem__(self, number: int) -> FeatureRows:
        found, held = self._read(number // SHARD)[number % SHARD], self._embeddings(number)
        return found if held is None else replace(found, behind=held.behind(0, len(found.text.tokens)))

    def prompts(self, numbers: Sequence[int]) -> list[Hashable]:
        """What tells the prompts of these texts apart."""
        shown = (held and held.digest for held in map(self._embeddings, numbers))
        return list(zip(self.corpus.prompts(numbers), shown, strict=True))

    def _embeddings(self, number: int) -> Embeddings | None:
        return self.embeddings[number % len(self.embeddings)] if self.embeddings else None


def _cached(device: torch.device, paths: Sequence[Path]) -> int:
    """How many shards are kept in memory: on a GPU as many as fit, for every step would wait for files."""
    if device.type != "cuda" or not paths:
        return _CACHED
    free, _ = torch.cuda.mem_get_info(device)
    # Token ids and log-probabilities take two times the bytes there that they take in a file.
    return max(1, free // 2 // (2 * max(path.stat().st_size for path in paths)))


def _texts(corpus: Corpus, shard: int) -> Iterator[TrainingText]:
    return (corpus[number] for number in range(shard * SHARD, min((shard + 1) * SHARD, len(corpus))))


def _write(
    path: Path,
    target: LanguageModel,
    texts: list[TrainingText],
    embeddings: list[Embeddings | None],
    taps: tuple[Tap, ...],
    top: int,
    made: str,
) -> None:
    states: dict[Tap, list[torch.Tensor]] = {tap: [] for tap in taps}
    likely, logprobs = [], []
    segments = [
        chunk(target, text.tokens.astype(np.int64), target.new_cache(), held)
        for text, held in zip(texts, embeddings, strict=False)
    ]
    together = 1 if target.device.type == "cpu" else _TOGETHER
    for first in range(0, len(segments), together):
        with torch.no_grad():
            scores = target.forward(Batch(segments[first : first + together]), taps=taps)
        ids, values = topk(scores.logits.float(), top)
        likely.append(torch.from_numpy(ids.astype(np.int32)))
        logprobs.append(torch.from_numpy(values - logsumexp(scores.logits.float(), values[:, 0])[:, None]).half())
        for tap in taps:
            states[tap].append(scores.hidden[tap].half().cpu())
    tensors = {f"states.{number}": torch.cat(states[tap]) for number, tap in enumerate(taps)}
    tensors |= {"likely": torch.cat(likely), "logprobs": torch.cat(logprobs)}
    keep(path, tensors, made)


def _read(
    path: Path, corpus: Corpus, shard: int, taps: tuple[Tap, ...], made: str, device: torch.device
) -> list[FeatureRows]:
    texts = list(_texts(corpus, shard))
    sizes = [len(text.tokens) for text in texts]
    with kept(path, made) as (tensors, _):
        states = [tensors[f"states.{number}"].to(device).split(sizes) for number in range(len(taps))]
        likely, logprobs = (tensors[name].to(device).split(sizes) for name in ("likely", "logprobs"))
    return [
        FeatureRows(
            text,
            {tap: states[at][number] for at, tap in enumerate(taps)},
            likely[number].long(),
            logprobs[number].float(),
        )
        for number, text in enumerate(texts)
    ]
