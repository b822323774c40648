"""The order of the documentation's pages, and the length of those that a new user reads.

`python tools/docs/navigation.py` prints the words of each page of the main path, and fails if there are too many.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = {
    "Tutorial": ["tutorial"],
    "How-to guides": [
        *(
            "your-own-model",
            "choosing-a-drafter",
            "benchmark-your-prompts",
            "compare-searches",
            "structured-output",
            "serving",
        ),
        *("use-with-transformers", "training", "compressing-models", "sandbox", "extending"),
    ],
    "How it works": ["design", "guarantees", "speculative-decoding", "sampling"],
    "Methods by subject": [
        *("draft-trees", "draft-length", "acceptance-rules", "drafters-in-another-order", "speed"),
        *("contrastive-and-guided-decoding", "inference-time-search", "prompted-search", "scorers", "suggestions"),
        *("diffusion-language-models", "simultaneous-decoding", "kv-cache-compression", "activations-and-monitors"),
        *("model-internals", "steganography", "gpu", "published-systems", "out-of-scope"),
    ],
    "Reference": [
        *("python-api", "extend-api", "cli", "server-reference", "training-reference", "supported-models"),
        *("benchmark", "versions", "glossary"),
    ],
    "Results": ["results/index"],
}
"""The headings of the navigation, with their pages."""
MAIN_PATH = ("Tutorial", "How-to guides", "How it works")
"""The headings whose pages a new user reads; with the front page and the index they are the main path."""
MOST_WORDS = 14_000


def main_path() -> list[Path]:
    """The pages that a new user reads."""
    pages = [ROOT / "docs" / f"{page}.md" for heading in MAIN_PATH for page in PARTS[heading]]
    return [ROOT / "README.md", ROOT / "docs" / "index.md", *pages]


def words(page: Path) -> int:
    """The words of a page, code and tables included, comments and the lines of tables excluded."""
    text = re.sub(r"<!--.*?-->", "", page.read_text("utf-8"), flags=re.DOTALL)
    return sum(any(letter.isalnum() for letter in word) for word in text.split())


def main() -> int:
    counts = {page: words(page) for page in main_path()}
    for page, count in counts.items():
        print(f"{count:6} {page.relative_to(ROOT)}")
    total = sum(counts.values())
    print(f"{total:6} words on the main path, at most {MOST_WORDS}")
    return int(total > MOST_WORDS)


if __name__ == "__main__":
    sys.exit(main())
