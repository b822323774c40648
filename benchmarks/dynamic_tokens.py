"""What shorter prompts cost: merged tokens read as mean embeddings, beside prompts that are cut.

    OMP_NUM_THREADS=1 python benchmarks/dynamic_tokens.py [--net DIR]

Texts of benchmarks/texts under smollm2 in int8: the first 400 tokens are the prompt, the next 100 are scored after it.
Prompts are merged together, within words as far as it goes or within sentences to a share of all rows; beside each the
same prompt without merges, of which as many of the first tokens are left out. nats: mean loss of the tokens after it;
trained: with what a network of `decodery train merges` makes of merged tokens in place of the mean, where there is one.
Counts, no times. Writes benchmarks/results/dynamic-tokens.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

import decodery
from decodery.llm.llm import LLM
from decodery.models.batch import Batch, Segment
from decodery.models.torch.transformer import Transformer
from decodery.models.trained.merge_nets import MergeNet
from decodery.models.trained.merges import Merged, merged
from decodery.step.dynamic_tokens import dynamic
from decodery_benchmarks.results import write_result

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "results" / "dynamic-tokens.json"
SHARES = (0.05, 0.1, 0.2, 0.3)


@torch.no_grad()
def loss(lm: LLM, prompt: Merged, continuation: list[int], net: MergeNet | None = None) -> float:
    """Nats per token after a prompt."""
    model = lm.model
    assert isinstance(model, Transformer)
    tokens, embeddings = dynamic(model, prompt, net)
    whole = [*tokens, *continuation[:-1]]
    rows = model.embed_tokens(torch.tensor(whole)).clone()
    if embeddings is not None:
        rows[torch.from_numpy(embeddings.places)] = embeddings.rows
    asked = range(len(tokens) - 1, len(whole))
    segment = Segment(np.arange(len(whole)), states=rows, cache=model.new_cache(), logit_rows=asked)
    logits = model.forward(Batch([segment])).logits
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(continuation)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=400)
    parser.add_argument("--scored", type=int, default=100)
    parser.add_argument("--net", type=Path, help="Folder of a trained network.")
    args = parser.parse_args()
    net = MergeNet.load(args.net) if args.net else None
    lm = decodery.load("smollm2", dtype="int8")
    files = sorted((ROOT / "benchmarks" / "texts").glob("*.txt"))
    ids = [lm.tokenizer.encode(file.read_text(encoding="utf-8"))[: args.prompt + args.scored] for file in files]
    prompts, answers = [text[: args.prompt] for text in ids], [text[args.prompt :] for text in ids]

    def mean(texts: list[Merged], net: MergeNet | None = None) -> float:
        return float(np.mean([loss(lm, text, answer, net) for text, answer in zip(texts, answers, strict=True)]))

    def cut(texts: list[Merged]) -> list[Merged]:
        """As short as these, by leaving out what comes first."""
        return merged([text.tokens[len(text.tokens) - len(text.spans) :] for text in texts], lm.tokenizer, merges=0)

    ways = {"none": merged(prompts, lm.tokenizer, merges=0), "words": merged(prompts, lm.tokenizer)}
    for share in SHARES:
        ways[f"sentences, {share:g}"] = merged(prompts, lm.tokenizer, shorter=share, within="sentence")
    rows = {}
    for name, texts in ways.items():
        shorter = float(np.mean([text.shorter for text in texts]))
        rows[name] = {"shorter": shorter, "nats": mean(texts), "nats, cut": mean(cut(texts))}
        if net is not None:
            rows[name]["nats, trained"] = mean(texts, net)
        print(name, rows[name], flush=True)
    command = "python benchmarks/dynamic_tokens.py" + (" --net DIR" if net else "")
    made = {"command": command, "texts": len(ids), "prompt": args.prompt, "scored": args.scored, "rows": rows}
    if net is not None:
        made["net"] = dict(net.facts)
    write_result(OUT, made, summary=["net"])


if __name__ == "__main__":
    main()
