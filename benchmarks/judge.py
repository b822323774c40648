"""Judge Decoding on small sums: tokens per pass and answers, by threshold, beside a rule that only asks for rank.

    python benchmarks/judge.py [--draft smollm2-draft] [--train 80] [--test 40] [--folder DIR] [--out DIR]

The embedded model answers questions such as "Tom has 3 pens and buys 5 more. How many pens has he? Explain briefly."
The judge is trained on what it makes of its own alternatives, as `decodery train judge` does; the draft is a model's
name, or how many of its own first layers draft 10 tokens a pass. An answer is its last number. The control accepts a
draft among the target's `top` best, by the rule `tolerance`. A probe puts another digit into every accepted text, where
there is a digit, and counts how often the judge lets it through. Nothing is timed. Writes judge.json after every rule;
an interrupted run goes on where it stopped, its training too if DIR is named.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import decodery as dc
from decodery.llm.llm import LLM
from decodery.models.loaders.load import LoadedModel, load
from decodery.models.protocol import LanguageModel
from decodery.models.torch.transformer import Transformer
from decodery.speculative.acceptance.coupled import Coupled
from decodery.speculative.acceptance.judge import Head, Judge
from decodery.speculative.acceptance.tolerance import Tolerance
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.step.acceptance_rule import AcceptanceRule
from decodery.step.draft_tree import DraftTree
from decodery.training.judge import fit
from decodery.training.mining import JudgedQuestion, Mining, examples, last_number, read_nodes
from decodery_benchmarks.results import read_result, write_result

NAMES = ("Tom", "Ann", "Mia", "Ben", "Eva", "Sam")
THINGS = ("pens", "books", "apples", "hens", "coins", "cups")


def question(random: np.random.Generator) -> tuple[str, int]:
    a, b = (int(value) for value in random.integers(2, 20, 2))
    name, thing = random.choice(NAMES), random.choice(THINGS)
    if random.random() < 0.5:
        return f"{name} has {a} {thing} and buys {b} more. How many {thing} has {name}? Explain briefly.", a + b
    a, b = max(a, b) + 1, min(a, b)
    return f"{name} has {a} {thing} and gives {b} away. How many {thing} are left? Explain briefly.", a - b


def draft_of(name: str, target: Transformer) -> LanguageModel:
    if not name.isdigit():
        return dc.load(name).model
    weights = replace(target.weights, layers=target.weights.layers[: int(name)])
    return Transformer(replace(target.config, num_layers=int(name)), weights)


def run(
    lm: LLM, drafter: DraftModel, rule: AcceptanceRule, asked: list[tuple[str, int]], plain: list[str | None]
) -> dict:
    outputs = lm.generate([text for text, _ in asked], drafter=drafter, acceptance_rule=rule, max_new_tokens=64)
    answers = [last_number(out.text) for out in outputs]
    passes = sum(len(out.trace.decoding) for out in outputs)
    return {
        "tokens_per_pass": round(sum(step.emitted for out in outputs for step in out.trace.decoding) / passes, 3),
        "right": round(float(np.mean([answer == str(n) for answer, (_, n) in zip(answers, asked, strict=True)])), 4),
        "as_alone": round(float(np.mean([a == b for a, b in zip(answers, plain, strict=True)])), 4),
    }


def corrupted(target: LoadedModel, head: Head, prompts: list[list[int]], texts: list[list[int]]) -> dict[str, int]:
    """How many wrong digits were put in, and how many of them the head gives more than even odds."""
    digits = {target.tokenizer.encode(str(digit), special=False)[-1]: digit for digit in range(10)}
    tokens = {digit: token for token, digit in digits.items()}
    tried = passed = 0
    for prompt, text in zip(prompts, texts, strict=True):
        for place, token in enumerate(text):
            if token in digits:
                path = [*text[:place], tokens[(digits[token] + 3) % 10]]
                states, _ = read_nodes(target.model, prompt, DraftTree.chain(prompt[-1], path), np.array([len(path)]))
                tried += 1
                passed += int(head.logits(torch.from_numpy(states))[0] > 0)
    return {"tried": tried, "passed": passed}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--draft", default="smollm2-draft")
    parser.add_argument("--train", type=int, default=80)
    parser.add_argument("--test", type=int, default=40)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    random = np.random.default_rng(0)
    asked = [question(random) for _ in range(options.train + options.test)]
    target = load("smollm2")
    lm = LLM(target)
    folder = options.folder or Path(tempfile.mkdtemp())
    training = [JudgedQuestion(text) for text, _ in asked[: options.train]]
    found = examples(target, training, folder, mining=Mining(max_new_tokens=64, places=10))
    head, _ = fit(found, target.model.config.num_layers, folder)
    held = asked[options.train :]
    outputs = lm.generate([text for text, _ in held], drafter=None, max_new_tokens=64)
    plain = [last_number(out.text) for out in outputs]
    drafter = DraftModel(draft_of(options.draft, target.model), length=10)
    rules = {"coupled": Coupled()}
    rules |= {
        f"judge, threshold {t}": Judge(head, t) for t in (1.0, 0.9, 0.7, head.facts["threshold_90"], 0.5, 0.3, 0.0)
    }
    rules |= {f"tolerance, top {top}": Tolerance(top, margin=20.0) for top in (2, 3, 5)}
    result: dict[str, Any] = {
        "command": "python benchmarks/judge.py",
        "draft": options.draft,
        "questions": {"train": options.train, "test": options.test},
        "head": head.facts,
        "rows": {},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "judge.json"
    if path.exists():
        before = read_result(path)
        if all(before.get(name) == value for name, value in result.items() if name not in ("command", "rows")):
            result = before
    if "probe" not in result:
        prompts = [out.prompt_tokens for out in outputs]
        result["probe"] = corrupted(target, head, prompts, [out.tokens for out in outputs])
    result["alone"] = round(float(np.mean([answer == str(n) for answer, (_, n) in zip(plain, held, strict=True)])), 4)
    for name, rule in rules.items():
        if name not in result["rows"]:
            result["rows"][name] = run(lm, drafter, rule, held, plain)
            print(name, result["rows"][name], flush=True)
            write_result(path, result, summary=["head", "probe", "alone"])


if __name__ == "__main__":
    main()
