"""A real browser, and `decodery serve` in a process of its own on the embedded model."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SLOW = 60_000.0
"""Milliseconds that something may take on a busy machine."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=SLOW)
    with sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        if found is None and not os.path.exists(playwright.chromium.executable_path):
            pytest.skip("no browser: install chromium, or run `playwright install chromium`")
        opened = playwright.chromium.launch(executable_path=found, args=QUIET)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def url(browser: Any) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "decodery", "serve", "--port", "0", "--kv-gib", "0.5"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    assert "is served at http://" in line, line + process.stderr.read()
    yield line.split()[-1].removesuffix("/v1")
    process.terminate()
    process.communicate()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens pages, and afterwards looks whether one of them complained."""
    contexts, complaints = [], []

    def opened(address: str, **options: Any) -> Any:
        contexts.append(browser.new_context(**{"viewport": {"width": 1440, "height": 900}} | options))
        page = contexts[-1].new_page()
        page.set_default_timeout(SLOW)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: complaints.append(said.text) if "Content Security" in said.text else None)
        page.on("request", lambda asked: complaints.append(asked.url) if not asked.url.startswith(address) else None)
        page.goto(address)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not complaints


@pytest.fixture
def page(open_page: Callable[..., Any], url: str) -> Any:
    return open_page(url)
