"""Reward models as they are published: a language model's layers with a head of their own that scores texts.

The layers are run like those of any other model. The head is taken out of the folder, whose other tensors are shown to
the loader through links and an index without it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch

from decodery.core.errors import CorruptFile, UnsupportedModel

from . import hub
from .fields import INDEX, read_json
from .folder import Shards
from .source import identity

Kind = Literal["qwen-prm", "skywork-prm", "sequence-classification", "token-classification"]

_SHAPES: dict[Kind, dict[str, int]] = {
    "qwen-prm": {"score.0.weight": 2, "score.0.bias": 1, "score.2.weight": 2, "score.2.bias": 1},
    "skywork-prm": {"v_head.summary.weight": 2, "v_head.summary.bias": 1},
    "token-classification": {"score.weight": 2, "score.bias": 1},
    "sequence-classification": {"score.weight": 2},
}
"""Tensors of each kind of head, and their dimensions."""
_ENDINGS = {
    "ForProcessRewardModel": "qwen-prm",
    "ForSequenceClassification": "sequence-classification",
    "ForTokenClassification": "token-classification",
}
_REFUSED = {
    "ForRewardModelWithGating": "its score is a mixture of several by a gate (ArmoRM)",
    "ForRewardModel": "its head is code of its own",
}
"""Endings of architectures that are not read, and why."""
_OF_HEADS = ("id2label", "label2id", "num_labels", "problem_type", "classifier_dropout", "auto_map", "score_bias")
_TAKEN = ("*.jinja", "tokenizer*.json", "generation_config.json", "special_tokens_map.json", "added_tokens.json")
_MOST_OUTPUTS = 2


@dataclass(frozen=True, eq=False)
class RewardFolder:
    """A published reward model.

    Attributes:
        kind: The form of its head.
        tensors: The head's, float32, by their names in the file.
        links: A folder of links, removed with this object.
    """

    kind: Kind
    tensors: Mapping[str, torch.Tensor]
    links: tempfile.TemporaryDirectory[str]

    @property
    def backbone(self) -> str:
        """The name by which the layers are loaded."""
        return self.links.name

    def outputs(self, states: torch.Tensor) -> torch.Tensor:
        """[n, hidden] states after the final norm -> [n, 1 or 2]."""
        parts = {name: tensor.to(states) for name, tensor in self.tensors.items()}
        if self.kind == "qwen-prm":
            inner = torch.relu(states @ parts["score.0.weight"].T + parts["score.0.bias"])
            return inner @ parts["score.2.weight"].T + parts["score.2.bias"]
        name = "v_head.summary" if self.kind == "skywork-prm" else "score"
        found = states @ parts[f"{name}.weight"].T
        bias = parts.get(f"{name}.bias")
        return found if bias is None else found + bias


def reward_folder(name: str) -> RewardFolder | None:
    """The reward model in a folder or on the Hub; None where the name is that of something else.

    Raises:
        CorruptFile: For a head that is damaged.
        UnsupportedModel: For one with more outputs than a score.
    """
    path = Path(name).expanduser()
    if not path.is_dir():
        if path.exists() or not hub.is_hub_id(name):
            return None
        path = hub.snapshot(name)
    described = read_json(path / "config.json") if (path / "config.json").is_file() else {}
    if not isinstance(described, dict):
        return None
    named = [each for each in described.get("architectures") or () if isinstance(each, str)]
    for each in named:
        if why := next((why for end, why in _REFUSED.items() if each.endswith(end)), None):
            raise UnsupportedModel(
                f"{each} in {name} is not read as a reward model, because {why}: use one with a single score, or a "
                "process reward model"
            )
    kind = next((kind for each in named for end, kind in _ENDINGS.items() if each.endswith(end)), None)
    if kind is None and not any(file.suffix == ".safetensors" for file in path.iterdir()):
        return None
    return _opened(str(path), kind, identity(str(path)))


@lru_cache(maxsize=4)
def _opened(folder: str, named: Kind | None, _contents: object) -> RewardFolder | None:
    """The reward model in a folder whose files are these."""
    path, shards = Path(folder), Shards(Path(folder))
    heads = [kind for kind, shapes in _SHAPES.items() if shapes.keys() <= shards.names.keys()]
    if named is None:
        heads = [kind for kind in heads if kind == "skywork-prm"]
    if not heads:
        if named is None:
            return None
        raise CorruptFile(f"{folder} has no head of a {named} model: {', '.join(_SHAPES[named])}")
    kind = heads[0]
    tensors = {name: shards.tensor(name).float() for name in _SHAPES[kind]}
    shards.close()
    for name, tensor in tensors.items():
        if tensor.ndim != _SHAPES[kind][name]:
            raise CorruptFile(f"{folder}: {name} has {tensor.ndim} dimensions, not {_SHAPES[kind][name]}")
    last = next(tensor for name, tensor in reversed(tensors.items()) if name.endswith("weight"))
    if len(last) > _MOST_OUTPUTS or (kind in ("skywork-prm", "sequence-classification") and len(last) != 1):
        raise UnsupportedModel(
            f"{folder} has {len(last)} outputs for each token: a reward model has one score, or two for wrong and right"
        )
    return RewardFolder(kind, tensors, _backbone(path, shards.names, tensors))


def _backbone(folder: Path, names: Mapping[str, str], head: Mapping[str, Any]) -> tempfile.TemporaryDirectory[str]:
    """A folder of the same layers as a causal language model, made of links."""
    links = tempfile.TemporaryDirectory(prefix="decodery-reward-")
    made = Path(links.name)
    config = {key: value for key, value in read_json(folder / "config.json").items() if key not in _OF_HEADS}
    tied = "lm_head.weight" not in names
    config |= {"architectures": ["LlamaForCausalLM"], **({"tie_word_embeddings": True} if tied else {})}
    (made / "config.json").write_text(json.dumps(config), encoding="utf-8")
    rest = {name: f"{Path(file).stem}.safetensors" for name, file in names.items() if name not in head}
    (made / INDEX).write_text(json.dumps({"weight_map": rest}), encoding="utf-8")
    for file in {*names.values(), *(each.name for form in _TAKEN for each in folder.glob(form))}:
        (made / file).symlink_to((folder / file).resolve())
    return links
