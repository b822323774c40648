"""Extraction as code by the embedded model: F1 on synthetic sentences, free and under the grammar of the schema.

    python benchmarks/extraction.py [--sentences 100] [--only free constrained] [--out DIR]

The schema is that of examples/extraction.py; the prompt has three solved examples. Micro-averaged F1 of entities by
class and span, of relations by class, head and tail, and of events by class and trigger. Free: the model writes what it
likes; "read whole" counts an answer that cannot be read as an empty one, "item by item" keeps every line that can be.
Nothing is timed. Writes extraction.json; parts that are not asked for are left as they are there.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import decodery as dc
from decodery.llm.llm import LLM, Output
from decodery_benchmarks.experiment import Experiment

PEOPLE = (
    "Ada Okafor",
    "Tom Reyes",
    "Lena Fischer",
    "Omar Haddad",
    "Mei Tanaka",
    "Ivan Petrov",
    "Sara Lind",
    "Paul Dubois",
)
CITIES = ("Lima", "Oslo", "Nairobi", "Kyoto", "Porto", "Cairo", "Quito", "Gdansk")
BODIES = ("Northwind", "Helios Labs", "Blue Harbor", "Kestrel", "Vega Motors", "Orbis", "Lumen Press", "Tidewater")
TEMPLATES = (
    ("{a} was born in {c}.", ("Human:a", "City:c", "PlaceOfBirth:a,c")),
    ("{a} works for {o}.", ("Human:a", "Organization:o", "Employer:a,o")),
    (
        "{a}, who was born in {c}, now works for {o}.",
        ("Human:a", "City:c", "Organization:o", "PlaceOfBirth:a,c", "Employer:a,o"),
    ),
    ("In 1998 {a} founded {o} in {c}.", ("Human:a", "Organization:o", "City:c", "Founding:founded;a;o")),
    ("{a} and {b} started {o}.", ("Human:a", "Human:b", "Organization:o", "Founding:started;a,b;o")),
    ("{a} travelled to {c} with {b}.", ("Human:a", "City:c", "Human:b")),
    ("Nobody knew why the train was late.", ()),
    ("{o} opened an office in {c}.", ("Organization:o", "City:c")),
)
EXAMPLES = (0, 4, 2)
"""Templates of the solved examples, which have names of their own."""
EXAMPLE_NAMES = {"a": "Nora Quinn", "b": "Felix Berg", "c": "Tunis", "o": "Silverline"}
CLOSED = "]\n\n"
_TOGETHER = 20
"""Sentences at once: their caches stay below a gigabyte."""


def schema() -> ModuleType:
    """The example as a module."""
    path = Path(__file__).parents[1] / "examples" / "extraction.py"
    spec = importlib.util.spec_from_file_location("extraction", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["extraction"] = module
    spec.loader.exec_module(module)
    return module


def gold(items: tuple[str, ...], names: dict[str, str]) -> str:
    """The answer as it should be written."""
    classes = {key: name for item in items for name, _, key in [item.partition(":")] if key in names}

    def entity(key: str) -> str:
        return f"{classes[key]}({json.dumps(names[key])})"

    def entities(keys: str) -> str:
        return ", ".join(entity(key) for key in keys.split(","))

    written = []
    for item in items:
        name, _, rest = item.partition(":")
        if ";" in rest:
            trigger, founders, bodies = rest.split(";")
            written.append(f'{name}("{trigger}", founder=[{entities(founders)}], organization=[{entities(bodies)}])')
        else:
            written.append(entity(rest) if rest in names else f"{name}({entities(rest)})")
    return "results = [" + ",".join(f"\n    {item}" for item in written) + ("\n]" if written else "]")


def sentences(count: int) -> list[tuple[str, str]]:
    """Sentences with their gold answers: every template in turn, with names drawn from a fixed seed."""
    random, found = np.random.default_rng(0), []
    for number in range(count):
        text, items = TEMPLATES[number % len(TEMPLATES)]
        a, b = random.choice(PEOPLE, 2, replace=False)
        names = {"a": str(a), "b": str(b), "c": str(random.choice(CITIES)), "o": str(random.choice(BODIES))}
        found.append((text.format(**names), gold(items, names)))
    return found


def facts(objects: list[Any], module: ModuleType) -> dict[str, set[tuple[str, ...]]]:
    """What is compared, by kind."""
    found: dict[str, set[tuple[str, ...]]] = {"entities": set(), "relations": set(), "events": set()}
    for each in objects:
        value, name = each.value, type(each.value).__name__
        if isinstance(value, module.Entity):
            found["entities"].add((name, value.name))
        elif isinstance(value, module.Relation):
            found["relations"].add((name, value.head_entity.name, value.tail_entity.name))
        else:
            found["events"].add((name, value.trigger))
    return found


def by_item(answer: str, sentence: str, module: ModuleType) -> list[Any]:
    """The objects of all lines that can be read."""
    found = []
    for line in answer.removesuffix("]").splitlines():
        try:
            found += module.parse(f"results = [{line.strip().rstrip(',')}]", sentence)
        except ValueError:
            continue
    return found


def scores(predicted: list[list[Any]], asked: list[tuple[str, str]], module: ModuleType) -> dict[str, float]:
    """Micro-averaged F1 by kind, and of all together."""
    right, guessed, wanted = (dict.fromkeys(("entities", "relations", "events"), 0) for _ in range(3))
    for objects, (sentence, answer) in zip(predicted, asked, strict=True):
        ours, truth = facts(objects, module), facts(module.parse(answer, sentence), module)
        for kind in right:
            right[kind] += len(ours[kind] & truth[kind])
            guessed[kind] += len(ours[kind])
            wanted[kind] += len(truth[kind])
    for counts in (right, guessed, wanted):
        counts["all"] = sum(counts.values())
    return {kind: round(2 * right[kind] / max(1, guessed[kind] + wanted[kind]), 4) for kind in right}


def _answer(output: Output) -> str:
    """A stop string is cut from the text; its bracket belongs to the answer."""
    return output.text.rstrip() + ("]" if output.stopped_by == CLOSED else "")


def run(lm: LLM, asked: list[tuple[str, str]], module: ModuleType, *, constrained: bool) -> dict[str, Any]:
    """Answers to all sentences and what they are worth; the prompt's beginning is read once."""
    solved = [
        (TEMPLATES[number][0].format(**EXAMPLE_NAMES), gold(TEMPLATES[number][1], EXAMPLE_NAMES)) for number in EXAMPLES
    ]
    engine, settings = lm.engine(), {"drafter": None, "max_new_tokens": 200, "apply_chat_template": False}
    first, waiting, answers = None, [], []
    for sentence, _ in asked:
        own: dict[str, Any] = {"constraint": module.grammar(sentence)} if constrained else {"stop": (CLOSED, '\n"""')}
        tokens = lm.encode(module.prompt(sentence, examples=solved), apply_chat_template=False)
        waiting.append(engine.submit(lm.request(tokens, reuse=first, **settings, **own)))
        if first is None or len(waiting) == _TOGETHER or len(answers) + len(waiting) == len(asked):
            engine.run(waiting)
            answers += [_answer(lm.output(text)) for text in waiting]
            first, waiting = first or waiting[0], []
    whole, read = [], 0
    for answer, (sentence, _) in zip(answers, asked, strict=True):
        try:
            whole.append(module.parse(answer, sentence))
            read += 1
        except ValueError:
            whole.append([])
    print("\n".join(answers[:4]))
    found: dict[str, Any] = {"can be read": read, "read whole": scores(whole, asked, module)}
    if not constrained:
        items = [by_item(answer, sentence, module) for answer, (sentence, _) in zip(answers, asked, strict=True)]
        found["item by item"] = scores(items, asked, module)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sentences", type=int, default=100)
    parser.add_argument("--only", nargs="*", default=["free", "constrained"])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    module, asked, path = schema(), sentences(options.sentences), options.out / "extraction.json"
    lm = dc.load("smollm2")

    def measured(name: str) -> dict[str, Any]:
        return run(lm, asked, module, constrained=name == "constrained")

    experiment = Experiment({"name": options.only}, measured, settings={"sentences": len(asked)})
    experiment.measure(path, "python benchmarks/extraction.py")


if __name__ == "__main__":
    main()
