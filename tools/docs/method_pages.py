"""The page of one method: what it is, when it pays here, its guarantee, settings, needs and paper."""

from __future__ import annotations

import dataclasses
import re
from itertools import islice

from docstrings import ARGUMENTS, arguments, markdown
from evidence import anchor, tables
from generate import FAMILIES, Method, setting
from systems import SLOWER, TESTS_ALONE, measured

_MOST_TABLES = 3
_LINK = re.compile(r"\]\((?!\w+://|#)([^)]+)\)")


def method_page(
    family: str, method: Method, missing: str, pages: dict[str, tuple[str, str]], files: dict[str, str]
) -> str:
    """A method's docstring, what was measured of it, facts and settings.

    Args:
        family: The family of the method.
        method: The method.
        missing: What a model without any trained part lacks for it, "" if nothing.
        pages: As `systems.result_pages` gives them.
        files: As `systems.result_files` gives them.
    """
    facts = {
        "Family": FAMILIES[family][0],
        "Guarantee": method.guarantee,
        "Needs": missing,
        "Requires": ", ".join(method.requirements),
        "Provides": ", ".join(method.provides),
        "Paper": method.paper,
    }
    listed = "\n".join(f"- **{name}**: {value}" for name, value in facts.items() if value)
    fields = [field for field in dataclasses.fields(method.cls) if field.init]
    texts = arguments(method.cls)
    lines = [f"- `{setting(field)}`" + (f": {texts[field.name]}" if field.name in texts else "") for field in fields]
    settings = "\n".join(lines) or "None."
    about = markdown(method.cls, without=ARGUMENTS)
    return (
        f"# {method.name}\n\n{about}\n\n{listed}\n\n## Settings\n\n{settings}\n\n"
        f"## When it pays\n\n{_pays(family, method, pages, files)}\n"
    )


def _pays(family: str, method: Method, pages: dict[str, tuple[str, str]], files: dict[str, str]) -> str:
    """What was measured of a method here: rows of tables, and where all of them stand."""
    parts = [f"By default it was measured {SLOWER}."] if method.slower else []
    found = ", ".join(_from_below(each, "") for each in measured([(family, method)], pages, files))
    parts.append(f"Measured here: {found}." if found else f"No figure stands for it here: {TESTS_ALONE}.")
    for table in islice(tables(family, method.name, pages), _MOST_TABLES):
        link = f"[{table.heading}](../../results/{table.page}.md#{anchor(table.heading)})"
        parts.append(f"{link}:\n\n{_from_below(str(table), f'results/{table.page}.md')}")
    return "\n\n".join(parts)


def _from_below(text: str, page: str) -> str:
    """A text of the folder of pages, or of one of its pages, with links that hold two folders below it."""
    folder = "results/" if page else ""
    text = re.sub(r"\]\(#", f"](../../{page}#", text) if page else text
    return _LINK.sub(lambda link: link[0] if link[1].startswith("../../") else f"](../../{folder}{link[1]})", text)
