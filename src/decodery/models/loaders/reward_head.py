"""Heads of published reward models: which tensors each has, and what they make of hidden states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from decodery.core.errors import CorruptFile, UnsupportedModel

from .fields import Fields, Number, Whole

Kind = Literal["qwen-prm", "qwen-rm", "skywork-prm", "sequence-classification", "token-classification", "gated"]
Tensors = Mapping[str, torch.Tensor]

_ENDINGS: dict[str, Kind] = {
    "ForProcessRewardModel": "qwen-prm",
    "Qwen2ForRewardModel": "qwen-rm",
    "ForSequenceClassification": "sequence-classification",
    "ForTokenClassification": "token-classification",
    "ForRewardModelWithGating": "gated",
}
_ONE_OUTPUT = ("skywork-prm", "sequence-classification", "qwen-rm")
_LAYERS = ("score.0", "score.2")
"""A layer with a ReLU after it, and the output."""
_OTHER_HEADS = ("v_head.", "value_head.", "reward_head.", "regression_head.", "rm_head.")
"""Tensors of heads that are read by code of their own."""
_MIXED = ("regression_layer.weight", "reward_transform_matrix", "gating.logit_scale")
_GATE_KEYS = ("num_objectives", "gating_temperature", "gating_hidden_dim", "gating_n_hidden")
_OF_HEADS = ("id2label", "label2id", "num_labels", "problem_type", "classifier_dropout", "auto_map", "score_bias")
KEYS = (*_OF_HEADS, *_GATE_KEYS)
"""Configuration keys that concern a head alone."""
_TEMPERATURE, _HIDDEN_LAYERS = 10.0, 3
_OF_GATES = {"gating_n_hidden": Whole(0, 64), "gating_temperature": Number(1e-6, 1e6)}


@dataclass(frozen=True, eq=False)
class RewardHead:
    """A head with its tensors.

    Attributes:
        kind: How the model is asked.
        tensors: float32, by their names in the file.
        temperature: Of a gate.
    """

    kind: Kind
    tensors: Tensors
    temperature: float = _TEMPERATURE

    def outputs(self, states: torch.Tensor) -> torch.Tensor:
        """What the head makes of states after the final norm.

        Args:
            states: [n, hidden]. For a gated head, that of the prompt's end and that of the text's end.

        Returns:
            [n, 1 or 2]; [1, 1] for a gated head.
        """
        parts = {name: tensor.to(states) for name, tensor in self.tensors.items()}
        if self.kind == "gated":
            return self._gated(states, parts)
        if f"{_LAYERS[0]}.weight" in parts:
            first, last = _LAYERS
            return _linear(torch.relu(_linear(states, parts, first)), parts, last)
        return _linear(states, parts, "v_head.summary" if self.kind == "skywork-prm" else "score")

    def _gated(self, states: torch.Tensor, parts: Tensors) -> torch.Tensor:
        """The scores of several objectives, mixed by what the prompt is about."""
        inner, layers = states[:1], _layers(parts)
        for number in range(layers):
            inner = _linear(inner, parts, f"gating.layers.{number}")
            inner = torch.relu(inner) if number < layers - 1 else inner
        shares = torch.softmax(inner / self.temperature, dim=-1) * parts["gating.logit_scale"]
        scores = states[1:] @ parts["regression_layer.weight"].T @ parts["reward_transform_matrix"]
        return (shares * scores).sum(dim=-1, keepdim=True)


def _linear(states: torch.Tensor, parts: Tensors, name: str) -> torch.Tensor:
    found = states @ parts[f"{name}.weight"].T
    bias = parts.get(f"{name}.bias")
    return found if bias is None else found + bias


def _layers(tensors: Tensors) -> int:
    return sum(name.startswith("gating.layers.") and name.endswith(".weight") for name in tensors)


def head_kind(architectures: Sequence[str], names: Mapping[str, str], where: str) -> Kind | None:
    """The kind of head that a folder has; None for no reward model.

    Args:
        architectures: As the configuration names them.
        names: Tensors of the folder.
        where: The folder, for messages.

    Raises:
        UnsupportedModel: For a reward model whose head is code of its own.
    """
    for each in architectures:
        if kind := next((kind for ending, kind in _ENDINGS.items() if each.endswith(ending)), None):
            return kind
        if "Reward" in each:
            raise UnsupportedModel(
                f"{each} in {where} is not read as a reward model, because its head is code of its own: use a "
                "sequence classifier with one score, ArmoRM, or a process reward model"
            )
    if "v_head.summary.weight" in names:
        return "skywork-prm"
    if other := next((name for name in names if name.startswith(_OTHER_HEADS)), None):
        raise UnsupportedModel(
            f"{where} has the head {other}, of a form that is not read: use a sequence classifier with one score, "
            "ArmoRM, or a process reward model"
        )
    return None


def read_head(
    kind: Kind, config: Mapping[str, Any], names: Mapping[str, str], tensor: Callable[[str], torch.Tensor], where: str
) -> RewardHead:
    """The head of a folder.

    Args:
        kind: What it is.
        config: The folder's configuration.
        names: Tensors of the folder.
        tensor: Reads one.
        where: The folder, for messages.

    Raises:
        CorruptFile: For one that is damaged or is not there.
        UnsupportedModel: For more outputs than a score, and gates of another form.
    """
    gate = Fields(config, f"{where}/config.json", _OF_GATES)
    shapes = _shapes(kind, gate.get("gating_n_hidden", _HIDDEN_LAYERS), names)
    if missing := shapes.keys() - names.keys():
        raise CorruptFile(f"{where} has no head of a {kind} model: {', '.join(sorted(missing))} is missing")
    if other := [name for name in names if name.startswith("gating.") and name not in shapes]:
        raise UnsupportedModel(f"{where} has a gate of another form than ArmoRM's, with {other[0]}")
    tensors = {name: tensor(name).float() for name in shapes}
    for name, each in tensors.items():
        if each.ndim != shapes[name]:
            raise CorruptFile(f"{where}: {name} has {each.ndim} dimensions, not {shapes[name]}")
    _check_widths(tensors, config.get("hidden_size"), where)
    if kind == "gated":
        _check_gate(tensors, where)
        return RewardHead(kind, tensors, float(gate.get("gating_temperature", _TEMPERATURE)))
    outputs = len(next(each for name, each in reversed(tensors.items()) if name.endswith("weight")))
    if outputs > 2 or (kind in _ONE_OUTPUT and outputs != 1):
        raise UnsupportedModel(
            f"{where} has {outputs} outputs for each token: a reward model has one score, or two for wrong and right"
        )
    return RewardHead(kind, tensors)


def _shapes(kind: Kind, hidden_layers: int, names: Mapping[str, str]) -> dict[str, int]:
    """Tensors of a head, and their dimensions."""
    if kind == "gated":
        layers = range(hidden_layers + 1)
        gate = {f"gating.layers.{n}.{part}": 2 - (part == "bias") for n in layers for part in ("weight", "bias")}
        return dict(zip(_MIXED, (2, 2, 1), strict=True)) | gate
    if kind in ("qwen-prm", "qwen-rm") or (kind == "sequence-classification" and "score.0.weight" in names):
        return {f"{layer}.{part}": 2 - (part == "bias") for layer in _LAYERS for part in ("weight", "bias")}
    name = "v_head.summary" if kind == "skywork-prm" else "score"
    bias = {f"{name}.bias": 1} if kind != "sequence-classification" or f"{name}.bias" in names else {}
    return {f"{name}.weight": 2, **bias}


def _check_widths(tensors: Tensors, hidden: Any, where: str) -> None:
    """Raise CorruptFile where a layer does not fit the one before it, or the model's states."""
    width = hidden
    for name, each in tensors.items():
        layer, _, part = name.rpartition(".")
        if part == "weight":
            follows = layer[-1].isdigit() and not layer.endswith(".0")
            expected, width = width if follows else hidden, len(each)
            if isinstance(expected, int) and each.shape[1] != expected:
                raise CorruptFile(f"{where}: {name} reads {each.shape[1]} values of {expected}")
        elif part == "bias" and len(each) != width:
            raise CorruptFile(f"{where}: {name} has {len(each)} values for {width} outputs")


def _check_gate(tensors: Tensors, where: str) -> None:
    """Raise CorruptFile where the parts of a gated head do not fit each other."""
    objectives = len(tensors["regression_layer.weight"])
    weights = len(tensors[f"gating.layers.{_layers(tensors) - 1}.weight"])
    square, scales = tuple(tensors["reward_transform_matrix"].shape), len(tensors["gating.logit_scale"])
    if square != (objectives, objectives) or weights != objectives or scales not in (1, objectives):
        raise CorruptFile(f"{where} has {objectives} objectives and a gate or a transform of another size")
