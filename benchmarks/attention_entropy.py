"""How even the heads of a model attend: which tell little, and which rest on a token.

    OMP_NUM_THREADS=1 python benchmarks/attention_entropy.py

smollm2 in float32 reads the first 256 tokens of the texts of benchmarks/texts. Of each head, the entropy of its rows as
a share of the largest that they could have, the first 8 rows left aside, on average; of each layer the mean over heads,
and how many of its 9 heads are overloaded (above .9) and collapsed (below .05). Then smollm2 in int8 answers six
prompts greedily in 64 tokens each while its shipped draft model drafts four at a time, and the same texts are looked
at: the rank correlation, over steps, of how many drafts were accepted with the mean share over all heads at the row
before the step, which could tell how long a draft should be, and over the rows that the step brought. Nothing is timed.
Writes benchmarks/results/attention-entropy.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

import decodery
from decodery.engine.request import Request
from decodery.models.torch.transformer import Transformer
from decodery.training.attention_maps import COLLAPSED, OVERLOADED, evenness, looked_at, most, row_entropy
from decodery_benchmarks.results import write_result
from transforms import PROMPTS

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "results" / "attention-entropy.json"
LENGTH = 256


def ranks(values: list[float]) -> np.ndarray:
    """[n] places in ascending order, equal values sharing theirs."""
    order = np.asarray(values)
    return np.array([(order < each).sum() + (order == each).sum() / 2 for each in order])


def drafted(model: Transformer) -> dict[str, float]:
    """How accepted drafts go with the entropies of attention."""
    lm = decodery.load("smollm2", dtype="int8")
    engine = lm.engine()
    written = [
        engine.submit(Request(lm.encode(each), max_new_tokens=64, drafter="draft-model:length=4")) for each in PROMPTS
    ]
    engine.run(written)
    accepted, before, within = [], [], []
    for seq in written:
        _, maps = looked_at(model, torch.tensor([seq.tokens]))
        largest = most(len(seq.tokens)).clamp(min=1e-9).to(maps[0])
        shares = torch.stack([(row_entropy(each) / largest).mean(dim=(0, 1)) for each in maps]).mean(dim=0)
        # The last token of the first step after the prompt.
        place = len(seq.tokens) - len(seq.generated)
        for step in (step for step in seq.trace.steps if not step.prefill):
            if step.nodes:
                accepted.append(float(step.accepted))
                before.append(float(shares[place - 1]))
                within.append(float(shares[place : place + step.emitted].mean()))
            place += step.emitted
    found = {"steps": len(accepted), "accepted": float(np.mean(accepted))}
    for name, each in (("before", before), ("within", within)):
        found[name] = float(np.corrcoef(ranks(accepted), ranks(each))[0, 1])
    return found


@torch.no_grad()
def main() -> None:
    lm = decodery.load("smollm2", dtype="float32")
    assert isinstance(lm.model, Transformer)
    files = sorted((ROOT / "benchmarks" / "texts").glob("*.txt"))
    texts = [lm.tokenizer.encode(file.read_text(encoding="utf-8"))[:LENGTH] for file in files]
    heads = torch.stack([evenness(looked_at(lm.model, torch.tensor([text]))[1]) for text in texts]).mean(dim=0)
    layers = [
        {
            "mean": round(float(each.mean()), 3),
            "least": round(float(each.min()), 3),
            "most": round(float(each.max()), 3),
            "overloaded": int((each > OVERLOADED).sum()),
            "collapsed": int((each < COLLAPSED).sum()),
        }
        for each in heads
    ]
    made: dict[str, Any] = {"command": "python benchmarks/attention_entropy.py", "texts": len(texts), "length": LENGTH}
    made |= {"rows": layers, "drafts": drafted(lm.model)}
    write_result(OUT, made, summary=["drafts"])
    print(json.dumps(made))


if __name__ == "__main__":
    main()
