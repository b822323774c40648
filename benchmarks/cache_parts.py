"""What the trained parts of cache policies know, beside parts that know nothing.

    python benchmarks/cache_parts.py --work runs/cache-parts --out benchmarks/results/cache-parts.json

Counts and nats alone, no times. Gates, write gate and coprocessor are trained on tiny-1M-chain (four layers
of four heads) and its puzzles, and measured on others, with the model in floating point:

gates: nats of solutions where a share of the heads streams (4 first tokens and 8 last ones): those that the gates
choose, as many at random (mean of 8 draws), and those with the highest gates. write-gate: divergence from the whole
model in nats a token where half of what is written is stored, by the gate, at random, every second token, or the
newest ones. coprocessor: nats of tokens by how far ahead they are: alone, with latents of the trained coprocessor,
with latents that were trained to be the same everywhere, and with random ones. meta-soft: divergence from what the next
16 tokens look at, of what tokens look at that were composed for the prompt, that are the same for all, or untrained,
and of what the prompt's last 8 tokens look at; and nats of those 16 tokens after 0.3 of the prompt. probes: on the
embedded model, in how many heads and layers the block that holds a needle is among the quarter that answers best, by
what the question asks with. pages: what part of a row's attention falls on the quarter of a text in pages that are
chosen by bounds, in large pages by the best of their parts, in large pages, and in small ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import decodery
from decodery.kv_cache.actqkv import ActQKV, Fetching
from decodery.kv_cache.actqkv import probes as asked
from decodery.kv_cache.meta_soft import MetaSoft
from decodery.kv_cache.quest import best_pages
from decodery.kv_cache.selecting import Asked as RowsThatSelect
from decodery.kv_cache.snapkv import SnapKV
from decodery.models.batch import Batch, Segment
from decodery.models.cache.attention_policy import Attention, AttentionPolicy
from decodery.models.config import ModelConfig
from decodery.models.loaders.load import LoadedModel
from decodery.models.loaders.store import terminal_progress
from decodery.models.protocol import LanguageModel
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import floating
from decodery.models.trained.head_gates import HeadGates
from decodery.step.cache_policy import CachePolicy
from decodery.step.forward_request import as_coroutine, run_sync
from decodery.training import coprocessor, head_gates, meta_tokens, write_gates
from decodery.training.kind import Run
from decodery.training.one_by_one import train_beside
from decodery_benchmarks import solvers
from decodery_benchmarks.puzzles import drawn
from decodery_benchmarks.puzzles.alphabet import encoded
from decodery_benchmarks.puzzles.chain import Chain
from decodery_benchmarks.results import begun_result, write_result

COMMAND = "python benchmarks/cache_parts.py --work runs/cache-parts --out benchmarks/results/cache-parts.json"
TEXTS, TRIED = 160, 40
SHARES = (0.25, 0.5, 0.75)
PAGES, ROWS = ((32, 8), (32, 32), (8, 8)), 8
"""Tokens of a page and of its parts, and how many last rows of a text select."""


def tiny() -> LoadedModel:
    """The shipped solver of chains, in float32."""
    lm = solvers.load("tiny-1M-chain")
    weights = lm.model.weights  # type: ignore[attr-defined]
    linear = ("qkv", "output", "gate_up", "down")
    layers = [
        dataclasses.replace(layer, **{name: floating(getattr(layer, name)) for name in linear})
        for layer in weights.layers
    ]
    weights = dataclasses.replace(weights, layers=layers, head=floating(weights.head), norm=weights.norm.float())
    return LoadedModel(Transformer(lm.model.config, weights), lm.tokenizer, None, "tiny-1M-chain", "float32")


def solutions(split: str, count: int) -> list[tuple[int, list[int]]]:
    """Prompts' lengths, and ids of puzzles with their solutions."""
    puzzle, draw = Chain(), random.Random(0)
    prompts = islice(drawn(puzzle, split), count)
    return [(len(prompt), encoded(prompt + puzzle.solve(prompt, draw))) for prompt in prompts]


def gates(loaded: LoadedModel, work: Path) -> dict[str, Any]:
    def documents(split: str, count: int) -> list[head_gates.Document]:
        found = [(begin, np.array(ids)) for begin, ids in solutions(split, count)]
        return [head_gates.Document(ids, np.arange(begin - 1, len(ids) - 1)) for begin, ids in found]

    recipe = head_gates.GateRecipe(steps=300, recent=8, lr=0.02)
    with terminal_progress(counts=True) as progress:
        trainee, run = head_gates.HeadGateTrainee(loaded, recipe), Run(loaded, work / "gates", progress=progress)
        trained = train_beside(run, trainee, documents("train", TEXTS))
    held = documents("validation", TRIED)
    draws = torch.Generator().manual_seed(0)
    shape = trained.gates.shape

    def nats(values: torch.Tensor, share: float) -> float:
        streams = torch.from_numpy(HeadGates(values).lowest(share))
        return trainee.answered(held, (~streams).float())

    found: dict[str, Any] = {"none": round(trainee.answered(held, torch.ones(shape)), 4)}
    for share in SHARES:
        chance = [nats(torch.rand(shape, generator=draws), share) for _ in range(8)]
        ways = {
            "gates": nats(trained.gates, share),
            "random": float(np.mean(chance)),
            "inverted": nats(1 - trained.gates, share),
        }
        found[str(share)] = {name: round(value, 4) for name, value in ways.items()}
    return found | {"least": round(float(trained.gates.min()), 3), "most": round(float(trained.gates.max()), 3)}


def write_gate(loaded: LoadedModel, work: Path) -> dict[str, Any]:
    texts = [ids for _, ids in solutions("train", TEXTS)]
    recipe = write_gates.WriteGateRecipe(steps=400, prompt=0.3)
    with terminal_progress(counts=True) as progress:
        trainee = write_gates.WriteGateTrainee(loaded, recipe)
        trained = train_beside(Run(loaded, work / "write-gate", progress=progress), trainee, texts)
    least, draws = trained.least(0.5), np.random.default_rng(0)

    def chosen(ids: list[int]) -> np.ndarray:
        policy = trainee.choosing(ids)
        trainee.behind(ids, policy)
        assert policy.margins is not None
        return (policy.margins > least).numpy()

    def half(ids: list[int]) -> np.ndarray:
        return draws.permutation(len(ids)) % 2 == 0

    ways: dict[str, Callable[[list[int]], np.ndarray]] = {
        "gate": chosen,
        "random": half,
        "every second": lambda ids: np.arange(len(ids)) % 2 == 0,
    }
    found: dict[str, Any] = {}
    for name, way in ways.items():
        apart, stored = [], []
        for _, ids in solutions("validation", TRIED):
            first = trainee.prompt(ids)
            keep = torch.from_numpy(way(ids) | (np.arange(len(ids)) < first))
            full = trainee.whole(ids)
            with torch.no_grad():
                other = trainee.behind(ids, write_gates.Admitted(recipe.layer, keep.float()))
            apart.append(float((full.exp() * (full - other)).sum(dim=-1).mean()))
            stored.append(float(keep[first:].float().mean()))
        found[name] = {"divergence": round(float(np.mean(apart)), 4), "stored": round(float(np.mean(stored)), 3)}
    apart = [newest(trainee, ids, recipe.layer) for _, ids in solutions("validation", TRIED)]
    found["newest"] = {"divergence": round(float(np.mean(apart)), 4), "stored": 0.5}
    return found


class Newest(write_gates.Admitted):
    """Of what is written, each row reads the newer half."""

    def __init__(self, layer: int, prompt: int) -> None:
        super().__init__(layer)
        self.prompt = prompt

    def merge(self, attention: Attention) -> torch.Tensor:
        assert attention.weights is not None and attention.context is not None
        if attention.layer < self.layer:
            return attention.context
        at = torch.arange(len(attention.segment))
        begins = self.prompt + (at - self.prompt).clamp(min=0) // 2
        read = attention.weights * ((at < self.prompt) | (at >= begins[:, None]))
        return torch.einsum("hns,hsd->nhd", read / read.sum(dim=-1, keepdim=True), attention.values)


@torch.no_grad()
def newest(trainee: write_gates.WriteGateTrainee, ids: list[int], layer: int) -> float:
    full, other = trainee.whole(ids), trainee.behind(ids, Newest(layer, trainee.prompt(ids)))
    return float((full.exp() * (full - other)).sum(dim=-1).mean())


def thinking(loaded: LoadedModel, work: Path) -> dict[str, Any]:
    texts = [ids for _, ids in solutions("train", TEXTS)]
    held = [ids for _, ids in solutions("validation", TRIED)]
    found: dict[str, Any] = {}
    for name, static in (("coprocessor", False), ("static", True)):
        recipe = coprocessor.CoprocessorRecipe(steps=600, latents=4, ahead=12, static=static)
        with terminal_progress(counts=True) as progress:
            learning = coprocessor.CoprocessorTrainee(loaded, recipe)
            trained = train_beside(Run(loaded, work / name, progress=progress), learning, texts)
        trainee = coprocessor.CoprocessorTrainee(loaded, recipe)
        if static:
            found["random"] = trainee.foreseen(held).tolist()
            found["alone"] = trainee.foreseen(held, alone=True).tolist()
        for part, tensor in trainee.tensors.items():
            tensor.data.copy_(trained.tensors[part])
        found[name] = trainee.foreseen(held).tolist()
    told = {"1": slice(0, 1), "4": slice(0, 4), "12": slice(0, 12)}
    return {
        name: {ahead: round(float(np.mean(values[part])), 4) for ahead, part in told.items()}
        for name, values in found.items()
    }


def meta_soft(loaded: LoadedModel, work: Path) -> dict[str, Any]:
    texts, held = ([ids for _, ids in solutions(split, n)] for split, n in (("train", TEXTS), ("validation", TRIED)))
    found: dict[str, Any] = {"kl": {}, "nats": {}}
    model, policies = loaded.model, dict[str, CachePolicy]()
    for name, static in (("composed", False), ("static", True)):
        recipe = meta_tokens.MetaRecipe(steps=400, ahead=16, static=static)
        with terminal_progress(counts=True) as progress:
            learning = meta_tokens.MetaTokenTrainee(loaded, recipe)
            trained = train_beside(Run(loaded, work / f"meta-{name}", progress=progress), learning, texts)
        trainee = meta_tokens.MetaTokenTrainee(loaded, recipe)
        found["kl"]["untrained"] = trainee.figures(held)["divergence"]
        for part, tensor in trainee.tensors.items():
            tensor.data.copy_(trained.tensors[part])
        found["kl"][name] = trainee.figures(held)["divergence"]
        policies |= {f"{name}, flow {flow:g}": MetaSoft(0.3, trained, sinks=1, flow=flow) for flow in (0.0, 1.0)}
    found["kl"]["window"] = float(np.mean([window(trainee, ids, 8) for ids in held]))
    policies |= {"window": SnapKV(0.3, window=8), "everything": SnapKV(1.0)}
    for name, kv in policies.items():
        found["nats"][name] = float(np.mean([behind(model, kv, ids, recipe.ahead) for ids in held]))
    return {part: {name: round(value, 4) for name, value in each.items()} for part, each in found.items()}


@torch.no_grad()
def window(trainee: meta_tokens.MetaTokenTrainee, ids: list[int], size: int) -> float:
    """How far what a prompt's last tokens pay is from what is paid later."""
    wanted, _ = trainee.example(ids)
    n, cache = wanted.shape[2], trainee.model.new_cache()
    cache.policy = watching = meta_tokens.RecordedAttention(n, n - size)
    trainee.model.forward(Batch([Segment.chunk(ids[:n], cache, logit_rows=[])]))
    return float(meta_tokens.distance(wanted, watching.found))


@torch.no_grad()
def behind(model: LanguageModel, kv: CachePolicy, ids: list[int], ahead: int) -> float:
    """Nats a token of the end of a text, after a prompt that was compressed."""
    n = len(ids) - ahead
    cache = kv.over(model, n).new_cache()
    model.forward(Batch([Segment.chunk(ids[:n], cache, logit_rows=[])]))
    cache.keep(range(n))
    seq = SimpleNamespace(tokens=ids, cache=cache, request=SimpleNamespace(prompt_length=n, model=model))
    run_sync(as_coroutine(kv.settle(seq)))  # type: ignore[arg-type]
    logits = model.forward(Batch([Segment.chunk(ids[n:], cache)])).logits[:-1]
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[n + 1 :])))


class Asked(Fetching):
    """Reads everything, and notes what the prompt's blocks answer to its question: by layer [kv_heads, blocks]."""

    def __init__(self, method: ActQKV, config: ModelConfig, prompt: int, question: int) -> None:
        super().__init__(method, config, prompt)
        self.question = question
        self.answers: dict[int, np.ndarray] = {}

    def select(self, attention: Attention) -> None:
        places = np.arange(attention.seen.shape[-1])
        self.answers[attention.layer] = self._worth(attention, places)[:, -1]

    def _asking(self, attention: Attention, history: torch.Tensor | None) -> torch.Tensor:
        asking = attention.queries.double().transpose(0, 1)
        if self.method.probe != "last":
            window = asking[:, -self.question :]
            asking[:, -1:] = asked(window, self.question - 1, self.method.probe == "weighted")
        return asking.unflatten(0, (len(attention.keys), -1)).sum(dim=1)


def probes(words: int = 6) -> dict[str, Any]:
    """Shares of heads and layers that rank the needle's block in the best quarter, by what asks."""
    from long_context import Bench

    bench, found = Bench(decodery.load("smollm2")), dict[str, list[float]]()
    for kind in ("weighted", "mean", "last"):
        for case in bench.cases["needle"][:words]:
            size, tokens = 16, case.document + case.question
            method = ActQKV(1.0, block=size, probe=kind)  # type: ignore[arg-type]
            state = Asked(method, bench.model.config, len(tokens), len(case.question))
            cache = bench.model.new_cache()
            cache.policy = state
            bench.model.forward(Batch([Segment.chunk(tokens, cache, logit_rows=[])]))
            worth = np.stack(list(state.answers.values()))
            blocks = np.arange(case.span[0] // size, (case.span[1] - 1) // size + 1)
            ranks = (-worth).argsort(axis=-1).argsort(axis=-1)[..., blocks].min(axis=-1)
            found.setdefault(kind, []).append(float((ranks < worth.shape[-1] / 4).mean()))
    return {kind: [round(value, 3) for value in values] for kind, values in found.items()}


class Captured(AttentionPolicy):
    """Reads everything, and notes how much attention the pages get that would be read, first tokens left aside."""

    def __init__(self) -> None:
        self.found: dict[tuple[int, int], list[float]] = {}

    def select(self, attention: Attention) -> None:
        read = RowsThatSelect(attention, np.arange(len(attention.segment))[-ROWS:])
        scores = torch.einsum("krgd,ksd->krgs", read.queries, read.keys)
        paid = scores.masked_fill(~torch.from_numpy(read.seen)[None, :, None], -torch.inf).softmax(dim=-1)
        paid = paid.mean(dim=2)[..., 4:].numpy()
        for page, logical in PAGES:
            chosen = best_pages(read, 0.25, page, 1, logical)[..., read.positions[4:] // page]
            share = (paid * chosen).sum(axis=-1) / paid.sum(axis=-1)
            self.found.setdefault((page, logical), []).append(float(share.mean()))


def pages() -> dict[str, Any]:
    """The mean over texts, rows, layers and heads of the embedded model, at a quarter of the text."""
    from long_context import Bench

    bench, captured = Bench(decodery.load("smollm2")), Captured()
    for tokens in bench.texts:
        cache = bench.model.new_cache()
        cache.policy = captured
        bench.model.forward(Batch([Segment.chunk(tokens, cache, logit_rows=[])]))
    return {f"{page} by {logical}": round(float(np.mean(each)), 4) for (page, logical), each in captured.found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="Where what is trained is kept.")
    parser.add_argument("--out", type=Path, required=True)
    parts = {"gates": gates, "write-gate": write_gate, "coprocessor": thinking, "meta-soft": meta_soft}
    others = {"probes": probes, "pages": pages}
    parser.add_argument("--only", nargs="*", default=[*parts, *others])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    known = begun_result(arguments.out)
    known["command"] = COMMAND
    for name in arguments.only:
        known["summary"][name] = parts[name](tiny(), arguments.work) if name in parts else others[name]()
        print(name, json.dumps(known[name]), flush=True)
        write_result(arguments.out, known)


if __name__ == "__main__":
    main()
