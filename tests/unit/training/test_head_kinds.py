"""Training draft heads of every kind: what comes out drafts, and has learned something."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from covering import some
from decodery.core.errors import SettingsError
from decodery.core.registry import methods, resolve
from decodery.models.loaders.load import LoadedModel
from decodery.models.loaders.store import silent
from decodery.speculative.drafters.falcon import FalconHead
from decodery.speculative.heads.drafter import TrainedDrafter, head_kind
from decodery.speculative.heads.head import Guess, TrainedHead
from decodery.testing import check_identical
from decodery.training.corpus import Corpus
from decodery.training.data import write_texts
from decodery.training.features import FeatureStore
from decodery.training.head import HeadRecipe, _HeadTraining, _StoredTexts, train_head
from decodery.training.head_batch import Taught, distance, drawn, judged
from decodery.training.kind import Run
from tiny_models import tiny_loaded

KINDS = [
    *("chimera", "clover", "dflash", "dspark", "eagle", "falcon", "fspad", "hydra", "kangaroo", "longspec", "mtp"),
    "p-eagle",
]
"""Those that `test_head` leaves out; msd is taught beside what it is for."""


def test_no_kind_is_left_out() -> None:
    heads = {each.name for each in methods("drafter") if issubclass(each.cls, TrainedDrafter)}
    assert heads == {*KINDS, "medusa", "eagle-3", "msd"}


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return tiny_loaded()


@pytest.fixture(scope="module")
def corpus(target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    prompts = [[256, 65 + number % 26] for number in range(80)]
    return write_texts(
        target, prompts, tmp_path_factory.mktemp("corpus") / "text", max_new_tokens=20, temperatures=(0.7,), top=8
    )


RECIPE = HeadRecipe(outputs=80, epochs=0.5, lr=3e-3, batch=4, length=16)


@pytest.mark.parametrize("kind", some(KINDS, 3))
def test_a_head_learns(kind: str, target: LoadedModel, corpus: Corpus, tmp_path: Path) -> None:
    model, made = target.model, head_kind(kind)
    tensors, settings = made.untrained(model, seed=0)
    head = made(TrainedHead(kind, tensors, settings), model)
    learned, held = corpus.split()
    features = FeatureStore(model, corpus, head.taps, tmp_path, 8, silent)
    training_run = _HeadTraining(head, _StoredTexts(features, learned, held), None, RECIPE, 45)
    optimizer = torch.optim.Adam(training_run.parameters.values(), lr=3e-3)
    held_out = [*training_run.held.choosing, *training_run.held.tested]
    before = judged(head, held_out, RECIPE.decay)["cross_entropy"]
    for step in range(45):
        optimizer.zero_grad()
        training_run.loss(step).backward()
        optimizer.step()
    assert judged(head, held_out, RECIPE.decay)["cross_entropy"] < before - 0.03


def test_dspark_learns_which_of_its_drafts_are_accepted(target: LoadedModel, corpus: Corpus, tmp_path: Path) -> None:
    """Better than the best constant is, and than what is said of other places; the guesses stay as they were."""
    kind, model = head_kind("dspark"), target.model
    tensors, settings = kind.untrained(model, 0)
    # After every other token guesses are sharp and wrong.
    tensors["markov_in.weight"][:, 0] = torch.arange(model.vocab_size) % 2
    tensors["markov_out.weight"][:, 0] = 8 * torch.randn(model.vocab_size, generator=torch.Generator().manual_seed(1))
    head = kind(TrainedHead("dspark", tensors, settings), model)
    learned, held = corpus.split()
    features = FeatureStore(model, corpus, head.taps, tmp_path, 8, silent)
    training_run = _HeadTraining(head, _StoredTexts(features, learned, held), None, RECIPE, 60)
    batch = training_run._training_batch([features[number] for number in learned[:32]])
    own = [each for name, each in training_run.parameters.items() if name.startswith("confidence.")]
    with torch.no_grad():
        guesses = batch.unrolled(head, 2)
        plain = distance(head, guesses, batch, 1.0)
    optimizer = torch.optim.Adam(own, lr=0.05)
    for _ in range(100):
        optimizer.zero_grad()
        distance(head, guesses, batch, 1.0, sure=True).backward(inputs=own)
        optimizer.step()
    said, accepted = [], []
    with torch.no_grad():
        assert torch.equal(distance(head, guesses, batch, 1.0), plain)
        for step, guess in enumerate(guesses):
            likely, share, weight = batch.at(step)
            rows = weight > 0
            logq = head.project(guess.spoken[rows]).log_softmax(dim=-1).gather(1, likely[rows])
            accepted.append(torch.minimum(share[rows], logq.exp()).sum(dim=-1))
            found = head.acceptance(guess.spoken[rows])
            assert found is not None
            said.append(found)
    means, rates = torch.cat(said), torch.cat(accepted)
    constant = rates.mean().logit().expand_as(rates)
    learnt, best, mixed = (
        float(binary_cross_entropy_with_logits(each, rates)) for each in (means, constant, means.roll(7))
    )
    assert learnt < min(best, mixed) - 0.02, (learnt, best, mixed)
    # Where the bias is made of more than the token before, the row alone tells.
    shapes = [kind.untrained(model, 0, markov=each)[0]["confidence.weight"].shape[1] for each in ("vanilla", "gated")]  # type: ignore[call-arg]
    assert shapes[0] > shapes[1] == model.config.hidden_size


@pytest.mark.parametrize("kind", ["dflash", "dspark", "eagle-3"])
def test_guesses_after_some_states_are_those_among_all(kind: str, target: LoadedModel) -> None:
    tensors, settings = head_kind(kind).untrained(target.model, seed=0)
    head = head_kind(kind)(TrainedHead(kind, tensors, settings), target.model)
    random = torch.Generator().manual_seed(0)
    hidden = target.model.config.hidden_size
    states = {tap: torch.randn(2, 9, hidden, generator=random, dtype=head.dtype) for tap in head.taps}
    tokens = torch.randint(0, 200, (2, 11), generator=random)
    anchors = torch.tensor([1, 4, 8])
    every, some_of = head.unroll(states, tokens, 3), head.unroll_at(states, tokens, 3, anchors)
    for one, other in zip(every, some_of, strict=True):
        assert float((one.spoken[:, anchors] - other.spoken).abs().max()) < 1e-5
    # What follows an anchor is taught to its guesses.
    weight = torch.arange(22, dtype=torch.float32).view(2, 11)
    batch = Taught(states, tokens, tokens[..., None], weight[..., None], weight)
    assert batch.anchored(0.3, np.random.default_rng(0)).anchors is not None
    assert torch.equal(replace(batch, anchors=anchors).at(2)[2], weight[:, anchors + 2])


def test_the_hybrid_loss_is_divergence_where_far_and_overlap_where_near() -> None:
    class Echo:
        def project(self, spoken: torch.Tensor, step: int) -> torch.Tensor:
            return spoken

    share = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    likely = torch.arange(3).view(1, 1, 3)
    batch = Taught(
        {0: torch.zeros(1, 1, 1, dtype=torch.float64)}, likely[..., 0], likely, share.view(1, 1, 3),
        torch.ones(1, 1, dtype=torch.float64),
    )  # fmt: skip
    for other in ([0.6, 0.3, 0.1], [0.01, 0.01, 0.98]):
        q = torch.tensor(other, dtype=torch.float64)
        guess = Guess(q.log().view(1, 1, 3), q.log().view(1, 1, 3))
        alpha = float(torch.minimum(share, q).sum())
        divergence = float((share * (share / q).log()).sum())
        mixed = math.exp(-3 * alpha)
        found = float(distance(Echo(), [guess], batch, 1.0, "lk_hybrid"))  # type: ignore[arg-type]
        assert abs(found - (mixed * divergence + (1 - mixed) * (1 - alpha))) < 1e-6
        entropy = -float((share * share.log()).sum())
        assert abs(float(distance(Echo(), [guess], batch, 1.0)) - divergence - entropy) < 1e-6  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="name one of kl, lk_hybrid"):
        HeadRecipe(loss="tv")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_trained_drafts(kind: str, target: LoadedModel, corpus: Corpus, tmp_path: Path) -> None:
    scores = train_head(Run(target, tmp_path, (RECIPE,)), head_kind(kind), corpus)
    trained = TrainedHead.load(tmp_path)
    assert trained.kind == kind and trained.model == target.model.fingerprint
    assert trained.facts["cross_entropy"] == scores["cross_entropy"]
    drafter = resolve("drafter", f"{kind}:head={tmp_path}")
    check_identical(target.model, [[256, 70, 71]], drafter=drafter, max_new_tokens=12, seeds=(0,), tested="drafted")


def test_glancing_shows_answers_of_wrong_guesses_alone(target: LoadedModel, corpus: Corpus, tmp_path: Path) -> None:
    tensors, settings = FalconHead.untrained(target.model, seed=0)
    random = torch.Generator().manual_seed(0)
    for name, each in tensors.items():
        if not name.endswith("norm.weight"):
            tensors[name] = each + 0.1 * torch.randn(each.shape, generator=random).to(each)
    head = FalconHead(TrainedHead("falcon", tensors, settings), target.model)
    states = {
        tap: torch.randn(2, 9, target.model.config.hidden_size, generator=random).to(head.dtype) for tap in head.taps
    }
    tokens, shown = torch.randint(0, 200, (2, 10), generator=random), torch.zeros(2, 9, dtype=torch.bool)
    plain = head.unroll(states, tokens, 2)
    assert torch.equal(head.unroll_glancing(states, tokens, 2, shown)[0].features, plain[0].features)
    # The guess after state 4 reads state 6, which it is about, where that is shown.
    shown[0, 4] = True
    changed = {tap: each.clone() for tap, each in states.items()}
    for each in changed.values():
        each[0, 6] += torch.randn(each.shape[-1], generator=random).to(each)
    for glance in (True, False):
        one, other = (
            head.unroll_glancing(each, tokens, 2, shown if glance else None)[1].features[:, 4]
            for each in (states, changed)
        )
        assert (float((one - other)[0].abs().max()) > 1e-6) == glance and torch.equal(one[1], other[1])
    wrong, taught = torch.ones(2, 40, dtype=torch.bool), torch.ones(2, 40, dtype=torch.bool)
    wrong[1, 20:], taught[:, 30:] = False, False
    found = drawn(wrong, taught, 0.45, 1)
    assert found.sum(dim=1).tolist() == [18, 9] and not found[:, 30:].any()
    assert not torch.equal(found, drawn(wrong, taught, 0.45, 2))
    glanced = replace(RECIPE, glance=True)
    assert train_head(Run(target, tmp_path / "head", (glanced,)), FalconHead, corpus)["tokens"] >= 0
    with pytest.raises(SettingsError, match="glance is for heads of falcon, not of eagle"):
        train_head(Run(target, tmp_path / "other", (glanced,)), head_kind("eagle"), corpus)
