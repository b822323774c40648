"""Programs as a record of their tokens: what a probe could compute of their states without any model."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from random import Random

import torch

from decodery.training.ranking import logistic
from decodery_benchmarks.puzzles import drawn
from decodery_benchmarks.puzzles.robot import ACTIONS, FACINGS, Robot, given
from decodery_benchmarks.training.program_probe import WrittenProgram

RECORD, _MORE = "record", 6000


def recorded(program: WrittenProgram, robot: Robot) -> WrittenProgram:
    """The same program with a record in the place of its rows: its prompt's states and its actions so far, one-hot."""
    width, length = 2 * (2 * robot.side + FACINGS), len(program.text)
    rows = torch.zeros(length + 1, width + len(ACTIONS) * robot.longest, dtype=torch.float32, device="cpu")
    at = 0
    for state in given(program.prompt):
        for number, size in zip(state, (robot.side, robot.side, FACINGS), strict=True):
            rows[:, at + number] = 1
            at += size
    for place, action in enumerate(program.text):
        rows[place:, width + len(ACTIONS) * place + ACTIONS.index(action)] = 1
    return replace(program, rows={RECORD: rows})


def solved_programs(robot: Robot, seed: int) -> list[WrittenProgram]:
    """Records of right programs that no model wrote."""
    random, found = Random(seed), list[WrittenProgram]()
    for prompt in islice(drawn(robot, "train", seed), _MORE):
        found.append(recorded(WrittenProgram(prompt, robot.solve(prompt, random), True, 0.0, {}), robot))
    return found


def surface(learned: list[WrittenProgram], asked: list[WrittenProgram], robot: Robot) -> list[float]:
    """Logistic regression on both states of the prompt, and how often each action stands in the program."""

    def features(programs: list[WrittenProgram]) -> torch.Tensor:
        rows = [recorded(each, robot).rows[RECORD][-1] for each in programs]
        own = 2 * (2 * robot.side + FACINGS)
        counts = [[1.0, *(each.text.count(action) for action in ACTIONS)] for each in programs]
        return torch.cat(
            (torch.tensor(counts, dtype=torch.float32, device="cpu"), torch.stack(rows)[:, :own]), dim=1
        ).double()

    weight = logistic(
        features(learned), torch.tensor([float(not each.right) for each in learned], dtype=torch.double, device="cpu")
    )
    return (features(asked) @ weight).tolist()
