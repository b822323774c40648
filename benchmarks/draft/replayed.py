"""What `auto` is worth by the size of the table it begins with, and by how far it heeds the noise of tokens.

    python benchmarks/draft/replayed.py --work DIR [--questions 16] [--new 64]

The embedded model in int8 answers questions of Spec-Bench (DECODERY_DATA), as many of every category, by plain decoding
at temperatures 0 and 0.7; what it ranked highest at every place is kept in DIR. `auto` then drafts for these texts
without the model: what comes true is known. Rejected rows, of which it learns a little too, are not. Nothing is timed:
passes over more rows take what they took in benchmarks/results/passes.json, and a drafted node 2 % of a pass besides.
Of every setting: tokens and rows per pass, and speed, the tokens per second beside plain decoding by those prices.
Writes benchmarks/results/draft-replayed.json.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import dataclass, field, replace
from math import gamma
from pathlib import Path
from typing import Any

import numpy as np
import torch
from head_worth import curve
from heads import RESULTS, questions

import decodery
import decodery.speculative.tree_building.native_tree as native_tree
from decodery.core.requirements import Requirements
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.loaders import drafts
from decodery.sampling.sampler import Sampler
from decodery.speculative.stores.contexts import Contexts
from decodery.speculative.stores.expectations import CONTEXTS, HEED, CopyRates, Expectations, SuccessorRates
from decodery.speculative.stores.ngrams import Occurrences
from decodery.speculative.stores.past import PastTexts
from decodery.speculative.stores.warm import WarmContexts
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import VerificationFeedback
from decodery.training.data import _Recorder

sys.path.insert(0, str(Path(__file__).parents[1]))
from decodery_benchmarks.results import write_result

ORDERS, WIDTH, MOST, KEPT, NODE, SEED = (12, 8, 5, 3, 2, 1), 6, 16, 32, 0.02, 1
TOGETHER = 8


@dataclass
class Rule:
    requirements: Requirements = field(default_factory=Requirements)


@dataclass
class Text:
    """What a drafted tree reads of a sequence. said: [n, KEPT] the most likely tokens after all but the first token."""

    tokens: list[int]
    prompt_length: int
    sampler: Sampler
    said: np.ndarray
    eos_ids: tuple[int, ...]
    seed: int = SEED
    acceptance_rule: Rule = field(default_factory=Rule)

    @property
    def position(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def request(self) -> Text:
        """What the text is to become stands beside what it is here."""
        return self


def recorded(work: Path, temperature: float, prompts: list[list[int]], new: int, name: str) -> list[Text]:
    """Texts of plain decoding, from the folder where they are there.

    Args:
        prompts: In tokens.
        name: What they are called in the folder.
    """
    lm, texts = decodery.load("smollm2", dtype="int8"), []
    sampler = Sampler.from_settings(temperature=temperature)
    for first in range(0, len(prompts), TOGETHER):
        path = work / f"{name}-{temperature}-{len(prompts)}-{new}-{first}.npz"
        if not path.is_file():
            engine = Engine(lm.model)
            recorder, ends = _Recorder(KEPT), lm.tokenizer.eos_ids
            sequences = [
                engine.submit(Request(prompt, new, sampler=sampler, drafter=recorder, seed=SEED, eos_ids=ends))
                for prompt in prompts[first : first + TOGETHER]
            ]
            engine.run(sequences)
            work.mkdir(parents=True, exist_ok=True)
            arrays = {f"tokens.{at}": np.array(seq.tokens) for at, seq in enumerate(sequences)}
            arrays |= {
                f"said.{at}": np.array([ids for ids, _ in s.states[s.request.drafter]])
                for at, s in enumerate(sequences)
            }
            np.savez(path, **arrays)
        found = np.load(path)
        for at, prompt in enumerate(prompts[first : first + TOGETHER]):
            tokens = found[f"tokens.{at}"].tolist()
            texts.append(Text(tokens, len(prompt), sampler, found[f"said.{at}"], tuple(lm.tokenizer.eos_ids)))
    return texts


@dataclass
class Sums:
    """What drafts for some texts came to."""

    tokens: int = 0
    rows: int = 0
    passes: int = 0
    spent: float = 0.0

    @property
    def figures(self) -> dict[str, float]:
        figures = {
            "tokens_per_pass": self.tokens / self.passes,
            "rows_per_pass": self.rows / self.passes,
            "speed": self.tokens / self.spent,
        }
        return {name: round(each, 3) for name, each in figures.items()}


def replay(texts: list[Text], vocab: int, warm: WarmContexts, costs: np.ndarray, heed: float) -> dict[str, float]:
    """What `auto` does on these texts, one after the other."""
    native_tree.HEED, native_tree.MEAN = heed, gamma(1 - heed)  # type: ignore[misc]
    contexts, rates = Contexts(CONTEXTS, WIDTH), SuccessorRates(len(CONTEXTS), WIDTH, warm.rates)
    for order in CONTEXTS:
        contexts.fill(order, warm.contexts[order], warm.rows[order])
    past, trusted, sums = PastTexts([order for order in ORDERS if order >= 3]), CopyRates(), Sums()
    for whole in texts:
        follow(whole, Expectations(Occurrences(ORDERS), contexts, rates, past, trusted), vocab, costs, sums)
        past.add(whole.tokens[whole.prompt_length :])
    return sums.figures


def follow(whole: Text, memory: Expectations, vocab: int, costs: np.ndarray, sums: Sums) -> None:
    """Draft along one text, and add up what came of it."""
    text: Any = replace(whole, tokens=whole.tokens[: whole.prompt_length + 1])
    native, start = native_tree.NativeText(text, memory, MOST), whole.prompt_length
    while len(text.tokens) < len(whole.tokens):
        at, left = len(text.tokens), len(whole.tokens) - len(text.tokens)
        found = native_tree.propose_together([native], [text], costs, 1.0, [MOST], [left - 1])
        tree = DraftTree.root(text.tokens[-1]) if found is None else found[0][0]
        path: list[int] = []
        while len(path) < left - 1:
            child = tree.child(path[-1] if path else 0, whole.tokens[at + len(path)])
            if child is None:
                break
            path.append(child)
        emitted = whole.tokens[at : at + len(path) + 1]
        logits = torch.zeros(len(path) + 1, vocab)
        for row, said in enumerate(whole.said[at - 1 - start : at + len(path) - start]):
            logits[row, torch.from_numpy(said)] = torch.arange(KEPT, 0, -1.0)
        text.tokens += emitted
        kept = DraftTree.chain(int(tree.tokens[0]), tree.tokens[path])
        seen = VerificationFeedback(kept, logits, {}, list(range(1, len(kept))), emitted, at - 1)
        native_tree.learn_together([native], [text], [seen])
        sums.passes, sums.tokens, sums.rows = sums.passes + 1, sums.tokens + len(emitted), sums.rows + len(tree)
        sums.spent += float(costs[len(tree) - 1] / costs[0])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--new", type=int, default=64)
    options = parser.parse_args()
    lm, price = decodery.load("smollm2", dtype="int8"), curve()[1 : MOST + 2]
    vocab, asked = lm.model.vocab_size, [lm.encode(each["turns"][0]) for each in questions(options.questions, 3000)]
    costs = price + NODE * price[0] * np.arange(MOST + 1)
    shipped = next(folder / drafts.CONTEXTS for folder in drafts.SHIPPED.values())
    warm, result = WarmContexts.load(shipped), {}
    for temperature in (0.0, 0.7):
        texts = recorded(options.work, temperature, asked, options.new, "spec-bench")
        for most in (0, 4096, 8192, 16384, 32768, 65536):
            smaller = replace(
                warm, **{n: {o: t[:most] for o, t in getattr(warm, n).items()} for n in ("contexts", "rows")}
            )
            result[f"temperature {temperature:g}, {most} contexts"] = replay(texts, vocab, smaller, costs, HEED)
    for heed in (0.0, 0.2, HEED, 0.5, 0.7):
        result[f"temperature 0.7, heeding {heed:g}"] = replay(texts, vocab, warm, costs, heed)
    command = shlex.join(["python", *sys.argv]).replace(str(options.work), "work")
    write_result(RESULTS / "draft-replayed.json", {"command": command, "rows": result})
    for name, found in result.items():
        print(name, json.dumps(found))


if __name__ == "__main__":
    main()
