"""The states of the parts that act on one text."""

from __future__ import annotations

from copy import deepcopy
from typing import Any


class PartStates:
    """The states of drafters, policies, monitors and other parts for one text.

    A part stores its state under itself: `seq.states[self]`. Parts are distinguished by identity, so that two equal
    drafters in a composite have separate states.
    """

    __slots__ = ("_states",)

    def __init__(self) -> None:
        # The part itself is stored too, so that no later object gets the same identity.
        self._states: dict[int, tuple[object, Any]] = {}

    def __getitem__(self, part: object) -> Any:
        try:
            return self._states[id(part)][1]
        except KeyError:
            raise KeyError(f"{type(part).__name__} has no state of this text: store what its start returns") from None

    def __setitem__(self, part: object, state: Any) -> None:
        self._states[id(part)] = part, state

    def get(self, part: object) -> Any:
        """The state of a part, None where it has none."""
        return self._states.get(id(part), (part, None))[1]

    def only(self, part: object) -> PartStates:
        """The state of one part, where it has one; shared with this text."""
        kept = PartStates()
        if id(part) in self._states:
            kept[part] = self[part]
        return kept

    def copy_from(self, other: PartStates, shared: dict[int, Any], *, without: tuple[object, ...]) -> None:
        """Take deep copies of the states of another text.

        Args:
            other: The states of that text.
            shared: Objects that are not copied, by identity.
            without: Parts whose states are not copied.
        """
        kept = {id(part) for part in without}
        copied = {key: state for key, (_, state) in other._states.items() if key not in kept}
        for key, state in deepcopy(copied, dict(shared)).items():
            self._states[key] = other._states[key][0], state
