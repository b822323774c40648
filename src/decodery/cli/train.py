"""`decodery train`: the commands that train what a method needs, generated from what each kind declares."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.resources import files
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .command import Command, Entry, Group, Option
from .options import OUT_FILE, OUT_FOLDER
from .train_common import Clock, command_line, resumable, within
from .train_options import Parameter, described, given, parameter

if TYPE_CHECKING:
    from decodery.training.kind import Kind

INDEX = "training.json"
"""The static index of kinds, beside this file."""
SECTIONS = {
    "Drafters": {
        "draft": Entry("Train a small draft model."),
        "nested": Entry("Train a draft model with exits at several depths.", "draft"),
        "deer": Entry("Train a diffusion model that drafts blocks."),
        "head": Entry("Train a draft head, such as eagle-3 or medusa."),
        "hmm": Entry("Distil a hidden Markov model that drafts."),
        "ppd": Entry("Train prompt tokens for the drafter ppd.", "placeholders"),
        "hidden-transfer": Entry("Train maps between hidden states."),
        "lexical-units": Entry("Train placeholders for the drafter lexical-unit.", "placeholders"),
        "swift": Entry("Find the sublayers that a self-drafting model skips."),
        "del": Entry("Find the exit layers of the drafter del.", "dynamic_exit"),
        "cppd": Entry("Train slots that draft short texts at once."),
        "datastore": Entry("Index text files for the drafter rest."),
        "ngram-cache": Entry("Build the n-gram cache of the drafter auto."),
        "ngrams": Entry("Count n-grams for suggestions.", "ngram_cache"),
        "kv-bottleneck": Entry("Fit keys for the drafter discrete-key-value."),
        "acceptance": Entry("Train a head for the draft length policy specdec++."),
    },
    "Models": {
        "lora": Entry("Train a LoRA adapter.", "adapter"),
        "s2ft": Entry("Train an S2FT adapter: some heads and channels.", "adapter"),
        "orpo": Entry("Train a LoRA adapter on pairs of texts."),
        "grpo": Entry("Train a LoRA adapter on rewards of its own texts.", ".cli.train_grpo"),
        "hyperfit": Entry("Overfit a copy on a few texts, for greedy decoding."),
        "bitnet": Entry("Train a ternary copy of a model."),
        "nm-sparsity": Entry("Train a copy with N:M sparsity."),
        "lq-lora": Entry("Train the low-rank part of a low-bit copy."),
        "diffusion": Entry("Train a small masked diffusion model."),
        "to-diffusion": Entry("Adapt a causal model to masked diffusion."),
        "dscd": Entry("Distil a diffusion model for fewer passes."),
        "r2": Entry("Tune a diffusion model to the decoder r2."),
    },
    "Monitors": {
        "los": Entry("Train LOS-Net, which detects wrong answers."),
        "probe": Entry("Train a probe that detects wrong answers."),
        "sequential": Entry("Train a probe of whole conversations."),
        "direction": Entry("Find a direction of hidden states."),
        "sae": Entry("Find the attention heads of a behaviour.", "head_texts"),
        "codebook": Entry("Train codebooks of hidden states."),
        "autoencoder": Entry("Train a sparse autoencoder of hidden states."),
        "threshold": Entry("Set the threshold of any monitor on your texts.", "monitor_threshold"),
    },
    "Scorers": {
        "value": Entry("Train a head that predicts the reward of a text."),
        "text-prm": Entry("Train a process reward model on judged texts."),
        "step-labels": Entry("Label the steps of solutions by reference solutions."),
        "router": Entry("Train a router for the search arbitrage."),
    },
    "Samplers": {
        "judge": Entry("Train a head for the acceptance rule judge."),
        "adadec-thresholds": Entry("Fit the threshold of the acceptance rule adadec."),
        "calm": Entry("Calibrate early exit for the source calm."),
        "sec": Entry("Train early-exit checks for the source sec."),
        "ftp": Entry("Train routers that prune prompt tokens."),
        "hamburger": Entry("Train a model to write groups of tokens."),
        "sven": Entry("Train prefixes that steer code generation."),
        "partial": Entry("Train an attention to the prompt alone."),
        "learn2pd": Entry("Train the filter of the decoder learn2pd."),
    },
    "Caches": {
        "kv": Entry("Train or calibrate a KV cache policy (five commands)."),
        "merges": Entry("Train embeddings of merged prompt tokens."),
    },
}
"""The commands as the help of `decodery train` lists them, with the module of `decodery.training` that has each."""
KV = {
    "Commands": {
        "double-sparsity": Entry("Calibrate the channels of double-sparsity.", "key_channels"),
        "lserve": Entry("Train the head gates of lserve.", "head_gates"),
        "write-gate": Entry("Train the gate of write-gate.", "write_gates"),
        "coprocessor": Entry("Train the adapters of coprocessor."),
        "meta-soft": Entry("Train the soft tokens of meta-soft.", "meta_tokens"),
    }
}


class Kinds(Group):
    """A group whose commands are made of the static index of kinds; a kind is imported when its command runs.

    Args:
        path: The words before the name of a command.
    """

    def __init__(self, *args: Any, path: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.path = path

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """The command of a name."""
        if name not in self.entries or name == "kv":
            return kv if name in self.entries else None
        return command_of(name, index()[f"{self.path} {name}"], self.path, lambda: self.kind(name))

    def kind(self, name: str) -> Kind:
        """What the kind of a name declares; its module is imported now."""
        from decodery.training.kind import KINDS

        import_module(f".{self.entries[name].module or name.replace('-', '_')}", "decodery.training")
        return KINDS[name]


@cache
def index() -> dict[str, dict[str, Any]]:
    """By command: what `described_kind` says of it, as `tools/training_index.py` wrote it; no kind is imported."""
    found: dict[str, dict[str, Any]] = json.loads((files(__package__) / INDEX).read_text(encoding="utf-8"))
    return found


def described_kind(kind: Kind) -> dict[str, Any]:
    """What the command of a kind is made of, in values that JSON has."""
    from decodery.training.kind import Data

    notes = [each.NOTE for each in kind.settings if isinstance(each, Data) and each.NOTE]
    return {
        "help": "\n\n".join(map(cleandoc, [kind.about, *notes])),
        "example": kind.example,
        "out": kind.out,
        "model": kind.model,
        "default": kind.default,
        "parameters": [each.as_dict() for each in described(kind.settings, kind.without)],
    }


def command_of(name: str, entry: Mapping[str, Any], path: str, kind: Callable[[], Kind]) -> Command:
    """The command of a kind of training.

    Args:
        name: Its name.
        entry: What `described_kind` says of it.
        path: The words before the name.
        kind: Imports the kind.
    """
    settings = [parameter(Parameter.of(each)) for each in entry["parameters"]]
    own: list[click.Parameter] = []
    if out := entry["out"]:
        file = OUT_FILE if out == "file" else OUT_FOLDER
        own.append(Option(["--out"], required=" or " not in out, type=file, help=f"Output {out.partition(' ')[0]}."))
    if entry["model"]:
        default = entry["default"]
        more: dict[str, Any] = {"required": True} if default is None else {"default": default}
        text = f"The model {entry['model']}."
        own.append(Option(["-m", "--model"], show_default=default is not None, help=text, **more))
    limit = "Stop after so many hours, as Ctrl-C does; the same command continues."
    settings.append(
        Option(["--limit-hours"], type=click.FloatRange(0.0, min_open=True), heading="Training", help=limit)
    )
    arguments = [each for each in settings if isinstance(each, click.Argument)]
    return Command(
        name,
        params=[*arguments, *own, *(each for each in settings if each not in arguments)],
        help=entry["help"],
        callback=lambda **values: _run(f"{path} {name}".partition(" ")[2], kind(), values),
        example=f"{path} {name} {entry['example']}",
    )


def _run(name: str, kind: Kind, values: dict[str, Any]) -> None:
    from decodery.core.errors import SettingsError
    from decodery.training.card import check_folder, write_card
    from decodery.training.kind import Data, Run

    model, named, hours = values.pop("model", ""), values.pop("out", None), values.pop("limit_hours")
    out = Path(named or ".")
    try:
        settings = given(kind.settings, values)
    except SettingsError as error:
        raise click.UsageError(str(error)) from error
    if kind.file:
        check_folder(out, kind.file)
    for each in settings:
        if isinstance(each, Data):
            each.check()
    say, single = (lambda text: click.echo(text, err=True)), kind.out == "file"
    run = Run(model, out, settings, command=command_line(), say=say, single=single)
    clock = Clock(run if named else None)
    with resumable(out) as progress:
        run.progress = clock.kept(progress if hours is None else within(progress, hours))
        try:
            figures = kind.learn(run)
        finally:
            clock.keep()
    ready = kind.ready(run) if callable(kind.ready) else _filled(kind.ready, out, model, settings)
    if figures is not None:
        if named and not single:
            use = ready.rpartition(": ")[2].replace(str(out), "THIS_FOLDER")
            if kind.model and "-m " not in use and "--model " not in use:
                use = f"-m {run.model} {use}"
            about = cleandoc(kind.about).partition("\n\n")[0].replace("MODEL", run.model)
            made: dict[str, Any] = {"settings": settings, "command": run.command, "figures": figures}
            write_card(out, name, about=about, use=use, hours=clock.hours, **made)
        click.echo(json.dumps({**figures, "hours": round(clock.hours, 4)}, indent=1))
    click.echo(ready)


def _filled(text: str, out: Path, model: str, settings: tuple[Any, ...]) -> str:
    names: Mapping[str, Any] = {name: value for each in settings for name, value in vars(each).items()}
    return text.format(**{**names, "out": out, "model": model})


@click.group(cls=Kinds, sections=SECTIONS, path="train", example="train head --kind eagle-3 -m smollm2 --out head")
def train() -> None:
    """Train what a method needs, such as a draft model, a head or a probe.

    Most commands learn from texts that the model writes first. An interrupted command continues if it is run again.
    """


@click.group("kv", cls=Kinds, sections=KV, path="train kv", example="train kv lserve notes.txt --out gates")
def kv() -> None:
    """Train or calibrate what a KV cache policy needs."""
