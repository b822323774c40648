"""Figures of the drafters that guess in parallel, on the embedded model: tokens per pass, and what lossy ones change.

    python benchmarks/draft/parallel.py SECTION ... [--data ../shared/data] [--step 12] [--new 64]

Sections: chat sampled units edits rapid superposed law. Writes benchmarks/results/draft-parallel-SECTION.json.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import decodery
from decodery.extras.superposed import superposed
from decodery.extras.superposed.ngrams import NGrams
from decodery.llm.llm import LLM, Output
from decodery.models.batch import Batch, Segment
from decodery.models.trained.placeholders import Placeholders
from decodery.sampling import Sampler
from decodery.speculative.acceptance.lexical_unit import LexicalUnit as LexicalUnitRule
from decodery.speculative.acceptance.rapid import Rapid as RapidRule
from decodery.speculative.acceptance.rejection import Rejection
from decodery.speculative.drafters.aggressive import Aggressive
from decodery.speculative.drafters.jacobi import Jacobi
from decodery.speculative.drafters.lexical_unit import LexicalUnit
from decodery.speculative.drafters.lookahead import Lookahead
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.speculative.drafters.rapid import Rapid
from decodery.step.drafter import Drafter
from decodery.testing import TableModel, check_distribution

sys.path.insert(0, str(Path(__file__).parents[1]))
from decodery_benchmarks.results import write_result

RESULTS = Path(__file__).parents[1] / "results"
GROUNDED = {"summarization", "rag", "translation", "extraction"}


class Bench:
    """The model, the questions and the common settings of all sections."""

    def __init__(self, data: Path, step: int, new: int) -> None:
        self.lm: LLM = decodery.load("smollm2")
        self.data = data
        self.questions = read(data / "spec_bench_dev.jsonl")[::step]
        self.new = new

    def over_questions(self, drafter: Drafter | None, **settings: Any) -> tuple[dict[str, Any], list[list[int]]]:
        """Figures over all questions, and the texts."""
        outputs, groups = [], []
        for question in self.questions:
            groups.append("grounded" if question["category"] in GROUNDED else "open")
            output = self.lm.generate(question["turns"][0], max_new_tokens=self.new, drafter=drafter, **settings)
            assert isinstance(output, Output)
            outputs.append(output)
        figures: dict[str, Any] = figures_of(outputs)
        for group in ("grounded", "open"):
            members = [output for output, name in zip(outputs, groups, strict=True) if name == group]
            figures[f"{group}_tokens_per_pass"] = figures_of(members)["tokens_per_pass"]
        return figures, [output.tokens for output in outputs]

    def chat(self) -> dict[str, Any]:
        """Greedy decoding of the questions."""
        return {
            str(drafter): self.over_questions(drafter)[0]
            for drafter in (
                *(PromptLookup(), Lookahead(), Lookahead(5, 3, 5), Lookahead(15, 5, 15)),
                *(Jacobi(), Jacobi(fill="last"), Jacobi(fill="lookup")),
                *(Aggressive(), Aggressive(ambiguous="nearest")),
            )
        }

    def sampled(self) -> dict[str, Any]:
        """Sampled decoding: the coupled rule, and the published acceptance of Jacobi windows."""
        result = {}
        for temperature in (0.7, 1.0):
            for fill in ("random", "last", "lookup"):
                for rule in ("coupled", "rejection"):
                    drafter = Jacobi(fill=fill)
                    settings = {"temperature": temperature, "acceptance_rule": rule, "seed": 1}
                    result[f"jacobi {fill}, {rule}, T={temperature}"] = self.over_questions(drafter, **settings)[0]
            result[f"lookahead, coupled, T={temperature}"] = self.over_questions(
                Lookahead(), temperature=temperature, seed=1
            )[0]
        return result

    def units(self) -> dict[str, Any]:
        """Lexical units: checked, with placeholders untrained and trained, and trusted from beta on."""
        _, plain = self.over_questions(None)
        embedding = self.lm.model.weights.embedding.float()  # type: ignore[attr-defined]
        began = Placeholders(embedding.mean(dim=0).repeat(3, 1))
        result = {"checked, beta=0, untrained": self.over_questions(LexicalUnit(beta=0.0, units=began))[0]}
        for beta in (0.0, 0.1, 0.3):
            figures, texts = self.over_questions(LexicalUnit(beta=beta))
            result[f"checked, beta={beta}"] = figures | {"texts_as_plain": sum(map(list.__eq__, texts, plain))}
        for beta in (0.5, 0.7, 0.9):
            drafter = LexicalUnit(beta=beta)
            figures, texts = self.over_questions(drafter, acceptance_rule=LexicalUnitRule(beta=beta))
            changed = [
                sum(a != b for a, b in zip(text, other, strict=False)) for text, other in zip(texts, plain, strict=True)
            ]
            figures["share_of_tokens_changed"] = round(sum(changed) / sum(map(len, plain)), 4)
            result[f"trusted, beta={beta}"] = figures
        return result

    def edits(self) -> dict[str, Any]:
        """Correcting typing errors in a declared source, by the share of words with an error."""
        texts = [question["turns"][0] for question in self.questions if question["category"] == "summarization"]
        result: dict[str, Any] = {}
        for rate in (0.0, 0.05, 0.1, 0.2):
            for kind in ("skip", "nearest"):
                outputs = []
                for number, text in enumerate(texts):
                    words = re.sub(r"\s+", " ", text).split(" ")[3:63]
                    source = " ".join(misspelt(words, rate, random.Random(number)))
                    prompt = f"Correct the spelling and repeat the text, nothing else:\n\n{source}"
                    drafter = Aggressive(source=tuple(self.lm.tokenizer.encode(source)), ambiguous=kind)
                    outputs.append(self.lm.generate(prompt, max_new_tokens=96, drafter=drafter))
                result[f"{rate:.0%} of words, {kind}"] = figures_of(outputs)
        return result

    def rapid(self) -> dict[str, Any]:
        """A fact hidden in a context of about 1500 tokens; the drafter reads 256 of them."""
        needles = self._needles(8)
        drafter = Rapid(gamma=10, head=32, query=48, chunk=64, length=256)
        modes: dict[str, Callable[[str], Output]] = {
            "target alone": lambda prompt: self._short(prompt, drafter=None),
            "eta 0, coupled": lambda prompt: self._short(prompt, drafter=drafter),
        }
        for eta in (0.0, 5.0, 10.0, 20.0):
            modes[f"eta {eta:g}, rule rapid"] = lambda prompt, eta=eta: self._short(  # type: ignore[misc]
                prompt, drafter=drafter, acceptance_rule=RapidRule(eta=eta)
            )
        result: dict[str, Any] = {}
        for mode, run in modes.items():
            outputs = [run(prompt) for prompt, _ in needles]
            figures = figures_of(outputs)
            steps = [step for output in outputs for step in output.trace.decoding]
            figures["accepted_share_of_drafts"] = round(
                sum(step.accepted for step in steps) / max(1, sum(step.nodes for step in steps)), 4
            )
            figures["answers_found"] = sum(
                code in output.text for output, (_, code) in zip(outputs, needles, strict=True)
            )
            result[mode] = figures
        shortened = [self._retrieved(drafter, prompt) for prompt, _ in needles]
        found = sum(code in text for text, (_, code) in zip(shortened, needles, strict=True))
        result["retrieved context alone"] = {"answers_found": found}
        return {"prompts": len(needles), **result}

    def superposed(self) -> dict[str, Any]:
        """Three drafts of ten tokens against three nucleus samples, on beginnings of held-out maths questions."""
        rows = read(self.data / "gsm8k_train_1000.jsonl")
        known = self.lm.ngrams(f"{row['question']} {row['answer']}" for row in rows[24:])
        tables = {
            "superposed": None,
            "superposed, such questions": known,
            "superposed, prompt alone": NGrams.count([[0]]),
        }
        totals: dict[str, list[list[float]]] = {name: [] for name in (*tables, "nucleus")}
        steps = {name: Known() for name in tables}
        for row in rows[:24]:
            prompt = self.lm.encode(row["question"], apply_chat_template=False)[:15]
            text = self.lm.tokenizer.decode(prompt)
            greedy = self.lm.generate(text, apply_chat_template=False, max_new_tokens=10, drafter=None)
            samples = self.lm.generate(
                text, apply_chat_template=False, max_new_tokens=10, drafter=None, n=3, temperature=1.0, top_p=0.9
            )
            assert isinstance(greedy, Output) and isinstance(samples, list)
            found = {"nucleus": [sample.tokens for sample in samples]}
            for name, ngrams in tables.items():
                with steps[name].counting():
                    found[name] = [draft.tokens for draft in self.lm.suggestions(text, 3, ngrams=ngrams)]
            for name, drafts in found.items():
                losses = [self._loss(prompt, draft) for draft in drafts]
                totals[name].append(
                    [
                        sum(losses) / len(losses),
                        min(losses),
                        len({tuple(draft) for draft in drafts}),
                        float(greedy.tokens in drafts),
                        float(any(draft[:3] == greedy.tokens[:3] for draft in drafts)),
                    ]
                )
        names = ("perplexity", "perplexity_of_the_best", "distinct", "greedy_is_among_them", "greedy_beginning_is")
        result = {}
        for name, entries in totals.items():
            means = [sum(column) / len(column) for column in zip(*entries, strict=True)]
            means[:2] = [math.exp(mean) for mean in means[:2]]
            result[name] = dict(zip(names, (round(mean, 3) for mean in means), strict=True))
            result[name]["target_passes"] = 30 if name == "nucleus" else 10
            if name in steps:
                result[name] |= {"steps": steps[name].steps, "steps_with_ngrams": steps[name].known}
        return result

    def law(self) -> dict[str, Any]:
        """p-values of the joint law of five sampled tokens, 20,000 draws, under the published acceptance."""
        result = {}
        for window, fill in ((2, "last"), (4, "random"), (8, "lookup")):
            drafter = Jacobi(window=window, fill=fill)  # type: ignore[arg-type]
            result[str(drafter)] = check_distribution(
                TableModel(3, order=2, seed=1),
                [1, 2],
                drafter=drafter,
                acceptance_rule=Rejection(),
                sampler=Sampler.from_settings(temperature=1.0),
                length=5,
            )
        return result

    def _short(self, prompt: str, **settings: Any) -> Output:
        output = self.lm.generate(prompt, max_new_tokens=32, **settings)
        assert isinstance(output, Output)
        return output

    def _needles(self, count: int) -> list[tuple[str, str]]:
        filler = [q["turns"][0] for q in read(self.data / "spec_bench_dev.jsonl") if q["category"] == "summarization"]
        needles = []
        for number in range(count):
            chance = random.Random(number)
            sentences = re.split(r"(?<=[.!?])\s+", " ".join(chance.sample(filler, 3)))[:60]
            code, name = str(chance.randrange(10000, 99999)), chance.choice(["Oslo", "Lima", "Cairo", "Quito"])
            sentences.insert(chance.randrange(len(sentences)), f"The access code of the {name} vault is {code}.")
            context = self.lm.tokenizer.decode(self.lm.tokenizer.encode(" ".join(sentences)))
            needles.append((f"{context}\n\nWhat is the access code of the {name} vault?", code))
        return needles

    def _retrieved(self, drafter: Rapid, prompt: str) -> str:
        tokens = self.lm.encode(prompt)
        decoder = self.lm.tokenizer.stream()
        short = drafter.shorten(tokens, [decoder.push([token]) for token in tokens])
        engine = self.lm.engine()
        seq = engine.submit(self.lm.request(short, max_new_tokens=32, drafter=None))
        engine.run([seq])
        return self.lm.output(seq).text

    def _loss(self, prompt: list[int], draft: list[int]) -> float:
        """Mean loss per token, in nats, of a draft under the model."""
        text = prompt + draft
        scores = self.lm.model.forward(Batch([Segment.chunk(text, self.lm.model.new_cache())]))
        rows = scores.logits[len(prompt) - 1 : -1].log_softmax(dim=-1)
        return -float(rows[torch.arange(len(draft)), torch.tensor(draft)].mean())


class Known:
    """In how many steps of superposed drafts some candidate of some draft was known to the n-grams."""

    def __init__(self) -> None:
        self.steps = self.known = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        extend, score = superposed._extend, superposed.ngram_scores
        seen: list[bool] = []

        def scored(*given: Any) -> Any:
            scores = score(*given)
            seen.append(bool((scores > 0).any()))
            return scores

        def extended(*given: Any) -> Any:
            seen.clear()
            found = extend(*given)
            self.steps += 1
            self.known += any(seen)
            return found

        superposed._extend, superposed.ngram_scores = extended, scored
        try:
            yield
        finally:
            superposed._extend, superposed.ngram_scores = extend, score


def figures_of(outputs: list[Any]) -> dict[str, Any]:
    traces = [output.trace for output in outputs]
    passes, tokens, rows = (sum(getattr(trace, name) for trace in traces) for name in ("passes", "tokens", "rows"))
    steps = [step for trace in traces for step in trace.decoding]
    total = sum(step.seconds for step in steps) or 1.0
    return {
        "tokens_per_pass": round(tokens / max(passes, 1), 4),
        "rows_per_pass": round(rows / max(passes, 1), 2),
        "propose_share_of_time": round(sum(step.propose for step in steps) / total, 4),
        "commit_share_of_time": round(sum(step.commit for step in steps) / total, 4),
    }


def misspelt(words: list[str], rate: float, chance: random.Random) -> list[str]:
    """Words of which a share has two letters swapped."""
    result = list(words)
    for at in chance.sample(range(len(words)), round(rate * len(words))):
        if len(word := words[at]) > 3:
            result[at] = word[:1] + word[2] + word[1] + word[3:]
    return result


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("sections", nargs="+")
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[3] / "shared" / "data")
    parser.add_argument("--step", type=int, default=12)
    parser.add_argument("--new", type=int, default=64)
    given = parser.parse_args()
    bench = Bench(given.data, given.step, given.new)
    for section in given.sections:
        settings = {"questions": len(bench.questions), "new_tokens": given.new}
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"draft-parallel-{section}.json"
        write_result(path, settings, figures=getattr(bench, section)())
        print(path, path.read_text(), flush=True)


if __name__ == "__main__":
    main()
