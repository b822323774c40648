"""M4, copying from a context: whether attention to it tells that an answer rests on it, and what steering does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from decodery.engine.output import Output
from decodery.llm.llm import LLM
from decodery.models.loaders.store import Progress
from decodery.monitors.confidence import Confidence
from decodery.monitors.context_awareness import ContextAwareness
from decodery.training.checkable import capitals

from .figures import Judged, Row, detection
from .price import both_ways, price
from .settings import WatchSettings

NAME = "context"
_NAMES = ("Anna", "Ben", "Clara", "David", "Eva", "Felix", "Gina", "Henry", "Ida", "Jonas", "Karl", "Lena")
_ALPHAS, _RANDOM = (0.9, 0.7, 0.5, 0.1), (0.5, 0.1)
_Asked = tuple[str, str, tuple[str, str], tuple[str, str]]


def measure(lm: LLM, settings: WatchSettings, work: Path, progress: Progress) -> tuple[list[Row], list[Row], list[str]]:
    """What is to be flagged are answers that stay the same when the context is exchanged: a cause, and no judge."""
    layer = 2 * lm.model.config.num_layers // 3
    monitors = (ContextAwareness(layer=layer), Confidence("mean"))
    asked, scores = _asked(max(48, settings.prompts // 10), settings.seed), dict[str, list[float]]()
    same, strata, right = [], [], 0
    for number, (family, question, contexts, answers) in enumerate(asked):
        outputs = [
            lm.generate(
                [{"role": "user", "content": f"{context}\n{question} Answer with one word."}],
                max_new_tokens=12,
                stop="\n",
                drafter=None,
                monitor=list(monitors),
            )
            for context in contexts
        ]
        first, second = (output for output in outputs if isinstance(output, Output))
        same.append(first.text.strip() == second.text.strip())
        strata.append(family)
        right += sum(answer in output.text for answer, output in zip(answers, (first, second), strict=True))
        for at, name in enumerate(("context-awareness", "mean log-probability")):
            known = [value for value in first.monitors[at].scores if value is not None]
            scores.setdefault(name, []).append(known[-1] if known else 0.0)
        scores.setdefault("length of the prompt", []).append(float(-len(first.prompt_tokens)))
        scores.setdefault("constant", []).append(0.0)
        progress("exchanging contexts", number + 1, len(asked))
    groups = [f"{at}" for at in range(len(asked))]
    rows = [detection(NAME, name, [Judged(each, same, groups, strata)]) for name, each in scores.items()]
    counts = ", ".join(
        f"{family} {sum(s for s, f in zip(same, strata, strict=True) if f == family)}/{strata.count(family)}"
        for family in sorted(set(strata))
    )
    note = (
        f"context: answers that stayed the same: {counts}; {right} of {2 * len(asked)} hold the right word; "
        f"attention of layer {layer}; one seed, nothing is trained"
    )
    return rows, _steered(lm, asked, progress), [note]


@dataclass(frozen=True)
class Elsewhere(ContextAwareness):
    """Steers away from as many of the prompt's tokens, whoever said them."""

    def steering(self, state: Any) -> Any:
        found = super().steering(state)
        if found is None:
            return None
        layers, others = found
        mask = np.frombuffer(others, dtype=bool)
        return layers, np.random.default_rng(len(mask)).permutation(mask).tobytes()


def _steered(lm: LLM, asked: list[_Asked], progress: Progress) -> list[Row]:
    """What steering does to copying, and to what is known without a context, which is its price."""
    ways: dict[str, dict[str, Any]] = {
        "alpha 1": {},
        **{f"alpha {alpha}": {"monitor": ContextAwareness(0, alpha, action="switch")} for alpha in _ALPHAS},
        **{
            f"alpha {alpha}, of tokens at random": {"monitor": Elsewhere(0, alpha, action="switch")}
            for alpha in _RANDOM
        },
        "alpha 1, without the template": {"apply_chat_template": False},
    }
    before, plain, found = list[bool](), 0.0, list[Row]()
    kinds = np.array([family for family, *_ in asked])
    for number, (name, given) in enumerate(ways.items()):
        outputs = []
        for _, question, (context, _), _ in asked:
            text = f"{context}\n{question} Answer with one word."
            prompt: Any = (
                [{"role": "user", "content": text}] if given.get("apply_chat_template", True) else f"{text}\nAnswer:"
            )
            outputs.append(cast(Output, lm.generate(prompt, max_new_tokens=12, stop="\n", drafter=None, **given)))
        right = [answers[0] in each.text for (*_, answers), each in zip(asked, outputs, strict=True)]
        cost = price(lm, ((each.prompt_tokens, each.tokens) for each in outputs))
        if not number:
            before, plain = right, cost
        shares = {
            f"{kind} right": round(float(np.array(right)[kinds == kind].mean()), 3) for kind in ("copying", "capitals")
        }
        row = {"testbed": NAME, "what": name, "questions": len(asked), **shares, **both_ways(before, right)}
        found.append(row | {"nats per token more": round(cost - plain, 4)})
        progress("steering attention", number + 1, len(ways))
    return found


def _asked(count: int, seed: int) -> list[_Asked]:
    """Kind, question, two contexts and the right word under each: codes that are to be copied, among up to 11 others,
    and capitals, which the same contexts say nothing of."""
    random, pairs = np.random.default_rng(seed), list(capitals().items())
    found = []
    for number in range(count):
        names = random.permutation(_NAMES)[: int(random.integers(1, len(_NAMES) + 1))].tolist()
        codes = [[str(code) for code in random.integers(100, 1000, len(names))] for _ in range(2)]
        contexts = [" ".join(f"The code of {n} is {c}." for n, c in zip(names, own, strict=True)) for own in codes]
        at = int(random.integers(len(names)))
        if number % 2:
            question, answers = f"What is the code of {names[at]}?", (codes[0][at], codes[1][at])
        else:
            country, capital = pairs[int(random.integers(len(pairs)))]
            question, answers = f"What is the capital of {country}?", (capital, capital)
        found.append(("copying" if number % 2 else "capitals", question, (contexts[0], contexts[1]), answers))
    return found
