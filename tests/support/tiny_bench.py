"""A benchmark that takes seconds: a random model of bytes, in which greedy decoding soon repeats itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decodery.bench import job, result
from decodery.bench.settings import Settings
from decodery.llm.llm import LLM
from decodery.models.loaders.load import LoadedModel
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.testing.models import tiny_transformer
from tiny_models import make_tokenizer

SETTINGS = Settings(
    methods=("none", "prompt-lookup", "prompt-lookup:length=3"), prompts=6, max_new_tokens=24, rounds=2, warmup=1,
    timelines=2,
)  # fmt: skip


def make_lm() -> LLM:
    model = tiny_transformer(vocab_size=260, max_positions=640, dtype=torch.float32)
    tokenizer = Tokenizer(make_tokenizer(), bos_id=256, eos_ids=(257,))
    return LLM(LoadedModel(model, tokenizer, None, "tiny", "float32"))


def measure(
    lm: LLM, home: Path, settings: Settings = SETTINGS, *, stopped: Callable[[], bool] = bool, **options: Any
) -> result.Result:
    """Run a benchmark whose cost curve goes to `home` and takes no time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DECODERY_HOME", str(home))
        patch.setattr("decodery.step.pass_cost._SECONDS", 0.0)
        return job.Job(lm, settings, **options).run(_bounded, stopped)


def _bounded(what: str, done: int, total: int) -> None:
    assert 0 <= done <= total


def row(found: result.Result, method: str, category: str = "all", **more: Any) -> dict[str, Any]:
    """The only row with these values."""
    wanted = {"method": method, "category": category, **more}
    (only,) = [each for each in found["rows"] if all(each[name] == value for name, value in wanted.items())]
    return only
