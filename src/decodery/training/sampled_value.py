"""Train a value head on texts that a model draws itself, which a scorer judges."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Ordered
from typing import Literal

from decodery.core.errors import SettingsError
from decodery.core.noise import nth_seed
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.loaders.store import Progress, silent
from decodery.models.protocol import LanguageModel
from decodery.sampling.sampler import Sampler
from decodery.scorers.value_head import LinearValue
from decodery.step.forward_request import run_sync
from decodery.step.scorer import Candidates, Scorer, judge
from decodery.step.sequence import Sequence

from .value import Judged, fit_value

_TOGETHER = 16


def train_value(
    model: LanguageModel,
    prompts: Ordered[Ordered[int]],
    reward: Scorer,
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

    Args:
        method: "fudge" fits every prefix to its text's final reward, "q" to the value of the next prefix and only the
            last one to the reward (CD-FUDGE and CD-Q of Controlled Decoding from Language Models, 2023). For a linear
            head both are least-squares problems, solved outright instead of by gradients; the expectation over the next
            token that CD-Q takes is over the sampled ones.
        samples: Texts of up to `length` tokens drawn per prompt at temperature 1.
        tap: After how many layers it reads, None for all.
        ridge: Of the mean square of the states.

    Raises:
        SettingsError: For nothing to learn from.
    """
    if not prompts or samples < 1 or length < 1:
        raise SettingsError("a value head needs prompts, samples and length of at least 1")

    def judged() -> Iterator[Judged]:
        for number, prompt in enumerate(prompts):
            texts = _sample(model, prompt, samples, length, eos_ids, nth_seed(seed, number * samples))
            outputs = [text.generated for text in texts]
            candidates = Candidates(prompt, outputs, [True] * len(outputs), model=model)
            for output, value in zip(outputs, run_sync(judge(reward, candidates)).tolist(), strict=True):
                yield prompt, output, value
            progress("sampling texts", number + 1, len(prompts))

    return fit_value(model, judged(), method=method, tap=tap, ridge=ridge)


def _sample(
    model: LanguageModel, prompt: Ordered[int], samples: int, length: int, eos_ids: Ordered[int], seed: int
) -> list[Sequence]:
    """Texts drawn from the model's own distribution; seeds count up from `seed`."""
    engine, sampler = Engine(model), Sampler.from_settings(temperature=1.0)
    texts: list[Sequence] = []
    for first in range(0, samples, _TOGETHER):
        for number in range(first, min(samples, first + _TOGETHER)):
            request = Request(prompt, length, sampler, seed=nth_seed(seed, number), eos_ids=eos_ids)
            texts.append(engine.submit(request, like=texts[0] if texts else None))
        engine.run(texts[first:])
    return texts
