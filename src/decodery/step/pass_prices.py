"""What steps take by rows, texts and context: a prior by the model's size, corrected by every step as it happens."""

from __future__ import annotations

from bisect import bisect_left as bisect
from ctypes import addressof
from math import exp, log
from weakref import WeakKeyDictionary

import numpy as np

from decodery.core.native.kernels import address, library
from decodery.core.native.structs import PricesStruct
from decodery.models.protocol import LanguageModel

from .prior_prices import PriorPrices, prior_prices

_NODES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512])
"""Drafted rows of a step that have a correction of their own; between two of them it is a mean of both."""
_TEXTS, _CONTEXTS = 8, 8
"""Numbers of texts and lengths of contexts, in units of `_CONTEXT` tokens, by their magnitude."""
_CONTEXT = 256
_NEAR = (0.3, 0.15, 0.3)
"""What a step says about the next higher or lower number of texts, context and drafted rows, beside one of its own."""
_OTHERS = 0.1
"""What all other kinds together count for, beside one step of the kind itself."""
_PLAIN = 5
"""Steps without drafts that have to be known where several texts share a pass: one in a hundred steps is one."""
_PRIOR = 0.001
"""What the prior counts for, beside a step of the same kind."""
_RECENT = 20.0
"""How many of the latest steps of a kind its correction is the mean of."""
_STALE = 0.998
"""What a kind of step counts for after every other step: what was dear on a busy machine is tried again one day."""
_HIGH = 1e12
"""A unit of weights at which they are all written anew."""
_MACHINE = 0.2
"""How fast the price of all steps together follows the latest."""
_OUTLIER, _TRUSTED = 0.3, 4
"""A step that differs by more (of a logarithm) counts as if by this much; after so many in a row it is believed."""
_LATE = 0.5
"""What counts of a surprise that a step took longer: whatever else runs on the machine only ever adds time."""
MARGIN = 1.01
"""Drafts have to be faster than none by this factor: prices are known to a percent or so."""
ROWS = 1025
"""Numbers of rows that have a price."""
_COUNTS = np.arange(ROWS, dtype=np.float64)
_LOGS = np.log1p(_COUNTS)
_BORDERS = (np.sqrt((_NODES[:-1] + 1.0) * (_NODES[1:] + 1.0)) - 1.0).tolist()
"""Drafted rows from which on the next of `_NODES` is nearer, by its logarithm."""


class PassPrices:
    """What steps take, learned from the steps themselves; nothing is measured beside them.

    A step is the prior times a factor of the machine, which all steps share and which changes fast, times one of its
    kind, which changes slowly: kinds are numbers of texts, lengths of context and numbers of drafted rows, each kind
    telling something about its neighbours. Prices decide only how much is drafted, never which text comes out.

    Args:
        prior: What is believed before the first step.
    """

    def __init__(self, prior: PriorPrices) -> None:
        self.prior = prior
        self._machine, self._steps = 0.0, 0
        # Weights are in units of the latest step's, which grows: nothing needs to be done to those of others.
        self._gain = 1.0
        shape = _TEXTS, _CONTEXTS, len(_NODES)
        self._factors, self._weights, self._counts = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self._outliers: dict[tuple[int, ...], int] = {}
        self._curves: dict[tuple[int, int], tuple[int, np.ndarray]] = {}

    def seconds(self, texts: int, context: float, nodes: int = ROWS - 1) -> np.ndarray:
        """Seconds [nodes + 1] of steps with 0, 1, 2, ... drafted rows of all texts together; never falling.

        Args:
            texts: How many take part, each with a row of its own beside those that are drafted.
            context: Tokens in the cache of each, on average.
            nodes: Drafted rows at most.
        """
        key = _magnitude(texts, 1, _TEXTS), _magnitude(context, _CONTEXT, _CONTEXTS)
        known = self._curves.get(key)
        # A step changes them by little: after the first ones not each is worth another look.
        if known is None or self._steps - known[0] >= min(8, 1 + self._steps // 32):
            prior = np.log(self.prior.seconds(_NODES + float(texts), texts, context))
            factors = monotone(prior + self._corrections(*key), self._weights[key] / self._gain + _OTHERS) - prior
            corrections = np.exp(np.interp(_LOGS, np.log1p(_NODES), factors))
            known = self._curves[key] = self._steps, corrections
        prior = self.prior.seconds(_COUNTS[: nodes + 1] + texts, texts, context)
        prior *= known[1][: nodes + 1]
        prior *= exp(self._machine)
        return np.maximum.accumulate(prior, out=prior)

    def learn(self, rows: int, texts: int, context: float, seconds: float) -> None:
        """A step of so many texts took so long.

        Args:
            rows: Of its pass; what is beyond one for each text was drafted, or read of a prompt.
            texts, context: As in `seconds`.
            seconds: All of it, drafting and choosing included.
        """
        kind = _magnitude(texts, 1, _TEXTS), _magnitude(context, _CONTEXT, _CONTEXTS)
        place = (*kind, bisect(_BORDERS, max(rows - texts, 0)))
        took = log(max(seconds, 1e-9) / self.prior.of(rows, texts, context))
        if self._steps == 0:
            self._machine = took
        known = float(self._factors[place] if self._counts[place] else self._corrections(*kind)[place[2]])
        surprise = took - self._machine - known
        far = abs(surprise) > _OUTLIER
        outliers, count = self._outliers.get(place, 0), float(self._counts[place])
        if not far:
            outliers = 0
        else:
            outliers = max(outliers, 0) + 1 if surprise > 0 else min(outliers, 0) - 1
        if abs(outliers) >= _TRUSTED:
            outliers, count = 0, 0.0
        elif count:
            surprise = min(max(surprise, -_OUTLIER), _OUTLIER) * (_LATE if surprise > 0 else 1.0)
        count = min(count + 1, _RECENT)
        # What all steps share shows where a kind that is known well takes another time than before.
        shared = _MACHINE * surprise if count >= _TRUSTED else 0.0
        self._machine += shared
        self._factors[place] = known + (surprise - shared) / count
        self._outliers[place], self._counts[place] = outliers, count
        self._gain /= _STALE
        self._weights[place] += self._gain
        if self._gain > _HIGH:
            self._weights /= self._gain
            self._gain = 1.0
        self._steps += 1
        if count < _TRUSTED:
            self._curves.clear()

    def knows_plain(self, texts: int, context: float) -> bool:
        """Whether steps of so many texts without drafts were seen lately, which drafts have to be faster than.

        Without this a price that is too high for all steps alike would keep every step drafting.
        """
        place = _magnitude(texts, 1, _TEXTS), _magnitude(context, _CONTEXT, _CONTEXTS)
        return bool(self._weights[(*place, 0)] >= self._gain * (_PLAIN if texts > 1 else 0.5))

    def _corrections(self, texts: int, context: int) -> np.ndarray:
        """Logarithms of factors by `_NODES`."""
        near = _NEAR[0] ** np.abs(np.arange(_TEXTS) - texts)[:, None] * _NEAR[1] ** np.abs(
            np.arange(_CONTEXTS) - context
        )
        near /= self._gain
        weights = np.einsum("tc,tcn->n", near, self._weights)
        sums = np.einsum("tc,tcn->n", near, self._weights * self._factors)
        numbers = np.arange(len(_NODES))
        alike = _NEAR[2] ** np.abs(numbers[:, None] - numbers)
        factors = alike @ sums / (alike @ weights + _PRIOR)
        # Of a kind that was seen itself, little is left to what others tell.
        own = self._weights[texts, context] / self._gain
        found: np.ndarray = (_OTHERS * factors + own * self._factors[texts, context]) / (_OTHERS + own)
        return found

    def token_seconds(self, rows: np.ndarray) -> np.ndarray:
        """Seconds [n] that a further token in a text's cache adds to passes over `rows` [n] of its rows."""
        return (self.prior.token + self.prior.row_token * rows) * exp(self._machine)


class NativePrices(PassPrices):
    """`PassPrices` in native calls: what a step with drafts takes beside its pass.

    Args:
        prior: What is believed before the first step.
    """

    def __init__(self, prior: PriorPrices) -> None:
        super().__init__(prior)
        lib = library()
        assert lib is not None
        self._lib, shape = lib, self._factors.shape
        self._curve, self._made = np.zeros(shape), np.full(shape[:2], -1, dtype=np.int64)
        self._late = np.zeros(shape, dtype=np.int32)
        arrays = self._factors, self._weights, self._counts, self._curve, self._late, self._made
        own = prior.read, prior.row, prior.token, prior.row_token, prior.text
        self._struct = PricesStruct(*(array.ctypes.data for array in arrays), *own, 0.0, 1.0, 0)
        self._at = addressof(self._struct)

    @property
    def address(self) -> int:
        """Where the `Prices` of csrc/abi.h stand, as long as this object lives."""
        return self._at

    def seconds(self, texts: int, context: float, nodes: int = ROWS - 1) -> np.ndarray:
        found = np.empty(nodes + 1)
        self._lib.decodery_prices(self._at, texts, context, nodes, found.ctypes.data)
        return found

    def learn(self, rows: int, texts: int, context: float, seconds: float) -> None:
        self._lib.decodery_price(self._at, rows, texts, context, seconds)
        self._machine, self._gain = self._struct.machine, self._struct.gain


_known: WeakKeyDictionary[LanguageModel, tuple[PassPrices, Promises]] = WeakKeyDictionary()
"""Of the models in this process: what one engine has learned, the next one begins with."""


def prices_of(model: LanguageModel) -> tuple[PassPrices, Promises]:
    """What is known of the model's steps, and of what drafts for it promise."""
    if model not in _known:
        kind = PassPrices if library() is None else NativePrices
        _known[model] = kind(prior_prices(model)), Promises()
    return _known[model]


def monotone(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The nearest values that never fall: neighbours that do are replaced by their weighted mean."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        block = value, weight, 1
        while blocks and blocks[-1][0] > block[0]:
            mean, heavy, count = blocks.pop()
            whole = heavy + block[1]
            block = (mean * heavy + block[0] * block[1]) / whole, whole, count + block[2]
        blocks.append(block)
    return np.repeat([mean for mean, _, _ in blocks], [count for _, _, count in blocks])


def _magnitude(value: float, unit: int, most: int) -> int:
    return min(int(value / unit).bit_length(), most) - 1 if value >= unit else 0


class Promises:
    """How much of what drafts promise comes true, and what they take beside the pass, by texts in a pass.

    The most likely of many candidates are those that were taken for too likely more often than not, and a draft that
    keeps half of what it promises may lose time. A promise is the sum of its nodes' chances.
    """

    def __init__(self) -> None:
        self._of, self._looks = np.full((2, _BITS), _BELIEVED), np.zeros(_BITS)

    def rate(self, texts: int) -> float:
        """What a promised token is worth."""
        kept, promised = self._of[:, texts.bit_length()].tolist()
        return float(min(kept / promised, 1.0))

    def learn(self, texts: int, promised: float, kept: int) -> None:
        """Of a step of so many texts whose drafts promised so many tokens, so many became text."""
        known = self._of[:, texts.bit_length()]
        known *= REMEMBERED
        known += kept, promised

    def look(self, texts: int) -> float:
        """Expected seconds of looking for drafts of so many texts and of learning from them; 0 at first."""
        return float(self._looks[texts.bit_length()])

    def looked(self, texts: int, seconds: float) -> float:
        """A look has taken so long; returns what the next one is expected to take."""
        at, known = texts.bit_length(), self.look(texts)
        # Whatever else runs on the machine only ever adds time.
        rate = _LOOK if seconds > known > 0 else 0.5 if known else 1.0
        self._looks[at] = known + (min(seconds, 4 * known or seconds) - known) * rate
        return self.look(texts)

    def addresses(self, texts: int) -> tuple[int, int]:
        """Where native calls find the tokens of so many texts that came true and that were promised."""
        kept, promised = self._of
        return address(kept[texts.bit_length() :], np.float64, None), address(
            promised[texts.bit_length() :], np.float64, None
        )


_BELIEVED, REMEMBERED = 20.0, 0.98
"""Tokens that promises are believed for at first, and what a step counts for after each later one."""
_LOOK = 0.2
"""How fast what looking takes follows the latest."""
_BITS = 65
