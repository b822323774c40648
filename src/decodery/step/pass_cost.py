"""What a pass costs on this machine by its number of rows: measured once per machine, model and precision."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from decodery.core.errors import DecoderyError
from decodery.core.machine import describe
from decodery.models.batch import Batch, Segment
from decodery.models.cache.cache import KVCache
from decodery.models.footprint import precision
from decodery.models.loaders import store
from decodery.models.loaders.cache_use import use
from decodery.models.protocol import LanguageModel
from decodery.models.torch.encoder_decoder import EncoderDecoder

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CONTEXT = 128
"""Tokens in the cache while a pass is timed."""
FAR_ROWS, FAR_CONTEXT = (1, 16), 1024
"""Rows that are timed after a long text too, to tell what its tokens cost."""
_SECONDS = 1.0
"""What measuring a model may take, beyond the passes that a curve cannot be without."""
_FAR = ((FAR_CONTEXT, FAR_ROWS[0]), *((FAR_CONTEXT, rows) for rows in FAR_ROWS))
"""Passes after a long text. The first one through so large a cache meets memory that was never touched: of a single one
a text of 1,024 tokens looked ten times as dear as it is."""
_ORDER = (
    *((CONTEXT, rows) for rows in (1, 8, 16)),
    *_FAR,
    *((CONTEXT, rows) for rows in (64, 4, 32, 2, 24, 12, 48, 3, 6)),
)
"""Contexts and `ROWS` in the order they are timed in: who runs out of time has the outline."""
_NEEDED = 2
"""How many of them, from the first on, are timed whatever they take: through one point goes any line."""
_PROBED, _PROBE_SECONDS = ((CONTEXT, 1), (CONTEXT, 8), *_FAR[:2]), 0.2
_DISTURBED = 0.7
_REPEATS = 3
_KEPT = ("processor", "cores", "threads", "gpus", "torch", "kernels", "decodery")

_known: WeakKeyDictionary[LanguageModel, CostCurve] = WeakKeyDictionary()
"""Curves of the models in this process, also where no folder can keep them."""


@dataclass(frozen=True)
class CostCurve:
    """Time of a pass by its number of rows and the tokens before them.

    Attributes:
        rows: Ascending, at least one.
        times: Seconds of each after `CONTEXT` tokens.
        token, row_token: Seconds that every further token in the cache costs, once and for every row that attends to
            it.
    """

    rows: tuple[int, ...]
    times: tuple[float, ...]
    token: float = 0.0
    row_token: float = 0.0

    def __post_init__(self) -> None:
        ascending = all(0 < a < b for a, b in zip(self.rows, self.rows[1:], strict=False))
        if not self.rows or len(self.rows) != len(self.times) or not ascending or min(self.times) <= 0:
            raise ValueError("a cost curve needs ascending numbers of rows and a positive time for each")
        if not (0 <= self.token < np.inf and 0 <= self.row_token < np.inf):
            raise ValueError("a further token cannot make a pass cheaper")

    @classmethod
    def of(cls, timings: Mapping[int, Sequence[float]], far: Mapping[int, Sequence[float]] | None = None) -> CostCurve:
        """From repeated timings by number of rows: the shortest of each, made ascending.

        What else runs on the machine only ever adds time, so the shortest timing is the nearest to the truth; and fewer
        rows never need longer than more rows, so a point above a later one is a disturbance and is lowered.

        Args:
            timings: Seconds of each repeat, by number of rows.
            far: Timings of `FAR_ROWS` after `FAR_CONTEXT` tokens; without them a longer text costs nothing.
        """
        rows = sorted(timings)
        shortest = np.array([min(timings[n]) for n in rows])
        lowered = np.minimum.accumulate(shortest[::-1])[::-1]
        near = cls(tuple(rows), tuple(lowered.tolist()))
        if not far or set(far) < set(FAR_ROWS):
            return near
        few, many = ((min(far[n]) - near.seconds(n)) / (FAR_CONTEXT - CONTEXT) for n in FAR_ROWS)
        row_token = max(0.0, (many - few) / (FAR_ROWS[1] - FAR_ROWS[0]))
        return cls(near.rows, near.times, max(0.0, few - row_token), row_token)

    def seconds(self, rows: float, context: int = CONTEXT) -> float:
        """Time of a pass over `rows` rows after `context` tokens.

        A straight line between measured numbers of rows, and on along the last one.
        """
        near = float(self.times_of(np.array([rows]))[0])
        return near + max(0, context - CONTEXT) * (self.token + self.row_token * rows)

    def times_of(self, rows: np.ndarray) -> np.ndarray:
        """Times of passes over `rows` [n] after `CONTEXT` tokens: [n] float64."""
        known = np.interp(rows, self.rows, self.times)
        if len(self.rows) == 1:
            return known
        slope = (self.times[-1] - self.times[-2]) / (self.rows[-1] - self.rows[-2])
        return known + slope * np.maximum(rows - self.rows[-1], 0)


def cost_curve(model: LanguageModel) -> CostCurve:
    """The curve of this model on this machine.

    The first call measures for at most about a second and keeps the result. It says so where a person is watching. A
    kept curve is compared with a few passes first: where these are much faster, it was measured on a busy machine.
    """
    if model in _known:
        return _known[model]
    path = _path(model)
    with suppress(OSError, ValueError, TypeError, KeyError):
        kept = _read(json.loads(path.read_text(encoding="utf-8")))
        if not _too_dear(kept, _timings(model, _PROBED, _PROBE_SECONDS, needed=1)):
            _known[model] = kept
            use(path.parent)()
            return kept
    with store.terminal_progress(counts=True) as progress:
        timings = _timings(model, _ORDER * _REPEATS, _SECONDS, needed=_NEEDED, progress=progress)
    curve = CostCurve.of(timings[CONTEXT], timings[FAR_CONTEXT])
    # Where nothing can be written the curve is measured again next time.
    with suppress(DecoderyError):
        remember(model, curve)
    return curve


def remember(model: LanguageModel, curve: CostCurve) -> None:
    """Keep a curve in the user's cache folder in place of an earlier one."""
    _known[model] = curve
    kept = {
        "machine": _machine(),
        "model": _identity(model),
        "rows": curve.rows,
        "seconds": curve.times,
        "token": curve.token,
        "row_token": curve.row_token,
    }
    store.write_text(_path(model), json.dumps(kept, indent=1))


def _read(kept: dict[str, Any]) -> CostCurve:
    return CostCurve(tuple(kept["rows"]), tuple(kept["seconds"]), kept["token"], kept["row_token"])


def measured() -> list[tuple[dict[str, str], CostCurve]]:
    """The kept curves of this machine in its present state, with what identifies each model."""
    found = []
    for path in sorted((store.home() / "cost").glob("*.json")):
        # A file that a person has edited or that another version wrote is measured anew when it is needed.
        with suppress(OSError, ValueError, TypeError, KeyError):
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["machine"] == _machine():
                found.append((dict(kept["model"]), _read(kept)))
    return found


@torch.no_grad()
def time_passes(
    models: Mapping[str, LanguageModel],
    rows: Sequence[int],
    *,
    context: int = CONTEXT,
    enough: Callable[[int], bool],
) -> dict[str, dict[int, list[float]]]:
    """Seconds of single passes by model and number of rows.

    Repeats are interleaved so that disturbances affect all alike. Every pass scores a chain of tokens after `context`
    tokens in the cache and wants all logits. Numbers of rows beyond a model's context are left out.

    Args:
        models: What is timed, by name.
        rows: Numbers of rows.
        context: Tokens in the cache before a pass.
        enough: Called with the number of rounds done, says when to stop.
    """
    prepared = {name: _prepare(model, context, max(rows)) for name, model in models.items()}
    cases = [
        (name, n)
        for n in sorted(set(rows))
        for name, model in models.items()
        if n + prepared[name].next_position <= model.config.max_positions
    ]
    timings: dict[str, dict[int, list[float]]] = {name: {n: [] for m, n in cases if m == name} for name in models}
    for name, n in cases:
        _time(models[name], prepared[name], n)
    generator = np.random.default_rng(0)
    done = 0
    while not enough(done):
        for index in generator.permutation(len(cases)):
            name, n = cases[index]
            timings[name][n].append(_time(models[name], prepared[name], n))
        done += 1
    return timings


def _too_dear(curve: CostCurve, timings: Mapping[int, Mapping[int, Sequence[float]]]) -> bool:
    """Whether passes are much faster than the curve says, which nothing but a disturbance of it can explain.

    timings: by context and number of rows.
    """
    return any(
        min(times) < _DISTURBED * curve.seconds(rows, context)
        for context, behind in timings.items()
        for rows, times in behind.items()
    )


def time_far(models: Mapping[str, LanguageModel], repeats: int) -> dict[str, dict[int, list[float]]]:
    """`time_passes` of `FAR_ROWS` after `FAR_CONTEXT` tokens; nothing for models whose context is shorter."""
    long = {name: model for name, model in models.items() if model.config.max_positions >= FAR_CONTEXT + FAR_ROWS[-1]}
    timings = time_passes(long, FAR_ROWS, context=FAR_CONTEXT, enough=lambda done: done >= repeats) if long else {}
    return {name: timings.get(name, {}) for name in models}


@torch.no_grad()
def _timings(
    model: LanguageModel,
    cases: Sequence[tuple[int, int]],
    seconds: float,
    *,
    needed: int,
    progress: store.Progress = store.silent,
) -> dict[int, dict[int, list[float]]]:
    """Seconds of single passes by context and number of rows, those of `cases` in the order given.

    A pass that would go beyond `seconds`, by what those before it took, is left out, the first `needed` excepted; so
    are contexts and numbers of rows beyond the model's context.
    """
    begin, most = perf_counter(), model.config.max_positions
    widest = {context: max(rows for each, rows in cases if each == context) for context, _ in cases}
    # After less than a far context nothing is learned of far ones.
    caches = {
        context: _prepare(model, context, rows)
        for context, rows in widest.items()
        if context == CONTEXT or context + rows <= most
    }
    cases = [(context, n) for context, n in cases if context in caches and n + caches[context].next_position <= most]
    timings: dict[int, dict[int, list[float]]] = {CONTEXT: {}, FAR_CONTEXT: {}}
    for number, (context, n) in enumerate(cases):
        progress("measuring what passes take on this machine, once", number, len(cases))
        if number < needed or perf_counter() - begin + _expected(timings[CONTEXT], n) <= seconds:
            timings[context].setdefault(n, []).append(_time(model, caches[context], n))
    return timings


def _expected(timings: Mapping[int, Sequence[float]], rows: int) -> float:
    """At most about what a pass over `rows` rows will take, after those that were timed."""
    shortest = {n: min(times) for n, times in timings.items()}
    enough = [seconds for n, seconds in shortest.items() if n >= rows]
    return min(enough) if enough else shortest[max(shortest)] * rows / max(shortest)


def _prepare(model: LanguageModel, context: int, rows: int) -> KVCache:
    """A cache that holds `context` tokens, fewer where the model's own context is too short for that and the rows.

    Its keys and values are zeros: what they are does not matter to the clock, and reading 1,024 tokens takes longer
    than all that is timed.
    """
    cache = model.new_cache()
    length = max(1, min(context, model.config.max_positions - rows))
    cache.reserve(np.arange(length))
    like = cache.pages.nothing
    layers, _, kv_heads, _, _ = like.shape
    zeros = torch.zeros(length, kv_heads, model.config.head_dim, dtype=torch.float32, device=like.device)
    for layer in range(layers):
        cache.write(layer, zeros, zeros)
    cache.keep(range(length))
    if isinstance(model, EncoderDecoder):
        # With a source as long as the text.
        cache.memory = model.remembered(zeros.new_zeros(length, model.config.hidden_size))
    return cache


def _time(model: LanguageModel, cache: KVCache, rows: int) -> float:
    batch = Batch([Segment.chunk(_tokens(model, rows), cache)])
    begin = perf_counter()
    model.forward(batch)
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    seconds = perf_counter() - begin
    cache.keep([])
    return seconds


def _tokens(model: LanguageModel, count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(model.vocab_size, size=count)


def _path(model: LanguageModel) -> Path:
    text = json.dumps([_machine(), _identity(model)], sort_keys=True)
    return store.home() / "cost" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _machine() -> dict[str, Any]:
    facts = describe()
    return {name: facts[name] for name in _KEPT}


def _identity(model: LanguageModel) -> dict[str, str]:
    return {
        "kind": type(model).__name__,
        "config": repr(model.config),
        "precision": precision(model),
        "device": str(model.device),
    }
