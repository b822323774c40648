"""What attention heads write in whole texts, and how well codes of heads tell a behaviour on held-out texts."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from decodery.core.errors import SettingsError
from decodery.engine.monitoring import monitor_states
from decodery.llm.llm import LLM
from decodery.models.loaders.store import Progress, silent
from decodery.monitors.recorder import Recorder
from decodery.monitors.sae import HeadCodes

from .evaluation import Evaluation, MonitorContext, doubts, keep_evaluated
from .kind import ARGUMENT, COUNT, Bounded, Data, Run, bounded, kind, option
from .labelled import LabelledChat, decoded, is_labelled, read_chats, reread
from .ranking import part_of
from .sae import BehaviourExample, built_in_examples, highest, read_examples, train_sae
from .tensors import bool_tensor


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """An example as the model went on from it.

    Attributes:
        rows: [tokens, layers * heads, head_dim] half precision, what every head wrote where each token was chosen, the
            first at the prompt's end.
    """

    example: BehaviourExample
    rows: torch.Tensor
    doubt: float  # The mean of -log p over the prompt


def written(
    lm: LLM,
    examples: Ordered[BehaviourExample],
    *,
    chat: bool = False,
    max_new_tokens: int = 24,
    progress: Progress = silent,
) -> list[Read]:
    """What heads write while the model goes on from examples, greedily, as their monitor sees it.

    Args:
        chat: whether these are what a user says, by the chat template; else plain texts.
    """
    config = lm.model.config
    taps, found = tuple(f"head_out.{layer}" for layer in range(config.num_layers)), []
    how: dict[str, Any] = {"apply_chat_template": chat, "max_new_tokens": max_new_tokens, "monitor": Recorder(taps, 1)}
    texts = decoded(lm, (lm.request_for(each.prompt, drafter=None, **how) for each in examples))
    for number, (each, seq) in enumerate(zip(examples, texts, strict=True)):
        seen = [torch.stack([hidden[tap] for tap in taps]) for _, hidden in monitor_states(seq)[0][1]]
        rows = torch.stack(seen).view(len(seen), -1, config.head_dim).half()
        prompt = lm.tokenizer.encode(each.prompt, special=False)
        found.append(Read(each, rows, doubts(lm, [(prompt[:1], prompt[1:] or prompt)])[0]))
        progress("reading examples", number + 1, len(examples))
    return found


def read_answers(lm: LLM, chats: Ordered[LabelledChat], progress: Progress = silent) -> list[Read]:
    """What heads write in answers with labels of their own, as their monitor reads it."""
    config = lm.model.config
    taps, found = tuple(f"head_out.{layer}" for layer in range(config.num_layers)), []
    for chat, text in zip(chats, reread(lm, chats, [Recorder(taps, 1)], progress), strict=True):
        seen = monitor_states(text)[0][1]
        rows = torch.stack([torch.stack([hidden[tap] for tap in taps]) for _, hidden in seen])
        example = BehaviourExample("\n\n".join(each["content"] for each in chat.prompt), chat.label, chat.group)
        prompt = text.tokens[: text.request.prompt_length]
        doubt = doubts(lm, [(prompt[:1], prompt[1:] or prompt)])[0]
        found.append(Read(example, rows.view(len(seen), -1, config.head_dim).half(), doubt))
    return found


def evaluated(
    read: Ordered[Read], train: Callable[..., HeadCodes], top: int, seed: int
) -> tuple[HeadCodes, dict[str, Any]]:
    """Head codes of examples, and their report; see `Evaluation.run`.

    Returns:
        Under "heads" stands of each watched head, by layer and number, the share of test examples with the behaviour,
        and of those without it, on which it wrote a code of the behaviour's.
    """

    def group(each: Read) -> str:
        return each.example.group

    def learn(items: Ordered[Read], seed: int) -> HeadCodes:
        known = part_of(items, group, seed, "train", "validation", "calibration")
        texts = [each.rows.float() for each in known]
        rows, labels = torch.stack([each[0] for each in texts]), [each.example.positive for each in known]
        return train(rows, labels, groups=list(map(group, known)), texts=texts, seed=seed)

    trial = Evaluation[Read, HeadCodes](
        learn,
        lambda codes, items: highest(codes, [each.rows.float() for each in items], top),
        label=lambda each: each.example.positive,
        group=group,
        relabel=lambda one, other: replace(one, example=replace(one.example, positive=other.example.positive)),
        baselines={
            "length of the prompt": lambda each: len(each.example.prompt),
            "length of the text": lambda each: len(each.rows),
            "mean log-probability of the prompt": lambda each: each.doubt,
        },
        limit=lambda codes: codes.threshold.value,
        words=lambda each: each.example.prompt,
    )
    trained, report = trial.run(read, seed, "texts")
    test, listed = part_of(read, group, seed, "test"), []
    for layer, head in (place for place, score in trained.ranked()[:top] if score > 0):
        number = layer * trained.facts["heads"] + head
        codes = trained.of(torch.stack([each.rows[0, number].float() for each in test]))
        own = trained.tensors["own"][number, codes]
        kinds = bool_tensor([each.example.positive for each in test])
        listed.append([layer, head, *(round(float(own[kinds == kind].double().mean()), 4) for kind in (True, False))])
    return trained, report | {"heads": listed}


@dataclass(frozen=True)
class BehaviourTexts(Data):
    """Examples of a behaviour."""

    NOTE = """EXAMPLES holds one JSON object a line, {"prompt": text, "positive": true, "group": text}: prompts after
    which the behaviour occurs, and similar prompts after which it cannot. A fifth is the test set, by group. Half of
    the rest is for training, half sets the threshold. The default is built-in sentences about who is given something.
    Or it holds your own texts with labels, {"messages": [...], "label": true or false, "group": text}."""

    examples: Path | None = field(default=None, metadata=ARGUMENT)
    rate: float = option(0.1, "Maximum rate of false alarms.")
    count: int = option(120, "Number of built-in examples.")
    chat: bool = option(False, "Apply the chat template to the examples.")
    max_new_tokens: int = option(24, "Tokens that the model writes after an example.")
    seed: int = option(0, "Random seed of examples and training.")

    def check(self) -> None:
        if self.count < 4 or self.max_new_tokens < 1:
            raise SettingsError("--count is at least 4, and --max-new-tokens at least 1")
        if self.examples is not None and not is_labelled(self.examples):
            read_examples(self.examples)

    def read(self, lm: LLM, progress: Progress) -> tuple[list[Read], bool, int]:
        """What the model reads, whether as chats, and the tokens of the longest text."""
        if self.examples is not None and is_labelled(self.examples):
            read = read_answers(lm, read_chats(self.examples), progress)
            return read, True, max(len(each.rows) for each in read)
        found = built_in_examples(self.count, self.seed) if self.examples is None else read_examples(self.examples)
        how: dict[str, Any] = {"chat": self.chat, "max_new_tokens": self.max_new_tokens}
        return written(lm, found, progress=progress, **how), self.chat, self.max_new_tokens


@dataclass(frozen=True)
class HeadCodeSettings(Bounded):
    """How head codes are trained."""

    features: int = bounded(200, "[2, inf)", "Features of the autoencoder.")
    sparsity: float = option(0.02, "Weight of the sparsity loss, the mean of the features.")
    top: int = bounded(10, COUNT, "Number of heads to watch.")
    steps: int = 300


@kind(
    "The head codes are ready: --monitor sae:codes={out},top={top}",
    (BehaviourTexts(), HeadCodeSettings()),
    "--out codes",
    model="whose heads are read",
)
def _sae(run: Run) -> dict[str, Any]:
    """Find the attention heads of MODEL that take part in a behaviour, for the monitor sae."""
    asked, given, lm = run.of(BehaviourTexts), run.of(HeadCodeSettings), run.lm
    read, chat, tokens = asked.read(lm, run.progress)
    data = str(asked.examples or "built-in sentences")
    context = MonitorContext.of(run, data=data, chat=chat, tokens=tokens)
    heads = lm.model.config.num_heads
    learn = partial(train_sae, heads=heads, rate=asked.rate, context=context, **vars(given))
    trained, report = evaluated(read, learn, given.top, asked.seed)
    return keep_evaluated(trained, report, run.out / HeadCodes.FILE)
