"""Contrastive search: of the most likely tokens the one whose hidden state repeats the text least."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import normalize

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.core.topk import topk
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Segment
from decodery.models.loaders.store import Progress, silent
from decodery.models.protocol import Reader, is_open
from decodery.sampling.logits_processor import require_number
from decodery.step.embedded import reading
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence

from .base import Branches, Search, choose


@register(
    "contrastive-search",
    paper="A Contrastive Framework for Neural Text Generation (2022)",
    guarantee="alpha 0 is greedy decoding",
)
@dataclass(frozen=True)
class ContrastiveSearch(Search):
    """Takes the token of the top `k` with the best (1 - alpha) * p - alpha * (similarity to the text).

    Masks and penalties shape p. The choice needs a pass over its candidates, so there is nothing that drafts could be
    verified with. Memory: one hidden state per token.

    Attributes:
        k: Candidates, read as siblings in one pass per token; the winner's keys and values stay.
        alpha: Weight of the degeneration penalty, the largest cosine between a candidate's last hidden state (after the
            final norm) and that of any token before it, the prompt's included.
    """

    k: int = 4
    alpha: float = 0.6

    requirements = Requirements(rows=True, trees=True, alone=True, greedy=True, law=True, taps=(-1,), parts=True)

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or self.k < 1:
            raise SettingsError(f"contrastive search needs k >= 1, not {self.k!r}")
        require_number("the alpha of contrastive-search", self.alpha, least=0.0, most=1.0)

    def find(self, engine: Engine, request: Request, progress: Progress = silent) -> ForwardCoroutine[list[Sequence]]:
        branches = Branches(engine, request, self)
        seq = branches.root
        states = _States(branches.model, len(seq.tokens) + seq.request.max_new_tokens)
        logits = yield from _read(branches, states)
        while not seq.finished:
            yield from branches.find_out([seq])
            law = seq.request.sampler.law(logits[None], [seq.context()])
            candidates = topk(law, self.k)[0][0]
            p = law.double().softmax(dim=-1)[0, torch.from_numpy(candidates).to(law.device)]
            rows = len(candidates)
            positions = np.full(rows, seq.cache.next_position)
            siblings = Segment(positions, tokens=candidates, mask=np.eye(rows, dtype=bool), cache=seq.cache)
            (scored,) = yield from branches.ask([siblings], taps=states.taps)
            own = states.of(scored.hidden[states.taps[0]])
            likeness = (own @ states.seen.T).amax(dim=-1)
            score = (1 - self.alpha) * p - self.alpha * likeness.double()
            # Excluded tokens are candidates where a mask leaves fewer than k.
            winner = int(score.masked_fill(p == 0, -torch.inf).argmax())
            seq.cache.keep([winner])
            states.add(own[winner : winner + 1])
            choose(seq, int(candidates[winner]), logits)
            logits = scored.logits[winner]
            progress("contrastive search", seq.position, seq.request.max_new_tokens)
        return branches.finish([seq])


class _States:
    """Unit hidden states of all tokens so far. seen: [n, hidden]; taps: the layer they come from."""

    def __init__(self, model: Reader, most: int) -> None:
        assert is_open(model)
        self._norm = model.final_norm
        self._all = torch.empty(0, dtype=torch.float32, device="cpu")
        self._count, self._most = 0, most
        self.taps = (model.config.num_layers,)

    @property
    def seen(self) -> torch.Tensor:
        return self._all[: self._count]

    def of(self, hidden: torch.Tensor) -> torch.Tensor:
        """Unit vectors [n, hidden] of tapped states."""
        return normalize(self._norm(hidden), dim=-1)

    def add(self, unit: torch.Tensor) -> None:
        if self._count == 0:
            self._all = unit.new_empty(self._most, unit.shape[1])
        self._all[self._count : self._count + len(unit)] = unit
        self._count += len(unit)


def _read(branches: Branches, states: _States) -> ForwardCoroutine[torch.Tensor]:
    """Read the prompt, all of it: what an earlier text left has no hidden states. Returns the logits after it."""
    seq = branches.root
    seq.cache.truncate(0)
    while seq.cache.next_position < len(seq.tokens):
        chunk = seq.tokens[seq.cache.next_position :][: branches.engine.prefill_chunk]
        segment = reading(seq, chunk, [len(chunk) - 1])
        (scored,) = yield from branches.ask([segment], taps=states.taps, prefill=True)
        seq.cache.keep(range(len(chunk)))
        states.add(states.of(scored.hidden[states.taps[0]]))
    return scored.logits[0]
