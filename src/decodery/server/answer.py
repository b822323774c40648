"""What answers of all kinds are made of: totals, log-probabilities, and what a text's steps did."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any

from decodery.core.trace import Step
from decodery.models.tokenizers.reasoning import ReasoningMarks, ReasoningSplitter
from decodery.models.tokenizers.tokenizer import Tokenizer, TokenStream
from decodery.step.sequence import TokenLogprob

from .job import FinishedText, Update


def usage(prompts: Sequence[int], cached: int, texts: Sequence[FinishedText], reasoning: int) -> dict[str, Any]:
    """Totals of a request.

    Args:
        prompts: Tokens of each, once however many texts it has.
        cached: Those that were found in the prefix cache.
        texts: The texts.
        reasoning: Tokens of their reasoning parts.
    """
    written = sum(len(text.tokens) for text in texts)
    counts = [text.trace.ledger.counts for text in texts]
    predicted = round(sum(count.get("predicted", 0) for count in counts))
    rightly = round(sum(count.get("predicted rightly", 0) for count in counts))
    return {
        "prompt_tokens": sum(prompts),
        "completion_tokens": written,
        "total_tokens": sum(prompts) + written,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning,
            "accepted_prediction_tokens": rightly,
            "rejected_prediction_tokens": predicted - rightly,
        },
    }


def reasoning_tokens(tokenizer: Tokenizer, tokens: Sequence[int], marks: ReasoningMarks) -> int:
    """How many tokens of a text are its reasoning part, the mark of its end included."""
    splitter, stream = ReasoningSplitter(marks), tokenizer.stream()
    for start in range(0, len(tokens), _TOGETHER):
        # The loop waits meanwhile, and a token at a time takes ten times as long.
        before = copy(splitter), copy(stream)
        splitter.push(stream.push(tokens[start : start + _TOGETHER]))
        if not splitter.answering:
            continue
        splitter, stream = before
        for count, token in enumerate(tokens[start:], start=start + 1):
            splitter.push(stream.push([token]))
            if splitter.answering:
                # A text that answers from its first token has no such part.
                return count if splitter.reasoned else 0
    return len(tokens) if splitter.reasoned else 0


_TOGETHER = 64
"""Tokens that are looked through at a time."""
_LEAST = -9999.0
"""The log-probability of what is impossible, for which JSON has no number."""


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token's own text; of one that is no text by itself the bytes, as OpenAI spells them."""
    piece = tokenizer.piece(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def chat_logprobs(tokenizer: Tokenizer, found: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        piece = list(tokenizer.piece(token))
        return {"token": token_text(tokenizer, token), "logprob": max(logprob, _LEAST), "bytes": piece}

    content = [
        {**one(each.token, each.logprob), "top_logprobs": [one(token, logprob) for token, logprob in each.top]}
        for each in found
    ]
    return {"content": content, "refusal": None}


class Offsets:
    """Where the tokens of a text begin, as they come; tokens within one character share its place.

    Args:
        stream: Has decoded what stands before the text.
        at: The number of its characters.
    """

    def __init__(self, stream: TokenStream, at: int = 0) -> None:
        self._stream, self._at = stream, at

    def of(self, tokens: Iterable[int]) -> list[int]:
        """Characters before each of the next tokens."""
        found = []
        for token in tokens:
            found.append(self._at)
            self._at += len(self._stream.push([token]))
        return found


def completion_logprobs(
    tokenizer: Tokenizer, found: Sequence[TokenLogprob | int], offsets: Sequence[int]
) -> dict[str, Any]:
    """`choices[].logprobs` of a plain completion.

    Args:
        found: A bare token stands for one nothing precedes.
        offsets: Where the tokens begin in the choice's text, in characters.
    """
    tokens = [token_text(tokenizer, each if isinstance(each, int) else each.token) for each in found]
    known = [None if isinstance(each, int) else each for each in found]
    return {
        "tokens": tokens,
        "token_logprobs": [None if each is None else max(each.logprob, _LEAST) for each in known],
        "top_logprobs": [None if each is None else _most_likely(tokenizer, each) for each in known],
        "text_offset": list(offsets),
    }


def _most_likely(tokenizer: Tokenizer, each: TokenLogprob) -> dict[str, float]:
    """Log-probabilities by text, the token's own among them."""
    found: dict[str, float] = {}
    for token, logprob in [*each.top, (each.token, each.logprob)]:
        found.setdefault(token_text(tokenizer, token), max(logprob, _LEAST))
    return found


def prompt_logprobs(tokenizer: Tokenizer, found: Sequence[TokenLogprob]) -> list[dict[str, Any] | None]:
    """`choices[].prompt_logprobs` as vLLM has it: by token id, of every token of the prompt but the first."""
    reported: list[dict[str, Any] | None] = [None]
    for each in found:
        ranks = {token: rank for rank, (token, _) in enumerate(each.top, start=1)}
        known = dict([*each.top, (each.token, each.logprob)])
        reported.append(
            {
                str(token): {
                    "logprob": max(logprob, _LEAST),
                    "rank": ranks.get(token),
                    "decoded_token": token_text(tokenizer, token),
                }
                for token, logprob in known.items()
            }
        )
    return reported


def steps(tokenizer: Tokenizer, found: Sequence[Step]) -> list[dict[str, Any]]:
    """What steps did: tokens and their origin, the draft, and where the time went."""
    return [_step(tokenizer, step) for step in found]


def _step(tokenizer: Tokenizer, step: Step) -> dict[str, Any]:
    step_fields: dict[str, Any] = {
        "prefill": step.prefill,
        "rows": step.rows,
        "sequences": step.sequences,
        "seconds": {part: getattr(step, part) for part in ("propose", "score", "choose", "commit")},
        "tokens": [],
        "tree": None,
    }
    if step.tree is not None:
        drafted = len(step.tree.path)
        step_fields["tokens"] = [
            {
                "id": token,
                "text": token_text(tokenizer, token),
                "how": "drafted" if number < drafted else "chosen",
            }
            for number, token in enumerate(step.tree.emitted)
        ]
        step_fields["tree"] = {
            "tokens": step.tree.tokens,
            # Nodes that only hold a place have no token.
            "texts": [token_text(tokenizer, token) if token >= 0 else "" for token in step.tree.tokens],
            "parents": step.tree.parents,
            "accepted": step.tree.path,
        }
    return step_fields


def unfolding(tokenizer: Tokenizer, news: Update) -> dict[str, Any]:
    """What a text's steps did, and how a search's tree or a canvas has grown; empty for nothing."""
    found: dict[str, Any] = {}
    if news.steps:
        found["steps"] = steps(tokenizer, news.steps)
    if news.branches:
        found["branches"] = [
            {
                "id": number,
                "parent": part.parent,
                "text": tokenizer.decode(part.tokens),
                "score": None if part.score is None else max(part.score, _LEAST),
                "finish_reason": part.finish,
            }
            for number, part in news.branches
        ]
    if news.cells:
        found["canvas"] = [[at, None if token is None else token_text(tokenizer, token)] for at, token in news.cells]
    return found


def end(tokenizer: Tokenizer, text: FinishedText, reason: str) -> dict[str, Any]:
    """`finish_reason`, and `stop_reason`: the stop string or token of the request that ended the text.

    Args:
        tokenizer: Knows the model's own ends, which no request names.
        text: The text.
        reason: Why it ended.
    """
    named = text.reason == "stop" and text.stopped_by not in (None, *tokenizer.eos_ids)
    return {"finish_reason": reason, **({"stop_reason": text.stopped_by} if named else {})}


def own_fields(text: FinishedText, figures: bool) -> dict[str, Any]:
    """What a choice has beside OpenAI's fields, under "decodery": figures if `figures`.

    Always a full context.
    """
    found: dict[str, Any] = {}
    if figures:
        found = {"seed": text.seed, "trace": text.trace.summary()}
        if text.monitors:
            found["monitor_scores"] = [each.to_dict() for each in text.monitors]
    if text.context_full:
        found["context_full"] = True
    return {"decodery": found} if found else {}
