"""Train a small encoder-decoder model on a transduction, from random weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from decodery.core.errors import SettingsError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.logits_sources.reads import Reads
from decodery.models.families.t5 import save_t5
from decodery.models.loaders.load import LoadedModel
from decodery.models.loaders.store import Progress, silent, write_text
from decodery.models.torch.encoder_decoder import (
    Block,
    Cross,
    EncoderDecoder,
    EncoderDecoderConfig,
    EncoderDecoderWeights,
    Stack,
)
from decodery.models.torch.weights import Dense
from decodery.training.card import CARD
from decodery.training.card import check_folder as holds
from decodery.training.loop import History, TrainingPlan, train
from decodery_benchmarks.puzzles.alphabet import END_ID, VOCABULARY, encoded, tokenizer
from decodery_benchmarks.training.distilled import DistillationRecipe

from .distilled import check_teacher, distance, drawn, said
from .transductions import Transduction, sources
from .two_stacks import predicted

check_folder = partial(holds, made="config.json")

_NOTHING = -1


@dataclass(frozen=True)
class Seq2SeqRecipe:
    """How a small model is trained: its shape, and `steps` of `batch` sources each.

    block: how many tokens of a source come at a time, None for an encoder that sees all of it at once. With it, half of
    the sources are cut where the stream might stand, and what is learned is what can be written of that.
    """

    hidden: int = 64
    heads: int = 4
    inner: int = 128
    encoder_layers: int = 2
    decoder_layers: int = 2
    block: int | None = None
    steps: int = 1200
    batch: int = 32
    lr: float = 3e-3
    seed: int = 0
    every: int = 150
    held: int = 100

    def __post_init__(self) -> None:
        if min(self.batch, self.held, self.encoder_layers, self.decoder_layers, self.heads) < 1:
            raise SettingsError("a small model needs batch, held, heads and layers of at least 1")
        if self.hidden % self.heads or (self.block is not None and self.block < 1):
            raise SettingsError("a small model needs a width that its heads divide, and blocks of at least one token")


def train_seq2seq(
    kind: Transduction,
    out: Path,
    *,
    recipe: Seq2SeqRecipe | None = None,
    command: str = "",
    progress: Progress = silent,
    teacher: LoadedModel | None = None,
    how: DistillationRecipe | None = None,
) -> float:
    """Train a model to write what `kind` says of its sources, and leave it in the folder `out`, ready to be loaded.

    teacher: a decoder alone of the same alphabet, from which it learns as `how` says; see `distilled`. Returns the
    share of held-out sources of which greedy decoding writes all that is right. Interrupted, it goes on from its last
    checkpoint when called again.
    """
    recipe = recipe or Seq2SeqRecipe()
    if recipe.block is not None and not kind.cut:
        raise SettingsError("of this transduction a beginning of a source is no source: leave block out")
    if teacher is not None:
        if recipe.block is not None:
            raise SettingsError("a teacher reads whole sources: leave block out")
        how = how or DistillationRecipe()
        check_teacher(teacher.model, teacher.tokenizer.fingerprint())
    check_folder(out)
    model = random_encoder_decoder(recipe, kind.longest)
    parameters = {name: tensor.requires_grad_() for name, tensor in leaves(model).items()}
    held = list(islice(sources(kind, "validation"), recipe.held))

    def loss(step: int) -> torch.Tensor:
        given, written, taught = training_batch(kind, recipe, step)
        logits = predicted(model, given, written)
        plain = cross_entropy(logits.flatten(0, 1), taught.flatten(), ignore_index=_NOTHING)
        if teacher is None or how is None:
            return plain
        chance = torch.Generator().manual_seed((recipe.seed << 32) + step)
        texts = drawn(model, given, kind.longest + 1, how, chance)
        learned = distance(model, given, texts, said(teacher.model, given, texts))
        return how.share * learned + (1 - how.share) * plain

    def validate() -> dict[str, float]:
        with torch.no_grad():
            return {"wrong": 1.0 - right(model, kind, held)}

    history = train(
        parameters,
        loss,
        TrainingPlan(recipe.steps, lr=recipe.lr, warmup=0.05, validate_every=recipe.every),
        out / "training",
        validate=validate,
        metric="wrong",
        enough=lambda values: values["wrong"] == 0.0,
        settings={"kind": repr(kind), "recipe": asdict(recipe)}
        | ({} if teacher is None or how is None else {"teacher": teacher.model.fingerprint, "how": asdict(how)}),
        progress=progress,
        what=f"learning {type(kind).__name__.lower()}",
    )
    found = 1.0 - history.metrics[str(history.best_step)]["wrong"]
    save_t5(out, model, tokenizer().backend)
    write_text(out / CARD, "".join(_card(kind, recipe, history, found, command, teacher)))
    return found


def right(model: EncoderDecoder, kind: Transduction, held: Sequence[str]) -> float:
    """The share of sources of which greedy decoding writes exactly what it should."""
    engine = Engine(model)
    requests = [
        Request([END_ID], logits_source=Reads(tuple(encoded(each))), max_new_tokens=kind.longest + 2, eos_ids=(END_ID,))
        for each in held
    ]
    texts = [engine.submit(request) for request in requests]
    engine.run(texts)
    wanted = [[*encoded(kind.write(each)), END_ID] for each in held]
    return float(np.mean([seq.generated == each for seq, each in zip(texts, wanted, strict=True)]))


def training_batch(
    kind: Transduction, recipe: Seq2SeqRecipe, step: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A training step's sources [b, n], what the decoder reads [b, m], and what it is to say after each token [b, m].

    -1 fills up sources and what is to be said; END_ID what is read.
    """
    random = Random(f"lesson {recipe.seed} {step}")
    drawn = list(islice(sources(kind, "train", (recipe.seed << 32) + step), recipe.batch))
    if recipe.block is not None:
        drawn = [each[: random.randint(1, len(each))] if random.random() < 0.5 else each for each in drawn]
    texts = [encoded(kind.write(each)) for each in drawn]
    longest = max(map(len, texts)) + 1
    given = np.full((len(drawn), max(map(len, drawn))), _NOTHING, dtype=np.int64)
    read = np.full((len(drawn), longest), END_ID, dtype=np.int64)
    said = np.full((len(drawn), longest), _NOTHING, dtype=np.int64)
    for row, (source, text) in enumerate(zip(drawn, texts, strict=True)):
        given[row, : len(source)] = encoded(source)
        read[row, 1 : len(text) + 1] = text
        said[row, : len(text) + 1] = [*text, END_ID]
    return torch.from_numpy(given), torch.from_numpy(read), torch.from_numpy(said)


def leaves(model: EncoderDecoder) -> dict[str, torch.Tensor]:
    """The tensors that are learned, by name: those the model holds, fused as they are."""
    found = {"embedding": model.weights.embedding}
    for kind, stack in (("encoder", model.weights.encoder), ("decoder", model.weights.decoder)):
        found |= {f"{kind}.norm": stack.norm, f"{kind}.distance": stack.distance}
        for index, block in enumerate(stack.blocks):
            parts = {"": block} if block.cross is None else {"": block, "cross.": block.cross}
            for place, part in parts.items():
                for name, value in vars(part).items():
                    if isinstance(value, Dense | torch.Tensor):
                        tensor = value.weight if isinstance(value, Dense) else value
                        found[f"{kind}.{index}.{place}{name}"] = tensor
    return found


def random_encoder_decoder(recipe: Seq2SeqRecipe, longest: int) -> EncoderDecoder:
    """A model of this shape with random weights, float32, for the puzzles' alphabet, whose end begins texts, too."""
    hidden, dim = recipe.hidden, recipe.hidden // recipe.heads
    config = EncoderDecoderConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=recipe.inner,
        num_layers=recipe.decoder_layers,
        num_heads=recipe.heads,
        num_kv_heads=recipe.heads,
        head_dim=dim,
        max_positions=4 * longest,
        family="t5",
        norm_eps=1e-6,
        activation="relu",
        attention_scale=1.0,
        bos_id=END_ID,
        eos_ids=(END_ID,),
        vocabulary=tokenizer().fingerprint(),
        encoder_layers=recipe.encoder_layers,
        buckets=32,
        max_distance=64,
        start_id=END_ID,
        block=recipe.block,
    )
    generator = torch.Generator().manual_seed(recipe.seed)

    def matrix(outputs: int, inputs: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(outputs, inputs, generator=generator, dtype=torch.float32, device="cpu") * (
            gain / inputs**0.5
        )

    def queried(others: int) -> Dense:
        # Scores are not scaled, so queries begin as small as a scale would make them.
        return Dense(torch.cat([matrix(hidden, hidden, dim**-0.5), matrix(others * hidden, hidden)]))

    def stack(layers: int, cross: bool) -> Stack:
        blocks = [
            Block(
                torch.ones(hidden, dtype=torch.float32, device="cpu"),
                queried(2),
                Dense(matrix(hidden, hidden)),
                torch.ones(hidden, dtype=torch.float32, device="cpu"),
                Dense(matrix(recipe.inner, hidden)),
                Dense(matrix(hidden, recipe.inner)),
                Cross(
                    torch.ones(hidden, dtype=torch.float32, device="cpu"),
                    queried(0),
                    Dense(matrix(2 * hidden, hidden)),
                    Dense(matrix(hidden, hidden)),
                )
                if cross
                else None,
            )
            for _ in range(layers)
        ]
        return Stack(
            blocks,
            torch.ones(hidden, dtype=torch.float32, device="cpu"),
            0.1 * matrix(32, recipe.heads),
            ahead=not cross,
        )

    table = torch.randn(VOCABULARY, hidden, generator=generator, dtype=torch.float32, device="cpu")
    encoder, decoder = stack(recipe.encoder_layers, False), stack(recipe.decoder_layers, True)
    return EncoderDecoder(config, EncoderDecoderWeights(table, encoder, decoder, Dense(table)))


def _card(
    kind: Transduction,
    recipe: Seq2SeqRecipe,
    history: History,
    found: float,
    command: str,
    teacher: LoadedModel | None,
) -> Iterator[str]:
    what = (type(kind).__doc__ or "").splitlines()[0]
    yield f"# A small encoder-decoder model: {type(kind).__name__.lower()}\n\n{what}\n\n"
    yield f"    {command or 'python benchmarks/train.py seq2seq'}\n\n"
    yield f"{recipe.encoder_layers} + {recipe.decoder_layers} layers of width {recipe.hidden}, from random weights, "
    if teacher is not None:
        yield f"taught by {teacher.name}, "
    yield f"{history.best_step} steps of {recipe.batch} sources. Of {recipe.held} held-out sources it writes "
    yield f"{found:.1%} without a mistake.\n"
