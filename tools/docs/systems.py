"""The generated page of published systems: what of each is here, where it was measured, and what came of it."""

from __future__ import annotations

import re
from collections import defaultdict

from evidence import figure, own_pages
from figures import ROOT

from decodery.core import registry
from decodery.core.registry import Method
from decodery.llm.readiness import readiness
from decodery.testing import tiny_transformer

_MOST_FILES = 2
"""Result files that are named where no page of results has a method."""
SLOWER = "slower than plain decoding on CPUs"
TESTS_ALONE = "tests alone"


def systems() -> str:
    """A row for each paper, in alphabetical order."""
    found: dict[str, list[tuple[str, Method]]] = defaultdict(list)
    for family in registry.FAMILIES:
        for method in registry.methods(family):
            if method.paper:
                found[method.paper].append((family, method))
    model, pages, files = tiny_transformer(0), result_pages(), result_files()
    every = [method for own in found.values() for _, method in own]
    missing = readiness(every, model)
    papers = sorted(found.items(), key=lambda each: each[0].lower())
    lines = [_row(paper, own, missing, pages, files) for paper, own in papers]
    head = "| published | here | measured | remark |\n|---|---|---|---|"
    return f"{len(lines)} publications.\n\n{head}\n" + "\n".join(lines)


def _row(
    paper: str,
    own: list[tuple[str, Method]],
    missing: dict[tuple[str, str], str],
    pages: dict[str, tuple[str, str]],
    files: dict[str, str],
) -> str:
    names = ", ".join(dict.fromkeys(f"`{method.name}`" for _, method in own))
    found_of = (figure(family, method.name, pages) for family, method in own)
    figures = [each for each in found_of if each is not None]
    found = [str(each) for each in figures[:1]] or measured(own, pages, files)
    remarks = [figures[0].remark] if figures and figures[0].remark else []
    if all(method.slower for _, method in own):
        remarks.append(SLOWER)
    if all(missing.get((family, method.name)) for family, method in own):
        remarks.append("needs a trained part, a second model or a setting")
    # What holds whatever was measured.
    remarks = remarks or list(dict.fromkeys(method.guarantee for _, method in own if method.guarantee))[:1]
    cells = [paper.replace("|", "\\|"), names, ", ".join(found) or TESTS_ALONE, "; ".join(remarks)]
    return "| " + " | ".join(cells) + " |"


def measured(own: list[tuple[str, Method]], pages: dict[str, tuple[str, str]], files: dict[str, str]) -> list[str]:
    """Where figures of some methods stand: pages of results as links, or else the names of files.

    Args:
        own: The methods, each with its family.
        pages: As `result_pages` gives them.
        files: As `result_files` gives them.
    """
    found = [
        f"[{pages[stem][0]}](results/{stem}.md)"
        for family, method in own
        for stem, text in own_pages(family, pages).items()
        if re.search(rf"(`|\| )({re.escape(method.name)})([`:(,]| \|)", text)
    ]
    # A name of one plain word, such as memory, may mean something else in a file of figures.
    compound = "|".join(re.escape(method.name) for _, method in own if not method.name.isalpha())
    in_file = re.compile(rf'"({compound})[":(,]')
    in_files = (f"`{name}`" for name, text in files.items() if compound and in_file.search(text))
    return list(dict.fromkeys(found)) or list(in_files)[:_MOST_FILES]


def result_files() -> dict[str, str]:
    """The texts of the files of results by name."""
    return {path.name: path.read_text("utf-8") for path in sorted((ROOT / "benchmarks" / "results").glob("*.json"))}


def result_pages() -> dict[str, tuple[str, str]]:
    """By name: title and text of each page of results."""
    texts = {
        page.stem: page.read_text("utf-8")
        for page in sorted((ROOT / "docs" / "results").glob("*.md"))
        if page.stem != "index"
    }
    return {stem: (text.splitlines()[0].removeprefix("# ").partition(":")[0], text) for stem, text in texts.items()}


SECTIONS = {"systems": systems}
