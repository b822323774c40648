"""`decodery train los` and `decodery train probe`: what monitors read answers by."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .command import command, option
from .options import Decorator, together
from .train_common import FILE, command_line, model_option, out_option, resumable, seed_option, told
from .train_states import five_depths

if TYPE_CHECKING:
    from decodery.llm.llm import LLM
    from decodery.training.activations import Answered


@dataclass(frozen=True)
class Asked:
    """What a model answers for a monitor to learn from. file: of questions, None for `count` built-in ones."""

    file: Path | None
    count: int
    raw: bool
    most: int | None
    seed: int

    def answers(self, lm: LLM, out: Path, sites: tuple[str, ...], k: int) -> tuple[list[Answered], dict[str, Any]]:
        """The answers, kept in `out`, and what of their form the trained part has to know."""
        from decodery.training.activations import ActivationCollector
        from decodery.training.checkable import built_in, read_checkable

        chat = lm.chat is not None and not self.raw
        most = self.most or (64 if chat else 12)
        questions = built_in(self.count, self.seed, chat=chat) if self.file is None else read_checkable(self.file)
        collector = ActivationCollector(lm, out / "answers", sites=sites, k=k, max_new_tokens=most, chat=chat)
        with resumable(out) as progress:
            found = collector.collect(questions, progress)
        return found, {"chat": chat, "tokens": most, "data": str(self.file or "built-in questions")}


def _asked(most: int = 960) -> Decorator:
    """The options of the questions that are answered first, handed on as `asked`."""
    options = together(
        click.argument("questions", required=False, type=FILE),
        out_option,
        model_option("that is watched"),
        option("--count", default=most, show_default=True, type=click.IntRange(1), help="Built-in questions."),
        option("--rate", default=0.1, show_default=True, help="Right answers that are flagged, at most."),
        option("--raw", is_flag=True, help="Questions are plain texts, without the chat template."),
        option("--max-new-tokens", type=click.IntRange(1), help="Length of an answer (64; 12 with --raw)."),
        seed_option("questions, split and training"),
    )

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def call(
            questions: Path | None, count: int, raw: bool, max_new_tokens: int | None, seed: int, **others: Any
        ) -> Any:
            return command(asked=Asked(questions, count, raw, max_new_tokens, seed), **others)

        return options(call)

    return decorate


@command(example="train los --out head")
@_asked()
@option("--k", default=100, show_default=True, type=click.IntRange(0), help="Log-probabilities of a row it reads.")
def los(asked: Asked, out: Path, model: str, rate: float, k: int) -> None:
    """Train LOS-Net to tell MODEL's wrong answers by how likely their tokens and the rivals were.

    QUESTIONS holds one object a line, {"prompt": text, "answer": text, "group": text}: MODEL answers each, greedily. A
    prompt is what a user says, and an answer that holds the one given is right. With --raw it is a plain text, and the
    rest of its line is right where it is the one given. Questions of one group are never both learned from and tested
    on. Without a file: sums and capitals. An interrupted run goes on where it stopped. What is printed is of a part of
    the answers that chose nothing.
    """
    from decodery import load
    from decodery.models.loaders.store import terminal_progress
    from decodery.monitors.los import HEAD
    from decodery.training.los import highest, train_los
    from decodery.training.probe import evaluated

    lm = load(model)
    answers, form = asked.answers(lm, out, (), k)
    with terminal_progress(counts=True) as progress:
        facts = {"model": lm.name, "command": command_line()}
        learn = functools.partial(train_los, k=k, rate=rate, seed=asked.seed, facts=facts, progress=progress, **form)
        head, report = evaluated(answers, learn, highest, asked.seed)
    replace(head, facts={**head.facts, "report": report}).save(out / HEAD)
    told(report, head.threshold)
    click.echo(f"The head is ready: --monitor los:head={out}")


@command(example="train probe --rows prompt --out probe")
@_asked()
@option(
    "--rows",
    type=click.Choice(["prompt", "new"]),
    default="prompt",
    show_default=True,
    help="What it reads: the prompt, for factcheckmate, or each token of the answer, for truthprint.",
)
@option("--site", "sites", multiple=True, help="Where it may read, such as resid_post.15 (five depths); repeated.")
@option("--intervene", is_flag=True, help="Train what factcheckmate adds to hidden states, too.")
def probe(asked: Asked, out: Path, model: str, rate: float, rows: Any, sites: tuple[str, ...], intervene: bool) -> None:
    """Train a probe to tell MODEL's wrong answers by its hidden states: --monitor factcheckmate:probe=DIR, say.

    QUESTIONS and what becomes of them: as for `train los`. The site is the one at which answers kept for validation are
    told apart best.
    """
    from decodery import load
    from decodery.models.loaders.store import terminal_progress
    from decodery.monitors.factcheckmate import SHIFT
    from decodery.monitors.probe import PROBE
    from decodery.training.probe import evaluated, train_probe, worst
    from decodery.training.ranking import parts
    from decodery.training.shift import train_shift

    if intervene and rows != "prompt":
        raise click.UsageError("--intervene goes with --rows prompt")
    lm = load(model)
    sites = sites or five_depths(lm.model.config.num_layers)
    answers, form = asked.answers(lm, out, sites, 1)
    facts = {"model": lm.name, "command": command_line()}
    learn = functools.partial(
        train_probe,
        sites=sites,
        rows=rows,
        model=lm.model.fingerprint,
        rate=rate,
        seed=asked.seed,
        facts=facts,
        **form,
    )
    trained, report = evaluated(answers, learn, worst, asked.seed)
    replace(trained, facts={**trained.facts, "report": report}).save(out / PROBE)
    if intervene:
        part = parts([each.question.group for each in answers], asked.seed)
        learned = [each for each, name in zip(answers, part, strict=True) if name == "train"]
        with terminal_progress(counts=True) as progress:
            shift = train_shift(
                load(model, dtype="float32"),
                learned,
                chat=form["chat"],
                seed=asked.seed,
                facts=facts,
                progress=progress,
            )
        shift.save(out / SHIFT)
    told(report, trained.threshold, site=trained.site)
    name = "factcheckmate" if rows == "prompt" else "truthprint"
    click.echo(f"The probe is ready: --monitor {name}:probe={out}{',action=switch' if intervene else ''}")
