"""S2FT: what fine-tuning learned, put into the matrices it was learned for."""

from __future__ import annotations

from dataclasses import dataclass

from decodery.core.registry import register
from decodery.models.loaders.adapters import Adapter, tuned
from decodery.models.loaders.store import Progress
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import floating

from .base import LINEARS, Change, ModelCompression, Part, Texts, sizes


@register(
    "s2ft",
    paper="S2FT: Efficient, Scalable and Generalizable LLM Fine-tuning by Structured Sparsity (2024)",
    guarantee="changes the output to the tuned model's, to the bit; as a drafter of the original it does not",
    requirements=("a trained adapter",),
)
@dataclass(frozen=True)
class S2FT(ModelCompression):
    """Fuses an adapter into its model, so that other transformations can be applied to the result.

    Texts are those of `--logits-source adapter:file=`, whose matrices these are; a fused adapter cannot be taken out
    again, nor chosen by text. Matrices of integers become int8. Nothing becomes smaller or faster. The report's error
    is the share of a matrix's energy that was changed. Reads no text.

    Attributes:
        file: An `Adapter`, or the file or folder of one, of S2FT or LoRA; `decodery train s2ft` makes it.
    """

    file: Adapter | str | None = None

    def change(self, model: Transformer, texts: Texts, progress: Progress) -> Change:
        made = tuned(model, Adapter.load(self.file, "s2ft:file"))
        size = sizes(made)
        parts = []
        for index, (before, after) in enumerate(zip(model.weights.layers, made.weights.layers, strict=True)):
            for linear in LINEARS:
                old, new = getattr(before, linear), getattr(after, linear)
                if new is not old:
                    name, weight = f"layers.{index}.{linear}", floating(old).weight.float()
                    missed = (floating(new).weight.float() - weight).square().sum() / weight.square().sum()
                    parts.append(Part(name, float(missed), size[name]))
        return Change(made, tuple(parts))
