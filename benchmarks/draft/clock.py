"""When drafting while the target verifies is worth it, by a clock that counts passes: `pearl` beside `draft-model`.

    OMP_NUM_THREADS=1 python benchmarks/draft/clock.py --work DIR [PAIR ...] [--questions 4] [--new 48]

PAIR: `chain` and `smollm2-int8`, as benchmarks/draft/joint.py has them. Of every length: for each round, tokens that it
wrote and passes of the draft in it. A pass of the draft takes 1, one of the target `ratio`; a round of `draft-model`
takes its draft's passes and then the target's, a round of `pearl` whichever takes longer. Times are those of the best
length of each, as a multiple of what plain decoding takes. Writes benchmarks/results/draft-clock.json.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

import joint

from decodery.engine.engine import Engine
from decodery.models.loaders.load import load
from decodery.models.protocol import LanguageModel
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.drafters.pearl import Pearl
from decodery.step.drafter import Drafter

sys.path.insert(0, str(Path(__file__).parents[1]))
from decodery_benchmarks.experiment import Experiment

RESULTS = Path(__file__).parents[1] / "results" / "draft-clock.json"
LENGTHS = (1, 2, 3, 4, 6, 8, 10)
RATIOS = (2, 5, 10, 20)

Round = tuple[int, int]
"""Tokens that were written, and passes of the draft model."""


def rounds(model: LanguageModel, prompts: list[list[int]], drafter: Drafter, new: int) -> list[Round]:
    found = []
    for request in joint.requests(prompts, drafter, "greedy", new):
        engine = Engine(model)
        seq = engine.submit(request)
        ledger = seq.trace.ledger
        engine.step()  # reads the prompt
        while not seq.finished:
            tokens, drafts = len(seq.generated), ledger.passes.get("draft", 0)
            engine.step()
            found.append((len(seq.generated) - tokens, ledger.passes.get("draft", 0) - drafts))
    return found


def in_turns(taken: list[Round], ratio: int) -> float:
    """Time of a token, in passes of the draft."""
    return sum(drafts + ratio for _, drafts in taken) / sum(tokens for tokens, _ in taken)


def beside(taken: list[Round], ratio: int) -> float:
    return sum(max(drafts, ratio) for _, drafts in taken) / sum(tokens for tokens, _ in taken)


def compared(model: LanguageModel, prompts: list[list[int]], draft: Any, new: int) -> dict[str, Any]:
    ways = {"draft-model": (DraftModel, in_turns), "pearl": (Pearl, beside)}
    by_length: dict[str, dict[int, list[Round]]] = {way: {} for way in ways}
    for length in LENGTHS:
        for way, (drafter, _) in ways.items():
            by_length[way][length] = rounds(model, prompts, drafter(draft, length=length), new)
    found: dict[str, Any] = {
        "tokens per round": {
            way: {length: round(sum(tokens for tokens, _ in taken) / len(taken), 3) for length, taken in each.items()}
            for way, each in by_length.items()
        }
    }
    for ratio in RATIOS:
        row = found.setdefault(f"1:{ratio}", {})
        for way, (_, clock) in ways.items():
            times = {length: clock(taken, ratio) for length, taken in by_length[way].items()}
            best = min(times, key=lambda length: times[length])
            row[way] = {"length": best, "times plain": round(ratio / times[best], 3)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("pairs", nargs="*", choices=[[], "chain", "smollm2-int8"], metavar="PAIR")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=4)
    parser.add_argument("--new", type=int, default=48)
    options = parser.parse_args()

    def run(name: str) -> dict[str, Any]:
        model, prompts, _ = joint.PAIRS[name](options)
        draft = load(str(options.work / "draft") if name == "chain" else "smollm2-draft").model
        about = {"prompts": len(prompts), "new_tokens": options.new}
        return {"about": about, **compared(model, prompts, draft, options.new)}

    names, command = (
        options.pairs or ("chain", "smollm2-int8"),
        f"OMP_NUM_THREADS=1 {shlex.join(['python', *sys.argv])}",
    )
    Experiment({"name": names}, run).measure(RESULTS, command)


if __name__ == "__main__":
    main()
