"""Published reward models: what is read of their folders is what their own code computes, up to float32."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from decodery.core.errors import CorruptFile, SettingsError, UnsupportedModel
from decodery.models.loaders.load import load
from decodery.scorers import RewardModel
from decodery.search import BestOfN
from decodery.step.scorer import Candidates, judge
from decodery.training.published_prm import train_published_prm
from reward_folders import SHAPE, causal, save, tokenizer
from serving import tiny_lm
from tiny_models import randomize

STEPS = ["First, 2 + 2.", "So 4."]
TEXT = "\n\n".join(STEPS)
QUESTION = "What is 2 + 2?"


def ids(*texts: str) -> torch.Tensor:
    """Tokens of texts that are read apart."""
    return torch.tensor([[token for text in texts for token in tokenizer().encode(text).ids]])


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
    head = mlp(generator, outputs=2)
    folder = save(tmp_path / "prm", model, head, architectures=["Qwen2ForProcessRewardModel"], num_labels=2)
    said = "".join(step + "<extra_0>" for step in STEPS)
    system = "Please reason step by step, and put your final answer within \\boxed{}."
    tokens = ids(chat(("system", system), ("user", QUESTION), ("assistant", said)))
    states = model.model(tokens).last_hidden_state[0]
    rows = states[tokens[0] == ids("<extra_0>")[0, 0]]
    first, last = torch.softmax(apply(head, rows), dim=-1)[:, 1].tolist()
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
    folder = save(
        tmp_path / "sky", model, head, {"bos_token": "<|im_start|>"}, architectures=["Qwen2ForCausalLM"],
        tie_word_embeddings=True,
    )  # fmt: skip
    # Each line is read apart from what ends it, and an empty line is a step, as in the code that was published.
    lines = TEXT.split("\n")
    parts = [part for line in lines for part in (line, "\n")]
    tokens = ids("<|im_start|>", f"{QUESTION}\n", *parts)
    ends = [ids("<|im_start|>", f"{QUESTION}\n", *parts[: 2 * n + 2]).shape[1] - 1 for n in range(len(lines))]
    states = model.model(tokens).last_hidden_state[0][ends]
    expected = torch.sigmoid(states @ head["v_head.summary.weight"].T + head["v_head.summary.bias"])[:, 0].tolist()
    assert len(expected) == 3 and tokens.shape[1] > ids(f"<|im_start|>{QUESTION}\n{TEXT}\n").shape[1]
    assert score(RewardModel(model=str(folder))) == pytest.approx(expected[-1], abs=2e-4)
    assert score(RewardModel(model=str(folder), steps="mean")) == pytest.approx(sum(expected) / 3, abs=2e-4)


def test_classifiers_of_sequences_and_of_tokens(tmp_path: Path) -> None:
    # The line feed of the template fills texts up here, and the token before it is the one that scores.
    for number, pad in enumerate((257, ids("\n")[0, 0].item())):
        config = transformers.Qwen2Config(**SHAPE | {"pad_token_id": pad}, num_labels=1)
        whole = randomize(transformers.Qwen2ForSequenceClassification(config), 4)
        scorer = RewardModel(model=str(save(tmp_path / f"orm{number}", whole)))
        expected = float(whole(ids(chat(("user", QUESTION), ("assistant", TEXT)))).logits.detach())
        assert score(scorer) == pytest.approx(expected, abs=2e-4)
        assert scorer.log and not scorer.prefixes
    # INF-ORM's head of two layers, which is no process reward model for it.
    layers, generator = causal(11), torch.Generator().manual_seed(12)
    head = mlp(generator, outputs=1)
    folder = save(tmp_path / "inf", layers, head, architectures=["INFORMForSequenceClassification"], num_labels=1)
    state = layers.model(ids(chat(("user", QUESTION), ("assistant", TEXT)))).last_hidden_state[0, -1]
    assert score(RewardModel(model=str(folder))) == pytest.approx(float(apply(head, state).detach()), abs=2e-4)
    # Qwen2.5-Math-RM has the same head, and a system turn before the question.
    asked = "Please reason step by step, and put your final answer within \\boxed{}."
    folder = save(tmp_path / "rm", layers, head, architectures=["Qwen2ForRewardModel"])
    tokens = ids(chat(("system", asked), ("user", QUESTION), ("assistant", TEXT)))
    with_system = float(apply(head, layers.model(tokens).last_hidden_state[0, -1]).detach())
    scorer = RewardModel(model=str(folder))
    assert score(scorer) == pytest.approx(with_system, abs=2e-4) and scorer.log and not scorer.prefixes
    assert with_system != pytest.approx(float(apply(head, state).detach()), abs=1e-3)
    each = randomize(transformers.Qwen2ForTokenClassification(transformers.Qwen2Config(**SHAPE, num_labels=2)), 5)
    folder = save(tmp_path / "trl", each)
    right = trl(each, TEXT)
    assert score(RewardModel(model=str(folder))) == pytest.approx(right, abs=2e-4)


def trl(model: Any, text: str, begin: str = "") -> float:
    """What a classifier of tokens says of the last step of a text, tokenized as TRL's trainer does."""
    steps = [part for step in text.split("\n\n") for part in (step, "\n")]
    logits = model(ids(begin, QUESTION, *steps)).logits
    return float(torch.softmax(logits[0, -1], dim=-1)[1].detach())


def mlp(generator: torch.Generator, outputs: int) -> dict[str, torch.Tensor]:
    shapes = {
        "score.0.weight": (32, 32), "score.0.bias": (32,), "score.2.weight": (outputs, 32), "score.2.bias": (outputs,)
    }  # fmt: skip
    return {name: torch.randn(*shape, generator=generator) * 0.3 for name, shape in shapes.items()}


def apply(head: dict[str, torch.Tensor], states: torch.Tensor) -> torch.Tensor:
    inner = torch.relu(states @ head["score.0.weight"].T + head["score.0.bias"])
    return inner @ head["score.2.weight"].T + head["score.2.bias"]


LLAMA = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>{% endfor %}"
)


class Gating(torch.nn.Module):
    """ArmoRM's gate, as it was published."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(14)
        self.logit_scale = torch.nn.Parameter(torch.tensor([1.5]))
        sizes = [32, 24, 24, 24, 5]
        self.layers = torch.nn.ModuleList(torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            states = torch.relu(layer(states))
        return torch.softmax(self.layers[-1](states) / 2.0, dim=1) * self.logit_scale[0]


def test_armorm_mixes_its_scores_by_a_gate(tmp_path: Path) -> None:
    model = randomize(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, tie_word_embeddings=False)), 13)
    generator, gate = torch.Generator().manual_seed(15), Gating()
    head = {
        "regression_layer.weight": torch.randn(5, 32, generator=generator),
        "reward_transform_matrix": torch.eye(5) - 0.1 * torch.rand(5, 5, generator=generator),
        **{f"gating.{name}": tensor.detach() for name, tensor in gate.state_dict().items()},
    }
    gated = {"architectures": ["LlamaForRewardModelWithGating"], "num_objectives": 5, "gating_temperature": 2}
    gated |= {"gating_hidden_dim": 24, "gating_n_hidden": 3, "auto_map": {"AutoModel": "modeling_custom.X"}}
    folder = save(tmp_path / "armo", model, head, {"chat_template": LLAMA}, **gated)
    answer = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    prompt = f"<|start_header_id|>user<|end_header_id|>\n\n{QUESTION}"
    tokens = ids(f"{prompt}{answer}{TEXT}<|eot_id|>")
    states = model.model(tokens).last_hidden_state
    adjusted = states[:, -1] @ head["regression_layer.weight"].T @ head["reward_transform_matrix"]
    expected = float((gate(states[:, ids(prompt).shape[1]]) * adjusted).sum().detach())
    scorer = RewardModel(model=str(folder))
    assert score(scorer) == pytest.approx(expected, abs=2e-4) and scorer.log and not scorer.prefixes
    # The wrong rule: a gate that reads the end of the answer's header.
    wrong = float((gate(states[:, ids(f"{prompt}{answer}").shape[1] - 1]) * adjusted).sum().detach())
    assert wrong != pytest.approx(expected, abs=1e-3)
    with pytest.raises(SettingsError, match="reads the end of the prompt"):
        score(RewardModel(model=str(save(tmp_path / "other", model, head, **gated))))
    normed = {f"gating.layers.{n}.running_mean": torch.zeros(24) for n in (2, 5)}
    with pytest.raises(UnsupportedModel, match="a gate of another form"):
        RewardModel(model=str(save(tmp_path / "qrm", model, head | normed, **gated)))
    damaged: list[tuple[dict[str, torch.Tensor], dict[str, Any], str]] = [
        ({"reward_transform_matrix": torch.eye(4)}, {}, "5 objectives"),
        ({"gating.logit_scale": torch.ones(4)}, {}, "5 objectives"),
        ({"regression_layer.weight": torch.ones(5, 31)}, {}, "reads 31 values of 32"),
        ({"gating.layers.1.weight": torch.ones(24, 23)}, {}, "reads 23 values of 24"),
        ({"gating.layers.1.bias": torch.ones(25)}, {}, "25 values for 24 outputs"),
        ({}, {"gating_n_hidden": 1 << 40}, "an integer from 0 to 64"),
        ({}, {"gating_temperature": 0}, "gating_temperature"),
    ]
    for number, (tensors, settings, said) in enumerate(damaged):
        with pytest.raises(CorruptFile, match=said):
            RewardModel(model=str(save(tmp_path / f"torn{number}", model, head | tensors, **gated | settings)))


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
    values = train_published_prm(load(str(source), dtype="float32"), source, judged, out, ridge=0.1)
    assert values["cross_entropy"] < values["baselines"]["always the mean"]["cross_entropy"]
    assert values["auroc"] > 0.7 > values["shuffled labels"]["auroc"] and values["tested on"].startswith("3 prompts")
    read = transformers.AutoModelForTokenClassification.from_pretrained(out)
    for text in ("First.\n\nSo 4.", "First.\n\nSo -4."):
        assert score(RewardModel(model=str(out)), text) == pytest.approx(trl(read, text), abs=2e-4)
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
    for name in ("InternLM2ForRewardModel", "LlamaForRewardModelWithGating31", "LlamaRewardModel"):
        own = save(tmp_path / name, causal(), architectures=[name])
        with pytest.raises(UnsupportedModel, match="code of its own"):
            RewardModel(model=str(own))
    deep = {"v_head.summary.0.weight": torch.ones(8, 32), "v_head.summary.2.weight": torch.ones(1, 8)}
    with pytest.raises(UnsupportedModel, match=r"the head v_head\.summary\.0\.weight, of a form that is not read"):
        RewardModel(model=str(save(tmp_path / "grm", causal(), deep)))
    bare = save(tmp_path / "bare", causal(), architectures=["Qwen2ForProcessRewardModel"])
    with pytest.raises(CorruptFile, match="no head of a qwen-prm"):
        RewardModel(model=str(bare))
    with pytest.raises(SettingsError, match="auto, math-shepherd or rlhflow"):
        RewardModel(model=str(bare), form="other")  # type: ignore[arg-type]
