"""Prompts of many kinds for a training that says what a draft head is worth by category.

The kinds of `decodery.training.prompts` and three more: edits of code, JSON from a passage, calls of tools. All were
written for this purpose and come from no data set.
"""

from __future__ import annotations

import numpy as np

from decodery.training import prompts

KINDS = ("chat", "code", "math", "translation", "extraction", "edit", "json", "tools")

_BODIES = (
    ("total", "values", ("result = 0", "for value in values:", "    result += value", "return result")),
    (
        "largest",
        "items",
        ("best = items[0]", "for item in items[1:]:", "    if item > best:", "        best = item", "return best"),
    ),
    (
        "count_words",
        "text",
        ("counts = {}", "for word in text.split():", "    counts[word] = counts.get(word, 0) + 1", "return counts"),
    ),
    (
        "read_rows",
        "path",
        (
            "rows = []",
            "with open(path) as file:",
            "    for line in file:",
            "        rows.append(line.strip().split(','))",
            "return rows",
        ),
    ),
    ("average", "numbers", ("if len(numbers) == 0:", "    return 0.0", "return sum(numbers) / len(numbers)")),
    (
        "is_prime",
        "n",
        (
            "if n < 2:",
            "    return False",
            "for d in range(2, int(n ** 0.5) + 1):",
            "    if n % d == 0:",
            "        return False",
            "return True",
        ),
    ),
)
_EDITS = (
    "Rename the function to {new} and keep the rest.",
    "Add a docstring and type hints.",
    "Add a check that raises ValueError for None.",
    "Print the result before it is returned.",
    "Rename the parameter {parameter} to data.",
    "Add a comment to every line.",
)
_NEW = ("compute", "process", "find_it", "helper", "evaluate")
_TOOLS = (
    ("get_weather", "city", "What is the weather in {place}?"),
    ("search_files", "pattern", "Find the files that mention {thing}."),
    ("send_message", "recipient", "Write to {name} that the meeting moved to {hour} o'clock."),
    ("book_table", "restaurant", "Reserve a table for {number} people at the {shop}."),
)


def task_prompts(count: int, seed: int) -> list[tuple[str, str]]:
    """`count` pairs of a kind and a prompt, the kinds in turns; number i depends on the seed and on i alone."""
    return [
        (kind := KINDS[number % len(KINDS)], _prompt(kind, np.random.default_rng([seed, number])))
        for number in range(count)
    ]


def _prompt(kind: str, random: np.random.Generator) -> str:
    def one_of(options: tuple[str, ...]) -> str:
        return options[int(random.integers(len(options)))]

    def choose(parts: str | list[str]) -> str:
        options = [part.strip() for part in parts.split(";")] if isinstance(parts, str) else parts
        return one_of(tuple(options))

    def figure(low: int, high: int) -> int:
        return int(random.integers(low, high))

    if kind == "chat":
        makers = (prompts._subject, prompts._letter, prompts._short)
        return makers[figure(0, len(makers))](choose, figure)
    if kind == "edit":
        name, parameter, lines = _BODIES[figure(0, len(_BODIES))]
        body = "".join(f"    {line}\n" for line in lines)
        ask = one_of(_EDITS).format(new=one_of(_NEW), parameter=parameter)
        return f"{ask}\n\n```python\ndef {name}({parameter}):\n{body}```"
    if kind == "tools":
        tool, parameter, ask = _TOOLS[figure(0, len(_TOOLS))]
        filled = ask.format(
            place=choose(prompts.OF.places),
            thing=choose(prompts.OF.things),
            name=choose(prompts.OF.names),
            shop=choose(prompts.OF.shops),
            hour=figure(8, 19),
            number=figure(2, 9),
        )
        return (
            f'You have the tool {{"name": "{tool}", "parameters": {{"{parameter}": "string"}}}}. Answer with a JSON '
            f"call of the tool alone.\n\n{filled}"
        )
    passage = prompts._passage(choose, figure)
    if kind == "json":
        name, place, shop, year = (
            choose(prompts.OF.names),
            choose(prompts.OF.places),
            choose(prompts.OF.shops),
            figure(1950, 2020),
        )
        return (
            f"{name} opened a {shop} in {place} in {year}. It employs {figure(2, 60)} people.\n\nWrite this as a JSON "
            "object with the keys name, business, city, year and employees."
        )
    others = {
        "code": prompts._code,
        "math": prompts._sums,
        "translation": prompts._translation,
    }
    return others[kind](choose, figure) if kind in others else passage
