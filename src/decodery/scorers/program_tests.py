"""How good a program is: the share of public tests it passes."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path

import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.step.scorer import Candidates, Scorer

from .sandbox import Sandbox, Verdict
from .text import texts

_FENCE = re.compile(r"```[a-zA-Z]*\n(.*?)(?:```|\Z)", re.DOTALL)
_MOST_BYTES = 1 << 20


@register(
    "program-tests",
    paper="Planning with Large Language Models for Code Generation (2023)",
    guarantee="1 for a program that passes all tests",
    requirements=("tests",),
    local=True,
)
@dataclass(frozen=True)
class ProgramTests(Scorer):
    """Scores programs by the share of `tests`, Python statements that raise on failure, that pass.

    Attributes:
        file: A Python file whose top-level asserts are the tests and everything else is `setup`: statements that run
            after the program and before the tests.
        tests: Texts of Python statements that raise on failure.
        head: What stands before a text that only continues a program; None: the prompt. The program is the first fenced
            block of a text that has one; else head and text together, or the text alone where those are no Python.
            Programs run in `sandbox`; None: one of its own.
        setup: Python statements that run after the program and before the tests.
        sandbox: Where programs run; None for one of its own.
        decode: Ids to text, for who has no tokenizer at hand.

    Raises:
        SettingsError: For a file that cannot be read, is no Python, or asserts nothing.
    """

    file: str = ""
    tests: tuple[str, ...] = ()
    head: str | None = None
    setup: str = ""
    sandbox: Sandbox | None = None
    decode: Callable[[Sequence[int]], str] | None = None

    def __post_init__(self) -> None:
        if self.file and not self.tests:
            tests, setup = _read(self.file)
            object.__setattr__(self, "tests", tests)
            object.__setattr__(self, "setup", setup)
        if self.sandbox is None:
            object.__setattr__(self, "sandbox", Sandbox())
        if not self.tests:
            raise SettingsError("program-tests needs tests: give at least one, or a file of them")

    @property
    def bounds(self) -> tuple[float, float]:
        return 0.0, 1.0

    def score(self, candidates: Candidates) -> torch.Tensor:
        head, decode = self.head, self.decode or candidates.decode
        if head is None:
            head = "" if decode is None else decode(candidates.prompt)
        written = texts(candidates, decode, "program-tests")
        # Threads wait for their processes, of which the sandbox starts so many at a time.
        with ThreadPoolExecutor(max(1, min(len(written), (os.cpu_count() or 1) + 1)), "program tests") as threads:
            begun = [threads.submit(copy_context().run, self.verdict, text, head) for text in written]
            shares = [each.result().share for each in begun]
        return torch.tensor(shares, dtype=torch.float64, device="cpu")

    def remark(self, prompt: str, text: str) -> str:
        """See `Scorer.remark`: why the program, or the first test that failed, did not pass."""
        return self.verdict(text, prompt).reason or ""

    def verdict(self, text: str, head: str = "") -> Verdict:
        """What became of the program in `text`.

        Args:
            head: See `head`, where there is none.
        """
        fenced = _FENCE.search(text)
        first, *others = [fenced[1]] if fenced else [(head if self.head is None else self.head) + text, text]
        verdict = self._run(first)
        for other in others:
            if verdict.reason is None or not verdict.reason.startswith(("SyntaxError", "IndentationError")):
                break
            second = self._run(other)
            verdict = second if second.share > verdict.share else verdict
        return verdict

    def _run(self, program: str) -> Verdict:
        assert self.sandbox is not None
        return self.sandbox.run(f"{program}\n{self.setup}" if self.setup else program, self.tests)


def _read(path: str) -> tuple[tuple[str, ...], str]:
    """Tests and setup of a Python file."""
    try:
        if Path(path).stat().st_size > _MOST_BYTES:
            raise SettingsError(f"the tests in {path} are larger than 1 MiB: give a smaller file")
        text = Path(path).read_text(encoding="utf-8-sig")
        statements = ast.parse(text).body
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError) as error:
        raise SettingsError(f"cannot read tests from {path}: {error}") from error
    tests = tuple(ast.unparse(each) for each in statements if isinstance(each, ast.Assert))
    if not tests:
        raise SettingsError(f"{path} holds no test: write them as asserts, such as `assert f(2) == 4`")
    return tests, "\n".join(ast.unparse(each) for each in statements if not isinstance(each, ast.Assert))
