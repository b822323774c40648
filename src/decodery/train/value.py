"""Train a value head: what reward a text may expect by its beginning, read off a frozen model's hidden states."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from typing import Literal

import torch

from ..core.sequence import Sequence
from ..decode.engine import Engine
from ..decode.request import Request
from ..errors import SettingsError
from ..model.batch import Batch, Segment
from ..model.protocol import LanguageModel
from ..model.store import Progress, silent
from ..sample.sampler import Sampler
from ..source.value import LinearValue, Reward

_TOGETHER = 16


def train_value(
    model: LanguageModel,
    prompts: Ordered[Ordered[int]],
    reward: Reward,
    *,
    method: Literal["fudge", "q"] = "fudge",
    samples: int = 8,
    length: int = 32,
    eos_ids: Ordered[int] = (),
    tap: int | None = None,
    ridge: float = 1e-3,
    seed: int = 0,
    progress: Progress = silent,
) -> LinearValue:
    """The linear head whose values of the prefixes of the model's own texts come closest to the rewards.

    samples: texts of up to `length` tokens drawn per prompt at temperature 1. tap: after how many layers it reads, None
    for all. method: "fudge" fits every prefix to its text's final reward, "q" to the value of the next prefix and only
    the last one to the reward (CD-FUDGE and CD-Q of Controlled Decoding from Language Models, 2023). For a linear head
    both are least-squares problems, solved outright instead of by gradients; the expectation over the next token that
    CD-Q takes is over the sampled ones. ridge: of the mean square of the states.

    Raises SettingsError for nothing to learn from.
    """
    tap = model.config.num_layers if tap is None else tap
    if not prompts or samples < 1 or length < 1 or ridge < 0 or not 0 <= tap <= model.config.num_layers:
        raise SettingsError(
            "a value head needs prompts, samples and length of at least 1, ridge >= 0 and a layer to tap"
        )
    size = model.config.hidden_size + 1
    moments, targets = torch.zeros(size, size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    for number, prompt in enumerate(prompts):
        texts = _sample(model, prompt, samples, length, eos_ids, seed + number * samples)
        worth = reward(prompt, [text.generated for text in texts])
        for text, value in zip(texts, worth, strict=True):
            states = torch.nn.functional.pad(_states(model, text, tap), (0, 1), value=1.0)
            if method == "fudge":
                moments += states.T @ states
                targets += states.sum(dim=0) * value
            else:
                moments += states[:-1].T @ (states[:-1] - states[1:]) + states[-1:].T @ states[-1:]
                targets += states[-1] * value
        progress("sampling texts", number + 1, len(prompts))
    damping = ridge * moments.diagonal()[:-1].abs().mean()
    moments.diagonal()[:-1] += damping
    found = torch.linalg.lstsq(moments, targets[:, None]).solution[:, 0]
    return LinearValue(found[:-1].float(), found[-1].float(), tap)


def _sample(
    model: LanguageModel, prompt: Ordered[int], samples: int, length: int, eos_ids: Ordered[int], seed: int
) -> list[Sequence]:
    """Texts drawn from the model's own law; seeds count up from `seed`."""
    engine, sampler = Engine(model), Sampler.from_settings(temperature=1.0)
    texts: list[Sequence] = []
    for first in range(0, samples, _TOGETHER):
        for number in range(first, min(samples, first + _TOGETHER)):
            request = Request(prompt, length, sampler, seed=seed + number, eos_ids=eos_ids)
            texts.append(engine.submit(request, like=texts[0] if texts else None))
        engine.run(texts[first:])
    return texts


def _states(model: LanguageModel, text: Sequence, tap: int) -> torch.Tensor:
    """[generated, hidden] float64: the states of the output tokens."""
    segment = Segment.chunk(text.tokens, model.new_cache(), logit_rows=[])
    hidden = model.forward(Batch([segment]), taps=[tap]).hidden[tap]
    return hidden[text.prompt_length :].double().cpu()
