"""Train a small PLDR-LLM on puzzles, and keep it with operators that no longer hang on what it reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random

import torch
from torch.nn.functional import cross_entropy

from decodery.core.errors import SettingsError
from decodery.models.config import ModelConfig
from decodery.models.loaders.drafts import DESCRIPTION
from decodery.models.loaders.store import Progress, silent
from decodery.models.torch.power_law import OperatorNets, PowerLaw, side_by_side
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense, Layer, Weights
from decodery.training.card import check_folder as holds
from decodery.training.cut import parameters
from decodery.training.loop import History, TrainingPlan, train
from decodery_benchmarks.puzzles import Puzzle, drawn
from decodery_benchmarks.puzzles.alphabet import END_ID, VOCABULARY, encoded, tokenizer

from .puzzle_model import save, solves, training_batch

check_folder = partial(holds, made=DESCRIPTION)

_KEPT = 16
"""Prompts whose operators are averaged for the ones that are kept."""


@dataclass(frozen=True)
class PLDRRecipe:
    """Shape and settings of a training. The published model of 110 million weights has 5 layers, 14 heads of 64, 8
    units.

    operator_inner: of the gated layers that make operators, `depth` in each of `units`.
    """

    heads: int = 4
    head_dim: int = 32
    layers: int = 3
    inner: int = 256
    operator_inner: int = 64
    units: int = 2
    depth: int = 2
    context: int = 256
    steps: int = 1500
    batch: int = 24
    lr: float = 1e-3
    seed: int = 0
    every: int = 150
    held: int = 96

    def __post_init__(self) -> None:
        if min(self.heads, self.layers, self.units, self.depth, self.batch, self.held, self.context) < 1:
            raise SettingsError("a PLDR-LLM needs heads, layers, units, depth, batch, held and context of at least 1")
        if self.head_dim < 2 or self.head_dim % 2:
            raise SettingsError(f"heads are rotated by pairs: head_dim is an even number, not {self.head_dim}")


def train_pldr(
    puzzle: Puzzle, out: Path, *, recipe: PLDRRecipe | None = None, command: str = "", progress: Progress = silent
) -> dict[str, float]:
    """Train a model for `puzzle` and leave it in the folder `out`, with the mean operators of some prompts as weights.

    What makes operators lies beside it, see `PowerLaw.load`. Returns what validation said of the model that is kept:
    the loss with operators of each text's own, and with kept ones the loss and the share of puzzles solved greedily.
    Interrupted, it goes on from its last checkpoint when called again.
    """
    recipe = recipe or PLDRRecipe()
    check_folder(out)
    law = random_power_law(recipe)
    learned = parameters(law.model) | {f"nets.{name}": each for name, each in law.nets.tensors.items()}
    for each in learned.values():
        each.requires_grad_(True)
    held = list(islice(drawn(puzzle, "validation"), recipe.held))

    def loss(step: int) -> torch.Tensor:
        tokens, taught = training_batch(puzzle, recipe.batch, step, recipe.seed)
        logits, _ = law.predicted(tokens[:, :-1])
        return cross_entropy(logits.flatten(0, 1), taught[:, 1:].flatten(), ignore_index=-1)

    @torch.no_grad()
    def validate() -> dict[str, float]:
        tokens, taught = training_batch(puzzle, recipe.batch, 10**6, recipe.seed)
        logits, _ = law.predicted(tokens[:, :-1])
        kept = law.frozen(mean_operators(law, puzzle))
        frozen = side_by_side(kept, tokens[:, :-1])
        losses = [
            float(cross_entropy(each.flatten(0, 1), taught[:, 1:].flatten(), ignore_index=-1))
            for each in (logits, frozen)
        ]
        return {"loss": losses[0], "frozen": losses[1], "greedy": solves(kept, puzzle, held)}

    history = train(
        learned,
        loss,
        TrainingPlan(recipe.steps, lr=recipe.lr, weight_decay=0.1, betas=(0.9, 0.95), validate_every=recipe.every),
        out / "training",
        validate=validate,
        metric="frozen",
        settings={"puzzle": repr(puzzle), "recipe": asdict(recipe)},
        progress=progress,
        what=f"learning {puzzle.spec}",
    )
    for each in learned.values():
        each.requires_grad_(False)
    found = history.metrics[str(history.best_step)]
    law.save(out)
    save(law.frozen(mean_operators(law, puzzle)), out, "".join(_card(puzzle, recipe, history, found, command)))
    return found


def mean_operators(law: PowerLaw, puzzle: Puzzle) -> torch.Tensor:
    """[layers, heads, d, d], the mean over operators of some prompts with their solutions."""
    random = Random("operators")
    texts = [encoded(each + puzzle.solve(each, random)) for each in islice(drawn(puzzle, "train"), _KEPT)]
    return torch.stack([law.operators(each) for each in texts]).mean(dim=0)


def random_power_law(recipe: PLDRRecipe) -> PowerLaw:
    """A model of this shape with random weights, float32, for the puzzles' alphabet.

    As its authors begin: matrices even within their Xavier bound, those of operators normal, biases zero.
    """
    dim, hidden = recipe.head_dim, recipe.heads * recipe.head_dim
    config = ModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=recipe.inner,
        num_layers=recipe.layers,
        num_heads=recipe.heads,
        num_kv_heads=recipe.heads,
        head_dim=dim,
        max_positions=recipe.context,
        family="pldr",
        norm_eps=1e-6,
        tie_embeddings=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        embedding_scale=hidden**0.5,
        eos_ids=(END_ID,),
        centred_norms=True,
        joined_norms=True,
        vocabulary=tokenizer().fingerprint(),
    )
    chance = torch.Generator().manual_seed(recipe.seed)

    def even(outputs: int, inputs: int) -> torch.Tensor:
        return (2 * torch.rand(outputs, inputs, generator=chance, dtype=torch.float32, device="cpu") - 1) * (
            6 / (inputs + outputs)
        ) ** 0.5

    def norm(size: int) -> torch.Tensor:
        return torch.cat(
            (torch.ones(size, dtype=torch.float32, device="cpu"), torch.zeros(size, dtype=torch.float32, device="cpu"))
        )

    def dense(inputs: int, *outputs: int) -> Dense:
        return Dense(
            torch.cat([even(each, inputs) for each in outputs]),
            torch.zeros(sum(outputs), dtype=torch.float32, device="cpu"),
        )

    layers = [
        Layer(
            attention_norm=norm(hidden),
            qkv=dense(hidden, hidden, hidden, hidden),
            output=dense(hidden, hidden),
            mlp_norm=norm(hidden),
            gate_up=dense(hidden, recipe.inner, recipe.inner),
            down=dense(recipe.inner, hidden),
        )
        for _ in range(recipe.layers)
    ]
    tensors: dict[str, torch.Tensor] = {}
    inner, shape = recipe.operator_inner, (recipe.heads, dim, dim)
    for layer in range(recipe.layers):
        tensors[f"{layer}.density"] = norm(dim)
        for unit in range(recipe.units):
            tensors[f"{layer}.{unit}.norm"] = norm(dim)
            for depth in range(recipe.depth):
                at = f"{layer}.{unit}.{depth}."
                for name, each in {"gate_up": dense(dim, inner, inner), "down": dense(inner, dim)}.items():
                    assert each.bias is not None
                    tensors |= {at + name: each.weight, f"{at}{name}_bias": each.bias}
        # Of three dimensions, the first counts as outputs and the last one as what is summed over with both.
        spread = (2 / (dim * dim + recipe.heads * dim)) ** 0.5
        for name in ("weight", "power", "coupling"):
            tensors[f"{layer}.{name}"] = spread * torch.randn(
                shape, generator=chance, dtype=torch.float32, device="cpu"
            )
        tensors |= {
            f"{layer}.{name}": torch.zeros(shape, dtype=torch.float32, device="cpu") for name in ("bias", "offset")
        }
    table = torch.randn(VOCABULARY, hidden, generator=chance, dtype=torch.float32, device="cpu") * hidden**-0.5
    model = Transformer(config, Weights(table, layers, norm(hidden), Dense(table)))
    return PowerLaw(model, OperatorNets(tensors, recipe.units, recipe.depth))


def _card(puzzle: Puzzle, recipe: PLDRRecipe, history: History, found: dict[str, float], command: str) -> Iterator[str]:
    yield f"# A PLDR-LLM for {puzzle.spec}\n\n    {command or 'python benchmarks/train.py pldr'}\n\n"
    yield f"{recipe.layers} layers, {recipe.heads} heads of {recipe.head_dim}, operators by {recipe.units} units. "
    yield f"Trained from random weights for {history.best_step} steps of {recipe.batch} texts. On puzzles held out: "
    yield f"loss {found['loss']:.4f} with operators of each text's own, {found['frozen']:.4f} with those that are "
    yield f"kept, with which it solves {found['greedy']:.1%} greedily.\n"
