"""PLDR-LLM: queries meet keys through an operator that a network makes of the queries, or through a kept one.

PLDR-LLMs Learn A Generalizable Tensor Operator That Can Replace Its Own Deep Neural Net At Inference (2025). Of each
head's rotated queries Q [n, d], all rows of a text: A = norm(Q^T Q); A goes through residual units, each of stacked
gated layers, with a norm after; P = iSwiGLU(W A + b) + 1e-9 with iSwiGLU(x) = x silu(x); G = a P^p + c, where products
of W and a are those of matrices and powers elementwise. Scores are Q G K^T / sqrt(d).

Since A sums over all rows, what a row sees depends on later ones: such a model is no causal one, and nothing can be
verified against it. With G kept, its G-cache, it is, and an ordinary `Transformer` with `Layer.operator`: caches,
trees, drafters and rules work as with any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn.functional import layer_norm, linear, silu

from decodery.core.errors import CorruptFile, SettingsError, UnsupportedModel

from ..hooks import Hooks
from ..layer_plan import WHOLE, layer_steps
from ..loaders.fields import Kind, Whole
from ..trained.artifact import Artifact, refuse_other
from .side_by_side import SideBySide
from .transformer import Transformer
from .weights import Dense

FILE = "power-law.safetensors"
MADE = "make one with `python benchmarks/train.py pldr PUZZLE --out DIR`"
_KIND, _FACTS = "power law", dict[str, Kind](units=Whole(1, 64), depth=Whole(1, 64))
_LEAST, _EPS = 1e-9, 1e-6


@dataclass(frozen=True, eq=False)
class OperatorNets:
    """What makes each layer's operators.

    All heads share the units.

    Attributes:
        tensors: Of layer l "l.density" and "l.u.norm" [2 d], scale and shift; of gated layer k in unit u
            "l.u.k.gate_up" [2 inner, d], gate first, "l.u.k.gate_up_bias", "l.u.k.down" [d, inner] and
            "l.u.k.down_bias"; and "l.weight", "l.bias", "l.power", "l.coupling" and "l.offset" [heads, d, d].
        units: Residual ones, each of `depth` gated layers.
    """

    tensors: Mapping[str, torch.Tensor]
    units: int
    depth: int

    def operators(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """[texts, heads, d, d] of a layer's rotated queries [texts, heads, n, d]."""
        tensors = self.tensors
        found = _normed(queries.transpose(-1, -2) @ queries, tensors[f"{layer}.density"])
        for unit in range(self.units):
            entered = found
            for depth in range(self.depth):
                at = f"{layer}.{unit}.{depth}."
                gate, up = linear(found, tensors[at + "gate_up"], tensors[at + "gate_up_bias"]).chunk(2, dim=-1)
                found = linear(silu(gate) * up, tensors[at + "down"], tensors[at + "down_bias"])
            found = _normed(found + entered, tensors[f"{layer}.{unit}.norm"])
        weight, bias, power, coupling, offset = (
            tensors[f"{layer}.{name}"] for name in ("weight", "bias", "power", "coupling", "offset")
        )
        turned = weight @ found + bias
        positive = turned * silu(turned) + _LEAST
        return coupling @ positive**power + offset


def _normed(rows: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    scale, shift = norm.chunk(2)
    return layer_norm(rows, rows.shape[-1:], scale, shift, _EPS)


class _Rows(SideBySide):
    """Texts side by side, whose queries are turned by operators made of them. made: those, by layer."""

    def __init__(self, model: Transformer, nets: OperatorNets, count: int, length: int) -> None:
        super().__init__(model, count, length)
        self.nets = nets
        self.made: list[torch.Tensor] = []

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        heads = queries.unflatten(0, self._shape).transpose(1, 2)
        self.made.append(self.nets.operators(layer, heads))
        return super().attend(layer, (heads @ self.made[-1]).transpose(1, 2).flatten(0, 1), keys, values)


class PowerLaw:
    """A transformer in floating point and what makes operators for its heads, with gradients.

    Args:
        model: Without operators of its own.
    """

    def __init__(self, model: Transformer, nets: OperatorNets) -> None:
        if model.capabilities.exact_rows or model.config.keeps_order or model.config.latent is not None:
            raise UnsupportedModel(
                "operators go between queries and keys of a model in floating point: load it with dtype='float32'"
            )
        if model.config.operators:
            bare = [replace(layer, operator=None) for layer in model.weights.layers]
            model = Transformer(replace(model.config, operators=False), replace(model.weights, layers=bare))
        self.model, self.nets = model, nets

    def predicted(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [texts, n, vocab] of texts [texts, n], and their operators [layers, texts, heads, d, d].

        Each text's operators are made of all of its rows: logits hang on later tokens, too.
        """
        rows = _Rows(self.model, self.nets, *tokens.shape)
        return side_by_side(self.model, tokens, rows), torch.stack(rows.made)

    @torch.no_grad()
    def operators(self, tokens: Sequence[int]) -> torch.Tensor:
        """[layers, heads, d, d] of one text, as reading it whole makes them: what a G-cache keeps."""
        if not tokens:
            raise SettingsError("operators are made of a text: give at least one token")
        return self.predicted(torch.tensor([list(tokens)], dtype=torch.int64, device="cpu"))[1][:, 0]

    def frozen(self, operators: torch.Tensor) -> Transformer:
        """The causal model with these operators [layers, heads, d, d], which shares all else with this one."""
        return with_operators(self.model, operators)

    @classmethod
    def load(cls, folder: str | Path) -> PowerLaw:
        """What `benchmarks/train.py pldr` left in a folder.

        Raises ModelNotFound, CorruptFile or SettingsError.
        """
        from ..loaders.load import load

        found = Artifact.read(Path(folder) / FILE, _KIND, MADE, _FACTS)
        model = load(str(folder), dtype="float32").model
        refuse_other("this network", found.model, model, MADE)
        assert isinstance(model, Transformer)
        nets = OperatorNets(found.tensors, found.facts["units"], found.facts["depth"])
        heads, dim = model.config.num_heads, model.config.head_dim
        wanted = {f"{layer}.{name}" for layer in range(model.config.num_layers) for name in ("weight", "coupling")}
        if any(name not in found.tensors or found.tensors[name].shape != (heads, dim, dim) for name in wanted):
            raise CorruptFile(f"{Path(folder) / FILE} does not fit the model beside it: {MADE}")
        return cls(model, nets)

    def save(self, folder: Path) -> None:
        """Write what makes operators; the model beside it is written apart."""
        facts = {"units": self.nets.units, "depth": self.nets.depth}
        Artifact(_KIND, self.nets.tensors, facts, self.model.fingerprint).save(folder / FILE)


def side_by_side(model: Transformer, tokens: torch.Tensor, rows: SideBySide | None = None) -> torch.Tensor:
    """Logits [texts, n, vocab] of texts [texts, n], with gradients.

    Args:
        rows: How they attend, each to itself if None.
    """
    rows = SideBySide(model, *tokens.shape) if rows is None else rows
    hidden = model.embed_tokens(tokens.flatten())
    if model.config.joined_norms:
        hidden = model._norm(hidden, model.weights.norm)
    hidden = model.blocks(hidden, rows, layer_steps(WHOLE, model.config.num_layers), Hooks.reading(()))
    return model.outputs(hidden).unflatten(0, tuple(tokens.shape))


def with_operators(model: Transformer, operators: torch.Tensor) -> Transformer:
    """A model whose queries are turned by operators [layers, heads, d, d]; identities change nothing.

    Raises:
        UnsupportedModel: For models in integers or without queries, keys and values.
    """
    config = model.config
    wanted = (config.num_layers, config.num_heads, config.head_dim, config.head_dim)
    if config.keeps_order or config.latent is not None or not isinstance(model.weights.layers[0].qkv, Dense):
        raise UnsupportedModel("operators go between queries and keys of a model in floating point: load it so")
    if tuple(operators.shape) != wanted:
        raise SettingsError(f"this model takes operators of the shape {list(wanted)}, not {list(operators.shape)}")
    layers = [
        replace(layer, operator=each.to(model.device, model.weights.dtype))
        for layer, each in zip(model.weights.layers, operators, strict=True)
    ]
    return Transformer(replace(config, operators=True), replace(model.weights, layers=layers))
