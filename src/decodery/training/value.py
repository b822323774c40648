"""Train a value head: what reward a text may expect by its beginning, read off a frozen model's hidden states."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from decodery.core.errors import CorruptFile, SettingsError
from decodery.models.batch import Batch, Segment
from decodery.models.cache.cache import KVCache
from decodery.models.protocol import LanguageModel
from decodery.scorers.value_head import LinearValue

from .held_out import HeldOut, Measured
from .kind import ARGUMENT, PLAIN, Data, Run, kind, option
from .lines import named_texts, read_json_lines, read_objects
from .tensors import int_tensor, zeros

_CHUNK = 512
_HELD = 5
"""One prompt in so many is held out."""

Judged = tuple[Ordered[int], Ordered[int], float]
"""Prompt, what was written after it, and how good that is."""


def fit_value(
    model: LanguageModel,
    judged: Iterable[Judged],
    *,
    method: Literal["fudge", "q"] = "fudge",
    tap: int | None = None,
    ridge: float = 1e-3,
) -> LinearValue:
    """Fit the linear head to scored texts: (prompt ids, output ids, reward) of each.

    Its values are those of texts like these, whoever wrote them. What does not fit the model's context is left out.
    """
    tap = model.config.num_layers if tap is None else tap
    if ridge < 0 or not 0 <= tap <= model.config.num_layers:
        raise SettingsError(f"a value head needs ridge >= 0 and a layer to tap between 0 and {model.config.num_layers}")
    size = model.config.hidden_size + 1
    moments, targets = zeros(size, size).double(), zeros(size).double()
    for prompt, output, value in judged:
        states = torch.nn.functional.pad(states_of(model, prompt, output, tap), (0, 1), value=1.0)
        if not len(states):
            continue
        if method == "fudge":
            moments += states.T @ states
            targets += states.sum(dim=0) * value
        else:
            moments += states[:-1].T @ (states[:-1] - states[1:]) + states[-1:].T @ states[-1:]
            targets += states[-1] * value
    if not moments.any():
        raise SettingsError("a value head has no text to learn from: give some that fit the model's context")
    moments.diagonal()[:-1] += ridge * moments.diagonal()[:-1].abs().mean()
    found = torch.linalg.lstsq(moments, targets[:, None]).solution[:, 0]
    return LinearValue(found[:-1].float(), found[-1].float(), tap, model.fingerprint)


def fit_switch(
    model: LanguageModel, prompts: Iterable[tuple[Ordered[int], bool]], *, tap: int | None = None, ridge: float = 1e-2
) -> LinearValue:
    """The linear head that tells by a prompt whether it is one to reason about; for the search edge.

    The head reads the mean of the states of all tokens but the last, and its values are probabilities as far as least
    squares make them. Errors are those of `fit_value`.
    """
    tap = model.config.num_layers if tap is None else tap
    pooled, hard = list[torch.Tensor](), list[float]()
    for prompt, label in prompts:
        states = states_of(model, (), prompt, tap)[:-1]
        if len(states):
            pooled.append(states.mean(dim=0))
            hard.append(float(label))
    if len(set(hard)) < 2:
        raise SettingsError("a switch learns from prompts of both kinds: give some that need reasoning, and others")
    rows, labels = torch.stack(pooled), torch.tensor(hard, dtype=torch.float64, device="cpu")
    centre, mean = rows.mean(dim=0), labels.mean()
    centred = rows - centre
    moments = centred.T @ centred
    moments.diagonal()[:] += ridge * moments.diagonal().mean()
    weight = torch.linalg.solve(moments, centred.T @ (labels - mean))
    return LinearValue(weight.float(), (mean - weight @ centre).float(), tap, model.fingerprint)


def not_better(rewards: Ordered[float]) -> list[float]:
    """[m] the share of the m - 1 other samples of a prompt whose reward is no higher than a sample's own.

    Labels of Adaptive Inference-Time Compute: LLMs Can Predict if They Can Do Better, Even Mid-Generation (2024). Ties
    count as not better, because the question is whether restarting would do better: where nothing is ever right, a
    wrong text has the label 1, and no further sample is drawn for it.
    """
    if len(rewards) < 2:
        raise SettingsError("a text is compared with others of its prompt: give at least two for each")
    return [(sum(other <= own for other in rewards) - 1) / (len(rewards) - 1) for own in rewards]


def beside_others(judged: Ordered[tuple[str, str, float]]) -> list[tuple[str, str, float]]:
    """The same (prompt, text, reward), with the label of `not_better` in place of the reward."""
    places: dict[str, list[int]] = {}
    for place, (prompt, _, _) in enumerate(judged):
        places.setdefault(prompt, []).append(place)
    found = list(judged)
    for prompt, own in places.items():
        for place, label in zip(own, not_better([judged[place][2] for place in own]), strict=True):
            found[place] = (prompt, judged[place][1], label)
    return found


def read_step_labels(path: Path) -> list[tuple[float, ...] | None]:
    """The `labels` of each line of such a file, numbers; None for a line without."""
    found: list[tuple[float, ...] | None] = []
    for number, entry in read_json_lines(path):
        labels = entry.get("labels") if isinstance(entry, dict) else None
        fine = isinstance(labels, list) and all(
            isinstance(each, int | float) and not isinstance(each, bool) for each in labels
        )
        if labels is not None and not fine:
            raise CorruptFile(f"the labels in line {number} of {path} are no list of numbers: give one of each step")
        found.append(None if labels is None else tuple(map(float, labels)))
    return found


def read_judged(path: Path) -> list[tuple[str, str, float]]:
    """Prompts, texts and rewards of a file of JSON lines {"prompt": text, "text": text, "reward": number}."""

    def read(entry: dict[str, Any]) -> tuple[str, str, float] | None:
        found, reward = named_texts(entry, "prompt", "text"), entry.get("reward")
        fine = isinstance(reward, int | float) and not isinstance(reward, bool) and math.isfinite(reward)
        return (found[0], found[1], float(entry["reward"])) if found and fine else None

    return read_objects(path, '{"prompt": text, "text": text, "reward": number}', read)


def states_of(
    model: LanguageModel, prompt: Ordered[int], output: Ordered[int], tap: int, doubts: list[float] | None = None
) -> torch.Tensor:
    """[output, hidden] float64: the states of the output tokens, as many as fit the model's context.

    Args:
        doubts: See `read_on`.
    """
    tokens = [*prompt, *output][: model.config.max_positions]
    return read_on(model, model.new_cache(), tokens, tap, doubts)[len(prompt) :].double()


@torch.no_grad()
def read_on(
    model: LanguageModel, cache: KVCache, tokens: Ordered[int], tap: int, doubts: list[float] | None = None
) -> torch.Tensor:
    """[tokens, hidden] states after so many layers of tokens after those in a cache, which keeps them.

    Args:
        doubts: Gets -log p of each of these tokens but the first, in nats.
    """
    parts = []
    for start in range(0, len(tokens), _CHUNK):
        following = [] if doubts is None else list(tokens[start + 1 : start + 1 + _CHUNK])
        segment = Segment.chunk(tokens[start : start + _CHUNK], cache, logit_rows=range(len(following)))
        scores = model.forward(Batch([segment]), taps=[tap])
        if doubts is not None and following:
            laws = scores.logits.float().log_softmax(dim=-1)
            doubts += (-laws.gather(1, int_tensor(following)[:, None].to(laws.device))[:, 0]).tolist()
        parts.append(scores.hidden[tap].cpu())
        cache.keep(range(len(segment)))
    return torch.cat(parts) if parts else zeros(0, model.config.hidden_size)


@dataclass(frozen=True)
class ValueSettings(Data):
    """Judged texts, and what is fitted to them.

    Attributes:
        restart: Predict the probability that another text is not better, for the search adaptive-sampling.
    """

    texts: Path = field(default=Path(), metadata=ARGUMENT)
    tap: int | None = option(None, "Read the hidden states after N layers; after all by default.")
    ridge: float = option(1e-2, "Strength of the ridge penalty.")
    apply_chat_template: bool = option(True, "The prompts are plain text, without the chat template.", **PLAIN)
    restart: bool = False
    switch: bool = option(False, "Predict from the prompt alone whether texts fail, for the search edge.")

    def __post_init__(self) -> None:
        if self.restart and self.switch:
            raise SettingsError("--restart and --switch exclude each other: give one of them")

    def read(self) -> list[tuple[str, str, float]]:
        """Prompts, texts and what is learned of them."""
        found = read_judged(self.texts)
        return beside_others(found) if self.restart else found

    def check(self) -> None:
        self.read()


def _error(tested: Ordered[tuple[float, float]], prompts: Ordered[str]) -> dict[str, Any]:
    """The report of values beside the rewards of held-out texts: the squared error, and that of one value for all."""
    if len(tested) < 2:
        return {"tested on": "nothing: there are too few prompts to hold some out"}
    known, mean = HeldOut([], list(tested), prompts), sum(reward for _, reward in tested) / len(tested)

    def error(of: Callable[[float], float]) -> Measured:
        return known.measured(lambda some: {"error": sum((of(a) - b) ** 2 for a, b in some) / len(some)}, "error")

    return known.report(error(float), {"the mean of these": error(lambda value: mean)})


def _ready(run: Run) -> str:
    given = run.of(ValueSettings)
    if given.switch:
        return f'The switch is ready: --search "edge:switch={run.out},adapter=DIR,scorer=..."'
    use = '--search "adaptive-sampling:scorer=' if given.restart else '--logits-source "controlled-decoding:value='
    return f'The value head is ready: {use}value-head(head={run.out})"'


@kind(
    _ready, (ValueSettings(),), "texts.jsonl --out value.safetensors", model="whose hidden states are read", out="file"
)
def _value(run: Run) -> dict[str, Any]:
    """Train a head that predicts the reward of a text from its beginning.

    TEXTS holds one JSON object a line: {"prompt": ..., "text": ..., "reward": number}. The head is for the source
    controlled-decoding and the search controlled-blocks. With --restart it is for the searches adaptive-sampling
    and early-pruning, and needs several texts of each prompt. With --switch it predicts from a prompt how likely a
    reward below 0.5 is, for the search edge.
    """
    given, lm = run.of(ValueSettings), run.lm
    found = given.read()
    places = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompt for prompt, _, _ in found))}

    asked: list[str] = []

    def judged(held: bool) -> Iterator[Judged]:
        for number, (prompt, text, reward) in enumerate(found, start=1):
            if (places[prompt] % _HELD == _HELD - 1) == held:
                tokens = lm.encode(prompt, apply_chat_template=given.apply_chat_template)
                if held:
                    asked.append(prompt)
                yield tokens, lm.tokenizer.encode(text, special=False), reward
            run.progress("reading texts", number, len(found))

    if given.switch:
        hard = ((prompt, reward < 0.5) for prompt, _, reward in judged(held=False))
        head = fit_switch(lm.model, hard, tap=given.tap, ridge=given.ridge)
        tested = [
            (states_of(lm.model, (), prompt, head.tap)[:-1].mean(dim=0), float(reward < 0.5))
            for prompt, _, reward in judged(held=True)
        ]
    else:
        head = fit_value(lm.model, judged(held=False), tap=given.tap, ridge=given.ridge)
        tested = [
            (states_of(lm.model, prompt, text, head.tap)[-1], reward) for prompt, text, reward in judged(held=True)
        ]
    head.save(run.out)
    return _error([(float(state @ head.weight.double() + head.bias), reward) for state, reward in tested], asked)
