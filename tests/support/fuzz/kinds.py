"""Every kind of file: how a mutated one is made, and what is done with it when it is read."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzz.mutations import Make, as_json, damaged, mutated, mutated_json, mutated_tensors
from fuzz.sound import QUANTIZED

Use = Callable[[Path, Path], None]
"""use(folder, base): reads the file and does with it what is usually done next."""
KINDS: dict[str, tuple[Make, Use]] = {}


def kind(name: str, make: Make) -> Callable[[Use], Use]:
    def add(use: Use) -> Use:
        KINDS[name] = make, use
        return use

    return add


def run(folder: Path, dtype: str = "float32") -> None:
    """Load what is in a folder, encode and render with it, and run one pass."""
    import torch

    from decodery.models.batch import Batch, Segment
    from decodery.models.loaders.load import load

    loaded = load(folder, dtype=dtype, device="cpu")
    ids = loaded.tokenizer.encode("ab c")
    loaded.tokenizer.decode(ids)
    if loaded.chat_template is not None:
        loaded.chat_template.render([{"role": "user", "content": "Hi"}])
    with torch.inference_mode():
        loaded.model.forward(Batch([Segment.chunk([1, 2, 3], loaded.model.new_cache())]))


@kind("config", mutated_json("config.json", "folder"))
def use_config(folder: Path, base: Path) -> None:
    from decodery.models.families.config_json import FAMILIES

    run(folder) if _family(folder) in FAMILIES else _read_config(folder)


def _family(folder: Path) -> Any:
    """The family that a folder claims: what is of none of ours goes to transformers, which is not tried here."""
    try:
        raw = json.loads((folder / "config.json").read_bytes())
    except (ValueError, RecursionError):
        return None
    return raw.get("model_type") if isinstance(raw, dict) else None


def _read_config(folder: Path) -> None:
    from decodery.models.families.config_json import read_config
    from decodery.models.loaders.fields import read_json

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
    from decodery.models.tokenizers.tokenizer import Tokenizer

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
    """The same tensors after metadata of which one to three values are others, arrays among them."""
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


def make_quantized(random: random.Random, base: Path, folder: Path) -> None:
    """How weights are kept is changed, or the tensors that are kept so."""
    source = base / "quantized" / random.choice(QUANTIZED)
    shutil.copytree(source, folder, dirs_exist_ok=True)
    if random.random() < 0.6:
        mutated_tensors("model.safetensors")(random, source, folder)
        return
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = mutated(random, config["quantization_config"])
    (folder / "config.json").write_bytes(as_json(random, config))


@kind("quantized", make_quantized)
def use_quantized(folder: Path, base: Path) -> None:
    run(folder, "auto")


@kind("prefixes", mutated_tensors("prefixes.safetensors"))
def use_prefixes(folder: Path, base: Path) -> None:
    from decodery.logits_sources.sven import SVEN
    from decodery.models.batch import Batch, Segment

    model = _model(base)
    prefixed = SVEN("secure", str(folder / "prefixes.safetensors")).over(model, [1, 2])
    prefixed.forward(Batch([Segment.chunk([1, 2], prefixed.new_cache())]))


@kind("partial attention", mutated_tensors("partial.safetensors"))
def use_partial(folder: Path, base: Path) -> None:
    from decodery.logits_sources.partial_attention import PartialAttention
    from decodery.models.batch import Batch, Segment

    partial = PartialAttention(str(folder / "partial.safetensors")).over(_model(base), [1, 2])
    partial.forward(Batch([Segment.chunk([1, 2], partial.new_cache())]))


@kind("value", mutated_tensors("value.safetensors"))
def use_value(folder: Path, base: Path) -> None:
    import torch

    from decodery.scorers.value_head import ValueHead
    from decodery.step.forward_request import run_sync
    from decodery.step.scorer import Candidates, judge

    value = ValueHead(str(folder / "value.safetensors"))
    value.fits(_model(base))
    run_sync(judge(value, Candidates([1], [[1]], [False], {tap: torch.ones(1, 64) for tap in value.requirements.taps})))


@kind("judge", mutated_tensors("judge.safetensors"))
def use_judge(folder: Path, base: Path) -> None:
    import torch

    from decodery.speculative.acceptance.judge import Judge

    rule = Judge(str(folder / "judge.safetensors"))
    rule.fits(_model(base))
    rule.trained.logits(torch.ones(2, 64))


@kind("acceptance head", mutated_tensors("acceptance.safetensors"))
def use_acceptance(folder: Path, base: Path) -> None:
    import torch

    from decodery.speculative.draft_length.specdec_pp import SpecDecPP

    head = SpecDecPP(str(folder / "acceptance.safetensors")).trained
    head.acceptance(torch.ones(head.hidden_size))


@kind("contexts", mutated_tensors("contexts.safetensors"))
def use_contexts(folder: Path, base: Path) -> None:
    from decodery.speculative.stores.contexts import Contexts
    from decodery.speculative.stores.expectations import SuccessorRates
    from decodery.speculative.stores.warm import CONTEXTS, WarmContexts

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
    from decodery.speculative.stores.datastore import Datastore

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
    from decodery.models.tokenizers.chat import ChatTemplate

    source = (folder / "template.jinja").read_text()
    ChatTemplate(source, {"bos_token": "<s>"}).render([{"role": "user", "content": "Hi there"}])


_models: dict[Path, Any] = {}


def _model(base: Path) -> Any:
    """The sound model that artefacts are for."""
    from decodery.models.loaders.load import load

    if base not in _models:
        _models[base] = load(base / "folder", dtype="float32", device="cpu").model
    return _models[base]
