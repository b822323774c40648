"""How often each rule accepts one of k drafted siblings, against the most that any rule could.

    python benchmarks/rules.py [--draft smollm2-draft] [--every 24] [--places 2] [--out benchmarks/results]

Random pairs of laws are small enough to enumerate every draw; the bound is a linear program. For pairs of the embedded
model and a draft (a model's name, or how many of its own first layers) independent draws have closed forms; what has
none is averaged over 100 draws per pair. Prompts come from Spec-Bench (DECODERY_DATA), continued by the model itself at
temperature 1; the pairs are taken at evenly spaced places of what it wrote. Nothing is timed. Writes rules.json.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

import decodery as dc
from decodery.models.batch import Batch, Segment
from decodery.models.protocol import LanguageModel
from decodery.models.torch.transformer import Transformer
from decodery.speculative.acceptance.exact import recursive_law, residual
from decodery.speculative.acceptance.k_seq import discount
from decodery.speculative.acceptance.recursive_rejection import without_replacement
from decodery.speculative.acceptance.typical import threshold
from decodery.testing.transport import best_acceptance, enumerate_draws, linear_program, node_law
from decodery_benchmarks.results import write_result

DATA = Path(os.environ.get("DECODERY_DATA", Path(__file__).parents[2] / "shared" / "data"))
KS = (1, 2, 4)
DRAWS = 100
Pair = tuple[torch.Tensor, torch.Tensor]


def rejection(p: torch.Tensor, q: torch.Tensor, k: int) -> float:
    """The first draw alone is tested."""
    return float(torch.minimum(p, q).sum())


def recursive_independent(p: torch.Tensor, q: torch.Tensor, k: int) -> float:
    """What is left of p after a rejection does not depend on which token was rejected."""
    rest, none = p, 1.0
    for _ in range(k):
        none *= 1.0 - float(torch.minimum(rest, q).sum())
        rest = residual(rest, q)
    return 1.0 - none


def k_seq(p: torch.Tensor, q: torch.Tensor, k: int) -> float:
    return 1.0 - (1.0 - discount(p, q, k)[1]) ** k


def typical(p: torch.Tensor, q: torch.Tensor, k: int) -> float:
    passing = float(q[p > threshold(p, 0.09, 0.3)].sum())
    return 1.0 - (1.0 - passing) ** k


def accepted_without(p: torch.Tensor, q: torch.Tensor, tokens: tuple[int, ...]) -> float:
    return node_law(recursive_law(p, without_replacement(tokens, q)), tokens)[1]


def recursive_enumerated(p: torch.Tensor, q: torch.Tensor, k: int) -> float:
    draws = enumerate_draws(q, k, replacement=False)
    return sum(mass * accepted_without(p, q, tokens) for tokens, mass in draws)


def recursive_drawn(p: torch.Tensor, q: torch.Tensor, k: int, draws: int = DRAWS) -> float:
    random = torch.Generator().manual_seed(0)
    rows = [torch.multinomial(q, min(k, int((q > 0).sum())), generator=random) for _ in range(draws)]
    return float(np.mean([accepted_without(p, q, tuple(row.tolist())) for row in rows]))


def coupled(p: torch.Tensor, q: torch.Tensor, k: int, draws: int = DRAWS) -> float:
    """The share of noises whose token of p is among the k of q, drawn without replacement with the same noise."""
    random = torch.Generator().manual_seed(0)
    hits = 0
    for _ in range(draws):
        noise = -torch.empty_like(p).exponential_(generator=random).log_()
        hits += int((p.log() + noise).argmax() in (q.log() + noise).topk(min(k, len(q))).indices)
    return hits / draws


def bound(p: torch.Tensor, q: torch.Tensor, k: int) -> float:
    return best_acceptance(p.numpy(), q.numpy(), k)


def program(p: torch.Tensor, q: torch.Tensor, k: int, *, replacement: bool) -> float:
    return linear_program(p.numpy(), q.numpy(), k, replacement=replacement)


COLUMNS: dict[str, Callable[[torch.Tensor, torch.Tensor, int], float]] = {
    "rejection": rejection,
    "recursive-rejection, independent": recursive_independent,
    "k-seq": k_seq,
    "typical (lossy)": typical,
}
SMALL = COLUMNS | {
    "bound, independent": partial(program, replacement=True),
    "recursive-rejection, without replacement": recursive_enumerated,
    "bound, without replacement": partial(program, replacement=False),
    "coupled": partial(coupled, draws=500),
}
LARGE = COLUMNS | {
    "bound, independent": bound,
    "recursive-rejection, without replacement": recursive_drawn,
    "coupled": coupled,
}


def figures(pairs: list[Pair], columns: dict[str, Callable[[torch.Tensor, torch.Tensor, int], float]]) -> dict:
    return {
        f"k={k}": {
            name: round(float(np.mean([column(*pair, k) for pair in pairs])), 4) for name, column in columns.items()
        }
        for k in KS
    }


def random_pairs(count: int, size: int) -> list[Pair]:
    random = np.random.default_rng(0)
    laws = torch.from_numpy(random.dirichlet(np.full(size, 0.5), (count, 2)))
    return [(pair[0], pair[1]) for pair in laws]


def draft_of(name: str, target: Transformer) -> LanguageModel:
    if not name.isdigit():
        return dc.load(name).model
    weights = replace(target.weights, layers=target.weights.layers[: int(name)])
    return Transformer(replace(target.config, num_layers=int(name)), weights)


def logits(model: LanguageModel, text: list[int], rows: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model.forward(Batch([Segment.chunk(text, model.new_cache(), logit_rows=rows)])).logits.double()


def model_logits(draft: str, every: int, places: int) -> Iterator[Pair]:
    """Logits of the target and of the draft, both after the same text."""
    lm = dc.load("smollm2", dtype="float32")
    drafter = draft_of(draft, lm.model)
    lines = (DATA / "spec_bench_dev.jsonl").read_text("utf-8").splitlines()
    for number, line in enumerate(lines[::every]):
        prompt = json.loads(line)["turns"][0]
        out = lm.generate(prompt, temperature=1.0, max_new_tokens=64, seed=number, drafter=None)
        text = [*out.prompt_tokens, *out.tokens[:-1]]
        rows = np.linspace(len(out.prompt_tokens) - 1, len(text) - 1, places).astype(int).tolist()
        yield from zip(logits(lm.model, text, rows), logits(drafter, text, rows), strict=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--draft", default="smollm2-draft")
    parser.add_argument("--every", type=int, default=24)
    parser.add_argument("--places", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    path = options.out / "rules.json"
    options.out.mkdir(parents=True, exist_ok=True)
    result: dict = {"command": "python benchmarks/rules.py", "rows": {}}

    def keep(title: str, found: dict) -> None:
        result["rows"][title] = found
        write_result(path, result)
        print(json.dumps(found, indent=1), flush=True)

    keep("random", {"pairs": 100, "vocabulary": 5, **figures(random_pairs(100, 5), SMALL)})
    scored = list(model_logits(options.draft, options.every, options.places))
    for temperature in (1.0, 0.6):
        pairs = [(t.div(temperature).softmax(0), d.div(temperature).softmax(0)) for t, d in scored]
        found = {"pairs": len(pairs), "draft": options.draft, **figures(pairs, LARGE)}
        keep(f"smollm2 at temperature {temperature}", found)


if __name__ == "__main__":
    main()
