"""Pictures of drafts: every token stands once, where its path says, and any text can be shown."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from decodery.core.trace import RecordedTree
from decodery.llm.tree_picture import draft

SVG = "{http://www.w3.org/2000/svg}"
TREE = RecordedTree(tokens=[5, 7, 8, 9, 7, 6], parents=[-1, 0, 0, 1, 2, 3], path=[2, 4], emitted=[8, 7, 3])


def words(ids: list[int]) -> str:
    return "".join({3: " <&>", 5: "\n", 6: "", 8: 'a"\x00b', 9: "x" * 40}.get(token, f" t{token}") for token in ids)


def test_what_became_text_runs_along_the_top(tmp_path: Path) -> None:
    picture = draft(TREE, words)
    root = ElementTree.fromstring(picture.svg)
    labels = {each.text: (float(each.get("x", 0)), float(each.get("y", 0))) for each in root.iter(f"{SVG}text")}
    assert list(labels) == ["⏎", "·t7", 'a"b', "x" * 15 + "…", "∅", "·<&>"]  # the two t7 are one key
    top = min(y for _, y in labels.values())
    along = sorted((x, label) for label, (x, y) in labels.items() if y == top)
    assert [label for _, label in along] == ["⏎", 'a"b', "·t7", "·<&>"]
    fills = re.findall(r'rect [^>]*fill="([^"]*)"', picture.svg)
    assert len(fills) == 7 and len(set(fills)) == 4
    assert len(list(root.iter(f"{SVG}path"))) == 6
    assert root.findtext(f"{SVG}title") == "5 tokens drafted, 2 accepted, 3 new"
    picture.save(tmp_path / "draft.svg")
    assert (tmp_path / "draft.svg").read_text("utf-8") == picture._repr_svg_()


def test_a_step_without_a_draft_shows_what_was_chosen() -> None:
    root = ElementTree.fromstring(draft(RecordedTree([4], [-1], [], [3]), words).svg)
    assert [each.text for each in root.iter(f"{SVG}text")] == ["·t4", "·<&>"]
