"""Train a process reward model in a published form: a classifier of tokens, as TRL trains and reads it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.models.loaders.fields import INDEX, read_json
from decodery.models.loaders.folder import Shards
from decodery.models.loaders.load import LoadedModel
from decodery.models.loaders.store import Progress, silent, write_text
from decodery.models.protocol import is_open
from decodery.scorers.published_reward import PublishedReward

from .ranking import logistic
from .reward_head import StepExamples, check_rewards, labels_of_steps
from .value import states_of

HEAD, BACKBONE, WEIGHTS = "score.safetensors", "backbone.safetensors", "model.safetensors"
_HELD_OUT = 10
_CAUSAL, _CLASSIFIER = "ForCausalLM", "ForTokenClassification"
_COPIED = ("*.jinja", "tokenizer*.json", "generation_config.json", "special_tokens_map.json", "added_tokens.json")

Judged = tuple[str, str, float, Sequence[float] | None]
"""Prompt, text, its reward, and labels of its steps, which blank lines separate."""


def train_published_prm(
    loaded: LoadedModel,
    source: Path,
    judged: Sequence[Judged],
    out: Path,
    *,
    ridge: float = 1e-3,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Fit a linear head of two labels at the ends of steps, and write a folder that TRL reads.

    The head is a logistic regression on the states after the final norm, of the text's tokens as the form is read:
    question and steps a line each. The folder holds the model's own tensors but its output head.

    Returns:
        How well steps that are not right are told on held-out prompts (`evaluation.figures`), the same of baselines and
        of labels that were shuffled, and the cross-entropy of the head and of the mean there.
    """
    model = loaded.model
    if not is_open(model):
        raise UnsupportedModel("this model gives no hidden states: load it in a form that this package runs")
    check_rewards((reward, labels) for _, _, reward, labels in judged)
    config = _described(source)
    if out.exists() and any(out.iterdir()):
        raise SettingsError(f"{out} is not empty: name a new folder")
    form = PublishedReward("token-classification", None, "last", loaded)
    prompts = list(dict.fromkeys(prompt for prompt, *_ in judged))
    held = set(prompts[::_HELD_OUT])
    learned, tested = StepExamples(), StepExamples()
    for number, (prompt, text, reward, steps) in enumerate(judged):
        tokens, rows = form.rows(prompt, text)
        more = "label steps that blank lines separate"
        wanted = labels_of_steps(reward, steps, len(rows), "between blank lines", more)
        # A step without text is its line's end alone.
        doubts, first = list[float](), form.rows(prompt, "")[1][0]
        found = states_of(model, (), tokens, model.config.num_layers, doubts)[rows]
        normed = model.final_norm(found.to(model.dtype)).float().cpu()
        places = [row - first for row in rows]
        (tested if prompt in held else learned).add(normed, wanted, places, doubts[max(first, 1) - 1 :], prompt)
        progress("reading texts", number + 1, len(judged))
    if not tested.labels or any(len(set(each.labels)) < 2 for each in (learned, tested)):
        raise SettingsError("the steps to learn from or to validate with all have one label: give more prompts")
    states, known = learned.joined
    weight, bias = _fitted(states, known, ridge)
    mixed = known[torch.randperm(len(known), generator=torch.Generator().manual_seed(0), device="cpu")]
    control, _ = _fitted(states, mixed, ridge)
    seen, _ = tested.joined
    values = {
        "tested on": f"{len(held)} prompts that chose nothing",
        **tested.reported(seen @ weight + bias, seen @ control, learned),
    }
    _write(source, out, config, weight, bias)
    return values


def _described(source: Path) -> dict[str, object]:
    """The configuration of the classifier."""
    config = read_json(source / "config.json") if (source / "config.json").is_file() else None
    names = config.get("architectures") if isinstance(config, dict) else None
    if not isinstance(config, dict) or not isinstance(names, list) or not str(names[:1]).strip("[]'").endswith(_CAUSAL):
        raise UnsupportedModel(
            f"{source} is no folder of a causal language model in safetensors: a published reward model is made of one"
        )
    return config | {
        "architectures": [str(names[0]).removesuffix(_CAUSAL) + _CLASSIFIER],
        "num_labels": 2,
        "id2label": {"0": "wrong", "1": "right"},
        "label2id": {"wrong": 0, "right": 1},
    }


def _fitted(states: torch.Tensor, labels: torch.Tensor, ridge: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight [hidden] and bias [] of a logistic regression, on centred states of unit scale."""
    centre, scale = states.mean(dim=0), states.std(dim=0).mean().clamp(min=1e-6)
    rows = torch.nn.functional.pad(((states - centre) / scale).double(), (0, 1), value=1.0)
    found = logistic(rows, labels.double(), ridge, constant=True, line_search_fn="strong_wolfe")
    weight, bias = found[:-1], found[-1]
    return (weight / scale).float(), (bias - (weight * centre / scale).sum()).float()


def _write(source: Path, out: Path, config: dict[str, object], weight: torch.Tensor, bias: torch.Tensor) -> None:
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    shards = Shards(source)
    # `transformers` reads no index beside a file of this name.
    moved = {WEIGHTS: BACKBONE}
    held = {name: Path(file).name for name, file in shards.names.items() if name != "lm_head.weight"}
    shards.close()
    for name in {*held.values(), *(file.name for form in _COPIED for file in source.glob(form))}:
        shutil.copy2(source / name, out / moved.get(name, name))
    names = {name: moved.get(file, file) for name, file in held.items()}
    # The first label is "wrong": the difference of the two is what was learned.
    head = {
        "score.weight": torch.stack([torch.zeros_like(weight), weight]),
        "score.bias": torch.stack([torch.zeros_like(bias), bias]),
    }
    save_file(head, out / HEAD, metadata={"format": "pt"})
    every = {"metadata": {}, "weight_map": names | dict.fromkeys(head, HEAD)}
    write_text(out / INDEX, json.dumps(every))
    write_text(out / "config.json", json.dumps(config, indent=1))
