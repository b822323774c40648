"""What a hidden state tells of the next but one token beyond the next: what a drafting head could gain on a model.

    OMP_NUM_THREADS=1 python benchmarks/surplus.py

Texts that smollm2 in int8 has drawn (temperature 1), three quarters to learn from and one held out. W is a token, V the
one after it, told apart among the 1,000 commonest tokens and one more for all others, which can only bring
distributions nearer. Probes of one size predict V from W alone, and from W and the model's state before W, after
several of its layers and at random; they are taught the model's own distribution of V. For each, on held-out text: its
mean KL from the model, which is at least J (see `decodery_benchmarks.surplus`); the acceptance that this promises by
Pinsker's and Jensen's inequalities, and that of drawn drafts, measured; the entropy of what it draws from, and of the
model's. gain: by how many nats the state is better, an estimate of the surplus. Beside them closed forms: how the
promise stands to the truth on 1,000 random sources of second order. Counts, no times. Writes
benchmarks/results/surplus.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

import decodery
from decodery.models.batch import Batch, Segment
from decodery.models.torch.transformer import Transformer
from decodery_benchmarks.results import write_result
from decodery_benchmarks.surplus import Surplus, floor, of_chain

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
"""After which the state is read."""
TOKENS = 1000
INNER = 256


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
def read(model: Transformer, texts: list[list[int]], told_apart: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of every place of the texts: embedding of W, states before W by layer, and the law of V [n, tokens + 1]."""
    rows: dict[str, list[torch.Tensor]] = {}
    for text in texts:
        ids = np.asarray(text, dtype=np.int64)
        scores = model.forward(Batch([Segment(np.arange(len(ids)), tokens=ids)]), taps=LAYERS)
        found = {f"layer {layer}": scores.hidden[layer][:-1] for layer in LAYERS}
        some = scores.logits[1:].softmax(dim=-1)[:, told_apart]
        law = torch.cat([some, (1 - some.sum(dim=1, keepdim=True)).clamp(min=1e-9)], dim=1)
        found |= {"token": model.embed_tokens(torch.from_numpy(ids[1:])), "law": law}
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


def taught(rows: torch.Tensor, laws: torch.Tensor, steps: int, batch: int) -> torch.nn.Module:
    """A probe of one inner layer, trained on the model's distributions of V."""
    torch.manual_seed(0)
    probe = torch.nn.Sequential(
        torch.nn.Linear(rows.shape[1], INNER), torch.nn.GELU(), torch.nn.Dropout(0.2),
        torch.nn.Linear(INNER, laws.shape[1]),
    )  # fmt: skip
    trained = torch.optim.AdamW(probe.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(trained, 2e-3, total_steps=steps)
    for _ in range(steps):
        some = torch.randint(len(rows), (batch,))
        loss = -(laws[some] * probe(rows[some]).log_softmax(dim=-1)).sum(dim=-1).mean()
        trained.zero_grad()
        loss.backward()
        trained.step()
        schedule.step()
    return probe.eval()


@torch.no_grad()
def judged(probe: torch.nn.Module, rows: torch.Tensor, laws: torch.Tensor) -> dict[str, float]:
    p, q = laws.double(), probe(rows).double().log_softmax(dim=-1)
    away = float((p * (p.log() - q)).sum(dim=-1).mean())
    return {
        "kl": away,
        "floor": floor(away),
        "acceptance": float(torch.minimum(p, q.exp()).sum(dim=-1).mean()),
        "entropy": float(-(q.exp() * q).sum(dim=-1).mean()),
        "entropy of the model": float(-(p * p.log()).sum(dim=-1).mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=48, help="texts drawn")
    parser.add_argument("--length", type=int, default=64, help="tokens of each")
    parser.add_argument("--steps", type=int, default=400, help="of training each probe")
    parser.add_argument("--batch", type=int, default=128)
    args = parser.parse_args()
    lm = decodery.load("smollm2", dtype="int8")
    model = lm.model
    assert isinstance(model, Transformer)
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(args.texts)]
    drawn = []
    for seed in range(0, args.texts, 16):
        settings = {
            "apply_chat_template": False,
            "temperature": 1.0,
            "seed": seed,
            "max_new_tokens": args.length,
            "ignore_eos": True,
        }
        drawn += [each.tokens for each in lm.generate(prompts[seed : seed + 16], drafter=None, **settings)]
        print(f"{len(drawn)} of {args.texts} texts", flush=True)
    counts = np.bincount([token for text in drawn for token in text], minlength=model.vocab_size)
    told_apart = torch.from_numpy(np.argsort(-counts, kind="stable")[:TOKENS].copy())
    learned = [text for number, text in enumerate(drawn) if number % 4 != 3]
    known, tried = read(model, learned, told_apart), read(model, drawn[3::4], told_apart)
    found: dict[str, dict[str, float]] = {}
    for name in ("token", *(f"layer {layer}" for layer in LAYERS), "at random"):
        probe = taught(given(known, name), known["law"], args.steps, args.batch)
        found[name] = judged(probe, given(tried, name), tried["law"])
        found[name]["gain"] = found["token"]["kl"] - found[name]["kl"]
        print(name, found[name], flush=True)
    made = {
        "command": "python benchmarks/surplus.py", "learned": len(known["token"]), "held out": len(tried["token"]),
        "steps": args.steps, "sources": sources(1000), "rows": found,
    }  # fmt: skip
    write_result(OUT, made, summary=["sources"])


if __name__ == "__main__":
    main()
