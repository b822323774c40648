"""Figures of methods in the tables of the pages of results: whole rows for a method's page, one figure for the map."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_MOST_ROWS = 4
_BASELINES = {"none", "greedy"}
"""Rows of tables that others are compared with."""
_TELLING = (
    *(r"speed-up", r"over (the|best-of-n)", r"gain over", r"accuracy", r"AUROC", r"right", r"one answer", r"^speed$"),
    *(r"measured gain", r"tokens per pass", r"needle known", r"perplexity", r"divergence", r"distinct 2"),
)
"""Columns that say most, the best first."""
_CONDITIONS = {"temperature", "setting", "budget", "problems", "n", "precision", "searches", "reward"}
"""Columns that say what was run."""
_GAIN = re.compile(r"(speed-up|over|gain over)\b")
_INTERVAL = re.compile(r"[-+−]?[\d.]+ [(\[]([-+−]?[\d.]+) ?(?:–|to|, ?|\.\.) ?([-+−]?[\d.]+)[)\]]")


@dataclass(frozen=True)
class Figure:
    """One figure of a method: the page and heading of its table, what it is of, its value and the baseline's."""

    page: str
    heading: str
    column: str
    value: str
    base: str

    def __str__(self) -> str:
        beside = f" (plain {self.base})" if self.base else ""
        return f"[{self.heading}](results/{self.page}.md#{anchor(self.heading)}): {self.column} {self.value}{beside}"

    @property
    def remark(self) -> str:
        """What the interval of a gain says, "" where the figure is none."""
        found = _INTERVAL.fullmatch(self.value) if _GAIN.match(self.column) else None
        if found is None:
            return ""
        low, high = (float(each.replace("−", "-")) for each in found.groups())
        even = 1.0 if self.column.startswith("speed-up") else 0.0
        return "a gain here" if low > even else "a loss here" if high < even else "no gain shown here"


def figure(name: str, pages: dict[str, tuple[str, str]]) -> Figure | None:
    """The figure of a method that says most, of all tables that have a row of it.

    Args:
        name: The method.
        pages: As `systems.result_pages` gives them.
    """
    found: list[tuple[int, Figure]] = []
    for stem, (_, text) in pages.items():
        for heading, table in tables(name, text):
            head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines())
            own = next(row for row in rows if row[0].strip("`") not in _BASELINES or name in _BASELINES)
            base = next((row for row in rows if row is not own and row[0].strip("`") in _BASELINES), None)
            telling = (
                (rank, at)
                for rank, column in enumerate(_TELLING)
                for at, cell in enumerate(head)
                if at and re.search(column, cell) and own[at]
            )
            numbers = (
                (len(_TELLING), at)
                for at, cell in enumerate(own)
                if at and head[at] not in _CONDITIONS and re.match(r"[-−\d.]", cell)
            )
            rank, at = next(telling, None) or next(numbers, (0, 0))
            if at:
                about = f"{head[0]}, " if rank == len(_TELLING) and len(head[0]) > len("method") else ""
                beside = "" if base is None or _GAIN.match(head[at]) else base[at]
                found.append((rank, Figure(stem, heading, about + head[at], own[at], beside)))
    return min(found, key=lambda each: each[0])[1] if found else None


def tables(name: str, text: str) -> Iterator[tuple[str, str]]:
    """Heading and rows of the tables of a page that have a row of a method, with what it is compared with."""
    own = re.compile(rf"\| *(?:`{re.escape(name)}[`:]|{re.escape(name)}(?:[:(]| \(| *\|))|^\|[^|]*`{re.escape(name)}`")
    for section in re.split(r"(?m)^#+ ", text)[1:]:
        heading = section.partition("\n")[0]
        for table in re.findall(r"(?m)(?:^\|.*\n)+", section + "\n"):
            head, line, *rows = table.splitlines()
            if kept := [row for row in rows if own.match(row)][:_MOST_ROWS]:
                base = [row for row in rows if row.split("|")[1].strip(" `") in _BASELINES and row not in kept]
                yield heading, "\n".join([head, line, *base[:1], *kept])


def anchor(heading: str) -> str:
    """What a heading is called in links."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
