"""What tables of n-grams bring `auto` by the text that they were learned from, for prompts that are new to them.

    python benchmarks/draft/tables.py --texts DIR --work DIR [--sizes 96 384 1536 3072] [--questions 24] [--new 64]

--texts is a folder of texts that the embedded model wrote to prompts of task_prompts.py, as alike.py leaves it; a table
learns from the first so many of them. It is what a user's own outputs teach: the tokens alone, not what the model
ranked second. "contexts" are the tokens that followed the last three, two and one tokens, most frequent first, in a
table of auto's size; "texts" the texts themselves, whose longest match is copied. Their rates are counted on the last
twentieth of the learned texts. Texts of plain decoding to new prompts stand in --work: of the same kinds, and questions
of Spec-Bench (DECODERY_DATA). `auto` drafts for each of them cold, with the table and no other text of the set, see
replayed.py: nothing is timed. "shipped" is the table that comes along, which learned from 635,148 places with what the
model ranked highest there. Writes benchmarks/results/draft-tables.json.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections import Counter
from dataclasses import replace
from math import log2
from pathlib import Path
from typing import Any

import numpy as np
from head_worth import curve
from heads import RESULTS, questions
from replayed import MOST, NODE, ORDERS, WIDTH, Sums, Text, follow, recorded
from task_prompts import KINDS, task_prompts

import decodery
from decodery.models.loaders import drafts
from decodery.speculative.stores.contexts import Contexts
from decodery.speculative.stores.expectations import CONTEXTS, CopyRates, Expectations, SuccessorRates
from decodery.speculative.stores.ngrams import Occurrences
from decodery.speculative.stores.past import PastTexts
from decodery.speculative.stores.warm import WarmContexts
from decodery.training.corpus import Corpus, TrainingText
from decodery.training.ngram_cache import _hits

sys.path.insert(0, str(Path(__file__).parents[1]))
from decodery_benchmarks.results import write_result

OTHERS = 4711
"""The seed of the new prompts."""


def learned(texts: list[TrainingText], vocab: int) -> tuple[WarmContexts, dict[str, int]]:
    """What followed the contexts of some texts, most frequent first, and how many contexts there are of each length."""
    counted = texts[: -(len(texts) // 20)]
    contexts, rows = {}, {}
    for order in CONTEXTS:
        counts: Counter[tuple[int, ...]] = Counter()
        for text in counted:
            tokens = text.tokens.tolist()
            counts.update(tuple(tokens[at - order : at + 1]) for at in range(max(text.written, order), len(tokens)))
        after: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for run, times in counts.items():
            after.setdefault(run[:-1], []).append((times, run[-1]))
        often = sorted(after, key=lambda context: -sum(times for times, _ in after[context]))
        ranked = np.full((len(often), WIDTH), -1, dtype=np.int32)
        for place, context in enumerate(often):
            best = [token for _, token in sorted(after[context], reverse=True)[:WIDTH]]
            ranked[place, : len(best)] = best
        contexts[order], rows[order] = np.array(often, dtype=np.int64).reshape(-1, order), ranked
    rates = SuccessorRates(len(CONTEXTS), WIDTH)
    found = WarmContexts(contexts, rows, np.array(rates.of), vocab)
    store = found.store(WIDTH)
    for text in texts[-(len(texts) // 20) :]:
        _hits(text, store, rates)
    return replace(found, rates=np.array(rates.of)), {f"contexts of {n}": len(contexts[n]) for n in CONTEXTS}


def past_of(texts: list[TrainingText]) -> PastTexts:
    """What was written in some texts, all of it."""
    past = PastTexts([order for order in ORDERS if order >= 3], 1 << 30)
    for text in texts:
        past.add(text.tokens[text.written :].tolist())
    return past


def measured(held: list[Text], warm: WarmContexts | None, past: PastTexts, vocab: int, costs: Any) -> dict[str, float]:
    """What `auto` does on each text by itself."""
    sums = Sums()
    for text in held:
        contexts = Contexts(CONTEXTS, WIDTH) if warm is None else warm.store(WIDTH)
        rates = SuccessorRates(len(CONTEXTS), WIDTH, None if warm is None else warm.rates)
        follow(text, Expectations(Occurrences(ORDERS), contexts, rates, past, CopyRates()), vocab, costs, sums)
    return sums.figures


def slope(rows: dict[str, Any], name: str, held: str) -> float:
    """Tokens per pass that a doubling of the text adds: least squares over all sizes."""
    own = [each for key, each in rows.items() if key.startswith(name)]
    doublings = [log2(each["learned"]) for each in own]
    return round(float(np.polyfit(doublings, [each[held]["tokens_per_pass"] for each in own], 1)[0]), 4)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--sizes", type=int, nargs="+", default=[96, 384, 1536, 3072])
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--new", type=int, default=64)
    options = parser.parse_args()
    lm, corpus, price = decodery.load("smollm2", dtype="int8"), list(Corpus(options.texts)), curve()[1 : MOST + 2]
    vocab, costs = lm.model.vocab_size, price + NODE * price[0] * np.arange(MOST + 1)
    if len(corpus) < max(options.sizes):
        raise SystemExit(f"{options.texts} holds {len(corpus)} texts, and --sizes asks for {max(options.sizes)}")
    known = {tuple(text.tokens[: text.written].tolist()) for text in corpus}
    fresh: dict[str, list[list[int]]] = {kind: [] for kind in KINDS}
    for kind, prompt in task_prompts(20 * options.questions, OTHERS):
        if tuple(tokens := lm.encode(prompt)) not in known and len(fresh[kind]) < options.questions // len(KINDS):
            fresh[kind].append(tokens)
    asked = {
        "same kinds": [prompt for own in fresh.values() for prompt in own],
        "spec-bench": [lm.encode(each["turns"][0]) for each in questions(options.questions, 1500)],
    }
    held = {name: recorded(options.work, 0.0, own, options.new, f"new-{name}") for name, own in asked.items()}
    shipped = WarmContexts.load(next(folder / drafts.CONTEXTS for folder in drafts.SHIPPED.values()))
    result: dict[str, Any] = {}

    def add(name: str, warm: WarmContexts | None, past: PastTexts, **facts: int) -> None:
        row: dict[str, Any] = {kind: measured(own, warm, past, vocab, costs) for kind, own in held.items()}
        result[name] = row | facts
        print(name, json.dumps(result[name]), flush=True)

    nothing = past_of([])
    add("nothing", None, nothing)
    add("shipped", shipped, nothing)
    for size in options.sizes:
        texts = corpus[:size]
        places = sum(len(text.tokens) - text.written for text in texts)
        table, sizes = learned(texts, vocab)
        past = past_of(texts)
        add(f"contexts of {size} texts", table, nothing, learned=places, **sizes)
        add(f"texts, {size} of them", None, past, learned=places)
        add(f"both of {size} texts", table, past, learned=places)
        add(f"shipped and texts, {size} of them", shipped, past, learned=places)
    names = ("contexts of", "texts,", "both of", "shipped and texts")
    slopes = {f"{name}: {kind}": slope(result, name, kind) for name in names for kind in held}
    print(json.dumps(slopes))
    command = shlex.join(["python", "benchmarks/draft/tables.py", *sys.argv[1:]])
    command = command.replace(str(options.work), "work").replace(str(options.texts), "texts")
    found = {"command": command, "per doubling": slopes, "rows": result}
    write_result(RESULTS / "draft-tables.json", found, summary=("per doubling",))


if __name__ == "__main__":
    main()
