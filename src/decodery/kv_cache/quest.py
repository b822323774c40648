"""Quest: pages of keys, of which each row reads those that may matter most to it."""

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
    """Reads whole pages, chosen by an upper bound of what the query would make of their keys.

    Keeps everything. Of every page the least and the largest value of each channel of its keys bound the scores: sum
    over channels of the larger product with the query. A group of query heads takes the largest bound of its heads, so
    that a key-value head is read once. The page a row stands in is always read. Class A. Read per row: 2 vectors a page
    and the keys and values of the pages chosen. Pages of 16 are those of the cache: kernels keep their bounds in 32
    bits beside it and choose by themselves; bounds of other pages are computed anew for each row.

    Attributes:
        budget: See `CachePolicy`; rounded up to pages, of which at least `least` are read.
        page: Tokens of one.
        dense_layers: First layers that read everything.
        least: Fewest pages that are read.
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
    """Which pages each row reads: [kv_heads, rows, pages] bool, the page that it stands in among them.

    Args:
        least: Of how many pages at the least.
        logical: Tokens of the parts that a page's bound is the largest of, None for the page itself.
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

    A page holds the tokens at `page` positions one after another. Those that rows of the pass stand in are bounded row
    by row, by what that row sees of them; -inf where it sees nothing.
    """
    numbers = asked.positions // page
    count = int(numbers.max()) + 1
    # Content comes in the order of positions, with none missing; the last page may go on in the rows of the pass.
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

    The bounds are the least and the largest key.
    """
    # The larger product is with the largest key where the query is positive, and with the least where it is not.
    return dots(queries.clamp(min=0), most) + dots(queries.clamp(max=0), least)
