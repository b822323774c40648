"""Train codebooks: codes in the place of hidden states, by what the model then predicts and how near they come."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy, layer_norm

from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.core.noise import nth_seed
from decodery.models.config import ModelConfig
from decodery.models.hooks import OF_LAYERS, HookPoint, Hooks, hook_point
from decodery.models.protocol import LanguageModel
from decodery.models.torch.side_by_side import predicted
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense
from decodery.monitors.codebook import Codebooks, mean_of, nearest

from .cut import parameters
from .evaluation import ALONE, MonitorContext
from .held_out import Measured, bootstrap, compared
from .kind import COUNT, Bounded, Run, bounded, kind, option
from .kind_data import TextFiles
from .loop import content, even_plan, train
from .tensors import int_tensor, normal


class Coding(Hooks):
    """Visits that replace rows by the mean of their codes.

    The gradient goes to the codes, and through them to what they come near as if it had stayed. Without the norm
    nothing would hold the length of rows that are learned: no loss depends on it, and codes that run after it would
    never arrive.

    Args:
        normed: Codes come near the normed rows, as in the paper, where the model learns to live with their length; else
            near the rows as they are, which a model that stays as it is needs.
        order: Draws which row's codes each row gets; None for its own.
    """

    def __init__(
        self, codes: Mapping[HookPoint, torch.Tensor], k: int, normed: bool, order: torch.Generator | None = None
    ) -> None:
        super().__init__({place.name + str(place.layer): place for place in codes}, {}, None)
        self._codes, self._k, self._normed, self._order = codes, k, normed, order
        self.lost: list[torch.Tensor] = []

    def visit(self, place: HookPoint, rows: torch.Tensor) -> torch.Tensor:
        if place not in self._codes:
            return rows
        codes = self._codes[place]
        with torch.no_grad():
            ids = nearest(rows, codes, self._k)
            if self._order is not None:
                ids = ids[torch.randperm(len(ids), generator=self._order, device="cpu").to(ids.device)]
        found = mean_of(codes, ids).flatten(1)
        wanted = in_groups(rows, codes.shape[0], self._normed).flatten(1)
        self.lost.append((found - wanted.detach()).square().mean())
        return found + wanted - wanted.detach()


def in_groups(rows: torch.Tensor, groups: int, normed: bool) -> torch.Tensor:
    """[n, groups, dim] of rows [n, groups * dim], each group normed on wish."""
    found = rows.unflatten(-1, (groups, -1))
    return layer_norm(found, found.shape[-1:]) if normed else found


def group_shape(tap: str, config: ModelConfig) -> tuple[int, int]:
    """Groups and width of each at a hook point."""
    place = hook_point(tap, config.num_layers)
    if place.name not in OF_LAYERS:
        raise SettingsError(f"codebooks are for {', '.join(f'{name}.L' for name in OF_LAYERS)}, not {tap}")
    return (config.num_heads, config.head_dim) if place.name == "head_out" else (1, config.hidden_size)


@dataclass(frozen=True)
class CodebookSettings(Bounded):
    """How codebooks are trained.

    Attributes:
        sites: Hook point: head_out.L, attn_out.L or mlp_out.L of layer L. Repeatable; mlp_out of the middle layer by
            default.
        seeds: Trainings with seeds of their own, of which the first is kept; the figure of each is printed.
    """

    sites: tuple[str, ...] = field(default=(), metadata={"option": "--site"})
    codes: int = bounded(1000, "[2, inf)", "Codes of a codebook.")
    k: int = bounded(8, COUNT, "Codes of a row.")
    steps: int = 200
    batch: int = option(4, "Batch size in text pieces.")
    lr: float = 5e-4
    seeds: int = bounded(1, COUNT)
    seed: int = option(0, "Random seed of order and initial weights.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k > self.codes:
            raise SettingsError(f"--k {self.k} is more than --codes {self.codes}: give a smaller --k")


def train_codebook(
    model: LanguageModel,
    draw: Callable[[torch.Generator], torch.Tensor],
    given: CodebookSettings,
    *,
    whole: bool = False,
    held: torch.Tensor | None = None,
    context: MonitorContext = ALONE,
) -> Codebooks:
    """Codebooks of the given hook points, begun at rows of the first texts.

    Args:
        draw: Tokens [texts, length] of the next step. The loss is the cross-entropy of what the model predicts through
            the codes, plus their squared distance from what they replace.
        whole: Train the model's own weights as well, in place, as the paper does; else it stays as it is, and the
            codebooks are for it.
        held: [texts, length] tokens that `draw` never gives, for the report in `facts`, see `compared`.
    """
    sites, k, seed = given.sites, given.k, given.seed
    if not isinstance(model, Transformer) or not isinstance(model.weights.layers[0].qkv, Dense):
        raise UnsupportedModel("codebooks are trained through a model in floating point: load it with dtype=float32")
    places = {tap: hook_point(tap, model.config.num_layers) for tap in sites}
    draws = torch.Generator().manual_seed(seed)
    books = _begun(model, draw(draws), sites, given.codes, draws, whole)
    begun = {tap: each.detach().clone() for tap, each in books.items()}
    learned = {f"codes.{number}": each for number, each in enumerate(books.values())}
    if whole:
        learned |= parameters(model)

    def told(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of what is predicted in a step, and the distance from what the codes replace."""
        tokens = draw(torch.Generator().manual_seed(nth_seed(seed, step + 1)))
        hooks = Coding({places[tap]: books[tap] for tap in sites}, k, whole)
        logits = predicted(model, tokens[:, :-1], hooks)
        loss = cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        return loss, torch.stack(hooks.lost).sum()

    made = {"sites": list(sites), "codes": given.codes, "k": k, "seed": seed, "model": model.fingerprint}
    train(
        learned,
        lambda step: torch.stack(told(step)).sum(),
        even_plan(given.steps, given.lr),
        context.out,
        settings={**made, "begun": content(list(begun.values()))},
        progress=context.progress,
        what="training codebooks",
        own=True,
    )
    with torch.no_grad():
        kept = [float(each) for each in told(given.steps)]
    tensors = {f"codes.{number}": books[tap].detach() for number, tap in enumerate(sites)}
    about = {**context.facts, "steps": given.steps, "seed": seed, "whole": whole}
    about |= {"loss": round(kept[0], 4), "lost": round(kept[1], 6)}
    if held is not None and not whole:
        # A model that learned along is no longer the one to compare with.
        about["report"] = judged(model, held, books, begun, k)
    return Codebooks(tensors, tuple(sites), k, about, model.fingerprint)


@torch.no_grad()
def judged(
    model: Transformer, held: torch.Tensor, books: Mapping[str, torch.Tensor], begun: Mapping[str, torch.Tensor], k: int
) -> dict[str, Any]:
    """What codes cost a model that stays unchanged, on held-out texts.

    Returns:
        "without codes" in nats per token, and what each adds to it as "more than without", with its 95 % "interval" by
        bootstrap over texts, in pairs: codes, and as baselines codes as they were begun, random ones of the same size,
        and the mean code alone in the place of every state. The control gives each state the codes of another one.
    """

    def losses(codes: Mapping[str, torch.Tensor], count: int, order: torch.Generator | None = None) -> np.ndarray:
        found = []
        for text in held:
            places = {hook_point(tap, model.config.num_layers): each for tap, each in codes.items()}
            logits = predicted(model, text[None, :-1], Coding(places, count, False, order) if places else None)
            found.append(float(cross_entropy(logits[0].float(), text[1:])))
        return np.array(found)

    plain, draws = losses({}, k), torch.Generator().manual_seed(0)

    def figures(codes: Mapping[str, torch.Tensor], count: int, order: torch.Generator | None = None) -> Measured:
        apart, name = losses(codes, count, order) - plain, "more than without"
        return Measured({name: float(apart.mean()), "interval": bootstrap(apart.tolist())}, name, apart.tolist())

    def drawn(like: torch.Tensor) -> torch.Tensor:
        noise = normal(draws, *like.shape).to(like)
        return like.mean(dim=1, keepdim=True) + noise * like.std(dim=1, keepdim=True)

    baselines = {
        "codes as begun": (begun, k),
        "random codes": ({tap: drawn(each) for tap, each in begun.items()}, k),
        "the mean alone": ({tap: each.mean(dim=1, keepdim=True) for tap, each in begun.items()}, 1),
    }
    return {
        "tested on": f"{len(held)} texts that chose nothing",
        "without codes": round(float(plain.mean()), 4),
        **compared(
            figures(books, k), {name: figures(*each) for name, each in baselines.items()}, figures(books, k, draws)
        ),
    }


@torch.no_grad()
def _begun(
    model: Transformer, tokens: torch.Tensor, sites: Ordered[str], codes: int, draws: torch.Generator, normed: bool
) -> dict[str, torch.Tensor]:
    """[groups, codes, dim] by site: rows that the model makes of some texts, drawn with replacement, a little apart."""
    places = {tap: hook_point(tap, model.config.num_layers) for tap in sites}
    hooks = Hooks.reading(list(places.values()))
    predicted(model, tokens, hooks)
    found = {}
    for tap, place in places.items():
        groups, _ = group_shape(tap, model.config)
        rows = in_groups(hooks.states[place].detach(), groups, normed).transpose(0, 1)
        drawn = rows[:, torch.randint(rows.shape[1], (codes,), generator=draws, device="cpu")]
        noise = normal(draws, *drawn.shape) * rows.std() * 0.05
        found[tap] = (drawn + noise).clone().requires_grad_()
    return found


def reading(tokens: Ordered[Ordered[int]], batch: int) -> Callable[[torch.Generator], torch.Tensor]:
    """`draw` over pieces of text of one length."""
    pieces = int_tensor([list(each) for each in tokens])
    return lambda draws: pieces[torch.randint(len(pieces), (batch,), generator=draws, device="cpu")]


@kind(
    "The codebooks are ready: --monitor codebook:codebooks={out},action=switch",
    (TextFiles(), CodebookSettings()),
    "notes.txt --out codebooks",
    model="whose hidden states get codes",
)
def _codebook(run: Run) -> dict[str, Any]:
    """Train codebooks of the hidden states of MODEL on text FILES, for the monitor codebook.

    A state is replaced by the mean of its nearest codes. The codes are trained on the predictions of MODEL and on
    their distance to the states. MODEL does not change.
    """
    given, loaded = run.of(CodebookSettings), run.load("float32")
    sites = given.sites or (f"mlp_out.{loaded.model.config.num_layers // 2}",)
    found = run.of(TextFiles).pieces(loaded, needed=6)
    held, learned = found[::5], [each for number, each in enumerate(found) if number % 5]
    tested = int_tensor(held)
    context = MonitorContext(facts=run.facts, **run.kept)
    made = [
        train_codebook(loaded.model, reading(learned, given.batch), each, held=tested, context=context)
        for each in (replace(given, sites=sites, seed=seed) for seed in range(given.seed, given.seed + given.seeds))
    ]
    made[0].save(run.out / Codebooks.FILE)
    by_seed = [each.facts["report"]["more than without"] for each in made]
    return {"sites": list(sites), "k": given.k, **made[0].facts["report"], "more than without, by seed": by_seed}
