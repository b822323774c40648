"""The page's other views, and what holds in all of them: keyboard, width, colours, keys, a server that is gone."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from browsing import REPEATED, STORY, expect, fill, lookup, send
from serving import serving, tiny_lm, user, wait_until

SIZES = [(390, 844), (768, 1024), (1440, 900)]
TEXTS = 3
"""Begun by the load test."""


@pytest.mark.parametrize("order", ["turn", "once"])
def test_both_texts_of_a_comparison_are_equal(page: Any, url: str, order: str) -> None:
    page.get_by_role("link", name="Compare").click()
    compare = page.locator("#compare")
    compare.get_by_label("The prompt of both").fill(REPEATED)
    compare.get_by_label("Max tokens", exact=True).fill("40")
    compare.get_by_label("Order").select_option(order)
    a, b = compare.locator(".side").all()
    b.get_by_label("Drafter", exact=True).select_option("prompt-lookup")
    compare.get_by_role("button", name="Compare").click()
    expect(compare.locator(".verdict")).to_contain_text("Equal")
    texts = [side.locator(".text").text_content() for side in (a, b)]
    assert texts[0] == texts[1] == lookup(url)[0]["message"]["content"]
    passes = [int(side.locator(".numbers dd").nth(1).text_content()) for side in (a, b)]
    assert passes[0] > passes[1]
    assert a.locator(".text .drafted").count() == 0 and b.locator(".text .drafted").count() > 0
    # What is compared a second time has not been seen before.
    b.get_by_label("Drafter", exact=True).select_option("suffix-tree")
    counted = []
    for _ in range(2):
        compare.get_by_role("button", name="Compare").click()
        expect(compare.locator(".verdict")).to_contain_text("Equal")
        counted.append(b.locator(".numbers dd").nth(1).text_content())
    assert counted[0] == counted[1]
    b.get_by_label("Seed").fill("8")
    compare.get_by_role("button", name="Compare").click()
    expect(compare.locator(".verdict")).to_contain_text("Different — from character")
    assert a.locator(".text").text_content() == texts[0] != b.locator(".text").text_content()


def test_one_sides_error_stands_at_that_side(page: Any) -> None:
    page.get_by_role("link", name="Compare").click()
    b = page.locator("#compare .side").nth(1)
    b.get_by_label("Drafter", exact=True).select_option("prompt-lookup")
    b.get_by_label("Settings of the drafter").fill("length=x")
    page.locator("#compare").get_by_label("Max tokens", exact=True).fill("8")
    page.locator("#compare").get_by_role("button", name="Compare").click()
    expect(b.locator("> .error")).to_contain_text("prompt-lookup: length=x is not an integer")
    expect(page.locator("#compare .verdict")).to_have_text("One of the texts failed.")


def test_load_shows_what_the_server_does(page: Any, url: str) -> None:
    page.get_by_role("link", name="Load", exact=True).click()
    tiles = page.locator("#load .tiles > div")

    def value(name: str) -> Any:
        return tiles.filter(has=page.locator("dt", has_text=name)).locator("dd")

    body = {"messages": user(STORY), "max_tokens": 2000, "n": TEXTS, "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60):
        expect(value("running").first).to_have_text(str(TEXTS))
        wait_until(lambda: _number(value("rows per pass").first) >= TEXTS)
        assert _number(value("tokens per second").first) > 0
        expect(page.locator("#pulse")).to_have_text(f"{TEXTS} running")
    expect(value("running").first).to_have_text("0")
    expect(page.locator("#pulse")).to_have_text("idle")
    wait_until(lambda: _number(value("tokens per second").first) == 0)
    told = httpx.get(f"{url}/decodery/load").json()
    assert _number(value("tokens per second").last) == told["tokens"] > 0
    assert _number(value("passes per second").last) == told["passes"] > 0
    assert value("prefix hits").last.text_content() == f"{told['prefix_found']:,} of {told['prefix_asked']:,} tokens"
    assert page.locator("#load .chart svg .line").count() == 6


def _number(place: Any) -> float:
    found = str(place.text_content()).replace(",", "").split()
    return next(float(word) for word in found if word[0].isdigit())


def press_until(page: Any, key: str, reached: str) -> None:
    for _ in range(60):
        page.keyboard.press(key)
        if page.evaluate("text => document.activeElement.matches(text)", reached):
            return
    raise AssertionError(f"{key} never reaches {reached}")


def test_everything_is_done_by_keyboard(page: Any) -> None:
    expect(page.locator("#prompt")).to_be_visible()
    press_until(page, "Tab", ".skip")
    press_until(page, "Tab", "#theme")
    page.keyboard.press("Enter")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    press_until(page, "Tab", "[name=max_tokens]")
    page.keyboard.press("Control+a")
    page.keyboard.type("900")
    press_until(page, "Tab", "#prompt")
    page.keyboard.type(STORY)
    press_until(page, "Tab", "#write button[type=submit]")
    page.keyboard.press("Space")
    expect(page.locator("#write .text span").nth(3)).to_be_visible()
    assert page.evaluate("document.activeElement.textContent") == "Stop"
    page.keyboard.press("Enter")
    expect(page.locator("#write .turn footer")).to_contain_text("stopped")
    assert page.evaluate("document.activeElement.id") == "prompt"
    press_until(page, "Tab", "input[type=range]")
    page.keyboard.press("Home")
    expect(page.locator(".figures output")).to_contain_text("pass 1 of")
    press_until(page, "Shift+Tab", "a[href='#compare']")
    page.keyboard.press("Enter")
    expect(page.locator("#compare")).to_be_visible()
    press_until(page, "Tab", "#compare [name=max_tokens]")
    page.keyboard.press("Control+a")
    page.keyboard.type("8")
    page.keyboard.press("Enter")
    expect(page.locator("#compare .verdict")).to_contain_text("Equal")


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}px")
@pytest.mark.parametrize("colours", ["light", "dark"])
def test_nothing_is_wider_than_the_window(open_page: Any, url: str, size: tuple[int, int], colours: str) -> None:
    width, height = size
    options = {"color_scheme": colours, "reduced_motion": "reduce", "viewport": {"width": width, "height": height}}
    page = open_page(url, **options)

    def fits() -> None:
        assert page.evaluate("document.documentElement.scrollWidth") <= width

    expect(page.locator("#prompt")).to_be_visible()
    fits()
    for details in page.locator("#write details > summary").all():
        if not details.evaluate("node => node.parentElement.open"):
            details.click()
    fits()
    send(page, "Say " + "a" * 300, max_tokens=12)
    fits()
    page.get_by_role("link", name="Compare").click()
    page.locator("#compare").get_by_label("Max tokens", exact=True).fill("12")
    page.locator("#compare").get_by_role("button", name="Compare").click()
    expect(page.locator("#compare .verdict")).to_contain_text("Equal")
    fits()
    page.get_by_role("link", name="Load", exact=True).click()
    expect(page.locator("#load .tiles dd").first).not_to_have_text("–")
    fits()
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, paper[4:-1].split(","))) < 60) == (colours == "dark")


def test_a_key_is_asked_for_and_kept_in_memory_alone(open_page: Any) -> None:
    with serving(tiny_lm(), keys={"open sesame": "ali"}) as (_, address):
        page = open_page(address)
        key = page.get_by_label("This server requires an API key")
        expect(key).to_be_focused()
        key.fill("guess")
        key.press("Enter")
        expect(page.locator("#key-error")).to_have_text("The server does not know this key.")
        key.fill("open sesame")
        key.press("Enter")
        expect(page.locator("#prompt")).to_be_visible()
        expect(key).to_be_hidden()
        send(page, "tides", max_tokens=20)
        stored = "[JSON.stringify(localStorage), sessionStorage.length, document.cookie, document.body.outerHTML]"
        kept = page.evaluate(stored)
        assert kept[1:3] == [0, ""] and "tides" in kept[0] and "sesame" not in kept[0] + kept[3]
        page.reload()
        expect(key).to_be_focused()


def test_a_server_that_goes_away_is_said_so_and_waited_for(open_page: Any) -> None:
    with serving(tiny_lm()) as (_, address):
        page = open_page(address)
        fill(page, "tides", max_tokens=5)
    page.keyboard.press("Enter")
    expect(page.locator("#write-error")).to_contain_text("the server cannot be reached")
    expect(page.locator("#pulse")).to_have_text("no answer")
    expect(page.locator("#prompt")).to_have_value("tides")
    page.get_by_role("link", name="Load", exact=True).click()
    expect(page.locator("#load .error")).to_contain_text("the server cannot be reached")
