"""Figures of methods in the tables of the pages of results: whole rows for a method's page, one figure for the map."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_HOMES = {
    "drafter": ("speed", "heads", "drafters", "constraints", "compression", "budgets", "training"),
    "tree-policy": ("trees", "heads"),
    "acceptance-rule": ("rules", "trees", "training"),
    "continuous-acceptance": ("rules",),
    "logits-processor": ("samplers",),
    "logits-source": ("sources", "training", "samplers"),
    "draft-length": ("budgets", "training"),
    "constraint": ("constraints", "speed"),
    "search": ("search", "samplers"),
    "scorer": ("search",),
    "suggestion": ("search",),
    "simultaneous": ("simultaneous",),
    "diffusion": ("diffusion",),
    "diffusion-cache": ("diffusion",),
    "expert-sharing": ("diffusion",),
    "cache-policy": ("kv-cache",),
    "monitor": ("monitors", "training"),
    "compression": ("compression", "training"),
    "training": ("training",),
}
"""The pages where names mean the methods of a family: other pages have words that are spelt alike."""
_GAIN = r"(speed-up|over|gain over)\b"
_TRAINED = ("held out",)
_HELD_OUT = ("figure", "held out", "95 % interval", "baselines")
_SPEED = ((r"speed-up \(", "tokens per pass"), ("^speed$", "tokens per pass"), ("times plain", "tokens per pass"))
_RIGHT = ((r"over (the|best-of-n|one sample)", "accuracy"), ("gain over", "accuracy"), (r"^gain \[",), ("^n=16",))
_SHOWN: dict[str, tuple[tuple[str, ...], ...]] = {
    "drafter": (
        *_SPEED,
        ("speed-up", "tokens per pass"),
        ("tokens per pass", "accepted"),
        ("tokens per pass",),
        ("bits",),
    ),
    "tree-policy": (("16 nodes",), ("^speed$", "tokens per pass")),
    "acceptance-rule": (("k=4",), ("tokens per pass", "right"), ("accepted",), ("16 nodes",)),
    "continuous-acceptance": (("accepted", "values per pass"),),
    "logits-processor": (
        ("sums right",),
        ("repeated 4-grams", "bits per token"),
        ("with a drafter", "tokens per pass"),
    ),
    "logits-source": (_TRAINED, ("passed", "^of$"), ("speed-up",), ("passes", "with a drafter", "tokens per pass")),
    "draft-length": (("discarded per token", "passes per token"),),
    "constraint": ((r"speed-up \(", "same text"), ("coverage", "compliance"), ("rejections", "ms per token")),
    "search": (
        *_RIGHT,
        ("^pass public tests",),
        ("total variation",),
        ("reached", "best of n"),
        ("distinct 2", "best"),
        ("distinct 2", "nats per token"),
        ("right",),
        ("AUC",),
    ),
    "scorer": (*_RIGHT, ("AUC",)),
    "suggestion": (("perplexity", "passes"),),
    "simultaneous": (("lag", "wrong", "passes per chunk$"),),
    "diffusion": (("one answer", "passes"), ("valid", "right", "passes"), ("right", "passes")),
    "diffusion-cache": (("one answer", "rows"),),
    "expert-sharing": (("right", "experts of a layer"),),
    "cache-policy": (
        ("needle known", "^kl$", "resident", "tokens per pass"),
        ("needle known", "^kl$", "resident"),
        ("MiB, float32", "ms a token, float32"),
        ("divergence",),
    ),
    "monitor": (("AUROC", "seeds"), ("AUROC",), _TRAINED),
    "compression": (
        ("^read$", "perplexity", "tokens per pass"),
        ("bits", "loss"),
        ("perplexity", "tokens per pass"),
        _TRAINED,
    ),
    "training": (_TRAINED,),
}
"""Columns that say what a family is for and what it costs, each set shown together, the best set first."""
_BASELINES = {"none", "greedy", "static", "plain", "all", "full", "uniform", "mean log-probability"}
"""Rows of tables that others are compared with."""
_AMOUNT = ("n", "budget")
"""Columns of how much was spent; a figure is of the row that spent most."""
_MOST_ROWS = 4
_INTERVAL = re.compile(r"[-+−]?[\d.]+(?: %)? [(\[]([-+−]?[\d.]+) ?(?:–|to|, ?|\.\.) ?([-+−]?[\d.]+)[)\]]")


@dataclass(frozen=True)
class Figure:
    """What one row of a table says of a method: the table's page and heading, and columns with values and baselines."""

    page: str
    heading: str
    values: tuple[tuple[str, str, str], ...]

    def __str__(self) -> str:
        said = ", ".join(f"{column} {value}{base and f' ({base})'}" for column, value, base in self.values)
        return f"[{self.heading}](results/{self.page}.md#{anchor(self.heading)}): {said}"

    @property
    def remark(self) -> str:
        """What the interval of a gain says, "" where the figure is none."""
        column, value, _ = self.values[0]
        found = _INTERVAL.fullmatch(value) if re.match(_GAIN, column) else None
        if found is None:
            return ""
        low, high = (float(each.replace("−", "-")) for each in found.groups())
        even = 1.0 if column.startswith("speed-up") else 0.0
        return (
            "a gain in this table"
            if low > even
            else "a loss in this table"
            if high < even
            else "no gain shown in this table"
        )


@dataclass(frozen=True)
class Table:
    """The rows of a table that are of one method, and the row of its baseline if it has one."""

    page: str
    heading: str
    head: str
    line: str
    base: str
    rows: list[str]

    def __str__(self) -> str:
        base = [self.base] if self.base else []
        return "\n".join([self.head, self.line, *base, *self.rows[:_MOST_ROWS]])


def figure(family: str, name: str, pages: dict[str, tuple[str, str]]) -> Figure | None:
    """The figure of a method that says most, of all tables that have a row of it.

    Args:
        family: The family of the method.
        name: The method.
        pages: As `systems.result_pages` gives them.
    """
    found = list(tables(family, name, pages))
    shown = (_shown(table, columns) for columns in _SHOWN[family] for table in found)
    return next((each for each in shown if each is not None), None)


def tables(family: str, name: str, pages: dict[str, tuple[str, str]]) -> Iterator[Table]:
    """The tables of the pages of a family that have a row of a method, with what it is compared with.

    Args:
        family: The family of the method.
        name: The method.
        pages: As `systems.result_pages` gives them.
    """
    own = re.compile(rf"\| *`?{re.escape(name)}(?:[`:(,]| \(| *\|)|\|[^|]*[`=]{re.escape(name)}[`(,]")
    for stem, text in own_pages(family, pages).items():
        for section in re.split(r"(?m)^#+ ", text)[1:]:
            heading = section.partition("\n")[0]
            for table in re.findall(r"(?m)(?:^\|.*\n)+", section + "\n"):
                head, line, *rows = table.splitlines()
                if kept := [row for row in rows if own.match(row)]:
                    base = [row for row in rows if _label(row) in _BASELINES and row not in kept]
                    yield Table(stem, heading, head, line, base[0] if base else "", kept)


def own_pages(family: str, pages: dict[str, tuple[str, str]]) -> dict[str, str]:
    """The texts of the pages where names mean methods of a family, in order of preference."""
    return {stem: pages[stem][1] for stem in _HOMES[family] if stem in pages}


def anchor(heading: str) -> str:
    """What a heading is called in links."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def _shown(table: Table, columns: tuple[str, ...]) -> Figure | None:
    """What a table says in some columns, None where it lacks one of them or the method's cell is empty."""
    head, base = _cells(table.head), _cells(table.base)
    own = max((_cells(row) for row in table.rows), key=_spent(head))
    at = [next((at for at, cell in enumerate(head) if re.search(each, cell)), 0) for each in columns]
    if not all(at) or not re.match(r"[-+−]?\d", own[at[0]]):
        return None
    if columns == _TRAINED:
        kind, value, interval, untrained = (own[head.index(each)] for each in _HELD_OUT)
        return Figure(table.page, table.heading, ((f"{kind}, held out", f"{value} ({interval})", untrained),))
    values = []
    for each in at:
        beside = base[each] if base and base[each] and not re.match(_GAIN, head[each]) else ""
        values.append((_called(head, each), own[each], beside and f"{_label(table.base)} {beside}"))
    return Figure(table.page, table.heading, tuple(value for value in values if value[1]))


def _called(head: list[str], at: int) -> str:
    """A column's name, after its table's where that says what was run."""
    return f"{head[0]}, {head[at]}" if re.search(r"\d", head[0]) else head[at]


def _spent(head: list[str]) -> Callable[[list[str]], float]:
    """What a row of a table with some columns spent; rows that spent as much stay in order."""
    at = next((head.index(each) for each in _AMOUNT if each in head), None)
    return lambda row: float(row[at]) if at is not None and row[at].isdecimal() else 0.0


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.split("|")[1:-1]]


def _label(row: str) -> str:
    return row.split("|")[1].strip(" `")
