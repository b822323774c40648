"""Train the slots of `cppd`: a decoder that says a short text at once, of what a model's encoder has read.

Context Perception Parallel Decoder for Scene Text Recognition (2023): beside the tokens themselves the slots learn two
things about the text as a whole, how often each token occurs in it and which slots hold one, by branches of their own
of which nothing but what they made of the source is kept. The encoder stays as it is. What is learned is what the model
writes greedily, not what would have been right: drafts are to agree with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, linear
from torch.nn.utils.rnn import pad_sequence

from decodery.core.errors import PromptError, SettingsError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.llm.llm import LLM
from decodery.logits_sources.reads import Reads
from decodery.models.batch import Batch
from decodery.models.loaders.store import Progress, silent
from decodery.models.torch.encoder_decoder import EncoderDecoder
from decodery.models.trained.slots import Slots, shapes

from .fitting import fit
from .held_out import HeldOut
from .kept_files import keep, kept
from .kind import ARGUMENT, COUNT, NON_NEGATIVE, Bounded, Data, Run, bounded, kind, option
from .lines import read_lines
from .loop import TrainingPlan, batches, content
from .one_by_one import as_ids
from .tensors import int_tensor, normal, zeros

HELD_OUT = 9
"""Every how manieth source is kept for validation."""
_SHARD, _TOGETHER = 256, 32
_NOTHING = -1
_MOST_VALIDATED = 256

Pair = tuple[list[int], list[int]]
"""A source, and what the model writes of it, its end included where it came to one."""


@dataclass(frozen=True)
class CPPDRecipe(Bounded):
    """How slots learn: their shape, and `steps` of `batch` texts each."""

    layers: int = bounded(2, COUNT, "Layers of each branch.")
    longest: int = bounded(25, COUNT, "Maximum number of drafted tokens of a text.")
    symbols: int = bounded(256, COUNT, "The most frequent tokens whose counts are learned.")
    aside: float = bounded(1.0, NON_NEGATIVE, "Weight of the counting and ordering losses.")
    steps: int = option(3000, "Maximum number of training steps.")
    batch: int = 32
    lr: float = 3e-3
    seed: int = option(0, "Random seed of weights and the order of texts.")
    every: int = bounded(250, COUNT, "Steps between validations.")


def train_cppd(run: Run, sources: Sequence[Sequence[int]]) -> Slots:
    """Train slots on what the model writes of sources, and leave them in the folder of a run."""
    target, out, recipe, model = run.floating, run.out, run.of(CPPDRecipe), run.floating.model
    if not isinstance(model, EncoderDecoder):
        raise SettingsError("slots learn from what an encoder has read: name a model such as T5, or one made by train "
                            "seq2seq")  # fmt: skip
    if len(sources) < HELD_OUT:
        raise PromptError(f"there are {len(sources)} different sources to learn from: give at least {HELD_OUT}")
    pairs = written(model, sources, target.tokenizer.eos_ids, recipe.longest + 1, out, run.progress)
    known = HeldOut.of([pair for number, pair in enumerate(pairs) if number % HELD_OUT == 0][: 2 * _MOST_VALIDATED])
    learned = [pair for number, pair in enumerate(pairs) if number % HELD_OUT]
    trainee = CPPDTrainee(model, learned, target.tokenizer.eos_ids, recipe)
    order = batches(len(learned), recipe.batch, recipe.seed)

    fitted = fit(
        run,
        known,
        trainee.parameters,
        lambda step: trainee.loss([learned[number] for number in order(step)]),
        lambda some: figures(model, trainee.slots, some),
        TrainingPlan(recipe.steps, lr=recipe.lr, warmup=0.05, validate_every=recipe.every),
        metric="passes",
        unit="sources",
        enough=lambda values: values["passes"] == 1.0,
        settings={"recipe": asdict(recipe), "model": model.fingerprint, "texts": content(as_ids(sources))},
        what="training slots",
    )
    facts = fitted.facts(recipe, texts=len(pairs))
    slots = trainee.slots
    kept = {name: tensor.detach() for name, tensor in slots.tensors.items()}
    found = Slots(kept, slots.tokens, slots.ends, facts, model.fingerprint)
    found.save(out / Slots.FILE)
    return found


def written(
    model: EncoderDecoder,
    sources: Sequence[Sequence[int]],
    ends: Sequence[int],
    most: int,
    out: Path,
    progress: Progress = silent,
) -> list[Pair]:
    """What the model writes greedily of sources. What is kept in a folder already is read."""
    engine, pairs, made = Engine(model), list[Pair](), f"{model.fingerprint} {most}"
    for first in range(0, len(sources), _SHARD):
        shard = as_ids(sources[first : first + _SHARD])
        path = out / "texts" / f"{first // _SHARD:05}.safetensors"
        key = content([made, shard])
        if not path.is_file():
            requests = [
                Request(
                    [model.config.start_id], logits_source=Reads(tuple(each)), max_new_tokens=most, eos_ids=tuple(ends)
                )
                for each in shard
            ]
            tokens, sizes = list[int](), list[int]()
            for begun in range(0, len(requests), _TOGETHER):
                run = [engine.submit(request) for request in requests[begun : begun + _TOGETHER]]
                engine.run(run)
                sizes += [len(seq.generated) for seq in run]
                tokens += [token for seq in run for token in seq.generated]
            made_of = {"tokens": tokens, "sizes": sizes}
            keep(path, {name: int_tensor(each) for name, each in made_of.items()}, key)
        with kept(path, key) as (found, _):
            texts = found["tokens"].split(found["sizes"].tolist())
        pairs += zip(shard, [each.tolist() for each in texts], strict=True)
        progress("writing texts", len(pairs), len(sources))
    return pairs


class CPPDTrainee:
    """Slots that learn, with what they learn beside the tokens.

    Attributes:
        counted: Which of the slots' tokens are counted.
        aside: What learns to count each of these, and which slots hold a token. It is not kept.
    """

    def __init__(self, model: EncoderDecoder, pairs: Sequence[Pair], ends: Sequence[int], recipe: CPPDRecipe) -> None:
        self.model, self.recipe = model, recipe
        seen = Counter(token for _, text in pairs for token in text)
        tokens = int_tensor(sorted(seen))
        longest = min(max(len(text) for _, text in pairs), recipe.longest + 1)
        hidden, places = model.config.hidden_size, max(len(source) for source, _ in pairs)
        draws = torch.Generator().manual_seed(recipe.seed)

        def begin(name: str, shape: tuple[int, ...]) -> torch.Tensor:
            if len(shape) == 1:
                return zeros(*shape) + float("norm" in name and name.endswith("weight"))
            return normal(draws, *shape) * (1.0 if name == "slot" else 0.02)

        own = {name: begin(name, shape) for name, shape in shapes(hidden, recipe.layers, longest, places, len(tokens))}
        self.slots = Slots(own, tokens, tuple(sorted(set(ends) & set(seen))))
        counted = sorted(token for token, _ in seen.most_common(recipe.symbols))
        self.counted = torch.searchsorted(tokens, int_tensor(counted))
        self.aside = {
            "symbol": normal(draws, len(counted), hidden),
            "counts.weight": 0.02 * normal(draws, longest + 1, hidden),
            "counts.bias": zeros(longest + 1),
            "exists.weight": 0.02 * normal(draws, longest, hidden),
            "exists.bias": zeros(longest),
        }
        self.parameters = {name: tensor.requires_grad_() for name, tensor in {**own, **self._learned_aside}.items()}

    @property
    def _learned_aside(self) -> dict[str, torch.Tensor]:
        return {f"aside.{name}": tensor for name, tensor in self.aside.items()} if self.recipe.aside else {}

    def loss(self, pairs: Sequence[Pair]) -> torch.Tensor:
        """Cross-entropy of the tokens in their slots, plus that of counts and occupancy with weight `aside`."""
        states, missing = states_of(self.model, [source for source, _ in pairs])
        wanted = self._wanted([text for _, text in pairs])
        aside = self.aside
        said = self.slots.say(states, missing, aside["symbol"] if self.recipe.aside else None)
        loss = cross_entropy(said.logits.flatten(0, 1), wanted.flatten(), ignore_index=_NOTHING)
        if not self.recipe.aside:
            return loss
        times = (wanted[:, None, :] == self.counted[None, :, None]).sum(dim=-1)
        counts = linear(said.symbols, aside["counts.weight"], aside["counts.bias"])
        exists = (said.slots * aside["exists.weight"]).sum(dim=-1) + aside["exists.bias"]
        beside = cross_entropy(counts.flatten(0, 1), times.flatten())
        beside = beside + binary_cross_entropy_with_logits(exists, (wanted != _NOTHING).float())
        return loss + self.recipe.aside * beside

    def _wanted(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """[b, slots] which of its tokens each slot is to say, -1 after a text's end."""
        wanted = torch.full((len(texts), self.slots.count), _NOTHING, dtype=torch.int64, device="cpu")
        for row, text in enumerate(texts):
            held = int_tensor(text[: self.slots.count])
            wanted[row, : len(held)] = torch.searchsorted(self.slots.tokens, held)
        return wanted


@torch.no_grad()
def states_of(model: EncoderDecoder, sources: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The encoder's states of sources, and a mask of what lies after their ends.

    Shape:
        [b, n, hidden], and [b, 1, 1, n] with 0 or -inf.
    """
    batch = Batch([model.encoder.segment(source) for source in sources])
    sizes = int_tensor(list(map(len, sources)))
    read = model.encoder.forward(batch, taps=[-1]).hidden[-1].float().split(sizes.tolist())
    after = torch.arange(int(sizes.max()), device="cpu") >= sizes[:, None, None, None]
    return pad_sequence(read, batch_first=True), torch.where(after, -torch.inf, 0.0)


@torch.no_grad()
def figures(model: EncoderDecoder, slots: Slots, pairs: Sequence[Pair]) -> dict[str, float]:
    """Figures of texts that were not learned from.

    Returns:
        "passes" of the decoder for a text, where the slots draft and it decodes greedily; "exact", the share of texts
        that the slots alone say as the model writes them; "right", the share of tokens.
    """
    passes, exact, right, tokens = 0, 0, 0, 0
    for first in range(0, len(pairs), _TOGETHER):
        some = pairs[first : first + _TOGETHER]
        logits = slots.say(*states_of(model, [source for source, _ in some])).logits
        for row, (_, text) in zip(logits, some, strict=True):
            said = slots.tokens[row.argmax(dim=-1)].tolist()[: slots.end(row)]
            passes += len(emitted(said, text))
            exact += said == text
            right += sum(a == b for a, b in zip(said, text, strict=False))
            tokens += len(text)
    return {"passes": passes / len(pairs), "exact": exact / len(pairs), "right": right / tokens}


def emitted(said: Sequence[int], text: Sequence[int]) -> list[int]:
    """How many tokens every pass of greedy decoding adds to a text that was drafted at once."""
    found, place = list[int](), 0
    while place < len(text):
        agree = [a == b for a, b in zip(said[place:], text[place:], strict=False)]
        run = agree.index(False) if False in agree else len(agree)
        added = min(run + 1, len(text) - place)
        found.append(added)
        place += added
    return found


@dataclass(frozen=True)
class Sources(Data):
    """Short texts that a model reads."""

    sources: Path = field(default=Path(), metadata=ARGUMENT)
    texts: int = option(8000, "Maximum number of sources.")


@kind(
    "The slots are ready: --drafter cppd:slots={out}",
    (Sources(), CPPDRecipe()),
    "sources.txt -m t5-model --out slots",
    model="to draft for",
    default=None,
    file=Slots.FILE,
)
def _cppd(run: Run) -> dict[str, Any]:
    """Train slots that draft what MODEL writes for short sources: --drafter cppd:slots=DIR.

    SOURCES is a file with one source a line. MODEL, an encoder-decoder model, first writes the text of each source,
    and does not change. One source in nine is held out.
    """
    given = run.of(Sources)
    lines = dict.fromkeys(read_lines(given.sources)[: given.texts])
    return dict(train_cppd(run, [LLM(run.floating).encode(line) for line in lines]).facts["validation"])
