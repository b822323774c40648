"""What drafters bring to agents: loops of tool calls with results between them, over the same tools, and one-off chat.

    python benchmarks/draft/agents.py [SPEC ...] [--model smollm2] [--agents 8] [--new 48] [--chats 2]
        [--out benchmarks/results/draft-agents.json]

Every agent plans a trip of its own in four turns: the model writes a call, a tool answers, the next message asks for
the next call. All conversations begin with the tools and one trip whose calls are right, as an example. The model's
calls stay in the conversation as they are, right or wrong; tools answer by trip and turn. One agent works after the
other, in one process, whose drafter learns. The rows of a drafter are apart by what it could have seen:

    first call              the first call of the first agent: the example alone
    own turns before        its other calls: calls and results of its own stand in the prompt
    others before           first calls of the other agents: earlier texts of the process hold such calls
    own turns and others    their other calls
    chat                    answers to questions of four categories of Spec-Bench (DECODERY_DATA), each asked once

SPECs are drafters, by default `auto` and `suffix-tree`. "auto, kept" is `auto` in a process that begins with what one
before it has kept of as many other agents and other questions, see `auto:keep`. Nothing is timed: a pass takes what the
prior of its model says, by its rows. Texts are the same under all drafters. Drafters that are in the file are kept
there, so that the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from categories import Run, figures, prompts

import decodery
from decodery.core.registry import resolve
from decodery.llm.llm import LLM
from decodery.speculative.drafters.auto import Auto
from decodery.speculative.stores.kept import keep_all

sys.path.insert(0, str(Path(__file__).parents[1]))
from decodery_benchmarks.results import RESULTS, begun_result, write_result

KEPT = "auto, kept"
CHATS = ("writing", "roleplay", "humanities", "stem")
CITIES = (
    "Lisbon", "Oslo", "Lima", "Kyoto", "Prague", "Hanoi", "Perth", "Vienna",
    "Cairo", "Quito", "Dublin", "Tunis", "Seoul", "Riga", "Accra", "Bern",
)  # fmt: skip
TOOLS = {
    "find_flight": ("to",),
    "find_hotel": ("city", "nights"),
    "get_weather": ("city",),
    "save_note": ("title", "text"),
}
ASKED = (
    "Find a flight to {}.",
    "Now find a hotel in {} for {} nights.",
    "Now get the weather in {}.",
    "Now save a note.",
)
SYSTEM = "You plan trips with tools. Answer each message with one JSON call of a tool and nothing else. The tools are: "
SYSTEM += "; ".join(f"{name}({', '.join(arguments)})" for name, arguments in TOOLS.items()) + "."
SHOWN = (
    {"to": "Rome"},
    {"city": "Rome", "nights": 3},
    {"city": "Rome"},
    {"title": "Trip to Rome", "text": "TR120, Hotel Rome Central, clear"},
)
"""The arguments of the calls that every conversation begins with, as an example."""


def answer(city: str, trip: int, turn: int) -> str:
    """What the tool says in a turn of a trip."""
    random = np.random.default_rng([4714, trip, turn])
    price, hour = int(random.integers(40, 400)), int(random.integers(6, 22))
    found: dict[str, Any] = (
        {"flight": f"TR{price}", "to": city, "departs": f"{hour}:30", "price": price, "currency": "EUR"},
        {"hotel": f"Hotel {city} Central", "city": city, "nights": 2 + trip % 5, "price": price, "currency": "EUR"},
        {"city": city, "sky": "clear" if price % 2 else "rain", "temperature": hour, "unit": "celsius"},
    )[turn]
    return f"Result of {list(TOOLS)[turn]}: {json.dumps(found)}"


def asked(city: str, trip: int, turn: int) -> str:
    """The message of a turn."""
    wanted = ASKED[turn].format(city, 2 + trip % 5)
    return f"{answer(city, trip, turn - 1)}\n{wanted}" if turn else wanted


def begun() -> list[dict[str, str]]:
    """What every conversation begins with: the tools, and a trip of calls that are right."""
    said = [{"role": "system", "content": SYSTEM}]
    for turn, (name, arguments) in enumerate(zip(TOOLS, SHOWN, strict=True)):
        said.append({"role": "user", "content": asked("Rome", 1, turn)})
        said.append({"role": "assistant", "content": json.dumps({"name": name, "arguments": arguments})})
    return said


def is_call(text: str) -> bool:
    """Whether a text is one call of a tool, whatever its arguments."""
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return isinstance(found, dict) and found.get("name") in TOOLS


def work(run: Run, trips: range, new: int) -> Iterator[bool]:
    """Let agents work one after the other; of each turn, whether the text was a call."""
    for trip in trips:
        said = begun()
        for turn in range(len(ASKED)):
            said.append({"role": "user", "content": asked(CITIES[trip % len(CITIES)], trip, turn)})
            before = ("own turns and others" if turn else "others before") if trip != trips[0] else None
            kind = before or ("own turns before" if turn else "first call")
            (tokens,) = run.write(kind, [said], new, 0.0)
            text = run.lm.tokenizer.decode(tokens)
            yield is_call(text)
            said.append({"role": "assistant", "content": text})


def measured(lm: LLM, drafter: Any, chats: list[str], trips: range, new: int) -> dict[str, Any]:
    """What a process that begins counts of these agents and chats."""
    run = Run(lm, drafter.bind(lm.model), counted=True)
    calls = list(work(run, trips, new))
    for text in chats:
        run.write("chat", [text], new, 0.0)
    keep_all()
    loop: dict[str, float] = {}
    for kind, own in run.sums.items():
        if kind != "chat":
            loop = {part: loop.get(part, 0.0) + value for part, value in own.items()}
    rows = {kind: figures(own) for kind, own in (*run.sums.items(), ("loop", loop)) if own["passes"]}
    return {**rows, "calls": sum(calls), "turns": len(calls)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("specs", nargs="*", default=["auto", "suffix-tree"])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--agents", type=int, default=len(CITIES) // 2)
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--chats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "draft-agents.json")
    options = parser.parse_args()
    lm, count = decodery.load(options.model), options.agents
    questions = [prompts(2 * options.chats, built_in=False)[kind] for kind in CHATS]
    now, earlier = (
        [text for each in questions for text in each[options.chats * at :][: options.chats]] for at in (0, 1)
    )
    command = shlex.join(["python", "benchmarks/draft/agents.py", *sys.argv[1:]])
    result = begun_result(options.out)
    for name in (*options.specs, KEPT):
        if name in result["rows"]:
            continue
        if name == KEPT:
            with TemporaryDirectory() as folder:
                measured(lm, Auto(keep=folder), earlier, range(count, 2 * count), options.new)
                size = sum(each.stat().st_size for each in Path(folder).iterdir() if each.is_file())
                with TemporaryDirectory() as own:
                    # What is measured is learned, too.
                    kept = str(copytree(folder, own, dirs_exist_ok=True))
                    row = {**measured(lm, Auto(keep=kept), now, range(count), options.new), "bytes": size}
        else:
            row = measured(lm, resolve("drafter", name), now, range(count), options.new)
        result["rows"][name] = row
        print(name, json.dumps(row), flush=True)
        write_result(options.out, {**result, "command": command, "counted": True})


if __name__ == "__main__":
    main()
