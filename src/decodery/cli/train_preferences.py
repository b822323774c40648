"""`decodery train orpo` and `grpo`: adapters that learn preferences and rewards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from .command import command, option
from .options import Decorator, together
from .train_common import FILE, command_line, model_option, out_option, resumable, seed_option


def _learning(steps: int, batch: int) -> Decorator:
    return together(
        out_option,
        model_option("to tune"),
        option("--steps", default=steps, show_default=True, help="Training steps."),
        option("--batch", default=batch, show_default=True, help="Pairs or prompts of a step."),
        option("--lr", default=1e-4, show_default=True, help="Peak learning rate."),
        option("--rank", default=8, show_default=True, help="Rank of the adapter."),
        option("--alpha", default=16.0, show_default=True, help="Scale of the adapter: alpha / rank."),
        seed_option("the trained weights, the order and what is drawn"),
    )


@command(example="train orpo pairs.jsonl -m MODEL --out adapter")
@click.argument("pairs", type=FILE)
@_learning(200, 4)
@option("--weight", default=0.1, show_default=True, help="Weight of the odds; 0 learns the chosen texts alone.")
def orpo(
    pairs: Path, out: Path, model: str, steps: int, batch: int, lr: float, rank: int, alpha: float, seed: int,
    weight: float,
) -> None:  # fmt: skip
    """Train a LoRA adapter of MODEL on PAIRS of a chosen and a rejected text (ORPO).

    PAIRS holds one JSON object a line: {"prompt": ..., "chosen": ..., "rejected": ...}. One in ten is held out.
    Interrupt it with Ctrl-C: the same command continues.
    """
    from decodery import load
    from decodery.training.adapter import LoRARemaking
    from decodery.training.orpo import ORPORecipe, read_pairs, train_orpo

    recipe, found = ORPORecipe(weight, steps, batch, lr, seed), read_pairs(pairs)
    with resumable(out) as progress:
        values = train_orpo(
            load(model), found, out, remaking=LoRARemaking(rank, alpha, seed=seed), recipe=recipe,
            command=command_line(), progress=progress,
        )  # fmt: skip
    _told(out, values)


@command(example="train grpo problems.jsonl -m MODEL --out adapter")
@click.argument("problems", type=FILE)
@_learning(100, 2)
@option("--group", default=8, show_default=True, help="Texts of a prompt in a step.")
@option("--beta", default=0.04, show_default=True, help="Weight of the divergence from MODEL.")
@option("--siblings", default=0.0, show_default=True, help="Weight of advantages among texts that part at a token.")
@option("--max-new-tokens", default=256, show_default=True, help="Maximum tokens of a text.")
@option("--temperature", default=1.0, show_default=True, help="Of the texts.")
@option("--prompt", default="{question}", show_default=True, help="What the model is asked.")
@option(
    "--answer",
    type=click.Choice(["auto", "number", "marked", "whole", "choice", "quantity"]),
    default="auto",
    show_default=True,
    help="Where answers stand in a text.",
)
@option("--pattern", metavar="REGEX", help="A regular expression of answers in its place.")
def grpo(
    problems: Path, out: Path, model: str, steps: int, batch: int, lr: float, rank: int, alpha: float, seed: int,
    group: int, beta: float, siblings: float, max_new_tokens: int, temperature: float, prompt: str, answer: Any,
    pattern: str | None,
) -> None:  # fmt: skip
    """Train a LoRA adapter of MODEL on PROBLEMS: its own texts are rewarded for right answers (GRPO).

    PROBLEMS is a file as `decodery search-bench` takes it: a `question` and its `answer`, or a `prompt` and `tests`.
    One problem in ten is held out. Interrupt it with Ctrl-C: the same command continues.
    """
    from dataclasses import asdict

    from decodery import load
    from decodery.bench.searches.problems import read_problems
    from decodery.scorers.sandbox import Sandbox
    from decodery.search.answers import AnswerExtractor
    from decodery.training.adapter import LoRARemaking
    from decodery.training.grpo import GRPORecipe, train_grpo

    found, answers, sandbox = read_problems(problems), AnswerExtractor(answer, pattern or ""), Sandbox(seconds=3.0)
    recipe = GRPORecipe(
        group=group, batch=batch, beta=beta, siblings=siblings, steps=steps, lr=lr, max_new_tokens=max_new_tokens,
        temperature=temperature, seed=seed,
    )  # fmt: skip

    def reward(number: int, texts: Any) -> list[float]:
        return [float(found[number].right(seq.text.text, answers, sandbox)) for seq in texts]

    with resumable(out) as progress:
        values = train_grpo(
            load(model), [prompt.replace("{question}", each.question) for each in found], reward, out,
            remaking=LoRARemaking(rank, alpha, seed=seed), recipe=recipe,
            rewarded=[answer, pattern, [asdict(each) for each in found]], command=command_line(), progress=progress,
        )  # fmt: skip
    _told(out, values)


def _told(out: Path, values: dict[str, float]) -> None:
    click.echo(json.dumps(values, indent=1))
    click.echo(f"The adapter is ready: --logits-source adapter:file={out}")
