"""What logit sources do and cost, as their papers' claims ask for it: shares, divergences, rewards, passes and rows.

    python benchmarks/sources.py [GROUP ...] [--tokens 40] [--small without:19-24] [--out benchmarks/results]

The model is the embedded one at its own precision; prompts come from Spec-Bench (DECODERY_DATA). Nothing is timed, so
that the machine's load does not matter. Every group writes sources-GROUP.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import decodery as dc
from decodery.core.sequence import Sequence
from decodery.decode.engine import Engine
from decodery.decode.request import Request
from decodery.model.batch import Batch, Segment
from decodery.model.protocol import LanguageModel
from decodery.model.transformer import Transformer
from decodery.sample import Sampler
from decodery.search.controlled_blocks import ControlledBlocks
from decodery.source import (
    USCD,
    ControlledDecoding,
    DoLa,
    EntropyAdaptive,
    Guidance,
    PartialAttention,
    PartialWeights,
    TextReward,
    TransferQ,
)
from decodery.source.base import Source
from decodery.source.uscd import without_examples
from decodery.testing import tiny_transformer
from decodery.train.loop import Plan, batches, train
from decodery.train.partial import Pair, pair_loss, train_partial
from decodery.train.value import train_value

DATA = Path(os.environ.get("DECODERY_DATA", Path(__file__).parents[2] / "shared" / "data"))


@dataclass
class Bench:
    """The loaded model, a smaller one, and prompts of one turn each."""

    lm: dc.LM
    small: str
    tokens: int

    def questions(self, count: int) -> list[str]:
        lines = (DATA / "spec_bench_dev.jsonl").read_text("utf-8").splitlines()
        turns = [json.loads(line)["turns"][0] for line in lines]
        return [turn for turn in turns if len(turn) < 300][:: max(1, len(turns) // (3 * count))][:count]

    def run(self, prompts: Iterable[list[int]], source: Source | None, **settings: Any) -> list[Sequence]:
        """All prompts in one batch, greedy unless a sampler is given."""
        settings = {"max_new_tokens": self.tokens, "eos_ids": tuple(self.lm.tokenizer.eos_ids), **settings}
        engine = Engine(self.lm.model, detokenizer=self.lm.tokenizer.stream)
        texts = [engine.submit(Request(prompt, source=source, **settings)) for prompt in prompts]
        engine.run(texts)
        return texts


def cost(texts: Iterable[Sequence]) -> dict[str, float]:
    """Everything counted, per output token, prompts included."""
    total: Counter[str] = Counter()
    tokens = 0
    for text in texts:
        total.update(text.trace.counts)
        tokens += len(text.generated)
    return {name: round(count / tokens, 3) for name, count in sorted(total.items())} | {"tokens": tokens}


@torch.no_grad()
def logprobs(model: LanguageModel, text: Sequence) -> torch.Tensor:
    """[generated, vocab] log-laws of `model` at the output positions."""
    rows = range(text.prompt_length - 1, len(text.tokens) - 1)
    segment = Segment.chunk(text.tokens[:-1], model.new_cache(), logit_rows=list(rows))
    return model.forward(Batch([segment])).logits.double().log_softmax(dim=-1)


def nll(model: LanguageModel, texts: Iterable[Sequence]) -> float:
    """Mean negative log-likelihood per token in nats."""
    values = [logprobs(model, text)[range(len(text.generated)), text.generated] for text in texts]
    return round(float(-torch.cat(values).mean()), 4)


def distinct(texts: Iterable[Sequence]) -> float:
    """Share of distinct bigrams among all bigrams of each text, averaged."""
    shares = []
    for text in texts:
        pairs = list(zip(text.generated, text.generated[1:], strict=False))
        shares.append(len(set(pairs)) / max(1, len(pairs)))
    return round(sum(shares) / len(shares), 3)


def entropy_adaptive(bench: Bench) -> dict[str, Any]:
    """Thresholds in bits: the large model's share of tokens, agreement with its own choices, passes and rows."""
    model, prompts = bench.lm.model, [bench.lm.encode(each) for each in bench.questions(10)]
    small = small_model(bench)
    found: dict[str, Any] = {"small": bench.small, "window": 5, "stay": 10, "thresholds": {}}
    for threshold in (math.inf, 3.0, 2.0, 1.5, 1.0, 0.5, -1.0):
        texts = bench.run(prompts, EntropyAdaptive(small, threshold))
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(text.trace.counts)
        share = counts["large tokens"] / (counts["large tokens"] + counts["small tokens"])
        row = {"large share": round(share, 3), **agreement(model, texts), **cost(texts)}
        found["thresholds"][str(threshold)] = row
        print(threshold, row, flush=True)
    found["large alone"] = agreement(model, bench.run(prompts, None))
    return found


def small_model(bench: Bench) -> LanguageModel:
    """The small model by name, or the large one without some of its layers, as in "without:19-24"."""
    name, _, layers = bench.small.partition(":")
    if name != "without":
        return dc.load(bench.small).model
    first, last = map(int, layers.split("-"))
    model = bench.lm.model
    assert isinstance(model, Transformer)
    kept = [layer for index, layer in enumerate(model.weights.layers) if not first <= index <= last]
    config = dataclasses.replace(model.config, num_layers=len(kept), sliding_layers=())
    return Transformer(config, dataclasses.replace(model.weights, layers=kept))


def agreement(model: LanguageModel, texts: Iterable[Sequence]) -> dict[str, float]:
    """How near greedy texts are to `model`'s own choices: the share of its argmax, and log-probability lost per token.

    The loss, in nats, is 0 for the model's own greedy text; a text's likelihood alone would praise repetition.
    """
    same, lost = [], []
    for text in texts:
        laws = logprobs(model, text)
        best = laws.max(dim=-1)
        same.append(best.indices == torch.tensor(text.generated))
        lost.append(best.values - laws[range(len(text.generated)), text.generated])
    share, loss = torch.cat(same).double().mean(), torch.cat(lost).mean()
    return {"argmax of large": round(float(share), 3), "nats lost per token": round(float(loss), 4)}


WORDS = ["copper", "velvet", "thunder", "orchard", "compass", "lantern", "marble", "harvest", "whisper", "meadow"]
TOPICS = ["a river", "a school", "winter", "a doctor", "a train", "music", "a market", "the moon", "a dog", "bread"]


def guidance(bench: Bench) -> dict[str, Any]:
    """Scales: how often a required word is used, against a negative prompt without it; NLL under the plain model."""
    found: dict[str, Any] = {}
    for scale in (1.0, 1.25, 1.5, 2.0, 3.0):
        used, texts = 0, []
        for topic, word in zip(TOPICS, WORDS, strict=True):
            plain = f"Write one sentence about {topic}."
            prompt = bench.lm.encode(f"Write one sentence about {topic}. Use the word '{word}'.")
            source = Guidance(scale, tuple(bench.lm.encode(plain)))
            (text,) = bench.run([prompt], source)
            texts.append(text)
            used += word in bench.lm.tokenizer.decode(text.generated).lower()
        found[str(scale)] = {"word used": used / len(WORDS), "nll": nll(bench.lm.model, texts), **cost(texts)}
        print(scale, found[str(scale)], flush=True)
    return found


TASKS = [
    ("reverse", "Return the string s reversed.", ("'abc'", "'cba'"), ("'xy z'", "'z yx'")),
    ("shout", "Return s in upper case.", ("'abc'", "'ABC'"), ("'a b'", "'A B'")),
    ("double", "Return s repeated twice.", ("'ab'", "'abab'"), ("'x'", "'xx'")),
    ("first_char", "Return the first character of s.", ("'abc'", "'a'"), ("'xyz'", "'x'")),
    ("last_char", "Return the last character of s.", ("'abc'", "'c'"), ("'xyz'", "'z'")),
    ("count_a", "Return how many times the letter 'a' occurs in s.", ("'banana'", "3"), ("'xyz'", "0")),
    ("no_spaces", "Return s without spaces.", ("'a b c'", "'abc'"), ("' x '", "'x'")),
    ("is_palindrome", "Return True if s reads the same backwards.", ("'abba'", "True"), ("'abc'", "False")),
    ("n_words", "Return the number of words in s.", ("'a b c'", "3"), ("'one'", "1")),
    ("swap_case", "Return s with upper and lower case swapped.", ("'aB'", "'Ab'"), ("'XyZ'", "'xYz'")),
]


def passes_tests(program: str, name: str, tests: Iterable[tuple[str, str]]) -> bool:
    """Whether a written function gives these results, tried in a process of its own that is soon stopped."""
    checks = "\n".join(f"assert {name}({given}) == {expected}" for given, expected in tests)

    def bound() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (2, 2))
        resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    command = [sys.executable, "-I", "-S", "-c", f"{program}\n{checks}"]
    try:
        return subprocess.run(command, capture_output=True, timeout=10, preexec_fn=bound, env={}).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def uscd(bench: Bench) -> dict[str, Any]:
    """String functions: share of tokens contrasted, functions that pass their tests, cost read eagerly and deferred."""
    found: dict[str, Any] = {}
    sources: dict[str, Callable[[str], Source | None]] = {
        "plain": lambda lame: None,
        "uscd": lambda lame: USCD(tuple(bench.lm.tokenizer.encode(lame))),
        "uscd, deferred": lambda lame: USCD(tuple(bench.lm.tokenizer.encode(lame)), deferred=True),
        "uscd, parser's defaults": lambda lame: USCD(
            tuple(bench.lm.tokenizer.encode(lame)), confident=0.392, plausible=1 / 3
        ),
    }
    for kind, make in sources.items():
        texts, right = [], 0
        for name, what, *tests in TASKS:
            examples = "\n".join(f"    >>> {name}({given})\n    {expected}" for given, expected in tests)
            prompt = f'def {name}(s):\n    """{what}\n{examples}\n    """\n    return'
            (text,) = bench.run([bench.lm.tokenizer.encode(prompt)], make(without_examples(prompt)))
            texts.append(text)
            body = bench.lm.tokenizer.decode(text.generated).partition("\n")[0]
            right += passes_tests(prompt + body, name, tests)
        found[kind] = {"passed": right, "of": len(TASKS), **cost(texts)}
        print(kind, found[kind], flush=True)
    return found


def dola(bench: Bench) -> dict[str, Any]:
    """Against plain greedy decoding, all with a repetition penalty of 1.2: where texts part, NLL, distinct bigrams."""
    prompts = [bench.lm.encode(each) for each in bench.questions(8)]
    sampler = Sampler.from_settings(repetition_penalty=1.2)
    plain = bench.run(prompts, None, sampler=sampler)
    found: dict[str, Any] = {"plain": {"nll": nll(bench.lm.model, plain), "distinct-2": distinct(plain)}}
    for name, source in {
        "low": DoLa("low"),
        "high": DoLa("high"),
        "low, published": DoLa("low", published=True),
    }.items():
        texts = bench.run(prompts, source, sampler=sampler)
        same = []
        for text, other in zip(texts, plain, strict=True):
            pairs = zip(text.generated, other.generated, strict=False)
            same.append(next((at for at, (a, b) in enumerate(pairs) if a != b), len(text.generated)))
        found[name] = {
            "tokens before the first difference": sum(same) / len(same),
            "nll": nll(bench.lm.model, texts),
            "distinct-2": distinct(texts),
            **cost(texts),
        }
        print(name, found[name], flush=True)
    return found


def long_words(text: str) -> float:
    """A reward between 0 and 1: how far the mean word is beyond three letters, of ten."""
    words = re.findall(r"[a-zA-Z]+", text)
    return min(1.0, max(0.0, (sum(map(len, words)) / len(words) - 3) / 7)) if words else 0.0


class Judging:
    """Long words wanted: prompts to learn from, prompts held out, and what texts are worth."""

    def __init__(self, bench: Bench, held: int) -> None:
        self.bench, self.model, self.tokenizer = bench, bench.lm.model, bench.lm.tokenizer
        self.reward = TextReward(bench.lm.tokenizer.decode, long_words)
        asked = [bench.lm.encode(each) for each in bench.questions(12 + held)]
        self.train, self.held = asked[:12], asked[12:]
        self.sampler = Sampler.from_settings(temperature=1.0, top_k=10)

    def drawn(self, source: Source | None, seeds: int) -> list[Sequence]:
        """Texts of the held-out prompts."""
        runs = (self.bench.run(self.held, source, sampler=self.sampler, seed=seed) for seed in range(seeds))
        return [text for run in runs for text in run]

    def worth(self, texts: list[Sequence]) -> list[float]:
        return [self.reward([], [text.generated])[0] for text in texts]

    def judged(self, texts: list[Sequence], source: Source | None = None) -> dict[str, Any]:
        """Mean reward and cost, and with a source the KL per token from the model among its ten likeliest tokens."""
        rewards = self.worth(texts)
        result: dict[str, Any] = {"reward": round(sum(rewards) / len(rewards), 4)}
        if source is not None:
            kls = []
            for text in texts:
                law = logprobs(source.over(self.model, text.tokens[: text.prompt_length]), text)
                own = logprobs(self.model, text)
                own = own.masked_fill(own < own.topk(10).values[:, -1:], -torch.inf).log_softmax(-1)
                kls.append(torch.where(law.exp() > 0, law.exp() * (law - own), 0.0).sum(-1))
            result["kl per token"] = round(float(torch.cat(kls).mean()), 4)
        return result | cost(texts)


def controlled(bench: Bench) -> dict[str, Any]:
    """Long words wanted: reward and KL per token of controlled decoding by token and by block, and of best of n."""
    judging = Judging(bench, 6)
    found: dict[str, Any] = {"prompts to learn from": len(judging.train), "prompts held out": len(judging.held)}
    drawn = judging.drawn(None, 8)
    plain = [drawn[start :: len(judging.held)] for start in range(len(judging.held))]
    found["model, top 10"] = judging.judged([text for texts in plain for text in texts[:2]])
    for n in (2, 4, 8):
        best = [max(judging.worth(texts[:n])) for texts in plain]
        kl = (math.log(n) - (n - 1) / n) / bench.tokens
        found[f"best of {n}"] = {"reward": round(sum(best) / len(best), 4), "kl per token": round(kl, 4)}
    eos = tuple(judging.tokenizer.eos_ids)
    for method, strengths in (("q", (5.0, 20.0)), ("fudge", (5.0, 20.0, 60.0))):
        settings = {"samples": 8, "length": 24, "eos_ids": eos, "ridge": 1e-2}
        head = train_value(judging.model, judging.train, judging.reward, method=method, **settings)
        for strength in strengths:
            source = ControlledDecoding(head, strength)
            row = found[f"by token, {method}, {strength:g}"] = judging.judged(judging.drawn(source, 2), source)
            print(method, strength, row, flush=True)
    for samples in (2, 4, 8):
        texts = []
        for prompt in judging.held:
            request = Request(prompt, bench.tokens, judging.sampler, eos_ids=eos)
            texts += ControlledBlocks(head, samples=samples, block=8).run(Engine(judging.model), request)
        rows = sum(text.trace.rows for text in texts) / sum(len(text.generated) for text in texts)
        found[f"by block of 8, fudge, best of {samples}"] = judging.judged(texts) | {"rows": round(rows, 3)}
        print(samples, found[f"by block of 8, fudge, best of {samples}"], flush=True)
    return found


def transfer_q(bench: Bench) -> dict[str, Any]:
    """Long words wanted: reward of Transfer Q* with the model's own rollouts, and with those of one told to."""
    judging = Judging(bench, 4)
    found: dict[str, Any] = {"model, top 10": judging.judged(judging.drawn(None, 2))}
    told = "Explain the sophisticated characteristics of international telecommunication infrastructure."
    for weight in (10.0, 40.0):
        common = {"k": 10, "weight": weight, "length": 6, "end": tuple(judging.tokenizer.eos_ids)}
        sources = {
            "own rollouts": TransferQ(judging.reward, **common),
            "another prompt's": TransferQ(judging.reward, prompt=tuple(bench.lm.encode(told)), **common),
        }
        for name, source in sources.items():
            found[f"{name}, weight {weight:g}"] = row = judging.judged(judging.drawn(source, 1))
            print(name, weight, row, flush=True)
    return found


def partial_attention(bench: Bench) -> dict[str, Any]:
    """Copying by a two-layer model, plain and with partial attention trained equally: accuracy and sensitivity.

    Sensitivity: the norm of the gradient of random projections of a step's logits in the source's embeddings. Echo: the
    source's auto-encoding counts half as much as the target.
    """
    random, steps = np.random.default_rng(0), 300
    lengths = (12, 24, 36, 48, 60, 72)

    def pairs(count: int, length: int | None = None) -> list[Pair]:
        sizes = [length or int(random.choice(lengths)) for _ in range(count)]
        texts = [random.integers(0, 30, size).tolist() for size in sizes]
        return [([*text, 31], text) for text in texts]

    train_on, held, plan = pairs(2000), pairs(16), Plan(steps=steps, lr=3e-3, validate_every=100)
    found: dict[str, Any] = {"steps": steps, "batch": 8, "model": "2 layers of 64, 32 symbols"}
    kinds: dict[str, tuple[bool, float] | None] = {
        "plain": None,
        "partial": (False, 0.0),
        "partial, positions reset": (True, 0.0),
        "partial, positions reset, echo": (True, 0.5),
    }
    for name, kind in kinds.items():
        model = tiny_transformer(1, vocab_size=32, hidden_size=64, dtype=torch.float32)
        weights = None if kind is None else PartialWeights.initial(model, reset=kind[0])
        own = {f"{i}.{part}": getattr(layer, part).weight for i, layer in enumerate(model.weights.layers)
               for part in ("qkv", "output", "gate_up", "down")}  # fmt: skip
        own |= {"embedding": model.weights.embedding, "head": model.weights.head.weight}
        with tempfile.TemporaryDirectory() as folder:
            if weights is None or kind is None:
                for tensor in own.values():
                    tensor.requires_grad_(True)
                chosen = batches(len(train_on), 8, 0)
                train(
                    own,
                    lambda step: pair_loss(model, None, [train_on[i] for i in chosen(step)]),  # noqa: B023
                    *(plan, Path(folder)),
                    validate=lambda: {"loss": float(pair_loss(model, None, held).detach())},  # noqa: B023
                    metric="loss",
                )
            else:
                train_partial(model, weights, train_on, held, plan, Path(folder), also=own, echo=kind[1])
        for tensor in own.values():
            tensor.requires_grad_(False)
        source = None if weights is None else PartialAttention(weights)
        row: dict[str, Any] = {}
        for length in (24, 72):
            right = total = 0
            engine, tests = Engine(model), pairs(8, length)
            texts = [engine.submit(Request(prompt, length, source=source)) for prompt, _ in tests]
            engine.run(texts)
            for text, (_, target) in zip(texts, tests, strict=True):
                right += sum(a == b for a, b in zip(text.generated, target, strict=True))
                total += length
            row[f"accuracy at length {length}"] = round(right / total, 3)
        (prompt, target), *_ = pairs(1, 72)
        scorer = model if source is None else source.over(model, prompt)
        sensitivity = {step: _sensitivity(scorer, prompt, target[:step]) for step in (4, 64)}
        row["sensitivity at step 64 / step 4"] = round(sensitivity[64] / sensitivity[4], 3)
        row["held-out loss"] = round(float(pair_loss(model, weights, held)), 4)
        found[name] = row
        print(name, row, flush=True)
    return found


def _sensitivity(model: Any, prompt: list[int], written: list[int]) -> float:
    """Mean over 16 random directions of the gradient's norm in the embeddings of `prompt`."""
    tokens = torch.tensor([*prompt, *written])
    embeddings = model.embed_tokens(tokens).detach().requires_grad_(True)
    segment = Segment(np.arange(len(tokens)), embeddings=embeddings, logit_rows=[len(tokens) - 1])
    logits = model.forward(Batch([segment])).logits[0]
    generator, norms = torch.Generator().manual_seed(0), []
    for _ in range(16):
        direction = torch.randn(len(logits), generator=generator)
        (gradient,) = torch.autograd.grad(logits @ direction, embeddings, retain_graph=True)
        norms.append(float(gradient[: len(prompt)].norm()))
    return sum(norms) / len(norms)


GROUPS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "entropy-adaptive": entropy_adaptive,
    "guidance": guidance,
    "uscd": uscd,
    "dola": dola,
    "controlled-decoding": controlled,
    "transfer-q": transfer_q,
    "partial-attention": partial_attention,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("groups", nargs="*", choices=[[], *GROUPS], metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument(
        "--small", default="without:19-24", help="the small model of entropy-adaptive: a name, or without:A-B"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    bench = Bench(dc.load("smollm2"), options.small, options.tokens)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.groups or GROUPS:
        settings = {"new_tokens": options.tokens, "model": "smollm2"}
        result = {"settings": settings, "about": GROUPS[name].__doc__, "figures": GROUPS[name](bench)}
        (options.out / f"sources-{name}.json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")
        print(name, "done", flush=True)


if __name__ == "__main__":
    main()
