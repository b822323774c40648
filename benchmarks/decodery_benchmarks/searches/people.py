"""Invented people, whom they work for and where they live: facts, questions of one hop and two, examples."""

from __future__ import annotations

from random import Random

from decodery.search.documents import Demonstration

NAMES = (
    "Anna Ben Clara David Emma Frank Grace Henry Iris Jack Kate Leo Mary Nick Olga Paul Rose Sam Tina Victor Wendy "
    "Alan Beth Carl Diana Eric Fiona George Helen Ivan Julia Kevin"
)
CITIES = (
    "Paris London Rome Madrid Berlin Vienna Prague Oslo Dublin Lisbon Athens Warsaw Moscow Cairo Tokyo Delhi Lima "
    "Boston Denver Dallas Seattle Toronto Geneva Milan Naples Munich Hamburg Lyon Porto Seville Krakow Kyoto"
)


def world(random: Random, people: int) -> tuple[str, dict[str, str], dict[str, str]]:
    """A name, whom each person works for, and where each one lives."""
    names, cities = random.sample(NAMES.split(), people), random.sample(CITIES.split(), people)
    return names[0], dict(zip(names, [*names[1:], names[0]], strict=True)), dict(zip(names, cities, strict=True))


def facts(works: dict[str, str], lives: dict[str, str]) -> list[str]:
    return [f"{a} works for {b}." for a, b in works.items()] + [f"{a} lives in {city}." for a, city in lives.items()]


def question(name: str, hops: int) -> str:
    return f"In which city does {name if hops == 1 else f'the person that {name} works for'} live?"


def example(random: Random, hops: int) -> Demonstration:
    name, works, lives = world(random, 3)
    other = name if hops == 1 else works[name]
    before = () if hops == 1 else ((f"Who does {name} work for?", other),)
    return Demonstration(question(name, hops), lives[other], (*before, (question(other, 1), lives[other])))
