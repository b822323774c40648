"""Slots: every token of a short text at once, by its place, from what an encoder has read of its source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention

from decodery.core.errors import SettingsError

from ..loaders.fields import Kind, Listed, Whole
from ..torch.encoder_decoder import EncoderDecoder
from .artifact import Artifact, TrainedPart, expect, refuse_other

MADE = "make them with decodery train cppd -m MODEL"
WIDER = 4
"""How much wider than the states the hidden units of a layer are."""
_HEAD = 32


class Said(NamedTuple):
    """What came of sources.

    Attributes:
        logits: [b, slots, v].
        symbols: [b, c, hidden] of those counted.
        slots: [b, slots, hidden] of the branch that orders, before they ask what there is to say.
    """

    logits: torch.Tensor
    symbols: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True, eq=False)
class Slots(TrainedPart):
    """A decoder without order: slot i says the text's token i, and no slot knows what the others say.

    Attributes:
        tensors: As `shapes` names them, float32.
        tokens: [v] int64, ascending, all that it can say.
        ends: Those of them that end a text.
        facts: How it was made, as plain JSON.
        model: `fingerprint` of the model it belongs to.
    """

    KIND = "slots"
    FILE = "slots.safetensors"
    MADE = MADE
    FACTS: ClassVar[Mapping[str, Kind]] = {"ends": Listed(Whole(0, 1 << 31), 1 << 10), "layers": Whole(1, 1 << 10)}

    tensors: Mapping[str, torch.Tensor]
    tokens: torch.Tensor
    ends: tuple[int, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""

    @property
    def count(self) -> int:
        """How many slots there are: tokens of a text at most, its end included."""
        return len(self.tensors["slot"])

    @property
    def layers(self) -> int:
        """Of each of the two branches."""
        return sum(name.startswith("order.") and name.endswith(".query.weight") for name in self.tensors)

    def say(
        self, states: torch.Tensor, missing: torch.Tensor | None = None, symbols: torch.Tensor | None = None
    ) -> Said:
        """What the slots say of sources whose states [b, n, hidden] an encoder left.

        Args:
            missing: [b, 1, 1, n] -inf where a source has ended.
            symbols: [c, hidden], what is counted while it learns: it looks at the source, and nothing looks at it.
        """
        given, parts = len(states), self.tensors
        # A source longer than those that were learned from goes on in the last place.
        places = torch.arange(states.shape[1], device="cpu").clamp(max=len(parts["place"]) - 1)
        memory = states + parts["place"][places]
        counted = memory if symbols is None else torch.cat([memory, symbols.expand(given, -1, -1)], dim=1)
        ordered = torch.cat([memory, parts["slot"].expand(given, -1, -1)], dim=1)
        length = memory.shape[1]
        for layer in range(self.layers):
            counted = self._layer(f"count.{layer}", counted, counted[:, :length], missing)
            ordered = self._layer(f"order.{layer}", ordered, ordered[:, :length], missing)
        slots = ordered[:, length:]
        spoken = self._layer("say", slots, counted[:, :length], missing)
        logits = linear(spoken, parts["said.weight"], parts["said.bias"])
        return Said(logits, counted[:, length:], slots)

    def end(self, logits: torch.Tensor) -> int:
        """How many slots of [slots, v] there are up to the first that ends the text, inclusive."""
        ending = torch.isin(
            self.tokens[logits.argmax(dim=-1).cpu()], torch.tensor(self.ends, dtype=torch.int64, device="cpu")
        )
        return int(ending.int().argmax()) + 1 if bool(ending.any()) else len(logits)

    def _layer(self, name: str, rows: torch.Tensor, seen: torch.Tensor, missing: torch.Tensor | None) -> torch.Tensor:
        """Rows [b, q, hidden] after attention to `seen` [b, n, hidden] and an MLP, each with a norm after it."""
        heads = max(rows.shape[-1] // _HEAD, 1)

        def project(part: str, given: torch.Tensor) -> torch.Tensor:
            return linear(given, self.tensors[f"{name}.{part}.weight"], self.tensors[f"{name}.{part}.bias"])

        def norm(part: str, given: torch.Tensor) -> torch.Tensor:
            gain, bias = self.tensors[f"{name}.{part}.weight"], self.tensors[f"{name}.{part}.bias"]
            return layer_norm(given, given.shape[-1:], gain, bias)

        def split(given: torch.Tensor) -> torch.Tensor:
            return given.unflatten(-1, (heads, -1)).transpose(1, 2)

        keys, values = project("key_value", seen).chunk(2, dim=-1)
        found = scaled_dot_product_attention(
            split(project("query", rows)), split(keys), split(values), attn_mask=missing
        )
        rows = norm("norm1", rows + project("output", found.transpose(1, 2).flatten(2)))
        return norm("norm2", rows + project("down", gelu(project("up", rows))))

    def artifact(self) -> Artifact:
        facts = {"ends": list(self.ends), "layers": self.layers, **self.facts}
        return Artifact(self.KIND, {**self.tensors, "tokens": self.tokens}, facts, self.model)

    @classmethod
    def from_artifact(cls, found: Artifact) -> Slots:
        tensors = dict(found.tensors)
        tokens = tensors.pop("tokens")
        (slots, hidden), (places, _), (spoken,) = (*(tensors[name].shape for name in ("slot", "place")), tokens.shape)
        wanted = dict(shapes(hidden, found.facts["layers"], slots, places, spoken))
        expect({name: tuple(tensor.shape) for name, tensor in tensors.items()} == wanted)
        expect(tokens.dtype == torch.int64 and bool((tokens.diff() > 0).all()) and min(tokens.tolist()) >= 0)
        expect(all(tensor.dtype == torch.float32 for tensor in tensors.values()))
        expect(hidden % max(hidden // _HEAD, 1) == 0)
        return cls(tensors, tokens, tuple(found.facts["ends"]), found.facts, found.model)

    def check(self, model: EncoderDecoder) -> None:
        """Raise SettingsError where it was made for another model."""
        advice = f"{MADE}, for this one"
        refuse_other("these slots", self.model, model, advice)
        if self.tensors["slot"].shape[1] != model.config.hidden_size or int(self.tokens[-1]) >= model.vocab_size:
            raise SettingsError(f"these slots were made for a model of another shape: {advice}")


def shapes(hidden: int, layers: int, slots: int, places: int, spoken: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all tensors.

    Args:
        places: Of a source.
        spoken: How many tokens it can say.
    """
    yield "place", (places, hidden)
    yield "slot", (slots, hidden)
    yield "said.weight", (spoken, hidden)
    yield "said.bias", (spoken,)
    for name in (*(f"{branch}.{layer}" for branch in ("count", "order") for layer in range(layers)), "say"):
        for part, outputs, inputs in (
            ("query", hidden, hidden),
            ("key_value", 2 * hidden, hidden),
            ("output", hidden, hidden),
            ("up", WIDER * hidden, hidden),
            ("down", hidden, WIDER * hidden),
        ):
            yield f"{name}.{part}.weight", (outputs, inputs)
            yield f"{name}.{part}.bias", (outputs,)
        for part in ("norm1", "norm2"):
            yield f"{name}.{part}.weight", (hidden,)
            yield f"{name}.{part}.bias", (hidden,)
