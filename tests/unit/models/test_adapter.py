"""Models of `transformers` after the protocol: same logits, and the laws of the cache hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.models.batch import Batch, Segment
from decodery.models.cache.cache import KVCache
from decodery.models.cuda.graphs import StaticPasses
from decodery.models.layer_plan import LayerPlan
from decodery.models.loaders.load import load
from decodery.models.protocol import LanguageModel
from decodery.models.torch.transformer import Transformer
from decodery.models.transformers import adapter_trial
from decodery.models.transformers.adapter import TransformersModel
from decodery.testing import Oracle, check_identical, check_state, decode, tiny_transformer, to_int8
from tiny_models import (
    TREE_PARENTS,
    VOCAB,
    assert_same_logits,
    make_model,
    random_ids,
    randomize,
    reference,
    save,
    tree_mask,
)

COMMON = {"vocab_size": VOCAB, "bos_token_id": 256, "eos_token_id": 257, "hidden_size": 48, "num_attention_heads": 4}
CONFIGS = {
    "gpt2": {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 128},
    "gpt_neox": {"num_hidden_layers": 3, "intermediate_size": 96, "max_position_embeddings": 128},
    "helium": {
        "num_hidden_layers": 2, "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 12, "pad_token_id": None,
    },
    "smollm3": {"num_hidden_layers": 4, "intermediate_size": 96, "num_key_value_heads": 2, "pad_token_id": None},
    "gemma2": {
        "num_hidden_layers": 2, "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 12, "sliding_window": 5,
        "pad_token_id": None,
    },
}  # fmt: skip


def make(kind: str, **changes: object) -> transformers.PreTrainedModel:
    config = transformers.AutoConfig.for_model(kind, **(COMMON | CONFIGS[kind] | changes))
    return randomize(transformers.AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_equal_a_plain_call(kind: str) -> None:
    theirs = make(kind)
    ours = TransformersModel(theirs)
    assert isinstance(ours, LanguageModel)
    assert_same_logits(ours, theirs)


def test_our_own_transformer_agrees_with_the_adapter() -> None:
    theirs = make_model("gemma3_text")
    assert_same_logits(TransformersModel(theirs), theirs)


@pytest.fixture(scope="module", params=["gpt2", "gpt_neox"])
def model(request: pytest.FixtureRequest) -> TransformersModel:
    return TransformersModel(make(request.param))


def _prefilled(model: TransformersModel, ids: np.ndarray) -> KVCache:
    cache = model.new_cache()
    model.forward(Batch([Segment.chunk(ids, cache, logit_rows=[])]))
    cache.keep(range(len(ids)))
    return cache


def _assert_same_state(cache: KVCache, fresh: KVCache) -> None:
    assert cache.next_position == fresh.next_position
    np.testing.assert_array_equal(cache.lengths, fresh.lengths)
    n = cache.length
    np.testing.assert_array_equal(cache.positions[:, :n], fresh.positions[:, :n])
    assert (cache.data[:, :, :, :n] - fresh.data[:, :, :, :n]).abs().max() < 1e-5


@pytest.mark.parametrize("path", [[0], [0, 1], [0, 2, 5], [0, 1, 3, 6, 8], []])
def test_kept_paths_leave_the_state_of_a_fresh_prefill(model: TransformersModel, path: list[int]) -> None:
    ids, nodes, mask = random_ids(7), random_ids(len(TREE_PARENTS), seed=3), tree_mask(TREE_PARENTS)
    cache = _prefilled(model, ids)
    model.forward(Batch([Segment(7 + mask.sum(axis=1) - 1, tokens=nodes, mask=mask, cache=cache)]))
    cache.keep(path)
    _assert_same_state(cache, _prefilled(model, np.concatenate([ids, nodes[path]])))


def test_a_tree_that_grows_over_passes_is_the_tree_in_one(model: TransformersModel) -> None:
    ids, nodes, mask = random_ids(7), random_ids(len(TREE_PARENTS), seed=3), tree_mask(TREE_PARENTS)
    positions, cache, grown = 7 + mask.sum(axis=1) - 1, _prefilled(model, ids), _prefilled(model, ids)
    expected = model.forward(Batch([Segment(positions, nodes, mask=mask, cache=cache)])).logits
    rows = []
    for retained, stop in ((0, 2), (2, 3), (3, len(nodes))):
        new = slice(retained, stop)
        step = Segment(positions[new], nodes[new], mask=mask[new, :stop], cache=grown, retained=retained)
        rows.append(model.forward(Batch([step])).logits)
    assert (torch.cat(rows) - expected).abs().max() < 1e-4
    grown.keep([0, 2, 5])
    _assert_same_state(grown, _prefilled(model, np.concatenate([ids, nodes[[0, 2, 5]]])))


@pytest.mark.parametrize("kind", ["adapter", "transformer", "int8", "static"])
def test_taps_are_counted_from_either_end(kind: str, model: TransformersModel) -> None:
    ours: LanguageModel = model if kind == "adapter" else tiny_transformer(num_layers=3)
    if kind == "int8":
        ours = to_int8(tiny_transformer(num_layers=3))
    elif kind == "static":
        assert isinstance(ours, Transformer)
        ours.static = StaticPasses()
    batch, last = Batch([Segment.chunk([1, 2, 3], ours.new_cache())]), ours.config.num_layers
    with torch.no_grad():
        scores = ours.forward(batch, taps=(0, -1, last, -last - 1, -2, last - 1))
    assert scores.hidden_of(0, -1).shape == (3, ours.config.hidden_size)
    for left, right in ((-1, last), (-2, last - 1), (-last - 1, 0)):
        assert torch.equal(scores.hidden_of(0, left), scores.hidden_of(0, right))
    assert not torch.equal(scores.hidden_of(0, -1), scores.hidden_of(0, -2))
    for tap in (last + 1, -last - 2):
        with pytest.raises(SettingsError, match=f"no state after layer {tap} of {last}"):
            ours.forward(batch, taps=(tap,))


def test_a_layer_that_does_not_run_has_no_state() -> None:
    ours = tiny_transformer(num_layers=3)
    batch = Batch([Segment(np.arange(2), np.array([1, 2]))])
    assert ours.forward(batch, taps=(0, 1), layer_plan=LayerPlan((0, 2))).hidden.keys() == {0, 1}
    with pytest.raises(SettingsError, match="leaves that layer out"):
        ours.forward(batch, taps=(2,), layer_plan=LayerPlan((0, 2)))


def test_truncated_caches_go_on_as_if_nothing_had_followed(model: TransformersModel) -> None:
    ids = random_ids(12)
    cache = _prefilled(model, ids)
    cache.truncate(5)
    _assert_same_state(cache, _prefilled(model, ids[:5]))
    logits = model.forward(Batch([Segment.chunk([3], cache)])).logits
    expected = reference(model.hf_model, np.append(ids[:5], 3))[-1]
    assert (logits[0] - expected).abs().max() < 1e-4


def test_forks_do_not_see_each_other(model: TransformersModel) -> None:
    ids = random_ids(6)
    cache = _prefilled(model, ids)
    clone = cache.fork()
    for branch, token in ((cache, 11), (clone, 12)):
        model.forward(Batch([Segment.chunk([token], branch)]))
        branch.keep([0])
    for branch, token in ((cache, 11), (clone, 12)):
        _assert_same_state(branch, _prefilled(model, np.append(ids, token)))


def test_ragged_batches_equal_single_segments(model: TransformersModel) -> None:
    first, second = random_ids(9), random_ids(4, seed=8)
    batch = Batch(
        [
            Segment.chunk(first, model.new_cache(), logit_rows=[8, 0]),
            Segment.chunk(second, model.new_cache()),
            Segment(np.arange(3), tokens=first[:3]),
        ]
    )
    scores = model.forward(batch, taps=(0, 1, 3))
    whole, other = reference(model.hf_model, first), reference(model.hf_model, second)
    assert (scores.of(0) - whole[[8, 0]]).abs().max() < 1e-4
    assert (scores.of(1) - other).abs().max() < 1e-4
    assert (scores.of(2) - whole[:3]).abs().max() < 1e-4
    with torch.inference_mode():
        states = model.hf_model(torch.from_numpy(first)[None], output_hidden_states=True).hidden_states
    for tap in (0, 1):
        assert (scores.hidden_of(0, tap) - states[tap][0]).abs().max() < 1e-4
    # The last state that transformers shows is after the final norm; a tap is before it.
    norm = next(
        module for name, module in model.hf_model.named_modules() if name.endswith(("ln_f", "final_layer_norm"))
    )
    with torch.inference_mode():
        assert (norm(scores.hidden_of(0, 3)) - states[3][0]).abs().max() < 1e-4


@pytest.mark.integration
def test_trees_are_exact_beyond_the_first_growth_and_after_forks() -> None:
    model = TransformersModel(make("gpt2", n_positions=400).double())
    (plain,) = decode(model, [[1, 2, 3]], max_new_tokens=290)
    oracle = Oracle(tuple(plain.tokens))
    check_identical(model, [[1, 2, 3]], drafter=oracle, seeds=(0,), max_new_tokens=290)
    check_state(model, [[1, 2, 3, 4, 5]], drafter=oracle, max_new_tokens=8)


def test_embeddings_stand_in_for_tokens(model: TransformersModel) -> None:
    ids = random_ids(6)
    rows = model.hf_model.get_input_embeddings()(torch.from_numpy(ids)).detach()
    logits = model.forward(Batch([Segment(np.arange(6), states=rows)])).logits
    assert (logits - reference(model.hf_model, ids)).abs().max() < 1e-4


class MaskBlind(transformers.GPT2LMHeadModel):
    """Makes its own causal mask, whatever it is given."""

    def forward(self, input_ids=None, past_key_values=None, position_ids=None, attention_mask=None, **options):
        return super().forward(
            input_ids=input_ids, past_key_values=past_key_values, position_ids=position_ids, **options
        )


def test_models_that_ignore_masks_may_draft_chains_but_not_trees() -> None:
    config = transformers.GPT2Config(**(COMMON | CONFIGS["gpt2"]))
    theirs = randomize(MaskBlind(config))
    ours = TransformersModel(theirs)
    ids = random_ids(9)
    cache = ours.new_cache()
    logits = ours.forward(Batch([Segment.chunk(ids, cache)])).logits
    assert (logits - reference(theirs, ids)).abs().max() < 1e-4
    cache.keep(range(9))
    mask = tree_mask([-1, 0, 0])
    with pytest.raises(UnsupportedModel, match="propose chains"):
        ours.forward(Batch([Segment(np.array([9, 10, 10]), tokens=ids[:3], mask=mask, cache=cache)]))
    assert cache.length == 9


class SlotWindow(transformers.GPT2LMHeadModel):
    """Shows every row the last few slots before its own, whatever positions they have, on top of the mask it is given.

    `attention_window` of its configuration says how many.
    """

    def forward(self, input_ids=None, past_key_values=None, position_ids=None, attention_mask=None, **options):
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        rows = (input_ids if input_ids is not None else options["inputs_embeds"]).shape[1]
        own, slots = past + torch.arange(rows)[:, None], torch.arange(past + rows)
        hidden = (slots > own) | (slots <= own - self.config.attention_window)
        mask = torch.zeros(1, 1, rows, past + rows, dtype=self.dtype).masked_fill(hidden, torch.finfo(self.dtype).min)
        return super().forward(
            input_ids=input_ids, past_key_values=past_key_values, position_ids=position_ids,
            attention_mask=mask if attention_mask is None else torch.minimum(mask, attention_mask), **options,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [7, 700])
def test_windows_that_count_slots_leave_chains_alone(window: int, dtype: torch.dtype) -> None:
    config = transformers.GPT2Config(**(COMMON | CONFIGS["gpt2"] | {"n_positions": 1024}), attention_window=window)
    ours = TransformersModel(randomize(SlotWindow(config)).to(dtype))
    assert not ours.capabilities.trees
    # In low precision passes of other sizes may round a near-tie otherwise.
    for drafter in ("auto", "token-recycling") if dtype == torch.float32 else ():
        check_identical(ours, [[1, 2, 3] * 5], drafter=drafter, seeds=(0,), max_new_tokens=12, tested="nothing")
    config.attention_window = 1024
    assert TransformersModel(randomize(SlotWindow(config)).to(dtype)).capabilities.trees


def test_windows_too_long_to_be_tried_leave_chains_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = make("gemma2", sliding_window=600, max_position_embeddings=1024)
    assert TransformersModel(theirs).capabilities.trees
    monkeypatch.setattr(adapter_trial, "_FREE_BYTES", 1 << 16)
    assert not TransformersModel(theirs).capabilities.trees


def test_texts_end_where_all_keys_would_have_to_be_rotated_anew() -> None:
    factors = [1.0 + n for n in range(6)]
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors, "long_factor": factors}
    sizes = COMMON | {"num_hidden_layers": 1, "intermediate_size": 32, "num_key_value_heads": 4, "pad_token_id": 0}
    config = transformers.Phi3Config(
        **sizes, max_position_embeddings=512, original_max_position_embeddings=128, rope_parameters=rope
    )
    theirs = randomize(transformers.Phi3ForCausalLM(config))
    assert TransformersModel(theirs).config.max_positions == 128


def test_plans_that_leave_layers_out_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="all of its layers"):
        ours = TransformersModel(make("gpt2"))
        ours.forward(Batch([Segment.chunk([1], ours.new_cache())]), layer_plan=LayerPlan((0,)))


def test_folders_only_transformers_knows_are_loaded_through_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    theirs = make("helium")
    folder = save(theirs, tmp_path / "model")
    loaded = load(folder, device="cpu")
    assert loaded.dtype == "float32"
    assert loaded.tokenizer.eos_ids == (257,)
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("hé 🎉")) == "hé 🎉"
    assert_same_logits(loaded.model, theirs)
    with pytest.raises(SettingsError, match="int8"):
        load(folder, dtype="int8", device="cpu")
    (folder / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(UnsupportedModel, match="no-such-model") as caught:
        load(folder, device="cpu")
    assert "\n" not in str(caught.value)
