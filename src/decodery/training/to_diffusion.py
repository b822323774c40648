"""Adapt a model that writes from left to right to fill canvases: attention opens, and a mask token is learned.

DiffuLLaMA's way (Scaling Diffusion Language Models via Adaptation from Autoregressive Models, 2024): a row goes on
predicting the token after it, and the causal mask dissolves while thin matrices learn. What such a model can be taught
in an hour of two cores is one narrow kind of text, here short lists of words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from decodery.compression.base import Change, rebuilt, reported, transformable
from decodery.compression.folder import write
from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.models.hooks import Hooks
from decodery.models.layer_plan import WHOLE, layer_steps
from decodery.models.loaders.drafts import DESCRIPTION
from decodery.models.loaders.dtype import choose_dtype
from decodery.models.loaders.load import LoadedModel
from decodery.models.torch.side_by_side import SideBySide
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense

from .adapter import LoRARemaking
from .built_in import built_in_data
from .fitting import fit
from .held_out import HeldOut
from .kind import Bounded, Run, bounded, kind, option
from .loop import TrainingPlan
from .remade import Remade

WORDS = tuple(built_in_data("words"))
TASKS = ("copy", "reverse", "replace")
_HELD, _HELD_BATCHES = 1 << 32, 6
"""Seeds of examples held out begin here; training's steps never come so far."""


@dataclass(frozen=True)
class Adaptation(Bounded):
    """How a causal model becomes a diffusion model.

    A step learns from `batch` lists of one length.
    """

    tasks: tuple[str, ...] = option(TASKS, "Tasks on lists of words: copy, reverse, replace.")
    least: int = option(3, "Words of the shortest list.")
    most: int = option(6, "Words of the longest list.")
    places: int = option(12, "Positions of a canvas.")
    rank: int = option(16, "Rank of the trained matrices.")
    steps: int = 1500
    batch: int = option(16, "Batch size in lists.")
    lr: float = 5e-4
    annealing: float = bounded(0.3, "[0, 1]", "Share of the steps in which the causal mask dissolves.")
    seed: int = option(0, "Random seed of lists, masks and initial weights.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tasks or not set(self.tasks) <= set(TASKS):
            raise SettingsError(f"the tasks of the adaptation are {', '.join(TASKS)}")
        if not 1 <= self.least <= self.most:
            raise SettingsError(f"lists have from 1 to {self.most} words at least, not {self.least}")


@dataclass(frozen=True)
class WordTask:
    """A task on a list of words, as a prompt and the one text that answers it."""

    task: str
    words: tuple[str, ...]

    @property
    def prompt(self) -> str:
        return f"{self.task.capitalize()}: {' '.join(self.words)}\nAnswer:"

    @property
    def answer(self) -> str:
        words = list(self.words)
        if self.task == "reverse":
            words.reverse()
        elif self.task == "replace":
            words[1 % len(words)] = "new"
        return " " + " ".join(words)

    def right(self, text: str) -> bool:
        """Whether this is what was asked for, but for blanks."""
        return text.split() == self.answer.split()


def draw_tasks(settings: Adaptation, number: int, count: int, draws: np.random.Generator) -> list[WordTask]:
    """Examples of one task, which the number chooses, on lists of one length: all take as many tokens."""
    length, task = int(draws.integers(settings.least, settings.most + 1)), settings.tasks[number % len(settings.tasks)]
    return [WordTask(task, tuple(draws.choice(WORDS, length, replace=False).tolist())) for _ in range(count)]


def held_out(settings: Adaptation, count: int) -> list[WordTask]:
    """Examples that training never sees, of all tasks in turn and all lengths."""
    draws = np.random.default_rng([settings.seed, _HELD])
    return [each for number in range(count) for each in draw_tasks(settings, number, 1, draws)]


def annealed_mask(length: int, share: float, draws: np.random.Generator) -> torch.Tensor:
    """[length, length] bool: each row sees all earlier rows and a random share of later ones."""
    return torch.from_numpy(np.tri(length, dtype=bool) | (draws.random((length, length)) < share))


def end_and_mask(loaded: LoadedModel) -> tuple[int, int]:
    """The end token, and an unused special token as the mask token."""
    chat, config = loaded.chat_template, loaded.model.config
    taken = set(config.eos_ids) | {config.bos_id}
    named = "" if chat is None else chat.source + " ".join(map(str, chat.special.values()))
    for id, token in sorted(loaded.tokenizer.backend.get_added_tokens_decoder().items(), reverse=True):
        if token.special and id not in taken and token.content not in named and id < config.vocab_size:
            return config.eos_ids[0], id
    raise UnsupportedModel(f"{loaded.name} has no special token to spare for what is not written yet")


@dataclass(frozen=True)
class MaskedTasks:
    """A batch of tasks with some of their answers masked.

    Attributes:
        tokens, shown: [n, length], whole and as the model sees them.
    """

    tokens: np.ndarray
    shown: np.ndarray
    weights: np.ndarray  # [n, length], of each token in the loss

    @classmethod
    def of(cls, rows: Sequence[tuple[list[int], list[int]]], mask: int, draws: np.random.Generator) -> MaskedTasks:
        """A batch with masked positions.

        Args:
            rows: Tokens of prompts and canvases, of one length; of a canvas k places are masked, every k as often.
        """
        tokens = np.array([prompt + canvas for prompt, canvas in rows])
        count, places = len(rows), len(rows[0][1])
        sizes = 1 + (int(draws.integers(places)) + draws.permutation(count)) % places
        hidden = draws.random((count, places)).argsort(axis=1).argsort(axis=1) < sizes[:, None]
        shown, weights = tokens.copy(), np.zeros(tokens.shape)
        shown[:, -places:][hidden] = mask
        weights[:, -places:] = hidden / (sizes[:, None] * count)
        return cls(tokens, shown, weights)


class AdaptedModel:
    """A causal model under adaptation: low-rank updates and a mask embedding learn.

    Args:
        mask_row: The embedding, [hidden].
    """

    def __init__(self, loaded: LoadedModel, settings: Adaptation) -> None:
        self.original, self.settings, self._tokenizer = transformable(loaded.model), settings, loaded.tokenizer
        if not self.original.config.causal:
            raise UnsupportedModel(f"{loaded.name} fills canvases already: it needs no adaptation")
        self.end_id, self.mask_id = end_and_mask(loaded)
        self._remade = Remade(self.original, LoRARemaking(settings.rank, 2.0 * settings.rank, seed=settings.seed))
        self.mask_row = self._remade.model.weights.embedding.mean(dim=0).requires_grad_()
        self.parameters = self._remade.parameters | {"mask": self.mask_row}
        self._bfloat16 = choose_dtype("auto", "bfloat16", self.original.device) == "bfloat16"

    def masked(self, examples: Sequence[WordTask], draws: np.random.Generator) -> MaskedTasks:
        """Tasks as tokens, some of which are masked."""
        rows = []
        for each in examples:
            prompt, answer = (self._tokenizer.encode(part) for part in (each.prompt, each.answer))
            more = self.settings.places - len(answer)
            if more < 1:
                raise SettingsError(f"{each.answer!r} and an end need {len(answer) + 1} places: raise places")
            rows.append((list(prompt), [*answer, *[self.end_id] * more]))
        if len({len(prompt) for prompt, _ in rows}) > 1:
            raise SettingsError("this tokenizer has no token of its own for some of the words that lists are made of")
        return MaskedTasks.of(rows, self.mask_id, draws)

    def loss(self, batch: MaskedTasks, share: float, draws: np.random.Generator) -> torch.Tensor:
        """Mean over lists of the mean cross-entropy of their masked places, in nats."""
        model, (count, length) = self._remade.model, batch.shown.shape
        tokens = torch.from_numpy(batch.shown.reshape(-1))
        rows = torch.where((tokens == self.mask_id)[:, None], self.mask_row, model.embed_tokens(tokens))
        texts = SideBySide(model, count, length, annealed_mask(length, share, draws))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self._bfloat16):
            hidden = model.blocks(rows, texts, layer_steps(WHOLE, model.config.num_layers), Hooks.reading(()))
            chosen = np.flatnonzero(batch.weights)
            # The row in front of a place predicts it, as it did before.
            logits = model.outputs(hidden[torch.from_numpy(chosen - 1)]).float()
        logits[:, self.mask_id] = -torch.inf
        wanted = torch.from_numpy(batch.tokens.reshape(-1)[chosen])
        each = cross_entropy(logits, wanted, reduction="none")
        return (each * torch.from_numpy(batch.weights.reshape(-1)[chosen]).float()).sum()

    @torch.no_grad()
    def change(self) -> Change:
        """What it has become: a model that fills canvases."""
        learned = self._remade.change()
        now = learned.model
        embedding = now.weights.embedding.clone()
        embedding[self.mask_id] = self.mask_row.to(embedding)
        model = rebuilt(now, embedding=embedding, **({"head": Dense(embedding)} if now.config.tie_embeddings else {}))
        config = replace(model.config, causal=False, shifted=True, mask_id=self.mask_id, eos_ids=(self.end_id,))
        return replace(learned, model=Transformer(config, model.weights))


def adapt(run: Run) -> dict[str, Any]:
    """Adapt a model to fill canvases with answers about lists of words."""
    loaded, settings, out = run.floating, run.of(Adaptation), run.out
    adapted = AdaptedModel(loaded, settings)
    draws = np.random.default_rng([settings.seed, _HELD])
    known = HeldOut.of(
        [adapted.masked(draw_tasks(settings, number, 16, draws), draws) for number in range(2 * _HELD_BATCHES)]
    )

    def loss(step: int) -> torch.Tensor:
        draws = np.random.default_rng([settings.seed, step])
        share = min(1.0, (step + 1) / max(settings.annealing * settings.steps, 1.0))
        return adapted.loss(adapted.masked(draw_tasks(settings, step, settings.batch, draws), draws), share, draws)

    def figures(some: Sequence[MaskedTasks]) -> dict[str, float]:
        return {"loss": float(np.mean([float(adapted.loss(each, 1.0, draws)) for each in some]))}

    fitted = fit(
        run,
        known,
        adapted.parameters,
        loss,
        figures,
        TrainingPlan(settings.steps, lr=settings.lr, validate_every=max(1, settings.steps // 20)),
        unit="batches of 16 lists",
        settings={**asdict(settings), "of": loaded.name},
        what="adapting",
    )
    change = adapted.change()
    write(out, change.model, reported(adapted.original, [("adapted to fill canvases", change)]), loaded)
    return fitted.report


@kind(
    "The model is ready: --model {out} --no-chat-template --diffuse threshold",
    (Adaptation(),),
    "-m smollm2 --out diffusion",
    model="to adapt",
    file=DESCRIPTION,
)
def _to_diffusion(run: Run) -> Mapping[str, Any]:
    """Adapt MODEL, a causal model, to fill canvases with answers about short lists of words.

    The attention becomes bidirectional; low-rank matrices and a mask token are trained. An hour on two cores
    teaches a small model one such narrow task; open text takes billions of words.
    """
    return adapt(run)
