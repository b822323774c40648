"""The page's first view: what is shown of a text while it is written, and what people set for it."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from browsing import REPEATED, STORY, expect, fill, lookup, running, send
from serving import TEMPLATE, serving, tiny_lm, user, wait_until


def send_lookup(page: Any) -> None:
    fill(page, REPEATED, drafter="prompt-lookup", max_tokens=40)
    page.get_by_label("Settings of the drafter").first.fill("length=4")
    page.locator("#prompt").press("Enter")
    expect(page.locator("#write .turn footer").last).to_contain_text("ended by")


def test_tokens_are_coloured_by_how_they_came(page: Any, url: str) -> None:
    choice, steps = lookup(url)
    send_lookup(page)
    spans = page.locator("#write .text span")
    assert "".join(spans.all_text_contents()) == choice["message"]["content"]
    tokens = [token["how"] for step in steps for token in step["tokens"] if token["text"] != "<|im_end|>"]
    assert [span.get_attribute("class") for span in spans.all()] == tokens
    assert {"drafted", "chosen"} <= set(tokens)
    colours = {spans.nth(tokens.index(how)).evaluate("node => getComputedStyle(node).boxShadow") for how in set(tokens)}
    assert len(colours) == 2


def test_the_draft_of_every_pass_is_drawn(page: Any, url: str) -> None:
    _, steps = lookup(url)
    send_lookup(page)
    where, nodes = page.locator(".figures output"), page.locator(".tree .node")
    expect(where).to_have_text(f"pass {len(steps)} of {len(steps)}")
    slider = page.get_by_label("Pass to look at")
    slider.focus()
    seen = set()
    for number in range(len(steps), 0, -1):
        expect(where).to_have_text(f"pass {number} of {len(steps)}")
        tree, told = steps[number - 1]["tree"], steps[number - 1]["tokens"]
        chosen = [token for token in told if token["how"] == "chosen"]
        expect(nodes).to_have_count(len(tree["tokens"]) + len(chosen))
        expect(page.locator(".tree .node.drafted")).to_have_count(len(tree["accepted"]))
        expect(page.locator(".tree .node.lost")).to_have_count(len(tree["tokens"]) - 1 - len(tree["accepted"]))
        seen.add((bool(tree["accepted"]), len(tree["tokens"]) - 1 > len(tree["accepted"])))
        page.keyboard.press("ArrowLeft")
    assert len(seen) > 1, "drafts of this text should fare in different ways"
    page.locator("#write .text span").last.click()
    last = page.locator("#write .text span").last.get_attribute("data-pass")
    expect(where).to_have_text(f"pass {int(last) + 1} of {len(steps)}")
    assert "lit" in page.locator("#write .text span").last.get_attribute("class")


def test_figures_and_plots_grow_while_a_text_is_written(page: Any) -> None:
    fill(page, STORY, max_tokens=400)
    page.keyboard.press("Enter")
    expect(page.locator("#write .text span").nth(20)).to_be_visible()
    expect(page.get_by_role("button", name="Stop").first).to_be_visible()
    figures = page.locator(".figures")
    values = figures.locator(".numbers dd")
    for index in range(2):
        assert float(values.nth(index).text_content()) > 0
    for plot, kind in ((0, "chosen"), (1, "ink"), (2, "score")):
        assert figures.locator(".chart .plot svg").nth(plot).locator(f".{kind}").count()
    shares = [int(text.split()[0]) for text in figures.locator(".legend .value").all_text_contents()]
    assert len(shares) == 4 and 97 <= sum(shares) <= 103
    page.keyboard.press("Escape")
    expect(page.locator("#write .turn footer").last).to_contain_text("stopped")


@pytest.mark.parametrize("by", ["button", "Escape", "New"])
def test_stop_ends_the_text_on_the_server(page: Any, url: str, by: str) -> None:
    fill(page, STORY, max_tokens=4000)
    page.keyboard.press("Enter")
    expect(page.locator("#write .text span").nth(5)).to_be_visible()
    assert running(url) >= 1
    if by == "Escape":
        page.keyboard.press("Escape")
    else:
        page.locator("#write").get_by_role("button", name="New" if by == "New" else "Stop").click()
    wait_until(lambda: running(url) == 0)
    if by == "New":
        expect(page.locator("#write .turn")).to_have_count(0)
    else:
        expect(page.locator("#write .turn footer")).to_contain_text("stopped")
        assert page.locator("#write .text").text_content()
    expect(page.locator("#write").get_by_role("button", name="Send")).to_be_visible()


def test_a_conversation_goes_on(page: Any, url: str) -> None:
    send(page, "My name is Ada.", max_tokens=12, temperature=0)
    with page.expect_request("**/v1/chat/completions") as asked:
        send(page, "What is my name?")
    said = [message["content"] for message in asked.value.post_data_json["messages"]]
    assert said[0] == "My name is Ada." and said[2] == "What is my name?"
    assert said[1] == page.locator("#write .text").first.text_content()


SCHEMA = {
    "type": "object",
    "properties": {
        "rank": {"enum": ['the "captain", (retired)', "mate = second"]},
        "ships": {"type": "integer", "minimum": 1, "maximum": 9},
        "mark": {"const": "<img src=x onerror=alert(1)>"},
    },
    "required": ["rank", "ships", "mark"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("kind", ["Chat", "Completion"])
def test_a_schema_holds_and_its_text_is_no_markup(page: Any, kind: str) -> None:
    page.locator("#write .switch label", has_text=kind).click()
    page.locator("#write [name=response_format]").select_option("json_schema")
    page.get_by_label("JSON schema").fill(json.dumps(SCHEMA))
    send(page, "A sailor <b>as JSON</b>:", max_tokens=120, temperature=1)
    written = json.loads(page.locator("#write .text").text_content())
    jsonschema.validate(written, SCHEMA)
    assert page.locator("img, #write b").count() == 0
    assert page.locator("#write .said").text_content() == "A sailor <b>as JSON</b>:"


def test_errors_stand_where_they_were_made(page: Any, url: str) -> None:
    prompt = page.locator("#prompt")
    page.locator("#write [name=response_format]").select_option("json_schema")
    schema = page.get_by_label("JSON schema")
    schema.fill('{"type": ')
    prompt.fill("Hi")
    prompt.press("Enter")
    expect(page.locator("#write .field", has=schema).locator(".error")).to_contain_text("the schema is no JSON")
    page.locator("#write [name=response_format]").select_option("")
    page.locator("#write [name=temperature]").fill("7")
    prompt.press("Enter")
    expect(page.locator("#write .field", has=page.locator("[name=temperature]")).locator(".error")).to_be_visible()
    page.locator("#write [name=temperature]").fill("0.75")
    page.locator("#write [name=drafter]").select_option("prompt-lookup")
    page.get_by_label("Settings of the drafter").first.fill("height=3")
    prompt.press("Enter")
    expect(page.locator("#write-error")).to_contain_text("prompt-lookup has no setting 'height'")
    expect(page.locator("#write .turn")).to_have_count(0)
    expect(prompt).to_have_value("Hi")
    page.get_by_label("Settings of the drafter").first.fill("")
    page.locator("#write [name=max_tokens]").fill("900000")
    prompt.press("Enter")
    about = page.locator("#write .field", has=page.locator("[name=max_tokens]")).locator(".error")
    expect(about).to_contain_text("context length is 8192 tokens")
    page.locator("#write [name=max_tokens]").fill("4")
    prompt.press("Enter")
    expect(page.locator("#write .turn footer")).to_contain_text("ended by")
    expect(about).to_be_hidden()


PAINTED = """async (chunks) => {
  const { Run } = await import("/page/run.js");
  const { Painter } = await import("/page/text.js");
  const run = new Run("", {}, () => {});
  const painter = new Painter();
  const seen = [];
  for (const [content, steps, over] of chunks) {
    run.take({ choices: [{ delta: { content }, decodery: { steps } }] });
    if (over) run.state = "ended";
    painter.paint(run);
    seen.push(painter.node.textContent);
  }
  return [seen, [...painter.node.querySelectorAll("span")].map((span) => [span.textContent, span.className])];
}"""


def _step(*tokens: tuple[str, str]) -> dict[str, Any]:
    seconds = dict.fromkeys(("propose", "score", "choose", "commit"), 0.25)
    tree = {"tokens": [1], "texts": ["x"], "parents": [-1], "accepted": []}
    return {"prefill": False, "seconds": seconds, "tree": tree, "tokens": [{"text": a, "how": b} for a, b in tokens]}


def test_tokens_that_are_no_text_of_their_own(page: Any) -> None:
    # Characters in several tokens, marks that are never said, and what is held back as a stop string may begin in it.
    expect(page.locator("#prompt")).to_be_visible()
    chunks = [
        ["", [_step(("bytes:\\xf0\\x9f", "chosen"))], False],
        ["😀a", [_step(("bytes:\\x98\\x80", "drafted"), ("a", "chosen"))], False],
        ["", [_step((" ST", "drafted"))], False],
        [" STay", [_step(("<|mark|>", "chosen")), _step(("ay", "drafted"))], False],
        ["<b>", [_step(("<b", "chosen"), (">", "drafted"), (" END", "chosen"))], True],
    ]
    seen, spans = page.evaluate(PAINTED, chunks)
    assert seen == ["", "😀a", "😀a", "😀a STay", "😀a STay<b>"]
    expected = [
        ("😀", "drafted"),
        ("a", "chosen"),
        (" ST", "drafted"),
        ("ay", "drafted"),
        ("<b", "chosen"),
        (">", "drafted"),
    ]
    assert [tuple(span) for span in spans] == expected


def test_reasoning_stands_apart_from_the_answer(open_page: Any) -> None:
    lm = tiny_lm(TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}{# </think> #}"))
    expected = lm.chat(user("x"), thinking_token_budget=8, max_new_tokens=30, drafter=None)
    with serving(lm) as (_, address):
        page = open_page(address)
        page.locator("#write details:has([name=thinking_token_budget]) > summary").last.click()
        fill(page, "x", max_tokens=30, temperature=0, seed=0, drafter="none", thinking_token_budget=8)
        page.locator("#prompt").press("Enter")
        expect(page.locator("#write .turn footer").last).to_contain_text("ended by")
        reasoning = page.locator("#write .reasoning")
        expect(reasoning.locator("summary")).to_be_visible()
        assert reasoning.locator("p").text_content() == expected.reasoning
        assert not reasoning.evaluate("node => node.open")
        assert "think" not in page.locator("#write .text").last.text_content()
