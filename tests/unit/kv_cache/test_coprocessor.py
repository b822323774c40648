"""The cache coprocessor: what it adds, what it leaves alone, and what it learns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from decodery.core.errors import CorruptFile, PromptError, SettingsError, UnsupportedModel
from decodery.kv_cache.coprocessor import Augmented, Coprocessor
from decodery.models.batch import Batch, Segment
from decodery.models.torch.transformer import Transformer
from decodery.models.trained.artifact import Artifact
from decodery.models.trained.coprocessors import CoprocessorWeights, adapted, latents
from decodery.step.forward_request import run_sync
from decodery.testing import decode, tiny_transformer, to_int8
from decodery.training.coprocessor import CoprocessorRecipe, CoprocessorTrainee
from decodery.training.kind import Run
from decodery.training.one_by_one import train_beside
from tiny_models import tiny_loaded

MODEL = tiny_transformer(0)
EXACT = to_int8(MODEL)
PROMPT = np.random.default_rng(4).integers(0, 64, 30).tolist()
TEXT = np.random.default_rng(5).integers(0, 64, 9).tolist()


def weights(n: int = 3, static: bool = False) -> CoprocessorWeights:
    draws = torch.Generator().manual_seed(0)
    embeddings = torch.randn(n, MODEL.config.hidden_size, generator=draws, dtype=torch.float64)
    made = CoprocessorWeights.initial(MODEL.config, embeddings, 4, static)
    if not static:
        made.tensors["up"].normal_(generator=draws)
    return made


def behind(kv: Coprocessor, model: Any, prompt: list[int], text: list[int]) -> torch.Tensor:
    """Logits of the first token after a prompt, and of those after each token of a text there."""
    cache, first = model.new_cache(), len(prompt) // 3
    cache.policy = kv.state(model, len(prompt))
    model.forward(Batch([Segment.chunk(prompt[:first], cache)]))
    cache.keep(range(first))
    own = model.forward(Batch([Segment.chunk(prompt[first:], cache)])).logits[-1:]
    seq = SimpleNamespace(cache=cache, request=SimpleNamespace(prompt_length=len(prompt), model=model))
    opened = run_sync(kv.open(seq, len(prompt) - first))  # type: ignore[arg-type]
    cache.keep(range(len(prompt) - first))
    assert cache.next_position == cache.length == len(prompt), "nothing of the double is in the cache"
    after = model.forward(Batch([Segment.chunk(text, cache)])).logits
    return torch.cat((own if opened is None else opened, after))


@pytest.mark.parametrize("count", [None, 2])
def test_latents_are_read_as_if_they_were_text(count: int | None) -> None:
    made = weights()
    m, n = count or 3, len(PROMPT)
    found = behind(Coprocessor(made, latents=count), MODEL, PROMPT, TEXT)
    cache = MODEL.new_cache()
    MODEL.forward(Batch([Segment.chunk(PROMPT, cache)]))
    cache.keep(range(n))
    soft = Segment(
        np.arange(n, n + m), None, made.tensors["soft"][:m], cache=cache, interventions=adapted(made.tensors)
    )
    states = MODEL.forward(Batch([soft]), taps=[2]).hidden[2]
    rows = torch.cat((latents(made.tensors, states), MODEL.embed_tokens(torch.tensor(TEXT))))
    # The paper's positions: latents after the prompt, the text after the latents.
    places = n + np.arange(len(rows))
    wanted = MODEL.forward(Batch([Segment(places, None, rows, cache=cache)])).logits[m - 1 :]
    # Rotations are turned back in double precision, where a pass has tables of single precision.
    assert torch.allclose(found, wanted, atol=1e-5)
    plain = behind(Coprocessor(made, latents=0), MODEL, PROMPT, TEXT)
    assert all(not torch.allclose(*rows, atol=1e-2) for rows in zip(plain, found, strict=True))
    # Text whose positions latents do not move reads something else.
    cache.keep([])
    unmoved = np.concatenate((n + np.arange(m), n + np.arange(len(TEXT))))
    other = MODEL.forward(Batch([Segment(unmoved, None, rows, cache=cache)])).logits[m - 1 :]
    assert torch.allclose(other[0], found[0], atol=1e-9) and not torch.allclose(other[1:], found[1:], atol=1e-3)


def test_latents_give_the_first_token_and_none_leave_the_model_as_it_is() -> None:
    with_it, without, none = (
        decode(EXACT, [PROMPT], cache_policy=kv, max_new_tokens=12)[0]
        for kv in (Coprocessor(weights()), None, Coprocessor(weights(), latents=0))
    )
    large = weights()
    large.tensors["base"].mul_(1000.0)
    (moved,) = decode(EXACT, [PROMPT], cache_policy=Coprocessor(large), max_new_tokens=1)
    assert moved.generated != without.generated[:1], "latents that are large enough change the first token"
    assert with_it.generated != without.generated
    assert none.generated == without.generated
    assert all(none.cache.view(1)[part].equal(without.cache.view(1)[part]) for part in (0, 1)), "to the bit"
    state = with_it.cache.policy
    assert isinstance(state, Augmented) and state.bytes == with_it.cache.pages.read(0, 3).nbytes


@pytest.mark.integration
def test_it_learns_what_follows_and_nothing_else_does(tmp_path: Path) -> None:
    loaded = tiny_loaded()
    before = {name: each.clone() for name, each in vars(loaded.model.weights).items() if torch.is_tensor(each)}  # type: ignore[attr-defined]
    texts = [[*np.random.default_rng(seed).integers(0, 200, 8).tolist(), *range(7, 15)] for seed in range(8)]
    for static in (False, True):
        recipe = CoprocessorRecipe(steps=40, lr=0.05, latents=2, ahead=4, rank=3, static=static)
        out = tmp_path / str(static)
        found = train_beside(Run(loaded, out), CoprocessorTrainee(loaded, recipe), texts)
        alone, trained = (sum(found.facts[f"nats by place, {name}"]) for name in ("alone", "trained"))
        assert trained < alone - 0.4, "what follows every prompt is foreseen"
        again = CoprocessorWeights.load(out)
        assert again.static is static and all(again.tensors[name].equal(each) for name, each in found.tensors.items())
        # What it learned under is what it is used under.
        trainee = CoprocessorTrainee(loaded, recipe)
        for name, tensor in trainee.tensors.items():
            tensor.data.copy_(found.tensors[name])
        tokens = texts[0]
        at = trainee.prompt(tokens)
        with torch.no_grad():
            past = trainee.past(tokens[:at])
            wanted = trainee.nll(tokens, at, trainee.made(past), past)
        logits = behind(Coprocessor(found), loaded.model, tokens[:at], tokens[at : at + 3])
        own = cross_entropy(logits, torch.tensor(tokens[at : at + 4]), reduction="none")
        assert torch.allclose(own, wanted, atol=1e-4)
    assert all(before[name].equal(getattr(loaded.model.weights, name)) for name in before)  # type: ignore[attr-defined]
    with pytest.raises(PromptError, match="too few"):
        train_beside(Run(loaded, tmp_path / "few"), CoprocessorTrainee(loaded, recipe), texts[:2])


def test_a_coprocessor_is_asked_for_and_checked(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="decodery train kv coprocessor"):
        decode(MODEL, [PROMPT], cache_policy="coprocessor")
    with pytest.raises(SettingsError, match="at least 0"):
        Coprocessor(latents=-1)
    made = replace(weights(), model=MODEL.fingerprint)
    made.save(tmp_path / CoprocessorWeights.FILE)
    kv = f"coprocessor:trained={tmp_path},latents=2"
    assert decode(MODEL, [PROMPT], cache_policy=kv, max_new_tokens=4)[0].generated
    with pytest.raises(SettingsError, match="another model"):
        decode(tiny_transformer(1), [PROMPT], cache_policy=kv)
    with pytest.raises(UnsupportedModel, match="another shape"):
        CoprocessorWeights({"base": torch.zeros(2, 5)}).require(MODEL)
    for broken in ({"base": torch.zeros(3)}, {**made.tensors, "up": torch.zeros(2, 2, 2)}, {"soft": torch.zeros(2, 2)}):
        Artifact("coprocessor", broken).save(tmp_path / CoprocessorWeights.FILE)
        with pytest.raises(CorruptFile):
            CoprocessorWeights.load(tmp_path)


def test_what_latents_cannot_stand_beside_is_refused() -> None:
    config = replace(MODEL.config, sliding_window=8, sliding_layers=(True, False))
    with pytest.raises(UnsupportedModel, match="sliding window"):
        decode(Transformer(config, MODEL.weights), [PROMPT], cache_policy=Coprocessor(weights()))
    with pytest.raises(SettingsError, match="another rule or another cache policy"):
        decode(MODEL, [PROMPT], cache_policy=Coprocessor(weights()), acceptance_rule="adadec:tau=0.0", max_new_tokens=4)
