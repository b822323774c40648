"""Files that lie: mutated model files, trained artefacts, datastores and templates, and what reading them comes to.

    python tests/fuzz_files.py --cases 20000 --seed 1

prints, for every kind of file, how many cases were read, were refused in one sentence, ended in a stack trace, ended
the process or took too long. The cases run in a process of their own, which is begun anew behind a case that ends it. A
case is decided by the seed, its number and the kinds alone: `--first N --cases 1` repeats it.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SECONDS = 60
"""What no case may take; the slowest are thousands of times faster."""
_MOST_BYTES = 16 << 30
OUTCOMES = ("read", "sentence", "trace", "crash", "hang")

Make = Callable[[random.Random, Path, Path], None]
"""make(random, base, folder): puts the mutated file of one case into the empty `folder`; `base` holds sound files."""
Use = Callable[[Path, Path], None]
"""use(folder, base): reads the file and does with it what is usually done next."""
KINDS: dict[str, tuple[Make, Use]] = {}


def kind(name: str, make: Make) -> Callable[[Use], Use]:
    def add(use: Use) -> Use:
        KINDS[name] = make, use
        return use

    return add


# --- mutations -------------------------------------------------------------------------------------------------------

_DEEP = "deep"
_ODD: list[Any] = [
    None, True, False, "", "x", "x" * 5000, "\ud800", "1e400", -1, 0, 1, 2, 3, 7, 255, 2**15, 2**31 - 1, 2**31, 2**32,
    2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, 10**400, 0.5, -0.5, 1e-320, 1e308, -1e308, float("inf"), float("-inf"),
    float("nan"), [], {}, [[]], [0] * 3, {"a": 1}, [None], {"deep": _DEEP}, _DEEP,
]  # fmt: skip
_DTYPES = [
    "BOOL",
    "U8",
    "I8",
    "I16",
    "U16",
    "F16",
    "BF16",
    "I32",
    "U32",
    "F32",
    "I64",
    "U64",
    "F64",
    "F8_E4M3",
    "F8_E5M2",
]
_DTYPES += ["F8_E8M0", "F4", "C64", "f32", ""]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to everything inside `value`, long lists and vocabularies by their first few."""
    if at:
        yield at
    inner = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    for key, item in inner[:40] if len(at) > 1 else inner:
        yield from places(item, (*at, key))


def mutated(random: random.Random, value: Any) -> Any:
    """A copy of plain data with one to three places changed."""
    value = json.loads(json.dumps(value))
    for _ in range(random.choice((1, 1, 2, 3))):
        ways = list(places(value))
        if not ways:
            return random.choice(_ODD)
        *way, last = random.choice(ways)
        holder = value
        for key in way:
            holder = holder[key]
        chance, old = random.random(), holder[last]
        if chance < 0.1:
            del holder[last]
        elif chance < 0.5 and isinstance(old, int | float) and not isinstance(old, bool):
            holder[last] = random.choice([old - 1, old + 1, -old, old * 2, old // 2, *_ODD[8:33]])
        elif chance < 0.3 and isinstance(old, list):
            holder[last] = random.choice([old * 2, old[:-1], old * 50])
        else:
            holder[last] = json.loads(json.dumps(random.choice(_ODD)))
    return value


def as_json(random: random.Random, value: Any) -> bytes:
    """JSON, in which what was to be deep is, and which now and then is damaged as a text."""
    text = json.dumps(value).replace(json.dumps(_DEEP), "[" * 100_000 + "]" * 100_000)
    return damaged(random, text.encode()) if random.random() < 0.1 else text.encode()


def damaged(random: random.Random, content: bytes) -> bytes:
    """A few bytes changed, a part left out or doubled, or the end cut off."""
    data = bytearray(content)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(data) or 1)
        match random.randrange(4):
            case 0 if data:
                data[at] = random.randrange(256)
            case 1:
                del data[at : at + random.randint(1, 64)]
            case 2:
                data[at:at] = data[at : at + random.randint(1, 64)]
            case _:
                del data[len(data) - random.randrange(min(len(data), 200) + 1) :]
    return bytes(data)


def mutated_json(name: str, source: str) -> Make:
    def make(random: random.Random, base: Path, folder: Path) -> None:
        shutil.copytree(base / source, folder, dirs_exist_ok=True)
        path = folder / name
        path.write_bytes(as_json(random, mutated(random, json.loads(path.read_bytes()))))

    return make


def mutated_tensors(name: str) -> Make:
    """A safetensors file with a changed header, changed JSON inside its metadata, or changed bytes."""

    def make(random: random.Random, base: Path, folder: Path) -> None:
        content = (base / name).read_bytes()
        (size,) = struct.unpack("<Q", content[:8])
        header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
        about = header.get("__metadata__", {})
        chance = random.random()
        if chance < 0.15:
            (folder / name).write_bytes(damaged(random, content))
            return
        tensors = [key for key in header if key != "__metadata__"]
        if chance < 0.35 and about:
            key = random.choice(list(about))
            try:
                inside = json.loads(about[key])
            except ValueError:
                inside = about[key]
            about[key] = as_json(random, mutated(random, inside)).decode(errors="replace")
        elif chance < 0.5:
            header[random.choice(tensors)]["dtype"] = random.choice(_DTYPES)
        elif chance < 0.6:
            # Another type of the same width, so that sizes stay right.
            entry = header[random.choice(tensors)]
            same = {"F32": ["I32", "U32"], "F16": ["BF16", "I16", "U16"], "BF16": ["F16", "I16", "U16"]}
            entry["dtype"] = random.choice(same.get(entry["dtype"], ["I32", "F32", "U16", "F8_E4M3"]))
        elif chance < 0.8:
            # Infinities, NaN, largest integers.
            begin, end = header[random.choice(tensors)]["data_offsets"]
            pattern = random.choice([b"\xff", b"\x7f", b"\x00\x00\x80\x7f", b"\x80"])
            width = random.choice([4, end - begin])
            at = begin + random.randrange(max(1, (end - begin) // 4)) // 4 * 4
            filled = (pattern * width)[: min(width, end - at)]
            data = data[:at] + filled + data[at + len(filled) :]
        else:
            header = mutated(random, header)
        text = as_json(random, header)
        (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + data)

    return make


# --- what is read ----------------------------------------------------------------------------------------------------


def run(folder: Path, dtype: str = "float32") -> None:
    """Load what is in a folder, encode and render with it, and run one pass."""
    import torch

    from decodery.model.batch import Batch, Segment
    from decodery.model.load import load

    loaded = load(folder, dtype=dtype, device="cpu")
    ids = loaded.tokenizer.encode("ab c")
    loaded.tokenizer.decode(ids)
    if loaded.chat is not None:
        loaded.chat.render([{"role": "user", "content": "Hi"}])
    with torch.inference_mode():
        loaded.model.forward(Batch([Segment.chunk([1, 2, 3], loaded.model.new_cache())]))


@kind("config", mutated_json("config.json", "folder"))
def use_config(folder: Path, base: Path) -> None:
    from decodery.model.families import FAMILIES

    run(folder) if _family(folder) in FAMILIES else _read_config(folder)


def _family(folder: Path) -> Any:
    """The family that a folder claims: what is of none of ours goes to transformers, which is not tried here."""
    try:
        raw = json.loads((folder / "config.json").read_bytes())
    except (ValueError, RecursionError):
        return None
    return raw.get("model_type") if isinstance(raw, dict) else None


def _read_config(folder: Path) -> None:
    from decodery.model.families import read_config
    from decodery.model.fields import read_json

    read_config(read_json(folder / "config.json"))


for _name in ("tokenizer_config.json", "generation_config.json", "model.safetensors.index.json"):
    KINDS[_name] = mutated_json(_name, "folder"), lambda folder, base: run(folder)

KINDS["tokenizer.json"] = mutated_json("tokenizer.json", "folder"), lambda folder, base: run(folder)


def make_pieces(random: random.Random, base: Path, folder: Path) -> None:
    name = random.choice(("unigram", "wordpiece", "bpe"))
    value = mutated(random, json.loads((base / f"{name}.json").read_bytes()))
    (folder / "tokenizer.json").write_bytes(as_json(random, value))


@kind("other tokenizers", make_pieces)
def use_pieces(folder: Path, base: Path) -> None:
    from decodery.model.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_file(folder / "tokenizer.json")
    for text in ("ab foo a <s> 12 é", "", " b" * 50):
        tokenizer.decode(tokenizer.encode(text))
    tokenizer.fingerprint()


def make_draft(random: random.Random, base: Path, folder: Path) -> None:
    if random.random() < 0.5:
        mutated_json("model.json", "draft")(random, base, folder)
    else:
        shutil.copytree(base / "draft", folder, dirs_exist_ok=True)
        mutated_tensors("int8.safetensors")(random, base / "draft", folder)


@kind("draft", make_draft)
def use_draft(folder: Path, base: Path) -> None:
    run(folder, "int8")


def make_gguf(random: random.Random, base: Path, folder: Path) -> None:
    content = (base / "model.gguf").read_bytes()
    if random.random() < 0.5:
        size = len(content) if random.random() < 0.2 else 12_000
        content = damaged(random, content[:size]) + content[size:]
    else:
        content = _with_metadata(random, base)
    (folder / "model.gguf").write_bytes(content)


def _with_metadata(random: random.Random, base: Path) -> bytes:
    """The same tensors behind metadata of which one to three values are others, arrays among them."""
    entries = json.loads((base / "model.gguf.json").read_bytes())
    for _ in range(random.choice((1, 1, 2, 3))):
        key = random.choice(list(entries))
        entries[key] = random.choice([
            [8, "x" * random.choice((0, 1, 300))], [4, random.choice((0, 1, 3, 2**31, 2**32 - 1))], [5, -1], [7, 1],
            [6, random.choice((0.0, 1.0, -1.0, float("inf"), float("nan"), 1e38))], [10, 2**64 - 1], [12, 1e308],
            [9, 4, [1, 2, 3]], [9, 6, [float("nan")] * 288], [9, 8, ["a", "b"]], [9, 7, []], [9, 8, [""] * 300],
            random.choice(list(entries.values())),
        ])  # fmt: skip
    body = b"".join(_text(key) + _value(entry) for key, entry in entries.items())
    tail = (base / "model.gguf.tail").read_bytes()
    (count,) = struct.unpack("<Q", tail[:8])
    (infos,) = struct.unpack("<Q", tail[8:16])
    head = struct.pack("<4sIQQ", b"GGUF", 3, count, len(entries)) + body + tail[16 : 16 + infos]
    return head + b"\0" * (-len(head) % 32) + tail[16 + infos :]


_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(entry: list[Any]) -> bytes:
    def plain(kind: int, value: Any) -> bytes:
        return _text(value) if kind == 8 else struct.pack("<" + _FORMATS[kind], value)

    if entry[0] != 9:
        return struct.pack("<I", entry[0]) + plain(*entry)
    return struct.pack("<IIQ", 9, entry[1], len(entry[2])) + b"".join(plain(entry[1], each) for each in entry[2])


@kind("gguf", make_gguf)
def use_gguf(folder: Path, base: Path) -> None:
    run(folder / "model.gguf")


def make_shards(random: random.Random, base: Path, folder: Path) -> None:
    shutil.copytree(base / "whole", folder, dirs_exist_ok=True)
    mutated_tensors("model.safetensors")(random, base / "whole", folder)


@kind("model.safetensors", make_shards)
def use_shards(folder: Path, base: Path) -> None:
    run(folder)


@kind("prefixes", mutated_tensors("prefixes.safetensors"))
def use_prefixes(folder: Path, base: Path) -> None:
    from decodery.model.batch import Batch, Segment
    from decodery.source.sven import SVEN

    model = _model(base)
    prefixed = SVEN("secure", str(folder / "prefixes.safetensors")).over(model, [1, 2])
    prefixed.forward(Batch([Segment.chunk([1, 2], prefixed.new_cache())]))


@kind("partial attention", mutated_tensors("partial.safetensors"))
def use_partial(folder: Path, base: Path) -> None:
    from decodery.model.batch import Batch, Segment
    from decodery.source.partial_attention import PartialAttention

    partial = PartialAttention(str(folder / "partial.safetensors")).over(_model(base), [1, 2])
    partial.forward(Batch([Segment.chunk([1, 2], partial.new_cache())]))


@kind("value", mutated_tensors("value.safetensors"))
def use_value(folder: Path, base: Path) -> None:
    import torch

    from decodery.source.value import fitted

    value = fitted(str(folder / "value.safetensors"), _model(base))
    value([[1]], {tap: torch.ones(1, 64) for tap in value.taps})


@kind("judge", mutated_tensors("judge.safetensors"))
def use_judge(folder: Path, base: Path) -> None:
    import torch

    from decodery.verify.judge import Judge

    rule = Judge(str(folder / "judge.safetensors"))
    rule.fits(_model(base))
    rule.trained.logits(torch.ones(2, 64))


@kind("acceptance head", mutated_tensors("acceptance.safetensors"))
def use_acceptance(folder: Path, base: Path) -> None:
    import torch

    from decodery.budget.specdec_pp import SpecDecPP

    head = SpecDecPP(str(folder / "acceptance.safetensors")).trained
    head.acceptance(torch.ones(head.hidden_size))


@kind("contexts", mutated_tensors("contexts.safetensors"))
def use_contexts(folder: Path, base: Path) -> None:
    from decodery.draft.stores.contexts import Contexts
    from decodery.draft.stores.expectations import SuccessorRates
    from decodery.draft.stores.warm import CONTEXTS, WarmContexts

    warm, contexts = WarmContexts.load(folder / "contexts.safetensors"), Contexts(CONTEXTS, 4)
    for order in CONTEXTS:
        contexts.fill(order, warm.contexts[order], warm.rows[order])
    SuccessorRates(len(CONTEXTS), 4, warm.rates)


def make_datastore(random: random.Random, base: Path, folder: Path) -> None:
    shutil.copytree(base / "datastore", folder, dirs_exist_ok=True)
    path = folder / random.choice(("datastore.json", "datastore.json", "00000.tokens.npy", "00000.order.npy"))
    if path.suffix == ".json":
        path.write_bytes(as_json(random, mutated(random, json.loads(path.read_bytes()))))
    elif random.random() < 0.5:
        path.write_bytes(damaged(random, path.read_bytes()))
    else:
        content = path.read_bytes()
        at = 128 + random.randrange(len(content) - 132) // 4 * 4
        path.write_bytes(
            content[:at] + random.choice((b"\xff" * 4, b"\0\0\x01\x1f", b"\x7f\0\0\0")) + content[at + 4 :]
        )


@kind("datastore", make_datastore)
def use_datastore(folder: Path, base: Path) -> None:
    from decodery.draft.stores.datastore import Datastore

    store = Datastore.open(str(folder))
    store.fits(288)
    for token in range(0, 288, 8):
        found = store.continuations([token], 50, 4)
        assert found.max(initial=-1) < 288
    assert all(document.max(initial=0) < 288 for document in store.documents())


_PARTS = [
    "{{ 9**9**9 }}", "{{ 10**4000 // 3 }}", "{{ (2**99999) % 7 }}", "{{ 1 << 99999999 }}", "{{ 'x' * 10**9 }}",
    "{{ [1] * 10**9 }}", "{% for a in range(10**9) %}x{% endfor %}", "{{ messages | string * 99999 }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ ''.join(['x' * 1000] * 99999) }}", "{{ '%999999999d' % 3 }}",
    "{{ '{:>999999999}'.format(1) }}", "{{ messages[0].content.encode('punycode') }}", "{{ 3 | round(-10**9) }}",
    "{{ ().__class__ }}", "{{ messages.append(1) }}", "{{ raise_exception('no') }}", "{{ bos_token[99] }}", "{{ 1 / 0 }}",  # noqa: E501
    "{{ strftime_now('%Y' * 99999) }}", "{% set ns = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x | length }}", "{{ messages | tojson(indent=10**9) }}", "{% if", "{{",  # noqa: E501
    "{{ 'a' | center(10**9) }}", "{{ (10**5000) | string }}", "{{ '9' * 5000 | int }}", "{% for m in messages %}",
    "{{ m.content }}", "{% endfor %}", "{{ -1 % 10**4299 }}", "{{ 7 ** -(10**300) }}", "{{ 'x'.replace('', 'y' * 9999) }}",  # noqa: E501
]  # fmt: skip


def make_template(random: random.Random, base: Path, folder: Path) -> None:
    source = "".join(random.choice(_PARTS) for _ in range(random.choice((1, 1, 2, 3))))
    (folder / "template.jinja").write_bytes(source.encode())


@kind("chat template", make_template)
def use_template(folder: Path, base: Path) -> None:
    from decodery.model.chat import ChatTemplate

    source = (folder / "template.jinja").read_text()
    ChatTemplate(source, {"bos_token": "<s>"}).render([{"role": "user", "content": "Hi there"}])


_models: dict[Path, Any] = {}


def _model(base: Path) -> Any:
    """The sound model that artefacts are for."""
    from decodery.model.load import load

    if base not in _models:
        _models[base] = load(base / "folder", dtype="float32", device="cpu").model
    return _models[base]


# --- sound files -----------------------------------------------------------------------------------------------------


def prepare(base: Path) -> None:
    """Write one sound file of every kind."""
    import numpy as np
    import torch
    from gguf import GGMLQuantizationType

    import tiny_gguf
    import tiny_models
    from decodery.budget.specdec_pp import AcceptanceHead
    from decodery.draft.stores.warm import CONTEXTS, WarmContexts
    from decodery.model import fused
    from decodery.model.description import Description
    from decodery.model.load import load
    from decodery.model.prefix import KVPrefix, Prefixes
    from decodery.source.partial_attention import PartialWeights
    from decodery.source.value import LinearValue
    from decodery.testing import to_int8
    from decodery.train.datastore import build_datastore
    from decodery.verify.judge import Head

    hf_model = tiny_models.make_model("llama yarn rope")
    tiny_models.save(hf_model, base / "whole")
    folder = tiny_models.save(hf_model, base / "folder", max_shard_size="60KB")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    settings = {"add_bos_token": True, "bos_token": "<s>", "eos_token": {"content": "</s>"}}
    settings["chat_template"] = [{"name": "default", "template": template}]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    _other_tokenizers(base)

    loaded = load(folder, dtype="float32", device="cpu")
    model: Any = loaded.model
    mark, config = model.fingerprint, model.config
    KVPrefix.zeros(config, 3)
    Prefixes({name: KVPrefix.zeros(config, 3) for name in ("secure", "unsafe")}, {"made": "here"}, mark).save(
        base / "prefixes.safetensors"
    )
    PartialWeights.initial(model).save(base / "partial.safetensors")
    LinearValue(torch.ones(64), torch.tensor(0.5), 2, mark).save(base / "value.safetensors")
    Head(torch.ones(64), 0.5, 2, {"auc": 0.9}, mark).save(base / "judge.safetensors")
    AcceptanceHead.random(64, config.vocab_size, depth=1).save(base / "acceptance.safetensors")
    rows = {order: np.full((5, 4), 7, dtype=np.int32) for order in CONTEXTS}
    contexts = {order: np.arange(5 * order).reshape(5, order) for order in CONTEXTS}
    WarmContexts(contexts, rows, np.full((3, 3, 4), 0.5), config.vocab_size, "v", {"made": "here"}).save(
        base / "contexts.safetensors"
    )
    (base / "text.txt").write_text("some text to index, and some more of it " * 20)
    build_datastore([base / "text.txt"], base / "datastore", tokenizer=loaded.tokenizer, vocab_size=config.vocab_size)
    draft = to_int8(model)
    # A draft's embedding is the table of its head.
    (base / "draft").mkdir()
    fused.save(base / "draft" / "int8.safetensors", draft.weights)
    loaded.tokenizer.backend.save(str(base / "draft" / "tokenizer.json"))
    description = Description(draft.config, "int8", {"bos_token": "<s>"}, template)
    (base / "draft" / "model.json").write_text(description.text())

    tiny_gguf.write_gguf(base / "model.gguf", tiny_models.make_model("llama"), GGMLQuantizationType.Q8_0)
    _take_apart(base)


def _other_tokenizers(base: Path) -> None:
    """Tokenizers of other kinds, with steps of most kinds before, after and around their models."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    bpe = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "Ġ": 3}, [("a", "b")], unk_token="a"))
    words = pre_tokenizers.Split(tokenizers.Regex(r"\w+"), "isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), words, pre_tokenizers.ByteLevel()])
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(["<s>", "</s>"])
    bpe.add_tokens(["foo"])
    bpe.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], pair=["<s>", "$A", "$B"], special_tokens=[("<s>", 4)]
    )
    bpe.enable_truncation(10, stride=2)
    bpe.enable_padding(length=8)
    bpe.save(str(base / "bpe.json"))
    pieces = [("<unk>", 0.0), ("a", -1.0), ("▁", -2.0), ("b", -3.0), ("ab", -1.5)]
    unigram = tokenizers.Tokenizer(models.Unigram(pieces, 0, True))
    unigram.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Prepend("▁"), normalizers.Replace(" ", "▁"), normalizers.Strip()]
    )
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    unigram.add_special_tokens(["<s>"])
    unigram.post_processor = processors.ByteLevel()
    unigram.save(str(base / "unigram.json"))
    wordpiece = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    wordpiece.normalizer = normalizers.BertNormalizer()
    wordpiece.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    wordpiece.decoder = decoders.ByteFallback()
    wordpiece.save(str(base / "wordpiece.json"))


def _take_apart(base: Path) -> None:
    """Of the GGUF file: its metadata as JSON, each value with its type, and what comes behind the metadata."""
    from gguf import GGUFReader

    reader = GGUFReader(base / "model.gguf")
    entries = {}
    for key, entry in reader.fields.items():
        kinds = [int(kind) for kind in entry.types]
        if not key.startswith("GGUF."):
            entries[key] = [9, kinds[1], entry.contents()] if kinds[0] == 9 else [kinds[0], entry.contents()]
    (base / "model.gguf.json").write_text(json.dumps(entries))
    content = (base / "model.gguf").read_bytes()
    begin = min(int(tensor.field.offset) for tensor in reader.tensors)
    sizes = [sum(part.nbytes for part in tensor.field.parts) for tensor in reader.tensors]
    head = struct.pack("<QQ", len(reader.tensors), sum(sizes))
    infos, data = content[begin : begin + sum(sizes)], content[reader.data_offset :]
    (base / "model.gguf.tail").write_bytes(head + infos + data)


# --- running ---------------------------------------------------------------------------------------------------------


def work(base: Path, seed: int, first: int, cases: int, kinds: list[str]) -> None:
    """Run cases one after the other, and tell of each on standard output: its number, then what it came to."""
    from decodery.errors import DecoderyError

    told = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    except (ImportError, ValueError, OSError):
        pass
    # Nobody needs what is written here to survive a power cut.
    os.fsync = lambda file: None  # type: ignore[assignment]
    scratch = Path(tempfile.mkdtemp(dir=base))
    os.environ["DECODERY_HOME"] = str(scratch / "home")
    for number in range(first, first + cases):
        make, use = KINDS[kinds[number % len(kinds)]]
        folder = scratch / str(number)
        folder.mkdir()
        make(random.Random(f"{seed} {number}"), base, folder)
        told.write(f"{number}\n")
        outcome, detail = "read", ""
        try:
            use(folder, base)
        except DecoderyError as error:
            detail = str(error)
            outcome = "trace" if "\n" in detail or len(detail) > 2000 or not detail else "sentence"
        except BaseException:
            outcome, detail = "trace", traceback.format_exc()[-3000:]
        told.write(json.dumps([outcome, detail]) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(scratch / "home", ignore_errors=True)


def fuzz(
    base: Path, seed: int, first: int, cases: int, kinds: list[str], seconds: float = SECONDS
) -> dict[str, tuple[Counter[str], list[str]]]:
    """Per kind of file: how many cases came to what, and what is wrong with those neither read nor refused."""
    found: dict[str, tuple[Counter[str], list[str]]] = {kind: (Counter(), []) for kind in kinds}
    at, last = first, first + cases
    while at < last:
        command = [sys.executable, __file__, "--worker", base, "--seed", seed, "--first", at, "--cases", last - at]
        worker = subprocess.Popen(
            [*map(str, command), "--kinds", ",".join(kinds)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        lines: queue.Queue[str | None] = queue.Queue()
        reader = threading.Thread(target=_forward, args=(worker, lines), daemon=True)
        reader.start()
        started = False
        while at < last:
            try:
                line = lines.get(timeout=seconds)
            except queue.Empty:
                line = "hang"
            if line is not None and line.strip().isdigit():
                started = True
                continue
            outcome, detail = ("crash", "") if line is None else (line, "") if line == "hang" else json.loads(line)
            if not started and line is None:
                raise RuntimeError("the process that runs the cases does not begin: run it with --worker to see why")
            counts, wrong = found[kinds[at % len(kinds)]]
            counts[outcome] += 1
            if outcome not in OUTCOMES[:2]:
                wrong.append(f"case {at} ({kinds[at % len(kinds)]}): {outcome} {detail}")
            at += 1
            if outcome in ("crash", "hang"):
                break
        worker.kill()
        worker.wait()
        reader.join()
    return found


def _forward(worker: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert worker.stdout is not None
    for line in worker.stdout:
        lines.put(line)
    lines.put(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of files, separated by commas")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    kinds = given.kinds.split(",")
    if given.worker is not None:
        work(given.worker, given.seed, given.first, given.cases, kinds)
        return
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        os.environ["DECODERY_HOME"] = str(base / "home")
        prepare(base)
        found = fuzz(base, given.seed, given.first, given.cases, kinds)
    print(f"{'':30}" + "".join(f"{outcome:>10}" for outcome in OUTCOMES))
    for kind, (counts, _) in found.items():
        print(f"{kind:30}" + "".join(f"{counts[outcome]:>10}" for outcome in OUTCOMES))
    every = sum((counts for counts, _ in found.values()), Counter[str]())
    print(f"{'all':30}" + "".join(f"{every[outcome]:>10}" for outcome in OUTCOMES))
    wrong = [each for _, several in found.values() for each in several]
    print("\n".join(wrong[:40]))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
