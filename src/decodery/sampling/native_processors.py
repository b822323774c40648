"""Processors as the native kernels apply them: a sampler's settings, and the token counts and masks of a text."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any

import numpy as np

from decodery.core.native.structs import ProcessorStruct

from .banned import Banned
from .constraint import Constrained, Constraint
from .frequency_penalty import FrequencyPenalty
from .history import TokenCounts
from .logit_bias import LogitBias
from .logits_processor import LogitsProcessor, Stage
from .min_new_tokens import MinNewTokens
from .min_p import MinP
from .presence_penalty import PresencePenalty
from .repetition_penalty import RepetitionPenalty
from .sampler import Sampler
from .temperature import Temperature
from .top_k import TopK
from .top_p import TopP


class Shape(IntEnum):
    """Operation of a processor: `Shape` in csrc/abi.h."""

    MASK, NOT_BEFORE, BIAS, REPETITION, FREQUENCY, PRESENCE, TEMPERATURE, TOP_K, TOP_P, MIN_P = range(10)


_VALUES: dict[type[LogitsProcessor], tuple[Shape, Callable[[Any], float]]] = {
    RepetitionPenalty: (Shape.REPETITION, lambda each: each.penalty),
    FrequencyPenalty: (Shape.FREQUENCY, lambda each: each.penalty),
    PresencePenalty: (Shape.PRESENCE, lambda each: each.penalty),
    Temperature: (Shape.TEMPERATURE, lambda each: each.t),
    TopK: (Shape.TOP_K, lambda each: each.k),
    TopP: (Shape.TOP_P, lambda each: each.p),
    MinP: (Shape.MIN_P, lambda each: each.p),
}


class NodeMasks:
    """The masks of a constraint after the nodes of one text's tree, as far as they have been computed.

    Args:
        struct: The processor whose `ids` they are.
        constraint: The constraint.
        vocab_size: Size of the model's vocabulary.
    """

    def __init__(self, struct: ProcessorStruct, constraint: Constraint, vocab_size: int) -> None:
        self._struct, self._constraint, self._vocab_size = struct, constraint, vocab_size
        struct.value = math.inf if constraint.bonus is None else constraint.bonus
        self._states: dict[int, Any] = {}
        self._bits: list[np.ndarray] = []
        self._widen(1)

    def _widen(self, nodes: int) -> None:
        self._places = np.zeros(nodes, dtype=np.int64)
        self._struct.ids, self._struct.count = self._places.ctypes.data, nodes

    def root(self, state: Any) -> None:
        """Begin a tree after whose root the constraint is in this state."""
        self._states = {0: state}
        self._bits.clear()
        self._places.fill(0)

    def compute(self, node: int, parent: int, token: int) -> None:
        """Compute the mask after a node.

        Args:
            node: Its number.
            parent: The number of its parent, whose mask has been computed; any for the root.
            token: The node's token.

        Raises:
            ConstraintError: As `Constraint.bits`.
        """
        if node:
            self._states[node] = self._constraint.advance(self._states[parent], token)
        found = self._constraint.bits(self._states[node], self._vocab_size)
        self._bits.append(found)
        if node >= len(self._places):
            known = self._places
            self._widen(2 * node)
            self._places[: len(known)] = known
        self._places[node] = found.ctypes.data


class NativeProcessors:
    """The processors of one text, as an array of structs at a fixed address.

    Args:
        processors: The processors to apply, in order.
        places: Their indices in the sampler.
        vocab_size: Size of the model's vocabulary.
    """

    def __init__(self, processors: list[LogitsProcessor], places: list[int], vocab_size: int) -> None:
        self.structs = (ProcessorStruct * max(len(processors), 1))()
        self.address = ctypes.addressof(self.structs)
        self.count = len(processors)
        self._alive: list[np.ndarray] = []
        self._counted: list[tuple[ProcessorStruct, int]] = []
        self._states: dict[int, TokenCounts] = {}
        self._tails: dict[int, Any] = {}
        self.masks: NodeMasks | None = None
        self._masked = 0
        for struct, processor, place in zip(self.structs, processors, places, strict=False):
            if isinstance(processor, MinNewTokens):
                ends = [token for token in processor.eos if token < vocab_size]
                struct.shape, struct.value = Shape.NOT_BEFORE, processor.count
                struct.ids, struct.count = self._kept(ends, np.int64), len(ends)
            elif isinstance(processor, LogitBias):
                tokens, amounts = zip(*processor.bias, strict=True)
                struct.shape, struct.count = Shape.BIAS, len(tokens)
                struct.ids, struct.biases = self._kept(tokens, np.int64), self._kept(amounts, np.float32)
            elif type(processor) is Constrained:
                struct.shape, self._masked = Shape.MASK, place
                self.masks = NodeMasks(struct, processor.constraint, vocab_size)
            else:
                shape, value = _VALUES[type(processor)]
                struct.shape, struct.value = shape, value(processor)
                if processor.stateful:
                    self._counted.append((struct, place))

    def _kept(self, numbers: Iterable[float], dtype: type[np.generic]) -> int:
        array = np.array(tuple(numbers), dtype=dtype)
        self._alive.append(array)
        return int(array.ctypes.data)

    @property
    def counts(self) -> bool:
        """Whether they use token counts, so that each text needs its own array."""
        return bool(self._counted)

    def follow(self, states: tuple[Any, ...]) -> None:
        """Update the arrays from the current states of the sampler's processors."""
        if self.masks is not None:
            self.masks.root(states[self._masked])
        for struct, place in self._counted:
            state: TokenCounts = states[place]
            known = self._states.get(place)
            self._states[place] = state
            if known is None or known.ids is not state.ids:
                struct.ids, struct.counts, struct.count = (
                    state.ids.ctypes.data,
                    state.counts.ctypes.data,
                    len(state.ids),
                )
            tail = (ctypes.c_int64 * len(state.tail))(*state.tail)
            struct.tail, struct.tail_count = ctypes.addressof(tail), len(state.tail)
            self._tails[place] = tail


def native_processors(sampler: Sampler, vocab_size: int) -> NativeProcessors | None:
    """The sampler's processors for the kernels, None where it has a processor that they do not implement.

    `Banned` is left out: the kernels sample from its `end` on.

    Args:
        sampler: The sampler; its masks and edits must come before temperature and truncations.
        vocab_size: Size of the model's vocabulary.
    """
    found, places, shaped, masks = [], [], False, 0
    for place, processor in enumerate(sampler.processors):
        if processor.neutral or (processor.stage > Stage.EDIT and sampler.greedy):
            if processor.stateful and processor.hears_logprobs:
                return None
            continue
        if isinstance(processor, Banned):
            continue
        if type(processor) is Constrained:
            masks += 1
            # What a constraint asks is answered before the text's step, and after those that a draft has.
            if masks > 1 or processor.constraint.asks:
                return None
        elif type(processor) not in _VALUES and type(processor) not in (MinNewTokens, LogitBias):
            return None
        if processor.stage <= Stage.EDIT and shaped:
            return None
        if isinstance(processor, LogitBias) and max(token for token, _ in processor.bias) >= vocab_size:
            return None
        if isinstance(processor, TopK) and processor.k >= vocab_size:
            continue
        shaped = shaped or processor.stage > Stage.EDIT
        found.append(processor)
        places.append(place)
    return NativeProcessors(found, places, vocab_size)
