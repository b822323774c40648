"""Examples for the head of Judge Decoding, from pairs of answers or from what the target makes of its alternatives.

Examples are hidden states of the target at tokens it did not choose, with a label: does the text still come out right?
They lie in shards that are written whole or not at all, so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decodery.core.errors import PromptError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.load import LoadedModel
from decodery.models.loaders.store import Progress, silent
from decodery.models.protocol import LanguageModel
from decodery.models.tokenizers.chat_prompt import chat_tokens
from decodery.speculative.acceptance.judge import normalized
from decodery.step.draft_tree import DraftTree

from .kept_files import keep, kept
from .kind import COUNT, Bounded, bounded
from .lines import named_texts, read_objects
from .loop import content

HELD_OUT = 5
"""Every how manieth question is kept for validation."""
_SHARD = 8
"""Questions per shard."""
_ROWS = 64
"""Rows of the vocabulary's size that are normalised at a time."""
PLAIN = ("length", "log-probability", "mean log-probability")
"""What an example says without its state: tokens of the answer, the log-probability of the last one and of all."""
_ARRAYS = ("states", "valid", "question", "plain")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class JudgedQuestion:
    """Something to answer.

    Attributes:
        right, wrong: Two answers that part ways where the wrong one goes wrong; None: mined.
    """

    prompt: str
    right: str | None = None
    wrong: str | None = None


@dataclass(frozen=True)
class Examples:
    """Hidden states with their labels."""

    states: np.ndarray  # [m, hidden] float32 of root mean square 1
    valid: np.ndarray  # [m] bool
    question: np.ndarray  # [m], which one each is from
    plain: np.ndarray  # [m, 3] float32, see `PLAIN`


Labelled = tuple[np.ndarray, np.ndarray, np.ndarray]
"""The states, `plain` and `valid` of some `Examples`."""


@dataclass(frozen=True)
class Mining(Bounded):
    """How a question without answers is mined.

    The target answers greedily with at most `max_new_tokens`; at the `places` of that answer where it was least sure,
    each of its `alternatives` next best tokens is put in and the target finishes again. An alternative is valid where
    the last number of the text stays what it was. Source: AutoJudge (2025), whose alternatives are a draft model's.
    """

    max_new_tokens: int = bounded(96, COUNT, "Maximum tokens of an answer of the model.")
    places: int = bounded(12, COUNT, "Positions of an answer where alternatives are tried.")
    alternatives: int = bounded(2, COUNT, "Alternatives at a position.")


def read_questions(path: Path) -> list[JudgedQuestion]:
    """The questions of a JSON Lines file: objects with "prompt", and with "right" and "wrong" or neither."""

    def read(entry: dict[str, Any]) -> JudgedQuestion | None:
        answered = any(entry.get(name) is not None for name in ("right", "wrong"))
        found = named_texts(entry, "prompt", *(("right", "wrong") if answered else ()))
        return JudgedQuestion(*found) if found else None

    questions = read_objects(
        path, 'an object of texts with "prompt", and with both "right" and "wrong" or neither', read
    )
    if len(questions) < HELD_OUT:
        raise PromptError(f"{path} holds {len(questions)} questions: give at least {HELD_OUT}, one a line")
    return questions


def last_number(text: str) -> str | None:
    """The last number in a text, which of an answer with a computation is its result."""
    found = _NUMBER.findall(text)
    return found[-1].replace(",", "") if found else None


def examples(
    target: LoadedModel,
    questions: Sequence[JudgedQuestion],
    out: Path,
    *,
    mining: Mining | None = None,
    progress: Progress = silent,
) -> Examples:
    """The examples of all questions, made with `target` and kept in `out`.

    Those that are there already are read.
    """
    mining = mining or Mining()
    made = f"{target.name} {target.dtype} {mining} {PLAIN} {content([vars(each) for each in questions])}"
    parts: list[dict[str, np.ndarray]] = []
    for first in range(0, len(questions), _SHARD):
        path = out / f"examples-{first // _SHARD:05d}.safetensors"
        if not path.is_file():
            found = [_of_question(target, each, mining) for each in questions[first : first + _SHARD]]
            states, plain, labels = zip(*found, strict=True)
            arrays = {
                "states": np.concatenate(states).astype(np.float16),
                "valid": np.concatenate(labels).astype(np.uint8),
                "question": np.repeat(np.arange(first, first + len(found)), [len(each) for each in labels]),
                "plain": np.concatenate(plain),
            }
            keep(path, {name: torch.from_numpy(each) for name, each in arrays.items()}, made)
        parts.append(_read(path, made))
        progress("examples", min(first + _SHARD, len(questions)), len(questions))
    joined = {name: np.concatenate([part[name] for part in parts]) for name in _ARRAYS}
    return Examples(
        joined["states"].astype(np.float32), joined["valid"].astype(bool), joined["question"], joined["plain"]
    )


def _read(path: Path, made: str) -> dict[str, np.ndarray]:
    with kept(path, made) as (tensors, _):
        found = {name: tensors[name].numpy() for name in _ARRAYS}
        if found["states"].ndim != 2 or {len(each) for each in found.values()} != {len(found["states"])}:
            raise ValueError("sizes differ")
    return found


def _of_question(target: LoadedModel, question: JudgedQuestion, mining: Mining) -> Labelled:
    encode = target.tokenizer.encode
    if target.chat_template is None:
        prompt = encode(question.prompt)
    else:
        prompt = chat_tokens(target.chat_template, target.tokenizer, [{"role": "user", "content": question.prompt}])
    if question.right is not None and question.wrong is not None:
        answers = encode(question.right, special=False), encode(question.wrong, special=False)
        return from_answers(target.model, prompt, *answers)

    def result(tokens: Sequence[int]) -> str | None:
        return last_number(target.tokenizer.decode(list(tokens)))

    return mined(target.model, prompt, result, mining, target.tokenizer.eos_ids)


def from_answers(model: LanguageModel, prompt: list[int], right: list[int], wrong: list[int]) -> Labelled:
    """States, `PLAIN` and labels of two answers: right tokens are valid, the first different one is not.

    What follows a mistake is not used.
    """
    shared = next((at for at, (a, b) in enumerate(zip(right, wrong, strict=False)) if a != b), len(wrong))
    tree = DraftTree.from_paths(prompt[-1], [right, wrong[: shared + 1]])
    valid = np.ones(len(tree) - 1, dtype=bool)
    if shared < len(wrong) and len(tree) - 1 > len(right):
        valid[-1] = False
    return *read_nodes(model, prompt, tree, np.arange(1, len(tree))), valid


def mined(
    model: LanguageModel,
    prompt: list[int],
    result: Callable[[Sequence[int]], str | None],
    mining: Mining,
    eos_ids: Sequence[int] = (),
) -> Labelled:
    """States, what they say plainly and labels of the target's own alternatives, see `Mining`.

    None where its answer has no result.
    """
    engine = Engine(model)
    answer = engine.submit(Request(prompt, max_new_tokens=mining.max_new_tokens, eos_ids=eos_ids))
    engine.run([answer])
    meant = result(answer.generated)
    empty = np.zeros((0, model.config.hidden_size), dtype=np.float32), np.zeros((0, len(PLAIN)), dtype=np.float32)
    nothing = *empty, np.zeros(0, dtype=bool)
    if meant is None:
        return nothing
    chosen = _alternatives(model, prompt, answer.generated, mining)
    finished = [
        engine.submit(
            Request(
                [*answer.tokens[: len(prompt) + place], token],
                max_new_tokens=mining.max_new_tokens,
                eos_ids=eos_ids,
                reuse=answer,
            )
        )
        for place, token in chosen
        if token not in eos_ids
    ]
    if not finished:
        return nothing
    engine.run(finished)
    valid = np.array([result(seq.tokens[len(prompt) :]) == meant for seq in finished])
    paths = [answer.generated, *(seq.tokens[len(prompt) : seq.request.prompt_length] for seq in finished)]
    tree = DraftTree.from_paths(prompt[-1], paths)
    nodes = []
    for path in paths[1:]:
        node = 0
        for token in path:
            node = tree.child(node, token) or 0
        nodes.append(node)
    return *read_nodes(model, prompt, tree, np.array(nodes)), valid


def _alternatives(
    model: LanguageModel, prompt: list[int], answer: list[int], mining: Mining
) -> Iterator[tuple[int, int]]:
    """Places of the answer and tokens that could have stood there."""
    text = [*prompt, *answer]
    rows = list(range(len(prompt) - 1, len(text) - 1))
    logits = model.forward(Batch([Segment.chunk(text[:-1], model.new_cache(), logit_rows=rows)])).logits
    best = logits.log_softmax(dim=-1).topk(mining.alternatives + 1)
    unsure = (best.values[:, 0] - best.values[:, 1]).argsort(stable=True)[: mining.places]
    for place in unsure.tolist():
        others = [token for token in best.indices[place].tolist() if token != answer[place]]
        yield from ((place, token) for token in others[: mining.alternatives])


@torch.no_grad()
def read_nodes(
    model: LanguageModel, prompt: list[int], tree: DraftTree, nodes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """[n, hidden] last states of a tree's nodes, as the head sees them, and [n, 3] `PLAIN` of them."""
    layer, cache = model.config.num_layers, model.new_cache()
    if len(prompt) > 1:
        model.forward(Batch([Segment.chunk(prompt[:-1], cache, logit_rows=[])]))
        cache.keep(range(len(prompt) - 1))
    segment = Segment(
        cache.next_position + tree.depths,
        tree.tokens,
        mask=tree.ancestor_mask(),
        cache=cache,
        logit_rows=list(range(len(tree))),
    )
    scores = model.forward(Batch([segment]), taps=(layer,))
    own, whole = np.zeros(len(tree)), np.zeros(len(tree))
    for first in range(0, len(tree), _ROWS):
        likely = scores.logits[first : first + _ROWS].double().log_softmax(dim=-1)
        below = np.flatnonzero((tree.parents >= first) & (tree.parents < first + _ROWS))
        places = (torch.from_numpy(each[below].astype(np.int64)) for each in (tree.parents - first, tree.tokens))
        own[below] = likely[tuple(places)].cpu().numpy()
    for node in range(1, len(tree)):
        whole[node] = whole[tree.parents[node]] + own[node]
    depths = tree.depths[nodes]
    plain = np.stack([depths, own[nodes], whole[nodes] / depths], axis=1).astype(np.float32)
    return normalized(scores.hidden_of(0, layer)[torch.from_numpy(nodes)]).cpu().numpy(), plain
