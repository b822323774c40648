"""What writing in groups brings, and what it costs: tokens of a group and quality, by confidence.

    OMP_NUM_THREADS=1 python benchmarks/hamburger.py DIR [--model tiny-1M-chain] [--puzzle chain] [--count 96]
        [--new 64]

DIR: a folder of `decodery train hamburger` for the model. Prompts: held-out puzzles, or without --puzzle questions of
Spec-Bench (DECODERY_DATA) of up to 400 characters, evenly spread; all texts are greedy. By confidence: tokens of a
group; gain, the layers that plain decoding loads for a token by those loaded here, a group loading the model and its
head once and every further token the small decoder and the head, a head counted as what it weighs in layers; right, the
share of puzzles solved, or ROUGE-L with the texts of the model as it was; nats, per token of the first of those texts
under this way of writing. Adds what it finds to benchmarks/results/hamburger.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.engine.schedule import Limits
from decodery.llm.llm import LLM
from decodery.logits_sources.hamburger import Hamburger
from decodery.models.batch import Segment
from decodery.models.loaders.load import LoadedModel, load
from decodery.models.protocol import LanguageModel
from decodery.models.trained.micro_steps import MicroSteps
from decodery.step.forward_request import run_sync, score
from decodery.step.logits_source import LogitsSource
from decodery.step.sequence import Sequence as Decoded
from decodery.training.calm import rouge_l
from decodery.training.hamburger import MODEL
from decodery_benchmarks import solvers
from decodery_benchmarks.puzzles import drawn, puzzle
from decodery_benchmarks.results import begun_result, write_result
from decodery_benchmarks.training.solving import text_of

RESULTS = Path(__file__).parent / "results" / "hamburger.json"
DATA = Path(os.environ.get("DECODERY_DATA", Path(__file__).parents[2] / "shared" / "data"))
CONFIDENCES = (0.99, 0.9, 0.5, 0.0)
READ = 12
"""Texts whose nats are counted."""


def written(
    loaded: LoadedModel, model: LanguageModel, prompts: Sequence[Sequence[int]], new: int, source: LogitsSource | None
) -> list[Decoded]:
    """Greedy texts after prompts, 32 at a time."""
    engine = Engine(model, detokenizer=loaded.tokenizer.stream, limits=Limits(texts=32))
    requests = [Request(each, new, logits_source=source, eos_ids=loaded.tokenizer.eos_ids) for each in prompts]
    texts = [engine.submit(request) for request in requests]
    engine.run(texts)
    return texts


@torch.no_grad()
def nats(model: LanguageModel, texts: Sequence[Decoded], source: LogitsSource | None) -> float:
    """Per token of texts that others wrote."""
    total, count = 0.0, 0
    for text in texts:
        reader = model if source is None else source.over(model, text.tokens[: text.request.prompt_length])
        scored = run_sync(score(reader, Segment.chunk(text.tokens[:-1], reader.new_cache()))).logits
        laws = scored[text.request.prompt_length - 1 :].double().log_softmax(dim=-1)
        total -= float(laws.gather(1, torch.tensor(text.generated)[:, None]).sum())
        count += len(text.generated)
    return total / count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="tiny-1M-chain")
    parser.add_argument("--puzzle", default="")
    parser.add_argument("--count", type=int, default=96)
    parser.add_argument("--new", type=int, default=64)
    options = parser.parse_args()
    loaded, parts = solvers.load_model(options.model), MicroSteps.load(options.folder / MicroSteps.FILE)
    own = options.folder / MODEL
    model = load(str(own)).model if own.is_dir() else loaded.model
    if options.puzzle:
        kind = puzzle(options.puzzle)
        asked = list(islice(drawn(kind, "validation"), options.count))
    else:
        lines = (DATA / "spec_bench_dev.jsonl").read_text("utf-8").splitlines()
        short = [text for line in lines if len(text := json.loads(line)["turns"][0]) <= 400]
        asked = short[:: max(1, len(short) // options.count)][: options.count]
    encode = LLM(loaded).encode
    prompts = [encode(each) for each in asked]
    first = written(loaded, loaded.model, prompts, options.new, None)
    config = model.config
    head = config.vocab_size * config.hidden_size / (sum(each.numel() for each in layer(parts)) or 1)

    def right(texts: Sequence[Decoded]) -> float:
        if not options.puzzle:
            return sum(rouge_l(a.generated, b.generated) for a, b in zip(texts, first, strict=True)) / len(texts)
        said = [text_of(text) for text in texts]
        return sum(text is not None and kind.verify(a, text) for a, text in zip(asked, said, strict=True)) / len(said)

    runs: dict[str, Any] = {"as it was": {"right": right(first), "nats": nats(loaded.model, first[:READ], None)}}
    ways: list[tuple[str, LogitsSource]] = [("one token a group", Hamburger(parts, 2.0))]
    ways += [(f"confidence {each:g}", Hamburger(parts, each)) for each in CONFIDENCES]
    for name, source in ways:
        texts = written(loaded, model, prompts, options.new, source)
        counts = [text.trace.ledger.counts for text in texts]
        rows, groups = (sum(each.get(key, 0) for each in counts) for key in ("rows", "groups"))
        # The last group of a text is seldom read again; what it holds was written all the same.
        groups += sum(open_group(text) for text in texts)
        loaded_layers = groups * (config.num_layers + head) + (rows - groups) * (parts.layers + head)
        runs[name] = {
            "tokens of a group": rows / groups,
            "gain": rows * (config.num_layers + head) / loaded_layers,
            "right": right(texts),
            "as plain": sum(a.generated == b.generated for a, b in zip(texts, first, strict=True)) / len(texts),
            "nats": nats(model, first[:READ], source),
        }
        print(name, json.dumps(runs[name]), flush=True)
    given = f"--model {options.model} --count {options.count} --new {options.new}"
    given += f" --puzzle {options.puzzle}" if options.puzzle else ""
    found = {
        "command": f"OMP_NUM_THREADS=1 python benchmarks/hamburger.py {options.folder.name} {given}",
        "trained": local(parts.facts["command"]),
        "validation": {"before": parts.facts["validation"]["baselines"]["before"], "after": parts.facts["validation"]},
        "texts": len(asked),
        "puzzle": options.puzzle,
        "head in layers": round(head, 3),
        "runs": {name: {key: round(value, 4) for key, value in each.items()} for name, each in runs.items()},
    }
    known = begun_result(RESULTS)
    known["rows"][options.model] = found
    write_result(RESULTS, known)


def open_group(text: Decoded) -> bool:
    """Whether the cache of a text has read tokens after its last slot."""
    cache = text.cache
    return bool(cache.positions[0, cache.length - 1] < cache.next_position - 1)


def layer(parts: MicroSteps) -> list[torch.Tensor]:
    """The matrices of one layer of the small decoder, which is as large as one of the model's."""
    return [each for name, each in parts.tensors.items() if name.startswith("micro.0.") and each.ndim == 2]


def local(command: str) -> str:
    """A command without the folders it was given in."""
    return shlex.join(Path(word).name if word.startswith("/") else word for word in shlex.split(command))


if __name__ == "__main__":
    main()
