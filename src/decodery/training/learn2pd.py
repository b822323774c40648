"""Train a filter for `learn2pd`: which proposals of a model are what it will write in the end, by its own decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.diffusion.base import UnmaskingPolicy
from decodery.diffusion.canvas import Canvas
from decodery.diffusion.filter import Filter
from decodery.diffusion.learn2pd import block
from decodery.diffusion.static import Static
from decodery.diffusion.texts import fill_all
from decodery.diffusion.view import Commit, View
from decodery.engine.engine import Engine
from decodery.llm.llm import LLM
from decodery.models.loaders.store import Progress, silent
from decodery.models.protocol import LanguageModel

from .data import read_prompts
from .kind import ARGUMENT, PLAIN, Data, Run, kind, option
from .loop import content, even_plan, rounded, train
from .ranking import auc
from .tensors import int_tensor

_HELD_OUT = 10
"""One prompt in so many is kept for validation, and one for the test."""
_TOGETHER = 32


@dataclass(frozen=True, eq=False)
class LabelledBlocks:
    """Blocks as passes found them."""

    confidence: torch.Tensor  # [n, b]
    final: torch.Tensor  # [n, b] bool, whether the proposal is what static decoding writes
    open: torch.Tensor  # [n, b] bool, whether a position was open
    prompt: torch.Tensor  # [n] whose they are
    passes: int  # How many this took for all prompts, if only such were written
    static: int

    def of(self, part: int, parts: int = _HELD_OUT) -> LabelledBlocks:
        """Those of the prompts whose number leaves `part` when divided; part -1: all but the first two parts."""
        left = self.prompt % parts
        rows = (left > 1) if part < 0 else left == part
        return LabelledBlocks(
            self.confidence[rows], self.final[rows], self.open[rows], self.prompt[rows], self.passes, self.static
        )


@dataclass(frozen=True)
class Replay(UnmaskingPolicy):
    """Writes every proposal that is right, however unsure: the fewest passes that a filter could come to.

    Where nothing of a block is, the block is written as it should be. What it saw is kept in `seen`: confidences [b],
    which were right [b], which were open [b].
    """

    answers: Any = None  # [L] what is right
    seen: Any = None
    places: int = 32

    def select(self, view: View, memory: Any) -> tuple[Commit, Any]:
        wanted = self.answers[view.positions]
        right = view.tokens == wanted
        final, is_open = np.zeros(self.places, dtype=bool), np.zeros(self.places, dtype=bool)
        final[view.positions - view.region[0]], is_open[view.positions - view.region[0]] = right, True
        self.seen.append((block(view, self.places), final, is_open))
        if right.any():
            return view.at(right), memory
        return Commit(view.positions, wanted), memory


def labelled(
    engine: Engine,
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    length: int,
    places: int,
    *,
    eos_ids: Sequence[int] = (),
    progress: Progress = silent,
) -> LabelledBlocks:
    """What static decoding in blocks of `places` writes, and which proposals on the way equal it."""
    method = Static(block=places)
    rows, owners, passes, static = [], list[int](), 0, 0
    for first in range(0, len(prompts), _TOGETHER):
        some = prompts[first : first + _TOGETHER]
        canvases = [Canvas.of(model, prompt, length, eos_ids=eos_ids) for prompt in some]
        fill_all(engine, model, canvases, method, 0.0)
        static += sum(canvas.passes for canvas in canvases)
        for number, (prompt, done) in enumerate(zip(some, canvases, strict=True), first):
            seen: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
            again = Canvas.of(model, prompt, length, eos_ids=eos_ids)
            fill_all(engine, model, [again], Replay(answers=done.tokens, seen=seen, places=places, block=places), 0.0)
            passes += again.passes
            rows += seen
            owners += [number] * len(seen)
            progress("decoding twice", number + 1, len(prompts))
    confidence, final, is_open = (torch.from_numpy(np.stack(each)) for each in zip(*rows, strict=True))
    return LabelledBlocks(confidence, final, is_open, int_tensor(owners), passes, static)


def fit_filter(
    found: LabelledBlocks,
    *,
    model: str = "",
    epochs: int = 3000,
    lr: float = 3e-3,
    seed: int = 0,
    rho: float = 0.96,
    out: Path | None = None,
    progress: Progress = silent,
) -> tuple[Filter, dict[str, Any]]:
    """The filter that does best on prompts held out, and how well it does on others.

    auc: how often it ranks a final proposal above one that is not, and plain_auc the confidence itself; precision: of
    what is above rho, the part that is final; recall: of what is final, the part above rho.

    It goes on from a checkpoint in the folder `out`.
    """
    learned, held, judged = found.of(-1), found.of(0), found.of(1)
    if not all(len(each.prompt) for each in (learned, held, judged)):
        raise SettingsError(f"a filter is trained, chosen and judged on different prompts: give at least {_HELD_OUT}")
    made = Filter.untrained(learned.confidence.shape[1], seed, model)
    parts: dict[str, Any] = {name: getattr(made, name) for name in ("weight", "bias", "out", "out_bias")}
    if epochs:
        train(
            parts,
            lambda step: _loss(made, learned),
            even_plan(epochs, lr, weight_decay=1e-2, validate_every=min(50, epochs)),
            out,
            validate=lambda: {"loss": float(_loss(made, held))},
            metric="loss",
            settings={"blocks": content([found.confidence, found.final, found.open, found.prompt]), "seed": seed},
            progress=progress,
            what="training a filter",
            own=True,
        )
    chosen = replace(made, **{name: each.detach() for name, each in parts.items()})
    with torch.no_grad():
        odds = torch.sigmoid(chosen.logits(judged.confidence))[judged.open].numpy()
    truth, plain = judged.final[judged.open].numpy(), judged.confidence[judged.open].numpy()
    above = odds > rho
    mixed = 0 < truth.sum() < len(truth)
    return chosen, {
        "tested on": f"{len(judged.prompt.unique())} prompts that chose nothing",
        "auc": auc(odds, truth) if mixed else 1.0,
        "plain_auc": auc(plain, truth) if mixed else 1.0,
        "precision": float(truth[above].mean()) if above.any() else 1.0,
        "recall": float(above[truth].mean()) if truth.any() else 0.0,
    }


def _loss(made: Filter, rows: LabelledBlocks) -> torch.Tensor:
    logits = made.logits(rows.confidence)[rows.open]
    return torch.nn.functional.binary_cross_entropy_with_logits(logits, rows.final[rows.open].float())


@dataclass(frozen=True)
class FilterSettings(Data):
    """What a filter is trained on, and how."""

    prompts: Path = field(default=Path(), metadata=ARGUMENT)
    dtype: str = option("auto", "Precision of the weights.")
    block: int = option(32, "Positions of a block.")
    max_new_tokens: int = option(256, "Positions of a canvas.")
    epochs: int = option(3000, "Training epochs, full batch.")
    apply_chat_template: bool = option(True, "The prompts are plain text, without the chat template.", **PLAIN)
    seed: int = option(0, "Random seed of the initial weights.")

    def check(self) -> None:
        if min(self.block, self.max_new_tokens, self.epochs) < 1:
            raise SettingsError("a filter needs block, max-new-tokens and epochs of at least 1")
        read_prompts(self.prompts)


@kind(
    "The filter is ready: --diffuse learn2pd:filter={out},block={block}",
    (FilterSettings(),),
    "prompts.txt -m diffusion --out filter.safetensors",
    model="whose decoding is learned from",
    out="file",
)
def _learn2pd(run: Run) -> dict[str, Any]:
    """Train a filter that predicts which proposals of MODEL are final, for --diffuse learn2pd:filter=FILE.

    MODEL fills a canvas after each line of PROMPTS, one token a pass. Then it fills it again and writes every
    proposal that is final. Of ten prompts one selects the filter and one evaluates it. auc and plain_auc rate the
    filter and the plain confidence; least_passes is the share of passes that a perfect filter needs.
    """
    given = run.of(FilterSettings)
    lines, lm = read_prompts(given.prompts), LLM(run.load(given.dtype))
    encoded = [lm.encode(line, apply_chat_template=given.apply_chat_template) for line in lines]
    how: dict[str, Any] = {"eos_ids": lm.tokenizer.eos_ids, "progress": run.progress}
    found = labelled(lm.engine(), lm.model, encoded, given.max_new_tokens, given.block, **how)
    learned, figures = fit_filter(found, model=lm.model.fingerprint, epochs=given.epochs, seed=given.seed, **run.kept)
    facts = {"prompts": len(lines), "places": given.block, "epochs": given.epochs, "command": run.command}
    replace(learned, facts=facts).save(run.out)
    least = {"least_passes": round(found.passes / found.static, 4)}
    return {"blocks": len(found.prompt), **rounded(figures), **least}
