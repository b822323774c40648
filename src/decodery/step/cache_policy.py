"""Base class of KV cache policies, which decide which keys and values are kept and which of them each row reads."""

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
    """Decides which keys and values of a text are kept and read.

    Fields are settings.

    A budget is the number of tokens that one key-value head keeps or reads in one layer: up to 1 a share of the text so
    far, rounded up; above 1 a number of tokens. With a budget of 1 a text is the same as without a policy. Layers with
    a sliding window keep the tokens of their window. Drafts, trees and batches give the tokens of plain decoding under
    the policy, which may differ from those of the model without it.
    """

    requirements = Requirements(keys=True, policies=True)

    @property
    def provides(self) -> Provides:
        """The capabilities of the model that remain under it, which drafters, rules and searches may require."""
        return Provides(layer_plans=True)

    @abstractmethod
    def state(self, model: LanguageModel, prompt: int) -> AttentionPolicy:
        """Make the policy's state for the cache of one text.

        Args:
            model: The model whose keys and values the cache holds.
            prompt: Number of prompt tokens.
        """

    def settle(self, seq: Sequence) -> ForwardCoroutine[None] | None:
        """Called once, after a text's prompt was read; a policy may run extra rows here."""
        return None

    def open(self, seq: Sequence, rows: int) -> ForwardCoroutine[torch.Tensor | None] | None:
        """Run extra rows after the prompt was read and before the first token is chosen.

        Args:
            seq: The text.
            rows: Number of tentative rows, the last ones of the prompt; they must stay tentative.

        Returns:
            Logits [1, vocab] for the first token; None for those of the prompt's last row.
        """
        return None

    def endless(self, config: ModelConfig) -> bool:
        """Whether texts of such a model may be longer than its context."""
        return False

    @property
    def probes(self) -> bool:
        """Whether it runs extra rows."""
        return type(self).settle is not CachePolicy.settle or self.opens

    @property
    def opens(self) -> bool:
        """Whether it replaces the logits of the first token."""
        return type(self).open is not CachePolicy.open

    def over(self, model: Reader, prompt: int) -> Remembering:
        """Return the model under this policy, for texts with a prompt of `prompt` tokens.

        Args:
            model: The model without the policy.
            prompt: Number of prompt tokens.
        """
        return Remembering(cast(LanguageModel, model), self, prompt)


class Remembering(OwnCaches):
    """A model under a cache policy.

    It equals the model itself, see `OwnCaches`.

    Its context is the model's, or unlimited where the policy is `endless`.
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
    """The state of a policy for one text.

    Policies do not apply to layers with a sliding window: their caches are small, and their rows never read further
    back.

    Args:
        config: The model's configuration.
        prompt: Number of prompt tokens.
    """

    windows = False

    def __init__(self, config: ModelConfig, prompt: int) -> None:
        self.config, self.prompt = config, prompt

    @property
    def full_layers(self) -> list[int]:
        """The layers that the policy applies to: those without a sliding window."""
        return [layer for layer in range(self.config.num_layers) if self.config.window(layer) is None]

    def fork(self) -> Self:
        return deepcopy(self, {id(self.config): self.config})


def entries(budget: float, length: int) -> int:
    """Number of tokens, of `length`, that a budget allows; at least one.

    Args:
        budget: A share of the text up to 1, or a number of tokens above 1.
        length: Tokens of the text.
    """
    count = math.ceil(round(budget * length, 9)) if budget <= 1 else int(budget)
    return min(max(count, 1), length)


def require_budget(name: str, budget: float) -> None:
    """Raise SettingsError for an invalid budget."""
    if not (0 < budget <= 1 or (budget > 1 and float(budget).is_integer())):
        raise SettingsError(
            f"the budget of {name} is a share of the text, above 0 and up to 1, or a number of tokens, not {budget!r}"
        )


def window_begins(budget: float, sinks: int, position: int) -> int:
    """First position of the window of a row at `position`, for a budget that includes `sinks` tokens.

    Args:
        budget: See `entries`.
        sinks: First tokens that are kept beside the window.
        position: Position of the row.
    """
    return position + 1 - max(entries(budget, position + 1) - sinks, 1)


def shared_out(weights: np.ndarray, mean: float, least: float = 0.01) -> np.ndarray:
    """Shares in proportion to weights, from `least` to 1, with the mean `mean` where that is possible.

    Args:
        weights: Weights of the shares, 0 or more.
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
    """[..., slots] bool, true for the `counts` [...] highest scores; ties in order of slot.

    Args:
        scores: [..., slots].
        counts: [...] number of slots to choose.
        allowed: [..., slots] bool, the slots that may be chosen.
    """
    worth = scores if allowed is None else np.where(allowed, scores, -np.inf)
    order = np.argsort(-worth, axis=-1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.broadcast_to(np.arange(order.shape[-1]), order.shape), axis=-1)
    chosen: np.ndarray = rank < np.asarray(counts)[..., None]
    return chosen if allowed is None else chosen & allowed
