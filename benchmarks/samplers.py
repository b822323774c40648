"""What samplers and rules that look ahead do to SmolLM2's texts, and what they cost in passes and rows.

    python benchmarks/samplers.py [GROUP ...] [--texts 16] [--tokens 128] [--out benchmarks/results]

Texts continue the beginnings of Spec-Bench passages (DECODERY_DATA); the model is the embedded one at its own
precision. Nothing is timed, so that the machine's load does not matter. Every group writes samplers-GROUP.json, row by
row: an interrupted run goes on where it stopped, and --again begins anew.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import decodery as dc
from decodery.logits_sources import USCD, ControlledDecoding, PartialAttention, PartialWeights, TransferQ
from decodery.models.batch import Batch, Segment
from decodery.sampling import LogitsProcessor, Mirostat, Temperature, TopH
from decodery.sampling.entropy import entropy
from decodery.scorers import LinearValue, TextScore, ValueHead
from decodery.search import Beam, ContrastiveSearch, ControlledBlocks, DiverseBeam, ExactExtract
from decodery.search.base import Search
from decodery.step.sequence import Sequence as Decoded
from decodery_benchmarks.results import begun_result, write_result

DATA = Path(os.environ.get("DECODERY_DATA", Path(__file__).parents[3] / "shared" / "data"))
BEGINNING = 40
"""Tokens of a passage that are given."""


class Bench:
    """One loaded model and the prompts."""

    def __init__(self, texts: int, tokens: int, dtype: str = "auto") -> None:
        self.lm = dc.load("smollm2", dtype=dtype)
        self.tokens = tokens
        lines = (DATA / "spec_bench_dev.jsonl").read_text("utf-8").splitlines()
        passages = [question["turns"][0] for question in map(json.loads, lines) if len(question["turns"][0]) > 600]
        step = max(1, len(passages) // texts)
        begun = [self.lm.tokenizer.encode(passage)[:BEGINNING] for passage in passages[::step][:texts]]
        self.prompts = [self.lm.tokenizer.decode(tokens) for tokens in begun]

    def run(self, prompts: Sequence[str] | None = None, **settings: Any) -> list[dc.Output]:
        """All prompts in one batch, without drafts unless a drafter is given, past the end of text."""
        settings = {"max_new_tokens": self.tokens, "drafter": None, "seed": 1, "ignore_eos": True, **settings}
        outputs = self.lm.generate(list(prompts or self.prompts), apply_chat_template=False, **settings)
        assert isinstance(outputs, list)
        return outputs

    def texts(self, sampler: list[LogitsProcessor]) -> list[Decoded]:
        """As `run`, with what acts on the texts as it stands at their ends."""
        engine, settings = self.lm.engine(), {"max_new_tokens": self.tokens, "seed": 1, "ignore_eos": True}
        prompts = [self.lm.encode(prompt, apply_chat_template=False) for prompt in self.prompts]
        requests = [self.lm.request(each, drafter=None, sampler=sampler, **settings) for each in prompts]
        found = [engine.submit(request) for request in requests]
        engine.run(found)
        return found

    @torch.no_grad()
    def logits(self, out: dc.Output) -> torch.Tensor:
        """[n, vocab] that each of the text's tokens was chosen by, from one reading of it."""
        tokens, cache = [*out.prompt_tokens, *out.tokens[:-1]], self.lm.model.new_cache()
        first = len(out.prompt_tokens) - 1
        rows = list(range(first, len(tokens)))
        return self.lm.model.forward(Batch([Segment.chunk(tokens, cache, logit_rows=rows)])).logits

    def surprise(self, out: dc.Output) -> float:
        """Mean surprise of the text's tokens under the model's own distribution, in bits."""
        logprobs = self.logits(out).log_softmax(dim=-1)
        return -float(logprobs[torch.arange(len(out.tokens)), out.tokens].mean()) / math.log(2)


class Results:
    """The rows of one group, in a file that has each as soon as it is known."""

    def __init__(self, path: Path, facts: dict[str, Any], *, again: bool) -> None:
        self.path, self.facts = path, facts
        kept = begun_result(path)
        same = not again and all(kept.get(name) == value for name, value in facts.items())
        self.rows: dict[str, Any] = kept["rows"] if same else {}

    def __contains__(self, name: str) -> bool:
        return name in self.rows

    def __setitem__(self, name: str, row: dict[str, Any]) -> None:
        self.rows[name] = row
        write_result(self.path, self.facts, figures=self.rows)
        print(name, row, flush=True)


def repeated(tokens: Sequence[int], n: int) -> float:
    """Share of n-grams that stood in the text before."""
    grams = [tuple(tokens[at : at + n]) for at in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams)


def character(bench: Bench, outputs: list[dc.Output]) -> dict[str, float]:
    """How repetitive and how surprising texts are, and what they cost."""
    counts = [out.trace.ledger.counts for out in outputs]
    tokens = sum(len(out.tokens) for out in outputs)
    return {
        "repeated 4-grams": round(statistics.mean(repeated(out.tokens, 4) for out in outputs), 4),
        "distinct 2-grams": round(1 - statistics.mean(repeated(out.tokens, 2) for out in outputs), 4),
        "bits per token": round(statistics.mean(bench.surprise(out) for out in outputs), 3),
        "passes per token": round(sum(len(out.trace.steps) for out in outputs) / tokens, 3),
        "extra passes per token": round(sum(each.get("extra_passes", 0) for each in counts) / tokens, 3),
        "extra rows per token": round(sum(each.get("extra_rows", 0) for each in counts) / tokens, 3),
    }


def mirostat(bench: Bench, found: Results) -> None:
    """Observed surprise against the target; spread of the texts' means against top-p and against plain sampling."""
    for version, tau in itertools.product((1, 2), (1.5, 2.0, 3.0, 4.0)):
        if (name := f"version {version}, tau {tau:g}") not in found:
            states = [seq.processor_states[0] for seq in bench.texts([Mirostat(tau, 0.1, version)])]  # type: ignore[arg-type]
            means = [state.surprise / state.tokens for state in states]
            predicted = [tau + (2 * tau - state.mu) / (0.1 * state.tokens) for state in states]
            found[name] = {
                "bits per token": round(statistics.mean(means), 3),
                "deviation between texts": round(statistics.stdev(means), 3),
                "greatest departure from the identity": max(
                    abs(mean - each) for mean, each in zip(means, predicted, strict=True)
                ),
            }
    for name, settings in {"top-p 0.9": {"top_p": 0.9}, "plain": {}}.items():
        if name not in found:
            surprises = [bench.surprise(out) for out in bench.run(temperature=1.0, **settings)]
            found[name] = {
                "bits per token": round(statistics.mean(surprises), 3),
                "deviation between texts": round(statistics.stdev(surprises), 3),
            }


def top_h(bench: Bench, found: Results) -> None:
    """The share of the entropy that is left at every position, and how surprising texts become with the temperature."""
    temperatures = (1.0, 1.5, 2.0)
    for bound, temperature in itertools.product(("renormalised", "partial"), temperatures):
        if (name := f"top-h {bound}, temperature {temperature:g}") in found:
            continue
        processor = TopH(bound=bound)  # type: ignore[arg-type]
        outputs = bench.run(sampler=[Temperature(temperature), processor])
        shares: list[float] = []
        for out in outputs:
            tempered = bench.logits(out) / temperature
            whole = entropy(tempered.double().log_softmax(dim=-1)).flatten()
            left = entropy(processor.process(tempered, []).double().log_softmax(dim=-1)).flatten()
            shares += (left / whole).tolist()
        found[name] = {
            "positions": len(shares),
            "positions above alpha": int(np.sum(np.array(shares) > processor.alpha * (1 + 1e-6))),
            "greatest share of the entropy": round(max(shares), 6),
            "bits per token": round(statistics.mean(map(bench.surprise, outputs)), 3),
        }
    for (kind, settings), temperature in itertools.product(
        {"min-p 0.1": {"min_p": 0.1}, "top-p 0.9": {"top_p": 0.9}}.items(), temperatures
    ):
        if (name := f"{kind}, temperature {temperature:g}") not in found:
            surprises = map(bench.surprise, bench.run(temperature=temperature, **settings))
            found[name] = {"bits per token": round(statistics.mean(surprises), 3)}


def repetition(bench: Bench, found: Results) -> None:
    """Greedy texts, and what keeps them from repeating themselves."""
    methods: dict[str, dict[str, Any]] = {
        "greedy": {},
        "momentum": {"sampler": ["momentum"]},
        "momentum:resistance=0/0/0/0/inf,k=50": {"sampler": ["momentum:resistance=0/0/0/0/inf,k=50"]},
        "dry 0.8": {"dry": 0.8},
        "repetition penalty 1.2": {"repetition_penalty": 1.2},
        "no-repeat-ngram 4": {"no_repeat_ngram": 4},
        "temperature 0.8": {"temperature": 0.8},
        "temperature 0.8, xtc 0.5": {"temperature": 0.8, "xtc": 0.5},
    }
    for name, settings in methods.items():
        if name not in found:
            found[name] = character(bench, bench.run(**settings))


def sums(count: int) -> list[tuple[str, str]]:
    """Questions with two-digit numbers after four that are answered, and their answers."""
    draw = np.random.default_rng(0)
    pairs = draw.integers(10, 100, (count + 4, 2)).tolist()
    shots = "".join(f"{a} + {b} = {a + b}\n" for a, b in pairs[:4])
    return [(f"{shots}{a} + {b} =", str(a + b)) for a, b in pairs[4:]]


def lookahead(bench: Bench, found: Results) -> None:
    """Rules that look ahead beside the plain ones: prose, and sums that are right or wrong."""
    sampled = {"temperature": 0.8, "top_p": 0.95}
    methods: dict[str, dict[str, Any]] = {
        "greedy": {},
        "adadec": {"acceptance_rule": "adadec"},
        "adadec, tau 0.5": {"acceptance_rule": "adadec:tau=0.5"},
        "sampled": sampled,
        "cntp": {"acceptance_rule": "cntp", **sampled},
    }
    questions = sums(100)
    for name, settings in methods.items():
        if name in found:
            continue
        outputs = bench.run([question for question, _ in questions], max_new_tokens=6, stop="\n", **settings)
        right = [out.text.strip() == answer for out, (_, answer) in zip(outputs, questions, strict=True)]
        found[name] = {
            "sums right of 100": sum(right),
            "rows per token of a sum": round(_total(outputs, "rows") / sum(len(out.tokens) for out in outputs), 2),
            "prose": character(bench, bench.run(**settings)),
        }


def speculation(bench: Bench, found: Results) -> None:
    """Every method that could mind: what it costs per token, and whether a drafter leaves its texts as they are."""
    value = ValueHead(LinearValue(torch.ones(bench.lm.model.config.hidden_size), torch.tensor(0.0), tap=20))
    reward = TextScore(lambda text: text.count("e") / max(1, len(text)), decode=bench.lm.tokenizer.decode)
    source = {
        "guidance": "guidance:scale=1.5",
        "uscd": USCD(tuple(bench.lm.tokenizer.encode("A text."))),
        "entropy-adaptive": "entropy-adaptive:small=smollm2-draft,threshold=2.0,stay=3",
        "dola": "dola",
        "controlled-decoding": ControlledDecoding(value, 0.1, k=5),
        "transfer-q": TransferQ(reward, k=2, length=2, weight=10.0),
    }
    methods: dict[str, dict[str, Any]] = {
        "top-h": {"temperature": 1.0, "top_h": 0.4},
        "xtc": {"temperature": 0.7, "xtc": 0.5},
        "mirostat": {"temperature": 1.0, "mirostat": 2, "mirostat_tau": 2.0},
        "dry": {"dry": 0.8},
        "momentum": {"sampler": ["momentum"]},
        "adadec": {"acceptance_rule": "adadec"},
        "cntp": {"acceptance_rule": "cntp", "temperature": 0.8, "top_p": 0.95},
        **{name: {"logits_source": each, "temperature": 0.7} for name, each in source.items()},
    }
    for name, settings in methods.items():
        if name not in found:
            found[name] = _drafted(bench, settings)
    if "partial-attention" not in found:
        floating = Bench(len(bench.prompts), bench.tokens, dtype="float32")
        weights = PartialWeights.initial(floating.lm.model)  # type: ignore[arg-type]
        for layer in weights.layers:
            layer["output"].copy_(layer["bend"] / 10)
        found["partial-attention"] = _drafted(
            floating, {"logits_source": PartialAttention(weights), "temperature": 0.7}
        )
    passage = "The tower is in Paris, and it was built in 1889."
    searches: dict[str, Callable[[], list[dc.Output]]] = {
        "beam": lambda: _searched(bench, Beam()),
        "diverse-beam": lambda: _searched(bench, DiverseBeam()),
        "contrastive-search": lambda: _searched(bench, ContrastiveSearch()),
        "controlled-blocks": lambda: _searched(bench, ControlledBlocks(value), temperature=0.7),
        "coupling": lambda: [bench.lm.stego_encode("Tell me about rivers.", "noon", max_new_tokens=400)],
        "exact-extract": lambda: [bench.lm.search(f"{passage} Where is the tower?", ExactExtract(passage))[0]],
    }
    for name, run in searches.items():
        if name not in found:
            found[name] = per_token(run())


def _searched(bench: Bench, search: Search, **settings: Any) -> list[dc.Output]:
    settings = {"apply_chat_template": False, "ignore_eos": True, "max_new_tokens": bench.tokens, **settings}
    return [bench.lm.search(prompt, search, **settings)[0] for prompt in bench.prompts[:4]]


def _drafted(bench: Bench, settings: dict[str, Any]) -> dict[str, float]:
    """What a method costs without drafts, and how its texts fare with them."""
    plain, drafted = bench.run(**settings), bench.run(drafter="token-recycling:nodes=16", **settings)
    return per_token(plain) | {
        "texts": len(plain),
        "same": sum(a.tokens == b.tokens for a, b in zip(plain, drafted, strict=True)),
        "tokens per pass, drafted": round(sum(out.trace.tokens for out in drafted) / _total(drafted, "passes"), 3),
    }


def per_token(outputs: Sequence[dc.Output]) -> dict[str, float]:
    """Passes, rows and whatever else was counted after the prompt, by the tokens written there."""
    tokens, counted = _total(outputs, "tokens"), Counter[str]()
    for out in outputs:
        for step in out.trace.decoding:
            counted.update(step.counts)
    shares = {"passes": _total(outputs, "passes"), "rows": _total(outputs, "rows"), **counted}
    return {name: round(count / tokens, 3) for name, count in shares.items()}


def _total(outputs: Sequence[dc.Output], name: str) -> int:
    return sum(getattr(out.trace, name) for out in outputs)


GROUPS: dict[str, Callable[[Bench, Results], None]] = {
    "mirostat": mirostat,
    "top-h": top_h,
    "repetition": repetition,
    "lookahead": lookahead,
    "speculation": speculation,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--again", action="store_true", help="measure also what is known")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    bench = Bench(options.texts, options.tokens)
    for name in options.groups or GROUPS:
        facts = {
            "command": f"python benchmarks/samplers.py {name} --texts {options.texts} --tokens {options.tokens}",
            "model": f"{bench.lm.name}, {bench.lm.dtype}",
            "texts": options.texts,
            "tokens": options.tokens,
        }
        print(f"# {name}", flush=True)
        GROUPS[name](bench, Results(options.out / f"samplers-{name}.json", facts, again=options.again))


if __name__ == "__main__":
    main()
