"""Reward models of known quality: an oracle, the same made worse in known ways, and whatever else scores texts."""

from __future__ import annotations

from itertools import islice
from random import Random

# The specs of rewards name their scorers, which importing makes known.
import decodery_benchmarks.scorers  # noqa: F401
from decodery.core.errors import SettingsError
from decodery_benchmarks.puzzles import Puzzle, drawn

EXACT = {"oracle": "", "outcome": ",blind=yes"}
"""By name, settings of the oracle itself."""
PRESETS = {
    "clean": (1.0, 0.0, 0.0, 0.0),
    "noisy": (1.0, 0.0, 1.5, 0.0),
    "overconfident-early": (3.0, 2.0, 1.0, 0.0),
    "hackable": (1.0, 0.0, 0.5, 3.0),
    "constant": (0.0, 0.0, 0.0, 0.0),
}
"""By name: confidence, optimism, noise and exploit of `corrupted`, around the graded oracle."""
_LOOKED_AT = 64


def reward(name: str, puzzle: Puzzle) -> str:
    """The scorer, as a text, that a preset is for a puzzle; what is no preset is a scorer's own spec."""
    if name in EXACT:
        return f"puzzle-oracle(puzzle={puzzle.spec}{EXACT[name]})"
    if name not in PRESETS:
        return _inside(name)
    confidence, optimism, noise, exploit = PRESETS[name]
    # Right and wrong alone lie so far apart that no preset would ever confuse them.
    settings = f"scorer=puzzle-oracle(puzzle={puzzle.spec},graded=yes),confidence={confidence},optimism={optimism}"
    settings += f",noise={noise},exploit={exploit}"
    if exploit:
        if not puzzle.hack:
            raise SettingsError(f"nothing in {puzzle.spec} is known to be exploited: choose another reward than {name}")
        settings += f',pattern="{puzzle.hack}"'
    return f"corrupted({settings},length={_usual(puzzle)})"


def _inside(spec: str) -> str:
    """A spec as it stands inside another one's settings."""
    name, colon, settings = spec.partition(":")
    return f"{name}({settings})" if colon and "(" not in name else spec


def _usual(puzzle: Puzzle) -> int:
    """The usual length of a solution, in tokens, its end included."""
    random = Random(0)
    lengths = sorted(len(puzzle.solve(prompt, random)) + 1 for prompt in islice(drawn(puzzle, "train"), _LOOKED_AT))
    return lengths[_LOOKED_AT // 2]
