"""Whose heads give something: heads found by their codes, against chance, means and silencing."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from decodery.llm.llm import LLM
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.store import Progress
from decodery.monitors.sae import Head, HeadCodes, silencing
from decodery.training.sae import built_in_examples, shares, train_sae

from ..intervals import interval
from .figures import Judged, Row, detection
from .settings import WatchSettings

NAME = "heads"
_TOP = 10
_Told = tuple[np.ndarray, list[float], float | None]
"""Labels of all sentences, scores of those that were not learned from, and where they are flagged."""


def measure(lm: LLM, settings: WatchSettings, work: Path, progress: Progress) -> tuple[list[Row], list[Row], list[str]]:
    """Heads are found on two thirds of the sentences, and the behaviour is told on the others."""
    count = max(48, settings.prompts // 8 // 6 * 6)
    examples = built_in_examples(count, settings.seed)
    rows = head_rows(lm, [each.prompt for each in examples], progress)
    labels = np.array([each.positive for each in examples])
    heads, found = lm.model.config.num_heads, dict[str, list[Judged]]()
    listed: list[HeadCodes] = []
    for seed in range(settings.seed, settings.seed + settings.rounds):
        # Sentences come in pairs, with the behaviour and without.
        order = np.random.default_rng(seed).permutation(count // 2)
        learned = np.isin(np.arange(count) // 2, order[: count // 3])
        shuffled, told = np.random.default_rng(seed).permutation(labels), dict[str, _Told]()
        for name, wanted in (("", labels), (", shuffled labels", shuffled)):
            trained = train_sae(
                rows[learned],
                wanted[learned].tolist(),
                heads=heads,
                groups=[f"{at // 2}" for at in np.flatnonzero(learned)],
                rate=settings.rate,
                top=_TOP,
                seed=seed,
            )
            listed.append(trained)
            told |= {f"{each}{name}": own for each, own in _by_codes(trained, rows, wanted, learned).items()}
        told["difference of means, best head"] = labels, _by_means(rows, labels, learned), None
        groups = [f"{at // 2}" for at in np.flatnonzero(~learned)]
        for name, (wanted, scores, limit) in told.items():
            judged = Judged(scores, wanted[~learned].tolist(), groups, [""] * len(groups), limit)
            found.setdefault(name, []).append(judged)
    prompts = [each.prompt for each in examples if each.positive][:50]
    first, empty = listed[:2]
    best = [head for head, score in first.ranked()[:_TOP] if score > 0]
    acts = _silenced(lm, prompts, best, settings.seed)
    notes = [
        f"heads: the first seed's list, by layer and head: {', '.join(f'{a}.{b}' for a, b in best)}",
        f"heads: the first seed's edges, and the share of the behaviour's examples that each tells: {_edges(first)}; "
        f"with shuffled labels {_edges(empty)}",
    ]
    return [detection(NAME, name, seeds) for name, seeds in found.items()], acts, notes


def _by_codes(trained: HeadCodes, rows: torch.Tensor, labels: np.ndarray, learned: np.ndarray) -> dict[str, _Told]:
    """What the heads found say of the sentences not learned from, and what pairs of heads say."""
    heads, own = trained.facts["heads"], torch.from_numpy(learned)
    codes = trained.of(rows.flatten(0, 1)).unflatten(0, rows.shape[:2])
    best = [layer * heads + head for (layer, head), score in trained.ranked()[:_TOP] if score > 0]
    pairs = [(a * heads + b, c * heads + d) for a, b, c, d, _ in trained.facts["edges"]]
    together = pair_shares(codes[own], torch.from_numpy(labels)[own], pairs, codes[~own])
    return {
        "sae": (labels, shares(trained.tensors["own"], codes[~own], best).tolist(), trained.threshold.value),
        "sae, edges": (labels, together.tolist(), None),
    }


def _edges(trained: HeadCodes) -> str:
    return ", ".join(f"{a}.{b}-{c}.{d} {score:.2f}" for a, b, c, d, score in trained.facts["edges"][:5])


def _by_means(rows: torch.Tensor, labels: np.ndarray, learned: np.ndarray) -> list[float]:
    """The projection on the difference of means, at the head where it is largest among the sentences learned from."""
    own, kind = torch.from_numpy(learned), torch.from_numpy(labels)
    apart = rows[own & kind].mean(dim=0) - rows[own & ~kind].mean(dim=0)
    size = apart.norm(dim=1) / rows[own].std(dim=0).norm(dim=1).clamp_min(1e-6)
    best = int(size.argmax())
    return (rows[~own][:, best] @ apart[best]).tolist()


def _silenced(lm: LLM, prompts: Ordered[str], heads: list[Head], seed: int) -> list[Row]:
    """By how much the right name leads the wrong one, with nothing, these heads, or as many others silenced."""
    config, random = lm.model.config, np.random.default_rng(seed)
    others = list[Head]()
    for layer, _ in heads:
        free = [head for head in range(config.num_heads) if (layer, head) not in (*heads, *others)]
        if free:
            others.append((layer, int(random.choice(free))))
    leads = {name: _leads(lm, prompts, own) for name, own in (("none", []), ("found", heads), ("random", others))}
    drops = {name: leads["none"] - each for name, each in leads.items()}
    paired = drops["found"] - drops["random"]
    low, high = interval(paired, seed=seed)
    return [
        {
            "testbed": NAME,
            "what": f"silencing {len(own)} heads, {name}",
            "prompts": len(prompts),
            "lead of the right name, nats": round(float(leads[name].mean()), 4),
            "less than before": round(float(drops[name].mean()), 4),
            "right name first": round(float((leads[name] > 0).mean()), 4),
            "found beyond random, 95 %": f"{low:.2f} to {high:.2f}" if name == "found" else "",
        }
        for name, own in (("none", []), ("found", heads), ("random", others))
    ]


@torch.no_grad()
def _leads(lm: LLM, prompts: Ordered[str], heads: list[Head]) -> np.ndarray:
    found = []
    for prompt in prompts:
        pair = [word.strip(",") for word in prompt.split()]
        one, other = pair[1], pair[3]
        giver = next(word for word in pair[7:] if word in (one, other))
        right, wrong = (one, other) if giver == other else (other, one)
        ids = [lm.tokenizer.encode(f" {name}", special=False)[0] for name in (right, wrong)]
        tokens = lm.encode(prompt, apply_chat_template=False)
        segment = Segment.chunk(tokens, lm.model.new_cache(), logit_rows=[len(tokens) - 1])
        segment = replace(segment, interventions=silencing(heads, lm.model.config.head_dim))
        row = lm.model.forward(Batch([segment])).logits[-1].float()
        found.append(float(row[ids[0]] - row[ids[1]]))
    return np.array(found)


@torch.no_grad()
def head_rows(lm: LLM, prompts: Ordered[str], progress: Progress) -> torch.Tensor:
    """[prompts, layers * heads, head_dim] float32 head outputs at each prompt's last token."""
    config = lm.model.config
    taps, found = [f"head_out.{layer}" for layer in range(config.num_layers)], []
    for number, prompt in enumerate(prompts):
        segment = Segment.chunk(lm.encode(prompt, apply_chat_template=False), lm.model.new_cache(), logit_rows=[])
        hidden = lm.model.forward(Batch([segment]), taps=taps).hidden
        rows = [hidden[tap][-1].float().cpu().view(config.num_heads, config.head_dim) for tap in taps]
        found.append(torch.cat(rows))
        progress("reading examples", number + 1, len(prompts))
    return torch.stack(found)


def pair_shares(
    codes: torch.Tensor, positive: torch.Tensor, pairs: Ordered[tuple[int, int]], asked: torch.Tensor
) -> torch.Tensor:
    """[n] the share of these pairs whose codes were seen together on the behaviour's examples alone.

    Args:
        asked: [n, heads] codes of what is to be told; the others as `edges` takes and gives them.
    """
    found = torch.zeros(len(asked), dtype=torch.double, device="cpu")
    for pair in pairs:
        own, new = codes[:, list(pair)], asked[:, list(pair)]
        same = (new[:, None] == own).all(dim=2)
        found += same[:, positive].any(dim=1) & ~same[:, ~positive].any(dim=1)
    return found / max(len(pairs), 1)
