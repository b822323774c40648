"""One of several processes that share a model: `python split_program.py FOLDER RESULT` within torchrun's environment.

FOLDER has models, one per folder. RESULT.RANK becomes what this process has written, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from decodery.core.errors import DecoderyError
from decodery.models.batch import Batch, Segment
from decodery.models.loaders import load as load_module
from decodery.models.loaders.load import load
from decodery.models.torch import tensor_parallel
from decodery.models.torch.packed_linear import packed_weights
from decodery.models.torch.tensor_parallel import SplitTransformer, Summed, processes
from decodery.models.torch.weights import Weights
from decodery.sampling import Sampler
from decodery.testing import decode, tiny_transformer, to_int8

PROMPTS = [[1, 2, 3], [5] * 6 + [7, 8, 9] * 4, list(range(2, 40))]
SAMPLERS = {"greedy": Sampler.from_settings(temperature=0.0), "sampled": Sampler.from_settings(top_p=0.95)}
DRAFTERS = (None, "prompt-lookup")
SIZE = 2


def texts(model: Any) -> dict[str, list[list[int]]]:
    """What a model writes, with every sampler and drafter, in batches."""
    return {
        f"{sampler}, {drafter}": [
            text.generated for text in decode(model, PROMPTS, drafter=drafter, sampler=SAMPLERS[sampler], seeds=(0, 1))
        ]
        for sampler in SAMPLERS
        for drafter in DRAFTERS
    }


def packed(model: Any) -> Weights:
    """Quantized weights as devices keep them."""
    return packed_weights(model.weights, torch.float32, torch.device("cpu"))


def logits(model: Any) -> list[list[float]]:
    """Of the last rows of a prompt."""
    with torch.no_grad():
        found = model.forward(Batch([Segment.chunk(PROMPTS[2], model.new_cache())])).logits
    rows: list[list[float]] = found[-2:].tolist()
    return rows


def refused(body: Any) -> str:
    """The sentence that a call ends with."""
    try:
        body()
    except DecoderyError as error:
        return str(error)
    return ""


def fallback(folder: Path) -> dict[str, Any]:
    """What becomes of a model that is to stay packed, as GPUs choose for such files, and whose groups a cut parts."""
    real = load_module.choose_own
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        load_module.choose_own = lambda *given, packed=False: "int4" if packed else real(*given)
        loaded = load(folder, tensor_parallel_size=SIZE)
    load_module.choose_own = real
    says = [str(each.message) for each in warned if "not packed" in str(each.message)]
    return {"dtype": loaded.dtype, "says": says, "logits": logits(loaded.model)}


def main() -> None:
    torch.set_num_threads(1)
    folder, result = Path(sys.argv[1]), sys.argv[2]
    mesh, _ = processes(SIZE, torch.device("cpu"))
    rank, base = mesh.get_local_rank(), tiny_transformer()
    tiny = SplitTransformer(base.config, base.weights, mesh)
    said: dict[str, Any] = {"tiny": texts(tiny), "logits": logits(tiny)}
    said["kv_heads"], said["cache"] = tiny.config.num_kv_heads, tiny.new_cache().slot_bytes
    for each in sorted(folder.iterdir()):
        loaded = load(each, dtype="float32", tensor_parallel_size=SIZE)
        said[each.name] = logits(loaded.model)
        loaded = load(each, dtype="int8", tensor_parallel_size=SIZE)
        said[f"{each.name}, int8"] = logits(loaded.model)
    loaded = load(folder / "whole groups", dtype="int4", tensor_parallel_size=SIZE)
    said["whole groups, int4"] = logits(loaded.model)
    said["whole groups, int4, texts"] = texts(loaded.model)
    said["packed"] = texts(SplitTransformer(base.config, packed(to_int8(base)), mesh))
    said["int4"] = refused(lambda: load(folder / "llama", dtype="int4", tensor_parallel_size=SIZE))
    said["fallback"] = fallback(folder / "llama")
    # Wrong in three ways: no sums, the parts of fused matrices cut as one, and each process a request of its own.
    with_sums = Summed.__call__
    Summed.__call__ = lambda self, rows: self.inner(rows)  # type: ignore[method-assign]
    said["without sums"] = logits(tiny)
    Summed.__call__ = with_sums  # type: ignore[method-assign]
    parts = tensor_parallel.parts_of
    tensor_parallel.parts_of = lambda config, index: {}
    said["cut as one"] = logits(SplitTransformer(base.config, base.weights, mesh))
    tensor_parallel.parts_of = parts
    said["other passes"] = refused(lambda: decode(tiny, [PROMPTS[rank]]))
    said["auto"] = refused(lambda: decode(tiny, PROMPTS[:1], drafter="auto"))
    Path(f"{result}.{os.environ['RANK']}").write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
