"""Drafts as pictures: the tree of a step, what of it became text, and what the model chose after it.

out = lm.generate("Count to 20.", return_draft_trees=True)
decodery.llm.tree_picture.draft(out.trace.decoding[3].tree, lm.tokenizer.decode)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from decodery.core.trace import RecordedTree

_ROW, _GAP, _CHARACTER, _LONGEST = 24, 16, 7.2, 16
_FILLS = {"root": "#8884", "accepted": "#2a9d4a", "chosen": "#c4702b", "lost": "none"}


@dataclass(frozen=True)
class Picture:
    """A picture that notebooks show as it is.

    Attributes:
        svg: Its text.
    """

    svg: str = field(repr=False)

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str | Path) -> None:
        """Write it as a file."""
        Path(path).write_text(self.svg, encoding="utf-8")


@dataclass
class _Node:
    label: str
    kind: str
    depth: int
    row: int = 0

    @property
    def width(self) -> float:
        return len(self.label) * _CHARACTER + 12


def draft(tree: RecordedTree, decode: Callable[[Sequence[int]], str]) -> Picture:
    """The draft tree of a step, the last token on the left and the accepted path along the top.

    Green tokens were drafted and accepted, the orange one is the model's own after them, those in outline failed.

    Args:
        tree: Of a step of a trace, where the request kept them (`return_draft_trees=True`).
        decode: Ids to text, such as `lm.tokenizer.decode`.
    """
    tokens = [*tree.tokens, tree.emitted[-1]]
    parents = [*tree.parents, tree.path[-1] if tree.path else 0]
    kept = set(tree.path)
    nodes: list[_Node] = []
    for number, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        kind = "accepted" if number in kept else "lost"
        if number in (0, len(tokens) - 1):
            kind = "chosen" if number else "root"
        depth = nodes[parent].depth + 1 if number else 0
        nodes.append(_Node(_visible(decode([token])), kind, depth))
    _in_rows(nodes, parents)
    levels = range(max(node.depth for node in nodes) + 1)
    widths = [max(node.width for node in nodes if node.depth == level) for level in levels]
    lefts = [sum(widths[:depth]) + _GAP * depth + 1 for depth in range(len(widths))]
    height = (max(node.row for node in nodes) + 1) * _ROW + 4
    parts = [_edge(nodes[parent], node, lefts) for node, parent in zip(nodes[1:], parents[1:], strict=True)]
    parts += [_box(node, lefts[node.depth]) for node in nodes]
    width = lefts[-1] + widths[-1] + 1
    return Picture(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}" font-family="ui-monospace, monospace" font-size="12">'
        f"<title>{_told(tree)}</title>{''.join(parts)}</svg>"
    )


def _in_rows(nodes: list[_Node], parents: list[int]) -> None:
    """Give every node its row: the first child stands beside its parent, the others below all of the one before."""
    below: dict[int, list[int]] = {}
    for number, parent in enumerate(parents):
        below.setdefault(parent, []).append(number)
    order = ("accepted", "chosen", "lost")
    row, waiting = -1, [(0, False)]
    while waiting:
        number, beside = waiting.pop()
        row += not beside
        nodes[number].row = row
        children = sorted(below.get(number, []), key=lambda each: (order.index(nodes[each].kind), each))
        waiting += [(child, place == 0) for place, child in enumerate(children)][::-1]


def _edge(parent: _Node, node: _Node, lefts: list[float]) -> str:
    x, y = lefts[parent.depth] + parent.width, parent.row * _ROW + _ROW / 2 + 2
    to, at = lefts[node.depth], node.row * _ROW + _ROW / 2 + 2
    middle = to - _GAP / 2
    faint = ' stroke-opacity="0.4"' if node.kind == "lost" else ""
    return f'<path d="M{x:.1f} {y}H{middle:.1f}V{at}H{to:.1f}" fill="none" stroke="#888"{faint}/>'


def _box(node: _Node, left: float) -> str:
    top, dark = node.row * _ROW + 4, node.kind in ("accepted", "chosen")
    colour = "#fff" if dark else "#888" if node.kind == "lost" else "currentColor"
    return (
        f'<rect x="{left:.1f}" y="{top}" width="{node.width:.1f}" height="{_ROW - 4}" rx="4" '
        f'fill="{_FILLS[node.kind]}" stroke="#888" stroke-opacity="0.6"/>'
        f'<text x="{left + 6:.1f}" y="{top + 14}" fill="{colour}" xml:space="preserve">{escape(node.label)}</text>'
    )


def _visible(text: str) -> str:
    """A token as it can be seen, spaces included."""
    shown = "".join(
        "⏎" if sign == "\n" else "·" if sign == " " else sign for sign in text if sign == "\n" or sign.isprintable()
    )
    return shown[: _LONGEST - 1] + "…" if len(shown) > _LONGEST else shown or "∅"


def _told(tree: RecordedTree) -> str:
    return f"{len(tree.tokens) - 1} tokens drafted, {len(tree.path)} accepted, {len(tree.emitted)} new"
