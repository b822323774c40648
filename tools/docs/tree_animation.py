"""Draws the animation of the front page of the site: the draft trees of the first steps of one real text.

`python tools/docs/tree_animation.py` decodes the text with the embedded model and writes `docs/draft-trees.svg`.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

import decodery as dc
from decodery.core.trace import RecordedTree, Step
from decodery.llm.tree_picture import draft

PROMPT = "Write a short poem in which every line begins with 'The sea'."
DRAFTER, STEPS, SECONDS = "token-recycling:nodes=9", 5, 4.0
WIDTH, LEFT, TOP, LINE, LETTERS, LINES = 480, 12, 34, 20, 52, 3
_OUTSIDE = re.compile(r"<svg[^>]*height=\"(\d+)\"[^>]*>(<title>.*?</title>)?|</svg>")
_STYLE = """
svg{{font:14px ui-monospace,monospace}}
.f{{opacity:0;animation:{total}s step-end infinite}}
.d rect[fill="#2a9d4a"]{{fill:none}} .d text{{fill:#666}}
.d [fill="#c4702b"],.d [fill="#c4702b"]+text,.d path:last-of-type{{display:none}}
.c{{font:bold 14px system-ui,sans-serif}}
{frames}
@media (prefers-reduced-motion:reduce){{.f{{animation:none}} .last{{opacity:1}}}}
"""


def main() -> None:
    """Decode and draw."""
    lm = dc.load("smollm2")
    out = lm.generate(PROMPT, drafter=DRAFTER, max_new_tokens=90, max_draft_tokens=9, return_draft_trees=True)
    path = Path(__file__).parents[2] / "docs" / "draft-trees.svg"
    path.write_text(animation(out.trace.decoding, out.tokens, lm.tokenizer.decode), encoding="utf-8")
    print(f"wrote {path}: {out.text!r}")


def animation(steps: Sequence[Step], tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
    """The steps one after the other: what was drafted, then what the pass accepted of it.

    Args:
        steps: Of the trace of a text that kept its trees.
        tokens: All of the text.
        decode: Ids to text.
    """
    end, shown = len(tokens) - sum(step.emitted for step in steps), list[tuple[RecordedTree, int, int]]()
    for step in steps:
        begin, end = end, end + step.emitted
        if step.tree is not None and step.nodes:
            shown.append((step.tree, begin, end))
    best = max(
        range(len(shown) - STEPS + 1), key=lambda first: sum(end - begin for _, begin, end in shown[first:][:STEPS])
    )
    parts, frames, tall = list[str](), list[str](), 0
    for number, (tree, begin, end) in enumerate(shown[best : best + STEPS]):
        height, picture = _bare(draft(tree, decode).svg)
        tall = max(tall, height)
        drafted, new = len(tree.tokens) - 1, end - begin
        for half, (kind, shown_to, caption) in enumerate(
            (
                ("d", begin, f"Propose: {drafted} tokens drafted"),
                ("v", end, f"Accept: {new} tokens from one forward pass"),
            )
        ):
            name, last = f"s{number}{kind}", " last" if (number, half) == (STEPS - 1, 1) else ""
            frames.append(_frame(name, (number + half * 0.4) / STEPS, (number + 0.4 + half * 0.6) / STEPS))
            place = f"translate({LEFT} {TOP + LINES * LINE + 14})"
            written = _text(decode(tokens[:begin]), decode(tokens[begin:shown_to]))
            parts.append(
                f'<g class="f {kind}{last}" style="animation-name:{name}">{written}'
                f'<text class="c" x="{LEFT}" y="22">{caption}</text><g transform="{place}">{picture}</g></g>'
            )
    style = _STYLE.format(total=STEPS * SECONDS, frames="\n".join(frames))
    tall += TOP + LINES * LINE + 24
    title = "Draft trees of one text: green tokens were drafted and accepted, orange ones follow from the model, "
    size = f'width="{WIDTH}" height="{tall}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {WIDTH} {tall}" color="#222">'
        f"<title>{escape(title)}grey ones failed</title><style>{style}</style>"
        f'<rect {size} rx="8" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _bare(svg: str) -> tuple[int, str]:
    """Height and content of a picture."""
    found = _OUTSIDE.match(svg)
    assert found is not None
    return int(found[1]), f'<g font-size="12">{_OUTSIDE.sub("", svg)}</g>'


def _frame(name: str, begin: float, end: float) -> str:
    """Rules that show a group in a part of the time alone."""
    before = "0%{opacity:0}" if begin else ""
    after = f"{end:.2%}{{opacity:0}}" if end < 1 else ""
    return f"@keyframes {name}{{{before}{begin:.2%}{{opacity:1}}{after}100%{{opacity:{int(end >= 1)}}}}}"


def _text(before: str, new: str) -> str:
    """The last lines of the text, what is new in green."""
    lines, parts, at = textwrap.wrap(before + new, LETTERS, drop_whitespace=False), list[str](), 0
    for number, line in enumerate(lines):
        blank = len(line) - len(line.lstrip())
        old = max(blank, min(len(line), len(before) - at))
        at += len(line)
        if (row := number - max(0, len(lines) - LINES)) >= 0:
            spans = f'{escape(line[blank:old])}<tspan fill="#1a7f37">{escape(line[old:])}</tspan>'
            parts.append(
                f'<text x="{LEFT}" y="{TOP + LINE * row + 12}" fill="#222" xml:space="preserve">{spans}</text>'
            )
    return "".join(parts)


if __name__ == "__main__":
    main()
