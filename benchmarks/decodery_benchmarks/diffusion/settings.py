"""What a benchmark of ways of filling canvases measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from decodery.core.errors import CorruptFile, SettingsError
from decodery.core.registry import resolve
from decodery.training.lists import LISTS, MOST, known

from .released import is_released

REFERENCE = "static"
METHODS = (
    REFERENCE, "random", "static:steps=4", "threshold:tau=0.5", "threshold:tau=0.7", "threshold:tau=0.9",
    "threshold:tau=0.95", "factor", "local-leap", "r2", "cad", "ccd", "ccd:adaptive=true", "explore-exploit",
    "explore-exploit:branches=3", "freedave", "freedave-plus", "dystruct:mean=8,least=4,most=8",
)  # fmt: skip


@dataclass(frozen=True)
class CanvasSettings:
    """methods: ways of filling; static is always among them. tasks: of `lists`; models that know no lists of letters
    are asked about ParallelBench's lists, or its files by their published names. letters: of the longest list that is
    drawn. prompts: of each task. max_new_tokens: of a canvas, None for what the tasks need. data: where lists of names
    and published files are, for such models. judge: a chat model that scores sentences.
    """

    model: str
    dtype: str = "auto"
    methods: tuple[str, ...] = METHODS
    tasks: tuple[str, ...] = tuple(LISTS)
    letters: int = MOST
    prompts: int = 50
    max_new_tokens: int | None = None
    temperature: float = 0.0
    seed: int = 0
    data: str | None = None
    judge: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "methods", tuple(dict.fromkeys((REFERENCE, *self.methods))))
        if own := [task for task in self.tasks if not is_released(task)]:
            known(own, self.letters)
            if len(own) < len(self.tasks):
                raise SettingsError("published files and tasks on lists are measured apart: give --tasks of one kind")
        if self.prompts < 1:
            raise SettingsError(f"prompts must be at least 1, not {self.prompts}")
        for method in self.methods:
            resolve("diffusion", method)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> CanvasSettings:
        """The settings in a result file. Raises CorruptFile for what is none."""
        try:
            known = {field.name: raw[field.name] for field in fields(cls)}
            return cls(**known | {name: tuple(known[name]) for name in ("methods", "tasks")})
        except (KeyError, TypeError, SettingsError) as error:
            raise CorruptFile("the result file has no settings of unmasking policies: measure again") from error

    def to_dict(self) -> dict[str, Any]:
        """The settings as a result file has them."""
        return {**asdict(self), "methods": list(self.methods), "tasks": list(self.tasks)}
