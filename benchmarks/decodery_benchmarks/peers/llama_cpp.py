"""llama.cpp through `xllamacpp`, of which there are wheels: the GGUF file itself, or the same weights in Q8_0.

llama.cpp-lookup drafts by llama.cpp's n-grams of the text (its "ngram-simple"), llama.cpp-draft with a second model.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any
from weakref import finalize

from .base import Order, Peer, Told, UnavailableError, gguf
from .llama_cpp_server import LlamaCppServer

_KINDS = {"llama.cpp-lookup": "NGRAM_SIMPLE", "llama.cpp-draft": "DRAFT_SIMPLE"}
_ROOM = 8192
"""Tokens of context, where the model has as many."""


class LlamaCpp(Peer):
    """server: the program, in a process of its own."""

    server: LlamaCppServer

    def generate(self, prompt: list[int], max_new_tokens: int, seed: int) -> Told:
        sampled = {"temperature": self.order.temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": seed % 2**32}
        begin = perf_counter()
        found = Written.of(self.server.stream(prompt, max_new_tokens, **sampled))
        tokens, times = found.tokens, found.times
        if len(tokens) < len(times):
            tokens = self.server.complete(prompt, max_new_tokens, return_tokens=True, **sampled)["tokens"]
        # What the first event holds came before the time that counts.
        emitted = per_pass(found.accepted[times.count(times[0]) - 1 :])
        ends = [place + 1 for place, token in enumerate(tokens) if token in self.order.eos_ids]
        kept = tokens[: ends[0] if ends else None]
        return Told(kept, emitted, times[-1] - times[0], times[0] - begin, rows=len(emitted) + found.drafted)


@dataclass
class Written:
    """A text as its events count it. Tokens of a character that is not complete come in no event of their own.

    Attributes:
        tokens: Those that came.
        times: For every token, when it was counted.
        accepted: For every token, how many drafted tokens had been accepted then.
        drafted: How many tokens were drafted.
    """

    tokens: list[int]
    times: list[float]
    accepted: list[int]
    drafted: int = 0

    @classmethod
    def of(cls, events: Iterable[dict[str, Any]]) -> Written:
        """Read the events as they come."""
        found = cls([], [], [])
        for event in events:
            timings = event["timings"]
            new = timings["predicted_n"] - len(found.times)
            found.tokens += event["tokens"]
            found.times += [perf_counter()] * new
            found.accepted += [timings.get("draft_n_accepted", 0)] * new
            found.drafted = timings.get("draft_n", 0)
        return found


def per_pass(accepted: list[int]) -> list[int]:
    """Tokens of every pass after the first token.

    Args:
        accepted: For every token of a text, how many drafted tokens had been accepted when its pass ended.
    """
    found, place = list[int](), 1
    while place < len(accepted):
        found.append(min(1 + accepted[place] - accepted[place - 1], len(accepted) - place))
        place += found[-1]
    return found


def open_peer(order: Order) -> Peer:
    try:
        import xllamacpp  # noqa: F401
    except (ImportError, RuntimeError, OSError) as error:
        raise UnavailableError("xllamacpp is not installed") from error
    path = gguf(order.model)
    if order.peer == "llama.cpp-q8":
        path = requantize(path, "Q8_0")
    draft = order.draft() if order.peer == "llama.cpp-draft" else None
    room, kind = min(order.max_positions, _ROOM), _KINDS.get(order.peer, "")
    try:
        server = LlamaCppServer(sys.executable, path, order.threads, room=room, kind=kind, draft=draft)
    except RuntimeError as error:
        raise UnavailableError(str(error)) from error
    peer = LlamaCpp(order, main_type(path))
    peer.server = server
    finalize(peer, server.close)
    return peer


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
