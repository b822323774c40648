"""What a cache policy is: it decides which of a text's keys and values are kept, and which of them each row reads."""

from __future__ import annotations

import math
from abc import abstractmethod
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Self, cast

import numpy as np
import torch

from decodery.core.abstract import Contract
from decodery.core.errors import SettingsError
from decodery.core.requirements import Provides, Requirements
from decodery.models.cache.attention_policy import AttentionPolicy
from decodery.models.cache.cache import KVCache
from decodery.models.cache.own_caches import OwnCaches
from decodery.models.config import POSITIONS, ModelConfig
from decodery.models.protocol import LanguageModel, Reader

from .forward_request import ForwardCoroutine
from .sequence import Sequence

__all__ = ["CachePolicy"]


@dataclass(frozen=True)
class CachePolicy(Contract):
    """What one text remembers of what it read.

    Fields are settings.

    A budget is what one key-value head keeps or reads in one layer: up to 1 a share of the text so far, rounded up,
    above 1 a number of tokens. Under a budget of 1 a text is what it is without a policy. Layers with a sliding window
    keep what is in their window. With the policy as the target, drafts, trees and batches give the tokens of plain
    decoding under the policy; what that is differs from the full model.
    """

    requirements = Requirements(keys=True, policies=True)

    @property
    def provides(self) -> Provides:
        """What of the model can still be had under it, which drafters, rules and searches may need."""
        return Provides(layer_plans=True)

    @abstractmethod
    def state(self, model: LanguageModel, prompt: int) -> AttentionPolicy:
        """What it remembers of a text whose prompt has `prompt` tokens, for the cache of that text.

        Args:
            model: Whose keys and values the cache holds.
            prompt: Tokens of the prompt.
        """

    def settle(self, seq: Sequence) -> ForwardCoroutine[None] | None:
        """Done once, when a text's prompt is read: here a policy may read rows of its own."""
        return None

    def open(self, seq: Sequence, rows: int) -> ForwardCoroutine[torch.Tensor | None] | None:
        """Read rows of its own after a prompt is read and before its first token is chosen.

        Args:
            seq: the text.
            rows: how many rows are tentative, the last of the prompt's; they must stay so.

        Returns:
            Logits [1, vocab] that the first token is chosen by; None for those of the prompt's last row.
        """
        return None

    def endless(self, config: ModelConfig) -> bool:
        """Whether texts of such a model go on beyond its context."""
        return False

    @property
    def probes(self) -> bool:
        """Whether it reads rows of its own."""
        return type(self).settle is not CachePolicy.settle or self.opens

    @property
    def opens(self) -> bool:
        """Whether it chooses what the first token is chosen by."""
        return type(self).open is not CachePolicy.open

    def over(self, model: Reader, prompt: int) -> Remembering:
        """The model, whose texts with a prompt of `prompt` tokens remember as this policy says.

        Args:
            model: The model without the policy.
            prompt: Tokens of the prompt.
        """
        return Remembering(cast(LanguageModel, model), self, prompt)


class Remembering(OwnCaches):
    """A model under a cache policy.

    It equals the model itself, see `OwnCaches`.

    Its context is the model's, or all positions that can be counted where the policy knows no end.
    """

    def __init__(self, model: LanguageModel, kv: CachePolicy, prompt: int) -> None:
        super().__init__(model)
        self.kv, self.prompt, config = kv, prompt, model.config
        self._config = replace(config, max_positions=POSITIONS.most) if kv.endless(config) else config

    @property
    def config(self) -> ModelConfig:
        return self._config

    def new_cache(self) -> KVCache:
        cache = self.model.new_cache()
        cache.policy = self.kv.state(self.model, self.prompt)
        return cache


class State(AttentionPolicy):
    """What a policy remembers of one text.

    It has no say in layers with a sliding window: they are small already, and their rows never see further back.

    Args:
        config: The model's configuration.
        prompt: How many tokens its prompt has.
    """

    windows = False

    def __init__(self, config: ModelConfig, prompt: int) -> None:
        self.config, self.prompt = config, prompt

    @property
    def full_layers(self) -> list[int]:
        """The layers that it has a say in."""
        return [layer for layer in range(self.config.num_layers) if self.config.window(layer) is None]

    def fork(self) -> Self:
        return deepcopy(self, {id(self.config): self.config})


def entries(budget: float, length: int) -> int:
    """How many of `length` tokens a budget allows; at least one.

    Args:
        budget: A share of the text up to 1, or a number of tokens above 1.
        length: Tokens of the text.
    """
    count = math.ceil(round(budget * length, 9)) if budget <= 1 else int(budget)
    return min(max(count, 1), length)


def require_budget(name: str, budget: float) -> None:
    """Raise SettingsError for what is no budget."""
    if not (0 < budget <= 1 or (budget > 1 and float(budget).is_integer())):
        raise SettingsError(
            f"the budget of {name} is a share of the text, above 0 and up to 1, or a number of tokens, not {budget!r}"
        )


def window_begins(budget: float, sinks: int, position: int) -> int:
    """Where the window of a row at `position` begins, if a budget holds `sinks` tokens and the window.

    Args:
        budget: See `entries`.
        sinks: First tokens that are kept beside the window.
        position: Of the row.
    """
    return position + 1 - max(entries(budget, position + 1) - sinks, 1)


def shared_out(weights: np.ndarray, mean: float, least: float = 0.01) -> np.ndarray:
    """Shares in proportion to weights, each from `least` to 1, whose mean is `mean` if that can be.

    Args:
        weights: Of each share, not negative.
        mean: The mean of all shares.
        least: The smallest share.
    """
    shares = np.full(len(weights), np.nan)
    while (free := np.isnan(shares)).any():
        left = mean * len(weights) - np.nansum(shares)
        found = weights * left / weights[free].sum()
        over, under = free & (found > 1), free & (found < least)
        if not (over | under).any():
            shares[free] = found[free]
        elif (found[over] - 1).sum() >= (least - found[under]).sum():
            shares[over] = 1.0
        else:
            shares[under] = least
    return shares


def best(scores: np.ndarray, counts: np.ndarray | int, allowed: np.ndarray | None = None) -> np.ndarray:
    """[..., slots] bool: the `counts` [...] highest of [..., slots] scores; of equal ones the earliest.

    Args:
        scores: [..., slots].
        counts: [...] how many to choose.
        allowed: [..., slots] bool, which of them may be chosen.
    """
    worth = scores if allowed is None else np.where(allowed, scores, -np.inf)
    order = np.argsort(-worth, axis=-1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.broadcast_to(np.arange(order.shape[-1]), order.shape), axis=-1)
    chosen: np.ndarray = rank < np.asarray(counts)[..., None]
    return chosen if allowed is None else chosen & allowed
