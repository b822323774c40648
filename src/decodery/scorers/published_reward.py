"""What published reward models say of a text, each asked in the form it was trained on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch

from decodery.core.errors import SettingsError
from decodery.models.loaders.load import LoadedModel
from decodery.models.loaders.reward_folder import RewardFolder
from decodery.models.loaders.reward_head import Kind
from decodery.models.protocol import Reader, is_open
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.scorer import Candidates, Scorer

from .reading import read, reader
from .text import texts

Form = Literal[Kind, "math-shepherd", "rlhflow"]
Steps = Literal["last", "min", "product", "mean"]

_NAME = "reward-model"
_PLACE = "<extra_0>"
_SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
_MARK = "ки"
_WHOLE = ("sequence-classification", "qwen-rm", "gated")
"""Forms that score a whole text."""
_ANSWER = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>"
"""What ends a prompt of ArmoRM, whose gate reads the first token of it."""


@dataclass(frozen=True)
class PublishedReward(Scorer):
    """Scores texts by a published reward model: by its steps, or as a whole.

    Attributes:
        form: How it is asked. Heads are recognised; "math-shepherd" and "rlhflow" are language models that answer with
            + and -.
        folder: The head and its layers, None for a language model.
        steps: What the score of a text is made of its steps' probabilities.
        loaded: The model with its tokenizer and chat template.
    """

    form: Form
    folder: RewardFolder | None
    steps: Steps
    loaded: LoadedModel

    @property
    def by_steps(self) -> bool:
        """Whether each step has a score."""
        return self.form not in _WHOLE

    @property
    def prefixes(self) -> bool:
        return self.by_steps

    @property
    def bounds(self) -> tuple[float, float]:
        return (0.0, 1.0) if self.by_steps else (-float("inf"), float("inf"))

    @property
    def log(self) -> bool:
        return not self.by_steps

    @property
    def apart(self) -> bool:
        return True

    def bind(self, tokenizer: Tokenizer) -> Self:
        return self

    def fits(self, model: Reader) -> None:
        if self.folder is not None and not is_open(model):
            raise SettingsError("this reward model gives no hidden states: load it in a form that this package runs")

    def score(self, candidates: Candidates) -> ForwardCoroutine[torch.Tensor]:
        model = reader(candidates, _NAME)
        if candidates.calls is None:
            raise SettingsError("a published reward model reads the question as a text: search through `LLM`")
        question = candidates.calls.conversation.task
        asked = [self.rows(question, text) for text in texts(candidates, None, _NAME)]
        kept: list[list[torch.Tensor]] = [[] for _ in asked]

        def take(number: int, row: int, states: torch.Tensor) -> None:
            rows = [at - row for at in asked[number][1] if 0 <= at - row < len(states)]
            if rows:
                kept[number].append(self._read_off(states[rows], model))

        wanted = [len(tokens) - min(rows, default=len(tokens)) for tokens, rows in asked]
        alone = replace(candidates, states=None)
        tap = -1 if self.folder is not None else None
        yield from read(alone, model, [tokens for tokens, _ in asked], wanted, take, tap)
        found = [self._joined(self._values(torch.cat(each)) if each else []) for each in kept]
        return torch.tensor(found, dtype=torch.float64, device="cpu")

    def _read_off(self, rows: torch.Tensor, model: Reader) -> torch.Tensor:
        """What scores need of hidden states, or of logits."""
        if self.folder is None:
            return rows[:, list(self._signs)]
        assert is_open(model)
        return model.final_norm(rows).float()

    def _values(self, rows: torch.Tensor) -> list[float]:
        """What the model says at these rows; a gated one says one thing at two."""
        outputs = rows.double() if self.folder is None else self.folder.head.outputs(rows).double()
        if not self.by_steps:
            found = outputs[:, 0]
        elif outputs.shape[-1] == 1:
            found = torch.sigmoid(outputs[:, 0])
        else:
            right = 0 if self.folder is None else 1
            found = torch.softmax(outputs, dim=-1)[:, right]
        values: list[float] = found.tolist()
        return values

    def _joined(self, values: Sequence[float]) -> float:
        if not values:
            return 0.0 if self.by_steps else -float("inf")
        if not self.by_steps or self.steps == "last":
            return values[-1]
        if self.steps == "min":
            return min(values)
        if self.steps == "mean":
            return sum(values) / len(values)
        return float(torch.tensor(values, dtype=torch.float64, device="cpu").prod())

    @property
    def _signs(self) -> tuple[int, int]:
        """Tokens of + and -."""
        encode = self.loaded.tokenizer.encode
        if self.form == "math-shepherd":
            right, wrong = encode("+ -", special=False)[-2:]
            return right, wrong
        return encode("+", special=False)[-1], encode("-", special=False)[-1]

    def rows(self, question: str, text: str) -> tuple[list[int], list[int]]:
        """The tokens that are read, and the rows of them at which the model is asked."""
        steps = [step.strip() for step in re.split(r"\n\s*\n", text) if step.strip()] or [""]
        encode = self.loaded.tokenizer.encode
        if self.form == "qwen-prm":
            turns = [("system", _SYSTEM), ("user", question), ("assistant", "".join(step + _PLACE for step in steps))]
            tokens = self._chat(turns)
            return _at(tokens, encode(_PLACE, special=False)[-1])
        if self.form == "math-shepherd":
            tokens = encode(f"{question} " + "\n".join(f"{step} {_MARK}" for step in steps))
            return _at(tokens, encode(_MARK, special=False)[-1])
        if self.form == "rlhflow":
            return self._dialogue(question, steps)
        if self.form in _WHOLE:
            system = [("system", _SYSTEM)] if self.form == "qwen-rm" else []
            return self._whole([*system, ("user", question), ("assistant", text)])
        # What stands between steps has tokens of its own, as in the training of these models.
        lines, end = self.form == "skywork-prm", encode("\n", special=False)
        tokens, rows = [*self._beginning, *encode(f"{question}\n" if lines else question, special=False)], list[int]()
        for step in text.split("\n") if lines else steps:
            tokens += [*encode(step, special=False), *end]
            rows.append(len(tokens) - 1)
        return tokens, rows

    @property
    def _beginning(self) -> list[int]:
        """The token that begins a text, where the tokenizer has one."""
        chat, encode = self.loaded.chat_template, self.loaded.tokenizer.encode
        first = None if chat is None else chat.special.get("bos_token")
        return encode("") if first is None else encode(first, special=False)

    def _whole(self, turns: Sequence[tuple[str, str]]) -> tuple[list[int], list[int]]:
        """The last token that fills nothing up, and before it the end of the prompt for who has a gate."""
        tokens, pad = self._chat(turns), self.folder.pad if self.folder is not None else None
        last = next((at for at in range(len(tokens) - 1, -1, -1) if tokens[at] != pad), len(tokens) - 1)
        if self.form != "gated":
            return tokens, [last]
        mark = self.loaded.tokenizer.encode(_ANSWER, special=False)
        gate = next((at for at in range(last, -1, -1) if tokens[at : at + len(mark)] == mark), None)
        if gate is None:
            raise SettingsError(
                "the gate of this reward model reads the end of the prompt, <|eot_id|> before the assistant's header "
                "of Llama 3, and its chat template writes none: use the template that the model was published with"
            )
        return tokens, [gate, last]

    def _dialogue(self, question: str, steps: Sequence[str]) -> tuple[list[int], list[int]]:
        """Steps as turns, each of which is answered by a sign."""
        turns, rows, tokens = list[tuple[str, str]](), list[int](), list[int]()
        for number, step in enumerate(steps):
            turns += [("user", f"{question} {step}" if number == 0 else step), ("assistant", "+")]
            tokens = self._chat(turns)
            sign = next((at for at in range(len(tokens) - 1, 0, -1) if tokens[at] == self._signs[0]), None)
            if sign is None:
                raise SettingsError(
                    "this tokenizer has no token for the + of an answer: rlhflow reads the one before it"
                )
            rows.append(sign - 1)
        return tokens, rows

    def _chat(self, turns: Sequence[tuple[str, str]]) -> list[int]:
        """Turns in the model's own template."""
        chat, tokenizer = self.loaded.chat_template, self.loaded.tokenizer
        if chat is None:
            raise SettingsError(
                f"a reward model of the form {self.form} needs its chat template, and the folder has none"
            )
        messages: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in turns]
        return tokenizer.encode(chat.render(messages, add_generation_prompt=False))


def _at(tokens: list[int], mark: int) -> tuple[list[int], list[int]]:
    """Tokens, and the rows that hold a mark."""
    return tokens, [row for row, token in enumerate(tokens) if token == mark]
