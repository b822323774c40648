"""What constraints support, and that speculation changes nothing about them.

    python benchmarks/constraints.py [GROUP ...] [--schemas 60] [--tokens 96] [--out benchmarks/results]

Needs DECODERY_DATA: JSONSchemaBench's schemas and the JSON Schema Test Suite. Nothing is timed, so that the machine's
load does not matter; times are measured by `decodery bench --workload jsonschema`. Every group writes
constraints-GROUP.json.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import decodery as dc
from decodery.bench.lossless import compare
from decodery.bench.structured import is_valid
from decodery.bench.workloads import Question, questions
from decodery.constraints import JSONSchema
from decodery.core.errors import ConstraintError
from decodery.models.tokenizers.vocabulary import Vocabulary
from decodery.sampling.constraint import Constraint
from decodery.speculative.drafters.forced import Forced
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.speculative.drafters.token_recycling import TokenRecycling
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter
from decodery.step.sequence import Sequence
from groups import parser, record

DATA = Path(os.environ.get("DECODERY_DATA", Path(__file__).parents[2] / "shared" / "data"))
DRAFTERS = ("prompt-lookup", "token-recycling:nodes=16", "suffix-automaton")


class Nothing(Drafter):
    """Drafts nothing."""

    def propose(self, seq: Sequence, budget: Budget) -> DraftTree:
        return DraftTree.root(seq.last_token)


class Bench:
    """One loaded model and the schemas."""

    def __init__(self, schemas: int, tokens: int) -> None:
        self.lm = dc.load("smollm2")
        self.tokens = tokens
        self.all = questions("jsonschema", DATA)
        whole = [question for question in self.all if len(question.schema) < 2000 and self.compiled(question)]
        self.some = [whole[index * len(whole) // schemas] for index in range(min(schemas, len(whole)))]

    def compiled(self, question: Question) -> bool:
        """Whether the schema can be enforced."""
        try:
            JSONSchema(question.schema).compile(self.lm.vocabulary)
        except ConstraintError:
            return False
        return True

    def run(self, question: Question, drafter: Any, language: JSONSchema, **settings: Any) -> dc.Output:
        settings = {"max_new_tokens": self.tokens, "temperature": 0.0} | settings
        return self.lm.generate(question.turns[0], constraint=language, drafter=drafter, **settings)


def suite(bench: Bench) -> dict[str, Any]:
    """The JSON Schema Test Suite, per file: valid and invalid instances accepted, and schemas refused."""
    pieces = [bytes([byte]) for byte in range(256)]
    vocabulary = Vocabulary([*pieces, b""], frozenset({256}), (256,), lambda text: list(text.encode()))
    found: dict[str, Counter[str]] = {}
    for path in sorted((DATA / "json_schema_test_suite_draft2020-12").glob("*.json")):
        counts = found.setdefault(path.stem, Counter())
        for case in json.loads(path.read_text("utf-8")):
            try:
                constraint = JSONSchema(case["schema"], mode="strict").compile(vocabulary)
            except ConstraintError as error:
                counts["refused as unsatisfiable" if "nsatisfiable" in str(error) else "refused"] += len(case["tests"])
                continue
            for test in case["tests"]:
                accepted = _accepts(constraint, json.dumps(test["data"], ensure_ascii=False).encode())
                counts[f"{'valid' if test['valid'] else 'invalid'} {'accepted' if accepted else 'not accepted'}"] += 1
    total: Counter[str] = sum(found.values(), Counter())
    return {"all": dict(total), "files": {name: dict(counts) for name, counts in found.items()}}


def _accepts(constraint: Constraint, text: bytes) -> bool:
    state = constraint.init([])
    for byte in text:
        if not constraint.permits(state, byte):
            return False
        state = constraint.advance(state, byte)
    return constraint.is_complete(state)


def declared(bench: Bench) -> dict[str, Any]:
    """Share of schemas that compile, by dataset, and why the others do not."""
    tried: Counter[str] = Counter()
    works: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for question in bench.all:
        tried[question.category] += 1
        try:
            JSONSchema(question.schema).compile(bench.lm.vocabulary)
            works[question.category] += 1
        except ConstraintError as error:
            named = re.search(r"'[\w$-]+'", str(error))
            reasons[named[0] if named else str(error)[:80]] += 1
    shares = {name: [works[name], tried[name]] for name in sorted(tried)}
    return {"all": [works.total(), tried.total()], "datasets": shares, "refused for": dict(reasons.most_common())}


def identity(bench: Bench) -> dict[str, Any]:
    """Constrained plain decoding against three drafters, in both modes, greedy and sampled."""
    found: dict[str, Any] = {}
    for mode, temperature in (("strict", 0.0), ("canonical", 0.0), ("strict", 0.8)):
        counts = {drafter: Counter(checked=0, identical=0, excused=0) for drafter in DRAFTERS}
        sound: Counter[str] = Counter()
        for number, question in enumerate(bench.some):
            language = JSONSchema(question.schema, mode=mode)
            settings = {"temperature": temperature, "seed": number}
            plain = bench.run(question, None, language, **settings)
            sound["finished"] += plain.finish_reason == "stop"
            sound["valid"] += plain.finish_reason == "stop" and is_valid(question.schema, plain.text)
            prompt = bench.lm.encode(question.turns[0])
            for drafter in DRAFTERS:
                other = bench.run(question, drafter, language, **settings)
                difference = compare(bench.lm, prompt, plain.tokens, other.tokens, temperature=temperature, seed=number)
                counts[drafter]["checked"] += 1
                counts[drafter]["identical"] += difference is None
                counts[drafter]["excused"] += difference is not None and difference.excused
        name = f"{mode}, temperature {temperature:g}"
        found[name] = {"plain": dict(sound), **{drafter: dict(each) for drafter, each in counts.items()}}
        print(name, found[name], flush=True)
    return found


def forced(bench: Bench) -> dict[str, Any]:
    """Tokens per pass: the same drafter without forced tokens and with them, and forced tokens alone."""
    drafters = {
        "forced tokens alone": Forced(Nothing()),
        "prompt-lookup": PromptLookup(),
        "prompt-lookup and forced tokens": Forced(PromptLookup()),
        "token-recycling": TokenRecycling(nodes=16),
        "token-recycling and forced tokens": Forced(TokenRecycling(nodes=16)),
    }
    found: dict[str, Any] = {}
    for mode in ("strict", "canonical"):
        for whitespace in ("flexible", "compact"):
            for name, drafter in drafters.items():
                bench.lm.reset_memory()
                passes = tokens = 0
                for question in bench.some[::2]:
                    language = JSONSchema(question.schema, whitespace, mode=mode)
                    trace = _unwrapped(bench, question, drafter, language).trace
                    passes, tokens = passes + trace.passes, tokens + trace.tokens
                found[f"{mode}, {whitespace}: {name}"] = round(tokens / passes, 3)
                print(mode, whitespace, name, found[f"{mode}, {whitespace}: {name}"], flush=True)
    return found


def _unwrapped(bench: Bench, question: Question, drafter: Any, language: JSONSchema) -> dc.Output:
    """A text with this very drafter: `LM.generate` would add forced tokens to it."""
    lm = bench.lm
    request = lm.request(lm.encode(question.turns[0]), constraint=language, max_new_tokens=bench.tokens, drafter=None)
    request.drafter = drafter
    engine = lm.engine()
    seq = engine.submit(request)
    engine.run([seq])
    return lm.output(seq)


GROUPS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "suite": suite,
    "declared": declared,
    "identity": identity,
    "forced": forced,
}


def main() -> None:
    arguments = parser(__doc__, GROUPS)
    arguments.add_argument("--schemas", type=int, default=60, help="how many schemas are decoded")
    arguments.add_argument("--tokens", type=int, default=96)
    options = arguments.parse_args()
    bench = Bench(options.schemas, options.tokens)
    settings = {"schemas": len(bench.some), "new_tokens": options.tokens, "model": bench.lm.name}
    record("constraints", GROUPS, options, bench, settings)


if __name__ == "__main__":
    main()
