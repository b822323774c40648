"""Query-only test-time training: a few gradient steps on the query projections, over a prompt that is read once."""

from __future__ import annotations

import warnings
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

import torch

from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.core.ledger import charged, count
from decodery.core.noise import draw, mix
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.cache.cache import KVCache
from decodery.models.loaders.store import Progress, silent
from decodery.models.torch.transformer import Transformer
from decodery.models.trained.queries import Span, queries_of, with_queries
from decodery.sampling.logits_processor import require_number
from decodery.step.forward_request import ForwardCoroutine, off_loop
from decodery.step.sequence import Sequence

from .base import Search, credit
from .handed import hand_over, read_prompt

_CLIP, _DECAY, _MOST_RISE = 1.0, 0.01, 1.5


@register(
    "query-ttt",
    paper="Let's (not) just put things in Context: Test-Time Training for Long-Context LLMs (2025)",
    guarantee="lossy: another model for one text; steps=0 is plain decoding, and the model itself never changes",
    requirements=("weights in float32",),
)
@dataclass(frozen=True)
class QueryTTT(Search):
    """Trains the query projections on the prompt for a few steps, then writes one text with them.

    The prompt is read once, by the model as it is, and its keys and values stay. A step draws `span` tokens of it in a
    row, and lowers their cross-entropy by AdamW (weight decay 0.01, gradients clipped at 1) in the query weights of all
    layers and nothing else. Every span is also scored by the model as it is, and the last one by the trained weights:
    where these lose more than 1.5 times as much as it does on the same span, a warning says so, the text is written by
    the model as it is, and `aborted` is counted. The last token of the prompt is read by the trained weights. Spans are
    drawn by a hash of the prompt, so that a request is repeatable.

    Trained is a copy, which this text alone is written with, in passes of its own; nothing has to be restored. Memory:
    the query, key and value weights once and the query weights three times more while it trains, and activations of a
    span. Cost: each step about 4 passes over `span` rows; passes of others wait for all steps. It pays for long
    prompts, if at all. The ledger has the rows of the steps under "training".

    Attributes:
        steps: Training steps.
        span: Tokens of a step.
        lr: 1e-6 to 1e-5 in the paper, by data set.
        recompute: The span's own keys and values are computed by the weights so far, and only those before it are the
            kept ones.
    """

    steps: int = 32
    span: int = 128
    lr: float = 1e-5
    recompute: bool = False

    requirements = Requirements(rows=True, gradients=True, alone=True)

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or self.steps < 0 or not isinstance(self.span, int) or self.span < 1:
            raise SettingsError("query-ttt needs 0 steps or more, over a span of at least 1 token")
        require_number("the lr of query-ttt", self.lr, above=0.0)

    def find(self, engine: Engine, request: Request, progress: Progress = silent) -> ForwardCoroutine[list[Sequence]]:
        seq = engine.open(replace(request, search=self))
        model = seq.request.model
        if not isinstance(model, Transformer) or model.dtype not in (torch.float32, torch.float64):
            raise UnsupportedModel("query-ttt trains weights in float32: load the model with dtype=float32")
        if not isinstance(seq.cache, KVCache) or not seq.cache.plain or seq.cache.prefix:
            raise UnsupportedModel("query-ttt needs all keys and values of the prompt: leave cache policies out")
        yield from read_prompt(seq, engine.prefill_chunk)
        # Training takes as long as many passes.
        hand_over(seq, (yield from off_loop(partial(self.adapted, model, seq.tokens, seq.cache, progress))))
        while not seq.finished:
            yield from engine.write([seq], seq.trace)
            progress("query-ttt", seq.position, seq.request.max_new_tokens)
        credit(seq.trace, seq)
        return [seq]

    def adapted(
        self, model: Transformer, tokens: Ordered[int], cache: KVCache, progress: Progress = silent
    ) -> Transformer:
        """The model with queries trained on `tokens`, of which `cache` holds all but the last.

        Itself without steps.
        """
        # A row needs the token after it, and what is kept ends before the last one.
        length = min(self.span, len(tokens) - 1)
        if not self.steps or length < 1:
            return model
        place, begin, ledger = mix(0, *tokens), perf_counter(), charged()
        queries = queries_of(model)
        optimiser = torch.optim.AdamW(queries, lr=self.lr, weight_decay=_DECAY)
        for step in range(self.steps):
            start = min(int(draw(place, step) * (len(tokens) - length)), len(tokens) - 1 - length)
            span = Span(model, cache, start, length, self.recompute)
            with torch.enable_grad():
                loss = span.loss(with_queries(model, queries), tokens)
                loss.backward()
            before = float(span.loss(model, tokens)) if step else loss.item()
            if self._astray(step, before, loss.item()):
                return model
            torch.nn.utils.clip_grad_norm_(queries, _CLIP)
            optimiser.step()
            optimiser.zero_grad()
            if step + 1 == self.steps:
                trained = with_queries(model, [each.detach() for each in queries])
                if self._astray(self.steps, before, float(span.loss(trained, tokens))):
                    return model
            ledger.spend("training", 2 * length, perf_counter() - begin, first=True)
            begin = perf_counter()
            progress("training queries", step + 1, self.steps)
        return trained

    def _astray(self, steps: int, before: float, after: float) -> bool:
        """Whether a span's loss has risen too far after so many steps, which is said and counted."""
        if after <= _MOST_RISE * before:
            return False
        warnings.warn(
            f"query-ttt: after {steps} steps the loss of a span of the prompt is {after:.4g}, where the model as it is "
            f"has {before:.4g}; the text is written without training: give an lr below {self.lr:g}, or fewer steps",
            stacklevel=3,
        )
        count("aborted")
        return True
