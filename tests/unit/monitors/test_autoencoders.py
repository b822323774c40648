"""Sparse autoencoders in the folders of SAELens and sparsify, and steering by their features."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from decodery.core.errors import CorruptFile, ModelNotFound, SettingsError, UnsupportedModel
from decodery.models.batch import Batch, Segment
from decodery.monitors.feature import Feature
from decodery.monitors.sparse_autoencoder import SparseAutoencoder, site_of
from decodery.testing import decode, tiny_transformer, to_int8
from decodery.training.autoencoder import AutoencoderSettings, measured, train_autoencoder
from methods import untrained_autoencoder

WIDTH, FEATURES, HOOK = 32, 12, "blocks.1.hook_resid_post"
EXACT = to_int8(tiny_transformer(0))


def draws(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def saelens(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    """A folder as SAELens 6 writes it."""
    own = {"W_enc": (WIDTH, FEATURES), "b_enc": (FEATURES,), "W_dec": (FEATURES, WIDTH), "b_dec": (WIDTH,)}
    made = {name: draws(*shape, seed=number) for number, (name, shape) in enumerate(own.items())}
    folder.mkdir()
    save_file(
        {name: each for name, each in (made | (tensors or {})).items() if each.numel()},
        folder / "sae_weights.safetensors",
    )
    about = {"architecture": "standard", "d_in": WIDTH, "d_sae": FEATURES, "metadata": {"hook_name": HOOK}}
    (folder / "cfg.json").write_text(json.dumps(about | config))
    return folder


def expected(config: dict[str, Any], t: dict[str, torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations and reconstruction by the formulas of SAELens, feature by feature."""
    mean, spread = torch.zeros(len(x), 1), torch.ones(len(x), 1)
    if config.get("normalize_activations") == "layer_norm":
        mean = x.mean(dim=-1, keepdim=True)
        spread = (x - mean).std(dim=-1, keepdim=True)
        x = (x - mean) / (spread + 1e-5)
    kind, given = config.get("architecture", "standard"), x - t["b_dec"] * config.get("apply_b_dec_to_input", True)
    pre = torch.stack([sum(given[:, i] * t["W_enc"][i, f] for i in range(WIDTH)) for f in range(FEATURES)], dim=1)
    if kind == "gated":
        gate, size = pre + t["b_gate"], pre * t["r_mag"].exp() + t["b_mag"]
        active = (gate > 0) * size.relu()
    elif kind == "jumprelu":
        active = (pre + t["b_enc"]).relu() * (pre + t["b_enc"] > t["threshold"].relu())
    else:
        active = (pre + t["b_enc"]).relu()
    norms = t["W_dec"].norm(dim=1)
    scaled = config.get("rescale_acts_by_decoder_norm", False)
    if scaled:
        active = active * norms
    if kind == "topk":
        least = active.sort(dim=1, descending=True).values[:, config["k"] - 1 : config["k"]]
        active = active * (active >= least)
    out = (active / norms if scaled else active) @ t["W_dec"] + t["b_dec"]
    return active, out * spread + mean


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"apply_b_dec_to_input": False, "normalize_activations": "layer_norm"},
        {"architecture": "topk", "k": 3},
        {"architecture": "topk", "k": 4, "rescale_acts_by_decoder_norm": True},
        {"architecture": "jumprelu"},
        {"architecture": "gated"},
    ],
)
def test_folders_of_saelens_give_its_activations(config: dict[str, Any], tmp_path: Path) -> None:
    further: dict[str, torch.Tensor] = {}
    if config.get("architecture") == "jumprelu":
        further = {"threshold": draws(FEATURES, seed=8)}
    if config.get("architecture") == "gated":
        further = {name: draws(FEATURES, seed=at) for at, name in enumerate(("b_gate", "r_mag", "b_mag"), 8)}
        further["b_enc"] = torch.zeros(0)
    folder, rows = saelens(tmp_path / "sae", further, **config), draws(6, WIDTH, seed=5) + 0.5
    found = SparseAutoencoder.load(folder)
    from safetensors.torch import load_file

    active, out = expected(config, load_file(folder / "sae_weights.safetensors"), rows)
    torch.testing.assert_close(found.encode(rows), active, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.decode(found.encode(rows), rows), out, rtol=1e-4, atol=1e-4)
    assert found.site == "resid_post.1" and 0 < (active > 0).float().mean() < 1
    # One row alone has the bits that it has among others.
    assert found.encode(rows[2:3]).equal(found.encode(rows[2:3].clone()))


@pytest.mark.parametrize("activation", ["topk", "groupmax"])
def test_folders_of_sparsify_give_its_activations(activation: str, tmp_path: Path) -> None:
    folder = tmp_path / "layers.1"
    folder.mkdir()
    weight, bias, out, shift = (draws(*shape) for shape in ((12, WIDTH), (12,), (12, WIDTH), (WIDTH,)))
    tensors = {"encoder.weight": weight, "encoder.bias": bias, "W_dec": out, "b_dec": shift}
    save_file(tensors, folder / "sae.safetensors")
    (folder / "cfg.json").write_text(json.dumps({"activation": activation, "k": 4, "d_in": WIDTH, "num_latents": 12}))
    found, rows = SparseAutoencoder.load(folder), draws(5, WIDTH, seed=3)
    wanted = torch.nn.functional.linear(rows - shift, weight, bias).relu()
    for row, active in zip(wanted, found.encode(rows), strict=True):
        if activation == "topk":
            kept = set(row.topk(4).indices.tolist())
        else:
            kept = {group * 3 + int(row[group * 3 : group * 3 + 3].argmax()) for group in range(4)}
        for feature in range(12):
            assert float(active[feature]) == pytest.approx(float(row[feature]) * (feature in kept), abs=1e-5)
    assert (
        found.site == "resid_post.1" and site_of("layers.3.mlp") == "mlp_out.3" and site_of("h.2.attn") == "attn_out.2"
    )


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    made = untrained_autoencoder()
    for number, site in enumerate(("resid_post.1", "mlp_out.0", "head_out.1")):
        for activation, k in (("relu", 0), ("topk", 3)):
            whole = SparseAutoencoder(made.encoder, made.bias, made.decoder, made.shift, activation, k, site=site)
            whole.save(tmp_path / f"{activation}{number}")
            again = SparseAutoencoder.load(tmp_path / f"{activation}{number}")
            rows = draws(4, WIDTH)
            assert again.site == site and again.encode(rows).equal(whole.encode(rows))
    # What a later training wrote to the same folder is read, not what was read before.
    replace(whole, bias=whole.bias + 1).save(tmp_path / f"{activation}{number}")
    assert SparseAutoencoder.load(tmp_path / f"{activation}{number}").bias.equal(whole.bias + 1)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"architecture": "temporal"}, "architecture = 'temporal' is not supported"),
        ({"normalize_activations": "expected_average_only_in"}, "normalize_activations = 'expected_average_only_in'"),
        ({"metadata": {"hook_name": HOOK, "hook_head_index": 3}}, "hook_head_index = 3 is not supported"),
        ({"metadata": {"model_from_pretrained_kwargs": {"fold_ln": True}}}, "model_from_pretrained_kwargs"),
        ({"activation_fn": "tanh-relu"}, "activation_fn = 'tanh-relu'"),
        ({"rescale_acts_by_decoder_norm": True}, "rescale_acts_by_decoder_norm = True is not supported"),
    ],
)
def test_what_cannot_be_run_is_refused_by_its_name(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel) as refused:
        SparseAutoencoder.load(saelens(tmp_path / "sae", **config))
    assert said in str(refused.value)


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptFile):
        SparseAutoencoder.load(saelens(tmp_path / "a", {"b_dec": draws(5)}))
    for number, wrong_config in enumerate(({"d_in": 5}, {"d_sae": 5}, {"architecture": "topk", "k": float("inf")})):
        with pytest.raises(CorruptFile, match="does not hold what"):
            SparseAutoencoder.load(saelens(tmp_path / f"config{number}", **wrong_config))
    # A shift as long as the bias, which is not the width.
    with pytest.raises(CorruptFile, match="does not hold what"):
        SparseAutoencoder.load(saelens(tmp_path / "long", {"b_dec": draws(FEATURES)}))
    with pytest.raises(UnsupportedModel, match="has W_skip"):
        SparseAutoencoder.load(saelens(tmp_path / "b", {"W_skip": draws(2, 2)}))
    with pytest.raises(CorruptFile, match="not finite"):
        SparseAutoencoder.load(saelens(tmp_path / "c", {"b_enc": torch.full((FEATURES,), float("nan"))}))
    with pytest.raises(ModelNotFound, match=r"no cfg\.json"):
        SparseAutoencoder.load(tmp_path)
    with pytest.raises(SettingsError, match="does not say which hidden states"):
        SparseAutoencoder.load(saelens(tmp_path / "d", metadata={}))
    assert SparseAutoencoder.load(tmp_path / "d", "mlp_out.0").site == "mlp_out.0"
    for wrong in ((), (FEATURES,), (-1,)):
        with pytest.raises(SettingsError, match="numbers from 0 to 11"):
            Feature(untrained_autoencoder(), wrong)


def test_the_score_is_the_activation_at_the_newest_row_and_steering_adds_directions() -> None:
    prompt, sae = [7, 3, 9, 9, 2, 11], untrained_autoencoder()
    (text,) = decode(EXACT, [prompt], monitors=[Feature(sae, (1, 4))], max_new_tokens=5)
    from decodery.engine.monitoring import monitor_reports

    (report,) = monitor_reports(text)
    rows = EXACT.forward(Batch([Segment.chunk(text.tokens[:-1], EXACT.new_cache())]), taps=[sae.site]).hidden[sae.site]
    wanted = sae.encode(rows[len(prompt) - 1 :])[:, [1, 4]].max(dim=1).values
    assert report.scores == pytest.approx(wanted.tolist(), rel=1e-6)
    (change,) = Feature(sae, (1, 4), 3.0, action="switch").changes("features")
    added = change.change(rows, None) - rows  # type: ignore[arg-type]
    torch.testing.assert_close(added, (3.0 * (sae.decoder[1] + sae.decoder[4])).expand_as(added).to(added.dtype))
    (steered,) = decode(EXACT, [prompt], monitors=[Feature(sae, (1, 4), 8.0, action="switch")], max_new_tokens=5)
    (still,) = decode(EXACT, [prompt], monitors=[Feature(sae, (1, 4), 0.0, action="switch")], max_new_tokens=5)
    assert steered.generated != text.generated == still.generated


def test_it_is_said_where_rows_may_have_had_their_means_taken(tmp_path: Path) -> None:
    about = {"hook_name": HOOK, "model_from_pretrained_kwargs": {"center_writing_weights": False}}
    silent, known = saelens(tmp_path / "silent"), saelens(tmp_path / "known", metadata=about)
    layer_norm = tiny_transformer(0)
    layer_norm.config = replace(layer_norm.config, centred_norms=True)
    with pytest.warns(UserWarning, match="TransformerLens takes the mean"):
        Feature(str(silent), (0,)).fits(layer_norm)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Feature(str(known), (0,)).fits(layer_norm)
        Feature(str(silent), (0,)).fits(EXACT)


def planted(count: int, seed: int) -> torch.Tensor:
    """Rows of three of sixteen directions each."""
    directions, source = draws(16, 24, seed=99), torch.Generator().manual_seed(seed)
    active = torch.rand(count, 16, generator=source).argsort(dim=1)[:, :3]
    weights = torch.zeros(count, 16).scatter_(1, active, torch.rand(count, 3, generator=source) + 0.5)
    return weights @ directions / 5


def test_an_autoencoder_finds_planted_features_and_is_measured_on_other_rows(tmp_path: Path) -> None:
    settings = AutoencoderSettings(features=32, k=3, steps=250, batch=128, lr=1e-2)
    learned, chosen, tested = planted(3000, 1), planted(300, 2), [planted(100, seed) for seed in (3, 4, 5)]
    found = train_autoencoder(learned, chosen, tmp_path, "resid_post.0", settings)
    report = measured(found, tested)
    assert report["L0"] <= 3 and report["unexplained variance"] < 0.25
    low, high = report["interval"]
    assert low <= report["unexplained variance"] <= high
    name, whole = "unexplained variance", torch.cat(tested)
    components, shuffled = report["baselines"].values()
    left = torch.linalg.svdvals(whole - whole.mean(dim=0)).square()[round(report["L0"]) :].sum()
    assert components[name] == pytest.approx(float(left / (whole - whole.mean(dim=0)).square().sum()), abs=1e-3)
    assert components[name] > 0.35 and shuffled[name] > 1 and report["gain"].startswith("fewer than 6")
    assert shuffled["gain"] == pytest.approx(shuffled[name] - report[name], abs=2e-4)
    never = SparseAutoencoder(found.encoder, found.bias - 1e9, found.decoder, found.shift, "relu")
    empty = measured(never, tested)
    assert empty["dead features"] == 1.0 and empty["L0"] == 0 and empty["unexplained variance"] > 0.9
    again = train_autoencoder(learned, chosen, tmp_path, "resid_post.0", settings)
    assert again.encoder.equal(found.encoder)
    for rows, held, more in (
        (learned[1:], chosen, {}),
        (learned.flip(0), chosen, {}),
        (learned, chosen[1:], {}),
        (learned, chosen, {"features": 31}),
    ):
        with pytest.raises(SettingsError, match="other settings or other data"):
            train_autoencoder(rows, held, tmp_path, "resid_post.0", replace(settings, **more))  # type: ignore[arg-type]
