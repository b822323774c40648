"""Prompts with embeddings beside tokens, such as those of an image from a vision tower, in one space of positions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import torch

from decodery.core.conversation import PromptTokens
from decodery.core.errors import PromptError
from decodery.models.batch import Segment
from decodery.models.cache.cache import KVCache
from decodery.models.protocol import Reader, takes_states

if TYPE_CHECKING:
    from .sequence import Sequence as Text


@dataclass(frozen=True, eq=False)
class Embeddings:
    """Embeddings that replace those of tokens at some positions of a prompt.

    The prompt has placeholder tokens at these positions. The model does not read them; they are used where a text is a
    list of tokens, as in penalties.

    Attributes:
        places: [n] int64 positions, ascending.
        rows: [n, hidden] inputs of the first layer.
    """

    places: np.ndarray
    rows: torch.Tensor

    def __post_init__(self) -> None:
        if self.rows.ndim != 2 or self.places.shape != (len(self.rows),) or not len(self.rows):
            raise PromptError(
                f"embeddings must be [n, hidden] with n positions, not {list(self.rows.shape)} with "
                f"{list(self.places.shape)}"
            )
        if self.places[0] < 0 or (np.diff(self.places) <= 0).any():
            raise PromptError("the places of embeddings should ascend from 0 on, each once")
        if not self.rows.is_floating_point() or not bool(self.rows.isfinite().all()):
            raise PromptError("embeddings should be finite numbers in floating point")

    @classmethod
    def placed(
        cls, tokens: Sequence[int], placeholder: int, parts: Sequence[torch.Tensor]
    ) -> tuple[list[int], Embeddings]:
        """Make a prompt with a token for each row of `parts` [n, hidden] in place of its placeholders.

        A part has one placeholder, or one for each of its rows, as processors of transformers write it.

        Raises:
            PromptError: If the number of placeholders does not match the embeddings.
        """
        found: list[int] = []
        # Where each token stands among what takes the places.
        moved: list[int] = []
        places: list[np.ndarray] = []
        for token, run in groupby(tokens):
            count = sum(1 for _ in run)
            if token != placeholder:
                moved += range(len(found), len(found) + count)
                found += [token] * count
                continue
            while count:
                rows = len(parts[len(places)]) if len(places) < len(parts) else 0
                if not rows:
                    raise PromptError(f"the prompt has room for more than the {len(parts)} embeddings that are given")
                written = rows if count >= rows else 1
                places.append(np.arange(len(found), len(found) + rows))
                moved += range(len(found), len(found) + written)
                found += [placeholder] * rows
                count -= written
        if len(places) != len(parts) or not parts:
            raise PromptError(
                f"{len(parts)} embeddings are given, and the prompt has room for {len(places)}: give as many "
                "placeholders; those that a chat message spells count with allow_special=True"
            )
        if len({part.shape[1:] for part in parts}) > 1:
            raise PromptError("the embeddings of one prompt should be of one width")
        spans = getattr(tokens, "user_spans", None)
        moved.append(len(found))
        told = None if spans is None else [(moved[first], moved[last]) for first, last in spans]
        return PromptTokens(found, told), cls(np.concatenate(places), torch.cat(list(parts)))

    @cached_property
    def digest(self) -> str:
        """A hash of the embeddings."""
        made = hashlib.blake2b(self.places.astype("<i8").tobytes(), digest_size=16)
        made.update(self.rows.detach().cpu().double().numpy().tobytes())
        return made.hexdigest()

    def mask(self, start: int, count: int) -> np.ndarray:
        """[count] bool, true for positions from `start` on with an embedding."""
        return np.isin(np.arange(start, start + count), self.places)

    def behind(self, start: int, count: int) -> torch.Tensor:
        """[count, 1 + hidden] from position `start` on: 1 and the next embedding, or 0 before a token."""
        held = self.mask(start + 1, count)
        found = self.rows.new_zeros(count, 1 + self.rows.shape[1])
        first, end = np.searchsorted(self.places, (start + 1, start + 1 + count))
        at = torch.from_numpy(np.flatnonzero(held))
        found[at, 0] = 1.0
        found[at, 1:] = self.rows[first:end]
        return found

    def check(self, prompt: Sequence[int], model: Reader) -> None:
        """Raise PromptError if they do not fit the prompt, or the model takes no embeddings."""
        if not takes_states(model):
            raise PromptError("this model reads tokens alone: give a prompt without embeddings, or another model")
        if self.places[-1] >= len(prompt):
            raise PromptError(f"an embedding stands at place {self.places[-1]} of a prompt of {len(prompt)} tokens")
        images = model.config.image_tokens
        if any(prompt[place] in images for place in self.places):
            raise PromptError(
                f"{model.config.family} reads images with rows that see each other, with inputs of every layer or with "
                "positions on three axes, which is not done here: give a prompt of text alone, or a model such as LLaVA"
            )
        if self.rows.shape[1] != model.config.hidden_size:
            raise PromptError(
                f"the embeddings have {self.rows.shape[1]} numbers each, and this model's have "
                f"{model.config.hidden_size}: use those that were made for it"
            )


def chunk(
    model: Reader,
    tokens: Sequence[int] | np.ndarray,
    cache: KVCache,
    embeddings: Embeddings | None,
    logit_rows: Sequence[int] | None = None,
) -> Segment:
    """`Segment.chunk` of a text that may have embeddings.

    Args:
        model: The model that reads it.
        tokens: The tokens directly after those in `cache`.
        cache: The text's cache.
        embeddings: Embeddings of the prompt, None for tokens only.
        logit_rows: Rows whose logits are requested.
    """
    segment = Segment.chunk(tokens, cache, logit_rows)
    start, end = cache.next_position, cache.next_position + len(segment)
    first, last = (0, 0) if embeddings is None else np.searchsorted(embeddings.places, (start, end))
    if embeddings is None or first == last:
        return segment
    assert takes_states(model)
    rows = model.embed_tokens(torch.as_tensor(np.asarray(tokens, dtype=np.int64), device=model.device)).clone()
    at = torch.from_numpy(embeddings.places[first:last] - start).to(rows.device)
    rows[at] = embeddings.rows[first:last].to(rows)
    segment.tokens, segment.states = None, rows
    return segment


def reading(seq: Text, tokens: Sequence[int], logit_rows: Sequence[int] | None = None) -> Segment:
    """The rows of `tokens` that are not in a text's cache, as embeddings where the prompt has them."""
    return chunk(seq.request.model, tokens, seq.cache, seq.request.prompt_embeds, logit_rows)
