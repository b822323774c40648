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
from typing import Any

from . import hub
from .fields import INDEX, read_json
from .folder import Shards
from .reward_head import KEYS, Kind, RewardHead, head_kind, read_head
from .source import identity

_TAKEN = ("*.jinja", "tokenizer*.json", "generation_config.json", "special_tokens_map.json", "added_tokens.json")


@dataclass(frozen=True, eq=False)
class RewardFolder:
    """A published reward model.

    Attributes:
        head: What scores.
        pad: The token that fills texts up, None for none. Sequence classifiers score the last other token.
        links: A folder of links, removed with this object.
    """

    head: RewardHead
    pad: int | None
    links: tempfile.TemporaryDirectory[str]

    @property
    def kind(self) -> Kind:
        """The form of the head."""
        return self.head.kind

    @property
    def backbone(self) -> str:
        """The name by which the layers are loaded."""
        return self.links.name


def reward_folder(name: str) -> RewardFolder | None:
    """The reward model in a folder or on the Hub; None where the name is that of something else.

    Raises:
        CorruptFile: For a head that is damaged.
        UnsupportedModel: For one with more outputs than a score, or of a form that is not known.
    """
    path = Path(name).expanduser()
    if not path.is_dir():
        if path.exists() or not hub.is_hub_id(name):
            return None
        path = hub.snapshot(name)
    described = read_json(path / "config.json") if (path / "config.json").is_file() else {}
    if not isinstance(described, dict):
        return None
    named = tuple(each for each in described.get("architectures") or () if isinstance(each, str))
    if head_kind(named, {}, name) is None and not any(file.suffix == ".safetensors" for file in path.iterdir()):
        return None
    return _opened(str(path), named, identity(str(path)))


@lru_cache(maxsize=4)
def _opened(folder: str, architectures: tuple[str, ...], _contents: object) -> RewardFolder | None:
    """The reward model in a folder whose files are these."""
    path, shards = Path(folder), Shards(Path(folder))
    try:
        kind = head_kind(architectures, shards.names, folder)
        if kind is None:
            return None
        config = read_json(path / "config.json")
        head = read_head(kind, config, shards.names, shards.tensor, folder)
    finally:
        shards.close()
    pad = config.get("pad_token_id")
    return RewardFolder(head, pad if isinstance(pad, int) else None, _backbone(path, config, shards.names, head))


def _backbone(
    folder: Path, described: Mapping[str, Any], names: Mapping[str, str], head: RewardHead
) -> tempfile.TemporaryDirectory[str]:
    """A folder of the same layers as a causal language model, made of links."""
    links = tempfile.TemporaryDirectory(prefix="decodery-reward-")
    made = Path(links.name)
    config = {key: value for key, value in described.items() if key not in KEYS}
    tied = "lm_head.weight" not in names
    config |= {"architectures": ["LlamaForCausalLM"], **({"tie_word_embeddings": True} if tied else {})}
    (made / "config.json").write_text(json.dumps(config), encoding="utf-8")
    rest = {name: f"{Path(file).stem}.safetensors" for name, file in names.items() if name not in head.tensors}
    (made / INDEX).write_text(json.dumps({"weight_map": rest}), encoding="utf-8")
    for file in {*names.values(), *(each.name for form in _TAKEN for each in folder.glob(form))}:
        (made / file).symlink_to((folder / file).resolve())
    return links
