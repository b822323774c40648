"""A model of its own that judges what another one writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Self, get_args

import torch

from decodery.core.conversation import Prompt
from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.models.loaders.load import LoadedModel
from decodery.models.loaders.named import Precision, loaded
from decodery.models.loaders.reward_folder import reward_folder
from decodery.models.protocol import LanguageModel, Reader
from decodery.models.tokenizers.chat_prompt import chat_tokens
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.models.tokenizers.vocabularies import fitted
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.scorer import Candidates, Scorer, scores_of
from decodery.step.writer import writes

from .log_probability import LogProbability
from .published_reward import Form, PublishedReward, Steps
from .text import texts
from .wrapper import Wrapper

_ROLE = "reward"


@register(
    "reward-model",
    paper="Training Verifiers to Solve Math Word Problems (2021)",
    guarantee="what its scorer gives if this model has written the text",
    requirements=("a second model",),
)
@dataclass(frozen=True)
class RewardModel(Wrapper):
    """Scores texts by a scorer that asks a second model in place of the one that wrote them.

    What needs the writer is refused. Where the two have different tokens, prompt and text are read as texts, without
    the signs of a chat template. Works on a server, too. Cost: each text is read anew whenever it is scored; passes
    and rows are the ledger's "reward".

    Attributes:
        scorer: "auto" is what a published reward model says (Qwen2.5-Math-PRM and -RM, Skywork-PRM, ArmoRM, sequence
            and token classifiers are recognised by their heads), and self-evaluation for any other model. Others read
            by themselves, as process-reward(head=FILE) with a head that was trained on this model, self-evaluation,
            rating or log-probability do, or ask by a prompt of their own, as llm-judge does, by this model's chat
            template.
        model: A folder, a name that `decodery.load` knows, a model that was loaded, or a `LanguageModel` with the
            writer's own tokens.
        dtype: Of one that is named.
        form: How a published model is asked, where its folder does not say so: "math-shepherd" or "rlhflow".
        steps: What a text's score is made of the probabilities of its steps, for models that score steps.
    """

    scorer: Scorer | str = "auto"
    model: LoadedModel | LanguageModel | str = ""
    dtype: Precision = "auto"
    form: Literal["auto", "math-shepherd", "rlhflow"] = "auto"
    steps: Steps = "last"

    requirements = Requirements()

    def __post_init__(self) -> None:
        if self.form not in ("auto", "math-shepherd", "rlhflow"):
            raise SettingsError(f"the form of reward-model is auto, math-shepherd or rlhflow, not {self.form!r}")
        if self.steps not in get_args(Steps):
            raise SettingsError(f"steps of reward-model is {', '.join(get_args(Steps))}, not {self.steps!r}")
        if self.scorer == "auto":
            object.__setattr__(self, "scorer", self._published() or "self-evaluation")
        super().__post_init__()
        if not self.model:
            raise SettingsError("reward-model judges by a second model: name one, as in model=FOLDER")
        if self.dtype != "auto" and not isinstance(self.model, str):
            raise SettingsError(f"dtype={self.dtype} is for a reward model given by name: name one, or leave dtype out")
        # Log-probabilities can be read as well as told.
        told = self.inner.requirements.logprobs and not isinstance(self.inner, LogProbability)
        if self.inner.requirements.taps or (told and not self.inner.apart):
            raise SettingsError(
                f"{type(self.inner).__name__} asks whoever wrote the text: give reward-model a scorer that reads by "
                "itself, such as process-reward, self-evaluation or llm-judge"
            )

    @property
    def bounds(self) -> tuple[float, float]:
        return self.inner.bounds

    @property
    def log(self) -> bool:
        return self.inner.log

    def remark(self, prompt: str, text: str) -> str:
        return self.inner.remark(prompt, text)

    def bind(self, tokenizer: Tokenizer) -> Self:
        own = self._loaded[1]
        return replace(self, scorer=self.inner.bind(tokenizer if own is None else own))

    def fits(self, model: Reader) -> None:
        self.inner.fits(self._loaded[0])

    def score(self, candidates: Candidates) -> ForwardCoroutine[torch.Tensor]:
        found = self._found
        model, tokenizer = (found.model, found.tokenizer) if isinstance(found, LoadedModel) else (found, None)
        writer = candidates.model
        alike = writer is None or writer.config.vocabulary == model.config.vocabulary != ""
        if tokenizer is None or alike:
            asked = replace(candidates, model=model if writer is None else fitted(model, writer))
        else:
            asked = self._retold(candidates, tokenizer, model)
        calls = candidates.calls if self.inner.apart else None
        if calls is not None and isinstance(found, LoadedModel):
            calls = calls.read_by(model, partial(_turns, found))
        elif calls is not None:
            calls = calls.read_by(model if writer is None else fitted(model, writer), calls.conversation.encode)
        return (yield from scores_of(self.inner, replace(asked, states=None, logprobs=None, calls=calls, role=_ROLE)))

    def _published(self) -> PublishedReward | None:
        """What a published reward model says; None for any other model."""
        found = reward_folder(self.model) if isinstance(self.model, str) and self.model else None
        if found is None and self.form == "auto":
            return None
        if found is not None and self.form != "auto":
            raise SettingsError(f"{self.model} has a head of the kind {found.kind}: leave form={self.form} out")
        given: LoadedModel | LanguageModel | str = self.model if found is None else found.backbone
        opened = loaded(given, self.dtype) if isinstance(given, str) else given
        if not isinstance(opened, LoadedModel):
            raise SettingsError(
                f"form={self.form} needs the model's tokenizer: give its folder, or what `load` returned"
            )
        form: Form = self.form if self.form != "auto" else found.kind  # type: ignore[union-attr]
        return PublishedReward(form, found, self.steps, opened)

    @property
    def _found(self) -> LoadedModel | LanguageModel:
        if isinstance(self.inner, PublishedReward):
            return self.inner.loaded
        return loaded(self.model, self.dtype) if isinstance(self.model, str) else self.model

    @property
    def _loaded(self) -> tuple[LanguageModel, Tokenizer | None]:
        """The model, and its tokenizer where it has one of its own."""
        found = self._found
        return (found.model, found.tokenizer) if isinstance(found, LoadedModel) else (found, None)

    @staticmethod
    def _said(candidates: Candidates, decode: Callable[[Sequence[int]], str]) -> str:
        """The prompt as a text; of a prompt that a server read, what it was made of."""
        calls, writer = candidates.calls, candidates.model
        return (
            decode(candidates.prompt)
            if calls is None or writer is None or not writes(writer)
            else calls.conversation.task
        )

    def _retold(self, candidates: Candidates, tokenizer: Tokenizer, model: LanguageModel) -> Candidates:
        """The same in the tokens of another model."""
        if candidates.decode is None:
            raise SettingsError("reward-model has other tokens than the writer: search through `LLM`")
        decode = candidates.decode

        def again(ids: Sequence[int]) -> list[int]:
            return tokenizer.encode(decode(ids), special=False)

        pairs = zip(candidates.outputs, candidates.begins or (), strict=False)
        return replace(
            candidates,
            prompt=tokenizer.encode(self._said(candidates, decode)),
            outputs=[tokenizer.encode_after(text) for text in texts(candidates, None, "reward-model")],
            begins=None if candidates.begins is None else [len(again(output[:begin])) for output, begin in pairs],
            decode=tokenizer.decode,
            model=model,
        )


def _turns(asked: LoadedModel, prompt: Prompt) -> list[int]:
    """The tokens of a question to a model, by its own chat template where it has one."""
    if asked.chat_template is None:
        return asked.tokenizer.encode(str(prompt))
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return chat_tokens(asked.chat_template, asked.tokenizer, turns)
