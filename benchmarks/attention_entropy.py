"""How even the heads of a model attend: which tell little, and which rest on a token.

    OMP_NUM_THREADS=1 python benchmarks/attention_entropy.py

smollm2 in float32 reads the first 256 tokens of the texts of benchmarks/texts. Of each head, the entropy of its rows as
a share of the largest that they could have, the first 8 rows left aside, on average; of each layer the mean over heads,
and how many of its 9 heads are overloaded (above .9) and collapsed (below .05). Nothing is timed. Writes
benchmarks/results/attention-entropy.json.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

import decodery
from decodery.model.transformer import Transformer
from decodery.train.attention_maps import COLLAPSED, OVERLOADED, evenness, looked_at

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "results" / "attention-entropy.json"
LENGTH = 256


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
    made = {"command": "python benchmarks/attention_entropy.py", "texts": len(texts), "length": LENGTH}
    OUT.write_text(json.dumps(made | {"layers": layers}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(layers))


if __name__ == "__main__":
    main()
