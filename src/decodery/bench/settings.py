"""What a benchmark measures: everything that is needed to run it again."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, cast

from decodery.core.errors import SettingsError
from decodery.core.method_spec import split
from decodery.search.answers import AnswerExtractor, Kind
from decodery.step.draft_length_policy import LARGEST, MOST_NODES

from .workloads import OWN, WORKLOADS

QUALITATIVE, THROUGHPUT = "qualitative", "throughput"
SPLITS = (QUALITATIVE, THROUGHPUT)
PLAIN = "none"


@dataclass(frozen=True)
class Settings:
    """A benchmark.

    methods: drafters as `LLM.request` takes them, and peers; plain decoding is always among them, first. splits:
    "qualitative" decodes one question at a time, "throughput" `concurrency` prompts of `input_tokens` tokens at once.
    prompts: questions per workload (None: all of a built-in set, 40 of another) and prompts per case of the
    throughput split (None: 8). rounds: how often everything is repeated, warmup: generations per method beforehand.
    max_draft_tokens: tokens a method may draft per step and prompt. timelines: questions per workload of which every
    pass is kept for the page. imports: modules that methods come from, which whoever repeats the benchmark has to name
    again. file: own prompts, the workload "own"; digest: of its content. requests: further methods, as options of
    `decodery generate`. answer: where answers stand in texts, see `self-consistency`.
    """

    model: str = "smollm2"
    dtype: str = "auto"
    methods: tuple[str, ...] = (PLAIN, "prompt-lookup")
    workloads: tuple[str, ...] = ("built-in",)
    data: str | None = None
    splits: tuple[str, ...] = (QUALITATIVE,)
    prompts: int | None = None
    max_new_tokens: int = 96
    max_draft_tokens: int = MOST_NODES
    temperature: float = 0.0
    seed: int = 0
    rounds: int = 3
    warmup: int = 2
    concurrency: tuple[int, ...] = (1, 2, 4, 8)
    input_tokens: tuple[int, ...] = (64, 256, 512, 1024)
    timelines: int = 3
    imports: tuple[str, ...] = ()
    file: str | None = None
    digest: str = ""
    requests: tuple[str, ...] = ()
    answer: str = "auto"

    def __post_init__(self) -> None:
        others = tuple(dict.fromkeys(method for method in self.methods if method != PLAIN))
        object.__setattr__(self, "methods", (PLAIN, *others))
        for name, least in _LEAST.items():
            value = getattr(self, name)
            for number in value if isinstance(value, tuple) else [value]:
                if number is not None and number < least:
                    raise SettingsError(f"{name} must be at least {least}, not {number}")
        if self.seed >= 1 << 64:
            raise SettingsError(f"seed must be at most 2^64 - 1, not {self.seed}")
        if self.max_draft_tokens > LARGEST:
            raise SettingsError(f"max_draft_tokens must be at most {LARGEST}, not {self.max_draft_tokens}")
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise SettingsError(f"temperature must be 0 or more, not {self.temperature}")
        _known("workload", self.workloads, (*WORKLOADS, *([OWN] if self.file is not None else [])))
        AnswerExtractor(cast(Kind, self.answer))
        _known("split", self.splits, SPLITS)

    def to_dict(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, raw: Any) -> Settings:
        """The settings in a result file; raises SettingsError for what is none."""
        names = {field.name: field for field in fields(cls)}
        if not isinstance(raw, dict) or (strange := sorted(set(raw) - set(names))):
            what = f"the unknown settings {', '.join(strange)}" if isinstance(raw, dict) else "no settings"
            raise SettingsError(f"the result file has {what}: it was written by another version")
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in raw.items()
        }
        for name, value in values.items():
            if not _fits(value, getattr(cls, name)) and not (value is None and name in _OPTIONAL):
                raise SettingsError(f"the result file has the impossible setting {name} = {value!r}")
        return cls(**values)


_LEAST = {
    "prompts": 1,
    "max_new_tokens": 2,
    "max_draft_tokens": 1,
    "rounds": 1,
    "warmup": 0,
    "concurrency": 1,
    "input_tokens": 16,
    "timelines": 0,
    "seed": 0,
}
_OPTIONAL = {"data": str, "prompts": int, "file": str}


def _known(what: str, names: tuple[str, ...], known: tuple[str, ...]) -> None:
    if not names:
        raise SettingsError(f"name at least one {what}: {', '.join(known)}")
    for name in names:
        if name not in known:
            raise SettingsError(f"there is no {what} {name!r}; choose among {', '.join(known)}")


def _fits(value: Any, example: Any) -> bool:
    """Whether `value` is of the type of a default; a tuple's members are of the type of its first one."""
    if isinstance(example, tuple):
        kind = type(example[0]) if example else str
        return isinstance(value, tuple) and all(type(item) is kind for item in value)
    if example is None:
        return type(value) in (str, int)
    return type(value) is type(example) or (isinstance(example, float) and type(value) is int)


def split_methods(text: str) -> tuple[str, ...]:
    """The methods in "none,prompt-lookup:length=5,max_ngram=2,transformers": a piece with "=" goes on with settings."""
    methods: list[str] = []
    for piece in (piece.strip() for piece in split(text, ",")):
        name = piece.partition(":")[0].partition("(")[0]
        if "=" in name and methods:
            methods[-1] += f",{piece}"
        elif piece:
            methods.append(piece)
    return tuple(methods)
