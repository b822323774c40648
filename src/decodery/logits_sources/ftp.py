"""FTP: unimportant tokens of the prompt skip layers; tokens of the output run through all layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Self, cast

import numpy as np
import torch

from decodery.core.errors import SettingMissing, SettingsError, UnsupportedModel
from decodery.core.ledger import count
from decodery.core.registry import register
from decodery.core.requirements import Provides, Requirements
from decodery.models.batch import Segment
from decodery.models.cache.attention_policy import Attention, AttentionPolicy
from decodery.models.cache.cache import KVCache
from decodery.models.hooks import Tap
from decodery.models.layer_plan import LayerPlan
from decodery.models.protocol import LanguageModel, Reader
from decodery.models.trained.artifact import refuse_other
from decodery.models.trained.token_routers import TokenRouters, received, uniform
from decodery.step.forward_request import ForwardCoroutine, ForwardRequest, ForwardResult, OfOneModel, score
from decodery.step.logits_source import LogitsSource


@register(
    "ftp",
    paper="FTP: A Fine-grained Token-wise Pruner for Large Language Models via Token Routing (2024)",
    guarantee="lossy: tokens of the prompt leave layers out, and what is written does not see them there; the model's "
    "law at sparsity 0",
    requirements=("a sparsity, or trained routers",),
)
@dataclass(frozen=True)
class FTP(LogitsSource):
    """Lets tokens of the prompt skip layers, in which they leave no keys and values.

    Whether a token skips a layer depends on later tokens. So the prompt is processed as a whole, when all of it is
    known, in one pass per layer over the rows that run through it. Output tokens run through all layers; in each they
    attend to the tokens that ran through it. Drafts, trees and batches give the text of plain decoding under this
    source.

    Attributes:
        routers: `TokenRouters`, or the file or folder that `decodery train ftp` wrote. They have a target sparsity and
            a small router for every layer. A router decides by the token's position, by the attention that it received
            from later tokens in the last layer that it ran through, and by its rank in that attention.
        sparsity: Without routers, the share of tokens that skip a layer, the same in all but the first and the last
            layer; the least important tokens skip it (the static router).
        sinks: Number of first tokens that run through all layers, as does the last token of the prompt.
    """

    routers: TokenRouters | str | None = None
    sparsity: float | None = None
    sinks: int = 4

    requirements = Requirements(layer_plans=True, states=True, policies=True)
    provides = Provides()

    def __post_init__(self) -> None:
        if (self.routers is None) == (self.sparsity is None):
            raise SettingMissing(
                "ftp needs either routers or a sparsity: train routers with decodery train ftp -m MODEL --out DIR, and "
                "name them, as in ftp:routers=DIR, or give ftp:sparsity=0.2, which needs no training"
            )
        if self.sinks < 0:
            raise SettingsError("ftp needs sinks >= 0")

    def over(self, model: LanguageModel, prompt: Sequence[int]) -> Reader:
        layers = model.config.num_layers
        if self.sparsity is not None:
            return Pruned(model, TokenRouters(uniform(layers, self.sparsity)), self.sinks, tuple(prompt))
        found = TokenRouters.load(self.routers)
        refuse_other("these routers", found.model, model, "train some for this one with decodery train ftp -m MODEL")
        if len(found.schedule) != layers:
            raise SettingsError(
                f"these routers are for {len(found.schedule)} layers and the model has {layers}: train some for it "
                "with decodery train ftp -m MODEL"
            )
        return Pruned(model, found, self.sinks, tuple(prompt))


class PrunedCache(KVCache):
    """The keys and values of a text, with different tokens in every layer.

    It has no entries of a prompt before the whole prompt is read. A pass over a part of the prompt only records how far
    the text counts as read. The pass over its end makes a new cache; this one takes over its contents when the rows of
    that pass are kept.
    """

    _noted: np.ndarray | None = None
    _whole: tuple[PrunedCache, int] | None = None

    def note(self, positions: np.ndarray) -> None:
        """Record the positions [n] of this pass as rows of a prompt that is read later."""
        self._noted, self._whole = positions, None

    def offer(self, whole: PrunedCache, rows: int) -> None:
        """Set the cache `whole` that holds the prompt, which the first `rows` rows of this pass end.

        Later rows of the pass are tentative in it.
        """
        self._noted, self._whole = None, (whole, rows)

    def behind(self, segment: Segment) -> Segment:
        """The segment as it continues the cache of the whole prompt, where the rows of this pass end a prompt."""
        if self._whole is None:
            return segment
        whole, ending = self._whole
        mask = None if segment.mask is None else segment.mask[:, ending:]
        return replace(segment, cache=whole, retained=segment.retained - ending, mask=mask)

    def fill(self, rows: int, layers: Sequence[int]) -> None:
        """Keep these rows of the last pass in some layers; the other layers have not run yet."""
        super().keep(range(rows), layers)
        self.next_position = 0

    def keep(self, rows: Sequence[int], layers: Sequence[int] | None = None) -> None:
        noted, whole, picked = self._noted, self._whole, list(rows)
        self._noted = self._whole = None
        if picked and noted is not None:
            self.next_position = int(noted[picked[-1]]) + 1
        elif picked and whole is not None:
            cache, ending = whole
            if picked[:ending] != list(range(ending)):
                raise IndexError(
                    f"the rows that end a prompt must be kept together, not only rows {picked} of {ending}"
                )
            cache.keep([row - ending for row in picked[ending:]], layers)
            self.become(cache)
        else:
            super().keep(picked, layers)

    def fork(self) -> Self:
        clone = super().fork()
        clone._noted = clone._whole = None
        return clone


class Watching(AttentionPolicy):
    """Measures the attention that each row of a prompt receives in the last layer of a pass.

    Attributes:
        received: [n] the sum of the attention.
    """

    observes = True

    def __init__(self) -> None:
        self.received = torch.empty(0, dtype=torch.float32, device="cpu")

    def observe(self, attention: Attention) -> None:
        assert attention.weights is not None
        self.received = received(attention.weights).float().cpu()


@dataclass(frozen=True)
class Pruned(OfOneModel):
    """A model in which tokens of the prompt skip layers, as in `FTP`."""

    model: LanguageModel
    routers: TokenRouters
    sinks: int
    prompt: tuple[int, ...] = field(compare=False)

    def new_cache(self) -> PrunedCache:
        config = self.config
        shape = config.num_layers, config.num_kv_heads, config.head_dim
        return PrunedCache(*shape, dtype=self.dtype, device=self.device)

    def compose(self, segment: Segment, taps: Sequence[Tap] = (), role: str = "") -> ForwardCoroutine[ForwardResult]:
        """See `Composed`.

        Rows of a prompt before its last one are scored only if their logits are requested.
        """
        ending = int((segment.positions < len(self.prompt)).sum())
        if not ending:
            own_rows = cast(PrunedCache, segment.cache).behind(segment) if segment.retained else segment
            return (yield from score(self.model, own_rows, taps, role))
        if segment.tokens is None or segment.interventions or segment.retained or taps:
            raise UnsupportedModel("rows of a prompt that is pruned can be neither looked into nor changed")
        cache, own = cast(PrunedCache, segment.cache), segment.positions[:ending]
        wanted = np.arange(len(segment)) if segment.logit_rows is None else np.asarray(segment.logit_rows, np.int64)
        complete = own[-1] == len(self.prompt) - 1
        if not complete and not len(wanted):
            cache.note(segment.positions)
            return ForwardResult(torch.empty(0, self.vocab_size, dtype=torch.float32, device="cpu"))
        whole = self.new_cache()
        whole.provide(cache.room_for(0))
        climb = Climb(self, whole, role or "layers")
        states = yield from climb.run()
        places = own[wanted[wanted < ending]]
        said = Segment(places, states=states[torch.from_numpy(places).to(states.device)])
        (scored,) = yield [ForwardRequest(self.model, said, (), role, LayerPlan(()))]
        if not complete:
            cache.note(segment.positions)
            return ForwardResult(scored.logits)
        logits, behind = scored.logits, wanted[wanted >= ending]
        if ending < len(segment):
            mask = None if segment.mask is None else segment.mask[ending:, ending:]
            rest = Segment(
                *(segment.positions[ending:], segment.tokens[ending:]),
                **{"mask": mask, "cache": whole, "logit_rows": (behind - ending).tolist()},
            )
            (others,) = yield [ForwardRequest(self.model, rest, (), role)]
            order = np.argsort(np.concatenate((np.flatnonzero(wanted < ending), np.flatnonzero(wanted >= ending))))
            logits = torch.cat((logits, others.logits))[torch.from_numpy(order).to(logits.device)]
        cache.offer(whole, ending)
        count("layers", climb.layers)
        count("rows", len(self.prompt))
        return ForwardResult(logits)


class Climb:
    """The run of a prompt of n tokens through the layers; `cache` receives the entries of each layer.

    Attributes:
        skips: By layer with a router, [n] bool, true for tokens that skip it.
        importance: [n] attention from later tokens in the last layer that a token ran through.
        layers: Number of layers that the tokens ran through, summed over all tokens.
    """

    def __init__(self, source: Pruned, cache: PrunedCache, role: str) -> None:
        self.source, self.cache, self.role = source, cache, role
        self.tokens = np.asarray(source.prompt, dtype=np.int64)
        self.skips: dict[int, torch.Tensor] = {}
        self.shown: dict[int, torch.Tensor] = {}
        self.importance = torch.zeros(len(self.tokens), dtype=torch.float32, device="cpu")
        self.layers = 0
        n = len(self.tokens)
        self.free = (torch.arange(n, device="cpu") >= source.sinks) & (torch.arange(n, device="cpu") < n - 1)

    def run(self) -> ForwardCoroutine[torch.Tensor]:
        """[n, hidden] states after the last layer."""
        states: torch.Tensor | None = None
        for layers, watched in stages(self.source.routers.schedule):
            rows = np.arange(len(self.tokens))
            if self.source.routers.schedule[layers[0]]:
                rows = np.flatnonzero(~self._route(layers[0]).numpy())
            passed = yield from self._pass(layers, rows, states, watched)
            at = torch.from_numpy(rows).to(passed.device)
            states = passed if states is None else states.index_copy(0, at, passed.to(states.dtype))
        self.cache.next_position = len(self.tokens)
        assert states is not None
        return states

    def _route(self, layer: int) -> torch.Tensor:
        """Decide which tokens skip a layer."""
        self.shown[layer] = self.importance
        self.skips[layer] = self.source.routers.skips(layer, self.importance, self.free)
        return self.skips[layer]

    def _pass(
        self, layers: tuple[int, ...], rows: np.ndarray, states: torch.Tensor | None, watched: bool
    ) -> ForwardCoroutine[torch.Tensor]:
        """Run some rows through some layers, and return their states [rows, hidden] after them."""
        watch = self.cache.policy = Watching() if watched else None
        entering = {"tokens": self.tokens} if states is None else {"states": states[torch.from_numpy(rows)]}
        segment = Segment(rows, **entering, cache=self.cache, logit_rows=[])
        end = layers[-1] + 1
        (scored,) = yield [ForwardRequest(self.source.model, segment, (end,), self.role, LayerPlan(layers))]
        self.cache.policy = None
        self.cache.fill(len(rows), layers)
        self.layers += len(rows) * len(layers)
        if watch is not None:
            self.importance = self.importance.index_copy(0, torch.from_numpy(rows), watch.received)
        return scored.hidden[end]


def stages(schedule: Sequence[float]) -> Iterator[tuple[tuple[int, ...], bool]]:
    """The layers of each pass, and whether their attention is measured.

    A layer with a router needs a separate pass, and the attention of the layer before it is measured.
    """
    begun: list[int] = []
    for layer, sparsity in enumerate(schedule):
        watched = layer + 1 < len(schedule) and schedule[layer + 1] > 0
        if (sparsity or watched) and begun:
            yield tuple(begun), False
            begun = []
        begun.append(layer)
        if sparsity or watched:
            yield tuple(begun), watched
            begun = []
    if begun:
        yield tuple(begun), False
