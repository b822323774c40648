"""Quest: each row reads the pages of keys with the largest upper bounds of its attention scores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.models.cache.kernel_policy import Choice, SideStore
from decodery.models.cache.page_pool import SLOTS
from decodery.models.config import ModelConfig
from decodery.step.cache_policy import best, require_budget

from .selecting import Asked, Selective, allowed, dots


@register(
    "quest",
    paper="Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference (2024)",
    guarantee="lossy: rows read some pages of the text; drafts give the text of plain decoding under it",
)
@dataclass(frozen=True)
class Quest(Selective):
    """Reads whole pages, selected by an upper bound of the query's scores over the page's keys.

    No token is dropped. The minimum and maximum of each channel over a page's keys bound the scores: the bound is the
    sum over channels of the larger product with the query. A group of query heads uses the largest bound of its heads,
    so that a key-value head is read once. The row's own page is always read. Class A. Read per row: 2 vectors per page,
    and the keys and values of the selected pages. Pages of 16 tokens are the pages of the cache: the native kernels
    store their bounds in 32 bits beside it and select without Python. Bounds of other page sizes are computed for each
    row.

    Attributes:
        budget: See `CachePolicy`; rounded up to pages.
        page: Tokens per page.
        dense_layers: Number of first layers whose rows read all tokens.
        least: Minimum number of pages to read.
    """

    budget: float = 1024
    page: int = 16
    dense_layers: int = 2
    least: int = 3

    def __post_init__(self) -> None:
        require_budget("quest", self.budget)
        if self.page < 1 or self.dense_layers < 0 or self.least < 1:
            raise SettingsError("quest needs page >= 1, dense_layers >= 0 and least >= 1")

    def dense(self, layer: int) -> bool:
        return layer < self.dense_layers

    def choose(self, asked: Asked) -> np.ndarray:
        pages = best_pages(asked, self.budget, self.page, self.least)
        chosen: np.ndarray = pages[..., asked.positions // self.page]
        return chosen

    def choice(self, config: ModelConfig, at: np.ndarray, store: SideStore | None) -> Choice | None:
        if self.page != SLOTS:
            return None
        if store is None:
            store = SideStore.of_bounds(self.layers(config), config.num_kv_heads, config.head_dim)
        return Choice(np.maximum(-(-allowed(self.budget, at) // SLOTS), self.least), store)


def best_pages(asked: Asked, budget: float, page: int, least: int, logical: int | None = None) -> np.ndarray:
    """Select the pages that each row reads, always including the row's own page.

    Args:
        asked: The rows.
        budget: See `CachePolicy`.
        page: Tokens per page.
        least: Minimum number of pages.
        logical: Tokens per part of a page; a page's bound is the largest of its parts. None bounds the whole page.

    Returns:
        [kv_heads, rows, pages] bool.
    """
    size = page if logical is None else logical
    bounds, per = page_bounds(asked, size).max(axis=2), page // size
    missing = -bounds.shape[-1] % per
    bounds = np.pad(bounds, ((0, 0), (0, 0), (0, missing)), constant_values=-np.inf)
    bounds = bounds.reshape(*bounds.shape[:2], -1, per).max(axis=-1)
    pages, last = np.arange(bounds.shape[-1]), asked.at // page
    bounds = np.where(pages == last[:, None], np.inf, bounds)
    counts = np.maximum(-(-asked.budgets(budget) // page), least)
    return best(bounds, counts[None], np.broadcast_to(pages <= last[:, None], bounds.shape))


def page_bounds(asked: Asked, page: int) -> np.ndarray:
    """[kv_heads, rows, group, pages] upper bounds of each query's scores over the keys of each page.

    A page holds the tokens at `page` consecutive positions. The bound of a page with rows of this pass is computed row
    by row, over the tokens that the row may attend to; -inf where there is none.
    """
    numbers = asked.positions // page
    count = int(numbers.max()) + 1
    # The content has all positions in order; its last page may continue in the rows of the pass.
    whole = asked.content // page
    size = whole * page
    parts = asked.keys[:, :size].reshape(len(asked.keys), whole, page, asked.keys.shape[-1])
    bounds = np.full((*asked.queries.shape[:3], count), -np.inf)
    if whole:
        bounds[..., :whole] = bounded(asked.queries, parts.amin(dim=2), parts.amax(dim=2))
    tail, seen = asked.keys[:, size:], torch.from_numpy(asked.seen[:, size:])
    for number in range(whole, count):
        inside = seen & torch.from_numpy(numbers[size:] == number)
        rows = torch.from_numpy(np.flatnonzero(inside.any(dim=1).numpy()))
        hidden = ~inside[rows][None, :, :, None]
        least = tail[:, None].masked_fill(hidden, torch.inf).amin(dim=2)
        most = tail[:, None].masked_fill(hidden, -torch.inf).amax(dim=2)
        for row, low, high in zip(rows.tolist(), least.unbind(1), most.unbind(1), strict=True):
            bounds[:, row, :, number] = bounded(asked.queries[:, row : row + 1], low[:, None], high[:, None])[
                :, 0, :, 0
            ]
    return bounds


def bounded(queries: torch.Tensor, least: torch.Tensor, most: torch.Tensor) -> np.ndarray:
    """[kv_heads, rows, group, pages] sums over channels of the larger product with either bound.

    Args:
        queries: [kv_heads, rows, group, head_dim].
        least: Minimum of each channel over a page's keys.
        most: Maximum of each channel over a page's keys.
    """
    # Where the query is positive, the larger product is that with the maximum, elsewhere that with the minimum.
    return dots(queries.clamp(min=0), most) + dots(queries.clamp(max=0), least)
