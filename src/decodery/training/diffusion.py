"""Train a small masked diffusion model on lists, and keep it as LLaDA's checkpoints are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.models.config import ModelConfig
from decodery.models.hooks import Hooks
from decodery.models.layer_plan import WHOLE, layer_steps
from decodery.models.loaders.dtype import choose_dtype
from decodery.models.loaders.load import load
from decodery.models.loaders.store import Progress, silent
from decodery.models.torch.side_by_side import SideBySide
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense, Layer, Weights

from .card import check_folder
from .held_out import HeldOut, Measured
from .kind import Run, kind, option
from .lists import END, LEAST, MASK, MOST, VOCABULARY, ListExample, canvas_length, examples, ids, known, prompt_length
from .llada_folder import MODEL, named_tensors, write_llada
from .loop import History, TrainingPlan, train
from .tensors import int_tensor, normal


@dataclass(frozen=True)
class ModelSize:
    """Shape of a diffusion model."""

    width: int
    layers: int
    heads: int
    inner: int
    experts: int = 0  # Of which each row takes two, each with `inner` units; 0 is an MLP that all rows take.


SIZES = {
    "xs": ModelSize(64, 3, 4, 256),
    "s": ModelSize(160, 4, 5, 640),
    "m": ModelSize(256, 6, 8, 1024),
    "xs-moe": ModelSize(64, 3, 4, 64, 16),
    "s-moe": ModelSize(160, 4, 5, 160, 16),
}
"""By name."""
CONTEXT = 256
"""Tokens of a prompt and a canvas together, at most."""
HELD = 1 << 32
"""Seeds of examples held out begin here; training's steps never come so far."""
TESTED = 256
"""Examples that a finished model is tested on, beside as many that choose its best step."""


@dataclass(frozen=True)
class DiffusionRecipe:
    """How a diffusion model is trained.

    Attributes:
        tasks: Also sort, insert-, remove- and replace-index and -random, latin-square, sudoku, add, expr, json, pair,
            seed-copy, and copy-, shuffle- and replace-random-names, of two words each.
    """

    tasks: tuple[str, ...] = ("copy", "reverse", "shuffle", "replace-random")
    letters: int = option(MOST, "Letters of the longest list.")
    size: str = option("xs", "Model size: xs, s or m (0.2, 2 or 6 million parameters), xs-moe or s-moe (16 experts).")
    steps: int = 3000
    batch: int = option(64, "Examples of a step.")
    lr: float = 1e-3
    blank: float = option(0.1, "Share of prompts that are masked too, as guidance needs.")
    places: int | None = option(None, "Train on canvases of all lengths up to N; the length of the answer by default.")
    seed: int = option(0, "Random seed of examples, masks and initial weights.")

    def __post_init__(self) -> None:
        known(self.tasks, self.letters)
        if self.places is not None and not LEAST < self.places <= CONTEXT - self.prompt:
            raise SettingsError(
                f"canvases after prompts of {self.prompt} words have {LEAST + 1} to {CONTEXT - self.prompt} places, "
                f"not {self.places}"
            )
        if self.size not in SIZES:
            raise SettingsError(f"there is no size {self.size!r}: choose {', '.join(SIZES)}")
        if self.batch < 1:
            raise SettingsError(f"a step learns from at least one example, not {self.batch}")

    @property
    def prompt(self) -> int:
        """Tokens of a prompt."""
        return prompt_length(self.tasks, self.letters)

    @property
    def canvas(self) -> int:
        """Tokens of an answer, at most."""
        return self.places or canvas_length(self.tasks, self.letters)


def train_diffusion(
    recipe: DiffusionRecipe, out: Path, *, validate_every: int = 100, progress: Progress = silent
) -> History:
    """Train a model in the folder `out`, ready to be loaded.

    Interrupted, it goes on from there when called again. Of every example k of its answer's n tokens are masked, every
    k equally often, and the loss is the mean cross-entropy over these: the same optimum as LLaDA's loss over all
    masking rates, with less variance.
    """
    check_folder(out, MODEL)
    model = untrained(recipe)
    held = Masked.draw(recipe, 256, HELD)
    # What a mixture of small MLPs costs is the sorting of rows, which such products only make dearer.
    fast = not model.config.experts and choose_dtype("auto", "bfloat16", model.device) == "bfloat16"

    def loss(step: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=fast):
            return distance(model, Masked.draw(recipe, recipe.batch, step))

    plan = TrainingPlan(recipe.steps, lr=recipe.lr, betas=(0.9, 0.98), validate_every=validate_every)
    return learn(model, loss, lambda: distance(model, held), plan, out, asdict(recipe), progress, "training")


def learn(
    model: Transformer,
    loss: Callable[[int], torch.Tensor],
    held: Callable[[], torch.Tensor],
    plan: TrainingPlan,
    out: Path,
    settings: dict[str, Any],
    progress: Progress,
    what: str,
) -> History:
    """Train all of a model and keep it in `out`; called again, it goes on there.

    Args:
        held: The loss of what training does not see, the least of which tells what model is kept. It has to be of the
            kind that is trained on: by another one the model that training begins with may well stay the best.
    """
    history = train(
        *(parameters(model), loss, plan, out / "training"),
        validate=lambda: {"loss": float(held())},
        metric="loss",
        settings=settings,
        progress=progress,
        what=what,
    )
    write_llada(model, out)
    return history


def trained(folder: Path) -> Transformer:
    """A model of `train_diffusion`, to be trained further."""
    model = load(str(folder), dtype="float32", device="cpu").model
    if not isinstance(model, Transformer) or model.config.family not in ("llada", "llada_moe"):
        raise SettingsError(f"{folder} holds no model of `decodery train diffusion`: make one first")
    if model.vocab_size != len(VOCABULARY):
        raise SettingsError(
            f"the model in {folder} has another vocabulary: train it again with `decodery train diffusion`"
        )
    return model


@dataclass(frozen=True)
class Masked:
    """Examples with some of their answers masked.

    Attributes:
        tokens, shown: [n, prompt + canvas], whole and as they are shown.
    """

    tokens: np.ndarray
    shown: np.ndarray
    weights: np.ndarray  # [n, canvas], of each token in the loss; a row sums to 1 / n.

    @classmethod
    def draw(cls, recipe: DiffusionRecipe, count: int, number: int) -> Masked:
        """A function of the recipe's seed and a number alone."""
        draws = np.random.default_rng([recipe.seed, number])
        drawn, canvas = examples(recipe.tasks, count, draws, recipe.letters), recipe.canvas
        if recipe.places is not None:
            canvas = int(draws.integers(LEAST + 1, recipe.places + 1))
        tokens = np.array([ids(each.prompt + (each.answer + [END] * canvas)[:canvas]) for each in drawn])
        # Every k in turn, so that no batch is all nearly open or all nearly written.
        sizes = 1 + (int(draws.integers(canvas)) + draws.permutation(count)) % canvas
        hidden = draws.random((count, canvas)).argsort(axis=1) < sizes[:, None]
        shown = tokens.copy()
        shown[:, recipe.prompt :][hidden] = VOCABULARY.index(MASK)
        shown[np.flatnonzero(draws.random(count) < recipe.blank), : recipe.prompt] = VOCABULARY.index(MASK)
        return cls(tokens, shown, hidden / (sizes[:, None] * count))


def lost(model: Transformer, masked: Masked) -> torch.Tensor:
    """[n] the mean cross-entropy of the masked tokens of each example, in nats."""
    count, length = masked.shown.shape
    chosen = np.pad(masked.weights, ((0, 0), (length - masked.weights.shape[1], 0))).reshape(-1) * count
    places = torch.from_numpy(np.flatnonzero(chosen))
    wanted = torch.from_numpy(masked.tokens.reshape(-1))[places]
    each = torch.nn.functional.cross_entropy(logits_at(model, masked.shown, places), wanted, reduction="none")
    weighed = each * torch.from_numpy(chosen).float()[places]
    return torch.zeros(count, dtype=each.dtype, device="cpu").index_add(0, places // length, weighed)


def distance(model: Transformer, masked: Masked) -> torch.Tensor:
    """The mean over examples of `lost`."""
    return lost(model, masked).mean()


def logits_at(model: Transformer, shown: np.ndarray, places: torch.Tensor) -> torch.Tensor:
    """[m, vocab] of places of examples [n, length], counted through; the mask is never predicted."""
    count, length = shown.shape
    texts = SideBySide(model, count, length, torch.ones(length, length, dtype=torch.bool, device="cpu"))
    rows = model.embed_tokens(torch.from_numpy(shown.reshape(-1)))
    hidden = model.blocks(rows, texts, layer_steps(WHOLE, model.config.num_layers), Hooks.reading(()))
    logits = model.outputs(hidden[places]).float()
    return logits.index_fill(1, int_tensor([VOCABULARY.index(MASK)]), -torch.inf)


def untrained(recipe: DiffusionRecipe) -> Transformer:
    """A model of the recipe's size, random as its seed says."""
    size = SIZES[recipe.size]
    width, count, inner, parts = size.width, size.layers, size.inner, max(size.experts, 1)
    config = ModelConfig(
        vocab_size=len(VOCABULARY), hidden_size=width, intermediate_size=inner, num_layers=count, num_heads=size.heads,
        num_kv_heads=size.heads, head_dim=width // size.heads, max_positions=CONTEXT,
        family="llada_moe" if size.experts else "llada", qk_norm=size.experts > 0, eos_ids=(VOCABULARY.index(END),),
        causal=False, mask_id=VOCABULARY.index(MASK), experts=size.experts, experts_per_token=min(2, size.experts),
        normed_experts=False,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(recipe.seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return normal(generator, rows, columns) * gain / columns**0.5

    def mixed() -> dict[str, Any]:
        """What a layer of several MLPs has besides: the norms of LLaDA-MoE, and the choice among them."""
        if not size.experts:
            return {}
        head = torch.ones(config.head_dim, dtype=torch.float32, device="cpu")
        return {"q_norm": head, "k_norm": head.clone(), "router": matrix(size.experts, width)}

    def layer() -> Layer:
        return Layer(
            attention_norm=torch.ones(width, dtype=torch.float32, device="cpu"),
            qkv=Dense(matrix(3 * width, width)),
            output=Dense(matrix(width, width, (2 * count) ** -0.5)),
            mlp_norm=torch.ones(width, dtype=torch.float32, device="cpu"),
            gate_up=Dense(matrix(parts * 2 * inner, width)),
            down=Dense(matrix(parts * width, inner, (2 * count) ** -0.5)),
            **mixed(),
        )

    embedding, layers = matrix(len(VOCABULARY), width, width**0.5), [layer() for _ in range(count)]
    return Transformer(
        config,
        Weights(
            embedding,
            layers,
            torch.ones(width, dtype=torch.float32, device="cpu"),
            Dense(matrix(len(VOCABULARY), width)),
        ),
    )


def parameters(model: Transformer) -> dict[str, torch.Tensor]:
    """All weights by name, to be learned."""
    return {name: tensor.requires_grad_() for name, tensor in named_tensors(model).items()}


def held_out(recipe: DiffusionRecipe, count: int) -> list[ListExample]:
    """Examples that training never sees, of all tasks in turn."""
    return examples(recipe.tasks, count, np.random.default_rng([recipe.seed, HELD + 1]), recipe.letters)


@torch.no_grad()
def tested(folder: Path, recipe: DiffusionRecipe, before: Transformer) -> dict[str, Any]:
    """The report of the model in a folder, on examples that neither taught it nor chose its best step."""
    drawn = Masked.draw(recipe, TESTED, HELD + 2)
    after, begun = (lost(model, drawn).tolist() for model in (trained(folder), before))
    known = HeldOut([], list(range(TESTED)))

    def loss(of: Sequence[float]) -> Measured:
        return known.measured(lambda numbers: {"loss": float(np.mean([of[each] for each in numbers]))}, "loss")

    return known.report(loss(after), {"before": loss(begun)}, "examples")


@kind(
    "The model is ready: --model {out} --no-chat-template --diffuse static",
    (DiffusionRecipe(),),
    "--size xs --tasks copy,reverse --out diffusion",
    file=MODEL,
)
def _diffusion(run: Run) -> dict[str, Any]:
    """Train a model that fills canvases with answers about short lists, to try diffusion decoders on.

    The folder works as --model, in the layout of LLaDA checkpoints. Examples are generated during training.
    """
    recipe = run.of(DiffusionRecipe)
    train_diffusion(recipe, run.out, progress=run.progress)
    return tested(run.out, recipe, untrained(recipe))
