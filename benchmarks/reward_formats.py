"""Published reward models with random weights: scores here beside those of the code they were published with.

    python benchmarks/reward_formats.py

Each folder is written as `transformers` writes it, with the tokenizer of the embedded model. Beside it stands what the
published code computes with `transformers`: its tokens, the rows it reads and its formula. Scores are in float32.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers

import decodery as dc
from decodery.models.loaders.load import load
from decodery.scorers import RewardModel
from decodery.scorers.pair_preference import PairPreference
from decodery_benchmarks.results import RESULTS, write_result

Tensors = Mapping[str, torch.Tensor]
Reference = Callable[[Any, Any, str, list[str]], float]
_WIDTH = 64
_SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
_LLAMA = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>{% endfor %}"
)
_ANSWERED = f"{{{{ bos_token }}}}{_LLAMA}<|start_header_id|>assistant<|end_header_id|>\n\n"
"""As Llama 3 was first published: the turn of the answer always begins."""
_TURNS = (
    "\n{% for message in messages %}{% if loop.index0 % 2 == 0 %}\n\n<turn> user\n {{ message['content'] }}"
    "{% else %}\n\n<turn> assistant\n {{ message['content'] }}{% endif %}{% endfor %}\n\n\n"
)
_MARKS = ("<extra_0>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")


def tensors(seed: int, **shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name.replace("__", "."): torch.randn(*shape, generator=generator) * 0.2 for name, shape in shapes.items()}


def two_layers(outputs: int) -> dict[str, torch.Tensor]:
    return tensors(
        1, score__0__weight=(_WIDTH, _WIDTH), score__0__bias=(_WIDTH,), score__2__weight=(outputs, _WIDTH),
        score__2__bias=(outputs,),
    )  # fmt: skip


def gate() -> dict[str, torch.Tensor]:
    sizes = [_WIDTH, 48, 48, 48, 19]
    layers = {f"gating__layers__{n}__weight": (sizes[n + 1], sizes[n]) for n in range(4)}
    layers |= {f"gating__layers__{n}__bias": (sizes[n + 1],) for n in range(4)}
    found = tensors(2, regression_layer__weight=(19, _WIDTH), reward_transform_matrix=(19, 19), **layers)
    return found | {"gating.logit_scale": torch.ones(1)}


def states(model: Any, ids: list[int]) -> torch.Tensor:
    found: torch.Tensor = model.model(torch.tensor([ids])).last_hidden_state[0]
    return found


def apply(head: Tensors, rows: torch.Tensor) -> torch.Tensor:
    inner = torch.relu(rows @ head["score.0.weight"].T + head["score.0.bias"])
    return inner @ head["score.2.weight"].T + head["score.2.bias"]


def chat(tokenizer: Any, *turns: tuple[str, str]) -> list[int]:
    text = tokenizer.apply_chat_template([{"role": role, "content": said} for role, said in turns], tokenize=False)
    found: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return found


def qwen(head: Tensors) -> Reference:
    def score(model: Any, tokenizer: Any, question: str, steps: list[str]) -> float:
        said = "<extra_0>".join(steps) + "<extra_0>"
        ids = chat(tokenizer, ("system", _SYSTEM), ("user", question), ("assistant", said))
        place = tokenizer.encode("<extra_0>")[0]
        return float(torch.softmax(apply(head, states(model, ids)[torch.tensor(ids) == place]), dim=-1)[-1, 1])

    return score


def skywork(head: Tensors) -> Reference:
    def score(model: Any, tokenizer: Any, question: str, steps: list[str]) -> float:
        ids, end = tokenizer.encode(tokenizer.bos_token + question + "\n"), tokenizer.encode("\n")[-1]
        for line in "\n\n".join(steps).split("\n"):
            ids = [*ids, *(tokenizer.encode(line) if line else []), end]
        row = states(model, ids)[-1]
        return float(torch.sigmoid(row @ head["v_head.summary.weight"].T + head["v_head.summary.bias"]))

    return score


def token_classifier(model: Any, tokenizer: Any, question: str, steps: list[str]) -> float:
    ids = [tokenizer.bos_token_id, *tokenizer(question, add_special_tokens=False)["input_ids"]]
    for step in steps:
        ids += tokenizer(step, add_special_tokens=False)["input_ids"] + tokenizer.encode("\n", add_special_tokens=False)
    return float(torch.softmax(model(torch.tensor([ids])).logits[0, -1], dim=-1)[1])


def whole(model: Any, tokenizer: Any, question: str, steps: list[str]) -> float:
    ids = chat(tokenizer, ("user", question), ("assistant", "\n\n".join(steps)))
    return float(model(torch.tensor([ids])).logits[0, 0])


def inf_orm(head: Tensors) -> Reference:
    def score(model: Any, tokenizer: Any, question: str, steps: list[str]) -> float:
        ids = chat(tokenizer, ("user", question), ("assistant", "\n\n".join(steps)))
        return float(apply(head, states(model, ids)[-1]))

    return score


def qwen_rm(head: Tensors) -> Reference:
    def score(model: Any, tokenizer: Any, question: str, steps: list[str]) -> float:
        ids = chat(tokenizer, ("system", _SYSTEM), ("user", question), ("assistant", "\n\n".join(steps)))
        return float(apply(head, states(model, ids)[-1]))

    return score


def armorm(head: Tensors) -> Reference:
    def score(model: Any, tokenizer: Any, question: str, steps: list[str]) -> float:
        ids = chat(tokenizer, ("user", question), ("assistant", "\n\n".join(steps)))
        mark = tokenizer.encode("<|eot_id|><|start_header_id|>assistant<|end_header_id|>", add_special_tokens=False)
        place = next(at for at in range(len(ids) - len(mark), -1, -1) if ids[at : at + len(mark)] == mark)
        rows = states(model, ids)
        inner = rows[place]
        for number in range(4):
            inner = head[f"gating.layers.{number}.weight"] @ inner + head[f"gating.layers.{number}.bias"]
            inner = torch.relu(inner) if number < 3 else inner
        shares = torch.softmax(inner / 10, dim=0) * head["gating.logit_scale"]
        scores = (head["regression_layer.weight"] @ rows[-1]) @ head["reward_transform_matrix"]
        return float((shares * scores).sum())

    return score


def shepherd(model: Any, tokenizer: Any, question: str, steps: list[str]) -> float:
    ids = tokenizer.encode(f"{question} " + "\n".join(f"{step} ки" for step in steps))
    right, wrong = tokenizer.encode("+ -")[-2:]
    rows = model(torch.tensor([ids])).logits[0][torch.tensor(ids) == tokenizer.encode("ки")[-1]]
    return float(torch.softmax(rows[-1, [right, wrong]], dim=-1)[0])


def rlhflow(model: Any, tokenizer: Any, question: str, steps: list[str]) -> float:
    turns = []
    for number, step in enumerate(steps):
        turns += [("user", f"{question} {step}" if number == 0 else step), ("assistant", "+")]
    ids, signs = chat(tokenizer, *turns), [tokenizer.encode(sign)[-1] for sign in "+-"]
    place = max(at for at, token in enumerate(ids) if token == signs[0]) - 1
    return float(torch.softmax(model(torch.tensor([ids])).logits[0, place, signs], dim=-1)[0])


def preference(model: Any, tokenizer: Any, question: str, answers: tuple[str, str]) -> float:
    """How likely the first answer is preferred, the mean of both orders."""
    context = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], chat_template=_TURNS, tokenize=False
    )
    labels, chosen = [tokenizer.encode(label, add_special_tokens=False)[0] for label in "AB"], []
    for place in (0, 1):
        said = f"[CONTEXT] {context} [RESPONSE A] {answers[place]} [RESPONSE B] {answers[1 - place]} \n"
        text = tokenizer.apply_chat_template([{"role": "user", "content": said}], tokenize=False)
        ids = tokenizer.encode(text.replace(tokenizer.bos_token, ""), add_special_tokens=False)
        chosen.append(float(torch.softmax(model(torch.tensor([ids])).logits[0, -1, labels].double(), dim=-1)[place]))
    return sum(chosen) / 2


_HEADS: dict[str, dict[str, torch.Tensor]] = {
    "qwen": two_layers(2),
    "skywork": tensors(3, v_head__summary__weight=(1, _WIDTH), v_head__summary__bias=(1,)),
    "inf": two_layers(1),
    "armo": gate(),
}
_CAUSAL, _TOKENS, _WHOLE = "ForCausalLM", "ForTokenClassification", "ForSequenceClassification"
FORMATS: dict[str, tuple[str, str, Reference, dict[str, Any]]] = {
    "Qwen2.5-Math-PRM": (
        "Qwen2ForProcessRewardModel", "qwen", qwen(_HEADS["qwen"]), {},
    ),
    "Skywork-o1-PRM": ("Qwen2ForCausalLM", "skywork", skywork(_HEADS["skywork"]), {}),
    "token classifier (TRL)": ("Qwen2ForTokenClassification", "", token_classifier, {}),
    "sequence classifier": ("Qwen2ForSequenceClassification", "", whole, {}),
    "sequence classifier, padding at the end": ("LlamaForSequenceClassification", "", whole, {"pads": True}),
    "Qwen2.5-Math-RM": ("Qwen2ForRewardModel", "inf", qwen_rm(_HEADS["inf"]), {}),
    "INF-ORM": ("INFORMForSequenceClassification", "inf", inf_orm(_HEADS["inf"]), {}),
    "ArmoRM": ("LlamaForRewardModelWithGating", "armo", armorm(_HEADS["armo"]), {}),
    "Math-Shepherd": ("LlamaForCausalLM", "", shepherd, {"form": "math-shepherd"}),
    "RLHFlow": ("LlamaForCausalLM", "", rlhflow, {"form": "rlhflow"}),
}  # fmt: skip


def written(folder: Path, tokenizer: Any, name: str, head: str, pads: bool) -> Any:
    """A folder in a format; the model it holds, without its head where that has code of its own."""
    family = "Qwen2" if name.startswith("Qwen2") else "Llama"
    kind = next((kind for kind in (_TOKENS, _WHOLE) if name == f"{family}{kind}"), _CAUSAL)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=len(tokenizer), hidden_size=_WIDTH, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False, num_labels=1 + (kind == _TOKENS),
        eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.encode("\n")[0] if pads else tokenizer.unk_token_id,
    )  # fmt: skip
    torch.manual_seed(5)
    model = getattr(transformers, family + kind)(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.2) if weight.ndim > 1 else weight.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    described = json.loads((folder / "config.json").read_text()) | {"architectures": [name]}
    if head:
        file = folder / "model.safetensors"
        kept = {key: each for key, each in safetensors.torch.load_file(file).items() if key != "lm_head.weight"}
        safetensors.torch.save_file(kept | _HEADS[head], file)
        described |= {"num_labels": 1, "gating_n_hidden": 3, "gating_temperature": 10} if head == "armo" else {}
    (folder / "config.json").write_text(json.dumps(described))
    return model


def texts(count: int) -> list[tuple[str, list[str]]]:
    """Questions and steps that end with full stops, brackets and digits."""
    draw = random.Random(7)
    words = ["the", "sum", "of", "12.", "so", "(3", "+", "4)", "=", "7", "therefore", "half", "costs", "$5.50", "each:"]
    return [
        (
            " ".join(draw.choices(words, k=draw.randint(4, 12))) + "?",
            [
                " ".join(draw.choices(words, k=draw.randint(2, 9))) + draw.choice(".):7")
                for _ in range(draw.randint(1, 4))
            ],
        )
        for _ in range(count)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--out", type=Path, default=RESULTS / "reward-formats.json")
    given = parser.parse_args()
    writer, rows = dc.load("smollm2"), list[dict[str, Any]]()
    for name, (architecture, head, reference, settings) in FORMATS.items():
        with tempfile.TemporaryDirectory() as made:
            tokenizer = tokenizer_of(
                writer, _LLAMA if architecture.startswith("Llama") else writer.chat_template.source
            )
            model = written(Path(made), tokenizer, architecture, head, settings.pop("pads", False))
            scorer = RewardModel(model=made, dtype="float32", **settings).bind(writer.tokenizer)
            gaps, spread = [], []
            for question, steps in texts(given.texts):
                with torch.inference_mode():
                    wanted = reference(model, tokenizer, question, steps)
                gaps.append(abs(said(writer, scorer, question, "\n\n".join(steps)) - wanted))
                spread.append(wanted)
        rows.append(row(name, gaps, spread))
        print(rows[-1], flush=True)
    rows.append(row("RLHFlow, pairs", *pairs(writer, given.texts)))
    print(rows[-1], flush=True)
    write_result(given.out, {"rows": rows})


def tokenizer_of(writer: dc.LLM, template: str) -> Any:
    backend = type(writer.tokenizer.backend).from_str(writer.tokenizer.backend.to_str())
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|endoftext|>", eos_token="<|im_end|>", unk_token="<|endoftext|>",
        additional_special_tokens=list(_MARKS),
    )  # fmt: skip
    tokenizer.chat_template = template
    return tokenizer


def row(name: str, gaps: list[float], spread: list[float]) -> dict[str, Any]:
    low, high = min(spread), max(spread)
    return {"format": name, "texts": len(gaps), "largest": max(gaps), "lowest": low, "highest": high}


def pairs(writer: dc.LLM, count: int) -> tuple[list[float], list[float]]:
    """Two answers in one prompt: differences from the published code, and what that says."""
    gaps, spread = [], []
    with tempfile.TemporaryDirectory() as made:
        tokenizer = tokenizer_of(writer, _ANSWERED)
        model = written(Path(made), tokenizer, "LlamaForCausalLM", "", False)
        judge = PairPreference(load(made, dtype="float32"))
        for (question, steps), (_, others) in itertools.pairwise(texts(count + 1)):
            answers, engine = ("\n\n".join(steps), "\n\n".join(others)), writer.engine()
            conversation = engine.open(writer.request_for(question, max_new_tokens=4)).request.conversation
            found = engine.finish(judge.preferred(conversation, answers))
            with torch.inference_mode():
                wanted = preference(model, tokenizer, question, answers)
            gaps.append(abs(found[0][1] - wanted))
            spread.append(wanted)
    return gaps, spread


def said(lm: Any, scorer: RewardModel, question: str, text: str) -> float:
    """What a scorer says here of an answer."""
    from decodery.step.scorer import Candidates, judge

    request, engine = lm.request_for(question, max_new_tokens=4), lm.engine()
    seq = engine.open(request)
    told = Candidates(
        request.prompt, [lm.tokenizer.encode(text, special=False)], [True], texts=[text], decode=lm.tokenizer.decode,
        model=lm.model, calls=seq.request.calls,
    )  # fmt: skip
    return float(engine.finish(judge(scorer, told))[0])


if __name__ == "__main__":
    main()
