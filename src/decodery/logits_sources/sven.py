"""SVEN: a learned prefix of keys and values that steers a model towards a property, or away from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.core.registry import register
from decodery.core.requirements import Provides
from decodery.models.protocol import LanguageModel, Reader
from decodery.models.trained.artifact import refuse_other
from decodery.models.trained.prefix import Prefixed, Prefixes
from decodery.step.logits_source import LogitsSource


@register(
    "sven",
    paper="Large Language Models for Code: Security Hardening and Adversarial Testing (2023)",
    guarantee="the model's weights and all texts without it are unchanged",
    requirements=("trained prefixes",),
    texts=("control",),
)
@dataclass(frozen=True)
class SVEN(LogitsSource):
    """Begins the text after a learned prefix, which steers the model towards a property or away from it.

    Texts with different prefixes, and without one, share passes. Cost: a few more positions to attend to, 5 by default.

    Attributes:
        control: Name of the prefix, such as "secure" or "unsafe".
        prefix: `Prefixes`, or the folder or file of trained ones.
    """

    control: str = "secure"
    prefix: Prefixes | str | None = None

    provides = Provides(taps=True, keys=True, states=True, changes=True, parts=True, layer_plans=True, exact_rows=True)

    def over(self, model: LanguageModel, prompt: Sequence[int]) -> Reader:
        found = None if self.prefix is None else Prefixes.load(self.prefix)
        if found is None:
            raise SettingsError(
                "sven needs trained prefixes: train some with `decodery train sven -m MODEL --out DIR` "
                "and name them, as in sven:prefix=DIR"
            )
        if self.control not in found.by_name:
            raise SettingsError(f"sven has no prefix for {self.control!r} here; there is {', '.join(found.by_name)}")
        prefix = found.by_name[self.control]
        if not prefix.fits(model.config):
            raise UnsupportedModel("these prefixes were made for a model of another shape: train some for this one")
        refuse_other("these prefixes", found.model, model, "train some for it with `decodery train sven -m MODEL`")
        return Prefixed(model, prefix)
