"""The page's conversations: formatted text, history, other answers, files, and searches that unfold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browsing import expect, fill, send
from serving import serving, tiny_lm


@pytest.fixture(scope="module")
def url(browser: Any) -> Iterator[str]:
    """A tiny model: what it writes is noise, and soon there."""
    with serving(tiny_lm()) as (_, address):
        yield address


RENDERED = """async (text) => {
  const { markdown } = await import("/page/markdown.js");
  const node = document.createElement("div");
  node.append(...markdown(text));
  const shape = (each) => each.nodeType === 3 ? each.data : [each.localName, ...[...each.childNodes].map(shape)];
  const attributes = [...node.querySelectorAll("*")].flatMap((each) => [...each.attributes]);
  return [[...node.childNodes].map(shape), attributes.map((each) => `${each.name}=${each.value}`)];
}"""


def rendered(page: Any, text: str) -> tuple[list[Any], list[str]]:
    shapes, attributes = page.evaluate(RENDERED, text)
    return shapes, attributes


def test_markdown_becomes_elements(page: Any) -> None:
    expect(page.locator("#prompt")).to_be_visible()
    cases: dict[str, list[Any]] = {
        "# A *b*": [["h4", "A ", ["em", "b"]]],
        "a **b** `c*d*`\ne": [["p", "a ", ["strong", "b"], " ", ["code", "c*d*"], ["br"], "e"]],
        "snake_case_name 2 * 3 * 4": [["p", "snake_case_name 2 * 3 * 4"]],
        "- a\n  - b\n- c": [["ul", ["li", "a", ["ul", ["li", "b"]]], ["li", "c"]]],
        "3. x\n4. y": [["ol", ["li", "x"], ["li", "y"]]],
        "> q\n> r": [["blockquote", ["p", "q", ["br"], "r"]]],
        "[x](https://a.b/c)": [["p", ["a", "x"]]],
        "---": [["hr"]],
    }
    for text, shape in cases.items():
        assert rendered(page, text)[0] == shape, text
    ((table,), _) = rendered(page, "| a | b |\n|---|:-:|\n| 1 | x\\|y |")
    head, body = ["thead", ["tr", ["th", "a"], ["th", "b"]]], ["tbody", ["tr", ["td", "1"], ["td", "x|y"]]]
    assert table == ["div", ["table", head, body]]
    # A block that has not ended yet, as it stands while a text is written.
    ((block,), _) = rendered(page, "~~~py\nif a:\n    *b*\n")
    assert block[1][1] == ["span", "py"] and block[2] == ["pre", ["code", "if a:\n    *b*\n"]]


HOSTILE = [
    "<img src=x onerror=alert(1)><script>alert(1)</script>",
    "[x](javascript:alert(1)) [y](data:text/html,x) [z](vbscript:x) [r](/v1/models)",
    "```<img src=x>\n</code></pre><script>\n```",
    '[a](https://a.b"onmouseover="x)',
    "> " * 500 + "deep",
    "- " * 500 + "deep",
    "*" * 3000 + "a" + "**_" * 1000,
    "| a |\n|---|\n" + "|" * 5000,
]


def test_no_text_becomes_html(page: Any) -> None:
    expect(page.locator("#prompt")).to_be_visible()
    allowed = {"p", "br", "a", "em", "strong", "s", "code", "pre", "figure", "figcaption", "span", "button"}
    allowed |= {"ul", "ol", "li", "blockquote", "hr", "div", "table", "thead", "tbody", "tr", "th", "td"}

    def names(shape: Any) -> set[str]:
        return set() if isinstance(shape, str) else {shape[0]}.union(*(names(each) for each in shape[1:]))

    for text in HOSTILE:
        shapes, attributes = rendered(page, text)
        assert set().union(*map(names, shapes)) <= allowed, text
        assert not any(each.startswith(("on", "src=")) for each in attributes), text
        assert all(each.startswith("href=https://") for each in attributes if each.startswith("href=")), text


def test_a_conversation_is_kept_changed_and_exported(page: Any, tmp_path: Path) -> None:
    write = page.locator("#write")
    write.locator("[name=response_format]").select_option("regex")
    page.get_by_label("Regular expression").fill("[a-z]{12}")
    send(page, "My name is Ada.", max_tokens=12, temperature=1)
    first = write.locator(".text").text_content()
    write.get_by_role("button", name="Regenerate").click()
    expect(write.locator("[name=seed]")).to_have_value("8")
    expect(write.locator(".turn footer")).to_contain_text("seed 8")
    again = write.locator(".text").text_content()
    assert again != first and write.locator(".turn").count() == 2
    send(page, "And the second?")
    # The first message again, in other words: what followed it is left out.
    write.get_by_role("button", name="Edit").first.click()
    expect(page.locator("#prompt")).to_have_value("My name is Ada.")
    assert write.locator(".turn").count() == 0
    with page.expect_request("**/v1/chat/completions") as asked:
        send(page, "My name is **Bob**.", max_tokens=8)
    assert [each["content"] for each in asked.value.post_data_json["messages"]] == ["My name is **Bob**."]
    answer = write.locator(".text").text_content()
    page.reload()
    write.locator(".history summary").click()
    entries = write.locator(".kept li")
    expect(entries).to_have_count(1)
    entries.get_by_role("button").first.click()
    expect(write.locator(".said")).to_have_text("My name is **Bob**.")
    assert write.locator(".formatted").text_content() == answer
    with page.expect_request("**/v1/chat/completions") as asked:
        send(page, "Go on.")
    assert [each["content"] for each in asked.value.post_data_json["messages"]][:2] == ["My name is **Bob**.", answer]
    with page.expect_download() as got:
        write.locator(".history").get_by_role("button", name="Export").click()
    got.value.save_as(tmp_path / "kept.json")
    ((kept,),) = [json.loads((tmp_path / "kept.json").read_text(encoding="utf-8"))]
    assert [each["text"] for each in kept["entries"]] == ["My name is **Bob**.", "Go on."]
    write.locator(".history").get_by_role("button", name="Clear").click()
    expect(entries).to_have_text(["nothing yet"])
    page.locator("#prompt").press("ArrowUp")
    expect(page.locator("#prompt")).to_have_value("Go on.")


def test_files_prompts_and_a_search_that_unfolds(page: Any) -> None:
    write = page.locator("#write")
    expect(page.locator("#prompt")).to_be_visible()
    files = [{"name": "a.py", "mimeType": "text/plain", "buffer": b"x = '```'\n"}]
    write.locator("input[type=file]").set_input_files([*files, {**files[0], "name": "b.bin", "buffer": b"\0\1"}])
    expect(page.locator("#write-error")).to_contain_text("b.bin is no text file")
    expect(write.locator(".attached li")).to_have_count(1)
    page.locator("#prompt").fill("What is x?")
    write.get_by_role("button", name="Save prompt").click()
    fill(page, "", max_tokens=24)
    write.get_by_label("Prompt library").select_option(label="What is x?")
    expect(page.locator("#prompt")).to_have_value("What is x?")
    write.locator("details.seldom > summary").click()
    write.locator("[name=search]").select_option("step-beam")
    write.locator("[name=response_format]").select_option("regex")
    page.get_by_label("Regular expression").fill("[a-z]{30}")
    write.get_by_label("Settings of the search").fill("scorer=log-probability,step_tokens=8,n=4,m=2")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.locator("#prompt").press("Enter")
        expect(write.locator(".turn footer").last).to_contain_text("ended by")
    body = asked.value.post_data_json
    assert body["messages"][-1]["content"] == "What is x?\n\na.py:\n````\nx = '```'\n````"
    assert body["decodery"]["search"] == "step-beam:scorer=log-probability,step_tokens=8,n=4,m=2"
    parts = write.locator(".branch-list li")
    assert parts.count() >= 8 and write.locator(".branch-list ul ul li").count() >= 4
    # The marked way ends in the text.
    way = "".join(write.locator(".branch-list .best > span:nth-child(2)").all_text_contents())
    squeezed = "".join(write.locator(".turn .text").text_content().split())
    assert "".join(way.split()) == squeezed


def test_an_answer_follows_a_regular_expression(page: Any) -> None:
    page.locator("#write [name=response_format]").select_option("regex")
    page.get_by_label("Regular expression").fill("[a-c]{3}-[0-9]{2}")
    send(page, "A code:", max_tokens=20, temperature=1)
    text = page.locator("#write .text").text_content()
    assert len(text) == 6 and text[3] == "-" and set(text[:3]) <= set("abc") and text[4:].isdigit()
