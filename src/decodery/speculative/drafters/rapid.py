"""RAPID: a model that reads only the passages of a long prompt that matter drafts for one that reads all of it."""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Provides
from decodery.models.loaders.named import Precision, named
from decodery.models.protocol import LanguageModel, Reader
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence

from .follower import Follower

_SENTENCE_END = re.compile(r"(\n|[.!?][\"')\]]*\s*)$")
_WORD = re.compile(r"\w+")


@dataclass(slots=True)
class _State:
    """prompt: the shortened prompt; reading: the drafter's model after it, None where that would be the target."""

    prompt: list[int]
    reading: Follower | None


@register(
    "rapid",
    paper="Long-Context Inference with Retrieval-Augmented Speculative Decoding (2025)",
    guarantee="the output distribution is unchanged under lossless rules; the rule rapid:eta=... moves it on purpose",
    lossless=True,
    requirements=("a prompt with a long context",),
)
@dataclass(frozen=True)
class Rapid(Drafter):
    """Drafts with a model that has read only the prompt's passages that match its end.

    The first `head` and the last `query` tokens of the prompt are always read. What lies between is cut into passages
    of at most `chunk` tokens, at ends of sentences where there are any; those with most in common with the query's
    words (Okapi BM25) are read, up to `length` tokens or a 24th of the prompt, whichever is more. Without a tokenizer
    token ids are the words. Where nothing is left out and the drafter is the target, nothing is drafted, and a warning
    says so: prompts of fewer than some 4,000 tokens need a smaller `length`.

    Under the coupled and rejection rules drafts change nothing, which is the paper's eta = 0; its transfer of the
    drafter's preference into the target is the rule "rapid". Scope: the request; memory: one more cache. Source:
    John-AI-Lab/RAPID (2025).

    Attributes:
        model: The drafter, a `LanguageModel` or a name; None is the target itself with a second cache.
        gamma: Tokens drafted per step.
        confidence: A draft ends after the first token to which the drafter itself gave less.
        head: First tokens of the prompt that are always read.
        query: Last tokens of the prompt that are always read and that passages are matched with.
        chunk: Most tokens of a passage.
        length: Tokens of the prompt that are read, at least a 24th of it.
        dtype: What a named one is loaded in, such as "int4".
    """

    model: LanguageModel | str | None = None
    gamma: int = 10
    confidence: float = 0.4
    head: int = 32
    query: int = 64
    chunk: int = 512
    length: int = 4096
    dtype: Precision = "auto"

    provides = Provides(drafts=("sampled",))

    def __post_init__(self) -> None:
        if min(self.gamma, self.query, self.chunk, self.length) < 1 or self.head < 0 or not 0 <= self.confidence <= 1:
            raise SettingsError(
                "rapid needs gamma, query, chunk and length >= 1, head >= 0 and confidence between 0 and 1"
            )

    def largest(self) -> int:
        return self.gamma

    def start(self, seq: Sequence) -> _State:
        (model,) = self.auxiliary_models(seq.request.model)
        prompt = self.shorten(seq.tokens, _pieces(seq))
        if model == seq.request.model and len(prompt) == len(seq.tokens):
            # The drafter would be the target, at the price of the target.
            warnings.warn(f"rapid drafts nothing for this text: {self._useless(len(prompt))}", stacklevel=2)
            return _State(prompt, None)
        return _State(prompt, Follower.begin(model, seq.request.model, slots=seq.request.slots))

    def auxiliary_models(self, target: Reader) -> tuple[Reader, ...]:
        return (named(target if self.model is None else self.model, self.dtype),)

    def held_rows(self, nodes: int) -> int:
        return 3

    def shorten(self, prompt: list[int], pieces: Ordered[str]) -> list[int]:
        """The prompt without the passages that match its end least.

        Args:
            pieces: The text of each of its tokens.
        """
        first, last = min(self.head, len(prompt)), max(self.head, len(prompt) - self.query)
        passages = _passages(pieces, first, last, self.chunk)
        texts = [_words(pieces[start:stop]) for start, stop in passages]
        scores = bm25(texts, set(_words(pieces[last:])))
        room, taken = max(self.length, len(prompt) // 24), []
        for number in np.argsort(-scores, kind="stable"):
            start, stop = passages[number]
            if scores[number] > 0 and stop - start <= room:
                room -= stop - start
                taken.append((start, stop))
        kept = [token for start, stop in sorted(taken) for token in prompt[start:stop]]
        return prompt[:first] + kept + prompt[last:]

    def _useless(self, tokens: int) -> str:
        """Why nothing of a prompt of so many tokens was left out, and what to do."""
        between = tokens - self.head - self.query
        if between < 2:
            return (
                f"the first {self.head} and the last {self.query} tokens of a prompt are always read, and it has "
                f"{tokens}: use another drafter, or give rapid another model"
            )
        return (
            f"its drafter may read length={self.length} tokens of passages, and the prompt has {tokens} tokens in all: "
            f"allow fewer, as in rapid:length={between // 2},chunk={max(between // 8, 1)}, or give rapid another model"
        )

    def propose(self, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        state: _State = seq.states[self]
        length = min(self.gamma, budget.nodes, budget.depth)
        if length < 1 or state.reading is None:
            return DraftTree.root(seq.last_token)
        sampler, context = seq.request.sampler, seq.request.sampler.ahead(seq.context(), ())
        text = state.prompt + seq.generated
        laws: dict[int, torch.Tensor] = {}
        tree = DraftTree.root(seq.last_token)
        while True:
            logits = yield from state.reading.after(text, tree, [len(tree) - 1])
            law = sampler.law(logits, [context])
            token = int(sampler.pick(law, seq.request.seed, [context.position])[0])
            if seq.request.acceptance_rule.requirements.laws:
                laws[len(tree) - 1] = sampler.preferences(law)[0]
            tree = DraftTree.chain(seq.last_token, [*tree.tokens[1:], token], origin="sampled", distributions=laws)
            # The doubtful token is drafted too: leaving out what was drawn would bias the rules that test draws.
            doubtful = float(law[0].double().softmax(dim=-1)[token]) < self.confidence
            if len(tree) > length or token in seq.request.eos_ids or doubtful:
                return tree
            context = sampler.extend(context, token, logits[0])

    def more_for(self, seq: Sequence, tokens: int) -> int:
        state: _State = seq.states[self]
        read = tokens - seq.request.prompt_length + len(state.prompt)
        return 0 if state.reading is None else state.reading.more_for(read)

    def forget(self, seq: Sequence) -> None:
        state: _State = seq.states[self]
        if state.reading is not None:
            state.reading.forget()


def bm25(texts: Ordered[Ordered[str]], query: set[str], *, k1: float = 1.5, b: float = 0.75) -> np.ndarray:
    """Okapi BM25 [len(texts)] float64 of texts as lists of words against the words of a query."""
    counts = [Counter(text) for text in texts]
    lengths = np.array([len(text) for text in texts], dtype=np.float64)
    scores = np.zeros(len(texts))
    for word in sorted(query):
        frequency = np.array([count[word] for count in counts], dtype=np.float64)
        holders = int((frequency > 0).sum())
        if holders:
            rarity = math.log(1 + (len(texts) - holders + 0.5) / (holders + 0.5))
            scores += rarity * frequency * (k1 + 1) / (frequency + k1 * (1 - b + b * lengths / lengths.mean()))
    return scores


def _passages(pieces: Ordered[str], first: int, last: int, most: int) -> list[tuple[int, int]]:
    """[start, stop) of consecutive passages of at most `most` tokens that end where sentences do, if they can."""
    passages = []
    start = first
    while start < last:
        stop = min(start + most, last)
        if stop < last:
            ends = (at for at in range(stop, start, -1) if _SENTENCE_END.search(pieces[at - 1]))
            stop = next(ends, stop)
        passages.append((start, stop))
        start = stop
    return passages


def _words(pieces: Ordered[str]) -> list[str]:
    return _WORD.findall("".join(pieces).lower())


def _pieces(seq: Sequence) -> list[str]:
    """The text of every prompt token; without a tokenizer its number, as a word."""
    if seq.request.detokenizer is None:
        return [f"{token} " for token in seq.tokens]
    decoder = seq.request.detokenizer()
    return [decoder.push([token]) for token in seq.tokens]
