"""What a search costs beside one plain text: passes, rows and memory; times where the machine is quiet.

    python benchmarks/search_cost.py counts
    python benchmarks/search_cost.py times

Both write benchmarks/results/search-cost.json, each its own part. Counts are the same on any machine. Times are
taken in turns, one plain text and one search after the other, and only ratios within a turn are kept.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import decodery as dc
from decodery_benchmarks.results import begun_result, write_result

RESULT = Path(__file__).parent / "results" / "search-cost.json"
PROMPT, TOKENS = 1000, 128
WIDE, MANY = 16, 64
TURNS = 7


def prompt_of(lm: dc.LLM, length: int) -> list[int]:
    """The first tokens of a text that says nothing in particular, as often as it takes."""
    piece = lm.tokenizer.encode("The tide comes in twice a day, and goes out as often as it comes. ", special=False)
    return (piece * (length // len(piece) + 1))[:length]


def written(lm: dc.LLM, prompt: list[int], branches: int, seed: int = 0) -> dc.Output:
    """One text of `TOKENS` tokens, or as many branches of a search, after a prompt; nothing ends them earlier."""
    settings: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": TOKENS, "drafter": None, "seed": seed}
    request = lm.request(prompt, **settings)
    request.eos_ids = ()
    if branches == 1:
        engine = lm.engine()
        seq = engine.submit(request)
        engine.run([seq])
        return lm.output(seq)
    # A vote asks no scorer, so that what is counted is the branches.
    search = dc.search.SelfConsistency(n=branches, answer="whole")
    return lm.output(search.run(lm.engine(), request)[0])


def counts(lm: dc.LLM) -> list[dict[str, Any]]:
    """Passes, rows and bytes of one text and of searches.

    own: bytes of the keys and values of what the further branches wrote; beyond: what a search holds besides these,
    over what one text holds.
    """
    prompt, rows = prompt_of(lm, PROMPT), []
    for branches in (1, WIDE, MANY):
        ledger = written(lm, prompt, branches).trace.ledger
        rows.append(
            {
                "branches": branches,
                "passes": ledger.passes["model"],
                "rows": ledger.rows["model"],
                "tokens": ledger.tokens,
                "bytes": ledger.bytes,
            }
        )
    for row in rows:
        row["own"] = (row["branches"] - 1) * TOKENS * lm.model.new_cache().slot_bytes
        row["beyond"] = round((row["bytes"] - row["own"]) / rows[0]["bytes"], 3)
    return rows


def times(lm: dc.LLM) -> dict[str, Any]:
    """Seconds of a search of `WIDE` branches over those of one text, turn by turn; both read the prompt anew."""
    prompt, ratios = prompt_of(lm, PROMPT), []
    for turn in range(TURNS + 1):
        seconds = []
        for branches in (1, WIDE):
            begin = perf_counter()
            written(lm, prompt, branches, seed=turn)
            seconds.append(perf_counter() - begin)
        # The first turn warms up what is made once.
        if turn:
            ratios.append(round(seconds[1] / seconds[0], 3))
    return {"branches": WIDE, "ratios": ratios, "median": median(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["counts", "times"])
    part = parser.parse_args().part
    lm = dc.load("smollm2")
    found = begun_result(RESULT)
    found["about"] = {"model": lm.name, "dtype": lm.dtype, "prompt": PROMPT, "tokens": TOKENS}
    if part == "counts":
        found["rows"] = counts(lm)
    else:
        found["summary"]["times"] = times(lm)
    write_result(RESULT, found)
    print(json.dumps(found["rows"] if part == "counts" else found["times"], indent=1))


if __name__ == "__main__":
    main()
