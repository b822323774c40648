"""Train a process reward model on judged texts: at the end of every step a head learns how the text turned out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from decodery.core.errors import SettingsError
from decodery.models.cache.cache import KVCache
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.scorers.process_reward import ProcessHead

from .kind import ARGUMENT, PLAIN, Bounded, Data, Run, kind, option
from .loop import content
from .published_prm import train_published_prm
from .ranking import auc
from .reward_head import PRM, StepExamples, check_rewards, fitted, labels_of_steps
from .value import read_judged, read_on, read_step_labels

_HELD_OUT = 10


@dataclass(frozen=True)
class TextPRMRecipe(Bounded):
    """How judged texts are learned."""

    delimiter: str = option("\n\n", "Text that ends a step.")
    tap: int | None = option(None, "Read the hidden states after N layers; after all by default.")
    steps: int = 600
    batch: int = option(256, "Steps of texts in a training step.")
    lr: float = 3e-3
    weight_decay: float = option(0.01, "Weight decay of the optimizer.")
    seed: int = option(0, "Random seed of the initial weights and the order.")


@dataclass(frozen=True)
class JudgedText:
    """A text with the reward of its steps.

    Attributes:
        prompt, text: Token ids, the end token left out.
    """

    prompt: Sequence[int]
    text: Sequence[int]
    reward: float
    labels: Sequence[float] | None = None  # From 0 to 1, of each step; None where all steps have the reward.


def train_text_prm(run: Run, judged: Sequence[JudgedText]) -> ProcessHead:
    """Train a head that predicts, after every step of a text, its expected reward.

    The head is left in the folder of a run. Where steps have no labels, every beginning has the reward of its text, as
    one rollout after it: for texts drawn by the model itself that is an unbiased label of it (Math-Shepherd, 2024, with
    one completion). One prompt in ten is held out, of those with a good text and of the others: half of these choose
    the best step, and the head's facts have the figures of the other half as "validation", see `reported`.
    """
    recipe, model, tokenizer = run.of(TextPRMRecipe), run.lm.model, run.lm.tokenizer
    tap = model.config.num_layers if recipe.tap is None else recipe.tap
    if not 0 <= tap <= model.config.num_layers:
        raise SettingsError(f"a layer to tap lies between 0 and {model.config.num_layers}, not {tap}")
    check_rewards((each.reward, each.labels) for each in judged)
    groups: dict[tuple[int, ...], list[JudgedText]] = {}
    for each in judged:
        groups.setdefault(tuple(each.prompt), []).append(each)
    # What is learned, what chooses the best step, and what chooses nothing.
    parts = [StepExamples() for _ in range(3)]
    cache, read = model.new_cache(), tuple[int, ...]()

    def after(prompt: tuple[int, ...]) -> KVCache:
        """A cache that holds a prompt, for all of its texts; what it begins with as the one before is read once."""
        nonlocal read
        alike = next(
            (at for at, (new, old) in enumerate(zip(prompt, read, strict=False)) if new != old),
            min(len(prompt), len(read)),
        )
        cache.truncate(alike)
        read_on(model, cache, prompt[alike:], tap)
        read = prompt
        return cache

    # Good texts may be so rare that a tenth of all prompts has none.
    kinds = [0, 0]
    for number, (prompt, texts) in enumerate(groups.items()):
        good = max(each.reward for each in texts) > 0.5
        kinds[good] += 1
        held = 0 if kinds[good] % _HELD_OUT != 1 else 1 + kinds[good] // _HELD_OUT % 2
        for each in texts:
            ends = step_ends(tokenizer, each.text, recipe.delimiter)
            which, more = f"that end with {recipe.delimiter!r}", "give the delimiter by which its steps were labelled"
            of_steps = labels_of_steps(each.reward, each.labels, len(ends), which, more)
            if ends and len(prompt) + len(each.text) <= model.config.max_positions:
                # The first token's probability is that after the prompt's last one.
                doubts, last = [] if prompt else [0.0], prompt[-1:]
                states = read_on(model, after(prompt[:-1]).fork(), [*last, *each.text], tap, doubts)[len(last) :]
                parts[held].add(states.float()[ends], of_steps, ends, doubts, str(number))
        run.progress("reading texts", number + 1, len(groups))
    for known, name in zip(parts, ("learn from", "validate with"), strict=False):
        if len(set(known.labels)) < 2:
            raise SettingsError(
                f"the texts to {name} all have one reward: give more prompts with good texts and with others"
            )
    learned, held_out = parts[0].joined, parts[1].joined
    settings = {"recipe": asdict(recipe), "model": model.fingerprint, "texts": content([vars(each) for each in judged])}
    how: dict[str, Any] = {"weight_decay": recipe.weight_decay, "progress": run.progress}
    head, scores, costs = fitted(model, tap, learned, held_out, recipe, run.out, settings=settings, **how)
    order = torch.randperm(len(learned[1]), generator=torch.Generator().manual_seed(recipe.seed), device="cpu")
    mixed, beside = (learned[0], learned[1][order]), run.training / "control"
    control, _, _ = fitted(model, tap, mixed, held_out, recipe, beside, settings=settings, **how)
    facts: dict[str, object] = {
        "command": run.command,
        "recipe": asdict(recipe),
        "texts": len(judged),
        "prompts": len(groups),
        "mean": round(float(learned[1].mean()), 4),
        "auc": round(auc(scores, held_out[1].numpy() > 0.5), 4),
        **costs,
    }
    alone = len({label > 0.5 for label in parts[2].labels}) < 2
    tested = parts[1] if alone else parts[2]
    states, _ = tested.joined
    said = "also chose the best step" if alone else "chose nothing"
    facts["validation"] = {
        "tested on": f"{len(set(tested.prompts))} prompts that {said}",
        **tested.reported(head.logits(states), control.logits(states), parts[0]),
    }
    found = replace(head, facts=facts)
    found.save(run.out / PRM)
    return found


def step_ends(tokenizer: Tokenizer, text: Sequence[int], delimiter: str) -> list[int]:
    """The places in `text` of tokens with which steps end, as searches over steps end them.

    The last one is the end's. A delimiter may stand within a token, which then belongs to the step whole.
    """
    stream, piece, found = tokenizer.stream(), "", list[int]()
    for place, token in enumerate(text):
        piece += stream.push([token])
        before, _, _ = piece.rpartition(delimiter)
        if before.replace(delimiter, "").strip():
            found.append(place)
            piece = ""
    if text and (not found or found[-1] != len(text) - 1):
        found.append(len(text) - 1)
    return found


@dataclass(frozen=True)
class JudgedFile(Data):
    """Judged texts.

    Attributes:
        published: Write a folder in a published form, a classifier of tokens, for reward-model:model=DIR. MODEL is a
            folder.
    """

    texts: Path = field(default=Path(), metadata=ARGUMENT)
    apply_chat_template: bool = option(True, "The prompts are plain text, without the chat template.", **PLAIN)
    published: bool = False

    def read(self) -> list[tuple[str, str, float, Sequence[float] | None]]:
        """Prompts, texts, rewards and labels of steps."""
        found = zip(read_judged(self.texts), read_step_labels(self.texts), strict=True)
        return [(*text, labels) for text, labels in found]

    def check(self) -> None:
        self.read()


def _publish(run: Run, given: JudgedFile, recipe: TextPRMRecipe) -> dict[str, Any]:
    if recipe.delimiter != TextPRMRecipe.delimiter or recipe.tap is not None or not given.apply_chat_template:
        raise SettingsError("--published reads questions as text and steps between blank lines: leave others out")
    if not Path(run.model).is_dir():
        raise SettingsError(
            f"--published copies the tensors of a folder of safetensors, and {run.model} is none: give one"
        )
    return train_published_prm(run.loaded, Path(run.model), given.read(), run.out, progress=run.progress)


def _ready(run: Run) -> str:
    published = run.of(JudgedFile).published
    use = f"reward-model:model={run.out}" if published else f"process-reward:head={run.out / PRM}"
    return f"The reward model is ready: {use}"


@kind(_ready, (JudgedFile(), TextPRMRecipe()), "texts.jsonl --out prm", model="whose hidden states are read")
def _text_prm(run: Run) -> dict[str, Any]:
    """Train a head on judged TEXTS that predicts, step by step, whether a text will be right.

    TEXTS holds one JSON object a line: {"prompt": ..., "text": ..., "reward": from 0 to 1}; "labels" with a number
    of each step, as `decodery train step-labels` writes them, are learned in place of the reward. Several samples
    of MODEL for each prompt are best. One prompt in ten is held out. It is a scorer for any search:
    process-reward:head=DIR/process-reward.safetensors.
    """
    given = run.of(JudgedFile)
    if given.published:
        return _publish(run, given, run.of(TextPRMRecipe))
    lm = run.lm
    judged = [
        JudgedText(
            lm.encode(prompt, apply_chat_template=given.apply_chat_template),
            lm.tokenizer.encode(text, special=False),
            reward,
            labels,
        )
        for prompt, text, reward, labels in given.read()
    ]
    found = (train_text_prm(run, judged).facts or {})["validation"]
    assert isinstance(found, dict)
    return found
