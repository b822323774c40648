"""Files with values of wrong types and sizes end in one sentence, and what was trained for one model stays with it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from decodery.core.errors import CorruptFile, SettingsError
from decodery.logits_sources.partial_attention import PartialAttention, PartialWeights
from decodery.logits_sources.sven import SVEN
from decodery.models.families.config_json import read_config
from decodery.models.loaders.gguf_tokenizer import read_texts
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.models.trained.artifact import Artifact, remembered
from decodery.models.trained.prefix import KVPrefix, Prefixed, Prefixes
from decodery.scorers.value_head import LinearValue, ValueHead
from decodery.speculative.acceptance.judge import Head, Judge
from decodery.speculative.draft_length.specdec_pp import AcceptanceHead, SpecDecPP
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.stores.datastore import Datastore
from decodery.speculative.stores.warm import CONTEXTS, WarmContexts
from decodery.testing import decode, tiny_transformer, to_int8
from fuzz.kinds import KINDS
from fuzz.sound import prepare
from fuzz_files import fuzz
from tiny_models import make_model, make_tokenizer

MODEL, OTHER = tiny_transformer(0), tiny_transformer(1)
PROMPT = [5, 9, 2, 33]


def test_mutated_files_are_read_or_refused_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    prepare(tmp_path)
    # Templates are bounded by a renderer of their own, and tried by its tests and by `make fuzz`.
    kinds = [kind for kind in KINDS if kind != "chat template"]
    found = fuzz(tmp_path, seed=0, first=0, cases=8 * len(kinds), kinds=kinds)
    wrong = [each for _, several in found.values() for each in several]
    assert not wrong, "\n".join(wrong)
    for kind, (counts, _) in found.items():
        assert counts.total() == 8 and counts["sentence"] > 0, f"{kind} was hardly damaged"
    assert sum(counts["read"] for counts, _ in found.values()) > 10, "nothing that is sound was left"


# --- configurations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 10**400}}),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0, "factor": 4.0}}),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 1e-320}}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": float("nan")}}),
        ("llama", {"rope_parameters": {"rope_type": [], "rope_theta": 1e4}}),
        ("llama", {"architectures": 7}),
        ("llama", {"model_type": ["llama"]}),
        ("llama", {"hidden_size": 2, "head_dim": None}),
        ("llama", {"eos_token_id": 10**9}),
        ("llama", {"tie_word_embeddings": "no"}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": "x"}),
        ("gemma3_text", {"rope_parameters": {"full_attention": [1], "sliding_attention": {"rope_theta": 1e4}}}),
        ("gemma3_text", {"query_pre_attn_scalar": 5e-324}),
        ("mistral", {"layer_types": [["full_attention"]] * 3}),
    ],
)
def test_configurations_are_checked_by_type_and_bound(family: str, change: dict[str, Any]) -> None:
    base = json.loads(make_model(family if family != "mistral" else "mistral, no window").config.to_json_string(False))
    read_config(base)
    with pytest.raises(CorruptFile) as caught:
        read_config(base | change)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": ["a", 5]},
        {"add_bos_token": np.array([1, 2])},
        {"pre": np.array([1])},
        {"merges": [3]},
        {"bos_token_id": [1]},
        {"scores": np.array([np.nan] * 3), "model": "llama"},
        {"token_type": "x"},
        {"tokens": ["a" * 5000] * 3},
    ],
)
def test_gguf_metadata_is_checked_by_type_and_bound(change: dict[str, Any]) -> None:
    sound = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "merges": ["a b"]}
    read_texts({f"tokenizer.ggml.{name}": value for name, value in sound.items()}, "x.gguf")
    with pytest.raises(CorruptFile) as caught:
        read_texts({f"tokenizer.ggml.{name}": value for name, value in (sound | change).items()}, "x.gguf")
    assert "\n" not in str(caught.value)


# --- tokenizers ------------------------------------------------------------------------------------------------------


def _tokenizer(path: Path, **changes: Any) -> Path:
    path.write_text(json.dumps(json.loads(make_tokenizer().to_str()) | changes))
    return path


def test_how_a_tokenizer_cuts_and_fills_up_is_left_out(tmp_path: Path) -> None:
    # Each of these ends the process, or panics, where it is handed to the library as it is.
    cutting = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 2**40}
    filling = {"strategy": {"Fixed": 2**31}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    path = _tokenizer(
        tmp_path / "tokenizer.json", truncation=cutting, padding=filling | {"pad_type_id": 0, "pad_token": "x"}
    )
    assert Tokenizer.from_file(path).encode("abcdefgh") == list(b"abcdefgh")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"added_tokens": [{"id": 2**40, "content": "x"}]}, "an integer"),
        ({"added_tokens": [{"id": 300 + n, "content": "x" * 16_000} for n in range(70)]}, "longer than any"),
        (
            {
                "normalizer": {
                    "type": "Sequence",
                    "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 64}] * 9,
                }
            },
            "makes texts longer",
        ),
        ({"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "nope", "type_id": 0}}],
                             "pair": [], "special_tokens": {}}}, "is not a tokenizer"),
        ({"model": {"type": "BPE", "vocab": {"\ud800": 0}, "merges": []}}, "Unicode"),
        ({"model": None}, "no field model"),
    ],
)  # fmt: skip
def test_tokenizers_that_ask_for_too_much_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CorruptFile, match=message) as caught:
        Tokenizer.from_file(_tokenizer(tmp_path / "tokenizer.json", **changes))
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_ends_its_process_ends_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from decodery.models.tokenizers import tokenizer_file

    path = _tokenizer(
        tmp_path / "tokenizer.json",
        padding={"strategy": {"Fixed": 2**31}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                 "pad_type_id": 0, "pad_token": "x"},
    )  # fmt: skip
    monkeypatch.setattr(tokenizer_file, "_UNUSED", ())
    with pytest.raises(CorruptFile, match="its process breaks down"):
        Tokenizer.from_file(path)


# --- what was trained ------------------------------------------------------------------------------------------------


def test_fingerprints_tell_models_apart_and_not_precisions() -> None:
    assert MODEL.fingerprint == tiny_transformer(0).fingerprint != OTHER.fingerprint
    assert MODEL.fingerprint == to_int8(MODEL).fingerprint == tiny_transformer(0, dtype=torch.float32).fingerprint
    assert Prefixed(MODEL, KVPrefix.zeros(MODEL.config, 2)).fingerprint == MODEL.fingerprint


def test_what_was_trained_for_another_model_of_equal_width_is_refused(tmp_path: Path) -> None:
    mark, path = MODEL.fingerprint, tmp_path / "made.safetensors"
    Head(torch.ones(32), 0.0, 2, model=mark).save(path)
    decode(MODEL, [PROMPT], acceptance_rule=Judge(str(path)), drafter=DraftModel(OTHER))
    with pytest.raises(SettingsError, match="judge was trained for another model"):
        decode(OTHER, [PROMPT], acceptance_rule=Judge(str(path)), drafter=DraftModel(MODEL))

    LinearValue(torch.ones(32), torch.tensor(0.0), 1, mark).save(path)
    ValueHead(str(path)).fits(MODEL)
    with pytest.raises(SettingsError, match="value head was trained for another model"):
        ValueHead(str(path)).fits(OTHER)

    head = AcceptanceHead.random(32, 64, depth=1)
    head.model = mark
    head.save(path)
    decode(OTHER, [PROMPT], drafter=DraftModel(MODEL), draft_length=SpecDecPP(str(path)))
    with pytest.raises(SettingsError, match="acceptance head was trained for another model"):
        decode(MODEL, [PROMPT], drafter=DraftModel(OTHER), draft_length=SpecDecPP(str(path)))

    PartialWeights.initial(MODEL).save(path)
    PartialAttention(str(path)).over(MODEL, PROMPT)
    with pytest.raises(SettingsError, match="partial attention was trained for another model"):
        PartialAttention(str(path)).over(OTHER, PROMPT)

    Prefixes({"secure": KVPrefix.zeros(MODEL.config, 2)}, model=mark).save(path)
    SVEN(prefix=str(path)).over(MODEL, PROMPT)
    with pytest.raises(SettingsError, match="prefixes was trained for another model"):
        SVEN(prefix=str(path)).over(OTHER, PROMPT)


def test_a_file_that_was_made_anew_is_read_anew(tmp_path: Path) -> None:
    folder = tmp_path / "prefixes"
    for length in (2, 3):
        # As large as before and within the clock's grain, as far as lengths allow: the file's number tells.
        Prefixes({"secure": KVPrefix.zeros(MODEL.config, length)}).save(folder / "prefixes.safetensors")
        assert SVEN(prefix=str(folder)).over(MODEL, PROMPT).prefix.data.shape[3] == length  # type: ignore[attr-defined]
    reads = []
    read = remembered(lambda path: reads.append(path))
    read(folder / "prefixes.safetensors"), read(str(folder / "prefixes.safetensors"))
    assert len(reads) == 1


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_types_that_are_not_read_are_named_so(dtype: str, tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    Artifact("judge", {"weight": torch.zeros(32, dtype=torch.uint8)}, {"layer": 1, "bias": 0.0, "trained": {}}).save(
        path
    )
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"U8"', f'"{dtype}"'.encode()).replace(content[:8], struct.pack("<Q", 0), 0))
    size = struct.unpack("<Q", content[:8])[0] + len(dtype) - 2
    path.write_bytes(struct.pack("<Q", size) + path.read_bytes()[8:])
    with pytest.raises(CorruptFile, match="holds no judge"):
        Head.load(path)


def test_deep_facts_infinities_and_strange_tokens_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "made.safetensors"
    save_file({"weight": torch.ones(32)}, path, {"artifact": "[" * 100_000})
    with pytest.raises(CorruptFile, match="holds no judge"):
        Head.load(path)
    Artifact("value head", {"weight": torch.ones(32), "bias": torch.tensor(0.0)}, {"tap": float("inf")}).save(path)
    with pytest.raises(CorruptFile, match="holds no value head"):
        LinearValue.load(path)
    rows = {order: np.full((2, 3), 70, dtype=np.int32) for order in CONTEXTS}
    contexts = {order: np.ones((2, order), dtype=np.int64) for order in CONTEXTS}
    WarmContexts(contexts, rows, np.zeros((3, 3, 3)), 64).save(path)
    with pytest.raises(CorruptFile, match="holds no table of contexts"):
        WarmContexts.load(path)


@pytest.mark.parametrize(
    "header", ['{"format": "decodery-datastore-1", "shards": [], "separator": 1e999}', "[" * 100_000]
)
def test_headers_of_datastores_are_bounded(header: str, tmp_path: Path) -> None:
    (tmp_path / "datastore.json").write_text(header)
    with pytest.raises(CorruptFile):
        Datastore.open(str(tmp_path))


def test_tokens_beyond_a_datastores_vocabulary_are_refused_where_they_are_met() -> None:
    store = Datastore.build([[1, 2, 3], [1, 2, 99]], separator=64, vocab_size=64)
    assert store.continuations([3], 10, 1).tolist() == [[-1]]
    with pytest.raises(CorruptFile, match="beyond the 64"):
        store.continuations([1, 2], 10, 2)
    with pytest.raises(CorruptFile, match="beyond the 64"):
        store.documents()
