"""A robot on a grid that has to be brought somewhere: programs whose meaning is known exactly, action by action."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import ClassVar

import numpy as np

from decodery.core.errors import SettingsError

from .base import Puzzle

ACTIONS = "mlr"
"""Move, turn left, turn right."""
FACINGS = 4
_STEPS = ((1, 0), (0, 1), (-1, 0), (0, -1))
_PROMPT = re.compile(r"(\d)(\d)([0-3])>(\d)(\d)([0-3]):")

State = tuple[int, int, int]
"""x, y and facing: 0 east, 1 north, 2 west, 3 south."""


@dataclass(frozen=True)
class Robot(Puzzle):
    """`230>451:` asks for a program, `m` to move and `l` and `r` to turn, that brings x, y and facing there.

    side: of the grid, whose border moves do not cross. longest: program.
    """

    side: int = 6
    longest: int = 10

    delimiter: ClassVar[str] = ""
    pattern: ClassVar[str] = r"^(.*)$"
    hack: ClassVar[str] = "lr"

    def __post_init__(self) -> None:
        if not 2 <= self.side <= 10 or not 1 <= self.longest <= 64:
            raise SettingsError("robot goes about a grid of side 2 to 10 with programs of 1 to 64 actions")

    @property
    def spec(self) -> str:
        return f"robot(side={self.side},longest={self.longest})"

    @property
    def length(self) -> int:
        return self.longest + 1

    def draw(self, random: Random) -> str:
        start = (random.randrange(self.side), random.randrange(self.side), random.randrange(FACINGS))
        program = random.choices(ACTIONS, (5, 3, 3), k=random.randint(1, self.longest))
        return "".join(map(str, start)) + ">" + "".join(map(str, self.run(start, "".join(program))[-1])) + ":"

    def solve(self, prompt: str, random: Random) -> str:
        start, goal = given(prompt)
        ways = _ways(self.side, self.longest)[:, :, self._number(goal)]
        state, program = start, ""
        left = random.choice([n for n in range(1, self.longest + 1) if ways[n, self._number(start)]])
        while left:
            nexts = {action: self.step(state, action) for action in ACTIONS}
            weights = [float(ways[left - 1, self._number(after)]) for after in nexts.values()]
            action = random.choices(list(nexts), weights)[0]
            state, program, left = nexts[action], program + action, left - 1
        return program

    def verify(self, prompt: str, text: str) -> bool:
        start, goal = given(prompt)
        return 0 < len(text) <= self.longest and not set(text) - set(ACTIONS) and self.run(start, text)[-1] == goal

    def open(self, prompt: str, text: str) -> bool:
        start, goal = given(prompt)
        left = self.longest - len(text)
        if left < 0 or set(text) - set(ACTIONS):
            return False
        state = self.run(start, text)[-1] if text else start
        return bool(_ways(self.side, self.longest)[: left + 1, self._number(state), self._number(goal)].any())

    def step(self, state: State, action: str) -> State:
        """The state after one action."""
        x, y, facing = state
        if action != "m":
            return x, y, (facing + (1 if action == "l" else -1)) % FACINGS
        right, up = _STEPS[facing]
        inside = range(self.side)
        return (x + right, y + up, facing) if x + right in inside and y + up in inside else state

    def run(self, start: State, program: str, meaning: str = ACTIONS) -> list[State]:
        """The state after every action. meaning: what `m`, `l` and `r` do here, for semantics of another kind."""
        found, state = [], start
        for action in program:
            state = self.step(state, meaning[ACTIONS.index(action)])
            found.append(state)
        return found

    def _number(self, state: State) -> int:
        return (state[0] * self.side + state[1]) * FACINGS + state[2]


def given(prompt: str) -> tuple[State, State]:
    """The states in a prompt: where the robot is, and where it is to be. Raises SettingsError."""
    found = _PROMPT.fullmatch(prompt)
    if found is None:
        raise SettingsError(f"{prompt!r} is no prompt of robot, such as 230>451:")
    x, y, facing, *goal = map(int, found.groups())
    return (x, y, facing), (goal[0], goal[1], goal[2])


@cache
def _ways(side: int, longest: int) -> np.ndarray:
    """[longest + 1, states, states] float64: how many programs of each length lead from one state to another."""
    robot, count = Robot(side, longest), side * side * FACINGS
    step = np.zeros((count, count))
    for number in range(count):
        state = (number // FACINGS // side, number // FACINGS % side, number % FACINGS)
        for action in ACTIONS:
            step[number, robot._number(robot.step(state, action))] += 1
    found = [np.eye(count)]
    for _ in range(longest):
        found.append(found[-1] @ step)
    return np.stack(found)
