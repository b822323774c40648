"""What a hidden Markov model of smollm2's texts knows of them, beside n-grams of the same texts.

    OMP_NUM_THREADS=1 decodery train hmm --out hmm --texts 512 --seed 23
    OMP_NUM_THREADS=1 python benchmarks/hmm.py hmm

smollm2 answers the 35 built-in questions, none of which was a prompt of the texts that were learned from. Of answers
drawn at temperature 1: bits per token of each law, prompts given; share of places with the model's most likely token
(top-1); overlap, the mean of the sum of min(p, q). Of the hidden Markov model also the bits of the tokens 2, 3 and 4
places ahead, beside those of frequencies alone. N-grams are interpolated with the shorter ones by a weight each, the
best of five on the texts held out in training. Then tokens per pass, prompts left aside, of answers at temperature 0
and 1 under the default rule with four tokens drafted by each, and once with trees of 16; that no draft changes an
answer is counted, too. Contexts are rankings, learned from what the model expected, not from what was drawn: those of
the same texts (`--contexts FILE`, by `decodery train ngram-cache` with the same settings), and the shipped ones of ten
times as many. Nothing is timed. Writes benchmarks/results/hmm.json; rows that are there already are not measured again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import decodery
from decodery.bench.workloads import questions
from decodery.engine.request import Request
from decodery.llm.llm import LLM
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.drafts import CONTEXTS as CONTEXTS_FILE
from decodery.models.loaders.drafts import shipped
from decodery.sampling.sampler import Sampler
from decodery.speculative.drafters.combine import Cascade
from decodery.speculative.drafters.hmm import HiddenMarkov
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.speculative.stores.contexts import Contexts
from decodery.speculative.stores.expectations import CONTEXTS, Expectations, SuccessorRates
from decodery.speculative.stores.hmm import HMM
from decodery.speculative.stores.ngrams import Occurrences
from decodery.speculative.stores.warm import WarmContexts
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter
from decodery.step.sequence import Sequence as Text
from decodery.step.tree_drafter import TreeDrafter
from decodery.training.corpus import Corpus
from decodery_benchmarks.results import begun_result, write_result

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "results" / "hmm.json"
NEW, DRAFTED, NODES = 48, 4, 16
WEIGHTS = (1.0, 3.0, 10.0, 30.0, 100.0)
AHEAD = (2, 3, 4)


class NGrams:
    """Frequencies of tokens after the last ones: what a context lacks it leaves to the next shorter one.

    weights: by length of the context, shortest first, how many tokens met that counts as.
    """

    def __init__(self, texts: Iterable[np.ndarray], vocab: int, order: int) -> None:
        texts = list(texts)
        counts = np.bincount(np.concatenate(texts), minlength=vocab) + 1.0
        self.alone = counts / counts.sum()
        self.weights = [WEIGHTS[0]] * order
        self.met: list[dict[tuple[int, ...], dict[int, int]]] = [{} for _ in range(order)]
        for text in texts:
            tokens = text.tolist()
            for length, met in enumerate(self.met, start=1):
                for at in range(length, len(tokens)):
                    behind = met.setdefault(tuple(tokens[at - length : at]), {})
                    behind[tokens[at]] = behind.get(tokens[at], 0) + 1

    def chance(self, before: Sequence[int], token: int, longest: int | None = None) -> float:
        """Of contexts of at most `longest` tokens, all lengths unless it is given."""
        found = float(self.alone[token])
        orders = list(zip(self.met, self.weights, strict=True))[:longest]
        for length, (met, weight) in enumerate(orders, start=1):
            behind = met.get(tuple(before[-length:])) if length <= len(before) else None
            if behind:
                found = (behind.get(token, 0) + weight * found) / (sum(behind.values()) + weight)
        return found

    def law(self, before: Sequence[int]) -> np.ndarray:
        """[vocab] float64."""
        found = self.alone
        for length, (met, weight) in enumerate(zip(self.met, self.weights, strict=True), start=1):
            behind = met.get(tuple(before[-length:])) if length <= len(before) else None
            if behind:
                found = found * (weight / (sum(behind.values()) + weight))
                found[list(behind)] += np.array(list(behind.values())) / (sum(behind.values()) + weight)
        return found

    def weigh(self, texts: Sequence[np.ndarray]) -> None:
        """Take the weights that give texts most, length by length."""
        for number in range(len(self.weights)):
            told = []
            for weight in WEIGHTS:
                self.weights[number] = weight
                told.append(
                    sum(
                        np.log(self.chance(tokens[max(0, at - 2) : at], tokens[at], number + 1))
                        for tokens in (text.tolist() for text in texts)
                        for at in range(1, len(tokens))
                    )
                )
            self.weights[number] = WEIGHTS[int(np.argmax(told))]


@dataclass(frozen=True)
class ByNGrams(TreeDrafter):
    """Drafts from n-grams."""

    table: NGrams | None = None

    def logits(self, seq: Text, tree: DraftTree, nodes: Sequence[int]) -> torch.Tensor:
        assert self.table is not None
        texts = [[*seq.tokens[-2:], *tree.tokens[tree.path(node)].tolist()] for node in nodes]
        return torch.from_numpy(np.log(np.stack([self.table.law(text) for text in texts]))).float()


class Ranked:
    """What may follow, by a table of contexts."""

    def __init__(self, warm: WarmContexts) -> None:
        width = warm.rows[CONTEXTS[0]].shape[1]
        store = Contexts(CONTEXTS, width)
        for order in CONTEXTS:
            store.fill(order, warm.contexts[order], warm.rows[order])
        self.expected = Expectations(Occurrences(()), store, SuccessorRates(len(CONTEXTS), width, warm.rates))

    def first(self, before: list[int]) -> int:
        """The most likely token, -1 where no context is known."""
        found = self.expected.candidates(before[-CONTEXTS[0] :], -1)
        return found[0][1] if found else -1


@dataclass(frozen=True)
class ByRanks(Drafter):
    """Drafts the first of what a table of contexts ranks."""

    table: Ranked | None = None

    def propose(self, seq: Text, budget: Budget) -> DraftTree:
        assert self.table is not None
        drafted: list[int] = []
        while len(drafted) < min(DRAFTED, budget.nodes, budget.depth):
            token = self.table.first([*seq.tokens[-CONTEXTS[0] :], *drafted])
            if token < 0:
                break
            drafted.append(token)
        return DraftTree.chain(seq.last_token, drafted)


def answers(lm: LLM, drafter: Drafter | None, temperature: float) -> tuple[list[list[int]], int, list[int]]:
    """Answers to the built-in questions with their prompts, passes that wrote them, and lengths of the prompts."""
    engine, sampler = lm.engine(), Sampler.from_settings(temperature=temperature)
    asked = [lm.encode(question.turns[0]) for question in questions("built-in")]
    found = [
        engine.submit(
            Request(
                prompt,
                max_new_tokens=NEW,
                sampler=sampler,
                drafter=drafter,
                seed=number,
                eos_ids=lm.tokenizer.eos_ids,
            )
        )
        for number, prompt in enumerate(asked)
    ]
    engine.run(found)
    for seq in found:
        if seq.error is not None:
            raise seq.error
    passes = sum(not step.prefill for seq in found for step in seq.trace.steps)
    return [seq.tokens for seq in found], passes, [seq.request.prompt_length for seq in found]


@torch.no_grad()
def laws_of(lm: LLM, texts: list[list[int]], begins: list[int]) -> list[torch.Tensor]:
    """The model's log-laws [n, vocab] of every token of the answers."""
    found = []
    for text, begin in zip(texts, begins, strict=True):
        rows = range(begin - 1, len(text) - 1)
        segment = Segment(np.arange(len(text)), np.asarray(text), logit_rows=[*rows])
        found.append(lm.model.forward(Batch([segment])).logits.float().log_softmax(dim=-1))
    return found


def told(rows: Iterable[tuple[list[int], int, torch.Tensor, torch.Tensor]]) -> dict[str, float]:
    """Bits, top-1 and overlap. Each row: a text, where its answer begins, and its log-laws [n, vocab]: q and p."""
    sums, count = np.zeros(3), 0
    for text, begin, own, model in rows:
        q, p, tokens = own, model, torch.tensor(text[begin:])
        sums[0] -= float(q.gather(1, tokens[:, None]).double().sum()) / np.log(2)
        sums[1] += int((q.argmax(dim=1) == p.argmax(dim=1)).sum())
        sums[2] += float(torch.minimum(p, q).exp().sum())
        count += len(tokens)
    bits, same, overlap = (sums / count).tolist()
    return {"bits": bits, "top-1": same, "overlap": overlap}


def by_hmm(hmm: HMM, text: list[int], begin: int, ahead: int = 1) -> torch.Tensor:
    """Log-laws [n, vocab] of every token of an answer, from what stands `ahead` and more places before it."""
    beliefs = [hmm.start]
    for token in text[:-1]:
        beliefs.append(hmm.after(beliefs[-1][None], [token])[0])
    return hmm.logits(torch.stack([beliefs[at - ahead + 1] for at in range(begin, len(text))]), ahead)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder of a hidden Markov model, with the texts it learned from")
    parser.add_argument("--contexts", type=Path, help="contexts of the same texts")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    lm, hmm, corpus = (
        decodery.load("smollm2"),
        HMM.load(args.folder),
        Corpus(args.folder / "text/written"),
    )
    learned, held = corpus.split()
    texts = [corpus[number].tokens for number in learned]
    grams = {}
    for name, order in (("unigram", 0), ("bigram", 1), ("trigram", 2)):
        grams[name] = NGrams(texts, lm.model.vocab_size, order)
        grams[name].weigh([corpus[number].tokens for number in held])
    warm = shipped(CONTEXTS_FILE, lm.model.config.vocabulary)
    assert warm is not None
    ranked = {"contexts": Ranked(WarmContexts.load(args.contexts))} if args.contexts else {}
    ranked["contexts, shipped"] = Ranked(WarmContexts.load(warm))
    results = begun_result(args.out)
    facts = hmm.facts
    results["summary"] = {"laws": {}, "drafts": {}} | results["summary"]
    results |= {
        "commands": [facts["command"], "python benchmarks/hmm.py hmm --contexts contexts/contexts.safetensors"],
        "states": len(hmm.start),
        "columns": len(hmm.tokens),
        "learned": facts["tokens"],
        "held": [-each / np.log(2) for each in facts["held"]],
        "weights": {name: each.weights for name, each in grams.items()},
    }
    plain = {temperature: answers(lm, None, temperature) for temperature in (0.0, 1.0)}
    drawn, _, begins = plain[1.0]
    results["tokens"] = sum(map(len, drawn)) - sum(begins)

    def keep() -> None:
        write_result(args.out, results, summary=["weights"])

    models = laws_of(lm, drawn, begins)
    sources: dict[str, Any] = {
        "the model": lambda text, begin, model: model,
        "hmm": lambda text, begin, model: by_hmm(hmm, text, begin),
    }
    for ahead in AHEAD:
        sources[f"hmm, {ahead} ahead"] = lambda text, begin, model, ahead=ahead: by_hmm(hmm, text, begin, ahead)
    for name, table in grams.items():
        sources[name] = lambda text, begin, model, table=table: torch.from_numpy(
            np.stack([np.log(table.law(text[:at])) for at in range(begin, len(text))])
        ).float()
    for name, source in sources.items():
        if name not in results["laws"]:
            rows = zip(drawn, begins, models, strict=True)
            results["laws"][name] = told(
                (text, begin, source(text, begin, model), model) for text, begin, model in rows
            )
            print(name, results["laws"][name], flush=True)
            keep()
    for name, table in ranked.items():
        right = [
            table.first(text[:at]) == int(model[at - begin].argmax())
            for text, begin, model in zip(drawn, begins, models, strict=True)
            for at in range(begin, len(text))
        ]
        results["laws"][name] = {"top-1": float(np.mean(right))}
    tree = f"eagle-2(nodes={NODES},width=4,depth=4)"
    drafters: dict[str, Drafter] = {
        "hmm": HiddenMarkov(hmm, length=DRAFTED),
        "hmm, trees": HiddenMarkov(hmm, tree_policy=tree),
        "bigram": ByNGrams(grams["bigram"], length=DRAFTED),
        **{name: ByRanks(table) for name, table in ranked.items()},
        "prompt-lookup": PromptLookup(length=DRAFTED),
        "prompt-lookup, else hmm": Cascade((PromptLookup(length=DRAFTED), HiddenMarkov(hmm, length=DRAFTED))),
        "trigram": ByNGrams(grams["trigram"], length=DRAFTED),
    }
    for name, drafter in drafters.items():
        if name in results["drafts"]:
            continue
        row: dict[str, Any] = {}
        for temperature, (texts_of, _, _) in plain.items():
            found, passes, _ = answers(lm, drafter, temperature)
            # The first token of each text comes with its prompt.
            written = sum(map(len, found)) - sum(begins) - len(found)
            row[f"tokens per pass, {temperature:g}"] = written / passes
            row[f"same, {temperature:g}"] = [sum(a == b for a, b in zip(found, texts_of, strict=True)), len(found)]
        results["drafts"][name] = row
        print(name, row, flush=True)
        keep()
    keep()


if __name__ == "__main__":
    main()
