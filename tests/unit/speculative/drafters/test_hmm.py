"""A hidden Markov model: laws as enumeration gives them, learning that never loses, and beliefs that go on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from commands import inside
from decodery.core.errors import CorruptFile, DecoderyError, ModelNotFound, SettingsError, VocabularyMismatch
from decodery.models.loaders import load as load_module
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.drafters.hierarchical import Hierarchical
from decodery.speculative.drafters.hmm import BeliefReading, HiddenMarkov
from decodery.speculative.stores.hmm import HMM
from decodery.step.draft_tree import DraftTree
from decodery.testing import check_identical, decode, tiny_transformer
from decodery.training.corpus import Corpus, TrainingText, claim, write_shard
from decodery.training.hmm import HMMRecipe, begun, counted, train_hmm
from decodery.training.kind import Run
from tiny_models import tiny_loaded

COMMON = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)


def small(seed: int = 0, states: int = 3, spread: float = 2.0) -> HMM:
    """Six tokens, of which 4, 1 and 2 have columns, and 0, 3 and 5 share one."""
    draws = torch.Generator().manual_seed(seed)

    def laws(*shape: int) -> torch.Tensor:
        return (spread * torch.randn(shape, generator=draws, dtype=torch.float64)).softmax(dim=-1)

    rest = torch.tensor([0.5, 0, 0, 0.3, 0, 0.2], dtype=torch.float64)
    return HMM(laws(states), laws(states, states), laws(states, 4), torch.tensor([4, 1, 2]), rest)


def chances(hmm: HMM, text: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """All paths of states [paths, n], and of each the chance that it says the text, by definition."""
    paths = np.array(list(itertools.product(range(len(hmm.start)), repeat=len(text))))
    columns = hmm.columns[list(text)].numpy()
    said = hmm.emission.numpy()[paths, columns].prod(axis=1)
    moved = hmm.transition.numpy()[paths[:, :-1], paths[:, 1:]].prod(axis=1)
    share = np.where(columns == len(hmm.tokens), hmm.rest.numpy()[list(text)], 1.0).prod()
    return paths, hmm.start.numpy()[paths[:, 0]] * moved * said * share


def total(hmm: HMM, text: Sequence[int]) -> float:
    return float(chances(hmm, text)[1].sum())


def belief(hmm: HMM, text: Sequence[int]) -> torch.Tensor:
    found = hmm.start[None]
    for token in text:
        found = hmm.after(found, [token])
    return found


@pytest.mark.parametrize("text", [[], [4], [1, 0, 3]])
def test_laws_of_the_next_token_and_of_later_ones_are_those_of_all_paths(text: list[int]) -> None:
    hmm = small()
    whole = total(hmm, text) if text else 1.0
    for ahead in (1, 2, 3):
        told = hmm.logits(belief(hmm, text), ahead)[0].exp()
        between = list(itertools.product(range(6), repeat=ahead - 1))
        law = [sum(total(hmm, [*text, *others, token]) for others in between) / whole for token in range(6)]
        assert np.abs(told.numpy() - law).max() < 1e-10 and abs(float(told.sum()) - 1) < 1e-10
        if text:
            # What has forgotten the last token says something else.
            forgetful = hmm.logits(belief(hmm, text[:-1]), ahead)[0].exp()
            assert np.abs(forgetful.numpy() - law).max() > 1e-4


def test_expected_counts_are_those_of_all_paths_and_texts_side_by_side_do_not_touch() -> None:
    hmm = small(1)
    texts = [[0, 2, 5, 4], [1], [2, 2, 3]]
    start, transition, emission = (torch.zeros_like(each) for each in (hmm.start, hmm.transition, hmm.emission))
    for text in texts:
        for path, share in zip(*chances(hmm, text), strict=True):
            share /= total(hmm, text)
            start[path[0]] += share
            for before, after in itertools.pairwise(path):
                transition[before, after] += share
            for state, token in zip(path, text, strict=True):
                emission[state, hmm.columns[token]] += share
    found = counted(hmm, [hmm.columns[text].numpy() for text in texts])
    for told, law in ((found.start, start), (found.transition, transition), (found.emission, emission)):
        assert (told - law).abs().max() < 1e-12
    shared = sum(math.log(float(hmm.rest[token])) for text in texts for token in text if hmm.rest[token])
    assert found.likelihood + shared == pytest.approx(sum(math.log(total(hmm, text)) for text in texts), abs=1e-12)


def drawn(hmm: HMM, count: int, length: int, seed: int) -> list[list[int]]:
    """Texts of the model's own."""
    draws, texts = np.random.default_rng(seed), []
    says = hmm.logits(torch.eye(len(hmm.start), dtype=torch.float64)).exp().numpy()
    for _ in range(count):
        text, follows = list[int](), hmm.start.numpy()
        for _ in range(length):
            state = draws.choice(len(follows), p=follows)
            text.append(int(draws.choice(6, p=says[state])))
            follows = hmm.transition.numpy()[state]
        texts.append(text)
    return texts


def test_the_likelihood_never_falls_and_a_wrong_step_lets_it_fall() -> None:
    planted, prior = small(3), 0.5
    columns = [planted.columns[text].numpy() for text in drawn(planted, 40, 12, 0)]

    def climb(prior: float, wrong: bool) -> list[float]:
        hmm, found = small(4, spread=0.5), []
        for _ in range(25):
            counts = counted(hmm, columns)
            ahead = COMMON * hmm.emission.log()
            found.append(counts.likelihood + prior * float(ahead.sum() + hmm.transition.log().mean(dim=1).sum()))
            found[-1] += prior * float(hmm.start.log().mean())
            if wrong:
                counts = replace(counts, transition=counts.transition.T)
            hmm = counts.most_likely(hmm, prior, COMMON)
        return found

    for weight in (0.0, prior):
        told = climb(weight, wrong=False)
        assert all(after >= before - 1e-9 for before, after in itertools.pairwise(told)) and told[-1] > told[0] + 5
    assert any(after < before - 1e-3 for before, after in itertools.pairwise(climb(0.0, wrong=True)))


@dataclass(frozen=True, eq=False)
class Watched(HMM):
    """A model that notes how many tokens it is asked to take in."""

    taken: list[int] | None = None

    def after(self, beliefs: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        assert self.taken is not None
        self.taken.append(len(tokens))
        return super().after(beliefs, tokens)


def test_beliefs_go_on_from_what_was_committed_and_come_back_from_what_was_not() -> None:
    taken: list[int] = []
    hmm = Watched(**vars(small(5)), taken=taken)
    reading, text = BeliefReading(hmm), [4, 0, 2, 1]
    reading.read(text)
    assert len(taken) == 4
    tree = DraftTree(np.array([1, 5, 2, 0, 4]), np.array([-1, 0, 0, 1, 3]))
    found = reading.behind(tree, [0, 2, 4])
    for row, path in zip(found, ([], [2], [5, 0, 4]), strict=True):
        assert (row - belief(hmm, [*text, *path])[0]).abs().max() < 1e-14
    taken.clear()
    # Two drafts become text, and one token more: only that one is read.
    grown = [*text, 5, 0, 3]
    reading.read(grown)
    assert sum(taken) == 1 and (reading.beliefs[-1] - belief(hmm, grown)[0]).abs().max() < 1e-14
    taken.clear()
    # A text that departs from what was read goes on from there.
    back = [*text, 5, 2]
    reading.read(back)
    assert sum(taken) == 1 and (reading.beliefs[-1] - belief(hmm, back)[0]).abs().max() < 1e-14
    taken.clear()
    reading.read(text)
    reading.read(text)
    assert not taken and torch.equal(reading.behind(DraftTree.root(1), [0])[0], reading.beliefs[4])


def told_by(target: object, states: int = 64) -> HMM:
    """A model of a greedy text of the target that runs in circles: every state says one token."""
    (text,) = decode(target, [[5] * 6 + [7, 8, 9] * 4], max_new_tokens=60)
    follows = torch.full((states, states), 1e-3, dtype=torch.float64)
    for before, after in itertools.pairwise(text.tokens):
        follows[before, after] += 1
    said = 0.98 * torch.eye(states, states + 1, dtype=torch.float64)
    said[:, :-1] += 0.02 / states
    even = torch.full((states,), 1 / states, dtype=torch.float64)
    law = follows / follows.sum(dim=1, keepdim=True)
    return HMM(even, law, said, torch.arange(states), torch.zeros(states, dtype=torch.float64))


def test_it_drafts_chains_and_trees_and_for_another_drafter() -> None:
    target = tiny_transformer(0)
    hmm, prompts = told_by(target), [[5] * 6 + [7, 8, 9] * 4]
    for drafter in (HiddenMarkov(hmm), HiddenMarkov(hmm, tree_policy="eagle-2(nodes=8,width=2,depth=3)")):
        (run,) = check_identical(target, prompts, drafter=drafter, seeds=(0,), max_new_tokens=30)
        assert run.trace.tokens_per_pass > 2
    # It drafts for a draft model, too, whose own drafts it reads and takes back.
    other = DraftModel(tiny_transformer(0), length=4)
    both = Hierarchical(other, HiddenMarkov(hmm, tree_policy="eagle-2(nodes=8,width=2,depth=3)"), length=4)
    (alone,) = check_identical(target, prompts, drafter=other, seeds=(0,), max_new_tokens=30)
    (run,) = check_identical(target, prompts, drafter=both, seeds=(0,), max_new_tokens=30)
    assert 2 * run.trace.ledger.passes["draft"] < alone.trace.ledger.passes["draft"]


def planted() -> HMM:
    """Three states that take turns, nearly, and have tokens in common."""
    turns = 0.9 * torch.eye(3, dtype=torch.float64).roll(1, dims=1) + 0.1 / 3
    return replace(small(6), transition=turns)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Texts of a planted model, as if a model of as many tokens as `tiny_loaded` had written them."""
    folder = tmp_path_factory.mktemp("hmm") / "text"
    claim(folder, {"kind": "planted"}, tiny_loaded().model.vocab_size)
    texts = [TrainingText(np.array(text, dtype=np.int32), 1) for text in drawn(planted(), 140, 24, 1)]
    write_shard(folder / "00000.safetensors", texts, 0)
    return Corpus(folder)


def test_what_was_planted_is_found_and_an_interrupted_run_ends_the_same(corpus: Corpus, tmp_path: Path) -> None:
    target, recipe = tiny_loaded(), HMMRecipe(states=3, tokens=6, iterations=30, prior=0.1)
    found = train_hmm(Run(target, tmp_path / "whole", (recipe,), command="the command"), corpus)
    held = [corpus[number].tokens.tolist() for number in corpus.split()[1]]
    nats = {
        name: -sum(float(hmm.logits(belief(hmm, text[:at]))[0, text[at]]) for text in held for at in range(24)) / 168
        for name, hmm in (("planted", planted()), ("found", found))
    }
    alone = np.bincount(np.concatenate([corpus[number].tokens for number in corpus.split()[0]]), minlength=6)
    nats["unigram"] = -sum(math.log(alone[token] / alone.sum()) for text in held for token in text) / 168
    assert nats["found"] < nats["planted"] + 0.03 < nats["unigram"] - 0.1
    objective = found.facts["objective"]
    assert all(after >= before - 1e-9 for before, after in itertools.pairwise(objective)) and len(objective) == 30
    assert found.facts["command"] == "the command"

    def stop(what: str, done: int, total: int) -> None:
        if done == 7:
            raise KeyboardInterrupt

    again = tmp_path / "again"
    with pytest.raises(KeyboardInterrupt):
        train_hmm(Run(target, again, (recipe,), progress=stop, command="the command"), corpus)
    assert not (again / HMM.FILE).exists()
    steps: list[int] = []
    train_hmm(
        Run(target, again, (recipe,), progress=lambda _, done, total: steps.append(done), command="the command"), corpus
    )
    assert steps[0] == 8 and (again / HMM.FILE).read_bytes() == (tmp_path / "whole" / HMM.FILE).read_bytes()
    with pytest.raises(SettingsError, match="other settings"):
        train_hmm(Run(target, again, (replace(recipe, seed=1),)), corpus)
    (again / "training" / "checkpoint.safetensors").write_bytes(b"damaged")
    with pytest.raises(CorruptFile, match="is damaged: remove it"):
        train_hmm(Run(target, again, (recipe,)), corpus)


def test_where_learning_begins_no_two_states_are_alike_and_every_token_can_come() -> None:
    hmm, common = begun([np.array([3, 3, 2, 2, 1])], 8, HMMRecipe(states=3, tokens=2))
    assert common.tolist() == pytest.approx([1 / 3] * 3)
    assert hmm.tokens.tolist() == [2, 3] and hmm.rest.nonzero().flatten().tolist() == [0, 1, 4, 5, 6, 7]
    assert float(hmm.rest[1]) == pytest.approx(2 * float(hmm.rest[0]))
    assert torch.isfinite(hmm.logits(hmm.start[None])).all()
    assert (hmm.emission[0] - hmm.emission[1]).abs().max() > 0.1


def test_it_is_kept_and_what_does_not_fit_is_refused_with_what_to_do(tmp_path: Path) -> None:
    hmm, target = replace(told_by(tiny_transformer(0)), vocabulary="mine"), tiny_transformer(0)
    hmm.save(tmp_path / HMM.FILE)
    read = HMM.load(tmp_path)
    assert torch.equal(read.logits(read.start[None]), hmm.logits(hmm.start[None])) and read.vocabulary == "mine"
    decode(target, [[1]], drafter=HiddenMarkov(str(tmp_path)), max_new_tokens=3)
    with pytest.raises(SettingsError, match="decodery train hmm"):
        decode(target, [[1]], drafter=HiddenMarkov())
    with pytest.raises(ModelNotFound, match="decodery train hmm"):
        decode(target, [[1]], drafter=HiddenMarkov(str(tmp_path / "none")))
    with pytest.raises(VocabularyMismatch, match="another model's tokens"):
        decode(tiny_transformer(0, vocab_size=32), [[1]], drafter=HiddenMarkov(str(tmp_path)))
    silent = hmm.emission.clone()
    silent[0] = 0
    for number, wrong in enumerate(
        (
            {"emission": silent},
            {"transition": hmm.transition[:3]},
            {"transition": hmm.transition * 2},
            {"start": -hmm.start},
            {"tokens": torch.zeros(64, dtype=torch.int64)},
            {"rest": hmm.rest + 1},
        )
    ):
        path = tmp_path / str(number) / HMM.FILE
        replace(hmm, **wrong).save(path)
        with pytest.raises(CorruptFile, match="holds no hidden Markov model, or is damaged"):
            HMM.load(path)
    (tmp_path / HMM.FILE).write_bytes((tmp_path / HMM.FILE).read_bytes()[:-9])
    with pytest.raises(DecoderyError, match="decodery train hmm"):
        HMM.load(tmp_path)
    for settings in ({"states": 0}, {"iterations": 0}, {"prior": 0.0}):
        with pytest.raises(SettingsError):
            HMMRecipe(**settings)


def test_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "load", lambda name, dtype: tiny_loaded())
    (tmp_path / "prompts").write_text("a\nb\n")
    settings = ("--states", "3", "--iterations", "2", "--texts", "24", "--max-new-tokens", "12")
    command = ("train", "hmm", "--out", str(tmp_path / "out"), "--prompts", str(tmp_path / "prompts"), *settings)
    code, told, _ = inside(*command)
    assert code == 0 and f"--drafter hmm:model={tmp_path / 'out'}" in told and "bits per token" in told
    (run,) = decode(tiny_loaded().model, [[1, 2]], drafter=HiddenMarkov(str(tmp_path / "out")), max_new_tokens=8)
    assert max(step.nodes for step in run.trace.decoding) == 4
    code, _, errors = inside(*command, "--prior", "0")
    assert code and "prior is 0.0: give one in (0, inf)" in errors
