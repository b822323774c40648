"""How good a program is: the share of public tests it passes."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path

from ..core.sandbox import Sandbox, Verdict
from ..errors import SettingsError

_FENCE = re.compile(r"```[a-zA-Z]*\n(.*?)(?:```|\Z)", re.DOTALL)
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class ProgramTests:
    """A reward of texts: the share of `tests`, texts of Python statements that raise where they fail, that pass.

    head: what stands before a text that only continues a program, the prompt. setup: statements that run after the
    program and before the tests. The program is the first fenced block of a text that has one; else head and text
    together, or the text alone where those are no Python. Programs run in `sandbox`.
    """

    tests: tuple[str, ...]
    head: str = ""
    setup: str = ""
    sandbox: Sandbox = field(default_factory=Sandbox)

    def __post_init__(self) -> None:
        if not self.tests:
            raise SettingsError("a program is told by its tests: give at least one")

    @classmethod
    def read(cls, path: str, head: str = "", sandbox: Sandbox | None = None) -> ProgramTests:
        """Tests from a Python file: every top-level `assert` is one, everything else is `setup`.

        Raises SettingsError for a file that cannot be read, is no Python, or asserts nothing.
        """
        try:
            if Path(path).stat().st_size > _MOST_BYTES:
                raise SettingsError(f"the tests in {path} are larger than 1 MiB: give a smaller file")
            text = Path(path).read_text(encoding="utf-8")
            statements = ast.parse(text).body
        except (OSError, UnicodeDecodeError, SyntaxError, ValueError) as error:
            raise SettingsError(f"cannot read tests from {path}: {error}") from error
        tests = tuple(ast.unparse(each) for each in statements if isinstance(each, ast.Assert))
        if not tests:
            raise SettingsError(f"{path} holds no test: write them as asserts, such as `assert f(2) == 4`")
        setup = "\n".join(ast.unparse(each) for each in statements if not isinstance(each, ast.Assert))
        return cls(tests, head, setup, sandbox or Sandbox())

    def __call__(self, text: str) -> float:
        return self.verdict(text).share

    def verdict(self, text: str) -> Verdict:
        """What became of the program in `text`."""
        fenced = _FENCE.search(text)
        first, *others = [fenced[1]] if fenced else [self.head + text, text]
        verdict = self._run(first)
        for other in others:
            if verdict.reason is None or not verdict.reason.startswith(("SyntaxError", "IndentationError")):
                break
            second = self._run(other)
            verdict = second if second.share > verdict.share else verdict
        return verdict

    def _run(self, program: str) -> Verdict:
        return self.sandbox.run(f"{program}\n{self.setup}" if self.setup else program, self.tests)
