"""Published heads of Medusa and Hydra: small checkpoints in their layouts, run as the public code runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import silu

from decodery.core.errors import CorruptFile, ModelNotFound, SettingsError, UnsupportedModel
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Batch, Segment
from decodery.speculative.drafters.hydra import Hydra
from decodery.speculative.drafters.medusa import Medusa
from decodery.speculative.heads.drafter import HeadDrafter, head_kind
from decodery.speculative.heads.head import TrainedHead
from decodery.testing import check_identical, tiny_transformer
from published import TARGET, TEXT, layer, norm, run_layer, tensors_of, write

HIDDEN, WORDS, OUTPUTS = 32, 64, 20
CHOSEN = torch.arange(0, 3 * OUTPUTS, 3)
PREFIX = "prefix_embeding_layer."
Sizes = dict[str, tuple[int, ...]]
Layout = tuple[str, dict[str, Any], dict[str, torch.Tensor]]


def medusa(heads: int, blocks: int, *, projection: bool = True) -> Sizes:
    sizes: Sizes = {}
    for head in range(heads):
        for block in range(blocks):
            sizes |= {f"{head}.{block}.linear.weight": (HIDDEN, HIDDEN), f"{head}.{block}.linear.bias": (HIDDEN,)}
        if projection:
            sizes[f"{head}.{blocks}.weight"] = (WORDS, HIDDEN)
    return sizes


def vllm(heads: int, blocks: int, rows: int, *, bias: bool, projections: int) -> dict[str, torch.Tensor]:
    sizes: Sizes = {}
    for head in range(heads):
        for block in range(blocks):
            sizes[f"blocks.{head}.layers.{block}.weight"] = (HIDDEN, HIDDEN)
            if bias:
                sizes[f"blocks.{head}.layers.{block}.bias"] = (HIDDEN,)
    return tensors_of(sizes | {f"lm_heads.{head}.weight": (rows, HIDDEN) for head in range(projections)})


def hydra(heads: int, blocks: int, *, prefix: bool) -> dict[str, torch.Tensor]:
    sizes: Sizes = {"input_embed_fn.weight": (WORDS, HIDDEN)}
    end = ".1" if prefix else ""
    for head in range(heads):
        for block in range(blocks):
            name, width = f"hydra_mlp.{head}.{2 * block + 1 if prefix else block}", HIDDEN
            if block == 0:
                width = (head + 2) * HIDDEN
                sizes |= {f"{name}.res_connection.weight": (HIDDEN, width), f"{name}.res_connection.bias": (HIDDEN,)}
            sizes |= {f"{name}.linear.weight": (HIDDEN, width), f"{name}.linear.bias": (HIDDEN,)}
        sizes |= {f"hydra_lm_head.{head}{end}.weight": (WORDS, HIDDEN), f"hydra_lm_head.{head}{end}.bias": (WORDS,)}
    if prefix:
        sizes |= layer(f"{PREFIX}layers.0.", HIDDEN) | {
            f"{PREFIX}layers.0.input_layernorm.weight": (HIDDEN,),
            f"{PREFIX}norm.weight": (HIDDEN,),
            f"{PREFIX}embed_tokens.weight": (WORDS, HIDDEN),
        }
    return tensors_of(sizes)


MEDUSA = {"base_model_name_or_path": "some/model", "medusa_num_heads": 2, "medusa_num_layers": 1, "version": "2"}
VLLM = {
    "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": HIDDEN, "vocab_size": WORDS,
    "num_heads": 3, "num_hidden_layers": 1, "medusa_fc_bias": True, "max_paths": 64, "topk": 10,
}  # fmt: skip
HYDRA = {
    "base_model_name_or_path": "some/model", "hydra_num_heads": 3, "hydra_num_layers": 2, "grounded_heads": True,
    "hydra_head_arch": "mlp", "hidden_state_offset": 0,
}  # fmt: skip
OWN, ITS = "medusa_lm_head.safetensors", "hydra_lm_head.safetensors"
LAYOUTS: dict[str, Layout] = {
    # As published: more heads in the file than in the configuration.
    "medusa": (OWN, MEDUSA, tensors_of(medusa(3, 1))),
    "medusa-of-two-blocks": (OWN, MEDUSA | {"medusa_num_layers": 2}, tensors_of(medusa(3, 2))),
    "medusa-without-projections": (OWN, MEDUSA, tensors_of(medusa(3, 1, projection=False))),
    "medusa-vllm": ("model.safetensors", VLLM, vllm(3, 1, WORDS, bias=True, projections=3)),
    "medusa-vllm-some-words": (
        "model.safetensors",
        VLLM | {"truncated_vocab_size": OUTPUTS, "medusa_fc_bias": False},
        vllm(3, 1, OUTPUTS, bias=False, projections=3) | {"token_map": CHOSEN},
    ),
    "medusa-vllm-one-projection": (
        "model.safetensors",
        VLLM | {"truncated_vocab_size": OUTPUTS, "original_lm_head": True, "num_hidden_layers": 2},
        vllm(3, 2, WORDS, bias=True, projections=2) | {"token_map": CHOSEN},
    ),
    "hydra": (ITS, HYDRA, hydra(3, 2, prefix=False)),
    "hydra++": (ITS, HYDRA | {"hydra_head_arch": "prefix-mlp"}, hydra(3, 2, prefix=True)),
}


def put(folder: Path, layout: Layout) -> Path:
    """Write a checkpoint as its authors do."""
    file, config, tensors = layout
    write(folder, config, tensors)
    (folder / "model.safetensors").rename(folder / file)
    return folder


def projected(weights: dict[str, torch.Tensor], name: str, rows: torch.Tensor) -> torch.Tensor:
    return rows @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)


def expected(name: str) -> list[torch.Tensor]:
    """[vocab] logits of what each head says after the text, whose last tokens are drafted."""
    _, config, given = LAYOUTS[name]
    weights = {part: each.double() for part, each in given.items()}
    n = len(TEXT) - 3
    states = TARGET.forward(Batch([Segment.chunk(TEXT[:n], TARGET.new_cache())]), taps=(-1,)).hidden[-1]
    rows = TARGET.final_norm(states)
    blocks = config.get("hydra_num_layers", config.get("medusa_num_layers", config.get("num_hidden_layers")))
    said = []
    if name == "hydra++":
        prefix = f"{PREFIX}layers.0."
        out = run_layer(weights, prefix, {}, rows, norm(rows, weights[f"{prefix}input_layernorm.weight"]))
        rows = norm(out, weights[f"{PREFIX}norm.weight"])
    for head in range(3):
        row = rows[-1]
        if name.startswith("hydra"):
            here, end = (lambda block: 2 * block + 1, ".1") if name == "hydra++" else (lambda block: block, "")
            row = torch.cat((row, TARGET.embed_tokens(torch.tensor(TEXT[n : n + head + 1])).flatten()))
            for block in range(blocks):
                theirs = f"hydra_mlp.{head}.{here(block)}"
                through = projected(weights, f"{theirs}.res_connection", row) if block == 0 else row
                row = through + silu(projected(weights, f"{theirs}.linear", row))
            said.append(projected(weights, f"hydra_lm_head.{head}{end}", row))
            continue
        for block in range(blocks):
            theirs = f"blocks.{head}.layers.{block}" if "vllm" in name else f"{head}.{block}.linear"
            row = row + silu(projected(weights, theirs, row))
        if name == "medusa-without-projections":
            said.append(TARGET.project(row[None])[0])
        elif "vllm" not in name:
            said.append(projected(weights, f"{head}.{blocks}", row))
        else:
            words = projected(weights, f"lm_heads.{0 if 'original_lm_head' in config else head}", row)
            if "token_map" in given:
                few = words[CHOSEN] if len(words) == WORDS else words
                words = torch.full((WORDS,), -torch.inf, dtype=torch.float64).index_copy(0, CHOSEN, few)
            said.append(words)
    return said


def drafter_of(name: str, folder: Path | str) -> HeadDrafter:
    return (Hydra if name.startswith("hydra") else Medusa)(str(folder))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_published_head_says_what_it_says_where_it_was_published(name: str, tmp_path: Path) -> None:
    trained = drafter_of(name, put(tmp_path / "head", LAYOUTS[name])).trained
    assert trained is not None
    head, n = head_kind(trained.kind)(trained, TARGET), len(TEXT) - 3
    assert head.reach == 3
    states = TARGET.forward(Batch([Segment.chunk(TEXT[:n], TARGET.new_cache())]), taps=head.taps).hidden
    memory = head.begin()
    found = [head.read(memory, states, torch.tensor(TEXT[1 : n + 1]), np.arange(n))]
    for depth in (1, 2):
        place = np.array([depth - 2]), np.array([depth]), np.ones((1, depth), dtype=bool)
        found.append(head.grow(memory, torch.tensor(TEXT[n + depth : n + depth + 1]), *place)[0])
    for each, wanted in zip(found, expected(name), strict=True):
        spoken = wanted > -torch.inf
        assert torch.equal(head.spread(each[None])[0] > -torch.inf, spoken)
        assert float((head.spread(each[None])[0] - wanted)[spoken].abs().max()) < 1e-6


@pytest.mark.parametrize("name", ["medusa", "hydra++"])
def test_drafts_of_published_heads_change_nothing(name: str, tmp_path: Path) -> None:
    drafter = drafter_of(name, put(tmp_path / "head", LAYOUTS[name]))
    check_identical(TARGET, [[1, 2, 3]], drafter=drafter, max_new_tokens=8, seeds=(0,), tested="drafted")


def changed(name: str, config: dict[str, Any] | None = None, **tensors: torch.Tensor | None) -> Layout:
    file, known, given = LAYOUTS[name]
    # Names of tensors have dots.
    new = {part.replace("_dot_", "."): each for part, each in tensors.items()}
    left = {part: each for part, each in (given | new).items() if each is not None}
    return file, known | (config or {}), left


@pytest.mark.parametrize(
    ("layout", "error", "words"),
    [
        (changed("hydra", {"hydra_head_arch": "eagle-attn"}), UnsupportedModel, "hydra_head_arch = 'eagle-attn'"),
        (changed("hydra", {"grounded_heads": False}), UnsupportedModel, "grounded_heads = False"),
        (changed("hydra", {"hidden_state_offset": 1}), UnsupportedModel, "hidden_state_offset = 1"),
        (changed("hydra", {"hydra_num_layers": 1}), UnsupportedModel, r"hydra_mlp.0.1.linear.\w+ belongs to a part"),
        (changed("hydra", {"hydra_num_layers": 3}), CorruptFile, "has no tensor hydra_mlp.0.2.linear.weight"),
        (changed("hydra", {"hydra_head_arch": "prefix-mlp"}), CorruptFile, "has no tensor hydra_lm_head.0.1.weight"),
        (changed("medusa", **{"1_dot_1_dot_weight": None}), CorruptFile, "has no tensor 1.1.weight"),
        (changed("medusa", extra=torch.ones(2)), UnsupportedModel, "extra belongs to a part .* layout medusa"),
        (changed("medusa", {"medusa_num_layers": 0}), CorruptFile, "medusa_num_layers should be an integer"),
        (changed("medusa-vllm", {"logit_scale": 0.5}), UnsupportedModel, "logit_scale = 0.5"),
        (changed("medusa-vllm", {"hidden_size": 48}), CorruptFile, r"is \[32, 32\], and should be \[48, 48\]"),
        (changed("medusa-vllm", {"truncated_vocab_size": 9}), CorruptFile, "has no tensor token_map"),
        (
            changed("medusa-vllm-some-words", token_map=CHOSEN + 50),
            CorruptFile,
            "token_map names tokens beyond the 64",
        ),
        (
            (
                OWN,
                MEDUSA | {"architectures": ["LlamaForCausalLM"]},
                {"medusa_head.0.0.linear.weight": torch.ones(2, 2)},
            ),
            UnsupportedModel,
            "LlamaForCausalLM.* is no layout .* Medusa's",
        ),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    layout: Layout, error: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        TrainedHead.load(put(tmp_path / "head", layout))


@pytest.mark.parametrize(("name", "pickle"), [("medusa", "medusa_lm_head.pt"), ("hydra", "hydra_lm_head.pt")])
def test_a_pickle_is_refused_with_what_converts_it(name: str, pickle: str, tmp_path: Path) -> None:
    folder = put(tmp_path / "head", LAYOUTS[name])
    weights = folder / pickle.replace(".pt", ".safetensors")
    torch.save(load_file(weights), folder / pickle)
    weights.unlink()
    with pytest.raises(ModelNotFound, match="write its tensors as safetensors first") as refused:
        TrainedHead.load(folder)
    # What it says is run as it is printed.
    said = str(refused.value)
    program = said[said.index('"') + 1 : said.rindex('"')].replace(f"'{pickle}'", f"'{folder / pickle}'")
    exec(program.replace(f"'{weights.name}'", f"'{weights}'"), {})
    assert TrainedHead.load(folder).kind == name


def test_heads_of_the_hub_that_are_here_need_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    cached = tmp_path / "hub" / "models--someone--heads"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc123")
    folder = cached / "snapshots" / "abc123"
    folder.parent.mkdir()
    put(folder, LAYOUTS["medusa"])
    trained = Medusa("someone/heads").trained
    assert trained is not None and trained.settings == {"heads": 3, "blocks": 1}
    # Nothing but a pickle is on the Hub: it is not fetched, and the sentence says what to do with it.
    (folder / OWN).unlink()
    with pytest.raises(ModelNotFound, match=r"reading medusa_lm_head.pt can run code"):
        Medusa("someone/heads")
    with pytest.raises(ModelNotFound, match="cannot fetch nobody/heads from the Hub"):
        Medusa("nobody/heads")


def test_a_head_is_refused_where_it_does_not_belong(tmp_path: Path) -> None:
    folder = put(tmp_path / "head", LAYOUTS["medusa"])
    with pytest.raises(SettingsError, match="a head for medusa, not for hydra: use the drafter medusa"):
        Hydra(str(folder))
    for target, words in (
        (tiny_transformer(0, num_layers=6, hidden_size=48), "for a model of width 32, and this one has 48"),
        (tiny_transformer(0, num_layers=6, vocab_size=80), "speaks 64 words, and this model has 80"),
    ):
        with pytest.raises(SettingsError, match=words):
            Engine(target).submit(Request([1], drafter=Medusa(str(folder))))
    narrow = {
        name: each[:8] if name.endswith(("k_proj.weight", "v_proj.weight")) else each
        for name, each in LAYOUTS["hydra++"][2].items()
    }
    other = put(tmp_path / "other", (ITS, LAYOUTS["hydra++"][1], narrow))
    with pytest.raises(SettingsError, match="for layers of another shape"):
        Engine(TARGET).submit(Request([1], drafter=Hydra(str(other))))
    save_file({"nothing": torch.ones(1)}, folder / OWN)
    with pytest.raises(UnsupportedModel, match="is no layout of a draft head"):
        Medusa(str(folder))
