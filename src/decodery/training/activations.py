"""What a model shows while it answers questions: hidden states, output signatures, and whether it was right."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from decodery.core.errors import SettingsError
from decodery.engine.monitoring import monitor_states
from decodery.llm.llm import LLM
from decodery.models.loaders.store import Progress, silent
from decodery.monitors.recorder import Recorder
from decodery.step.sequence import Sequence

from .checkable import CheckableQuestion, built_in, read_checkable
from .kept_files import keep, kept
from .kind import ARGUMENT, PLAIN, Data, Run, option
from .labelled import LabelledChat, decoded, is_labelled, read_chats, reread
from .loop import content
from .tensors import bool_tensor, int_tensor

SHARD = 64
"""Questions whose answers are kept in one file, and decoded together in parts."""


@dataclass(frozen=True, slots=True, eq=False)
class Answered:
    """One question as the model answered it."""

    question: CheckableQuestion
    wrong: bool  # By exact match; of texts with labels of their own, what the monitor looks for.
    tokens: list[int]
    signatures: torch.Tensor  # [n, k + 5], as `Signature.numbers`
    prompt: dict[str, torch.Tensor]  # {site: [2 * width]}, the mean of the prompt's rows beside the last of them
    new: dict[str, torch.Tensor]  # {site: [n, width]}, the rows that the tokens were chosen at


def collect(
    lm: LLM,
    questions: Ordered[CheckableQuestion],
    out: Path,
    *,
    sites: Ordered[str] = (),
    k: int = 100,
    max_new_tokens: int = 12,
    chat: bool = False,
    progress: Progress = silent,
) -> list[Answered]:
    """What a model shows while it answers greedily. Shards that are kept in a folder already are read.

    States are kept in half precision.

    Args:
        chat: Questions are messages of a user's, by the model's chat template, whole answers are kept, and one that
            holds the wanted one is right; else they are plain texts, and answers are the rest of the line.
    """
    recorder, found = Recorder(tuple(sites), k), list[Answered]()
    how = [lm.model.fingerprint, lm.dtype, max_new_tokens, list(sites), k, chat]
    out.mkdir(parents=True, exist_ok=True)
    for first in range(0, len(questions), SHARD):
        asked = questions[first : first + SHARD]
        path = out / f"answers-{first // SHARD:05d}.safetensors"
        made = content([str(each) for each in [*how, *([each.prompt, each.answer, each.group] for each in asked)]])
        if not path.is_file():
            answers = list(_answers(lm, asked, recorder, max_new_tokens, chat))
            keep(path, _tensors(answers, recorder.sites), made)
        with kept(path, made) as (tensors, _):
            found += _read(tensors, asked, recorder.sites)
        progress("answering questions", first + len(asked), len(questions))
    return found


def _answers(
    lm: LLM, asked: Ordered[CheckableQuestion], recorder: Recorder, max_new_tokens: int, chat: bool
) -> Iterator[Answered]:
    how: dict[str, Any] = {"apply_chat_template": chat, "max_new_tokens": max_new_tokens, "monitor": recorder}
    how |= {"stop": () if chat else "\n", "drafter": None}
    texts = decoded(lm, (lm.request_for(question.prompt, **how) for question in asked))
    for question, text in zip(asked, texts, strict=True):
        assert text.text is not None
        right = question.held_by if chat else question.right
        yield _answered(question, not right(text.text.text), text, recorder.sites)


def _tensors(answers: Ordered[Answered], sites: Ordered[str]) -> dict[str, torch.Tensor]:
    sizes, tokens = [len(each.tokens) for each in answers], [token for each in answers for token in each.tokens]
    tensors = {
        "sizes": int_tensor(sizes),
        "tokens": int_tensor(tokens),
        "wrong": bool_tensor([each.wrong for each in answers]),
        "signatures": torch.cat([each.signatures for each in answers]),
    }
    for number, site in enumerate(sites):
        tensors[f"prompt.{number}"] = torch.stack([each.prompt[site] for each in answers]).half()
        tensors[f"new.{number}"] = torch.cat([each.new[site] for each in answers]).half()
    return tensors


def _read(
    tensors: dict[str, torch.Tensor], asked: Ordered[CheckableQuestion], sites: Ordered[str]
) -> Iterator[Answered]:
    sizes, wrong = tensors["sizes"].tolist(), tensors["wrong"].tolist()
    tokens, signatures = tensors["tokens"].split(sizes), tensors["signatures"].split(sizes)
    prompt = {site: tensors[f"prompt.{number}"].float() for number, site in enumerate(sites)}
    new = {site: tensors[f"new.{number}"].float().split(sizes) for number, site in enumerate(sites)}
    for at, question in enumerate(asked):
        states = {site: prompt[site][at] for site in sites}, {site: new[site][at] for site in sites}
        yield Answered(question, wrong[at], tokens[at].tolist(), signatures[at], *states)


def read_answers(
    lm: LLM, chats: Ordered[LabelledChat], sites: Ordered[str] = (), k: int = 100, progress: Progress = silent
) -> list[Answered]:
    """Texts with labels of their own as the model writes them, for the monitors that learn from answers.

    Returns:
        One for each text, "wrong" where its label says that it is what the monitor looks for.
    """
    found = []
    for chat, text in zip(chats, reread(lm, chats, [Recorder(tuple(sites), k)], progress), strict=True):
        asked = CheckableQuestion("\n\n".join(each["content"] for each in chat.prompt), chat.answer, chat.group)
        found.append(_answered(asked, chat.label, text, sites))
    return found


def _answered(asked: CheckableQuestion, wrong: bool, text: Sequence, sites: Ordered[str]) -> Answered:
    """What a recorder has seen of a text."""
    pools, rows = monitor_states(text)[0]
    return Answered(
        asked,
        wrong,
        text.generated,
        torch.stack([numbers for numbers, _ in rows]),
        {site: pool.numbers().float() for site, pool in pools.items()},
        {site: torch.stack([hidden[site] for _, hidden in rows]) for site in sites},
    )


@dataclass(frozen=True)
class Questions(Data):
    """Questions that a model answers, for a monitor to learn from."""

    NOTE = """QUESTIONS holds one JSON object a line, {"prompt": text, "answer": text, "group": text}. MODEL answers
    each greedily. An answer is right if it holds the given one. For plain texts the rest of the line must equal it.
    Questions of a group are never in both training and test set. The default is built-in sums and capitals. Or it holds
    your own texts with labels, {"messages": [...], "label": true or false, "group": text}: true for what the monitor is
    to detect.

    An interrupted run continues. The printed figures are those of the test set."""

    questions: Path | None = field(default=None, metadata=ARGUMENT)
    count: int = option(960, "Number of built-in questions.")
    rate: float = option(0.1, "Maximum rate of false alarms.")
    apply_chat_template: bool = option(True, "Questions are plain texts, without the chat template.", **PLAIN)
    max_new_tokens: int | None = option(None, "Length of an answer, 64 by default, and 12 with --no-chat-template.")
    seed: int = option(0, "Random seed of questions, split and training.")

    def check(self) -> None:
        if min(self.count, self.max_new_tokens or 1) < 1:
            raise SettingsError("--count and --max-new-tokens are at least 1")
        if self.questions is not None and not self.labelled:
            read_checkable(self.questions)

    @property
    def labelled(self) -> bool:
        """Whether the file holds texts with labels of their own."""
        return self.questions is not None and is_labelled(self.questions)

    def answers(
        self, run: Run, sites: tuple[str, ...], k: int, *, whole: bool
    ) -> tuple[list[Answered], dict[str, Any]]:
        """The answers, kept in the folder of a run, and what of their form the trained part has to know."""
        lm, most = run.lm, self.max_new_tokens
        if self.questions is not None and self.labelled:
            if most is not None or not self.apply_chat_template:
                raise SettingsError(
                    "--max-new-tokens and --no-chat-template go with questions that the model answers, and this file "
                    "holds labelled texts"
                )
            read = read_answers(lm, read_chats(self.questions, answers=whole), sites, k, run.progress)
            longest = max(len(each.tokens) for each in read) if whole else None
            return read, {"chat": True, "tokens": longest, "data": str(self.questions)}
        chat = lm.chat_template is not None and self.apply_chat_template
        most = most or (64 if chat else 12)
        asked = built_in(self.count, self.seed, chat=chat) if not self.questions else read_checkable(self.questions)
        how: dict[str, Any] = {"sites": sites, "k": k, "max_new_tokens": most, "chat": chat}
        found = collect(lm, asked, run.out / "answers", progress=run.progress, **how)
        return found, {"chat": chat, "tokens": most, "data": str(self.questions or "built-in questions")}


@dataclass(frozen=True)
class Sites:
    """Where a model is read.

    Attributes:
        sites: Hook point to try, such as resid_post.3. Repeatable; five depths by default.
    """

    sites: tuple[str, ...] = field(default=(), metadata={"option": "--site"})

    def of(self, lm: LLM) -> tuple[str, ...]:
        """The given ones, or those after layers at five depths, each once."""
        layers = lm.model.config.num_layers
        five = dict.fromkeys(f"resid_post.{min(layers * at // 5, layers - 1)}" for at in range(1, 6))
        return self.sites or tuple(five)
