"""A fine-tuned model in a model's place, for the texts that ask for it."""

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
    """Writes with what an adapter adds to the model's matrices, chosen text by text.

    Texts of one adapter share their passes, those of others have passes of their own. The matrices that it changes are
    there once more for each of the last four adapters, and on a CPU all of them as kernels pack them. Drafts stay those
    of the model, unless a drafter names another.

    Attributes:
        file: An `Adapter`, or the file or folder of one, of S2FT or LoRA.
    """

    file: Adapter | str | None = None

    provides = Provides(
        taps=True, keys=True, states=True, changes=True, layer_plans=True, policies=True, parts=True, exact_rows=True
    )

    def over(self, model: LanguageModel, prompt: Sequence[int]) -> Reader:
        return tuned(model, Adapter.load(self.file, "adapter:file"))
