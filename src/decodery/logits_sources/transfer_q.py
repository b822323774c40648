"""Transfer Q*: tokens are scored by the model's distribution and by the reward of an aligned model's continuation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.noise import gumbel_argmax
from decodery.core.registry import register, resolve
from decodery.models.batch import Segment
from decodery.models.hooks import Tap
from decodery.models.loaders.named import Precision, named
from decodery.models.protocol import LanguageModel, Reader
from decodery.models.tokenizers.vocabularies import excluded
from decodery.sampling.logits_processor import require_number
from decodery.step.forward_request import ForwardCoroutine, ForwardResult, score_all
from decodery.step.logits_source import EXCLUDED, LogitsSource, token_ids
from decodery.step.scorer import Candidates, Scorer, judge

from .contexts import Blend, Member, Part

_ROLLOUT = 31
"""The noise stream of rollouts, independent of all other streams."""


@register(
    "transfer-q",
    paper="Transfer Q Star: Principled Decoding for LLM Alignment (2024)",
    guarantee="at weight 0 the model's own distribution, truncated to its most likely tokens",
    requirements=("a reward", "an aligned model"),
    texts=("prompt",),
)
@dataclass(frozen=True)
class TransferQ(LogitsSource):
    """Adds to the most likely logits the reward of how an aligned model continues after each.

    Cost: k x rollouts x length rows of the baseline and as many rewards as rollouts, per row that may choose a token.

    Attributes:
        reward: A scorer of answers; it scores the output so far with the candidate token and its rollout.
        baseline: The aligned model, or a name for `decodery.load`; None is the loaded model, aligned by `prompt`.
        prompt: Text or token ids that the baseline reads in place of the prompt; None is the prompt itself.
        k: Number of candidate tokens.
        weight: Weight of the reward, 1 / alpha of the paper.
        length: Maximum number of tokens of a rollout (5 in the published indirect variant).
        rollouts: Number of rollouts per candidate; a single one is greedy, several are drawn at temperature 1.
        end: Token ids that end a rollout.
        against: The reward that the baseline was aligned with, if it is not `reward` (the indirect variant). The reward
            r of a rollout is then weighed by exp((r - its reward under `against`) / beta); the weights of several
            rollouts are normalised.
        beta: Scale of the reward differences in these weights.
        dtype: Data type of a baseline that is loaded by name, such as "int4".
    """

    reward: Scorer | str
    baseline: LanguageModel | str | None = None
    prompt: str | tuple[int, ...] | None = None
    k: int = 10
    weight: float = 1.0
    length: int = 20
    rollouts: int = 1
    end: tuple[int, ...] = ()
    against: Scorer | str | None = None
    beta: float = 2.0
    dtype: Precision = "auto"

    def __post_init__(self) -> None:
        require_number("the weight of transfer-q", self.weight)
        require_number("the beta of transfer-q", self.beta, above=0.0)
        if min(self.k, self.length, self.rollouts) < 1:
            raise SettingsError("transfer-q needs k, length and rollouts of at least 1")
        object.__setattr__(self, "reward", resolve("scorer", self.reward))
        if self.against is not None:
            object.__setattr__(self, "against", resolve("scorer", self.against))

    def encoded(self, encode: Callable[[str], list[int]]) -> TransferQ:
        return replace(self, prompt=tuple(encode(self.prompt))) if isinstance(self.prompt, str) else self

    def over(self, model: LanguageModel, prompt: Sequence[int]) -> Reader:
        own = None if self.prompt is None else token_ids(self.prompt, "transfer-q", "prompt", model.vocab_size)
        baseline = named(model if self.baseline is None else self.baseline, self.dtype)
        members = (Member("model", model), Member("baseline", baseline, own))
        return _Transferred(members, len(prompt), settings=replace(self, prompt=None))


@dataclass(frozen=True)
class _Transferred(Blend):
    settings: TransferQ = field(kw_only=True)

    def composed(self, part: Part, taps: Sequence[Tap]) -> ForwardCoroutine[ForwardResult]:
        given = yield from part.read(0, part.everything(), taps)
        if not part.output.any():
            return given
        rows = torch.from_numpy(part.output)
        top = given.logits[rows].topk(min(self.settings.k, self.vocab_size), dim=-1)
        worth = torch.zeros(top.values.shape, dtype=torch.float32, device="cpu")
        if self.settings.weight:
            worth = yield from self._worth(part, top.indices.tolist())
        steered = top.values + self.settings.weight * worth.to(top.values)
        logits = given.logits.clone()
        logits[rows] = (given.logits[rows] - EXCLUDED).scatter_(1, top.indices, steered)
        return replace(given, logits=logits)

    def _worth(self, part: Part, candidates: list[list[int]]) -> ForwardCoroutine[torch.Tensor]:
        """[m, k] float64 expected rewards of the m output rows of `part` with each of their candidate tokens."""
        settings, start = self.settings, part.contexts.prompt_length
        texts = [part.prefix(row) for row in part.wanted[part.output].tolist()]
        begun = [
            [*text, token]
            for text, tokens in zip(texts, candidates, strict=True)
            for token in tokens
            for _ in range(settings.rollouts)
        ]
        rolled = yield from self._roll_out(part, begun)
        prompt, outputs = texts[0][:start], [text[start:] for text in rolled]
        answers = Candidates(prompt, outputs, [True] * len(outputs), model=part.contexts.readers[0].member.model)

        def judged(scorer: Scorer | str) -> ForwardCoroutine[np.ndarray]:
            assert isinstance(scorer, Scorer)
            return (yield from judge(scorer, answers)).double().cpu().numpy().reshape(-1, settings.rollouts)

        rewards = yield from judged(settings.reward)
        against = None
        if settings.against is not None:
            against = yield from judged(settings.against)
        return torch.from_numpy(expected_reward(rewards, against, settings.beta)).view(len(texts), -1)

    def _roll_out(self, part: Part, begun: list[list[int]]) -> ForwardCoroutine[list[list[int]]]:
        """Continue the texts with the baseline, in shared passes, on forks of its cache."""
        settings, reader = self.settings, part.contexts.readers[1]
        model, role = reader.member.model, reader.member.name
        yield from reader.catch_up(part.contexts.tokens, role)
        texts, caches = [list(text) for text in begun], [reader.cache.fork() for _ in begun]
        fresh = [reader.tokens(text, len(text))[reader.cache.next_position :] for text in texts]
        for _ in range(settings.length):
            active = [
                number
                for number, text in enumerate(texts)
                if text[-1] not in settings.end
                and caches[number].next_position + len(fresh[number]) <= model.config.max_positions
            ]
            if not active:
                break
            segments = [Segment.chunk(fresh[i], caches[i], logit_rows=[len(fresh[i]) - 1]) for i in active]
            found = yield from score_all(model, segments, (), role)
            laws = excluded(model, torch.cat([each.logits for each in found]))
            if settings.rollouts == 1:
                drawn = laws.argmax(dim=-1).tolist()
            else:
                # Candidates share their noise, so that their rewards differ by the candidate only.
                places = [len(texts[i]) * settings.rollouts + i % settings.rollouts for i in active]
                drawn = gumbel_argmax(laws, 0, places, stream=_ROLLOUT).tolist()
            for i, token in zip(active, drawn, strict=True):
                caches[i].keep(range(len(fresh[i])))
                texts[i].append(token)
                fresh[i] = [token]
        return texts


def expected_reward(rewards: np.ndarray, against: np.ndarray | None, beta: float) -> np.ndarray:
    """The expected reward of rollouts, reweighted if the baseline was aligned with another reward.

    The weights of several rollouts are normalised; that of a single one is not.

    Args:
        rewards: Rewards of the rollouts.
        against: Rewards of the same rollouts that the baseline was aligned with, None where it is the same reward.
        beta: See `TransferQ.beta`.
    """
    if against is None:
        return rewards.mean(axis=1)
    exponents = (rewards - against) / beta
    if rewards.shape[1] == 1:
        return (np.exp(exponents) * rewards)[:, 0]
    weights = np.exp(exponents - exponents.max(axis=1, keepdims=True))
    return (weights * rewards).sum(axis=1) / weights.sum(axis=1)
