"""Parallel prompt decoding: trained prompt tokens after the draft read out further tokens in the target's own pass."""

from __future__ import annotations

from dataclasses import dataclass

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.models.loaders.drafts import PROMPTS
from decodery.models.protocol import Reader
from decodery.models.trained.placeholders import Placeholders

from .in_pass import Asked, InPass


@register(
    "ppd",
    paper="Hardware-Aware Parallel Prompt Decoding for Memory-Efficient Acceleration of LLM Inference (2024)",
    lossless=True,
    slower=True,
    requirements=("trained prompt tokens",),
)
@dataclass(frozen=True)
class PPD(InPass):
    """Feeds prompt tokens after the nodes of its draft, and drafts next what the model predicts there.

    The prompt tokens after the last token accepted make the next draft. Its nodes are the most likely places by how
    often guesses of each rank and depth were right; those that are rarely the last one accepted have fewer prompt
    tokens after them, and a pass that ends there is followed by a smaller tree (`shapes.stages`). The published search
    is where this one begins. One embedding per token ahead, as published for speed. The first pass of a text has no
    draft, because prompts are read without prompt tokens. Scope: the request; memory: the guesses.

    Attributes:
        ppd: `Placeholders`, or the file or folder of those that `decodery train ppd` made; None: those that come with
            this package for the embedded model.
        length: Rows of a pass at most, of which the last token and the prompt tokens after it are some; None: as many
            as make this machine fastest by what passes of the model take on it, which may be one.
    """

    ppd: Placeholders | str | None = None

    def asked(self, model: Reader) -> Asked:
        found = Placeholders.load_or_shipped(self.ppd, model, file=PROMPTS, setting="ppd:ppd", command="ppd")
        found.check(model.config)
        if found.rates is None:
            raise SettingsError(
                "ppd needs the measured acceptance of its drafts, which these placeholders do not have: use some that "
                "decodery train ppd made"
            )
        return Asked(found.data.to(model.device), found.rates.double().numpy())
