"""Every causal class of the installed `transformers` on small random weights: how it runs, and how near it comes.

    OMP_NUM_THREADS=1 PYTHONPATH=tests/support python benchmarks/model_matrix.py

Each family is built from the smallest configuration that has layers of every kind, saved as a folder and loaded from
there. Compared with plain calls of `transformers` in float32: a prompt in chunks, single tokens, the nodes of a tree
where the model takes them, what follows an accepted path, a fork, and a cache that was cut. The greedy text of 12
tokens must be that of plain calls, without a drafter, with drafts that are chains, and with trees. Models with images
read texts. Writes benchmarks/results/model_matrix.json, or with --newest model_matrix-newest.json: of the newest
`transformers` that is allowed, where the other file is of the oldest one. FAMILIES on the command line: these alone,
whose rows take the place of those that the file has.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from decodery.core.errors import DecoderyError
from decodery.models.batch import Batch, Segment
from decodery.models.config import ModelConfig
from decodery.models.loaders.load import load
from decodery.models.protocol import LanguageModel
from decodery.models.transformers.adapter import TransformersModel
from decodery.testing import decode
from decodery_benchmarks.results import read_result, write_result
from small_configs import FAMILIES, WITH_IMAGES, build
from tiny_models import TREE_PARENTS, random_ids, reference, save, tree_mask

ROOT = Path(__file__).parents[1]
PROMPT = [5, 9, 17, 5, 9, 17, 40, 41, 5, 9, 17, 40]
NEW = 12
_PIECES = (9, 1, 1, 7, 1, 4)
_KEPT = [0, 1, 3, 6]


def outcome(family: str, folder: Path) -> dict[str, Any]:
    """How a family runs, and how far its logits are from those of plain calls.

    Args:
        family: Its `model_type`.
        folder: An empty one, where the model is saved.

    Returns:
        "class", "runs" ("native", "adapter" or "refused"), "drafts" ("trees", "chains" or "none"), "keeps",
        "difference", "greedy" (whether every greedy text is that of plain calls) and "reason"; only "reason" where no
        small configuration makes a model.
    """
    try:
        theirs = build(family)
        save(theirs, folder)
    except Exception as error:  # what a class asks of its configuration is its own affair
        return {"runs": "not built", "reason": _line(error)}
    row: dict[str, Any] = {"class": type(theirs).__name__}
    try:
        loaded = load(folder, dtype="float32", device="cpu")
        # As the folder says, whose embeddings may be tied.
        theirs = type(theirs).from_pretrained(folder, dtype=torch.float32)
    except DecoderyError as error:
        return row | {"runs": "refused", "reason": _line(error).replace(str(folder), "the folder")}
    model = loaded.model
    can, known = model.capabilities, loaded.tokenizer.vocab_size
    row |= {"runs": "adapter" if isinstance(model, TransformersModel) else "native"}
    row |= {"drafts": "trees" if can.trees else "chains" if can.chains else "none"}
    row |= {"keeps": model.keeps if isinstance(model, TransformersModel) else kept(model.config)}
    return row | {"difference": _difference(model, theirs), "greedy": _greedy(model, theirs, known)}


def kept(config: ModelConfig) -> str:
    """What a model that runs natively keeps of a text; the last rows of a convolution are a state."""
    layers = range(config.num_layers)
    states = any(config.recurrent(layer) or config.convolves(layer) for layer in layers)
    if not states:
        return "keys and values"
    return "keys, values and states" if any(map(config.attends, layers)) else "states"


def _difference(model: LanguageModel, theirs: Any) -> float:
    """The greatest difference of logits: of a text in pieces, a tree, a kept path, a fork and a cut text."""
    ids, cache = random_ids(sum(_PIECES)), model.new_cache()
    whole, far = reference(theirs, ids), [0.0]

    def compare(got: torch.Tensor, wanted: torch.Tensor) -> None:
        # Some models rule tokens out with the smallest number that there is.
        said = wanted > -1e4
        far.append(float(((got - wanted) * said).abs().max()))

    def read(tokens: Any, into: Any) -> torch.Tensor:
        logits = model.forward(Batch([Segment.chunk(tokens, into)])).logits
        into.keep(range(len(tokens)))
        return logits

    for size in _PIECES:
        start = cache.next_position
        compare(read(ids[start : start + size], cache), whole[start : start + size])
    fork = cache.fork()
    nodes, mask = random_ids(len(TREE_PARENTS), seed=2), tree_mask(TREE_PARENTS)
    if model.capabilities.trees:
        segment = Segment(len(ids) + mask.sum(axis=1) - 1, tokens=nodes, mask=mask, cache=cache)
        logits = model.forward(Batch([segment])).logits
        for node in range(len(nodes)):
            compare(logits[node], reference(theirs, np.concatenate([ids, nodes[mask[node]]]))[-1])
        kept = _KEPT
    else:
        logits = model.forward(Batch([Segment.chunk(nodes, cache)])).logits
        compare(logits, reference(theirs, np.concatenate([ids, nodes]))[len(ids) :])
        kept = [0, 1, 2]
    cache.keep(kept)
    path = np.concatenate([ids, nodes[kept], [17, 3]])
    compare(read(path[-2:], cache), reference(theirs, path)[-2:])
    other = np.concatenate([ids, [7, 8, 9]])
    compare(read(other[-3:], fork), reference(theirs, other)[-3:])
    cache.truncate(15)
    compare(read(ids[15:], cache), whole[15:])
    return max(far)


def _greedy(model: LanguageModel, theirs: Any, known: int) -> bool:
    """Whether the greedy text is that of plain calls, with every drafter and every cut of the prompt.

    known: tokens of the tokenizer; no others are written.
    """
    (plain,) = decode(model, [PROMPT], max_new_tokens=NEW)
    anew = reference(theirs, np.array(plain.tokens[:-1]))[len(PROMPT) - 1 :]
    texts = [decode(model, [PROMPT], drafter=drafter, max_new_tokens=NEW)[0] for drafter in ("prompt-lookup", "auto")]
    texts += decode(model, [PROMPT, PROMPT[:7]], drafter="token-recycling", max_new_tokens=NEW)[:1]
    texts += decode(model, [PROMPT], prefill_chunk=5, max_new_tokens=NEW)
    return anew[:, :known].argmax(dim=-1).tolist() == list(plain.generated) and all(
        text.tokens == plain.tokens for text in texts
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    named, rows = [each for each in sys.argv[1:] if each != "--newest"], {}
    newest = " --newest" * ("--newest" in sys.argv)
    for family in named or (*FAMILIES, *WITH_IMAGES):
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as home:
            os.environ["DECODERY_HOME"] = str(Path(home) / "home")
            rows[family] = outcome(family, Path(home) / "model")
        print(family, rows[family], f"{time.perf_counter() - begin:.1f} s", flush=True)
    path = ROOT / "benchmarks" / "results" / f"model_matrix{'-newest' * bool(newest)}.json"
    if named and path.is_file():
        before = read_result(path)
        if before["transformers"] != transformers.__version__:
            raise SystemExit(f"{path} is of transformers {before['transformers']}: run all families")
        rows = before["rows"] | rows
    command = f"OMP_NUM_THREADS=1 PYTHONPATH=tests/support python benchmarks/model_matrix.py{newest}"
    write_result(path, {"command": command, "transformers": transformers.__version__, "rows": rows})


if __name__ == "__main__":
    main()
