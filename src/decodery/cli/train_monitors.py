"""`decodery train los` and `decodery train probe`: what monitors read answers by."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .command import command, option
from .options import Decorator, chat_template_option, together
from .train_common import FILE, command_line, model_option, out_option, print_report, resumable, seed_option
from .train_states import five_depths

if TYPE_CHECKING:
    from decodery.llm.llm import LLM
    from decodery.training.activations import Answered


@dataclass(frozen=True)
class Asked:
    """What a model answers for a monitor to learn from. file: of questions, None for `count` built-in ones."""

    file: Path | None
    count: int
    apply_chat_template: bool
    most: int | None
    seed: int

    def answers(self, lm: LLM, out: Path, sites: tuple[str, ...], k: int) -> tuple[list[Answered], dict[str, Any]]:
        """The answers, kept in `out`, and what of their form the trained part has to know."""
        from decodery.training.activations import ActivationCollector
        from decodery.training.checkable import built_in, read_checkable

        chat = lm.chat_template is not None and self.apply_chat_template
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
        model_option("to watch"),
        option(
            "--count", default=most, show_default=True, type=click.IntRange(1), help="Number of built-in questions."
        ),
        option("--rate", default=0.1, show_default=True, help="Maximum rate of false alarms."),
        chat_template_option("Questions are plain texts, without the chat template."),
        option(
            "--max-new-tokens",
            type=click.IntRange(1),
            show_default="64; 12 with --no-chat-template",
            help="Length of an answer.",
        ),
        seed_option("questions, split and training"),
    )

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def call(
            questions: Path | None,
            count: int,
            apply_chat_template: bool,
            max_new_tokens: int | None,
            seed: int,
            **others: Any,
        ) -> Any:
            return command(asked=Asked(questions, count, apply_chat_template, max_new_tokens, seed), **others)

        return options(call)

    return decorate


@command(example="train los --out head")
@_asked()
@option(
    "--k", default=100, show_default=True, type=click.IntRange(0), help="Log-probabilities per row that the head reads."
)
def los(asked: Asked, out: Path, model: str, rate: float, k: int) -> None:
    """Train LOS-Net, which detects wrong answers of MODEL by the probabilities of their tokens.

    QUESTIONS holds one JSON object a line, {"prompt": text, "answer": text, "group": text}. MODEL answers each
    greedily. An answer is right if it holds the given one. For plain texts the rest of the line must equal it.
    Questions of a group are never in both training and test set. The default is built-in sums and capitals. An
    interrupted run continues. The printed figures are those of the test set.
    """
    from decodery import load
    from decodery.models.loaders.store import terminal_progress
    from decodery.monitors.los import LOSHead
    from decodery.training.los import highest, train_los
    from decodery.training.probe import evaluated

    lm = load(model)
    answers, form = asked.answers(lm, out, (), k)
    with terminal_progress(counts=True) as progress:
        facts = {"model": lm.name, "command": command_line()}
        learn = functools.partial(train_los, k=k, rate=rate, seed=asked.seed, facts=facts, progress=progress, **form)
        head, report = evaluated(answers, learn, highest, asked.seed)
    replace(head, facts={**head.facts, "report": report}).save(out / LOSHead.FILE)
    print_report(report, head.threshold)
    click.echo(f"The head is ready: --monitor los:head={out}")


@command(example="train probe --rows prompt --out probe")
@_asked()
@option(
    "--rows",
    type=click.Choice(["prompt", "new"]),
    default="prompt",
    show_default=True,
    help="Rows to read. prompt: for factcheckmate. new: each token of the answer, for truthprint.",
)
@option(
    "--site",
    "sites",
    multiple=True,
    show_default="five depths",
    help="Hook point to try, such as resid_post.15. Repeatable.",
)
@option("--intervene", is_flag=True, help="Train the intervention of factcheckmate, too.")
def probe(asked: Asked, out: Path, model: str, rate: float, rows: Any, sites: tuple[str, ...], intervene: bool) -> None:
    """Train a probe that detects wrong answers of MODEL by its hidden states.

    QUESTIONS is the same as for `decodery train los`. The hook point with the best result on the validation set is
    used. The probe is for the monitors factcheckmate and truthprint.
    """
    from decodery import load
    from decodery.models.loaders.store import terminal_progress
    from decodery.monitors.factcheckmate import Shift
    from decodery.monitors.probe import Probe
    from decodery.training.probe import evaluated, train_probe, worst
    from decodery.training.ranking import parts
    from decodery.training.shift import train_shift

    if intervene and rows != "prompt":
        raise click.UsageError("--intervene needs --rows prompt")
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
    replace(trained, facts={**trained.facts, "report": report}).save(out / Probe.FILE)
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
        shift.save(out / Shift.FILE)
    print_report(report, trained.threshold, site=trained.site)
    name = "factcheckmate" if rows == "prompt" else "truthprint"
    click.echo(f"The probe is ready: --monitor {name}:probe={out}{',action=switch' if intervene else ''}")
