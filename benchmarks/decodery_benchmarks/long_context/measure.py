"""What one cache policy does to a model on texts with one right answer, and to the model's own texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Never, cast

import numpy as np
import torch

from decodery.llm.llm import LLM
from decodery.models.batch import Batch, Segment
from decodery.models.cache.attention_policy import Attention, AttentionPolicy
from decodery.models.cache.cache import KVCache
from decodery.models.hooks import Intervention
from decodery.models.protocol import LanguageModel
from decodery.step.cache_policy import CachePolicy
from decodery.step.forward_request import ForwardCoroutine, as_coroutine, run_sync
from decodery.step.sequence import Sequence as Text

from .bounds import Oracle
from .cases import PROMPT, Case, cases, texts
from .settings import WHOLE, ContextSettings

if TYPE_CHECKING:
    from .errors import Errors

_ANSWER = 8
_WRITTEN = 32
_DRAFTED_TEXTS = 3


class Meter(AttentionPolicy):
    """A policy, and how many slots of a key-value head the last row of each pass has read, summed over layers."""

    def __init__(self, inner: AttentionPolicy) -> None:
        self.inner, self.read = inner, 0

    def __getattribute__(self, name: str) -> Any:
        if name in ("observes", "merges", "observe", "merge", "kept", "cut", "asking", "compress"):
            return getattr(object.__getattribute__(self, "inner"), name)
        return object.__getattribute__(self, name)

    def select(self, attention: Attention) -> np.ndarray | None:
        self.read = self.read if attention.layer else 0
        chosen = self.inner.select(attention)
        seen = attention.seen if chosen is None else attention.seen & chosen
        heads, also = len(attention.keys), self.inner.also(attention)
        self.read += int(np.broadcast_to(seen, (heads, *seen.shape[-2:]))[:, -1].sum())
        self.read += 0 if also is None else heads * int(also[-1].sum())
        return chosen

    def fork(self) -> Meter:
        return Meter(self.inner.fork())


class Reading:
    """A model that reads and writes under a policy or none, without an engine."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model

    def start(
        self, kv: CachePolicy | None, tokens: Sequence[int], prompt: int, changes: tuple[Intervention, ...] = ()
    ) -> tuple[KVCache, torch.Tensor]:
        """Read tokens, of which the first `prompt` are what the policy takes for the prompt; the last logits."""
        model = self.model if kv is None else kv.over(self.model, prompt)
        cache = model.new_cache()
        if cache.policy is not None:
            cache.policy = Meter(cache.policy)
        logits = torch.empty(0, dtype=torch.float32, device="cpu")
        for part in (tokens[:prompt], tokens[prompt:]):
            if part:
                logits = self.feed(cache, part, changes)
            if part and kv is not None and cache.next_position == prompt and kv.probes:
                inner = cast(Meter, cache.policy).inner
                cache.policy = inner
                seq = SimpleNamespace(tokens=list(tokens), prompt_length=prompt, cache=cache, model=model)
                run_sync(as_coroutine(cast(ForwardCoroutine[Never], kv.settle(cast(Text, seq)))))
                cache.policy = Meter(inner)
        return cache, logits

    def feed(self, cache: KVCache, tokens: Sequence[int], changes: tuple[Intervention, ...] = ()) -> torch.Tensor:
        """Logits [n, vocab] of tokens that go on a text."""
        segment = replace(Segment.chunk(tokens, cache), interventions=changes)
        logits = self.model.forward(Batch([segment])).logits
        cache.keep(range(len(tokens)))
        return logits

    def greedy(self, cache: KVCache, logits: torch.Tensor, count: int) -> list[int]:
        """The most likely tokens after what was read."""
        found = [int(logits[-1].argmax())]
        while len(found) < count:
            found.append(int(self.feed(cache, found[-1:])[-1].argmax()))
        return found


class Bench(Reading):
    """A loaded model, what it is asked, and what it answers with all of its cache.

    given: passages [PROMPT + more] in place of the built-in ones.
    """

    def __init__(
        self, lm: LLM, settings: ContextSettings | None = None, *, given: Sequence[Sequence[int]] | None = None
    ) -> None:
        super().__init__(lm.model)
        self.lm = lm
        self.cases = cases(lm, settings or ContextSettings(methods=("uniform",)))
        self.texts = [list(text) for text in (texts(lm) if given is None else given)]
        self._full: dict[str, Any] | None = None

    @property
    def full(self) -> dict[str, Any]:
        """With all of the cache: by task which cases are solved, and of the passages log-probabilities and answers."""
        if self._full is None:
            solved = {task: [self.solved(None, case, True) for case in each] for task, each in self.cases.items()}
            self._full = {**solved, "drift": self.drift(None), "written": self.written(None)}
        return self._full

    def solved_of_all(self) -> dict[str, list[int]]:
        """By task how many cases the model solves with all of its cache, of how many."""
        return {task: [sum(self.full[task]), len(each)] for task, each in self.cases.items()}

    def solved(self, kv: CachePolicy | None, case: Case, known: bool) -> bool:
        """Whether the answer is found. known: whether the question stands in the prompt when it is compressed."""
        tokens = case.document + case.question
        if isinstance(kv, Oracle):
            kv = Oracle(kv.budget, case.span)
        cache, logits = self.start(kv, tokens, len(tokens) if known else len(case.document))
        return self.lm.tokenizer.decode(self.greedy(cache, logits, _ANSWER)).strip().startswith(case.answer)

    def drift(self, kv: CachePolicy | None) -> list[torch.Tensor]:
        """Log-probabilities [rows, vocab] of the end of each text, after a prompt of `PROMPT` tokens."""
        return [self.start(kv, text, PROMPT)[1].log_softmax(dim=-1) for text in self.texts]

    def written(self, kv: CachePolicy | None) -> list[list[int]]:
        """What it writes after each text's prompt."""
        return [self.greedy(*self.start(kv, text[:PROMPT], PROMPT), _WRITTEN) for text in self.texts]

    def held(self, kv: CachePolicy) -> dict[str, float]:
        """Keys and values after the first text, and those that the last row has read: shares of all, and MiB."""
        cache, _ = self.start(kv, self.texts[0], PROMPT)
        self.feed(cache, self.texts[0][:1])
        config = self.model.config
        whole = config.num_layers * config.num_kv_heads * cache.next_position
        one = cache.slot_bytes / (config.num_layers * config.num_kv_heads)
        meter = cast(Meter, cache.policy)
        beside = getattr(meter.inner, "bytes", 0) / one
        found = {"resident": (int(cache.head_lengths.sum()) + beside) / whole, "read": (meter.read + beside) / whole}
        taken = {
            f"MiB {name}": found[of] * whole * one / 2**20 for name, of in (("held", "resident"), ("read", "read"))
        }
        return {name: round(value, 4) for name, value in (found | taken).items()}

    def accepted(self, spec: str) -> float:
        """Tokens per pass of the full model where it drafts for itself under a policy, 4 tokens at a time."""
        emitted = passes = 0
        for text in self.texts[:_DRAFTED_TEXTS]:
            request = self.lm.request(
                text[:PROMPT], max_new_tokens=_WRITTEN, drafter=f"compressed-cache:cache_policy={spec}", ignore_eos=True
            )
            engine = self.lm.engine()
            seq = engine.submit(request)
            engine.run([seq])
            steps = seq.trace.decoding
            emitted, passes = emitted + sum(step.emitted for step in steps), passes + len(steps)
        return emitted / passes


@torch.no_grad()
def measure(
    bench: Bench, kv: CachePolicy, *, drafts: str | None = None, errors: Errors | None = None
) -> dict[str, Any]:
    """A policy's figures.

    By task `known` and `unknown`, how many are solved of those that the full cache solves; kl, top-1 and nll: the drift
    of the texts' ends; first difference: of what it writes, by text; resident, read: shares of all keys and values,
    which MiB held and MiB read are in bytes.
    drafts: the policy as a spec, of which tokens per pass as a drafter are measured. errors: measures attention's.
    """
    found: dict[str, Any] = {}
    full = bench.full
    # Under a budget of 1 a text is what it is without a policy, which its drift shows.
    for task, asked in bench.cases.items() if getattr(kv, "budget", 0) != WHOLE else ():
        for mode, known in (("known", True), ("unknown", False)):
            solvable = [case for case, good in zip(asked, full[task], strict=True) if good]
            found[f"{task} {mode}"] = [sum(bench.solved(kv, case, known) for case in solvable), len(solvable)]
    pairs = list(zip(full["drift"], bench.drift(kv), bench.texts, strict=True))
    gaps = []
    for whole, ours, text in pairs:
        after = torch.tensor(text[PROMPT + 1 :], dtype=torch.int64, device="cpu")[:, None]
        gaps.append(float((whole[:-1] - ours[:-1]).gather(1, after).mean()))
    found["kl"] = _mean([float((a.exp() * (a - b)).sum(-1).mean()) for a, b, _ in pairs], 5)
    found["top-1"] = _mean([float((a.argmax(-1) == b.argmax(-1)).float().mean()) for a, b, _ in pairs], 4)
    found["nll"] = _mean(gaps, 5)
    found["first difference"] = [
        next((at for at, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
        for x, y in zip(full["written"], bench.written(kv), strict=True)
    ]
    found |= bench.held(kv)
    if errors is not None:
        found |= errors.of(kv)
    if drafts is not None:
        found["tokens per pass"] = round(bench.accepted(drafts), 3)
    return found


def _mean(values: Sequence[float], digits: int) -> float:
    return round(float(np.mean(values)), digits)
