"""Blockwise controlled decoding: of a few sampled blocks the one that a prefix scorer values most becomes text."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from decodery.core.errors import SettingsError
from decodery.core.noise import nth_seed
from decodery.core.registry import register, resolve
from decodery.core.requirements import Requirements
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Segment
from decodery.models.hooks import Tap
from decodery.models.loaders.store import Progress, silent
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.step.acceptance_rule import NodeDistributions
from decodery.step.draft_tree import DraftTree
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.scorer import Scorer, judge
from decodery.step.sequence import Sequence

from .base import Branches, Search, candidates, choose


@register(
    "controlled-blocks",
    paper="Controlled Decoding from Language Models (2023)",
    guarantee="best of n where a block is as long as the text",
    requirements=("a prefix scorer",),
)
@dataclass(frozen=True)
class ControlledBlocks(Search):
    """Draws several blocks of tokens at a time, and goes on from the one whose text is worth most.

    Cost: one pass of `samples` rows per token; memory: a cache per block.

    Attributes:
        value: A scorer of beginnings and answers, as in value-head(head=value.safetensors).
        samples: Blocks drawn at a time, by the request's own sampler at seeds that count up from its seed.
        block: Tokens; a text that ends in it stops there.
    """

    value: Scorer | str
    samples: int = 4
    block: int = 8

    @property
    def requirements(self) -> Requirements:
        return Requirements(rows=True, alone=True, law=True, taps=self.scorer.requirements.taps)

    def __post_init__(self) -> None:
        if self.samples < 1 or self.block < 1:
            raise SettingsError("controlled-blocks needs samples and block of at least 1")
        object.__setattr__(self, "value", resolve("scorer", self.value))

    @property
    def scorer(self) -> Scorer:
        assert isinstance(self.value, Scorer)
        return self.value

    def bind(self, tokenizer: Tokenizer) -> ControlledBlocks:
        return replace(self, value=self.scorer.bind(tokenizer))

    def find(self, engine: Engine, request: Request, progress: Progress = silent) -> ForwardCoroutine[list[Sequence]]:
        branches = Branches(engine, request, self)
        value = self.scorer
        value.fits(branches.model)
        text = branches.root
        logits = (yield from branches.score([text]))[0]
        while not text.finished:
            drawn = [text.fork() for _ in range(self.samples)]
            rows, hidden = [logits] * self.samples, {}
            for number, each in enumerate(drawn):
                each.rebind(seed=nth_seed(request.seed, number))
            for _ in range(self.block):
                if not (active := [number for number, each in enumerate(drawn) if not each.finished]):
                    break
                for number in active:
                    laws = NodeDistributions(
                        DraftTree.root(drawn[number].last_token), rows[number][None], drawn[number]
                    )
                    choose(drawn[number], laws.picks([0])[0], rows[number])
                # The last token of a block is read as well: its state tells what the block is worth.
                segments = [Segment.chunk([drawn[number].last_token], drawn[number].cache) for number in active]
                found = yield from branches.ask(segments, taps=value.requirements.taps)
                for scored, number in zip(found, active, strict=True):
                    drawn[number].cache.keep([0])
                    rows[number] = scored.logits[0]
                    hidden[number] = {tap: scored.hidden[tap][0] for tap in value.requirements.taps}
            states: dict[Tap, torch.Tensor] = {
                tap: torch.stack([hidden[number][tap] for number in range(self.samples)])
                for tap in value.requirements.taps
            }
            worth = yield from judge(value, candidates(drawn, states))
            best = int(worth.argmax())
            text, logits = drawn[best], rows[best]
            text.score = float(worth[best])
            progress("controlled-blocks", text.position, text.request.max_new_tokens)
        # Blocks are drawn with seeds that count up from it; this one gives the text again.
        text.rebind(seed=request.seed)
        return branches.finish([text])
