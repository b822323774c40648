"""A small model cut out of a large one, to be trained as its draft."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import normalize

from decodery.core.errors import SettingsError
from decodery.models.config import ModelConfig
from decodery.models.native.int8 import Int8Linear
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense, Kept, Layer, Weights, copied, exchanged, floating, holders

from .data import TrainingText
from .tensors import int_tensor


@dataclass(frozen=True)
class DraftShape:
    """What the draft looks like.

    Attributes:
        layers: As many of the target's first ones; width of their feed-forward part: inner.
        tokens: How many have a row in embedding and head.
        window: How far back attention sees, in tokens; texts may then be longer than those it learned from.
        exits: After how many layers it is to be a draft of its own, ascending, up to all of them; () for none but the
            last.
    """

    layers: int = 1
    inner: int = 768
    tokens: int = 6144
    window: int = 128
    exits: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.exits and (list(self.exits) != sorted({0, *self.exits} - {0}) or self.exits[-1] != self.layers):
            raise SettingsError(
                f"exits ascend from 1 to all {self.layers} layers of the draft, these included, not {self.exits}"
            )
        if self.layers < 1 or self.inner < 1 or self.tokens < 1 or self.window < 2:
            raise SettingsError("a draft needs at least one layer, one inner unit, one token, and a window of 2")

    def check(self, target: ModelConfig) -> DraftShape:
        """This shape; raises SettingsError where no draft of it can be cut from such a target."""
        if self.layers > target.num_layers or self.inner > target.intermediate_size:
            raise SettingsError(
                f"the draft cannot be larger than its target: choose at most {target.num_layers} layers and "
                f"{target.intermediate_size} inner units"
            )
        return self


def keep_tokens(texts: Iterable[TrainingText], size: int, target: Transformer, always: Sequence[int] = ()) -> Kept:
    """The `size` tokens that are written most often, `always` among them.

    The target's embeddings say what is similar. Tokens never written fill up what is left, those with the lowest ids
    first.
    """
    vocab = target.vocab_size
    counts: Counter[int] = Counter(dict.fromkeys(always, 1 << 40))
    for text in texts:
        counts.update(text.tokens[text.written :].tolist())
    ranked = sorted(range(vocab), key=lambda token: (-counts[token], token))
    ids = int_tensor(sorted(ranked[: min(size, vocab)]))
    table = normalize(target.weights.embedding.float(), dim=1)
    # In parts: all similarities at once would take gigabytes.
    rows = torch.cat([(part @ table[ids].T).argmax(dim=1) for part in table.split(2048)])
    ids = ids.to(rows.device)
    rows[ids] = torch.arange(len(ids), device=rows.device)
    return Kept(ids, rows)


def cut_draft(target: Transformer, shape: DraftShape, kept: Kept) -> Transformer:
    """The float32 draft before training: first layers, strongest inner units, `kept` rows."""
    old = target.config
    shape.check(old)
    config = replace(
        old,
        rope=old.layer_rope(0),
        local_rope=None,
        num_layers=shape.layers,
        intermediate_size=shape.inner,
        tie_embeddings=True,
        sliding_window=shape.window,
        sliding_layers=(True,) * shape.layers,
        kept_tokens=len(kept.ids),
        exits=shape.exits,
    )
    rows = target.weights.embedding.float()[kept.ids].clone()
    layers = [_cut_layer(layer, shape.inner) for layer in target.weights.layers[: shape.layers]]
    return Transformer(config, Weights(rows, layers, target.weights.norm.float().clone(), Dense(rows), kept))


def _cut_layer(layer: Layer, inner: int) -> Layer:
    gate_up, down = floating(layer.gate_up), floating(layer.down)
    gate, up = gate_up.weight.chunk(2)
    # An inner unit can add as much as what opens it, what it carries and what it writes allow.
    strength = gate.norm(dim=1) * up.norm(dim=1) * down.weight.norm(dim=0)
    best = strength.topk(inner).indices.sort().values
    bias = None if gate_up.bias is None else torch.cat([half[best] for half in gate_up.bias.chunk(2)])
    floats = {
        name: value.float().clone()
        for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm", "post_attention_norm", "post_mlp_norm")
        if (value := getattr(layer, name)) is not None
    }
    return Layer(
        qkv=floating(layer.qkv),
        output=floating(layer.output),
        gate_up=Dense(torch.cat([gate[best], up[best]]), bias),
        down=Dense(down.weight[:, best].contiguous(), down.bias),
        **floats,
    )


def changeable(model: Transformer) -> Transformer:
    """A copy in floating point; embedding and head are one table where they are the same in the model."""

    def change(part: Any) -> Any:
        return part if part is None else copied(part) if isinstance(part, torch.Tensor) else floating(part)

    table = copied(model.weights.embedding)
    head = Dense(table) if model.config.tie_embeddings else floating(model.weights.head)
    made = Weights(table, norm=copied(model.weights.norm), head=head, **exchanged(model.weights, change))
    return Transformer(model.config, made)


def parameters(draft: Transformer) -> dict[str, torch.Tensor]:
    """What is trained, by name: all tensors of the draft, set to gather gradients."""
    found = {"embedding": draft.weights.embedding, "norm": draft.weights.norm}
    for holding, each in holders(draft.weights):
        for name, part in vars(each).items():
            if isinstance(part, Dense):
                found[f"{holding}.{name}.weight"] = part.weight
                if part.bias is not None:
                    found[f"{holding}.{name}.bias"] = part.bias
            elif part is not None:
                found[f"{holding}.{name}"] = part
    for tensor in found.values():
        tensor.requires_grad_(True)
    return found


def quantized(draft: Transformer) -> Transformer:
    """The draft as it is kept, on the CPU: int8 linear layers, one integer table for embedding and head."""

    def convert(value: Any) -> Any:
        if isinstance(value, Dense):
            return Int8Linear.quantize(value.weight.cpu(), None if value.bias is None else value.bias.cpu())
        return value.detach().cpu() if isinstance(value, torch.Tensor) else value

    layers = [Layer(**{name: convert(part) for name, part in vars(layer).items()}) for layer in draft.weights.layers]
    head = Int8Linear.quantize(draft.weights.embedding.cpu())
    table = head.dense()
    kept = draft.weights.kept
    kept = None if kept is None else Kept(kept.ids.cpu(), kept.rows.cpu())
    return Transformer(draft.config, Weights(table, layers, draft.weights.norm.detach().cpu(), head, kept))
