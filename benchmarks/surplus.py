"""What a hidden state tells of the next but one token beyond the next: what a drafting head could gain on a model.

    OMP_NUM_THREADS=1 python benchmarks/surplus.py

Texts that smollm2 in int8 has drawn (temperature 1), half to learn from and a quarter held out. W is a token, V the one
behind it. Probes of one size predict V from W alone, and from W and the model's state before W, behind several of its
layers and at random; they are taught the model's own distribution of V. For each, on held-out text: nats above the
model's own entropy, which are its mean KL from the model and so at least J (see `decodery.bench.surplus`); the
acceptance that this promises by Pinsker's and Jensen's inequalities, and that of drawn drafts, measured; the entropy
of what it draws from. gain: by how many nats the state is better, an estimate of the surplus, of which training and
size take their share. Beside them closed forms: the same of 1,000 random sources of second order. Counts, no times.
Writes benchmarks/results/surplus.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

import decodery
from decodery.bench.surplus import Probe, Surplus, floor, of_chain
from decodery.model.batch import Batch, Segment
from decodery.model.int8 import Int8Linear
from decodery.model.transformer import Transformer

OUT = Path(__file__).parent / "results" / "surplus.json"
PROMPTS = (
    "The harbour was quiet",
    "Once upon a time",
    "In this chapter we",
    "The recipe begins with",
    "Question: why is the sky blue?\nAnswer:",
    "def add(a, b):",
    "Dear neighbour,",
    "The first computers",
    "On Monday the council",
    "A lichen is",
    "She opened the door and",
    "The experiment showed that",
)
LAYERS = (10, 20, 30)
"""Behind which the state is read."""


def sources(count: int) -> dict[str, Any]:
    """Of random sources whose state is the token before: how near the promise of acceptance is, and that it holds."""
    random = np.random.default_rng(0)
    slack = []
    for _ in range(count):
        transition = random.dirichlet(np.full(4, float(random.choice([0.1, 1.0, 5.0]))), size=(4, 4))
        joint = of_chain(transition)
        for state in (np.arange(4), np.arange(4) % 2):
            found = Surplus.of(joint, state)
            slack.append([found.token - found.token_floor, found.hidden - found.hidden_floor])
    apart = np.array(slack)
    return {"sources": count, "broken": int((apart < -1e-12).sum()), "least slack": float(apart.min())} | {
        "mean slack": float(apart.mean())
    }


@torch.no_grad()
def read(model: Transformer, texts: list[list[int]]) -> dict[str, torch.Tensor]:
    """Of every place of the texts: embedding of W, states before W, and the state behind which V's law is made."""
    rows: dict[str, list[torch.Tensor]] = {}
    for text in texts:
        ids = np.asarray(text, dtype=np.int64)
        segment = Segment(np.arange(len(ids)), tokens=ids, logit_rows=[])
        hidden = model.forward(Batch([segment]), taps=LAYERS).hidden
        found = {f"layer {layer}": hidden[layer][:-1] for layer in LAYERS}
        found |= {"token": model.embed_tokens(torch.from_numpy(ids[1:])), "law": hidden[LAYERS[-1]][1:]}
        for name, states in found.items():
            rows.setdefault(name, []).append(states.float())
    return {name: torch.cat(parts) for name, parts in rows.items()}


def given(rows: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """What a probe reads: W and, beside it, a state, chance or nothing, each of one length."""
    token = rows["token"]
    chance = torch.randn(token.shape, generator=torch.Generator().manual_seed(1))
    beside = {"token": torch.zeros_like(token), "at random": chance}.get(name, rows.get(name))
    assert beside is not None
    parts = [torch.nn.functional.normalize(part, dim=-1) * part.shape[1] ** 0.5 for part in (token, beside)]
    return torch.cat(parts, dim=1)


def taught(probe: Probe, rows: torch.Tensor, laws: torch.Tensor, model: Transformer, steps: int, batch: int) -> None:
    """Train a probe on the model's distributions of V."""
    chosen = torch.Generator().manual_seed(0)
    trained = torch.optim.AdamW(probe.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(trained, 2e-3, total_steps=steps)
    for _ in range(steps):
        some = torch.randint(len(rows), (batch,), generator=chosen)
        with torch.no_grad():
            p = model.head(laws[some]).softmax(dim=-1)
        loss = -(p * probe(rows[some]).log_softmax(dim=-1)).sum(dim=-1).mean()
        trained.zero_grad()
        loss.backward()
        trained.step()
        schedule.step()


@torch.no_grad()
def judged(probe: Probe, rows: torch.Tensor, laws: torch.Tensor, model: Transformer) -> dict[str, float]:
    sums = np.zeros(4)
    for some in torch.arange(len(rows)).split(128):
        p, q = model.head(laws[some]).log_softmax(dim=-1), probe(rows[some]).log_softmax(dim=-1)
        sums[0] += float((p.exp() * (p - q)).double().sum())
        sums[1] += float(torch.minimum(p, q).exp().double().sum())
        sums[2] -= float((q.exp() * q).double().sum())
        sums[3] -= float((p.exp() * p).double().sum())
    away, accepted, own, target = (sums / len(rows)).tolist()
    return {
        "kl": away, "floor": floor(away), "acceptance": accepted, "entropy": own, "entropy of the model": target
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=96, help="texts drawn")
    parser.add_argument("--length", type=int, default=96, help="tokens of each")
    parser.add_argument("--steps", type=int, default=250, help="of training each probe")
    parser.add_argument("--batch", type=int, default=96)
    args = parser.parse_args()
    lm = decodery.load("smollm2", dtype="int8")
    model = lm.model
    assert isinstance(model, Transformer) and isinstance(model.weights.head, Int8Linear)
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(args.texts)]
    drawn = []
    for seed in range(0, args.texts, 16):
        settings = {"raw": True, "temperature": 1.0, "seed": seed, "max_new_tokens": args.length, "ignore_eos": True}
        drawn += [each.tokens for each in lm.generate(prompts[seed : seed + 16], drafter=None, **settings)]
        print(f"{len(drawn)} of {args.texts} texts", flush=True)
    held = drawn[3::4]
    known, tried = read(model, [text for number, text in enumerate(drawn) if number % 4 != 3]), read(model, held)
    head = model.weights.head.dense().float()
    found = {}
    for name in ("token", *(f"layer {layer}" for layer in LAYERS), "at random"):
        probe = Probe(2 * model.config.hidden_size, head)
        taught(probe, given(known, name), known["law"], model, args.steps, args.batch)
        found[name] = judged(probe, given(tried, name), tried["law"], model)
        found[name]["gain"] = found["token"]["kl"] - found[name]["kl"]
        print(name, found[name], flush=True)
    made = {
        "command": "python benchmarks/surplus.py", "learned": len(known["token"]), "held out": len(tried["token"]),
        "steps": args.steps, "sources": sources(1000), "drafters": found,
    }  # fmt: skip
    OUT.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
