"""Figures of the drafters that guess inside of the target's own pass, on the embedded model.

    python benchmarks/draft/in_pass.py lengths [--data ../shared/data] [--count 16] [--new 64]
    python benchmarks/draft/in_pass.py calibration --texts FOLDER
    python benchmarks/draft/in_pass.py speed [--data ../shared/data] [--count 16] [--new 64]
    python benchmarks/draft/in_pass.py layers --texts FOLDER [--count 16] [--steps 48]

FOLDER holds texts that the model wrote, as `decodery train ppd` leaves them in DIR/text/written. Tokens per pass at
many lengths are counted by replay: what is guessed after a token hangs on the text up to it alone, so that one pass
over a finished text tells what every tree would have been; `speed` decodes, to see that this is so.
Writes benchmarks/results/draft-in-pass-SECTION.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch

import decodery
from decodery.core.topk import topk
from decodery.engine.text import _segment
from decodery.llm.llm import LLM
from decodery.models.batch import Batch
from decodery.models.loaders.load import load
from decodery.speculative.drafters.hidden_transfer import HiddenTransfer
from decodery.speculative.drafters.in_pass import InPass
from decodery.speculative.drafters.ppd import PPD
from decodery.speculative.tree_building.stages import Stages, fastest_stages, find_stages
from decodery.step.draft_tree import DraftTree
from decodery.step.pass_cost import cost_curve
from decodery.training.ahead import EVERY, distance
from decodery.training.corpus import Corpus
from decodery.training.hidden_transfer import TransferRecipe, TransferTrainee

sys.path.insert(0, str(Path(__file__).parents[1]))
from decodery_benchmarks.results import write_result

RESULTS = Path(__file__).parents[1] / "results"
LENGTHS = (4, 6, 8, 12, 16, 24, 32, 48, 64)
DECODED = 8
"""The length that is decoded, too."""
MOST = 128
"""Tokens of a question."""
LAYERS = (6, 12, 18, 24)
DRAFTERS: dict[str, type[InPass]] = {"ppd": PPD, "hidden-transfer": HiddenTransfer}


def guesses(lm: LLM, drafter: InPass, prompt: list[int], text: list[int]) -> np.ndarray:
    """[n, ahead, ranks]: what is guessed after the last token of the prompt and after each of the text's but the
    last; the first guess is of the token after the next one.
    """
    engine = lm.engine()
    seq = engine.submit(lm.request(prompt, max_new_tokens=len(text) + 1, drafter=drafter))
    engine.step()
    while seq.cache.next_position < len(prompt):
        engine.step()
    asked, ranks = seq.states[seq.request.drafter].asked, seq.states[seq.request.drafter].guesses.shape[1]
    seq.cache.truncate(len(prompt) - 1)
    chain = DraftTree.chain(prompt[-1], text[:-1])
    tree = chain.with_mask_nodes(np.full(len(chain), len(asked.rates)), asked.inputs, asked.changes)
    logits = lm.model.forward(Batch([_segment(tree, seq)])).logits[len(chain) :]
    return topk(logits, ranks)[0].reshape(len(chain), len(asked.rates), ranks)


def replay(stages: Stages, guessed: np.ndarray, text: list[int]) -> int:
    """How many passes a text takes whose first token came with the prompt. guessed: as `guesses` gives it."""
    at, known, passes = 0, 0, 0
    while at < len(text) - 1:
        accepted, asks = 0, len(stages.trees)
        if known:
            tree, node = stages.trees[known - 1], 0
            deepest = min(int(tree.depths.max()), len(text) - 2 - at)
            for depth in range(1, deepest + 1):
                fits = (tree.parents == node) & (guessed[at, depth - 1, tree.ranks] == text[at + depth])
                if not fits.any():
                    break
                node, accepted = int(fits.argmax()), depth
            asks = int(tree.asks[node])
        at, known, passes = at + accepted + 1, asks, passes + 1
    return passes


def asked_of(lm: LLM, given: argparse.Namespace) -> list[str]:
    """Questions that are not long: reading the others would take most of the time."""
    lines = [json.loads(line) for line in (given.data / "spec_bench_dev.jsonl").read_text().splitlines()]
    short = [line["turns"][0] for line in lines if len(lm.encode(line["turns"][0])) <= MOST]
    return short[:: len(short) // given.count][: given.count]


def counted(lm: LLM, make: type[InPass], pairs: list[tuple[list[int], list[int]]]) -> dict[str, dict[str, float]]:
    """By length: tokens per pass as the rates have it, and of these prompts and texts."""
    drafter = make(length=LENGTHS[-1])
    rates = drafter.asked(lm.model).rates
    guessed = [guesses(lm, drafter, prompt, text) for prompt, text in pairs]
    rows = {}
    for length in LENGTHS:
        stages = find_stages(rates, length)
        assert stages is not None
        passes = sum(replay(stages, each, text) for each, (_, text) in zip(guessed, pairs, strict=True))
        tokens = sum(len(text) - 1 for _, text in pairs) / passes
        rows[str(length)] = {"tokens_per_pass": round(tokens, 4), "predicted": round(stages.tokens, 4)}
    return rows


def lengths(given: argparse.Namespace) -> dict[str, Any]:
    """Tokens per pass by length, predicted and measured, and what passes cost on this machine makes of them."""
    lm: LLM = decodery.load("smollm2")
    questions, curve = asked_of(lm, given), cost_curve(lm.model)
    pairs = [(lm.encode(each), decoded(lm, each, None, given.new)[0].tokens) for each in questions]
    result: dict[str, Any] = {
        "questions": len(questions),
        "of_at_most_tokens": MOST,
        "new_tokens": given.new,
        "passes": {"rows": curve.rows, "pass_milliseconds": [round(1e3 * each, 2) for each in curve.times]},
    }

    def seconds(rows: np.ndarray) -> np.ndarray:
        return np.array([curve.seconds(n) for n in rows])

    for name, make in DRAFTERS.items():
        rates, rows = make(length=LENGTHS[-1]).asked(lm.model).rates, counted(lm, make, pairs)
        for length, row in rows.items():
            stages = find_stages(rates, int(length))
            assert stages is not None
            row["speed_by_pass_cost"] = round(row["tokens_per_pass"] * curve.seconds(1) / stages.seconds(seconds), 4)
        chosen = fastest_stages(rates, seconds, LENGTHS[-1])
        result[name] = {
            "chosen_for_this_machine": 1 if chosen is None else max(tree.rows for tree in chosen.trees),
            "first_guesses": [round(float(each[0]), 4) for each in rates],
            "lengths": rows,
        }
    return result


def calibration(given: argparse.Namespace) -> dict[str, Any]:
    """The same on texts like those that rates were counted on: held out, at the temperatures they were drawn at."""
    lm: LLM = decodery.load("smollm2")
    corpus = Corpus(given.texts)
    _, held = corpus.split(EVERY)
    texts = [corpus[number] for number in held[: given.count]]
    pairs = [(text.tokens[: text.written].tolist(), text.tokens[text.written :].tolist()) for text in texts]
    found = {name: counted(lm, make, pairs) for name, make in DRAFTERS.items()}
    return {"texts": len(texts), "temperatures": corpus.facts["temperatures"], **found}


def speed(given: argparse.Namespace) -> dict[str, Any]:
    """Questions decoded: tokens per pass, and processor time against plain decoding's, after the prompt."""
    lm: LLM = decodery.load("smollm2")
    questions = asked_of(lm, given)
    outputs = [decoded(lm, each, None, given.new) for each in questions]
    result: dict[str, Any] = {"questions": len(questions), "of_at_most_tokens": MOST, "new_tokens": given.new}
    for name, make in DRAFTERS.items():
        drafted = [decoded(lm, each, make(length=DECODED), given.new) for each in questions]
        result[name] = {
            "length": DECODED,
            "tokens_per_pass": round(tokens_per_pass([output for output, _ in drafted]), 4),
            "speed": round(sum(time for _, time in outputs) / sum(time for _, time in drafted), 4),
            "texts_as_plain": sum(a.tokens == b.tokens for (a, _), (b, _) in zip(outputs, drafted, strict=True)),
        }
    return result


def decoded(lm: LLM, question: str, drafter: InPass | None, new: int) -> tuple[Any, float]:
    """An output, and the processor's seconds of its passes after the prompt."""
    engine = lm.engine()
    seq = engine.submit(lm.request(lm.encode(question), max_new_tokens=new, drafter=drafter))
    while not seq.trace.steps or seq.position == 0:
        engine.step()
    begin = process_time()
    engine.run([seq])
    return lm.output(seq), process_time() - begin


def tokens_per_pass(outputs: list[Any]) -> float:
    steps = [step for output in outputs for step in output.trace.decoding]
    return sum(step.emitted for step in steps) / len(steps)


def layers(given: argparse.Namespace) -> dict[str, Any]:
    """How often the most likely token at p_1, p_2, p_3 is right, by the layer after which all three are made.

    The maps of every layer learn from the same places of the same texts.
    """
    loaded, corpus = load("smollm2"), Corpus(given.texts)
    learned, held = corpus.split(EVERY)
    model = load("smollm2", dtype="float32").model
    trainees = {
        layer: TransferTrainee(loaded.model, model, TransferRecipe(layers=(layer,) * 3, places=16)) for layer in LAYERS
    }
    first, read = next(iter(trainees.values())), {}

    def shared(tokens: np.ndarray) -> Any:
        """What all read, once for each text."""
        if (key := tokens.tobytes()) not in read:
            read.clear()
            read[key] = TransferTrainee._read(first, tokens)
        return read[key]

    for trainee in trainees.values():
        trainee.taps, trainee._read = LAYERS, shared  # type: ignore[method-assign]
    optimizers = {
        layer: torch.optim.AdamW([trainee.maps], lr=1e-3, weight_decay=0.0) for layer, trainee in trainees.items()
    }
    for step in range(given.steps):
        text = corpus[learned[step * 7 % len(learned)]]
        for layer, trainee in trainees.items():
            if (training_batch := trainee.training_batch(text, 0.0, np.random.default_rng(step))) is not None:
                optimizers[layer].zero_grad()
                distance(trainee.logq([training_batch]), [training_batch]).backward()
                optimizers[layer].step()
        print(f"step {step + 1} of {given.steps}", file=sys.stderr, flush=True)
    others = [corpus[number] for number in held[: given.count]]
    found = [{layer: trainee.figures([text]) for layer, trainee in trainees.items()} for text in others]
    return {
        "steps": given.steps,
        "places_a_step": 16,
        "texts_held_out": len(others),
        "layers": {
            str(layer): {
                name: round(float(np.mean([each[layer][name] for each in found])), 4) for name in found[0][layer]
            }
            for layer in LAYERS
        },
    }


SECTIONS = {"lengths": lengths, "calibration": calibration, "speed": speed, "layers": layers}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[3] / "shared" / "data")
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--steps", type=int, default=48)
    given = parser.parse_args()
    found = {
        "command": " ".join(["python", "benchmarks/draft/in_pass.py", *sys.argv[1:]]),
        **globals()[given.section](given),
    }
    path = RESULTS / f"draft-in-pass-{given.section}.json"
    write_result(path, found, summary=["passes", "layers", *DRAFTERS])
    print(path, path.read_text(), flush=True)


if __name__ == "__main__":
    main()
