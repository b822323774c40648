"""`decodery train`: the commands that train what a method needs, generated from what each kind declares."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .command import Command, Entry, Group, Option
from .options import OUT_FILE, OUT_FOLDER
from .train_common import command_line, resumable, within
from .train_options import given, parameters

if TYPE_CHECKING:
    from decodery.training.kind import Kind

SECTIONS = {
    "Drafters": {
        "draft": Entry("Train a small draft model."),
        "nested": Entry("Train a draft model with exits at several depths.", "draft"),
        "deer": Entry("Train a diffusion model that drafts blocks."),
        "head": Entry("Train a draft head, such as eagle-3 or medusa."),
        "hmm": Entry("Distil a hidden Markov model that drafts."),
        "ppd": Entry("Train prompt tokens for the drafter ppd."),
        "hidden-transfer": Entry("Train maps between hidden states."),
        "lexical-units": Entry("Train placeholders for the drafter lexical-unit."),
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
    """A group whose commands are made of the `KINDS` of modules of `decodery.training`.

    Args:
        path: The words before the name of a command.
    """

    def __init__(self, *args: Any, path: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.path = path

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """The command of a name, whose module is imported now."""
        if name not in self.entries or name == "kv":
            return kv if name in self.entries else None
        module = import_module(f".{self.entries[name].module or name.replace('-', '_')}", "decodery.training")
        return command_of(name, module.KINDS[name], self.path)


def command_of(name: str, kind: Kind, path: str) -> Command:
    """The command of a kind of training.

    Args:
        name: Its name.
        kind: What it declares.
        path: The words before the name.
    """
    from decodery.training.kind import Data

    settings = parameters(kind.settings, kind.without)
    own: list[click.Parameter] = []
    if kind.out:
        file = OUT_FILE if kind.out == "file" else OUT_FOLDER
        needed = " or " not in kind.out
        own.append(Option(["--out"], required=needed, type=file, help=f"Output {kind.out.partition(' ')[0]}."))
    if kind.model:
        text = f"The model {kind.model}."
        more: dict[str, Any] = {"required": True} if kind.default is None else {"default": kind.default}
        own.append(Option(["-m", "--model"], show_default=kind.default is not None, help=text, **more))
    limit = "Stop after so many hours, as Ctrl-C does; the same command continues."
    settings.append(
        Option(["--limit-hours"], type=click.FloatRange(0.0, min_open=True), heading="Training", help=limit)
    )
    arguments = [each for each in settings if isinstance(each, click.Argument)]
    notes = [each.NOTE for each in kind.settings if isinstance(each, Data) and each.NOTE]
    return Command(
        name,
        params=[*arguments, *own, *(each for each in settings if each not in arguments)],
        help="\n\n".join(map(cleandoc, [kind.about, *notes])),
        callback=lambda **values: _run(kind, values),
        example=f"{path} {name} {kind.example}",
    )


def _run(kind: Kind, values: dict[str, Any]) -> None:
    from decodery.core.errors import SettingsError
    from decodery.training.kind import Data, Run

    model, out, hours = values.pop("model", ""), Path(values.pop("out", None) or "."), values.pop("limit_hours")
    try:
        settings = given(kind.settings, values)
    except SettingsError as error:
        raise click.UsageError(str(error)) from error
    kind.check(out)
    for each in settings:
        if isinstance(each, Data):
            each.check()
    with resumable(out) as progress:
        shown = progress if hours is None else within(progress, hours)
        run = Run(model, out, settings, shown, command_line(), lambda text: click.echo(text, err=True))
        figures = kind.learn(run)
    if figures is not None:
        click.echo(json.dumps(figures, indent=1))
    click.echo(kind.ready(run) if callable(kind.ready) else _filled(kind.ready, out, model, settings))


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
