"""The page as files: all are served and packed, and reach no other host; what they ask of the server is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import decodery.server.page as page
from decodery.core.errors import DecoderyError, SettingMissing
from decodery.core.method_spec import from_network
from decodery.core.registry import resolve
from serving import serving, tiny_lm

FOLDER = Path(page.__file__).parent
FILES = sorted(path.name for path in FOLDER.iterdir() if path.suffix not in (".py", "") and path.is_file())


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(tiny_lm()) as (_, address):
        yield address


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_served_under_a_strict_policy(url: str, name: str) -> None:
    found = httpx.get(f"{url}/" if name == "index.html" else f"{url}/page/{name}")
    assert found.status_code == 200 and found.content == (FOLDER / name).read_bytes()
    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    assert found.headers["content-type"].startswith(kinds[name.rpartition(".")[2]])
    policy = dict(part.split(" ", 1) for part in found.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"


def test_only_the_files_of_the_page_are_served(url: str) -> None:
    for path in ("/page/", "/page/__init__.py", "/page/../app.py", "/page/%2e%2e/app.py", "/page/index.html"):
        assert httpx.get(url + path).status_code == 404, path


def test_files_name_each_other_and_no_other_host() -> None:
    named = {"index.html"}
    for name in FILES:
        text = (FOLDER / name).read_text(encoding="utf-8")
        named |= set(re.findall(r'(?:href|src)="page/([^"]+)"', text)) | set(re.findall(r'from "\./([^"]+)"', text))
        assert set(re.findall(r"https?://[\w.]+", text)) <= {"http://www.w3.org"}, name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser", text), name
        # The key is in none of the files that keep something.
        assert name == "history.js" or not re.search(r"localStorage|sessionStorage|indexedDB|cookie", text), name
    assert named == set(FILES)


def test_methods_are_offered_that_untrusted_requests_may_name(url: str) -> None:
    found = httpx.get(f"{url}/decodery/methods").json()["data"]
    names = {(method["family"], method["name"]) for method in found}
    assert {
        ("drafter", "auto"),
        ("drafter", "prompt-lookup"),
        ("acceptance-rule", "coupled"),
        ("draft-length", "fixed"),
    } <= names
    assert not names & {("drafter", "rest"), ("acceptance-rule", "judge"), ("logits-source", "partial-attention")}
    for family, name in sorted(names):
        assert _named(family, name), f"{family} {name}"
    (lookup,) = (method for method in found if method["name"] == "prompt-lookup")
    assert lookup["lossless"] and lookup["settings"]["length"] > 0 and lookup["summary"].startswith("Copies")


def _named(family: str, name: str) -> bool:
    """Whether a stranger's request can name a method: as it is, or with the settings it asks for."""
    try:
        with from_network():
            resolve(family, name)
    except SettingMissing:
        return True
    except DecoderyError:
        return False
    return True
