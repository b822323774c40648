"""Published reward models: what is read of their folders is what their own code computes, up to float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from decodery.core.errors import CorruptFile, SettingsError, UnsupportedModel
from decodery.models.loaders.load import load
from decodery.scorers import RewardModel
from decodery.search import BestOfN
from decodery.step.scorer import Candidates, judge
from decodery.training.published_prm import train_published_prm
from serving import TEMPLATE, tiny_lm
from tiny_models import make_tokenizer, randomize

SHAPE = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "eos_token_id": 257, "bos_token_id": None,
    "pad_token_id": 257,
}  # fmt: skip
STEPS = ["First, 2 + 2.", "So 4."]
TEXT = "\n\n".join(STEPS)
QUESTION = "What is 2 + 2?"


def tokenizer() -> Any:
    backend = make_tokenizer()
    backend.add_special_tokens(["<extra_0>"])
    return backend


def save(folder: Path, model: Any, head: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    """A folder as such models are published, with a head of its own beside the model's tensors."""
    model.save_pretrained(folder)
    if head:
        file = folder / "model.safetensors"
        kept = {name: each for name, each in safetensors.torch.load_file(file).items() if name != "lm_head.weight"}
        safetensors.torch.save_file(kept | head, file)
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | config))
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


def causal(seed: int = 0) -> Any:
    return randomize(transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SHAPE, tie_word_embeddings=False)), seed)


def ids(text: str) -> torch.Tensor:
    return torch.tensor([tokenizer().encode(text).ids])


def chat(*turns: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)


def score(scorer: RewardModel, text: str = TEXT) -> float:
    """What the scorer says of a text that answers the question."""
    lm = tiny_lm()
    request, engine = lm.request_for(QUESTION, max_new_tokens=4), lm.engine()
    seq = engine.open(request)
    output = lm.tokenizer.encode(text, special=False)
    told = Candidates(
        request.prompt, [output], [True], texts=[text], decode=lm.tokenizer.decode, model=lm.model,
        calls=seq.request.calls,
    )  # fmt: skip
    return float(engine.finish(judge(scorer.bind(lm.tokenizer), told))[0])


def test_qwens_process_reward_model(tmp_path: Path) -> None:
    model, generator = causal(), torch.Generator().manual_seed(1)
    shapes = {"score.0.weight": (32, 32), "score.0.bias": (32,), "score.2.weight": (2, 32), "score.2.bias": (2,)}
    head = {name: torch.randn(*shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    folder = save(tmp_path / "prm", model, head, architectures=["Qwen2ForProcessRewardModel"], num_labels=2)
    said = "".join(step + "<extra_0>" for step in STEPS)
    system = "Please reason step by step, and put your final answer within \\boxed{}."
    tokens = ids(chat(("system", system), ("user", QUESTION), ("assistant", said)))
    states = model.model(tokens).last_hidden_state[0]
    rows = states[tokens[0] == ids("<extra_0>")[0, 0]]
    inner = torch.relu(rows @ head["score.0.weight"].T + head["score.0.bias"])
    first, last = torch.softmax(inner @ head["score.2.weight"].T + head["score.2.bias"], dim=-1)[:, 1].tolist()
    scorers = {steps: RewardModel(model=str(folder), steps=steps) for steps in ("last", "min", "product")}
    found = {steps: score(scorer) for steps, scorer in scorers.items()}
    assert found == pytest.approx({"last": last, "min": min(first, last), "product": first * last}, abs=2e-4)
    # The wrong rule: the probability of the first class.
    assert found["last"] != pytest.approx(1 - last, abs=1e-3)


def test_skyworks_process_reward_model(tmp_path: Path) -> None:
    model, generator = causal(2), torch.Generator().manual_seed(3)
    head = {
        "v_head.summary.weight": torch.randn(1, 32, generator=generator) * 0.3,
        "v_head.summary.bias": torch.randn(1, generator=generator),
    }
    folder = save(tmp_path / "sky", model, head, architectures=["Qwen2ForCausalLM"], tie_word_embeddings=True)
    tokens, rows = ids(f"{QUESTION}\n"), []
    for step in STEPS:
        tokens = torch.cat([tokens, ids(f"{step}\n")], dim=1)
        rows.append(tokens.shape[1] - 1)
    states = model.model(tokens).last_hidden_state[0][rows]
    expected = torch.sigmoid(states @ head["v_head.summary.weight"].T + head["v_head.summary.bias"])[:, 0].tolist()
    assert score(RewardModel(model=str(folder))) == pytest.approx(expected[-1], abs=2e-4)
    assert score(RewardModel(model=str(folder), steps="mean")) == pytest.approx(sum(expected) / 2, abs=2e-4)


def test_classifiers_of_sequences_and_of_tokens(tmp_path: Path) -> None:
    whole = randomize(transformers.Qwen2ForSequenceClassification(transformers.Qwen2Config(**SHAPE, num_labels=1)), 4)
    folder = save(tmp_path / "orm", whole)
    states = whole.model(ids(chat(("user", QUESTION), ("assistant", TEXT)))).last_hidden_state[0]
    scorer = RewardModel(model=str(folder))
    assert score(scorer) == pytest.approx(float(whole.score(states[-1])[0].detach()), abs=2e-4)
    assert scorer.log and not scorer.prefixes
    each = randomize(transformers.Qwen2ForTokenClassification(transformers.Qwen2Config(**SHAPE, num_labels=2)), 5)
    folder = save(tmp_path / "trl", each)
    logits = each(ids(f"{QUESTION}\n" + "".join(f"{step}\n" for step in STEPS))).logits
    right = float(torch.softmax(logits[0, -1], dim=-1)[1].detach())
    assert score(RewardModel(model=str(folder))) == pytest.approx(right, abs=2e-4)


def test_language_models_that_answer_with_signs(tmp_path: Path) -> None:
    model = causal(6)
    folder = save(tmp_path / "lm", model)
    tokens = ids(f"{QUESTION} " + "\n".join(f"{step} \u043a\u0438" for step in STEPS))
    rows = model(tokens).logits[0][tokens[0] == ids("\u043a\u0438")[0, -1]]
    probabilities = torch.softmax(rows[:, ids("+ -")[0][-2:]], dim=-1)[:, 0].tolist()
    shepherd = RewardModel(model=str(folder), form="math-shepherd", steps="min")
    assert score(shepherd) == pytest.approx(min(probabilities), abs=2e-4)
    begun = chat(("user", f"{QUESTION} {STEPS[0]}"), ("assistant", "+"), ("user", STEPS[1])) + "<|im_start|>assistant\n"
    signs = torch.cat([ids("+")[0, -1:], ids("-")[0, -1:]])
    pair = torch.softmax(model(ids(begun)).logits[0, -1][signs], dim=-1)
    assert score(RewardModel(model=str(folder), form="rlhflow")) == pytest.approx(float(pair[0]), abs=2e-4)


def test_searches_take_them_by_their_folder(tmp_path: Path) -> None:
    whole = randomize(transformers.Qwen2ForSequenceClassification(transformers.Qwen2Config(**SHAPE, num_labels=1)), 7)
    folder = save(tmp_path / "orm", whole)
    search = BestOfN(RewardModel(model=str(folder)), n=3)
    best, *others = tiny_lm().search(QUESTION, search, temperature=1.0, max_new_tokens=8)
    assert best.trace.ledger.rows["reward"] > 0
    assert all((best.score or 0) >= (each.score or 0) for each in others)


def test_one_that_is_trained_here_is_what_transformers_reads(tmp_path: Path) -> None:
    source, out = save(tmp_path / "lm", causal(9)), tmp_path / "prm"
    judged = [
        (f"What is {number} + 1?", f"First.\n\nSo {sign}{number + 1}.", float(sign == ""), [1.0, float(sign == "")])
        for number in range(24)
        for sign in ("", "-")
    ]
    values = train_published_prm(load(str(source), dtype="float32"), source, judged, out)
    assert values["cross_entropy"] < values["cross_entropy_of_the_mean"] and values["auc"] > 0.7
    read = transformers.AutoModelForTokenClassification.from_pretrained(out)
    for text in ("First.\n\nSo 4.", "First.\n\nSo -4."):
        lines = "".join(f"{step}\n" for step in text.split("\n\n"))
        logits = read(ids(f"{QUESTION}\n{lines}")).logits[0, -1]
        right = float(torch.softmax(logits, dim=-1)[1].detach())
        assert score(RewardModel(model=str(out)), text) == pytest.approx(right, abs=2e-4)
    scores = [score(RewardModel(model=str(out)), f"First.\n\nSo {sign}4.") for sign in ("", "-")]
    assert scores[0] > scores[1]
    with pytest.raises(SettingsError, match="not empty"):
        train_published_prm(load(str(source), dtype="float32"), source, judged, out)
    loaded = load(str(source))
    for reward, labels in ((2.0, None), (1.0, [0.5, float("nan")])):
        with pytest.raises(SettingsError, match="from 0 to 1"):
            train_published_prm(loaded, source, [(*judged[0][:2], reward, labels)], tmp_path / "other")
    with pytest.raises(SettingsError, match="2 steps between blank lines and 1 labels"):
        train_published_prm(loaded, source, [(*judged[0][:3], [1.0])], tmp_path / "other")


def test_what_is_no_reward_model_is_said(tmp_path: Path) -> None:
    config = transformers.Qwen2Config(**SHAPE, num_labels=5)
    folder = save(tmp_path / "five", randomize(transformers.Qwen2ForSequenceClassification(config), 8))
    with pytest.raises(UnsupportedModel, match="5 outputs"):
        RewardModel(model=str(folder))
    gated = save(tmp_path / "gated", causal(), architectures=["LlamaForRewardModelWithGating"])
    with pytest.raises(UnsupportedModel, match="ArmoRM"):
        RewardModel(model=str(gated))
    bare = save(tmp_path / "bare", causal(), architectures=["Qwen2ForProcessRewardModel"])
    with pytest.raises(CorruptFile, match="no head of a qwen-prm"):
        RewardModel(model=str(bare))
    with pytest.raises(SettingsError, match="auto, math-shepherd or rlhflow"):
        RewardModel(model=str(bare), form="other")  # type: ignore[arg-type]
