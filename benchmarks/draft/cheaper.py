"""What cheaper forms of a draft model would bring: exact counts on texts that the target wrote, and no time.

    OMP_NUM_THREADS=1 python benchmarks/draft/cheaper.py --model MODEL --draft MODEL --work DIR [--questions 1]
        [--new 64] [--kinds KIND ...] [--out FILE]

A greedy draft after a greedy text is accepted up to its first token that is not the text's, and until then the draft
model has read nothing but the text. So one pass of it over a text tells what chains of any length bring at any place.
Forms: the draft as it is; the first tokens of its vocabulary alone; fewer bits; without the layers that change their
input least; and the target's own layers with some left out. A form costs its bytes by those of the target, for every
token asked for; a pass what the prior of its model says, by kernels. Chains end where the draft's probability falls
below a threshold. Each row is the best of all lengths and thresholds, chosen on the same texts: an upper bound.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from categories import prompts

import decodery
from decodery.compression.copies import copy_of
from decodery.llm.llm import LLM
from decodery.models.batch import Batch, Segment
from decodery.models.footprint import _head_bytes, weight_bytes
from decodery.models.layer_plan import WHOLE, LayerPlan
from decodery.models.loaders.load import load
from decodery.models.torch.transformer import Transformer
from decodery.step import prior_prices

sys.path.insert(0, str(Path(__file__).parents[1]))
from decodery_benchmarks.results import RESULTS, write_result

OUTPUTS = (32768, 8192)
LENGTHS, THRESHOLDS = (1, 2, 3, 4, 6, 8), (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
KERNELS = ("AVX2", "AVX-512 VNNI")
THREADS = 2


@dataclass
class Form:
    """A form of a draft, and how often it was right.

    Attributes:
        bytes: What a pass of it reads.
        right, sure: By kind of text, per token whether it is the draft's most likely one, and how likely that was.
    """

    bytes: float
    right: dict[str, list[np.ndarray]] = field(default_factory=dict)
    sure: dict[str, list[np.ndarray]] = field(default_factory=dict)

    def learn(self, kind: str, logits: torch.Tensor, text: np.ndarray) -> None:
        chances, tokens = logits.float().softmax(dim=-1).max(dim=-1)
        self.right.setdefault(kind, []).append(tokens.numpy() == text)
        self.sure.setdefault(kind, []).append(chances.numpy())


def written(lm: LLM, asked: dict[str, list[str]], new: int, path: Path) -> dict[str, list[tuple[list[int], list[int]]]]:
    """By kind, prompts and what the target wrote after them; kept in a file."""
    if not path.is_file():
        found: dict[str, list[tuple[list[int], list[int]]]] = {}
        for kind, texts in asked.items():
            outputs = [lm.generate(text, max_new_tokens=new, temperature=0.0) for text in texts]
            found[kind] = [(list(each.prompt_tokens), list(each.tokens)) for each in outputs]  # type: ignore[union-attr]
            print(kind, flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found), "utf-8")
    return json.loads(path.read_text("utf-8"))


def rows_of(
    model: Transformer, prompt: list[int], text: list[int], plan: LayerPlan = WHOLE, taps: tuple[int, ...] = ()
) -> Any:
    """The logits from which each token of a text was chosen."""
    ids = np.asarray([*prompt, *text[:-1]])
    rows = list(range(len(prompt) - 1, len(ids)))
    segment = Segment.chunk(ids, model.new_cache(), logit_rows=rows)
    return model.forward(Batch([segment]), taps=taps, layer_plan=plan)


def least_changing(model: Transformer, texts: dict[str, Any], count: int) -> tuple[int, ...]:
    """The layers that are left if the `count` whose output is most like their input are dropped, ends excepted."""
    layers = model.config.num_layers
    alike = np.zeros(layers)
    for own in texts.values():
        for prompt, text in own:
            hidden = rows_of(model, prompt, text, taps=tuple(range(layers + 1))).hidden
            for layer in range(layers):
                before, after = hidden[layer].float(), hidden[layer + 1].float()
                alike[layer] += float(torch.cosine_similarity(before, after, dim=-1).mean())
    dropped = 1 + np.argsort(-alike[1:-1])[:count]
    return tuple(layer for layer in range(layers) if layer not in dropped)


def measured(
    model: Transformer, texts: dict[str, Any], name: str, *, bits: int = 0, dropped: int = 0
) -> Iterator[tuple[str, Form]]:
    """Forms of a model: as it is, or changed, with all of its outputs and with the first ones."""
    head, layers = _head_bytes(model), float(weight_bytes(model) - _head_bytes(model))
    if bits:
        model = copy_of(model, f"int4(bits={bits})")
        linears = [
            linear for layer in model.weights.layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)
        ]
        # A block of 32 has a step and a least value.
        layers = sum(each.shape[0] * each.shape[1] for each in linears) * (bits + 1) / 8
    plan = WHOLE
    if dropped:
        plan = LayerPlan(least_changing(model, texts, dropped))
        layers *= 1 - dropped / model.config.num_layers
    forms = {outputs: Form(layers + head * outputs / model.vocab_size) for outputs in (model.vocab_size, *OUTPUTS)}
    for kind, own in texts.items():
        for prompt, text in own:
            logits = rows_of(model, prompt, text, plan).logits
            for outputs, form in forms.items():
                form.learn(kind, logits[:, :outputs], np.asarray(text))
    for outputs, form in forms.items():
        yield f"{name}, {outputs} outputs" if outputs != model.vocab_size else name, form


def chained(form: Form, kind: str, length: int, least: float, share: float, price: Callable[[int], float]) -> Any:
    """Tokens, passes and seconds of chains up to `length`, in units of a plain pass."""
    tokens = passes = 0
    seconds = 0.0
    for right, sure in zip(form.right[kind], form.sure[kind], strict=True):
        at = 1  # the prompt's pass gives the first
        while at < len(right):
            drafted = asked = 0
            # What the draft adds to a wrong token is not known: as much as if it were as sure as of the text.
            while drafted < min(length, len(right) - at - 1):
                asked += 1
                if sure[at + drafted] < least:
                    break
                drafted += 1
            kept = 0
            while kept < drafted and right[at + kept]:
                kept += 1
            tokens, passes = tokens + kept + 1, passes + 1
            seconds += price(1 + drafted) + asked * share
            at += kept + 1
    return tokens, passes, seconds


def best(form: Form, share: float, price: Callable[[int], float]) -> dict[str, Any]:
    """The best lengths and thresholds for all texts together, and what they bring by kind."""
    found: dict[str, Any] = {"speed": 0.0}
    for length, least in product(LENGTHS, THRESHOLDS):
        kinds = {kind: chained(form, kind, length, least, share, price) for kind in form.right}
        tokens, passes, seconds = (sum(each) for each in zip(*kinds.values(), strict=True))
        if tokens / seconds > found["speed"]:
            found = {
                "speed": tokens / seconds,
                "length": length,
                "threshold": least,
                "tokens per pass": tokens / passes,
            }
            found["by kind"] = {kind: round(own[0] / own[2], 3) for kind, own in kinds.items()}
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=1)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--kinds", nargs="+")
    parser.add_argument("--out", type=Path, default=RESULTS / "draft-cheaper.json")
    options = parser.parse_args()
    lm, draft = decodery.load(options.model), load(options.draft).model
    target = lm.model
    assert isinstance(target, Transformer) and isinstance(draft, Transformer)
    asked = prompts(options.questions, False)
    asked = {kind: own for kind, own in asked.items() if not options.kinds or kind in options.kinds}
    texts = written(lm, asked, options.new, options.work / "texts.json")
    whole = weight_bytes(target)
    prices = {}
    for kernels in KERNELS:
        rate = prior_prices._INTEGERS[kernels] * THREADS
        own = prior_prices.PriorPrices(
            whole / (prior_prices._READ * THREADS), whole / prior_prices._BYTES["int4"] / rate
        )
        prices[kernels] = own
    forms: dict[str, Form] = {}
    rows: dict[str, Any] = {}
    count = draft.config.num_layers
    wanted = (
        ("draft", draft, {}),
        ("draft, 3 bits", draft, {"bits": 3}),
        ("draft, 2 bits", draft, {"bits": 2}),
        (f"draft, {count - count // 6} layers", draft, {"dropped": count // 6}),
        (f"draft, {count - count // 3} layers", draft, {"dropped": count // 3}),
        ("target, three quarters of its layers", target, {"dropped": target.config.num_layers // 4}),
        ("target, half of its layers", target, {"dropped": target.config.num_layers // 2}),
    )
    for name, model, settings in wanted:
        forms |= dict(measured(model, texts, name, **settings))
        for each, form in forms.items():
            if each not in rows:
                rows[each] = row_of(form, form.bytes / whole, prices)
                print(each, rows[each], flush=True)
    command = shlex.join(["python", "benchmarks/draft/cheaper.py", *sys.argv[1:]])
    tokens = sum(len(text) for own in texts.values() for _, text in own)
    write_result(options.out, {"command": command, "threads": THREADS, "tokens": tokens, "rows": rows})


def row_of(form: Form, share: float, prices: dict[str, prior_prices.PriorPrices]) -> dict[str, Any]:
    every = np.concatenate([each for own in form.right.values() for each in own])
    row: dict[str, Any] = {"share": round(share, 3), "agreement": round(float(every.mean()), 3)}
    for kernels, price in prices.items():
        one = price.of(1, 0.0, 0.0)
        row[kernels] = best(form, share, lambda rows, price=price, one=one: price.of(rows, 0.0, 0.0) / one)
    return row


if __name__ == "__main__":
    main()
