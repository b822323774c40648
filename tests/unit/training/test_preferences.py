"""Adapters that learn from pairs and from rewards, and the advantages of texts that part."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decodery.core.errors import CorruptFile, SettingsError
from decodery.models.batch import Batch, Segment
from decodery.training import grpo, orpo
from decodery.training.adapter import LoRARemaking
from decodery.training.adapter_learner import AdapterLearner
from decodery.training.corpus import TrainingText
from decodery.training.grpo import GRPORecipe, advantages, train_grpo
from decodery.training.held_out import HeldOut, bootstrap
from decodery.training.kind import Run
from decodery.training.lines import read_texts
from decodery.training.orpo import ORPORecipe, train_orpo
from serving import tiny_lm

FORM = LoRARemaking(rank=2)


def test_advantages_are_those_of_the_group_and_of_siblings() -> None:
    texts = [[1, 2, 3], [1, 2, 4], [1, 5], [6]]
    rewards = [1.0, 0.0, 0.0, 1.0]
    plain = advantages(texts, rewards)
    assert [each.tolist() for each in plain] == [[1, 1, 1], [-1, -1, -1], [-1, -1], [1]]
    both = [own - base for own, base in zip(advantages(texts, rewards, siblings=2.0), plain, strict=True)]
    # Three texts go on with 1, of mean 1/3, and one with 6, of 1; after 1 the tokens 2 and 5 have means 1/2 and 0.
    assert [each.tolist() for each in both] == [
        pytest.approx(each) for each in ([-2, 2, 2], [-2, 2, -2], [-2, -2], [2])
    ]
    # Long texts take memory by their length and not by its square.
    tracemalloc.start()
    advantages([[1] * 2000 + [number] for number in range(2)], [0.0, 1.0], siblings=1.0)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    # Equal rewards teach nothing.
    assert not np.concatenate(advantages(texts, [0.5] * 4, siblings=1.0)).any()


def test_log_probabilities_are_those_of_each_texts_own_tokens() -> None:
    lm = tiny_lm(None)
    learner = AdapterLearner(Run(lm, Path("nowhere"), (FORM,)))
    texts = [learner.text("ab", "cde"), learner.text("a", "x")]
    found = learner.logprobs(texts)
    for text, logs in zip(texts, found, strict=True):
        read = learner.original.forward(Batch([Segment.chunk(text.tokens.tolist(), learner.original.new_cache())]))
        known = read.logits.log_softmax(dim=-1)[range(len(text.tokens) - 1), text.tokens[1:].tolist()]
        assert logs.tolist() == pytest.approx(known[text.written - 1 :].tolist(), abs=1e-4)
        assert len(logs) == len(text.tokens) - text.written
        (hot,) = learner.logprobs([text], temperature=2.0)
        known = (read.logits / 2.0).log_softmax(dim=-1)[range(len(text.tokens) - 1), text.tokens[1:].tolist()]
        assert hot.tolist() == pytest.approx(known[text.written - 1 :].tolist(), abs=1e-4)
    # Of several end tokens the first one counts, as in the model's configuration, and not the least.
    lm.tokenizer.eos_ids = (9, 3)
    assert learner.text("a", "x").tokens[-1] == 9


def test_orpo_prefers_what_was_chosen_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    pairs = [(f"{number}?", "yes", "no") if number % 2 else (f"{number}?", "yes", "nay") for number in range(12)]
    recipe = ORPORecipe(steps=5, batch=4, lr=1e-2)
    found = train_orpo(Run(tiny_lm(), tmp_path / "a", (recipe, FORM)), pairs)
    assert found["loss"] < found["baselines"]["untrained"]["loss"] - 0.1 and found["preferred"] == 1.0
    assert train_orpo(Run(tiny_lm(), tmp_path / "a", (recipe, FORM)), pairs) == found
    with pytest.raises(SettingsError, match="other data"):
        train_orpo(Run(tiny_lm(), tmp_path / "a", (recipe, FORM)), [*pairs[:-1], ("?", "a", "b")])
    lm = tiny_lm()
    (plain, tuned) = (
        lm.generate("3?", max_new_tokens=2, logprobs=0, logits_source=source, drafter=None)
        for source in (None, f"adapter:file={tmp_path / 'a'}")
    )
    assert plain.text != tuned.text or plain.logprobs != tuned.logprobs
    with pytest.raises(SettingsError, match="2 prompts"):
        train_orpo(Run(tiny_lm(), tmp_path / "b", (recipe, FORM)), pairs[:1])


def test_pairs_of_a_held_out_prompt_are_not_learned_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [(f"{number // 10}?", f"yes {number}", "no") for number in range(40)]
    learned, known = set[str](), list[HeldOut[Any]]()

    def prompt(text: TrainingText) -> str:
        return lm.tokenizer.decode(text.tokens[: text.written].tolist())

    def logprobs(self: AdapterLearner, texts: list[TrainingText]) -> list[torch.Tensor]:
        learned.update(map(prompt, texts))
        return [torch.full((2,), -1.0)] * len(texts)

    def train(
        self: AdapterLearner, loss: Any, figures: Any, held: Any, metric: str, recipe: Any, groups: Any, **more: Any
    ) -> dict[str, Any]:
        known.append(HeldOut.of(held, groups))
        for step in range(20):
            loss(step)
        return {}

    monkeypatch.setattr(AdapterLearner, "logprobs", logprobs)
    monkeypatch.setattr(AdapterLearner, "train", train)
    lm = tiny_lm()
    train_orpo(Run(lm, tmp_path, (ORPORecipe(batch=4), FORM)), pairs)
    chose, tested = ({prompt(better) for better, _ in some} for some in (known[0].choosing, known[0].tested))
    assert len(set(known[0].groups)) == 1 and known[0].said("pairs") == "10 pairs of 1 prompts that chose nothing"
    assert len(learned) == 2 and len(chose) == len(tested) == 1 and not learned & chose | tested & (learned | chose)


def test_grpo_learns_what_is_rewarded(tmp_path: Path) -> None:
    recipe = GRPORecipe(group=8, batch=2, steps=6, lr=4e-2, max_new_tokens=3, beta=0.0, siblings=0.5)

    held = []

    def reward(number, texts):
        held.extend(texts[:1] if len(texts) == 1 else [])
        return [sum(token < 128 for token in seq.generated) / 3 for seq in texts]

    def against(number, texts):
        return [-each for each in reward(number, texts)]

    prompts = [f"{number}?" for number in range(6)]
    found, worse = (
        train_grpo(Run(tiny_lm(), tmp_path / rule.__name__, (recipe, FORM)), prompts, rule)
        for rule in (reward, against)
    )
    # The same training with the reward turned round goes the other way.
    before = found["baselines"]["untrained"]["reward"]
    assert found["reward"] > before + 0.2 and -worse["reward"] < found["reward"] - 0.2
    # For the report, to choose the best step, and for the report.
    assert len(held) == 2 * (1 + 1 + recipe.steps + 1), "held-out texts are drawn no more often than that"
    with pytest.raises(SettingsError, match="other data"):
        train_grpo(Run(tiny_lm(), tmp_path / "reward", (recipe, FORM)), prompts, reward, "other answers")


def test_an_interval_of_rewards_is_of_the_texts_of_their_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpo, "_TOGETHER", 2)
    recipe = GRPORecipe(group=2, batch=1, steps=1, lr=1e-9, max_new_tokens=4)
    together, held = [], []
    draw = grpo._draw

    def drawing(learner: Any, prompts: Any, each: int, seeds: Any, recipe: Any) -> Any:
        together.append(len(prompts))
        # The same words: texts differ by their seeds alone.
        return draw(learner, ["a"] * len(prompts), each, seeds, recipe)

    def reward(number: int, texts: Any) -> list[float]:
        if number % 11 == 0:
            held.append((number, texts[0].generated, number // 10 % 4 / 2))
        return [number // 10 % 4 / 2] * len(texts)

    monkeypatch.setattr(grpo, "_draw", drawing)
    found = train_grpo(Run(tiny_lm(), tmp_path, (recipe, FORM)), [str(number) for number in range(61)], reward)
    # Of prompts 0, 11, ... 55 those at odd places are reported: 11, 33 and 55.
    assert found["reward"] == pytest.approx(np.mean([0.5, 1.5, 0.5]), abs=1e-4)
    assert found["interval of reward"] == bootstrap([0.5, 1.5, 0.5])
    assert max(together) == 2
    # Prompts are drawn by their own seeds, which a part of others beside them does not change.
    texts = {number: {tuple(text) for n, text, _ in held if n == number} for number, _, _ in held}
    assert all(len(each) == 1 for each in texts.values()) and len({next(iter(each)) for each in texts.values()}) > 1
    assert len(held) == 3 + 3 + 3 + 3


def test_a_prompt_that_grpo_holds_out_is_not_learned_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, learned, held = [f"{number // 10}?" for number in range(40)], set[str](), list[int]()

    def reward(number: int, texts: Any) -> list[float]:
        learned.add(prompts[number])
        return [0.0] * len(texts)

    def train(self: AdapterLearner, loss: Any, figures: Any, given: Any, *rest: Any, **more: Any) -> dict[str, Any]:
        held.extend(given)
        for step in range(8):
            loss(step)
        return {}

    monkeypatch.setattr(AdapterLearner, "train", train)
    recipe = GRPORecipe(group=2, batch=4, max_new_tokens=1)
    train_grpo(Run(tiny_lm(), tmp_path, (recipe, FORM)), prompts, reward)
    assert len(learned) == 2 and held and not learned & {prompts[number] for number in held}
    with pytest.raises(SettingsError, match="2 prompts or more, not 1"):
        train_grpo(Run(tiny_lm(), tmp_path, (recipe, FORM)), ["a"] * 20, reward)


def test_passes_are_bounded_and_at_the_temperature_of_the_texts(tmp_path: Path, monkeypatch: Any) -> None:
    read = []

    class Recording(AdapterLearner):
        def logprobs(self, texts, **settings):
            read.append((len(texts), settings.get("temperature", 1.0)))
            return super().logprobs(texts, **settings)

    monkeypatch.setattr(orpo, "AdapterLearner", Recording)
    monkeypatch.setattr(grpo, "AdapterLearner", Recording)
    recipe = ORPORecipe(steps=1, batch=2)
    train_orpo(Run(tiny_lm(), tmp_path / "a", (recipe, FORM)), [(f"{number}", "b", "c") for number in range(41)])
    # Of four held-out pairs two choose, and two are reported before and after, together and one by one.
    assert read == [(4, 1.0), (2, 1.0), (2, 1.0), *[(4, 1.0)] * 4, (2, 1.0), (2, 1.0)]
    read.clear()
    drawn = GRPORecipe(group=2, batch=1, steps=1, max_new_tokens=1, temperature=0.5)
    train_grpo(Run(tiny_lm(), tmp_path / "b", (drawn, FORM)), ["a", "b"], lambda number, texts: [0.0] * len(texts))
    assert read == [(2, 0.5)] * 2


def test_files_of_pairs_are_read_strictly(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}))
    assert read_texts(path, "prompt", "chosen", "rejected") == [("a", "b", "c")]
    path.write_text(json.dumps({"prompt": "a", "chosen": "b"}))
    with pytest.raises(CorruptFile, match="line 1"):
        read_texts(path, "prompt", "chosen", "rejected")
