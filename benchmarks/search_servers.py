"""The same searches on a model here and behind servers: texts, and what the ledger counts.

    python benchmarks/search_servers.py --model FILE.gguf llama.cpp=http://localhost:8080 decodery=http://localhost:8000

Each server runs FILE.gguf. Rows say of each search and place the text, tokens, requests and scored texts, or the
sentence with which it is refused; `equal` is whether the text is the one written here.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import decodery as dc
from decodery.core.errors import DecoderyError
from decodery_benchmarks.results import RESULTS, write_result

PROMPT = (
    "James writes a 3-page letter to 2 different friends twice a week. How many pages does he write a year?\nThink "
    'step by step, briefly. End with the line "#### " and the number.'
)
STEPS = 'delimiter=".",rounds=3'
SEARCHES: tuple[tuple[str, float], ...] = (
    ("", 0.0),
    ("", 0.8),
    ("best-of-n:scorer=log-probability,n=2", 0.8),
    ("pairwise:n=2", 0.8),
    ("adaptive-sampling:scorer=llm-judge,n=2,threshold=0.9,schedule=constant", 0.8),
    (f"step-beam:scorer=log-probability(of=mean),n=2,m=1,{STEPS}", 0.0),
    (f"step-beam:scorer=log-probability(of=mean),n=2,m=2,{STEPS}", 0.8),
    (f"dvts:scorer=llm-judge,n=2,m=2,{STEPS}", 0.8),
    (f"particle-filter:scorer=llm-judge,particles=2,{STEPS}", 0.8),
    (f"a-star:scorer=llm-judge,k=2,expansions=6,{STEPS}", 0.8),
    (f"mcts:scorer=llm-judge,n=2,simulations=2,{STEPS}", 0.8),
    (f"tree-of-thoughts:scorer=llm-judge,n=2,b=2,{STEPS}", 0.8),
    (f"lookahead:search=step-beam(scorer=llm-judge,n=2,m=2,{STEPS}),k=1", 0.8),
    ("budget-forcing:ignore=1,most=20", 0.0),
    ("self-refine:iterations=1", 0.0),
    ("archon:layers=generator/critic/fuser", 0.0),
    ("beam:width=2", 0.0),
    ("ved:scorer=log-probability", 0.0),
)


def row(lm: Any, search: str, temperature: float, tokens: int) -> dict[str, Any]:
    """What a search makes of the prompt."""
    settings, begun = {"temperature": temperature, "seed": 3, "max_new_tokens": tokens}, time.monotonic()
    try:
        out = lm.search(PROMPT, search, **settings)[0] if search else lm.generate(PROMPT, **settings)
    except DecoderyError as error:
        return {"refused": str(error)}
    ledger, counts = out.trace.ledger, out.trace.ledger.counts
    return {
        "text": out.text,
        "complete": out.complete,
        "tokens": ledger.tokens,
        "passes": sum(ledger.passes.values()),
        "scorer_calls": ledger.scorer_calls,
        **{name: counts[name] for name in ("unreported", "unheard", "retries") if counts.get(name)},
        "seconds": round(time.monotonic() - begun, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="NAME=URL")
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--out", type=Path, default=RESULTS / "search-servers.json")
    given = parser.parse_args()
    places = {"here": dc.load(given.model)} | {
        name: dc.remote(url) for name, _, url in (each.partition("=") for each in given.servers)
    }
    rows: list[dict[str, Any]] = []
    for search, temperature in SEARCHES:
        found = {name: row(lm, search, temperature, given.tokens) for name, lm in places.items()}
        for name, each in found.items():
            equal = {} if name == "here" else {"equal": each.get("text", "") == found["here"].get("text")}
            rows.append({"search": search, "temperature": temperature, "where": name, **each, **equal})
            print(rows[-1], flush=True)
        write_result(given.out, {"rows": rows, "settings": {"prompt": PROMPT, "tokens": given.tokens}})


if __name__ == "__main__":
    main()
