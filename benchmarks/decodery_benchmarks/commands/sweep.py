"""`benchmarks/bench.py sweep`: drafts or heads of several sizes or trainings, or several batches, and their law."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from decodery.cli.command import command
from decodery.cli.train_common import command_line
from decodery.core.errors import SettingsError

from .workload import Integers, Methods, Names, given_of, model_options, option, run_options

if TYPE_CHECKING:
    from decodery.llm.llm import LLM
    from decodery.step.drafter import Drafter

BATCH = "batch"
_LEAST_TOGETHER = 5
_CHAIN = 4


@command(example="")
@click.argument("named", type=Names(), metavar="DRAFTS")
@model_options("smollm2")
@option("--methods", type=Methods(), show_default="auto", help="The drafter of a sweep of batches.")
@option("--workload", "workloads", type=Names(), show_default="built-in", help="Prompts, as decodery bench takes them.")
@option("--data", metavar="DIR", envvar="DECODERY_DATA", help="Folder with the public data sets.")
@option("--prompts", type=int, help="Number of prompts.")
@option("--max-new-tokens", type=int, show_default="96", help="Maximum tokens of an answer.")
@option("--concurrency", type=Integers(), show_default="1,2,4,8", help="Texts at once, for a sweep of batches.")
@run_options
def sweep(named: tuple[str, ...], out: Path | None, as_json: bool, resume: bool, **options: Any) -> None:
    """Fit value = a + b ln(amount) over DRAFTS: draft models or heads, each with an amount such as training tokens.

    DRAFTS is a list such as small=62000,more=125000,most=250000, with two amounts small=62000/81536, or "batch" for the
    texts at once. --out receives law.json and law.svg.
    """
    given = given_of(options)
    from decodery import load
    from decodery.bench.workloads import questions
    from decodery.models.loaders.store import write_text
    from decodery_benchmarks.results import LAW, write_result
    from decodery_benchmarks.scaling import Law, joint_report, plot, plot_foretold, report

    pairs = None if named == (BATCH,) else [_pair(each) for each in named]
    if pairs is not None and len(pairs) < 3:
        raise SettingsError("sweep needs at least three drafts, as in sweep small=62000,more=125000,most=250000")
    if pairs is not None and len({len(amounts) for _, amounts in pairs}) > 1:
        raise SettingsError("each draft of a sweep needs the same number of amounts: one, or two as DIR=62000/81536")
    if pairs is not None and len(pairs) < _LEAST_TOGETHER and len(pairs[0][1]) > 1:
        raise SettingsError(
            f"a law of two amounts needs {_LEAST_TOGETHER} drafts, so that the others predict each of them"
        )
    known = _Known.begin(out, named, given, resume)
    data = Path(given["data"]) if given.get("data") else None
    asked = questions(given.get("workloads", ("built-in",))[0], data, given.get("prompts"))
    prompts, new = [each.turns[0] for each in asked], given.get("max_new_tokens", 96)
    lm = load(given.get("model", "smollm2"), dtype=given.get("dtype", "auto"))
    if pairs is None:
        label, unit = "texts at once", "tokens per second"
        drafter = next((each for each in given.get("methods", ()) if each != "none"), "auto")
        amounts = [float(each) for each in given.get("concurrency", (1, 2, 4, 8))]
        values = [
            known.value(f"{each:g} at once", partial(_tokens_per_second, lm, prompts, drafter, new, int(each)))
            for each in amounts
        ]
    else:
        label, unit = "amount", "tokens per pass of the target"
        amounts = [each[0] for _, each in pairs]
        values = [known.value(folder, partial(_tokens_per_pass, lm, prompts, folder, new)) for folder, _ in pairs]
    found: dict[str, Any] = {"command": command_line(), "sweep": list(named), "amounts_are": label, "values_are": unit}
    if pairs is not None and len(pairs[0][1]) > 1:
        found |= joint_report([each for _, each in pairs], values)
        drawn, told = plot_foretold(found["foretold"], unit), _told_together(found)
    else:
        found |= report(amounts, values)
        drawn, told = plot(Law.fit(amounts, values), label, unit), _told(found)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_result(out / "law.json", found, summary=LAW)
        write_text(out / "law.svg", drawn + "\n")
    click.echo(json.dumps(found) if as_json else told)


@dataclass
class _Known:
    """What a sweep has measured so far, kept in `path` after every measurement; None keeps nothing.

    settings: what it hangs on. values: by what was measured.
    """

    path: Path | None
    settings: dict[str, Any]
    values: dict[str, float] = field(default_factory=dict)

    @classmethod
    def begin(cls, out: Path | None, named: tuple[str, ...], given: dict[str, Any], resume: bool) -> _Known:
        """Raises SettingsError where an interrupted sweep in `out` had other settings."""
        from decodery.models.loaders.fields import Fields, Named, Number, Record, read_json

        settings = json.loads(json.dumps({"sweep": named, **given}))
        if out is None:
            if resume:
                raise click.UsageError("--resume needs --out, the folder of the interrupted sweep")
            return cls(None, settings)
        path = out / "measured.json"
        if not resume:
            return cls(path, settings)
        if not path.is_file():
            raise SettingsError(f"there is no interrupted sweep in {out}: begin without --resume")
        kinds = {"settings": Record({}), "values": Named(Number(0.0, 1e12), 1 << 12)}
        fields = Fields(read_json(path), str(path), kinds)
        if fields.need("settings") != settings:
            raise SettingsError(f"the sweep in {out} has other settings: repeat those, or begin without --resume")
        return cls(path, settings, dict(fields.need("values")))

    def value(self, name: str, measure: Callable[[], float]) -> float:
        """What was measured under a name, now if not before."""
        from decodery.models.loaders.store import write_text

        if name not in self.values:
            self.values[name] = measure()
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                write_text(self.path, json.dumps({"settings": self.settings, "values": self.values}, indent=1) + "\n")
        return self.values[name]


def _pair(text: str) -> tuple[str, tuple[float, ...]]:
    """A draft's folder, and what differs between it and the others: one amount, or two after a slash."""
    folder, _, amounts = text.rpartition("=")
    try:
        found = tuple(float(amount) for amount in amounts.split("/"))
    except ValueError:
        found = ()
    if not folder or not 0 < len(found) <= 2 or not all(0.0 < amount < float("inf") for amount in found):
        raise SettingsError(f"sweep takes drafts with an amount, as FOLDER=62000, not {text!r}")
    return folder, found


def _tokens_per_pass(lm: LLM, prompts: list[str], folder: str, new: int) -> float:
    """Greedy, with a chain of four tokens of the draft in `folder`."""
    lm.reset_memory()
    outputs = lm.generate(prompts, max_new_tokens=new, drafter=_drafter(folder))
    steps = [step for output in outputs for step in output.trace.decoding]
    return sum(step.emitted for step in steps) / max(len(steps), 1)


def _drafter(folder: str) -> Drafter:
    """What drafts with a folder of `decodery train head`, or with a draft model."""
    from decodery.core.registry import resolve
    from decodery.speculative.drafters.draft_model import DraftModel
    from decodery.speculative.heads.head import HEAD, TrainedHead

    if not (Path(folder).expanduser() / HEAD).is_file():
        return DraftModel(folder, length=_CHAIN)
    trained = TrainedHead.load(folder)
    found: Drafter = resolve("drafter", trained.kind, head=trained, tree_policy=None, length=_CHAIN)
    return found


def _tokens_per_second(lm: LLM, prompts: list[str], drafter: str, new: int, at_once: int) -> float:
    """Of so many texts at once, each batch after one that is not counted."""
    from time import perf_counter

    lm.generate(prompts[:at_once], max_new_tokens=8, drafter=drafter)
    # Other numbers of texts at once had the same prompts.
    lm.reset_memory()
    tokens, seconds = 0, 0.0
    for first in range(0, len(prompts) - at_once + 1, at_once):
        begin = perf_counter()
        some = prompts[first : first + at_once]
        outputs = lm.generate(some, max_new_tokens=new, drafter=drafter)
        seconds += perf_counter() - begin
        tokens += sum(len(output.tokens) for output in outputs)
    if not tokens:
        raise SettingsError(f"there are fewer than {at_once} questions: raise --prompts or lower --concurrency")
    return tokens / seconds


def _told(found: dict[str, Any]) -> str:
    low, high = found["slope_interval"]
    following, held = found["next"], found.get("held_out")
    lines = [f"{amount:>12g}  {value:.3f}" for amount, value in zip(found["amounts"], found["values"], strict=True)]
    lines += [
        f"{found['values_are']} = {found['intercept']:.3f} + {found['slope']:.3f} ln({found['amounts_are']}), slope "
        f"{low:.3f} to {high:.3f}, R2 {found['r2']:.3f}",
        f"{following['amount']:g} would give {following['expected']:.3f} ({following['low']:.3f} to "
        f"{following['high']:.3f})",
    ]
    if held:
        inside = "inside" if held["low"] <= held["measured"] <= held["high"] else "outside"
        lines.append(
            f"the others predict {held['expected']:.3f} ({held['low']:.3f} to {held['high']:.3f}) for "
            f"{held['amount']:g}, and it is {held['measured']:.3f}: {inside}"
        )
    return "\n".join(lines)


def _told_together(found: dict[str, Any]) -> str:
    """The law of two amounts side by side."""
    measured = zip(found["amounts"], found["values"], strict=True)
    lines = [f"{'/'.join(f'{one:g}' for one in each):>24}  {value:.3f}" for each, value in measured]
    both = zip(("first", "second"), found["slopes"], found["slope_intervals"], strict=True)
    terms = [f"{slope:.3f} ln({name}), slope {low:.3f} to {high:.3f}" for name, slope, (low, high) in both]
    lines.append(f"{found['values_are']} = {found['intercept']:.3f} + {'; + '.join(terms)}; R2 {found['r2']:.3f}")
    for each in found["next"]:
        amounts = "/".join(f"{one:g}" for one in each["amounts"])
        lines.append(f"{amounts} would give {each['expected']:.3f} ({each['low']:.3f} to {each['high']:.3f})")
    right = sum(each["low"] <= each["measured"] <= each["high"] for each in found["foretold"])
    lines.append(f"{right} of {len(found['foretold'])} lie where the others predict them")
    return "\n".join(lines)
