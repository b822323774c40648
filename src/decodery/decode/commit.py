"""The last of the four steps: what was accepted becomes text, and every state moves with it."""

from __future__ import annotations

import torch

from ..core.sequence import Sequence, TokenLogprob
from ..core.tree import TokenTree
from ..verify.base import Accepted, Laws


def commit(seq: Sequence, tree: TokenTree, laws: Laws, accepted: Accepted) -> list[int]:
    """Append the accepted path and the bonus token up to the first stop; returns what was appended.

    Stop conditions are checked token by token, so that a run accepted at once ends where plain decoding would.
    """
    run = [int(tree.tokens[node]) for node in accepted.path] + [accepted.bonus]
    chosen_at = [0, *accepted.path]
    emitted: list[int] = []
    for token, node in zip(run, chosen_at, strict=True):
        if seq.logprobs is not None:
            seq.token_logprobs.append(_logprob(laws.row(node), token, seq.logprobs))
        seq.tokens.append(token)
        emitted.append(token)
        _check_stop(seq, token)
        if seq.finished:
            break
    if seq.sampler.stateful:
        last = chosen_at[len(emitted) - 1]
        seq.sampler_state = seq.sampler.after(laws.context(last), emitted[-1], laws.row(last))
    return emitted


def _check_stop(seq: Sequence, token: int) -> None:
    if token in seq.eos_ids:
        seq.finish_reason, seq.stopped_by = "stop", token
    elif seq.text is not None and (found := seq.text.push(token)) is not None:
        seq.finish_reason, seq.stopped_by = "stop", found
    elif seq.remaining <= 0:
        seq.finish_reason = "length"
    if seq.finished and seq.text is not None and not isinstance(seq.stopped_by, str):
        found = seq.text.finish()
        if found is not None:
            seq.finish_reason, seq.stopped_by = "stop", found


def _logprob(logits: torch.Tensor, token: int, top: int) -> TokenLogprob:
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    values, ids = logprobs.topk(min(top, len(logprobs)))
    pairs = list(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs[token]), pairs)
