"""Searches that change who writes, or what is read, on puzzles: two models, adapters, trained queries, documents.

    python benchmarks/search_models.py [GROUP ...] [--work DIR] [--prompts N] [--out benchmarks/results]

pair: steps of a small model, and who decides which of them a larger one writes. edge: an adapter that reasons after
prompts which the model itself has read, the switch that turns it on, and budgets of thinking. budget: learning to be
brief. ttt: training queries on a prompt of facts. drag: facts as documents; both for the embedded model.
What is trained is kept in --work, so that the same command goes on. Every group writes search-GROUP.json; nothing is
timed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import decodery as dc
from decodery.core.noise import nth_seed
from decodery.core.registry import resolve
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.adapters import Adapter, tuned
from decodery.scorers.value_head import LinearValue, ValueHead
from decodery.search.arbitrage import Arbitrage
from decodery.search.base import Search
from decodery.search.documents import Documents
from decodery.search.drag import DRAG, listed
from decodery.search.edge import Edge
from decodery.search.iter_drag import IterDRAG
from decodery.search.query_ttt import QueryTTT
from decodery.search.router import RouterHead
from decodery.search.self_consistency import SelfConsistency
from decodery.search.spec_reason import SpecReason
from decodery.training.adapter import LoRARemaking, train_adapter
from decodery.training.corpus import SHARD, Corpus, TrainingText, claim, shard_path, write_shard
from decodery.training.kind import Run
from decodery.training.remade import CopyRecipe
from decodery.training.router import decisions, fit_router
from decodery.training.value import fit_switch, fit_value
from decodery_benchmarks import solvers
from decodery_benchmarks.intervals import interval
from decodery_benchmarks.puzzles import Puzzle, drawn, puzzle
from decodery_benchmarks.puzzles.alphabet import END_ID, encoded
from decodery_benchmarks.searches.people import example, facts, question, world
from decodery_benchmarks.searches.rewards import reward
from decodery_benchmarks.training.grpo import GRPORecipe, train_grpo
from decodery_benchmarks.training.puzzle_model import PuzzleRecipe, train_puzzle_model
from decodery_benchmarks.training.solving import solved, text_of
from groups import parser, record

SPARE, TOGETHER = 8, 16


class Bench:
    """How many puzzles are asked for, and where models are kept."""

    def __init__(self, work: Path, prompts: int) -> None:
        self.work, self.prompts = work, prompts

    def model(self, name: str, asked: Puzzle, recipe: PuzzleRecipe) -> dc.LLM:
        """A model of puzzles, trained where it is not there yet."""
        folder = self.work / name
        if not (folder / "README.md").is_file():
            train_puzzle_model(asked, folder, recipe=recipe)
        return dc.load(str(folder))

    def asked(self, of: Puzzle) -> list[str]:
        return list(islice(drawn(of, "test"), self.prompts))

    def row(self, outputs: Iterable[dc.Output], right: Iterable[bool]) -> dict[str, Any]:
        """Share of prompts with its 95 % bootstrap interval, and means of what texts cost."""
        found, values = list(outputs), np.array(list(right), dtype=np.float64)
        ledgers = [each.trace.ledger for each in found]
        names = sorted({name for each in ledgers for name in each.counts})
        return {
            "share": round(float(values.mean()), 4),
            "interval": interval(values),
            "tokens": round(float(np.mean([each.tokens for each in ledgers])), 2),
            "counts": {name: sum(each.counts.get(name, 0) for each in ledgers) for name in names},
        }

    def of(
        self, lm: dc.LLM, asked: Puzzle, prompts: list[str], search: Search | None, **writing: Any
    ) -> dict[str, Any]:
        """What a search, or plain decoding, makes of puzzles, greedily where nothing else is said."""
        writing = {"temperature": 0.0, "max_new_tokens": asked.length + SPARE, "drafter": None} | writing
        engine, bound, outputs = lm.engine(), None if search is None else search.bind(lm.tokenizer), list[dc.Output]()
        for at in range(0, len(prompts), TOGETHER):
            jobs, texts = list[Any](), list[Any]()
            for number, prompt in enumerate(prompts[at : at + TOGETHER], at):
                request = lm.request(
                    lm.encode(prompt, apply_chat_template=False),
                    apply_chat_template=False,
                    seed=number << 20,
                    **writing,
                )
                if bound is None:
                    texts.append(engine.submit(request))
                else:
                    jobs.append(engine.enter(bound.find(engine, request)))
            engine.run(jobs or texts)
            texts += [job.result[0] for job in jobs]
            outputs += map(lm.output, texts)
        right = (
            each.finish_reason == "stop" and asked.verify(prompt, each.text)
            for prompt, each in zip(prompts, outputs, strict=True)
        )
        return self.row(outputs, right)


def pair(bench: Bench) -> dict[str, Any]:
    """Texts of two models, greedy, step by step: who decides, and how much of them the larger one has written.

    noisy is the reward of that name and chance one that says nothing, at the same thresholds: what deciding by chance
    as often is worth. The router has learned on other puzzles from the exact reward, see `decodery train router`.
    """
    asked = puzzle("chain")
    recipe = PuzzleRecipe("tiny-3M", batch=24, every=50, least=0.75, most=1.0, greedy=32, sampled=4)
    large, small = bench.model("tiny-3M-chain", asked, recipe), solvers.load("tiny-1M-chain")
    prompts = bench.asked(asked)
    found: dict[str, Any] = {
        "small alone": bench.of(small, asked, prompts, None),
        "large alone": bench.of(large, asked, prompts, None),
    }
    shared: dict[str, Any] = {"model": small.model, "delimiter": asked.delimiter}
    chance = reward("constant", asked).replace("noise=0.0", "noise=1.0")
    for kind, scorer in (("noisy", reward("noisy", asked)), ("chance", chance)):
        for threshold in (0.2, 0.5, 0.8) if kind == "noisy" else (0.3, 0.5, 0.7):
            name = f"spec-reason, {kind}, {threshold:g}"
            found[name] = bench.of(large, asked, prompts, SpecReason(scorer, threshold=threshold, **shared))
    oracle = reward("clean", asked)
    for theta in (0.0, 0.5):
        search = Arbitrage(oracle, router="oracle", theta=theta, **shared)
        found[f"arbitrage, oracle, {theta:g}"] = bench.of(large, asked, prompts, search)
    router = _router(bench, large, small, asked, oracle, shared)
    found["router"] = router.pop("facts")
    for theta in (0.2, 0.4, 0.5, 0.6, 0.8):
        search = Arbitrage(router=router["router"], theta=theta, **shared)
        found[f"arbitrage, router, {theta:g}"] = bench.of(large, asked, prompts, search)
    return found


def _router(
    bench: Bench, large: dc.LLM, small: dc.LLM, asked: Puzzle, oracle: str, shared: dict[str, Any]
) -> dict[str, Any]:
    path, facts = bench.work / "router.safetensors", bench.work / "router.json"
    if not facts.is_file():
        search = Arbitrage(oracle, router="oracle", **shared).bind(large.tokenizer)
        requests = []
        for number, prompt in enumerate(islice(drawn(asked, "router"), 3 * bench.prompts)):
            tokens = large.encode(prompt, apply_chat_template=False)
            request = large.request(tokens, max_new_tokens=asked.length + SPARE, drafter=None, seed=nth_seed(9, number))
            request.search = search
            requests.append(request)
        learned_from = decisions(large.engine(), small.model, requests)
        tap = small.model.config.num_layers
        router, told = fit_router(learned_from, tap, small.model.fingerprint)
        router.save(path)
        facts.write_text(json.dumps(told), "utf-8")
    return {"router": RouterHead.load(path), "facts": json.loads(facts.read_text("utf-8"))}


def edge(bench: Bench) -> dict[str, Any]:
    """A model that names answers at once, and adapters that write steps after prompts it has read."""
    direct, steps = puzzle("direct-chain:operations=4"), puzzle("chain:operations=4")
    recipe = PuzzleRecipe(steps=800, every=50, least=0.3, most=0.6, reach=0.0, sampled=4)
    lm, prompts = bench.model("tiny-1M-direct", direct, recipe), bench.asked(direct)
    corpus = _steps(bench.work / "steps", steps, lm)
    found: dict[str, Any] = {"answers at once": bench.of(lm, direct, prompts, None)}
    length = {"max_new_tokens": steps.length + SPARE}
    adapters = {}
    for name in ("masked", "whole"):
        folder = bench.work / f"adapter-{name}"
        if not (folder / Adapter.FILE).is_file():
            remaking = LoRARemaking(16, 16.0, masked=name == "masked")
            train_adapter(Run(lm, folder, (CopyRecipe(steps=1000, batch=16, lr=4e-3),)), corpus, remaking)
        adapters[name] = str(folder)
        constant = reward("constant", steps)
        search = Edge(constant, n=1, most=None, choose="best", adapter=adapters[name])
        found[f"{name}, prompt read by the model"] = {
            **bench.of(lm, direct, prompts, search, **length),
            "nats": _nats(lm, steps, adapters[name], shared=True),
        }
    source = {"logits_source": f"adapter:file={adapters['whole']}", **length}
    found["whole, prompt read by the adapter"] = {
        **bench.of(lm, direct, prompts, None, **source),
        "nats": _nats(lm, steps, adapters["whole"], shared=False),
    }
    found["switch"] = _switched(bench, lm, direct, prompts, adapters["masked"], found, length)
    found |= _budgets(bench, lm, direct, steps, prompts, adapters["masked"], length)
    return found


def _nats(lm: dc.LLM, steps: Puzzle, adapter: str, *, shared: bool) -> float:
    """Of a token of worked solutions, by an adapter after prompts that the model itself has read, or the adapter."""
    writer, random, total, count = tuned(lm.model, Adapter.load(adapter)), Random(1), 0.0, 0
    for prompt in islice(drawn(steps, "validation"), 100):
        tokens, written = encoded(prompt), [*encoded(steps.solve(prompt, random)), END_ID]
        reader, cache = lm.model if shared else writer, writer.new_cache()
        reader.forward(Batch([Segment.chunk(tokens[:-1], cache, logit_rows=[])]))
        cache.keep(range(len(tokens) - 1))
        logits = writer.forward(Batch([Segment.chunk([tokens[-1], *written[:-1]], cache)])).logits
        total += float(cross_entropy(logits, torch.tensor(written), reduction="sum"))
        count += len(written)
    return round(total / count, 4)


def _steps(folder: Path, steps: Puzzle, lm: dc.LLM) -> Corpus:
    """Worked solutions as texts to learn from."""
    count, random = 4 * SHARD, Random(0)
    claim(folder, {"kind": steps.spec, "texts": count}, lm.model.vocab_size)
    texts = []
    for prompt in islice(drawn(steps, "train"), count):
        tokens = [*encoded(prompt + steps.solve(prompt, random)), END_ID]
        texts.append(TrainingText(np.array(tokens, dtype=np.int32), len(prompt)))
    for number in range(0, count, SHARD):
        write_shard(shard_path(folder, number // SHARD), texts[number : number + SHARD], 0)
    return Corpus(folder)


def _switched(
    bench: Bench,
    lm: dc.LLM,
    direct: Puzzle,
    prompts: list[str],
    adapter: str,
    found: dict[str, Any],
    length: dict[str, Any],
) -> dict[str, Any]:
    """By threshold: how many prompts are reasoned about, and what comes of all."""
    path = bench.work / "switch.safetensors"
    if not path.is_file():
        others = list(islice(drawn(direct, "router"), 600))
        texts = solved(lm.model, others, direct.length + SPARE)
        right = [
            (text := text_of(seq)) is not None and direct.verify(prompt, text)
            for prompt, (seq,) in zip(others, texts, strict=True)
        ]
        labelled = ((encoded(prompt), not each) for prompt, each in zip(others, right, strict=True))
        fit_switch(lm.model, labelled).save(path)
    each = {}
    for threshold in (0.4, 0.5, 0.6):
        constant = reward("constant", direct)
        search = Edge(
            constant, n=1, most=None, choose="best", adapter=adapter, switch=LinearValue.load(path), threshold=threshold
        )
        each[f"{threshold:g}"] = bench.of(lm, direct, prompts, search, **length)
    return each


def _budgets(
    bench: Bench,
    lm: dc.LLM,
    direct: Puzzle,
    steps: Puzzle,
    prompts: list[str],
    adapter: str,
    length: dict[str, Any],
) -> dict[str, Any]:
    """By tokens of thinking, one text; by number of texts, votes weighted by a head on the model, and plain."""
    constant, each = reward("constant", steps), dict[str, Any]()
    for most in (6, 12, 18, 24):
        search = Edge(constant, n=1, most=most, end="#", choose="best", adapter=adapter)
        each[f"thinking of {most}"] = bench.of(lm, direct, prompts, search, **length)
    head = bench.work / "verifier.safetensors"
    if not head.is_file():
        fit_value(lm.model, _judged(lm, direct, adapter, length)).save(head)
    sampled = {**length, "temperature": 1.0}
    for n in (1, 8):
        for kind, scorer in (("head", ValueHead(str(head))), ("majority", constant)):
            search = Edge(scorer, n=n, most=None, adapter=adapter, pattern=direct.pattern)
            each[f"{kind} of {n}"] = bench.of(lm, direct, prompts, search, **sampled)
    return each


def _judged(
    lm: dc.LLM, direct: Puzzle, adapter: str, length: dict[str, Any]
) -> Iterator[tuple[list[int], list[int], float]]:
    """Texts that reason, and whether they are right."""
    search = Edge(reward("constant", direct), n=4, most=None, choose="best", adapter=adapter)
    for number, prompt in enumerate(islice(drawn(direct, "reward"), 150)):
        tokens = lm.encode(prompt, apply_chat_template=False)
        for each in lm.search(
            prompt, search, apply_chat_template=False, drafter=None, temperature=1.0, seed=number << 20, **length
        ):
            right = each.finish_reason == "stop" and direct.verify(prompt, each.text)
            yield tokens, encoded(each.text), float(right)


def budget(bench: Bench) -> dict[str, Any]:
    """Learning from whether texts are right, and from that within a budget of tokens, where texts take slips back."""
    asked = puzzle("retry-chain")
    lm, prompts = bench.model("tiny-1M-retry-chain", asked, PuzzleRecipe(every=5)), bench.asked(asked)
    right = f"puzzle-oracle(puzzle={asked.spec})"
    kinds = {"before": lm}
    for name, scorer in (("right", right), ("right and short", f"budgeted(scorer={right},most=50,spare=20)")):
        out = bench.work / f"grpo-{name.replace(' ', '-')}"
        if not (out / "README.md").is_file():
            recipe = GRPORecipe(held=8, reference=16, calibrate="none", beta=0.02, steps=20)
            train_grpo(lm.model, asked, resolve("scorer", scorer).bind(lm.tokenizer), out, recipe=recipe)
        kinds[name] = dc.load(str(out))
    found: dict[str, Any] = {}
    for name, each in kinds.items():
        found[f"{name}, greedy"] = bench.of(each, asked, prompts, None)
        found[f"{name}, one sample"] = bench.of(each, asked, prompts, None, temperature=1.0)
        vote = SelfConsistency(n=8, pattern=asked.pattern)
        found[f"{name}, vote of 8"] = bench.of(each, asked, prompts, vote, temperature=1.0)
    return found


def ttt(bench: Bench) -> dict[str, Any]:
    """Questions of one hop after all facts about twelve people: the embedded model as it is, and with queries trained
    on the prompt."""
    lm, people = dc.load("smollm2", dtype="float32"), 12
    kinds: dict[str, tuple[list[dc.Output], list[bool]]] = {}
    for number in range(bench.prompts):
        asked, works, lives = world(Random(number), people)
        prompt = f"{listed(facts(works, lives))}Question: {question(asked, 1)}"
        for name, steps in (("as it is", 0), ("8 steps", 8)):
            (said, *_) = lm.search(prompt, QueryTTT(steps=steps, lr=3e-5), max_new_tokens=24, drafter=None)
            outputs, right = kinds.setdefault(name, ([], []))
            outputs.append(said)
            right.append(lives[asked] in said.text.partition("\n")[0])
    return {kind: bench.row(*each) for kind, each in kinds.items()}


def drag(bench: Bench) -> dict[str, Any]:
    """Questions of one hop and of two over facts that are documents, by people: all facts read, the best of them, and
    round by round."""
    lm, found = dc.load("smollm2", dtype="int8"), dict[str, Any]()
    for hops, people in ((1, 3), (1, 12), (2, 3), (2, 12)):
        examples = tuple(example(Random(f"example {number}"), hops) for number in range(3))
        kinds: dict[str, tuple[list[dc.Output], list[bool]]] = {}
        for number in range(bench.prompts):
            asked, works, lives = world(Random(number), people)
            documents = Documents(tuple(facts(works, lives)))
            searches: dict[str, Search] = {
                "all facts": DRAG(documents, k=2 * people),
                "drag, 3 documents": DRAG(documents, k=3),
                "drag, 3 documents and 3 examples": DRAG(documents, k=3, examples=examples, m=3),
                "iter-drag, 2 documents a question": IterDRAG(documents, k=2, n=2, examples=examples, m=3),
            }
            city = lives[asked if hops == 1 else works[asked]]
            for kind, search in searches.items():
                (said, *_) = lm.search(question(asked, hops), search, max_new_tokens=24, drafter=None, seed=number)
                outputs, right = kinds.setdefault(kind, ([], []))
                outputs.append(said)
                right.append(city in said.text.partition("\n")[0])
        about = f"{hops} {'hop' if hops == 1 else 'hops'}, {people} people"
        found |= {f"{about}, {kind}": bench.row(*each) for kind, each in kinds.items()}
    return found


GROUPS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "pair": pair,
    "edge": edge,
    "budget": budget,
    "ttt": ttt,
    "drag": drag,
}


def main() -> None:
    arguments = parser(__doc__, GROUPS)
    arguments.add_argument("--prompts", type=int, default=60)
    arguments.add_argument("--work", type=Path, default=Path("search-models"))
    options = arguments.parse_args()
    record("search", GROUPS, options, Bench(options.work, options.prompts), {"prompts": options.prompts})


if __name__ == "__main__":
    main()
