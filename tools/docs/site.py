"""Builds the documentation site: the pages of `docs/`, and one for each method, searchable, with no dead links.

`python tools/docs/site.py OUT` writes it to the folder OUT, site/ by default, and fails where a link leads nowhere.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import click
from figures import ROOT
from generate import FAMILIES, Method, registry
from method_pages import method_page
from navigation import PARTS
from sphinx.cmd.build import build_main
from systems import result_files, result_pages

from decodery.llm.readiness import readiness
from decodery.testing import tiny_transformer

DOCS = ROOT / "docs"
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_SETTINGS = {
    "project": "decodery",
    "html_theme": "furo",
    "extensions": "myst_parser",
    "myst_heading_anchors": "5",
    "html_title": f"decodery {version('decodery')}",
    "html_show_copyright": "0",
    # Tables of generated pages have cells of headings alone.
    "suppress_warnings": "myst.header",
    "highlight_language": "text",
    "html_static_path": "_static",
    "html_css_files": "site.css",
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
    (source / "_static").mkdir()
    shutil.copy(Path(__file__).parent / "site.css", source / "_static")
    for page in source.rglob("*.md"):
        text = page.read_text("utf-8")
        page.write_text(without_outside_links(text, DOCS / page.relative_to(source).parent), "utf-8")
    add_landing(source / "index.md")
    link_methods(source / "published-systems.md")
    results = sorted(page.stem for page in (DOCS / "results").glob("*.md") if page.stem != "index")
    add_contents(source / "results" / "index.md", "", results)
    missing = readiness(
        [each for family in registry.FAMILIES for each in registry.methods(family)], tiny_transformer(0)
    )
    pages, files = result_pages(), result_files()
    families = []
    for family in registry.FAMILIES:
        if methods := registry.methods(family):
            folder = source / "methods" / family
            folder.mkdir(parents=True)
            for method in methods:
                page = method_page(family, method, missing.get((family, method.name), ""), pages, files)
                (folder / f"{method.name}.md").write_text(page, "utf-8")
            name, task = FAMILIES[family]
            title = name[0].upper() + name[1:]
            (folder / "index.md").write_text(f"# {title}\n\n{title} {task}.\n\n{_overview(methods)}\n", "utf-8")
            add_contents(folder / "index.md", "", [method.name for method in methods])
            families.append(f"methods/{family}/index")
    known = {page for part in PARTS.values() for page in part} | {"index", "methods"}
    # What has no page here may be one of the site's own, such as its search, and would pass for a link.
    if gone := sorted(page for page in known if not (DOCS / f"{page}.md").exists()):
        raise click.ClickException(f"the navigation names {', '.join(gone)}, which no page is")
    last = list(PARTS)[-1]
    found = sorted(page.stem for page in DOCS.glob("*.md") if page.stem not in known)
    for heading, pages in PARTS.items():
        add_contents(source / "index.md", heading, [*pages, *(found if heading == last else [])])
    add_contents(source / "index.md", "Methods", ["methods", *families])


def add_landing(page: Path) -> None:
    """Show draft trees and README's table of speeds on the front page, before its lists of pages."""
    text, readme = page.read_text("utf-8"), (ROOT / "README.md").read_text("utf-8")
    head, mark, rest = text.partition("\n## ")
    speed = readme[readme.index("## How fast it is") :]
    speed = speed[: speed.index("\n## ")].replace("](docs/", "](")
    page.write_text(
        f"{head}\n![Draft trees of one text, step by step](draft-trees.svg)\n\n{speed}\n{mark}{rest}", "utf-8"
    )


def link_methods(page: Path) -> None:
    """Let names of methods in a page be links to their pages."""
    homes = {method.name: family for family in reversed(registry.FAMILIES) for method in registry.methods(family)}

    def linked(name: re.Match[str]) -> str:
        return f"[{name[0]}](methods/{homes[name[1]]}/{name[1]}.md)" if name[1] in homes else name[0]

    page.write_text(re.sub(r"`([a-z0-9-]+)`", linked, page.read_text("utf-8")), "utf-8")


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


def _overview(methods: list[Method]) -> str:
    """One row per method, with a link to its page."""
    rows = (f"| [{each.name}]({each.name}.md) | {each.summary.replace('|', chr(92) + '|')} |" for each in methods)
    return "\n".join(["| method | what it does |", "|---|---|", *rows])


if __name__ == "__main__":
    main()
