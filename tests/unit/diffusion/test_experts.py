"""Shared experts: what is kept, exactness at the limits, and that others in a pass change nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from decodery.core.errors import SettingsError
from decodery.diffusion.canvas import Canvas
from decodery.diffusion.experts.des_seq import DESSeq
from decodery.diffusion.experts.des_vote import DESVote
from decodery.diffusion.run import filled
from decodery.models.torch.mixture import Mixture, Shared
from decodery.models.torch.transformer import Transformer
from decodery.step.forward_request import gather, run_sync
from decodery.training.diffusion import DiffusionRecipe, untrained
from diffusing import denoiser, fill, named, order

SAID = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.6, 0.1, 0.2], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)
"""Three rows and four experts; two are taken: 0 1, 1 3, 3 2."""


def kept(way: DESSeq | DESVote, said: torch.Tensor = SAID, taken: int = 2) -> list[int]:
    return torch.where(way.core(said, taken))[0].tolist()


def test_a_case_by_hand() -> None:
    assert kept(DESSeq(1)) == [0, 1, 3] and kept(DESSeq(2)) == [0, 1, 2, 3]
    # Votes: 0.4, 0.3 + 0.6, 0.3, 0.2 + 0.4.
    assert kept(DESVote(0.5)) == [1, 3] and kept(DESVote(0.75)) == [0, 1, 3] and len(kept(DESVote(0.01))) == 2
    assert kept(DESVote(0.5), SAID[:1]) == [0, 1], "one row: its own choice"
    assert kept(DESSeq(1), SAID[:1]) == [0, 1], "no row takes fewer than the model says"
    apart = torch.tensor([[0.6, 0.4, 0.0, 0.0], [0.0, 0.0, 0.6, 0.4]])
    assert kept(DESVote(0.75), apart) == [0, 1, 2], "of equals the first"


@torch.no_grad()
def test_rows_take_what_is_kept_and_weigh_it_as_ever() -> None:
    model = untrained(DiffusionRecipe(size="xs-moe"))
    layer, rows = model.weights.layers[0], torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    mixture = Mixture(layer, model.config, torch.nn.functional.silu)
    free, _ = mixture(rows)
    found, taken = mixture(rows, Shared(DESVote(0.25), [0, 4, 6]))
    said = (rows.double() @ layer.router.double().T).softmax(dim=-1)
    for first, end in ((0, 4), (4, 6)):
        core = set(kept(DESVote(0.25), said[first:end]))
        assert set(taken[first:end].flatten().tolist()) <= core and len(core) == 4
        for row in range(first, end):
            plain, best = torch.zeros(64), sorted(core, key=lambda expert: -said[row, expert])[:2]
            for expert in best:
                gate, up = (rows[row] @ layer.gate_up.weight[expert * 128 : (expert + 1) * 128].T).chunk(2)
                down = layer.down.weight[expert * 64 : (expert + 1) * 64]
                plain += said[row, expert].float() * (torch.nn.functional.silu(gate) * up) @ down.T
            assert torch.allclose(plain, found[row], atol=1e-5)
    assert not torch.equal(free, found)
    for way in (DESVote(1.0), DESSeq(2), DESSeq(7)):
        assert torch.equal(mixture(rows, Shared(way, [0, 6]))[0], free)


@torch.no_grad()
def test_canvases_share_their_own_experts_and_read_fewer() -> None:
    model: Transformer = untrained(DiffusionRecipe(size="xs-moe"))
    prompt = range(3, 8)
    free, shared = (fill(model, spec, 6, prompt=prompt) for spec in ("static", "static:experts=des-vote(beta=0.25)"))
    assert shared.experts <= 6 * 3 * 4 < free.experts
    # Few experts say something else of what is written, if not enough to change a random model's choice.
    first, other = (np.concatenate([each.logprobs for each in canvas.rounds]) for canvas in (free, shared))
    assert np.abs(first - other).max() > 1e-3
    assert order(fill(model, "static:experts=des-vote(beta=1)", 6, prompt=prompt)) == order(free)
    canvases = [Canvas.of(model, list(range(3, 3 + n)), 6) for n in (2, 5)]
    alone = [order(fill(model, "static:experts=des-seq(each=1)", 6, prompt=range(3, 3 + n))) for n in (2, 5)]
    run_sync(gather([filled(model, canvas, named("static:experts=des-seq(each=1)")) for canvas in canvases]))
    assert [order(canvas) for canvas in canvases] == alone
    with pytest.raises(SettingsError, match="no experts to share"):
        fill(denoiser(), "static:experts=des-seq", 4)
    for wrong in ("des-vote(beta=0)", "des-vote(beta=1.5)", "des-seq(each=0)"):
        with pytest.raises(SettingsError, match="des-"):
            named(f"static:experts={wrong}")
    assert np.array_equal(free.masked, np.zeros(len(free), dtype=bool))
