"""What to run a checkpoint as, whose files do not say that it fills masks: `load(..., masking="mask=<|mask|>")`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from decodery.core.errors import SettingsError

from ..config import ModelConfig
from ..tokenizers.tokenizer import Tokenizer

_FLAGS = {"true": True, "false": False}
_NAMES = ("mask", "shifted", "block")


@dataclass(frozen=True)
class Masking:
    """How a model that was adapted from an autoregressive one fills masks.

    Attributes:
        mask: The mask token's text or id.
        shifted: The row of a token predicts the token after it, as DiffuLLaMA's and Dream's do.
        block: Rows see their own block of so many positions and earlier ones; None: all of each other.
    """

    mask: str
    shifted: bool = False
    block: int | None = None

    @classmethod
    def parse(cls, text: str) -> Masking:
        """From "mask=<|mask|>,shifted=true,block=32".

        Raises:
            SettingsError: For anything else.
        """
        pairs = dict(part.partition("=")[::2] for part in text.split(","))
        unknown = next((name for name in pairs if name not in _NAMES), None)
        shifted, block = _FLAGS.get(pairs.get("shifted", "false")), pairs.get("block")
        number = block is None or (block.isascii() and block.isdigit() and 0 < int(block) < 1 << 16)
        if unknown is not None or not pairs.get("mask") or shifted is None or not number:
            raise SettingsError(
                f"masking is {text!r}: give mask=TOKEN (its text or id), and if needed shifted=true and block=N, "
                "separated by commas"
            )
        return cls(pairs["mask"], shifted, None if block is None else int(block))

    def applied(self, config: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
        """A configuration that is run like this.

        Raises:
            SettingsError: If the vocabulary has no such token, or the model keeps states in place of keys.
        """
        known = tokenizer.token_id(self.mask)
        found = int(self.mask) if known is None and self.mask.isdigit() else known
        if found is None or found >= config.vocab_size:
            raise SettingsError(
                f"masking: the vocabulary of {config.vocab_size} tokens has no token {self.mask!r}: give the text of "
                "one of its special tokens, or an id"
            )
        if config.keeps_order:
            raise SettingsError("masking: rows of a recurrent model cannot see later ones: load another model")
        return replace(config, causal=False, mask_id=found, shifted=self.shifted, block_length=self.block)
