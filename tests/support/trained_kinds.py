"""The smallest command of every kind of `decodery train`, and the files and models that they read."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from commands import inside
from decodery.training import to_diffusion
from decodery.training.diffusion import DiffusionRecipe, held_out, train_diffusion
from decodery_benchmarks.training.seq2seq import Seq2SeqRecipe, train_seq2seq
from decodery_benchmarks.training.transductions import sources, transduction
from serving import TEMPLATE
from tiny_models import make_model, save

TEXT = "tide moon sand crab gull wave shell rope boat "
OWN = "-m {model} --texts 20 --max-new-tokens 5"
FILES = "{text} -m {model} --length 16 --texts 12"
LABELLED = "{labelled} -m {chat} --out {out}"
KINDS = {
    "draft": f"{OWN} --epochs 1 --tokens 64 --inner 32",
    "nested": f"{OWN} --epochs 1 --exits 1/2",
    "deer": f"{OWN} --epochs 1 --block 4 --tokens 64",
    "head": f"{OWN} --kind medusa --epochs 1",
    "hmm": f"{OWN} --states 4 --tokens 32 --iterations 3",
    "ppd": f"{OWN} --steps 4",
    "hidden-transfer": f"{OWN} --layers 1/2 --steps 4",
    "lexical-units": "-m {model} --texts 20 --max-new-tokens 12 --alpha 0 --steps 4",
    "swift": f"{OWN} --proposals 4 --read 4 --ratio 0.6",
    "ngram-cache": OWN,
    "ngrams": OWN,
    "del": f"{OWN} --exits 1",
    "acceptance": f"{OWN} --draft {{model}} --epochs 1 --depth 1",
    "kv-bottleneck": f"{FILES} --codebooks 2 --keys 8 --rank 4",
    "codebook": f"{FILES} --codes 8 --k 2 --steps 3",
    "autoencoder": f"{FILES.replace('12', '16')} --features 16 --k 2 --steps 10 --batch 16",
    "kv double-sparsity": FILES,
    "kv lserve": f"{FILES} --steps 3",
    "kv write-gate": f"{FILES} --steps 3",
    "kv coprocessor": f"{FILES} --steps 3 --ahead 4",
    "kv meta-soft": f"{FILES} --steps 3 --ahead 4",
    "datastore": "{text} -m {model}",
    "merges": f"{FILES} --steps 3",
    "s2ft": "{text} -m {model} --length 16 --steps 3",
    "lora": "{text} -m {model} --length 16 --steps 3 --rank 2",
    "bitnet": f"{OWN} --steps 3",
    "nm-sparsity": f"{OWN} --steps 3",
    "lq-lora": f"{OWN} --steps 3 --rank 2",
    "los": "{labelled} -m {chat} --rate 0.5 --k 4",
    "probe": "{labelled} -m {chat} --rate 0.5 --rows new --site resid_post.1",
    "sequential": "{labelled} -m {chat} --rate 0.5 --site resid_post.1",
    "direction": "{labelled} -m {chat} --site resid_post.1",
    "sae": "{labelled} -m {chat} --rate 0.5 --steps 3 --features 8",
    "diffusion": "--size xs --steps 3 --batch 8",
    "orpo": "{pairs} -m {model} --steps 3 --rank 2",
    "value": "{rewarded} -m {model}",
    "text-prm": "{rewarded} -m {model} --steps 12",
    "partial": "{sources} -m {model} --steps 3 --batch 2",
    "hyperfit": "{text} -m {model} --length 48 --texts 2 --epochs 2 --written 4 --batch 2",
    "sec": "{text} -m {model} --length 16 --every 1 --rank 2 --outputs 64 --epochs 1",
    "calm": "-m {model} --texts 20 --max-new-tokens 6 --confidence softmax --every 1 --delta 0.4 --epsilon 0.1",
    "ftp": f"{OWN} --steps 3 --population 4 --generations 1 --read 1 --length 12",
    "sven": "{fixes} -m {model} --length 2 --epochs 1 --batch 6",
    "judge": "{judged} -m {model} --steps 4",
    "grpo": "{problems} -m {model} --steps 3 --group 4 --batch 1 --max-new-tokens 3 --rank 2 --pattern (?=[!-O])()",
    "step-labels": "{solutions} -m {chat} --max-new-tokens 6",
    "cppd": "{dates} -m {encoder} --texts 12 --steps 3 --batch 2 --longest 4",
    "to-diffusion": "-m {words} --tasks copy --least 2 --most 3 --places 5 --rank 4 --steps 3 --batch 4",
    "dscd": "{diffusion} --tasks copy --letters 3 --steps 3 --batch 4",
    "r2": "{diffusion} --tasks copy --letters 3 --steps 3 --batch 4 --trajectories 16",
    "hamburger": "-m {sure} --texts 20 --max-new-tokens 12 --most 3 --layers 1 --epochs 1 --batch 6",
    "router": "{prompts} -m {model} --second {chat} --scorer value-head(head={value}) --no-chat-template "
    "--step-tokens 2 --max-new-tokens 6",
    "learn2pd": "{lists} -m {diffusion} --no-chat-template --max-new-tokens 8 --block 8 --epochs 6",
}
"""By kind: the arguments after `decodery train KIND`, without --out."""


class Files(dict[str, str]):
    """Files and models by name. Models that have to be trained first are made when a command names them."""

    def __init__(self, folder: Path, found: dict[str, str]) -> None:
        super().__init__(found)
        self.folder = folder

    def __missing__(self, name: str) -> str:
        out = self.folder / name
        if name == "diffusion":
            train_diffusion(DiffusionRecipe(("copy",), letters=3, steps=60, batch=16, lr=3e-3), out)
        elif name == "lists":
            tasks = held_out(DiffusionRecipe(("copy",), letters=3), 12)
            out.write_text("\n".join(" ".join(each.prompt) for each in tasks))
        elif name == "encoder":
            shape = {"hidden": 16, "heads": 2, "inner": 16, "encoder_layers": 1, "decoder_layers": 1}
            train_seq2seq(transduction("normalise"), out, recipe=Seq2SeqRecipe(**shape, batch=2, steps=1, held=1))
        elif name == "dates":
            out.write_text("\n".join(islice(sources(transduction("normalise"), "train"), 12)))
        elif name == "sure":
            # Its embedding and its head are one table, and some of its predictions leave little doubt.
            model = make_model("llama", tie_word_embeddings=True)
            model.get_input_embeddings().weight.data.mul_(4)
            save(model, out)
        elif name == "value":
            code, _, errors = inside("train", "value", *KINDS["value"].format_map(self).split(), "--out", str(out))
            assert code == 0, errors
        else:
            assert name == "words"
            save_word_model(out)
        self[name] = str(out)
        return self[name]


def save_word_model(folder: Path) -> Path:
    """A model of random weights whose tokenizer has a token for each word of the lists, and two special ones."""
    model = make_model("llama")
    special = ["<end>", "<spare>"]
    words = [*special, "Copy:", "Reverse:", "Replace:", "Answer:", "new", *to_diffusion.WORDS]
    assert len(words) <= model.config.vocab_size
    made = Tokenizer(models.WordLevel({word: id for id, word in enumerate(words)}, unk_token="<end>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(special)
    model.config.eos_token_id = model.generation_config.eos_token_id = 0
    save(model, folder)
    made.save(str(folder / "tokenizer.json"))
    return folder


def made_files(folder: Path) -> Files:
    """The files and the models of the commands, by name."""
    plain, chat = save(make_model("llama"), folder / "model"), save(make_model("llama", seed=1), folder / "chat")
    settings = {"chat_template": TEMPLATE, "bos_token": "<s>", "eos_token": "</s>"}
    (chat / "tokenizer_config.json").write_text(json.dumps(settings))
    said = [
        [{"role": "user", "content": f"Say {n}"}, {"role": "assistant", "content": "ab"[n % 2] * 3}] for n in range(80)
    ]
    lines = {
        "labelled": [{"messages": each, "label": bool(n % 2), "group": str(n)} for n, each in enumerate(said)],
        "pairs": [{"prompt": f"Say {n}", "chosen": "tide", "rejected": "sand"} for n in range(12)],
        "sources": [{"source": f"say {n}", "target": "tide" * (n % 3 + 1)} for n in range(20)],
        "rewarded": [{"prompt": f"Say {n}", "text": "tide" * (n % 3 + 1), "reward": n % 2} for n in range(24)],
        "fixes": [{"before": f"say({n})", "after": f"sing({n})"} for n in range(20)],
        "judged": [{"prompt": f"Say {n}", "right": f"tide {n}", "wrong": f"tide {n + 1}"} for n in range(20)],
        "problems": [{"question": f"Say {n}", "answer": "0"} for n in range(20)],
        "solutions": [{"question": f"Say {n}", "reference": "a\n\n1", "solution": f"b\n\n{n}"} for n in range(3)],
    }
    (folder / "text.txt").write_text(TEXT * 60)
    (folder / "prompts.txt").write_text("\n".join(f"Say {n}" for n in range(16)))
    for name, each in lines.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, each)))
    found = {name: str(folder / f"{name}.jsonl") for name in lines}
    found |= {name: str(folder / f"{name}.txt") for name in ("text", "prompts")}
    return Files(folder, found | {"model": str(plain), "chat": str(chat)})
