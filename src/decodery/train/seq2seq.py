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
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from ..decode.engine import Engine
from ..decode.request import Request
from ..errors import SettingsError
from ..model.cross_memory import CrossMemory
from ..model.encoder_decoder import (
    Block,
    Cross,
    EncoderDecoder,
    EncoderDecoderConfig,
    EncoderDecoderWeights,
    Stack,
    distances,
    run,
)
from ..model.sites import Visits
from ..model.store import Progress, silent, write_text
from ..model.t5 import save_t5
from ..model.weights import Dense
from ..puzzles.alphabet import END_ID, VOCABULARY, encoded, tokenizer
from ..source.reads import Reads
from .card import CARD, refuse_others
from .loop import History, Plan, train
from .transductions import Transduction, sources

check_folder = partial(refuse_others, made="config.json", what="is no encoder-decoder model")
"""Raises SettingsError where training would overwrite something else."""

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
) -> float:
    """Train a model to write what `kind` says of its sources, and leave it in the folder `out`, ready to be loaded.

    Returns the share of held-out sources of which greedy decoding writes all that is right. Interrupted, it goes on
    from its last checkpoint when called again.
    """
    recipe = recipe or Seq2SeqRecipe()
    if recipe.block is not None and not kind.cut:
        raise SettingsError("of this transduction a beginning of a source is no source: leave block out")
    check_folder(out)
    model = random_encoder_decoder(recipe, kind.longest)
    parameters = {name: tensor.requires_grad_() for name, tensor in leaves(model).items()}
    held = list(islice(sources(kind, "validation"), recipe.held))

    def loss(step: int) -> torch.Tensor:
        given, written, taught = lesson(kind, recipe, step)
        logits = predicted(model, given, written)
        return cross_entropy(logits.flatten(0, 1), taught.flatten(), ignore_index=_NOTHING)

    def validate() -> dict[str, float]:
        with torch.no_grad():
            return {"wrong": 1.0 - right(model, kind, held)}

    history = train(
        parameters,
        loss,
        Plan(recipe.steps, lr=recipe.lr, warmup=0.05, validate_every=recipe.every),
        out / "training",
        validate=validate,
        metric="wrong",
        enough=lambda values: values["wrong"] == 0.0,
        settings={"kind": repr(kind), "recipe": asdict(recipe)},
        progress=progress,
        what=f"learning {type(kind).__name__.lower()}",
    )
    found = 1.0 - history.metrics[str(history.best_step)]["wrong"]
    save_t5(out, model, tokenizer().backend)
    # Last: without the model beside it, it would be taken for somebody else's.
    write_text(out / CARD, "".join(_card(kind, recipe, history, found, command)))
    return found


def right(model: EncoderDecoder, kind: Transduction, held: Sequence[str]) -> float:
    """The share of sources of which greedy decoding writes exactly what it should."""
    engine = Engine(model)
    requests = [
        Request([END_ID], source=Reads(tuple(encoded(each))), max_new_tokens=kind.longest + 2, eos_ids=(END_ID,))
        for each in held
    ]
    texts = [engine.submit(request) for request in requests]
    engine.run(texts)
    wanted = [[*encoded(kind.write(each)), END_ID] for each in held]
    return float(np.mean([seq.generated == each for seq, each in zip(texts, wanted, strict=True)]))


def lesson(kind: Transduction, recipe: Seq2SeqRecipe, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A training step's sources [b, n], what the decoder reads [b, m], and what it is to say behind each token [b, m].

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


class _Texts:
    """Texts of one length side by side. seen: [b, 1 or heads, n, n] added to scores; memory: of their sources."""

    def __init__(
        self, count: int, added: torch.Tensor, memory: CrossMemory | None = None, missing: torch.Tensor | None = None
    ) -> None:
        self.count, self.added, self.memory, self.missing = count, added, memory, missing

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(0, (self.count, -1)).transpose(1, 2) for each in (queries, keys, values))
        return _joined(scaled_dot_product_attention(q, k, v, attn_mask=self.added.to(q.dtype), scale=1.0))

    def source(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        assert self.memory is not None and self.missing is not None
        q = queries.unflatten(0, (self.count, -1)).transpose(1, 2)
        k, v = (each.unflatten(1, (self.count, -1)).transpose(0, 1) for each in self.memory.data[layer])
        return _joined(scaled_dot_product_attention(q, k, v, attn_mask=self.missing.to(q.dtype), scale=1.0))


def _joined(heads: torch.Tensor) -> torch.Tensor:
    return heads.transpose(1, 2).flatten(0, 1).flatten(1)


def read(model: EncoderDecoder, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The encoder's states [b * n, hidden] of sources [b, n], and [b, 1, 1, n] -inf where -1 fills them up."""
    config, stack = model.config, model.weights.encoder
    count, length = given.shape
    missing = torch.zeros(given.shape).masked_fill(given < 0, -torch.inf)[:, None, None]
    places = np.arange(length)
    added = distances(stack, config, places, places)
    if config.block is not None:
        later = torch.from_numpy(places[None, :] // config.block > places[:, None] // config.block)
        added = added.masked_fill(later, -torch.inf)
    ids = given.clamp(min=0).flatten()
    states = run(stack, config, model.weights.embedding[ids], _Texts(count, added + missing), Visits.reading(()))
    return states, missing


def predicted(model: EncoderDecoder, given: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
    """Logits [b, m, vocab] behind every token of texts [b, m], with sources [b, n] in view, with gradients."""
    states, missing = read(model, given)
    stack, places = model.weights.decoder, np.arange(written.shape[1])
    later = torch.from_numpy(places[None, :] > places[:, None])
    added = distances(stack, model.config, places, places).masked_fill(later, -torch.inf)
    rows = _Texts(len(written), added[None], model.remembered(states), missing)
    hidden = run(stack, model.config, model.weights.embedding[written.flatten()], rows, Visits.reading(()))
    return model.head(hidden).unflatten(0, tuple(written.shape))


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
        return torch.randn(outputs, inputs, generator=generator) * (gain / inputs**0.5)

    def queried(others: int) -> Dense:
        # Scores are not scaled, so queries begin as small as a scale would make them.
        return Dense(torch.cat([matrix(hidden, hidden, dim**-0.5), matrix(others * hidden, hidden)]))

    def stack(layers: int, cross: bool) -> Stack:
        blocks = [
            Block(
                torch.ones(hidden),
                queried(2),
                Dense(matrix(hidden, hidden)),
                torch.ones(hidden),
                Dense(matrix(recipe.inner, hidden)),
                Dense(matrix(hidden, recipe.inner)),
                Cross(torch.ones(hidden), queried(0), Dense(matrix(2 * hidden, hidden)), Dense(matrix(hidden, hidden)))
                if cross
                else None,
            )
            for _ in range(layers)
        ]
        return Stack(blocks, torch.ones(hidden), 0.1 * matrix(32, recipe.heads), ahead=not cross)

    table = torch.randn(VOCABULARY, hidden, generator=generator)
    encoder, decoder = stack(recipe.encoder_layers, False), stack(recipe.decoder_layers, True)
    return EncoderDecoder(config, EncoderDecoderWeights(table, encoder, decoder, Dense(table)))


def _card(kind: Transduction, recipe: Seq2SeqRecipe, history: History, found: float, command: str) -> Iterator[str]:
    what = (type(kind).__doc__ or "").splitlines()[0]
    yield f"# A small encoder-decoder model: {type(kind).__name__.lower()}\n\n{what}\n\n"
    yield f"    {command or 'decodery train seq2seq'}\n\n"
    yield f"{recipe.encoder_layers} + {recipe.decoder_layers} layers of width {recipe.hidden}, from random weights, "
    yield f"{history.best_step} steps of {recipe.batch} sources. Of {recipe.held} held-out sources it writes "
    yield f"{found:.1%} without a mistake.\n"
