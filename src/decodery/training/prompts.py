"""Prompts to make training text from: instructions of many kinds, put together at random from built-in parts."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np

from .built_in import built_in_data

Choose = Callable[..., str]

OF = SimpleNamespace(**built_in_data("prompts"))
"""What sentences are made of, by its kind."""


def instructions(count: int, seed: int = 0) -> list[str]:
    """`count` instructions as a user might type them; number i depends on the seed and on i alone."""
    return [_instruction(np.random.default_rng([seed, number])) for number in range(count)]


def _instruction(random: np.random.Generator) -> str:
    def choose(parts: str | list[str]) -> str:
        options = [part.strip() for part in parts.split(";")] if isinstance(parts, str) else parts
        return options[int(random.integers(len(options)))]

    def figure(low: int, high: int) -> int:
        return int(random.integers(low, high))

    often = {_subject: 3, _code: 2, _sums: 2, _translation: 1, _passage: 2, _letter: 1, _short: 1}
    kinds = [kind for kind, times in often.items() for _ in range(times)]
    return kinds[int(random.integers(len(kinds)))](choose, figure)


def _subject(choose: Choose, figure: Callable[[int, int], int]) -> str:
    text = choose(OF.asks)
    while "{}" in text:
        text = text.replace("{}", choose(OF.subjects), 1)
    return text


def _code(choose: Choose, figure: Callable[[int, int], int]) -> str:
    language, deed = choose(OF.languages), choose(OF.deeds)
    return choose(
        f"Write a {language} function that {deed}.; Write {language} code that {deed} and explain it step by step.;"
        f"How do I write a program in {language} that {deed}?; Give me a {language} example that {deed}, with tests."
    )


def _sums(choose: Choose, figure: Callable[[int, int], int]) -> str:
    one, two, things = choose(OF.names), choose(OF.names), choose(OF.things)
    a, b, c, price = figure(3, 60), figure(2, 20), figure(2, 9), figure(2, 30)
    return choose(
        f"{one} has {a} {things} and buys {b} more. {two} has {c} times as many. How many does {two} have?;"
        f"A box holds {a} {things}. How many {things} are in {b} boxes if {c} of them are lost?;"
        f"{one} sells {a} {things} for {price} dollars each and pays {b} dollars for rent. How much is left?;"
        f"What is {a} times {b} plus {c}? Show your work.; Solve for x: {c}x + {b} = {a + b}.;"
        f"A train travels {a * 5} kilometers in {c} hours. What is its average speed?;"
        f"{one} reads {a} pages a day. How many days does a book of {a * b} pages take?;"
        f"{one} and {two} share {a * 2} {things} equally and then {one} gives away {c}. How many does {one} keep?;"
        f"The price of a ticket is {price} dollars and rises by {c * 5} percent. What does it cost now?"
    )


def _translation(choose: Choose, figure: Callable[[int, int], int]) -> str:
    english = f"The {choose(OF.parts)} {choose(OF.beings)} {choose(OF.acts)}."
    german = f"{choose(OF.german_beings)} {choose(OF.german_acts)}."
    return choose(
        f"Translate into {choose(OF.tongues)}: {english}; Translate German to English: {german};"
        f"Translate German to English: {german} {choose(OF.german_beings)} {choose(OF.german_acts)}.;"
        f"How do you say this in {choose(OF.tongues)}? {english}; Rewrite this sentence in other words: {english}"
    )


def _passage(choose: Choose, figure: Callable[[int, int], int]) -> str:
    name, place, shop, year = choose(OF.names), choose(OF.places), choose(OF.shops), figure(1950, 2020)
    sentences = [f"{name} opened a {shop} in {place} in {year}."]
    for _ in range(figure(3, 7)):
        facts = {"n": figure(2, 60), "place": choose(OF.places), "name": choose(OF.names), "year": figure(year, 2024)}
        sentence = choose(OF.news).format(**facts) + "."
        if sentence not in sentences:
            sentences.append(sentence)
    text = " ".join(sentences)
    ask = choose(
        f"Summarize the text above.; Summarize this in one sentence.; Who opened the {shop}, and when?; "
        f"List all names in the text.;"
        f"Extract the figures from the text as a list.; What do we learn about {name}?; Write a headline for it.;"
        f"Rewrite it as a news report.; Answer with the text alone: where is the {shop}?; What could happen next?"
    )
    if choose("before; behind") == "before":
        return f"{ask.replace('above', 'below')}\n\n{text}"
    return f"{text}\n\n{ask}"


def _letter(choose: Choose, figure: Callable[[int, int], int]) -> str:
    role, matter = choose(OF.roles), choose(OF.matters)
    return choose(
        f"Write an email to {role} about {matter}.; Write a polite letter to {role} about {matter}.;"
        f"Help me tell {role} about {matter} in three sentences.; Draft a short message to {role} concerning {matter}."
    )


def _short(choose: Choose, figure: Callable[[int, int], int]) -> str:
    subject, job, place, n = choose(OF.subjects), choose(OF.jobs), choose(OF.places), figure(2, 8)
    return choose(
        f"Act as {job} and talk about {subject}.; Plan a trip of {n} days to {place}.; "
        f"Suggest {n} names for a {choose(OF.shops)}.;"
        f"What would {job} say about {subject}?; Recommend {n} things to do in {place}.; "
        f"Give me {n} tips about {subject}.;"
        f"Write {n} sentences about {place}.; Is {subject} more useful than {choose(OF.subjects)}? Give reasons.;"
        f"hello;Write a recipe with {choose(OF.things)} and {choose(OF.things)}.;"
        f"Write a JSON object that describes {subject}.;"
        f"Sort these words: {choose(OF.beings)}, {choose(OF.beings)}, {choose(OF.beings)}, {choose(OF.beings)}."
    )
