"""llama.cpp through `llama-cpp-python`: the GGUF file itself, or the same weights in its Q8_0 format."""

from __future__ import annotations

import math
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

from .base import Order, Peer, Told, UnavailableError, gguf

_LOOKUP_TOKENS = 10
"""Tokens copied per lookup, as its own class has them."""
_DRAFT_TOKENS = 4
"""Tokens the second model drafts, as many as ours does."""


class LlamaCpp(Peer):
    """passes: of the generation at hand, when each began and how many rows it was fed."""

    llama: Any
    passes: list[tuple[float, int]]

    def generate(self, prompt: list[int], max_new_tokens: int, seed: int) -> Told:
        self.llama.reset()
        self.llama.set_seed(seed)
        self.passes = []
        tokens, times, begin = [], [], perf_counter()
        for token in self.llama.generate(
            prompt, temp=self.order.temperature, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0
        ):
            times.append(perf_counter())
            tokens.append(int(token))
            if token in self.order.eos_ids or len(tokens) == max_new_tokens:
                break
        # The first token is what the pass over the prompt said; drafts may have let that pass say more.
        begins = [at for at, _ in self.passes[1:]] + [times[-1]]
        counts = [sum(at <= until for at in times) for until in begins]
        emitted = [after - before for before, after in pairwise(counts) if after > before]
        rows = sum(fed for _, fed in self.passes[1:])
        return Told(tokens, emitted, times[-1] - times[0], times[0] - begin, rows=rows)


def open_peer(order: Order) -> Peer:
    try:
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
    except (ImportError, RuntimeError, OSError) as error:
        raise UnavailableError("llama-cpp-python is not installed") from error
    path = gguf(order.model)
    if order.peer == "llama.cpp-q8":
        path = requantize(path, "Q8_0")
    drafter = None
    if order.peer == "llama.cpp-lookup":
        drafter = LlamaPromptLookupDecoding(num_pred_tokens=_LOOKUP_TOKENS)
    elif order.peer == "llama.cpp-draft":
        drafter = _second(_opened(order.draft(), order, 2048))
    # Drafts are checked by the logits of all rows, which are kept for as many as the context holds.
    llama = _opened(path, order, 2048 if drafter else 8192, draft_model=drafter, logits_all=drafter is not None)
    peer = LlamaCpp(order, main_type(path))
    peer.llama, run = llama, llama.eval

    def counted(tokens: list[int]) -> None:
        peer.passes.append((perf_counter(), len(tokens)))
        run(tokens)

    llama.eval = counted
    return peer


def _opened(path: Path, order: Order, most_positions: int, **options: Any) -> Any:
    from llama_cpp import Llama

    room, threads = min(order.max_positions, most_positions), order.threads
    try:
        return Llama(str(path), n_ctx=room, n_threads=threads, n_threads_batch=threads, verbose=False, **options)
    except (ValueError, RuntimeError) as error:
        raise UnavailableError(f"llama.cpp cannot load {path.name}: {error}") from error


def _second(llama: Any) -> Any:
    """A model that drafts its most likely tokens; it keeps what it has read of the text."""
    import numpy as np
    from llama_cpp.llama_speculative import LlamaDraftModel

    class Second(LlamaDraftModel):  # type: ignore[misc, unused-ignore]
        def __call__(self, input_ids: Any, /, **kwargs: Any) -> Any:
            said = llama.generate(input_ids.tolist(), temp=0.0, top_k=1, repeat_penalty=1.0)
            return np.fromiter(islice(said, _DRAFT_TOKENS), dtype=np.intc)

    return Second()


def main_type(path: Path) -> str:
    """The type most of a file's weights are kept in, such as "Q4_1"."""
    from decodery.models.loaders.gguf_file import GGUFFile

    file, sizes = GGUFFile(path), Counter[str]()
    for name, info in file.tensors.items():
        sizes[file.kind_name(name)] += math.prod(info.shape)
    file.close()
    return sizes.most_common(1)[0][0]


def requantize(path: Path, kind: str) -> Path:
    """The same model in another GGML type, made once and kept in the cache folder; vectors stay as they are."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
    from gguf.quants import dequantize, quantize

    from decodery.models.loaders.cache_use import use
    from decodery.models.loaders.store import fingerprint, home, replacing

    target = home() / "peers" / f"{path.stem}-{fingerprint([path])}-{kind}.gguf"
    if target.exists():
        use(target)()
        return target
    reader, wanted = GGUFReader(path), GGMLQuantizationType[kind]
    with replacing(target) as temporary:
        writer = GGUFWriter(temporary, str(reader.fields["general.architecture"].contents()))
        for name, field in reader.fields.items():
            if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
                continue
            inner = field.types[1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
        for tensor in reader.tensors:
            data, dtype = tensor.data, tensor.tensor_type
            if len(tensor.shape) > 1:
                data, dtype = quantize(dequantize(tensor.data, tensor.tensor_type), wanted), wanted
            writer.add_tensor(tensor.name, data, raw_dtype=dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return target
