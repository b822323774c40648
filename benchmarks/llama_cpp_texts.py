"""Greedy texts of this package and of llama.cpp from the same GGUF file, token by token.

    python benchmarks/llama_cpp_texts.py FILE ... --peer PYTHON --data ../shared/data

Every model continues --prompts questions of Spec-Bench, of its categories in turn, by --tokens tokens. PYTHON is an
interpreter with `xllamacpp`. Both programs begin with the same token ids; beside that, the prompt that llama.cpp's own
template and tokenizer make is compared with ours. Where texts part, both programs' logits of the two tokens are
recorded: `ours` is by how much ours prefers its own token, `theirs` the same of llama.cpp. With --reference the same
file is also run in float32: `reference` is the gap there, above 0 for our token, and `noise` the root mean square error
of our logits' gaps between the two most likely tokens. A difference is a near-tie where the gap of float32, or without
it that of both programs, is below --near. Writes benchmarks/results/llama-cpp-texts.json, a model at a time. No time is
measured, so that the machine may do other things.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

import decodery
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.package_index import pull
from decodery_benchmarks.peers.llama_cpp_server import LlamaCppServer
from decodery_benchmarks.results import begun_result, write_result

RESULTS = Path(__file__).parent / "results" / "llama-cpp-texts.json"
MOST_PROBABLE = 20
SHOWN = ("same_prompt", "agree", "ours", "theirs", "reference")


class LlamaCpp(LlamaCppServer):
    """What is asked of llama.cpp about texts."""

    def prompt(self, text: str, template: bool) -> list[int]:
        """What its own tokenizer, and the file's template where there is one, make of a question."""
        if template:
            text = self.ask("/apply-template", messages=[{"role": "user", "content": text}])["prompt"]
        found: list[int] = self.ask("/tokenize", content=text, add_special=True, parse_special=True)["tokens"]
        return found

    def continued(self, tokens: list[int], count: int) -> tuple[list[int], list[dict[int, float]]]:
        """Greedy tokens, and before each of them the logarithms of the most likely tokens' probabilities."""
        found = self.complete(tokens, count, n_probs=MOST_PROBABLE)
        rows = found["completion_probabilities"]
        return [row["id"] for row in rows], [
            {each["id"]: each["logprob"] for each in row["top_logprobs"]} for row in rows
        ]


def questions(data: Path, count: int) -> list[str]:
    """Of all categories in turn."""
    by_category: dict[str, list[str]] = {}
    for line in (data / "spec_bench_dev.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        by_category.setdefault(row["category"], []).append(row["turns"][0])
    turns = zip_longest(*by_category.values())
    # Long ones are left out: a peer's context is bounded.
    return [each for turn in turns for each in turn if each is not None and len(each) < 2500][:count]


def logits(lm: decodery.LLM, tokens: list[int]) -> np.ndarray:
    """[n, vocab] after each of these tokens."""
    segment = Segment.chunk(np.asarray(tokens), lm.model.new_cache())
    return lm.model.forward(Batch([segment])).logits.double().numpy()


def compared(lm: decodery.LLM, peer: LlamaCpp, text: str, count: int) -> dict[str, Any]:
    """One text of both."""
    out = lm.generate(text, max_new_tokens=count, temperature=0.0, drafter="none")
    prompt, ours = list(out.prompt_tokens), list(out.tokens)
    theirs, likely = peer.continued(prompt, count)
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False))))
    same_prompt = peer.prompt(text, lm.chat_template is not None) == prompt
    found: dict[str, Any] = {"prompt": prompt, "same_prompt": same_prompt, "agree": same}
    # A program may leave out the token that ends a text.
    found["whole"] = same == min(len(ours), len(theirs)) and abs(len(ours) - len(theirs)) <= 1
    if not found["whole"]:
        mine, other, known = ours[same], theirs[same], likely[same]
        found["parted"] = prompt + ours[:same], mine, other
        found["ours"] = gap(lm, *found["parted"])
        found["theirs"] = round(known[other] - known[mine], 4) if mine in known else None
    return found


def gap(lm: decodery.LLM, tokens: list[int], one: int, other: int) -> float:
    """By how much one token's logit is above another's after some tokens."""
    row = logits(lm, tokens)[-1]
    return round(float(row[one] - row[other]), 4)


def noise(rows: np.ndarray, exact: np.ndarray) -> float:
    """Root mean square of what the gap of a row's two most likely tokens differs by from that in float32."""
    best = np.argsort(exact, axis=1)[:, -2:]
    gaps = [np.diff(np.take_along_axis(each, best, axis=1))[:, 0] for each in (rows, exact)]
    return round(float(np.sqrt(np.mean((gaps[0] - gaps[1]) ** 2))), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="GGUF files, or smollm2")
    parser.add_argument("--peer", required=True, help="an interpreter that has xllamacpp")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--near", type=float, default=0.5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--reference", action="store_true", help="run the file in float32, too")
    options = parser.parse_args()
    known = begun_result(RESULTS)
    known |= {"settings": {"prompts": options.prompts, "tokens": options.tokens, "near": options.near}}
    known["command"] = "python benchmarks/llama_cpp_texts.py FILE ... --peer PYTHON --data ../shared/data --reference"
    for model in options.models:
        path = pull(model) if model == "smollm2" else Path(model)
        known["rows"][path.stem] = of_model(path, options)
        print(path.name, known["rows"][path.stem], flush=True)
        write_result(RESULTS, known)


def of_model(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    lm, peer = decodery.load(str(path)), LlamaCpp(options.peer, path, options.threads)
    rows = []
    for number, text in enumerate(questions(options.data, options.prompts)):
        rows.append(compared(lm, peer, text, options.tokens))
        print(path.name, number, {name: rows[-1].get(name) for name in SHOWN}, flush=True)
    peer.close()
    parted = [row for row in rows if not row["whole"]]
    found: dict[str, Any] = {"texts": len(rows), "agree": len(rows) - len(parted)}
    found["same_prompts"] = sum(row["same_prompt"] for row in rows)
    if options.reference:
        prompt = rows[0]["prompt"]
        said = logits(lm, prompt)
        # One of the two is in memory at a time.
        del lm
        reference = decodery.load(str(path), dtype="float32")
        found["noise"] = noise(said, logits(reference, prompt))
        for row in parted:
            row["reference"] = gap(reference, *row["parted"])
    measured = ["reference"] if options.reference else ["ours", "theirs"]
    far = [row for row in parted if any(row[name] is None or abs(row[name]) > options.near for name in measured)]
    found |= {"near_ties": len(parted) - len(far), "unexplained": len(far)}
    found["differences"] = [{name: row.get(name) for name in SHOWN if name != "same_prompt"} for row in parted]
    return found


if __name__ == "__main__":
    sys.exit(main())
