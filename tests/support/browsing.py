"""What tests of the page do in it, and what the server answers to the same by itself."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from serving import user

expect = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install 'decodery[browser]'").expect
REPEATED = "Repeat: one two three four five six seven, one two three four five six seven, one two three"
STORY = "Write a very long story about a lighthouse."


def fill(page: Any, prompt: str, **settings: Any) -> None:
    """The first view's prompt and settings."""
    for name, value in settings.items():
        control = page.locator(f"#write [name={name}]")
        if control.evaluate("node => node.tagName") == "SELECT":
            control.select_option(value)
        else:
            control.fill(str(value))
    page.locator("#prompt").fill(prompt)


def send(page: Any, prompt: str, **settings: Any) -> None:
    """Write something in the first view, and wait until it is over."""
    fill(page, prompt, **settings)
    page.keyboard.press("Enter")
    expect(page.locator("#write .turn footer").last).to_contain_text("ended by")


def running(url: str) -> int:
    return int(httpx.get(f"{url}/decodery/load").json()["running"])


def lookup(url: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the server answers to REPEATED under a drafter that drafts the same whatever the machine does."""
    asked = {"messages": user(REPEATED), "max_tokens": 40, "temperature": 0.7, "seed": 7}
    asked |= {"decodery": {"drafter": "prompt-lookup:length=4", "trace": "steps"}}
    (choice,) = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=60).json()["choices"]
    return choice, [step for step in choice["decodery"]["steps"] if step["tree"]]
