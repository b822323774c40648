"""A head's checkpoint as others publish it: config.json beside one safetensors file, in a folder or on the Hub."""

from __future__ import annotations

from pathlib import Path

import torch

from decodery.core.errors import CorruptFile, ModelNotFound, UnsupportedModel
from decodery.models.loaders import hub
from decodery.models.loaders.fields import INDEX, shard_names
from decodery.models.trained.artifact import read_tensors

CONFIG, EMBEDDING = "config.json", "embed_tokens.weight"
# The file of the tensors by what its authors call it, and the pickle that many have published in its place.
WEIGHTS = {
    "model.safetensors": "pytorch_model.bin",
    "medusa_lm_head.safetensors": "medusa_lm_head.pt",
    "hydra_lm_head.safetensors": "hydra_lm_head.pt",
}
# Of the target, which has them anyway; and what anybody can work out.
_IGNORED = (
    "input_embed_fn.weight",
    "verifier_lm_head.weight",
    "verifier_norm.weight",
    "prefix_embeding_layer.embed_tokens.weight",
    "t2d",
    "layers.0.self_attn.rotary_emb.inv_freq",
    "midlayer.self_attn.rotary_emb.inv_freq",
    "prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq",
)


def from_hub(name: str, own: str) -> Path:
    """The local folder of a head on the Hub, fetched where it is not there yet.

    Args:
        own: This package's file of a head.
    """
    files = [*WEIGHTS, own, INDEX]
    wanted = [CONFIG, *files, "model-*.safetensors"]
    return hub.fetched(name, wanted, lambda folder: any((folder / file).is_file() for file in files))


def weights_of(folder: Path) -> Path | None:
    """The file of the tensors in a folder, or the index of several; None for neither."""
    return next((folder / name for name in (*WEIGHTS, INDEX) if (folder / name).is_file()), None)


def _read(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, or of the files that an index names."""
    if path.name != INDEX:
        return read_tensors(path)[0]
    found: dict[str, torch.Tensor] = {}
    names = shard_names(path.parent)
    for file in sorted(set(names.values())):
        found |= read_tensors(path.parent / file)[0]
    for name in names.keys() - found.keys():
        raise CorruptFile(f"{path.parent} has no tensor {name}, which its index names: fetch the head again")
    return found


def refuse_pickle(folder: Path, file: str) -> ModelNotFound:
    """The error for a folder without the safetensors `file`, of which most have only a pickle."""
    pickle = WEIGHTS[file]
    # What blocks share is written once for each.
    tensors = f"{{k: v.contiguous().clone() for k, v in torch.load('{pickle}', weights_only=True).items()}}"
    return ModelNotFound(
        f"there is no {file} in {folder}: reading {pickle} can run code, so write its tensors as safetensors first: "
        f"python -c \"import torch, safetensors.torch as s; s.save_file({tensors}, '{file}')\""
    )


class Tensors:
    """The tensors of a checkpoint; each is taken once.

    Args:
        path: Its file, or that of the names of tensors in several.
        read: Its tensors by name, None where they are to be read from the file.
    """

    def __init__(self, path: Path, read: dict[str, torch.Tensor] | None = None) -> None:
        self.path = path
        given = _read(path) if read is None else read
        # vLLM reads its Medusa with and without the first prefix, SpecForge its DSpark with and without the other.
        named = {name.removeprefix("medusa_heads.").removeprefix("logit_head."): each for name, each in given.items()}
        self._left = {name: each for name, each in named.items() if name not in _IGNORED}

    @property
    def first(self) -> str:
        """What errors call a checkpoint of which nothing else is known."""
        return f"a file with the tensor {min(self._left)}" if self._left else "a file without tensors"

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def count(self, name: str) -> int:
        """How many tensors are called `name`, with 0, 1, 2, ... in place of its {}."""
        found = 0
        while name.format(found) in self._left:
            found += 1
        return found

    def size(self, name: str) -> tuple[int, int]:
        """Outputs and inputs of the matrix `name`."""
        found = self._have(name)
        if found.ndim != 2:
            raise CorruptFile(f"{self.path}: {name} is {list(found.shape)}, and should be a matrix")
        return found.shape[0], found.shape[1]

    def take(self, name: str, *shape: int) -> torch.Tensor:
        found = self._have(name)
        del self._left[name]
        if tuple(found.shape) != shape:
            raise CorruptFile(f"{self.path}: {name} is {list(found.shape)}, and should be {list(shape)}")
        if found.is_floating_point() and not bool(found.isfinite().all()):
            raise CorruptFile(f"{self.path}: {name} has values that are not finite: fetch the head again")
        return found

    def vector(self, name: str, width: int) -> torch.Tensor:
        """The tensor `name` of `width` numbers, which may have sides of one before them."""
        return self.take(name, *(1,) * (self._have(name).ndim - 1), width).flatten()

    def drop(self, prefix: str) -> None:
        """Leave out the tensors whose names begin with `prefix`."""
        self._left = {name: each for name, each in self._left.items() if not name.startswith(prefix)}

    def linear(self, name: str, parts: dict[str, int], width: int) -> dict[str, torch.Tensor]:
        """One linear layer of several, stacked, and their biases where they have some.

        Args:
            parts: Outputs by name.
        """
        found = {f"{name}.weight": torch.cat([self.take(f"{part}.weight", n, width) for part, n in parts.items()])}
        if any(f"{part}.bias" in self for part in parts):
            found[f"{name}.bias"] = torch.cat([self.take(f"{part}.bias", n) for part, n in parts.items()])
        return found

    def ungated(self, name: str, heads: int, head_dim: int, width: int) -> torch.Tensor:
        """The gates [heads * head_dim, width] of a layer `name`, which stand after the queries of each head.

        The queries stay to be taken.
        """
        both = self.take(f"{name}.weight", 2 * heads * head_dim, width).view(heads, 2, head_dim, width)
        self._left[f"{name}.weight"] = both[:, 0].reshape(-1, width)
        return both[:, 1].reshape(-1, width)

    def layer(
        self, prefix: str, *, hidden: int, inner: int | None, own: int, shared: int, width: int, name: str = "layer."
    ) -> dict[str, torch.Tensor]:
        """A decoder layer, but the norms before its attention.

        Args:
            inner: Units of its MLP, None for a layer that has experts in place of one.
            own, shared: Numbers of all queries, and of all keys or values.
            width: Of what attention reads.
            name: How the names of what is found begin.
        """
        heads = dict(zip((f"{prefix}self_attn.{each}_proj" for each in "qkv"), (own, shared, shared), strict=True))
        found = {
            **self.linear(f"{name}qkv", heads, width),
            **self.linear(f"{name}output", {f"{prefix}self_attn.o_proj": hidden}, own),
            f"{name}mlp_norm.weight": self.take(f"{prefix}post_attention_layernorm.weight", hidden),
        }
        if inner is not None:
            gates = {f"{prefix}mlp.{each}_proj": inner for each in ("gate", "up")}
            found |= self.linear(f"{name}gate_up", gates, hidden)
            found |= self.linear(f"{name}down", {f"{prefix}mlp.down_proj": hidden}, inner)
        return found

    def refuse_rest(self, layout: str) -> None:
        """A tensor that would not be used means a part that would not be run."""
        for name in self._left:
            raise UnsupportedModel(
                f"{self.path.parent}: the tensor {name} belongs to a part that heads of the layout {layout} are not "
                "known to have"
            )

    def _have(self, name: str) -> torch.Tensor:
        if name not in self._left:
            raise CorruptFile(f"{self.path} has no tensor {name}: fetch the head again")
        return self._left[name]
