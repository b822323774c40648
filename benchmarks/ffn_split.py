"""What is left of a model whose MLPs are split into experts of which rows take some, and what it is worth as a draft.

    python benchmarks/train.py puzzle-model chain --out chain-1M
    python benchmarks/ffn_split.py chain-1M

Writes `benchmarks/results/ffn-split.json`: of a small model of puzzles, split into 8 experts per layer, for 6 and 4 of
them: perplexity of solutions held out; and tokens for each pass of the model itself, greedily, where the copy drafts
chains of 4; with the trained router, with an oracle that takes the experts whose outputs are largest, and with experts
taken at random. Nothing is timed.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import click
import numpy as np
import torch

import decodery as dc
from decodery.compression.base import transformed
from decodery.compression.ffn_split import FFNSplit
from decodery.models.batch import Batch, Segment
from decodery.models.torch.mixture import Mixture
from decodery.models.torch.transformer import Transformer
from decodery.speculative.drafters.draft_model import DraftModel
from decodery_benchmarks.puzzles.alphabet import encoded
from decodery_benchmarks.puzzles.base import drawn
from decodery_benchmarks.puzzles.chain import Chain
from decodery_benchmarks.results import write_result

OUT = Path(__file__).parent / "results" / "ffn-split.json"
CHAIN, EXPERTS = 4, 8


class Chosen(Mixture):
    """Experts that are taken by the size of what they add, or at random, in place of the router's."""

    def __init__(self, whole: Mixture, by: str) -> None:
        vars(self).update(vars(whole))
        self.by, self.draws = by, torch.Generator().manual_seed(0)

    def __call__(self, rows: torch.Tensor, shared: object = None) -> tuple[torch.Tensor, torch.Tensor]:
        each = []
        for gate_up, down in map(self._expert, range(self._config.experts)):
            gate, up = gate_up(rows).chunk(2, dim=-1)
            each.append(down(self._activation(gate) * up))
        added = torch.stack(each, dim=1)
        sizes = added.norm(dim=-1) if self.by == "oracle" else torch.rand(added.shape[:2], generator=self.draws)
        chosen = sizes.topk(self._config.experts_per_token, dim=-1).indices
        taken = torch.zeros(added.shape[:2]).scatter_(1, chosen, 1.0)
        return (added * taken[..., None]).sum(dim=1), chosen


@torch.no_grad()
def perplexity(model: Transformer, texts: list[tuple[str, str]]) -> float:
    """Of solutions, after their puzzles."""
    losses = []
    for prompt, solution in texts:
        ids = np.array(encoded(prompt + solution))
        logits = model.forward(Batch([Segment(np.arange(len(ids)), tokens=ids)])).logits.float()
        first = len(prompt) - 1
        losses.append(torch.nn.functional.cross_entropy(logits[first:-1], torch.from_numpy(ids[first + 1 :])))
    return round(float(torch.stack(losses).mean().exp()), 3)


@click.command()
@click.argument("model")
@click.option("--texts", default=12, show_default=True, help="Puzzles to measure on; as many to calibrate.")
def main(model: str, texts: int) -> None:
    """Measure MODEL, a folder of `python benchmarks/train.py puzzle-model chain`."""
    torch.set_num_threads(1)
    lm, puzzle = dc.load(model), Chain()
    assert isinstance(lm.model, Transformer)

    def solved(split: str) -> list[tuple[str, str]]:
        return [(each, puzzle.solve(each, Random(0))) for each in islice(drawn(puzzle, split), texts)]

    def tokens_per_pass(drafter: DraftModel | None) -> float:
        found = lm.generate(
            [each for each, _ in held], apply_chat_template=False, drafter=drafter, max_new_tokens=puzzle.length
        )
        return round(sum(each.trace.tokens for each in found) / sum(each.trace.passes for each in found), 2)

    given, held = [np.array(encoded("".join(each))) for each in solved("train")], solved("test")
    rows: dict[str, dict[str, Any]] = {
        "the model itself": {"perplexity": perplexity(lm.model, held), "tokens per pass": tokens_per_pass(None)}
    }
    click.echo(json.dumps(rows))
    for active in (EXPERTS, 6, 4):
        copy, report = transformed(lm.model, [FFNSplit(experts=EXPERTS, active=active)], given)
        for by in ("router", "oracle", "random") if active < EXPERTS else ("all",):
            if by in ("oracle", "random"):
                copy._mixtures = [Chosen(each, by) for each in copy._mixtures]
            rows[f"{active} of {EXPERTS}, {by}"] = {
                "perplexity": perplexity(copy, held),
                "tokens per pass": tokens_per_pass(DraftModel(copy, length=CHAIN)),
                "multiply-adds": round(report.after.macs / report.before.macs, 3),
            }
            click.echo(json.dumps({f"{active} {by}": rows[f"{active} of {EXPERTS}, {by}"]}))
    made = {"command": f"python benchmarks/ffn_split.py {Path(model).name}", "texts": texts, "rows": rows}
    write_result(OUT, made)


if __name__ == "__main__":
    main()
