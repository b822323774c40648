"""Prompts in which frequent pairs of tokens are merged into one row each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.models.protocol import EmbeddingModel, Reader, takes_states
from decodery.models.trained.merge_nets import MergeNet
from decodery.models.trained.merges import Merged

from .embedded import Embeddings


def dynamic(model: Reader, text: Merged, net: MergeNet | None = None) -> tuple[list[int], Embeddings | None]:
    """Make a prompt of merged tokens, for `Request(tokens, embeddings=...)` or `LLM.request`.

    The embedding of a merged row is the output of a trained network for its tokens' embeddings, or without a network
    their mean (as in Fast Vocabulary Transfer, 2022). Rows take consecutive positions.

    Args:
        model: The model that reads the prompt.
        text: The merged prompt.
        net: The trained network, None for means.

    Returns:
        Token ids, and the embeddings of merged rows; None where no tokens are merged.

    Raises:
        SettingsError: If the model takes no embeddings, or the network is for another model.
    """
    places = [place for place, (first, stop) in enumerate(text.spans) if stop - first > 1]
    if not places:
        return text.ids, None
    if not takes_states(model):
        raise SettingsError(
            "merged tokens are embeddings, and this model reads only tokens: give the prompt without merging"
        )
    spans = [text.tokens[slice(*text.spans[place])] for place in places]
    if net is not None:
        net.check(model)
    return text.ids, Embeddings(np.array(places), means(model, spans) if net is None else made(model, spans, net))


def made(model: EmbeddingModel, spans: Sequence[Sequence[int]], net: MergeNet) -> torch.Tensor:
    """[n, hidden] the network's embedding of each span of tokens."""
    ends = torch.tensor([[span[end] for span in spans] for end in (0, -1)], dtype=torch.int64, device=model.device)
    first, last = (model.embed_tokens(each) for each in ends)
    return net.rows(means(model, spans), first, last)


def means(model: EmbeddingModel, spans: Sequence[Sequence[int]]) -> torch.Tensor:
    """[n, hidden] the mean embedding of each span of tokens."""
    ids = torch.tensor([token for span in spans for token in span], dtype=torch.int64, device=model.device)
    owner = torch.repeat_interleave(
        torch.arange(len(spans), device="cpu"),
        torch.tensor([len(span) for span in spans], dtype=torch.int64, device="cpu"),
    )
    rows = model.embed_tokens(ids)
    sums = rows.new_zeros(len(spans), rows.shape[1]).index_add_(0, owner.to(rows.device), rows)
    return sums / torch.bincount(owner).to(sums)[:, None]
