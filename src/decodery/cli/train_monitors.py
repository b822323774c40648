"""`decodery train los`, `probe` and `threshold`: what monitors read answers by, and where they flag."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .command import command, option
from .options import OUT_FOLDER, Decorator, chat_template_option, together
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

    @property
    def labelled(self) -> bool:
        """Whether the file holds texts with labels of their own."""
        from decodery.training.labelled import is_labelled

        return self.file is not None and is_labelled(self.file)

    def answers(
        self, lm: LLM, out: Path, sites: tuple[str, ...], k: int, *, whole: bool
    ) -> tuple[list[Answered], dict[str, Any]]:
        """The answers, kept in `out`, and what of their form the trained part has to know. whole: no prompt alone."""
        from decodery.training.activations import ActivationCollector, read_answers
        from decodery.training.checkable import built_in, read_checkable
        from decodery.training.labelled import read_chats

        if self.file is not None and self.labelled:
            if self.most is not None or not self.apply_chat_template:
                raise click.UsageError(
                    "--max-new-tokens and --no-chat-template go with questions that the model answers, and this file "
                    "holds labelled texts"
                )
            chats = read_chats(self.file, answers=whole)
            with resumable(out) as progress:
                read = read_answers(lm, chats, sites, k, progress)
            longest = max(len(each.tokens) for each in read) if whole else None
            return read, {"chat": True, "tokens": longest, "data": str(self.file)}
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

    Or it holds your own texts with labels, {"messages": [...], "label": true or false, "group": text}: true for what
    the monitor is to detect in the last answer.
    """
    from decodery import load
    from decodery.models.loaders.store import terminal_progress
    from decodery.monitors.los import LOSHead
    from decodery.training.los import highest, train_los
    from decodery.training.probe import evaluated

    lm = load(model)
    answers, form = asked.answers(lm, out, (), k, whole=True)
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

    if intervene and (rows != "prompt" or asked.labelled):
        raise click.UsageError("--intervene needs --rows prompt, and questions with answers")
    lm = load(model)
    sites = sites or five_depths(lm.model.config.num_layers)
    answers, form = asked.answers(lm, out, sites, 1, whole=rows == "new")
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


@command(example="train threshold texts.jsonl --monitor confidence:measure=worst --rate 0.05")
@click.argument("texts", type=FILE)
@option("--out", type=OUT_FOLDER, help="Output folder of a monitor with a trained part.")
@model_option("that writes the texts")
@option("--monitor", required=True, metavar="METHOD", help="Monitor with its settings, such as truthprint:probe=DIR.")
@option("--rate", default=0.1, show_default=True, help="Maximum rate of false alarms.")
@option(
    "--per",
    "unit",
    type=click.Choice(["text", "conversation"]),
    default="text",
    show_default=True,
    help="What the rate is of. text: the last answer. conversation: all answers of a conversation.",
)
@seed_option("the split")
def threshold(texts: Path, out: Path | None, model: str, monitor: str, rate: float, unit: str, seed: int) -> None:
    """Set the threshold of any monitor on your own TEXTS.

    TEXTS holds one JSON object a line, {"messages": [...], "label": true or false, "group": text}. The monitor scores
    each text as it does while MODEL writes, and the highest score of a text decides: a further harmless text like these
    is flagged at any of its tokens with at most the given rate. A fifth of the groups is the test set, whose figures
    are printed. A monitor with a trained part is written to --out with the new threshold. Give texts that it was not
    trained on.
    """
    from decodery import load
    from decodery.core.registry import resolve
    from decodery.models.loaders.store import terminal_progress
    from decodery.training.labelled import read_chats
    from decodery.training.monitor_threshold import calibrate, trained_part, with_threshold

    chats, watching = read_chats(texts), resolve("monitor", monitor)
    known = trained_part(watching)
    if (known is None) != (out is None):
        raise click.UsageError(
            f"--monitor {monitor} has no trained part: leave --out out"
            if known is None
            else f"--monitor {monitor} has a trained part, which keeps its threshold: give --out DIR"
        )
    if known is not None and _learned_from(known[1]) == str(texts):
        raise click.UsageError(
            f"--monitor {monitor} was trained on {texts}, and scores of texts that it knows promise nothing of others: "
            "give other texts"
        )
    lm = load(model)
    with terminal_progress(counts=True) as progress:
        found, report = calibrate(lm, chats, watching, rate, unit=unit, seed=seed, data=str(texts), progress=progress)
    print_report(report, found)
    if known is None or out is None:
        click.echo(f"The threshold is ready: --monitor {_with_setting(monitor, 'threshold', repr(found.value))}")
        return
    setting, part = known
    with_threshold(part, found, report | {"command": command_line()}).save(out / part.FILE)
    click.echo(f"The monitor is ready: --monitor {_with_setting(monitor, setting, str(out))}")


def _learned_from(part: Any) -> str | None:
    """What a part was trained on; None where a later threshold took the place of the one that says it."""
    return None if "calibration" in part.facts else part.threshold.data


def _with_setting(monitor: str, setting: str, value: str) -> str:
    """A monitor as it is given, with a setting in place of its own one and of its threshold.

    The other settings stay: the scores that a threshold was set on may go by them.
    """
    from decodery.core.method_spec import parts, split

    name, settings = parts(monitor)
    kept = [each for each in split(settings, ",") if each.partition("=")[0].strip() not in ("", setting, "threshold")]
    return f"{name}:{','.join([*kept, f'{setting}={value}'])}"
