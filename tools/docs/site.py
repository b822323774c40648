"""Builds the documentation site: the pages of `docs/`, and one for each method, searchable, with no dead links.

`python tools/docs/site.py OUT` writes it to the folder OUT, site/ by default, and fails where a link leads nowhere.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import sys
import tempfile
from pathlib import Path

import click
from figures import ROOT
from generate import FAMILIES, Method, registry, setting
from sphinx.cmd.build import build_main

from decodery.core.docstrings import field_texts, split

DOCS = ROOT / "docs"
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_PARTS = {
    "Tutorials": ["tutorial"],
    "How-to guides": [
        *("your-own-model", "choosing-a-drafter", "benchmark-your-prompts", "structured-output", "serving"),
        *("use-with-transformers", "training", "compressing-models", "sandbox", "extending"),
    ],
    "Explanation": [
        *(
            "design",
            "guarantees",
            "speculative-decoding",
            "draft-trees",
            "acceptance-rules",
            "draft-length",
            "sampling",
        ),
        *("contrastive-and-guided-decoding", "inference-time-search", "prompted-search", "scorers"),
        *("suggestions", "steganography", "diffusion-language-models", "simultaneous-decoding", "kv-cache-compression"),
        *("activations-and-monitors", "model-internals", "gpu"),
        "out-of-scope",
    ],
    "Reference": ["python-api", "cli", "supported-models", "benchmark", "glossary"],
    "Results": ["results/index"],
}
"""The navigation. Pages that it does not name come under its last heading."""
_SETTINGS = {
    "project": "decodery",
    "html_theme": "furo",
    "extensions": "myst_parser",
    "myst_heading_anchors": "5",
    "html_title": "decodery",
    "html_show_copyright": "0",
    # Tables of generated pages have cells of headings alone.
    "suppress_warnings": "myst.header",
    "highlight_language": "text",
}


@click.command()
@click.argument("out", type=click.Path(path_type=Path), default=ROOT / "site")
def main(out: Path) -> None:
    """Write the site to OUT."""
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "source"
        write_pages(source)
        settings = [part for key, value in _SETTINGS.items() for part in ("-D", f"{key}={value}")]
        failed = build_main(["-b", "html", "-C", "-W", "--keep-going", "-q", *settings, str(source), f"{name}/out"])
        if failed:
            sys.exit(failed)
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(f"{name}/out", out, ignore=shutil.ignore_patterns(".doctrees", ".buildinfo"))
    click.echo(f"wrote {out}")


def write_pages(source: Path) -> None:
    """All pages, as the site has them, in a folder of their own."""
    shutil.copytree(DOCS, source)
    for page in source.rglob("*.md"):
        text = page.read_text("utf-8")
        page.write_text(without_outside_links(text, DOCS / page.relative_to(source).parent), "utf-8")
    results = sorted(page.stem for page in (DOCS / "results").glob("*.md") if page.stem != "index")
    add_contents(source / "results" / "index.md", "", results)
    families = []
    for family in registry.FAMILIES:
        if methods := registry.methods(family):
            folder = source / "methods" / family
            folder.mkdir(parents=True)
            for method in methods:
                (folder / f"{method.name}.md").write_text(method_page(family, method), "utf-8")
            title, question = FAMILIES[family]
            (folder / "index.md").write_text(f"# {title.capitalize()}\n\nThey say {question}.\n", "utf-8")
            add_contents(folder / "index.md", "", [method.name for method in methods])
            families.append(f"methods/{family}/index")
    known = {page for part in _PARTS.values() for page in part} | {"index", "methods"}
    # What has no page here may be one of the site's own, such as its search, and would pass for a link.
    if gone := sorted(page for page in known if not (DOCS / f"{page}.md").exists()):
        raise click.ClickException(f"the navigation names {', '.join(gone)}, which no page is")
    last = list(_PARTS)[-1]
    found = sorted(page.stem for page in DOCS.glob("*.md") if page.stem not in known)
    for heading, pages in _PARTS.items():
        add_contents(source / "index.md", heading, [*pages, *(found if heading == last else [])])
    add_contents(source / "index.md", "Methods", ["methods", *families])


def add_contents(page: Path, heading: str, pages: list[str]) -> None:
    """Let the pages stand in the navigation below `page`, which does not list them a second time."""
    caption = f":caption: {heading}\n" if heading else ""
    entries = "\n".join(pages)
    with page.open("a", encoding="utf-8") as file:
        file.write(f"\n```{{toctree}}\n:hidden:\n{caption}\n{entries}\n```\n")


def without_outside_links(text: str, folder: Path) -> str:
    """A page's text in which links to files of the repository that are no pages, such as sources, are text."""

    def kept(link: re.Match[str]) -> str:
        target = link[2]
        outside = "://" not in target and DOCS not in (folder / target).resolve().parents
        return link[1] if outside else link[0]

    return _LINK.sub(kept, text)


def method_page(family: str, method: Method) -> str:
    """What a method says of itself."""
    facts = {
        "Family": f"{FAMILIES[family][0]}: {FAMILIES[family][1]}",
        "Guarantee": method.guarantee,
        "Needs": ", ".join(method.requirements),
        "Gives": ", ".join(method.provides),
        "Source": method.paper,
    }
    fields = [field for field in dataclasses.fields(method.cls) if field.init]
    texts = field_texts(method.cls)
    lines = [f"- `{setting(field)}`" + (f": {texts[field.name]}" if field.name in texts else "") for field in fields]
    settings = "\n".join(lines) or "None."
    text, sections = split(method.cls.__doc__)
    if "References" in sections:
        facts["References"] = " ".join(sections["References"].split())
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items() if value)
    return f"# {method.name}\n\n{text}\n\n| | |\n|---|---|\n{rows}\n\n## Settings\n\n{settings}\n"


if __name__ == "__main__":
    main()
