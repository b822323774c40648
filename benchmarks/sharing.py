"""What passes, rows and bytes several texts, trees, searches and forks cost together.

    python benchmarks/sharing.py

Counts, not times: they are the same on any machine. Needs the embedded model and the draft that comes with it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import decodery as dc
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.engine.schedule import Limits
from decodery.models.batch import Batch, Segment
from decodery.models.cache.pages import resident
from decodery.search import Beam
from decodery.speculative.acceptance.cntp import CNTP
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.testing.models import Counted
from decodery_benchmarks.experiment import Experiment

TOPICS = (
    *("tides", "rain", "wind", "snow", "iron", "glass", "paper", "bread"),
    *("salt", "wood", "silk", "gold", "clay", "rope", "ink", "wool"),
)


def drafts(lm: dc.LLM, draft: Any, count: int) -> dict[str, Any]:
    """Passes of draft model and target for texts that are decoded together."""
    target, small = Counted(lm.model), Counted(draft)
    engine = Engine(target)
    drafter = DraftModel(small, tree_policy="eagle-2")
    prompts = [lm.encode(f"Explain {topic} in two sentences.") for topic in TOPICS[:count]]
    texts = [engine.submit(Request(prompt, max_new_tokens=24, drafter=drafter)) for prompt in prompts]
    engine.run(texts)
    return {
        "texts": count,
        "draft passes": len(small.rows),
        "draft rows": sum(small.rows),
        "target passes": len(target.rows),
    }


def trials(lm: dc.LLM) -> dict[str, Any]:
    """Rows of ten trials of up to 32 tokens each, per decision."""
    sampler = dc.sampling.Sampler.from_settings(temperature=0.8, top_p=0.95)
    rule = CNTP(least=10, most=10, length=32)
    engine = Engine(lm.model)
    seq = engine.submit(Request(lm.encode("Tell me about tides."), 40, sampler, acceptance_rule=rule))
    engine.run([seq])
    decisions = sum(1 for step in seq.trace.steps if step.emitted)
    return {"decisions": decisions, "tokens": len(seq.generated), **seq.trace.ledger.summary()}


def together(lm: dc.LLM) -> dict[str, Any]:
    """Passes of two beam searches and three texts: apart, and in one engine."""
    requests = [Request(lm.encode(f"Name a use of {topic}."), max_new_tokens=16) for topic in TOPICS[:5]]
    apart = Counted(lm.model)
    for number, request in enumerate(requests):
        engine = Engine(apart)
        if number < 2:
            Beam(width=4).run(engine, request)
        else:
            engine.run([engine.submit(request)])
    shared = Counted(lm.model)
    engine = Engine(shared)
    jobs = [engine.enter(Beam(width=4).find(engine, request)) for request in requests[:2]]
    engine.run([*jobs, *(engine.submit(request) for request in requests[2:])])
    return {"passes apart": len(apart.rows), "passes together": len(shared.rows)}


def arriving(lm: dc.LLM) -> dict[str, Any]:
    """The largest pass when twenty prompts of 512 tokens and more arrive together."""
    model = Counted(lm.model)
    engine = Engine(model, limits=Limits())
    text = lm.tokenizer.encode(" ".join(TOPICS) * 40)[:600]
    engine.run([engine.submit(Request([*text, number + 1], max_new_tokens=2)) for number in range(20)])
    return {
        "prompts": 20,
        "tokens of each": 601,
        "rows of the largest pass": max(model.rows),
        "passes": len(model.rows),
    }


def forks(lm: dc.LLM) -> dict[str, Any]:
    """Bytes that 64 forks of a text of 4,000 tokens hold, each 16 tokens longer, by those of the one text."""
    text = (lm.tokenizer.encode(" ".join(TOPICS) * 200) * 4)[:4000]
    cache = lm.model.new_cache()
    for first in range(0, len(text), 500):
        chunk = text[first : first + 500]
        lm.model.forward(Batch([Segment.chunk(chunk, cache, logit_rows=[])]))
        cache.keep(range(len(chunk)))
    one = cache.bytes
    twins = [cache.fork() for _ in range(64)]
    for number, clone in enumerate(twins):
        lm.model.forward(Batch([Segment.chunk([number + 1] * 16, clone, logit_rows=[])]))
        clone.keep(range(16))
    held = resident(each.pages for each in (cache, *twins))
    return {
        "bytes of one": one,
        "bytes of all": held,
        "times one": round(held / one, 3),
        "least possible": 1 + 64 * 16 / 4000,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/sharing.json"))
    options = parser.parse_args()
    lm, draft = dc.load("smollm2"), dc.load("smollm2-draft").model
    parts = {
        "eagle-2, one text": lambda: drafts(lm, draft, 1),
        "eagle-2, sixteen texts": lambda: drafts(lm, draft, 16),
        "cntp": lambda: trials(lm),
        "two searches and three texts": lambda: together(lm),
        "prompts arriving together": lambda: arriving(lm),
        "forks": lambda: forks(lm),
    }
    Experiment({"name": list(parts)}, lambda name: parts[name]()).measure(options.out, "python benchmarks/sharing.py")


if __name__ == "__main__":
    main()
