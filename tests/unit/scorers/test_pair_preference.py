"""RLHFlow's pair-preference model: the prompt and the probabilities of its published code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from decodery.core.errors import SettingsError
from decodery.models.loaders.load import load
from decodery.scorers.pair_preference import PairPreference
from decodery.search import Pairwise
from reward_folders import causal, save
from serving import tiny_lm

# As Llama 3 was first published: the turn of the answer always begins.
CHAT = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}<|start_header_id|>assistant<|end_header_id|>\n\n"
)
# As in RLHFlow/RLHF-Reward-Modeling, pair-pm/README.md.
PLAIN = (
    "\n{% for message in messages %}{% if loop.index0 % 2 == 0 %}\n\n<turn> user\n {{ message['content'] }}"
    "{% else %}\n\n<turn> assistant\n {{ message['content'] }}{% endif %}{% endfor %}\n\n\n"
)
TURNS = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4, <b>I think</b>."},
    {"role": "user", "content": "And 3 + 3?"},
]


def published(folder: Path, model: Any, turns: list[dict[str, str]], answers: tuple[str, str]) -> float:
    """The probability that the first answer is chosen, by the code that the model was published with."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    tokenizer.bos_token = "<|im_start|>"
    context = tokenizer.apply_chat_template(turns, chat_template=PLAIN, tokenize=False)
    chosen = []
    for place in (0, 1):
        prompt = f"[CONTEXT] {context} [RESPONSE A] {answers[place]} [RESPONSE B] {answers[1 - place]} \n"
        asked = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(asked, chat_template=CHAT, tokenize=False)
        ids = tokenizer.encode(text.replace(tokenizer.bos_token, ""), add_special_tokens=False)
        labels = [tokenizer.encode(label, add_special_tokens=False)[0] for label in "AB"]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1, labels]
        chosen.append(float(torch.softmax(logits.double(), dim=-1)[place]))
    return sum(chosen) / 2


def folder_of(path: Path, model: Any) -> Path:
    return save(path, model, settings={"chat_template": CHAT, "bos_token": "<|im_start|>"})


def test_probabilities_are_those_of_the_published_code(tmp_path: Path) -> None:
    model = causal(3)
    folder = folder_of(tmp_path / "pair", model)
    preference = PairPreference(load(str(folder), dtype="float32"))
    lm, answers = tiny_lm(), ["six", "It is 6.\n\nSure.", ""]
    for turns in (TURNS, TURNS[:1]):
        conversation = lm.engine().open(lm.request_for(turns, max_new_tokens=4)).request.conversation
        assert conversation is not None
        found = lm.engine().finish(preference.preferred(conversation, answers))
        for first, second in ((0, 1), (0, 2), (1, 2)):
            wanted = published(folder, model, turns, (answers[first], answers[second]))
            assert found[first][second] == pytest.approx(wanted, abs=2e-4)
            assert found[first][second] + found[second][first] == pytest.approx(1)
            # One order alone, or the other one's probability, is another figure.
            assert abs(found[second][first] - wanted) > 1e-3
        assert [found[number][number] for number in range(3)] == [0.5] * 3


def test_the_answer_that_is_preferred_most_comes_first(tmp_path: Path) -> None:
    model = causal(4)
    folder = folder_of(tmp_path / "pair", model)
    lm = tiny_lm()
    found = lm.search("q?", Pairwise(n=3, model=str(folder), form="rlhflow"), temperature=1.0, max_new_tokens=6)
    texts = [out.text.strip() for out in found]
    for number, out in enumerate(found):
        others = [text for other, text in enumerate(texts) if other != number]
        wins = [published(folder, model, [{"role": "user", "content": "q?"}], (texts[number], each)) for each in others]
        assert out.score == pytest.approx(sum(wins) / 2, abs=2e-3)
    assert [out.score for out in found] == sorted((out.score or 0 for out in found), reverse=True)
    assert found[0].trace.ledger.counts["comparisons"] == 6 and found[0].trace.ledger.rows["reward"] > 0


def test_what_is_no_preference_model_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "pair", causal())
    for model, words in (("", "give its folder"), ("http://localhost:1", "give its folder")):
        with pytest.raises(SettingsError, match=words):
            Pairwise(model=model, form="rlhflow")
    with pytest.raises(SettingsError, match="verdict or rlhflow"):
        Pairwise(form="pair")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="given by its name"):
        Pairwise(model=load(str(folder)))
    preferred = Pairwise(n=2, model=str(folder), form="rlhflow")
    with pytest.raises(SettingsError, match="this prompt has system, user"):
        tiny_lm().search([{"role": "system", "content": "Be brief."}, TURNS[0]], preferred, max_new_tokens=2)
    bare = save(tmp_path / "bare", causal(), settings={"chat_template": CHAT})
    (bare / "tokenizer_config.json").write_text(json.dumps({}))
    with pytest.raises(SettingsError, match="needs the chat template"):
        Pairwise(model=str(bare), form="rlhflow")
