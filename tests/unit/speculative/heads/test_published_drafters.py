"""EAGLE-3.1, P-EAGLE, DFlash, DSpark and MTP heads as published: their logits are those of the public formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decodery.core.errors import CorruptFile, NotTrusted, SettingsError, UnsupportedModel
from decodery.core.method_spec import from_network
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.llm.resolve_settings import resolve_drafter
from decodery.models.batch import Batch, Scores
from decodery.speculative.drafters.dflash import DFlash
from decodery.speculative.drafters.dspark import DSpark, DSparkHead, _paying
from decodery.speculative.heads.drafter import TrainedDrafter
from decodery.speculative.heads.head import TrainedHead
from decodery.speculative.heads.head_pass import HeadPass
from decodery.speculative.heads.recognise import published_drafter
from decodery.speculative.trees.eagle_2 import EAGLE2
from decodery.step.draft_length_policy import Budget
from decodery.testing import check_identical, tiny_transformer
from published import TARGET, TEXT, norm, tensors_of, write
from published_blocks import attention, causal, eagle_rows, enter, mlp, sizes_of
from published_heads import (
    LLAMA,
    MASK,
    OUTPUTS,
    QWEN,
    SLIDING,
    TAPS,
    TREE,
    VOCAB,
    block_config,
    block_tensors,
    check,
    eagle_formula,
    eagle_tensors,
    embedding,
    found_logits,
    ids,
    projected,
    rows_of,
    speculators,
    spread,
    states_of,
)

NARROW = LLAMA | {"hidden_size": 16, "head_dim": 4}
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "two layers, queries normed": (QWEN, {}, {}),
    "a window": (QWEN | SLIDING, {"norm_before_residual": True}, {}),
    "norms of the states": (LLAMA, {"fc_norm": True, "norm_output": True}, {}),
    "one norm of the states": (LLAMA | {"num_hidden_layers": 1}, {"norm_before_fc": True}, {}),
    "own embedding": (LLAMA | {"num_hidden_layers": 1}, {"norm_output": True}, {"own": True}),
    "narrower than the target": (NARROW, {"target_hidden_size": 32}, {"own": True}),
}
"""By name: the layers, the head's settings, and what its tensors have beside."""


def p_eagle_config() -> dict[str, Any]:
    return speculators("peagle", QWEN, draft_vocab_size=OUTPUTS, mask_token_id=MASK, **ids())


@pytest.mark.parametrize("name", OPTIONS)
def test_eagle_3_heads_with_the_options_of_3_1(name: str, tmp_path: Path) -> None:
    layers, settings, beside = OPTIONS[name]
    tensors = eagle_tensors(layers, settings, **beside)
    folder = write(
        tmp_path / "head", speculators("eagle3", layers, draft_vocab_size=OUTPUTS, **ids(), **settings), tensors
    )
    weights = {each: tensor.double() for each, tensor in tensors.items()}
    check(folder, lambda path: eagle_formula(weights, layers, settings, path))


def test_an_eagle_3_head_of_specforge_with_norms(tmp_path: Path) -> None:
    settings = {"fc_norm": True, "norm_output": True, "prefix": "midlayer."}
    layers = LLAMA | {"num_hidden_layers": 1}
    tensors = eagle_tensors(layers, settings)
    own = {"fc_norm": True, "norm_output": True, "draft_vocab_size": OUTPUTS}
    # These number the layers that states leave.
    config = layers | own | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in TAPS]}}
    folder = write(tmp_path / "head", config | {"architectures": ["LlamaForCausalLMEagle3"]}, tensors)
    weights = {each: tensor.double() for each, tensor in tensors.items()}
    check(folder, lambda path: eagle_formula(weights, layers, settings, path))


def test_p_eagle_predicts_depths_from_mask_rows(tmp_path: Path) -> None:
    tensors = eagle_tensors(QWEN, {"mask": True}, own=True)
    folder = write(tmp_path / "head", p_eagle_config(), tensors)
    weights = {each: tensor.double() for each, tensor in tensors.items()}
    embed = embedding(weights)

    def wanted(path: list[int]) -> torch.Tensor:
        masked = enter(weights, {}, list(weights["mask_hidden"][0].chunk(3, dim=1))).expand(len(path), -1)
        features = torch.cat((enter(weights, {}, states_of(TEXT[:-1], TAPS)), masked))
        _, last = eagle_rows(weights, QWEN, {}, embed(TEXT[1:] + [MASK] * len(path)), features)
        return spread(last[-1] @ weights["lm_head.weight"].T)

    check(folder, wanted)
    assert found_logits(folder, [8], [1])[0].reach == 4


BLOCKS: dict[str, tuple[bool, dict[str, Any], dict[str, Any], int]] = {
    "z-lab": (False, QWEN, {}, VOCAB),
    "z-lab, a window": (False, QWEN | SLIDING, {}, VOCAB),
    "speculators": (True, QWEN | SLIDING, {}, OUTPUTS),
    "speculators, from the anchor": (
        True, QWEN | SLIDING, {"sliding_window_non_causal": True, "sample_from_anchor": True}, VOCAB
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
def test_dflash_fills_in_a_block(name: str, tmp_path: Path) -> None:
    own, layers, settings, outputs = BLOCKS[name]
    tensors = block_tensors(layers, outputs=outputs)
    chosen = settings | ({"draft_vocab_size": outputs} if own else {})
    folder = write(tmp_path / "head", block_config("dflash", own, layers, **chosen), tensors)
    weights = {each: tensor.double() for each, tensor in tensors.items()}
    rows, first = rows_of(weights, layers, settings, own), 0 if settings.get("sample_from_anchor") else 1
    check(folder, lambda path: spread(projected(weights, rows[first + len(path)])))
    assert found_logits(folder, [8], [1])[0].reach == 4 - first


ANCHORED, BESIDE = {"sample_from_anchor": True}, {"sample_from_anchor": False}
MARKOV: dict[str, tuple[bool, dict[str, Any]]] = {
    "vanilla": (True, ANCHORED), "gated": (True, BESIDE), "rnn": (True, ANCHORED),
    "rnn, not from the anchor": (True, BESIDE), "rnn of SpecForge": (False, {}), "vanilla of SpecForge": (False, {}),
    "gated of SpecForge, not from the anchor": (False, BESIDE),
}  # fmt: skip
"""Whose layout, and settings. SpecForge trains every row for the place after its own, unless a file says so."""


@pytest.mark.parametrize("name", MARKOV)
def test_dspark_adds_a_bias_by_the_path(name: str, tmp_path: Path) -> None:
    (own, settings), variant, rank = MARKOV[name], name.partition(" ")[0].strip(","), 6
    tensors = block_tensors(QWEN, rank=rank, variant=variant)
    chosen = {"markov_rank": rank, "markov_head_type": variant, **settings}
    if own:
        chosen["draft_vocab_size"] = VOCAB
    else:
        chosen |= {"projector_type": "dspark", "enable_confidence_head": True, "confidence_head_with_markov": True}
    folder = write(tmp_path / "head", block_config("dspark", own, QWEN, **chosen), tensors)
    weights = {each: tensor.double() for each, tensor in tensors.items()}
    anchored = settings.get("sample_from_anchor", True)
    rows, first = rows_of(weights, QWEN, settings, own), 0 if anchored else 1

    def linear(part: str, given: torch.Tensor) -> torch.Tensor:
        return given @ weights[f"{part}.weight"].T + weights[f"{part}.bias"]

    def wanted(path: list[int]) -> torch.Tensor:
        tokens = [TEXT[-1], *path]
        # The training of speculators runs the recurrent head over the first row as well.
        steps = [(token, rows[first + number]) for number, token in enumerate(tokens)]
        if variant == "rnn" and own and not anchored:
            steps.insert(0, (TEXT[-1], rows[0]))
        state, made = torch.zeros(rank, dtype=torch.float64), torch.empty(0)
        for token, row in steps:
            before = weights["markov_head.markov_w1.weight"][token]
            made = before
            if variant == "gated":
                made = linear("markov_head.gate_proj", torch.cat((row, before))).sigmoid() * before
            elif variant == "rnn":
                gate, fresh, output = linear("markov_head.joint_proj", torch.cat((state, before, row))).chunk(3)
                state = gate.sigmoid() * state + (1 - gate.sigmoid()) * fresh.tanh()
                made = output.tanh()
        return projected(weights, rows[first + len(path)]) + made @ weights["markov_head.markov_w2.weight"].T

    check(folder, wanted)
    head, _ = found_logits(folder, [8], [1])
    assert isinstance(head, DSparkHead)
    memory = head.begin()
    states = dict(zip(head.taps, states_of(TEXT[:-1], TAPS), strict=True))
    head.read(memory, states, torch.tensor(TEXT[1:]), np.arange(8))
    expected = [1.0]
    for node in range(1, len(TREE)):
        parent = TREE.parents[node]
        before = weights["markov_head.markov_w1.weight"][TREE.tokens[parent]]
        given = torch.cat((rows[first + TREE.depths[node] - 1], before))
        expected.append(float(linear("confidence_head.proj", given).sigmoid()) * expected[parent])
    assert np.allclose(head.confidence(memory, TREE), expected, atol=1e-12)


def test_mtp_layers_of_speculators(tmp_path: Path) -> None:
    prefix = "mtp_layers.0."
    sizes = sizes_of(QWEN, prefix, 32) | {f"{prefix}input_proj.weight": (32, 64)}
    sizes |= {f"{prefix}{each}_layernorm.weight": (32,) for each in ("hidden", "token", "final")}
    tensors = tensors_of(sizes)
    folder = write(tmp_path / "head", speculators("mtp", QWEN, num_nextn_predict_layers=1), tensors)
    weights = {each: tensor.double() for each, tensor in tensors.items()}

    def wanted(path: list[int]) -> torch.Tensor:
        tokens, features = TEXT[1:], TARGET.final_norm(states_of(TEXT[:-1], [-1])[0])
        for number in range(len(path) + 1):
            both = (
                norm(embedding(weights)(tokens), weights[f"{prefix}token_layernorm.weight"]),
                norm(features, weights[f"{prefix}hidden_layernorm.weight"]),
            )
            stream = torch.cat(both, dim=1) @ weights[f"{prefix}input_proj.weight"].T
            rows, places = norm(stream, weights[f"{prefix}input_layernorm.weight"]), torch.arange(len(tokens))
            seen = causal(places, None)
            stream = stream + attention(weights, prefix, QWEN, rows, rows, (places, places), seen)
            last = norm(mlp(weights, prefix, stream), weights[f"{prefix}final_layernorm.weight"])[-1:]
            if number < len(path):
                tokens, features = [*tokens, path[number]], torch.cat((features, last))
        return TARGET.project(last)[0].double()

    check(folder, wanted)


FOLDERS: dict[str, Callable[[], tuple[dict[str, Any], Any]]] = {
    "eagle-3": lambda: (
        speculators("eagle3", QWEN | SLIDING, draft_vocab_size=OUTPUTS, **ids()), eagle_tensors(QWEN, {})
    ),
    "p-eagle": lambda: (p_eagle_config(), eagle_tensors(QWEN, {"mask": True}, own=True)),
    "dflash": lambda: (block_config("dflash", False, QWEN), block_tensors(QWEN)),
    "dspark": lambda: (
        block_config("dspark", True, QWEN, markov_rank=6, draft_vocab_size=OUTPUTS, **ANCHORED),
        block_tensors(QWEN, outputs=OUTPUTS, rank=6),
    ),
}  # fmt: skip


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_is_recognised_and_its_drafts_change_nothing(kind: str, tree: bool, tmp_path: Path) -> None:
    drafter = published_drafter(str(write(tmp_path / "head", *FOLDERS[kind]())))
    assert isinstance(drafter, TrainedDrafter) and drafter.kind.kind == kind
    if tree:
        drafter = replace(drafter, length=type(drafter).length, tree_policy=EAGLE2(nodes=6, width=2, depth=3))
    prompts = [[1, 2, 3], [5] * 9, [7]]
    check_identical(TARGET, prompts, drafter=drafter, max_new_tokens=8, seeds=(0,), tested="drafted")


def test_unsure_drafts_of_dspark_are_cut(tmp_path: Path) -> None:
    head = str(write(tmp_path / "head", *FOLDERS["dspark"]()))

    def drafted(row: float = 0.01, **settings: float | None) -> int:
        engine = Engine(TARGET, pass_seconds=lambda context: 1.0 + row * np.arange(512))
        seq = engine.submit(Request(TEXT, max_new_tokens=12, drafter=DSpark(head, **settings), return_draft_trees=True))
        engine.run([seq])
        return sum(len(step.tree.tokens) - 1 for step in seq.trace.steps if step.tree)

    assert drafted(min_confidence=0.9) < drafted(min_confidence=0.6) < drafted()
    # By prices, nothing stays where a row costs more than a pass, and everything where rows are free.
    prices = [drafted(row, min_confidence=None) for row in (0.0, 1.0, 2.0, 3.0, 4.0, 1000.0)]
    assert prices[0] == drafted() and prices[-1] == 0 and prices == sorted(prices, reverse=True)
    assert len({*prices}) > 2, prices


def test_as_many_nodes_stay_as_give_most_tokens_per_second() -> None:
    """Against all cuts of a chain, one by one."""
    random = np.random.default_rng(3)
    for _ in range(50):
        own, row = random.random(6), random.random()
        chances = np.concatenate(([1.0], own.cumprod()))
        budget = Budget(6, 6, pass_seconds=lambda context, row=row: 1 + row * np.arange(64))
        rates = [chances[: size + 1].sum() / (1 + row * (1 + size)) for size in range(7)]
        assert _paying(chances, budget).tolist() == [node <= int(np.argmax(rates)) for node in range(7)]


def test_a_head_without_confidence_cuts_nothing_in_silence() -> None:
    tensors, settings = DSparkHead.untrained(TARGET, 0)
    tensors = {name: each for name, each in tensors.items() if not name.startswith("confidence")}
    for least in (0.5, None):
        with pytest.raises(SettingsError, match="needs a head with a confidence head, and this one has none"):
            DSpark(TrainedHead("dspark", tensors, settings), min_confidence=least)


IDS = {"mask_token_id": MASK, "target_layer_ids": [0, 2, 4]}


@pytest.mark.parametrize(
    ("kind", "config", "tensors", "error", "words"),
    [
        ("dflash", {"dflash_config": {"mask_token_id": 99, "target_layer_ids": [0, 2, 4]}}, {}, CorruptFile, "id = 99"),
        ("dflash", {"dflash_config": {"target_layer_ids": [0, 2, 4]}}, {}, CorruptFile, "no field mask_token_id"),
        (
            "dflash",
            {"dflash_config": {}, "num_target_layers": None},
            {},
            CorruptFile,
            "target_layer_ids nor num_target",
        ),
        ("dflash", {"dflash_config": {"projector_type": "domino"}}, {}, UnsupportedModel, "no layout"),
        ("dflash", {"block_size": None}, {}, CorruptFile, "no field block_size"),
        ("dflash", {"dflash_config": IDS | {"block_size": 8}}, {}, CorruptFile, "block_size is 4, and dflash_config"),
        ("dflash", {"dflash_config": IDS | {"value_scale": 0.6}}, {}, UnsupportedModel, "the field value_scale = 0.6"),
        ("dflash", {"dflash_config": IDS | {"causal": True}}, {}, UnsupportedModel, "causal = True is not supported"),
        ("dflash", {"is_causal": True}, {}, UnsupportedModel, "is_causal = True is not supported"),
        ("dflash", {"is_neox_style": False}, {}, UnsupportedModel, "is_neox_style = False"),
        (
            "dflash",
            {"dflash_config": IDS | {"swa_window_size": 5}, "sliding_window": 4},
            {},
            CorruptFile,
            "sliding_window is 4, and swa_window_size is 5",
        ),
        ("dflash", {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, {}, CorruptFile, "other states than"),
        ("dflash", {"quantization_config": {"quant_method": "fp8"}}, {}, UnsupportedModel, "the head is quantized"),
        ("dspark", {"sample_from_anchor": None}, {}, CorruptFile, "no field sample_from_anchor"),
        ("eagle-3", {"is_causal": False}, {}, UnsupportedModel, "is_causal = False"),
        ("eagle-3", {"use_swa": True}, {}, UnsupportedModel, "use_swa = True"),
        ("dflash", {"block_size": 1}, {}, CorruptFile, "leaves no token"),
        ("dflash", {}, {"layers.0.self_attn.g_proj.weight": torch.ones(2)}, UnsupportedModel, "g_proj"),
        ("dflash", {"layer_types": ["sliding_attention"] * 2}, {}, UnsupportedModel, "layer_types"),
        ("dspark", {"markov_head_type": "deep"}, {}, UnsupportedModel, "markov_head_type = 'deep'"),
        ("dspark", {"markov_rank": 5}, {}, CorruptFile, r"markov_w1.weight is \[64, 6\]"),
        ("eagle-3", {"norm_before_fc": True, "fc_norm": True}, {}, CorruptFile, "both set"),
        ("p-eagle", {"mask_token_id": None}, {}, CorruptFile, "no field mask_token_id"),
        ("p-eagle", {"cod_ratio": 0.5}, {}, UnsupportedModel, "the field cod_ratio"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(
    kind: str, config: dict[str, Any], tensors: Any, error: type[Exception], words: str, tmp_path: Path
) -> None:
    own, given = FOLDERS[kind]()
    with pytest.raises(error, match=words):
        TrainedHead.load(write(tmp_path / "head", own | config, given | tensors))


def test_a_head_for_a_target_of_another_shape_is_refused(tmp_path: Path) -> None:
    for kind, other, words in (
        ("dflash", tiny_transformer(0, num_layers=7), "for a model of 6 layers, and this one has 7"),
        ("dspark", tiny_transformer(0, num_layers=6, hidden_size=48), "for a model of width 32, and this one has 48"),
        ("eagle-3", tiny_transformer(0, num_layers=4), "use what was made for it: there is no state after layer 5"),
        ("dflash", tiny_transformer(0, num_layers=6, vocab_size=80), "for a model of 64 tokens, and this one has 80"),
    ):
        drafter = published_drafter(str(write(tmp_path / kind, *FOLDERS[kind]())))
        with pytest.raises(SettingsError, match=words):
            Engine(other).submit(Request([1], drafter=drafter))


@pytest.mark.parametrize("kind", FOLDERS)
def test_texts_that_wait_share_a_pass_of_the_head(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = published_drafter(str(write(tmp_path / "head", *FOLDERS[kind]())))
    sizes, whole = [], HeadPass.forward

    def counted(self: HeadPass, batch: Batch, **settings: Any) -> Scores:
        sizes.append(len(batch.segments))
        return whole(self, batch, **settings)

    monkeypatch.setattr(HeadPass, "forward", counted)

    def trees(prompts: list[list[int]]) -> list[list[list[int]]]:
        engine = Engine(TARGET)
        texts = [
            engine.submit(Request(prompt, max_new_tokens=6, drafter=drafter, return_draft_trees=True))
            for prompt in prompts
        ]
        engine.run(texts)
        return [[list(step.tree.tokens) for step in seq.trace.steps if step.tree] for seq in texts]

    prompts = [[1, 2, 3], [5] * 9, [7]]
    together = trees(prompts)
    assert max(sizes) == 3
    # A text alone needs no engine for its head.
    passes = len(sizes)
    assert together == [trees([prompt])[0] for prompt in prompts]
    assert len(sizes) == passes


def test_a_folder_names_its_drafter(tmp_path: Path) -> None:
    folder = str(write(tmp_path / "head", *FOLDERS["dflash"]()))
    for spec in (folder, f"published:{folder}", f"dflash:head={folder}"):
        assert isinstance(resolve_drafter(spec), DFlash)
    with pytest.raises(SettingsError, match="a head for dflash, not for eagle-3: use the drafter dflash"):
        resolve_drafter(f"eagle-3:head={folder}")
    with pytest.raises(SettingsError, match="published needs the folder"):
        resolve_drafter("published")
    with from_network(), pytest.raises(NotTrusted, match="not for requests from a network"):
        resolve_drafter(folder)
