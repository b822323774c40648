"""The smallest command of every kind of `decodery train`, and the files and models that they read."""

from __future__ import annotations

import json
from pathlib import Path

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
}
"""By kind: the arguments after `decodery train KIND`, without --out."""


def made_files(folder: Path) -> dict[str, str]:
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
    }
    (folder / "text.txt").write_text(TEXT * 60)
    for name, each in lines.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, each)))
    found = {name: str(folder / f"{name}.jsonl") for name in lines}
    return found | {"text": str(folder / "text.txt"), "model": str(plain), "chat": str(chat)}
