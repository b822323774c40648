"""What cache policies lose: a needle, lines of a list, drift and divergence, by budget; what they hold and read.

    decodery train kv double-sparsity docs/{design,searches,serving,training}.md --out runs/channels --texts 24
    python benchmarks/long_context.py --out benchmarks/results/long-context.json --channels runs/channels

Counts and shares alone, no times. Every policy has every budget (quantized its numbers of bits), between two lines that
belong into every picture: `uniform`, which keeps tokens at even distances, and `oracle`, which is told where the answer
is. Policies and budgets that are named are measured anew; what
the file says of the others stays.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import decodery
from decodery.core.ask import drive, settled
from decodery.kv.after_prompt import Compressing, Prompt
from decodery.kv.base import CachePolicy
from decodery.model.batch import Batch, Segment
from decodery.model.cache import KVCache
from decodery.model.policy import Attention, AttentionPolicy
from decodery.registry import resolve

BUDGETS = (0.25, 0.1, 0.5, 1.0)
ROOT = Path(__file__).parents[1]
WORDS = (
    *("apple", "river", "stone", "candle", "window", "garden", "silver", "tiger", "pencil", "bridge", "cloud"),
    *("violin", "anchor", "basket", "copper", "desert", "engine", "falcon", "guitar", "hammer", "island", "kettle"),
)
FILLER = "The grass is green. The sky is blue. The sun is warm. Here we go. There and back again."
DEPTHS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
SEPARATE = {
    "streaming-llm": "streaming-llm:budget={}",
    "h2o": "h2o:budget={}",
    "tova": "tova:budget={}",
    "d2o": "d2o:budget={}",
    "snapkv": "snapkv:budget={},window=16",
    "pyramid-kv": "pyramid-kv:budget={}",
    "expected-attention": "expected-attention:budget={}",
    "dapq": "dapq:budget={},queries=16",
    "quest": "quest:budget={},page=8",
    "actqkv": "actqkv:budget={},block=8,window=64,sinks=4",
    "double-sparsity": "double-sparsity:budget={},calibration=CHANNELS",
}
"""By name: the policy at a budget, with windows and pages that suit some hundred tokens."""
BITS = {"quantized-8": "quantized:bits=8,residual=32", "quantized-4": "quantized:bits=4,residual=32"}


@dataclass(frozen=True)
class Uniform(Compressing):
    """Keeps the tokens at even distances, and the last one."""

    budget: float = 1.0

    def watched(self, prompt: int) -> int:
        return 1

    def scores(self, seen: Prompt) -> np.ndarray:
        heads, length = seen.keys.shape[:2]
        # The golden ratio spreads any number of first choices evenly.
        scores = -((np.arange(length) * 0.6180339887498949) % 1.0)
        scores[-1] = np.inf
        return np.broadcast_to(scores, (heads, length))


@dataclass(frozen=True)
class Oracle(Compressing):
    """Keeps what it is told to, then the newest tokens."""

    budget: float = 1.0
    span: tuple[int, int] = (0, 0)

    def watched(self, prompt: int) -> int:
        return 1

    def scores(self, seen: Prompt) -> np.ndarray:
        heads, length = seen.keys.shape[:2]
        scores = np.arange(length, dtype=np.float64)
        scores[slice(*self.span)] = np.inf
        scores[:4] = np.inf
        return np.broadcast_to(scores, (heads, length))


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
        heads = len(attention.keys)
        self.read += int(np.broadcast_to(seen, (heads, *seen.shape[-2:]))[:, -1].sum())
        return chosen

    def fork(self) -> Meter:
        return Meter(self.inner.fork())


@dataclass
class Case:
    """document, question: token ids. answer: the text that must come. span: tokens of the document that hold it."""

    document: list[int]
    question: list[int]
    answer: str
    span: tuple[int, int]


@dataclass
class Bench:
    lm: decodery.LM
    cases: dict[str, list[Case]] = field(default_factory=dict)
    texts: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = self.lm.model
        self.encode = lambda text: self.lm.tokenizer.encode(text, special=False)
        draw = random.Random(7)
        self.cases["needle"] = [self.needle(draw, depth) for depth in DEPTHS]
        self.cases["lines"] = [self.lines(draw, 8) for _ in range(10)]
        pages = sorted((ROOT / "docs").glob("*.md"))
        found = [self.encode(page.read_text(encoding="utf-8"))[200:520] for page in pages]
        self.texts = [tokens for tokens in found if len(tokens) == 320][:5]

    def needle(self, draw: random.Random, depth: float) -> Case:
        word, number = draw.choice(WORDS), str(draw.randrange(10000, 100000))
        parts = [FILLER] * 12
        before = self.encode(" ".join(parts[: round(depth * len(parts))]) + "\n")
        needle = self.encode(f"The secret number of {word} is {number}.\n")
        after = self.encode(" ".join(parts[round(depth * len(parts)) :]))
        question = self.encode(
            f"\nQuestion: What is the secret number of {word}?\nAnswer: The secret number of {word} is"
        )
        span = len(before), len(before) + len(needle)
        return Case(before + needle + after, question, number, span)

    def lines(self, draw: random.Random, count: int) -> Case:
        words = draw.sample(WORDS, count)
        numbers = {word: str(draw.randrange(10000, 100000)) for word in words}
        document, spans = self.encode("Here is a list.\n"), {}
        for word in words:
            line = self.encode(f"line {word}: {numbers[word]}\n")
            spans[word] = len(document), len(document) + len(line)
            document += line
        asked = draw.choice(words)
        return Case(
            document, self.encode(f"The value on the line {asked} was:\nline {asked}:"), numbers[asked], spans[asked]
        )

    def start(self, kv: CachePolicy | None, tokens: Sequence[int], prompt: int) -> tuple[KVCache, torch.Tensor]:
        """Read tokens, of which the first `prompt` are what the policy takes for the prompt; the last logits."""
        model = self.model if kv is None else kv.over(self.model, prompt)
        cache = model.new_cache()
        if cache.policy is not None:
            cache.policy = Meter(cache.policy)
        logits = torch.empty(0)
        for part in (tokens[:prompt], tokens[prompt:]):
            if part:
                logits = self.feed(cache, part)
            if part and kv is not None and cache.next_position == prompt and kv.probes:
                inner = cache.policy.inner  # type: ignore[union-attr]
                cache.policy = inner
                seq = SimpleNamespace(tokens=list(tokens), prompt_length=prompt, cache=cache, model=model)
                drive(settled(kv.settle(seq)))  # type: ignore[arg-type]
                cache.policy = Meter(inner)
        return cache, logits

    def feed(self, cache: KVCache, tokens: Sequence[int]) -> torch.Tensor:
        logits = self.model.forward(Batch([Segment.chunk(tokens, cache)])).logits
        cache.keep(range(len(tokens)))
        return logits

    def greedy(self, cache: KVCache, logits: torch.Tensor, count: int) -> list[int]:
        found = [int(logits[-1].argmax())]
        while len(found) < count:
            found.append(int(self.feed(cache, found[-1:])[-1].argmax()))
        return found

    def solved(self, kv: CachePolicy | None, case: Case, known: bool) -> bool:
        """Whether the answer is found. known: whether the question stands in the prompt when it is compressed."""
        tokens = case.document + case.question
        if isinstance(kv, Oracle):
            kv = Oracle(kv.budget, case.span)
        cache, logits = self.start(kv, tokens, len(tokens) if known else len(case.document))
        return self.lm.tokenizer.decode(self.greedy(cache, logits, 8)).strip().startswith(case.answer)

    def drift(self, kv: CachePolicy | None) -> list[torch.Tensor]:
        """Log-probabilities [64, vocab] of the end of each text, behind a prompt of 256 tokens."""
        return [self.start(kv, text, 256)[1].log_softmax(dim=-1) for text in self.texts]

    def written(self, kv: CachePolicy | None, count: int = 32) -> list[list[int]]:
        return [self.greedy(*self.start(kv, text[:256], 256), count) for text in self.texts]

    def held(self, kv: CachePolicy) -> dict[str, float]:
        """Bytes of keys and values behind 320 tokens, and those that the last row has read, as shares of all."""
        cache, _ = self.start(kv, self.texts[0], 256)
        self.feed(cache, self.texts[0][:1])
        config = self.model.config
        whole = config.num_layers * config.num_kv_heads * cache.next_position
        one = cache.slot_bytes / (config.num_layers * config.num_kv_heads)
        meter = cache.policy
        assert isinstance(meter, Meter)
        beside = getattr(meter.inner, "bytes", 0) / one
        found = {"resident": (int(cache.head_lengths.sum()) + beside) / whole, "read": (meter.read + beside) / whole}
        return {name: round(value, 4) for name, value in found.items()}


def measure(bench: Bench, kv: CachePolicy, full: dict[str, Any], *, drafts: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    # Under a budget of 1 a text is what it is without a policy, which its drift shows.
    for task, cases in bench.cases.items() if getattr(kv, "budget", 0) != 1 else ():
        for mode, known in (("known", True), ("unknown", False)):
            solvable = [case for case, good in zip(cases, full[task], strict=True) if good]
            count = sum(bench.solved(kv, case, known) for case in solvable)
            found[f"{task} {mode}"] = [count, len(solvable)]
    pairs = list(zip(full["drift"], bench.drift(kv), bench.texts, strict=True))
    following = [torch.tensor([*text[257:], 0]) for text in bench.texts]
    gaps = [
        float((theirs - ours).gather(1, after[:, None])[:-1].mean())
        for (theirs, ours, _), after in zip(pairs, following, strict=True)
    ]
    found["kl"] = round(float(np.mean([float((a.exp() * (a - b)).sum(-1).mean()) for a, b, _ in pairs])), 5)
    found["top-1"] = round(
        float(np.mean([float((a.argmax(-1) == b.argmax(-1)).float().mean()) for a, b, _ in pairs])), 4
    )
    found["nll"] = round(float(np.mean(gaps)), 5)
    alike = [
        next((at for at, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
        for x, y in zip(full["written"], bench.written(kv), strict=True)
    ]
    found["first difference"] = alike
    found |= bench.held(kv)
    if drafts is not None:
        found["tokens per pass"] = round(accepted(bench, drafts), 3)
    return found


def accepted(bench: Bench, spec: str) -> float:
    """Tokens per pass of the full model where it drafts for itself under a policy, 4 tokens at a time."""
    emitted = passes = 0
    for text in bench.texts[:3]:
        request = bench.lm.request(
            text[:256], max_new_tokens=32, drafter=f"compressed-cache:kv={spec}", ignore_eos=True
        )
        engine = bench.lm.engine()
        seq = engine.submit(request)
        engine.run([seq])
        steps = seq.trace.decoding
        emitted, passes = emitted + sum(step.emitted for step in steps), passes + len(steps)
    return emitted / passes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--channels", help="What `decodery train kv double-sparsity` made; without it, that is left out."
    )
    parser.add_argument("--policies", nargs="*", default=["uniform", "oracle", *SEPARATE, *BITS])
    parser.add_argument("--budgets", nargs="*", type=float, default=BUDGETS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(decodery.load("smollm2"))
    with torch.no_grad():
        full: dict[str, Any] = {
            task: [bench.solved(None, case, True) for case in cases] for task, cases in bench.cases.items()
        }
        full["drift"], full["written"] = bench.drift(None), bench.written(None)
        known = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"policies": {}}
        known["command"] = (
            "python benchmarks/long_context.py --out benchmarks/results/long-context.json --channels runs/channels"
        )
        known["model"] = "smollm2"
        known["tokens"] = {task: int(np.mean([len(c.document) for c in cases])) for task, cases in bench.cases.items()}
        known["full"] = {task: [sum(full[task]), len(full[task])] for task in bench.cases}
        for budget, name in itertools.product(arguments.budgets, arguments.policies):
            if (name in BITS and budget != 1) or (name == "double-sparsity" and arguments.channels is None):
                continue
            found = known["policies"].setdefault(name, {})
            own = {"uniform": Uniform, "oracle": Oracle}.get(name)
            spec = BITS.get(name) or SEPARATE.get(name, "").format(budget)
            spec = spec.replace("CHANNELS", str(arguments.channels))
            kv = own(budget) if own else resolve("kv", spec)
            drafts = None if own or kv.probes else f"{spec.replace(':', '(', 1)})"
            found[str(budget)] = measure(bench, kv, full, drafts=drafts)
            print(name, budget, json.dumps(found[str(budget)]), flush=True)
            arguments.out.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
