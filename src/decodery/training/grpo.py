"""GRPO: an adapter learns from rewards of the model's own texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.noise import nth_seed
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.loaders.adapters import tuned
from decodery.sampling.sampler import Sampler
from decodery.step.sequence import Sequence as Text

from .adapter import adapter_of
from .adapter_learner import HELD, AdapterLearner
from .held_out import hold_out
from .kind import COUNT, NON_NEGATIVE, POSITIVE, Bounded, Run, bounded, option
from .loop import batches, content

_TOGETHER = 32
"""How many held-out prompts are decoded together."""


@dataclass(frozen=True)
class GRPORecipe(Bounded):
    """How rewards are learned.

    Attributes:
        siblings: Weight of advantages among texts that part at a token (Sibling-GRPO).
    """

    group: int = bounded(8, "[2, inf)", "Texts of a prompt in a step.")
    batch: int = option(2, "Prompts of a step.")
    beta: float = bounded(0.04, NON_NEGATIVE, "Weight of the divergence from MODEL.")
    siblings: float = bounded(0.0, NON_NEGATIVE)
    steps: int = 100
    lr: float = 1e-4
    max_new_tokens: int = bounded(256, COUNT, "Maximum tokens of a text.")
    temperature: float = bounded(1.0, POSITIVE, "Sampling temperature of the texts.")
    seed: int = option(0, "Random seed of the trained weights, the order and what is drawn.")


def advantages(texts: Sequence[Sequence[int]], rewards: Sequence[float], siblings: float = 0.0) -> list[np.ndarray]:
    """Of each token of a group of texts of one prompt.

    A text's advantage is its reward less the group's mean, divided by the group's deviation (GRPO, 2024). With
    `siblings` those of Sibling-GRPO are added: where texts that began alike go on with different tokens, each of these
    tokens counts the mean reward of the texts after it, normalised among them.
    """
    values = np.array(rewards, dtype=np.float64)
    whole = _normalised(values)
    found = [np.full(len(text), each) for text, each in zip(texts, whole, strict=True)]
    if not siblings:
        return found
    # Beginnings go by numbers: as tuples they would take the square of a text's length.
    beginnings: dict[tuple[int, int], int] = {}
    parents: dict[tuple[int, int], dict[int, list[int]]] = {}
    for number, text in enumerate(texts):
        begun = 0
        for at, token in enumerate(text):
            parents.setdefault((begun, at), {}).setdefault(token, []).append(number)
            begun = beginnings.setdefault((begun, token), len(beginnings) + 1)
    for (_, at), children in parents.items():
        if len(children) < 2:
            continue
        shares = _normalised(np.array([values[members].mean() for members in children.values()]))
        for members, share in zip(children.values(), shares, strict=True):
            for number in members:
                found[number][at] += siblings * share
    return found


def _normalised(values: np.ndarray) -> np.ndarray:
    deviation = values.std()
    found: np.ndarray = (values - values.mean()) / deviation if deviation > 1e-9 else np.zeros_like(values)
    return found


def train_grpo(
    run: Run, prompts: Sequence[str], reward: Callable[[int, Sequence[Text]], Sequence[float]], rewarded: object = None
) -> dict[str, Any]:
    """Train an adapter on rewards of the model's own texts and leave it in the folder of a run.

    Each step draws groups of texts from the model as it is, so that no importance weights are needed. One prompt in ten
    is held out.

    Args:
        rewarded: What the reward depends on, as JSON can hold it: an interrupted run goes on only with the same.

    Returns:
        The mean `reward` of one text of each held-out prompt that chose nothing, drawn by the prompt's own seed, see
        `HeldOut.report`.
    """
    recipe, learner = run.of(GRPORecipe), AdapterLearner(run)
    learned, held = hold_out(prompts, HELD)
    if not held:
        raise SettingsError(f"grpo learns from 2 prompts or more, not {len(set(prompts))}")
    batch = batches(len(learned), min(recipe.batch, len(learned)), recipe.seed)

    def drawn(numbers: Sequence[int], each: int, seeds: Sequence[int]) -> list[list[Text]]:
        return _draw(learner, [prompts[number] for number in numbers], each, seeds, recipe)

    def loss(step: int) -> torch.Tensor:
        numbers = [learned[int(each)] for each in batch(step)]
        first = (step + 1) << 20
        seeds = [nth_seed(recipe.seed, first + place * recipe.group) for place in range(len(numbers))]
        groups = drawn(numbers, recipe.group, seeds)
        texts, wanted = [], []
        for number, group in zip(numbers, groups, strict=True):
            outputs = [seq.generated for seq in group]
            wanted += advantages(outputs, reward(number, group), recipe.siblings)
            texts += [learner.joined(seq.tokens[: seq.request.prompt_length], seq.generated) for seq in group]
        logs = learner.logprobs(texts, temperature=recipe.temperature)
        with torch.no_grad():
            base = learner.logprobs(texts, temperature=recipe.temperature, plain=True)
        losses = []
        for own, known, worth in zip(logs, base, wanted, strict=True):
            distance = torch.expm1(known - own) - (known - own)
            losses.append((recipe.beta * distance - torch.from_numpy(worth).to(own) * own).mean())
        return torch.stack(losses).mean()

    known: dict[int, float] = {}

    def figures(numbers: Sequence[int]) -> dict[str, float]:
        if len(numbers) < len(known) and known.keys() >= set(numbers):
            # `HeldOut.measured` reads each prompt's reward after all of them: its text has been drawn.
            return {"reward": float(np.mean([known[number] for number in numbers]))}
        found: dict[int, float] = {}
        for begun in range(0, len(numbers), _TOGETHER):
            some = numbers[begun : begun + _TOGETHER]
            groups = drawn(some, 1, [nth_seed(recipe.seed, 1 + number) for number in some])
            found |= {number: reward(number, group)[0] for number, group in zip(some, groups, strict=True)}
        known.clear()
        known.update(found)
        return {"reward": float(np.mean(list(found.values())))}

    data = content([list(prompts), rewarded, held])
    return learner.train(
        *(loss, figures, held, "reward", recipe, [prompts[number] for number in held]),
        higher=True,
        prompts=len(prompts),
        data=data,
    )


@torch.no_grad()
def _draw(
    learner: AdapterLearner, prompts: Sequence[str], each: int, seeds: Sequence[int], recipe: GRPORecipe
) -> list[list[Text]]:
    """Texts of the model as it is, `each` of a prompt; `seeds` are those of the first one of each."""
    # Kernels run what was learned as it will be used.
    model = tuned(learner.original, adapter_of(learner.remade, {}))
    engine = Engine(model, detokenizer=learner.lm.tokenizer.stream)
    sampler, ends = Sampler.from_settings(temperature=recipe.temperature), sorted(learner.lm.tokenizer.eos_ids)
    found: list[list[Text]] = []
    for prompt, seed in zip(prompts, seeds, strict=True):
        tokens, group = learner.lm.encode(prompt), list[Text]()
        for at in range(each):
            request = Request(tokens, recipe.max_new_tokens, sampler, seed=nth_seed(seed, at), eos_ids=ends)
            group.append(engine.submit(request, like=group[0] if group else None))
        found.append(group)
    engine.run([seq for group in found for seq in group])
    return found
