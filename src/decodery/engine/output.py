"""What becomes of a prompt: a text as a plain value, and the pieces it came in."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from decodery.constraints.tool_calls import FunctionCall
from decodery.core.trace import Trace
from decodery.step.monitor import MonitorReport
from decodery.step.sequence import FinishReason, KeptText, TokenLogprob


@dataclass(frozen=True)
class TextCheck:
    """The check of a finished text against what its constraint could not enforce.

    Args:
        unenforced: what it was checked for, such as "uniqueItems at #/tags"; empty where nothing was checked.
        ignored: what nothing was done about, such as formats without a grammar.
        tries: texts that were written, this one included.
        violation: what this text breaks; None where it passed or was not checked.
        passed: whether it was checked and passed; None where it was not checked, as a text that was cut.
    """

    unenforced: tuple[str, ...]
    ignored: tuple[str, ...]
    tries: int
    violation: str | None
    passed: bool | None


_SHOWN = 80
"""Characters of a text in its `repr`."""


@dataclass(frozen=True, repr=False)
class Output:
    """One generated text.

    Attributes:
        tokens: Its ids, an EOS token included; text ends before EOS and before a stop string.
        prompt_tokens: What stood before.
        score: What a search ranked it by, higher is better; None where nothing was ranked.
        complete: False where a server went away before all was written that had been asked for.
        kept: What a further text can go on from (`reuse`), where `keep_cache` asked for it; it is not pickled.
        monitors: What each of them found.
        context_full: Whether it ended, by "length", because the model's context was full, however many tokens had been
            asked for.
        check: What it was checked for when it was finished, None where its constraint enforced all of it or there was
            none.
        reasoning, content, tool_calls: The parts of an answer of `LLM.chat`, whose `text` is all of it: what the model
            thinks first, what it says, and the tools that it calls.
    """

    text: str
    tokens: list[int]
    prompt_tokens: list[int]
    finish_reason: FinishReason
    stopped_by: int | str | None
    seed: int
    trace: Trace
    logprobs: list[TokenLogprob] | None
    score: float | None = None
    complete: bool = True
    kept: KeptText | None = field(default=None, repr=False, compare=False)
    monitors: tuple[MonitorReport, ...] = ()
    context_full: bool = False
    check: TextCheck | None = None
    reasoning: str = ""
    content: str | None = None
    tool_calls: tuple[FunctionCall, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "kept": None}

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}..."
        figures = f"tokens={len(self.tokens)}, tokens_per_pass={self.trace.tokens_per_pass:.2f}"
        return f"Output(text={text!r}, finish_reason={self.finish_reason!r}, {figures})"

    def to_dict(self) -> dict[str, Any]:
        """What `decodery generate --json` prints."""
        result: dict[str, Any] = {
            "text": self.text,
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "trace": self.trace.summary(),
        }
        if self.score is not None:
            result["score"] = self.score
        if not self.complete:
            result["complete"] = False
        if self.context_full:
            result["context_full"] = True
        if self.check is not None:
            result["check"] = asdict(self.check)
        if self.content is not None:
            result |= {"content": self.content, "reasoning": self.reasoning}
            result["tool_calls"] = [asdict(each) for each in self.tool_calls]
        if self.monitors:
            result["monitors"] = [each.to_dict() for each in self.monitors]
        if self.logprobs is not None:
            result["logprobs"] = [
                {"token": entry.token, "logprob": entry.logprob, "top": entry.top} for entry in self.logprobs
            ]
        return result


@dataclass(frozen=True)
class Piece:
    """A piece of a streamed text; `output` is set on the last one."""

    text: str
    output: Output | None = None
