"""What logit sources do and cost, as their papers' claims ask for it: shares, divergences, rewards, passes and rows.

    python benchmarks/sources.py [GROUP ...] [--tokens 40] [--small without:19-24] [--out benchmarks/results]

The model is the embedded one at its own precision; prompts come from Spec-Bench (DECODERY_DATA). Nothing is timed, so
that the machine's load does not matter. Every group writes sources-GROUP.json. sec needs the heads of `decodery train
sec` in runs/sec (DECODERY_EXIT_HEADS), trained on textwrap.py and shlex.py of Python's library.
"""

from __future__ import annotations

import dataclasses
import math
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

import decodery as dc
from decodery.logits_sources import USCD, DoLa, EntropyAdaptive, Guidance
from decodery.logits_sources.uscd import without_examples
from decodery.models.protocol import LanguageModel
from decodery.models.torch.transformer import Transformer
from decodery.sampling import Sampler
from decodery.step.logits_source import LogitsSource
from decodery.step.sequence import Sequence
from groups import parser, record
from source_bench import Bench, cost, distinct, logprobs, nll
from source_copying import partial_attention
from source_exits import sec
from source_judged import controlled, transfer_q


def entropy_adaptive(bench: Bench) -> dict[str, Any]:
    """Thresholds in bits: the large model's share of tokens, agreement with its own choices, passes and rows."""
    model, prompts = bench.lm.model, [bench.lm.encode(each) for each in bench.questions(10)]
    small = small_model(bench)
    found: dict[str, Any] = {"small": bench.small, "window": 5, "stay": 10, "thresholds": {}}
    for threshold in (math.inf, 3.0, 2.0, 1.5, 1.0, 0.5, -1.0):
        texts = bench.run(prompts, EntropyAdaptive(small, threshold))
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(text.trace.ledger.counts)
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
    sources: dict[str, Callable[[str], LogitsSource | None]] = {
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


GROUPS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "entropy-adaptive": entropy_adaptive,
    "guidance": guidance,
    "uscd": uscd,
    "dola": dola,
    "controlled-decoding": controlled,
    "transfer-q": transfer_q,
    "partial-attention": partial_attention,
    "sec": sec,
}


def main() -> None:
    arguments = parser(__doc__, GROUPS)
    arguments.add_argument("--tokens", type=int, default=40)
    arguments.add_argument(
        "--small", default="without:19-24", help="the small model of entropy-adaptive: a name, or without:A-B"
    )
    options = arguments.parse_args()
    bench = Bench(dc.load("smollm2"), options.small, options.tokens)
    record("sources", GROUPS, options, bench, {"new_tokens": options.tokens, "model": "smollm2"})


if __name__ == "__main__":
    main()
