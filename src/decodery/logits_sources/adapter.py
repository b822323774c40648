"""Adapters: a fine-tuned variant of the model, for the texts that choose it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decodery.core.registry import register
from decodery.core.requirements import Provides
from decodery.models.loaders.adapters import Adapter, tuned
from decodery.models.protocol import LanguageModel, Reader
from decodery.step.logits_source import LogitsSource


@register(
    "adapter",
    paper="S2FT: Efficient, Scalable and Generalizable LLM Fine-tuning by Structured Sparsity (2024)",
    guarantee="texts are those of the tuned model; texts without it stay as they are",
    requirements=("a trained adapter",),
)
@dataclass(frozen=True)
class Tuned(LogitsSource):
    """Applies an adapter to the model's matrices, chosen per text.

    Texts with the same adapter share passes; each adapter needs separate passes. The last four adapters are kept in
    memory, each with a copy of the matrices that it changes; on a CPU, with all matrices as the kernels pack them.
    Drafters keep using the model without the adapter, unless a drafter names another model.

    Attributes:
        file: An `Adapter`, or its file or folder, of S2FT or LoRA.
    """

    file: Adapter | str | None = None

    provides = Provides(
        taps=True, keys=True, states=True, changes=True, layer_plans=True, policies=True, parts=True, exact_rows=True
    )

    def over(self, model: LanguageModel, prompt: Sequence[int]) -> Reader:
        return tuned(model, Adapter.load(self.file, "adapter:file"))
