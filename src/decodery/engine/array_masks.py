"""Masks of constraints for the texts in arrays, computed where a text gets to a node."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

import numpy as np

from decodery.core.threads import one_thread
from decodery.models.step_arrays import StepArrays
from decodery.models.torch_state import in_plain_state
from decodery.sampling.native_processors import NativeProcessors

from .array_text import ArrayText


@in_plain_state
@one_thread()
def compute_masks(steps: StepArrays, texts: Ordered[ArrayText]) -> None:
    """Compute the masks that texts wait for after a pass, until all texts have chosen.

    A text whose mask cannot be computed is left to `ArrayText.look`, which ends it with the reason.

    Args:
        steps: The batch after the pass.
        texts: Those in it.
    """
    while steps.awaits_masks:
        accepted = steps.accepted[: len(texts)]
        for place in np.flatnonzero(accepted < -1).tolist():
            processors, first, depth = texts[place].processors, int(steps.first[place]), -2 - int(accepted[place])
            assert isinstance(processors, NativeProcessors) and processors.masks is not None
            node = int(steps.paths[first + depth - 1]) if depth else 0
            try:
                processors.masks.compute(node, int(steps.parents[first + node]), int(steps.tokens[first + node]))
            except Exception:
                accepted[place] = -1
        steps.go_on()
