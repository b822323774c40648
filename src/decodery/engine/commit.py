"""The last of the four steps: what was accepted becomes text, and every state moves with it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ordered

import numpy as np
import torch

from decodery.core.topk import log_probabilities, topk
from decodery.models.hooks import Tap
from decodery.step.acceptance_rule import Accepted, NodeDistributions
from decodery.step.draft_tree import DraftTree
from decodery.step.forward_request import ForwardCoroutine, off_loop
from decodery.step.monitor import ScoredRow
from decodery.step.segment_end import SegmentEnd
from decodery.step.sequence import Sequence, TokenLogprob

from .monitoring import TextMonitors, monitors_of

_TOGETHER = 64
"""Rows of the vocabulary's size that are normalised at a time."""


def commit(seq: Sequence, tree: DraftTree, laws: NodeDistributions, accepted: Accepted) -> ForwardCoroutine[list[int]]:
    """Append the accepted path and the bonus token up to the first stop, or hold.

    Stop conditions are checked token by token, so that a run accepted at once ends where plain decoding would.

    Returns:
        What was appended.
    """
    run = [int(tree.tokens[node]) for node in accepted.path] + [accepted.bonus]
    chosen_at = [0, *accepted.path]
    emitted: list[int] = []
    request, monitors = seq.request, monitors_of(seq)
    for token, node in zip(run, chosen_at, strict=True):
        if monitors is not None:
            monitors.remember(seq, seq.position, laws.context(node).state)
        if request.logprobs is not None:
            seq.token_logprobs += logprobs(laws.row(node)[None], [token], request.logprobs)
        seq.tokens.append(token)
        emitted.append(token)
        end_of(seq, token)
        cut = monitors is not None and observed(seq, monitors, _scored(node, laws), _hidden(monitors, node, laws))
        if seq.finished or cut or (seq.segment_end is not None and (yield from _segment_ended(seq, seq.segment_end))):
            break
    seq.trace.ledger.tokens += len(emitted)
    if request.sampler.stateful:
        last = chosen_at[len(emitted) - 1]
        seq.processor_states = request.sampler.after(laws.context(last), emitted[-1], laws.row(last))
    return emitted


def _segment_ended(seq: Sequence, ends: Callable[[Sequence], bool]) -> ForwardCoroutine[bool]:
    """Whether a segment ends here; what may take long is found out beside the loop."""
    if isinstance(ends, SegmentEnd) and (question := ends.question(seq)) is not None:
        yield from off_loop(question)
    return ends(seq)


def end_of(seq: Sequence, token: int) -> None:
    """Add a committed token to the text, and end it where the token does."""
    if token in seq.request.eos_ids:
        seq.finish_reason, seq.stopped_by = "stop", token
    elif seq.text is not None and (found := seq.text.push(token)) is not None:
        seq.finish_reason, seq.stopped_by = "stop", found
    elif seq.remaining <= 0:
        seq.finish_reason = "length"
    if seq.finished and not isinstance(seq.stopped_by, str):
        _finish_text(seq)


def _finish_text(seq: Sequence) -> None:
    if seq.text is not None and (found := seq.text.finish()) is not None:
        seq.finish_reason, seq.stopped_by = "stop", found


def _scored(node: int, laws: NodeDistributions) -> ScoredRow:
    return ScoredRow(laws.row(node)[None], 0)


def _hidden(monitors: TextMonitors, node: int, laws: NodeDistributions) -> dict[Tap, torch.Tensor]:
    return {tap: laws.hidden[tap][node] for tap in monitors.requirements.taps}


def observed(seq: Sequence, monitors: TextMonitors, scored: ScoredRow, hidden: dict[Tap, torch.Tensor]) -> bool:
    """Let the monitors see the token that was just committed; whether the run ends after it.

    Args:
        seq: The text.
        monitors: Its monitors.
        scored: The row that predicted the token.
        hidden: By tap, [width] of that row.
    """
    ended = seq.finished
    cut = monitors.see(seq, scored, hidden)
    if seq.finished and not ended and seq.text is not None:
        seq.text.finish()
    return cut


def logprobs(logits: torch.Tensor, tokens: Ordered[int], top: int) -> list[TokenLogprob]:
    """Of the token that follows each row, and of the `top` most likely.

    Args:
        logits: [n, vocab], the model's own.
    """
    found: list[TokenLogprob] = []
    for first in range(0, len(tokens), _TOGETHER):
        here = tokens[first : first + _TOGETHER]
        rows = logits[first : first + len(here)].float()
        if rows.device.type == "cpu":
            found += _on_host(rows, here, top)
            continue
        rows = torch.log_softmax(rows, dim=-1)
        values, ids = rows.topk(min(top, rows.shape[-1]))
        of_tokens = rows.gather(1, torch.tensor(here, dtype=torch.int64, device=rows.device)[:, None])
        # One copy from a device: ids are exact in float32, too.
        copied = torch.cat((of_tokens, values, ids.float()), dim=1).tolist()
        for token, (own, *others) in zip(here, copied, strict=True):
            near = [int(each) for each in others[values.shape[1] :]]
            found.append(TokenLogprob(token, own, list(zip(near, others, strict=False))))
    return found


def _on_host(rows: torch.Tensor, tokens: Ordered[int], top: int) -> list[TokenLogprob]:
    """The same of rows on the CPU, by native sweeps."""
    ids, values = topk(rows, max(top, 1))
    near, high = ids.tolist(), values.tolist()
    sums = log_probabilities(rows, ids[:, 0].tolist())
    totals = [most - own for (most, *_), own in zip(high, sums, strict=True)]
    chosen = rows.numpy()[np.arange(len(tokens)), tokens].tolist()
    likely = (values[:, :top] - np.array(totals)[:, None]).tolist()
    return [
        TokenLogprob(token, own - total, [*zip(others, those, strict=False)])
        for token, own, total, others, those in zip(tokens, chosen, totals, near, likely, strict=True)
    ]
