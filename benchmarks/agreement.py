"""Texts and laws of transformers' generation methods beside ours, by the same weights in float32.

    python benchmarks/agreement.py [texts] [laws] [--prompts 6] [--tokens 32] [--transformers DIR]

The model is the embedded one; prompts are short questions of Spec-Bench (DECODERY_DATA). What transformers offers
depends on its version: contrastive search, DoLa and diverse beams have left version 5. With --transformers another
version is taken from DIR, which `pip install --target DIR --no-deps transformers==4.50.3 huggingface_hub==0.30.2
tokenizers==0.21.1` makes. What one version lacks is left as another one found it. Writes agreement.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decodery_benchmarks.results import begun_result, write_result

DATA = Path(os.environ.get("DECODERY_DATA", Path(__file__).parents[2] / "shared" / "data"))
BEGINNING = 24
"""Tokens of a question that are given: texts are continued, without a chat template."""


class Bench:
    """The same weights twice, and prompts as token ids."""

    def __init__(self, prompts: int, tokens: int) -> None:
        import decodery as dc

        self.lm, self.tokens = dc.load("smollm2", dtype="float32"), tokens
        self.theirs = copied(self.lm.model)
        lines = (DATA / "spec_bench_dev.jsonl").read_text("utf-8").splitlines()
        turns = [json.loads(line)["turns"][0] for line in lines]
        long = [turn for turn in turns if len(turn) > 200]
        chosen = long[:: max(1, len(long) // prompts)][:prompts]
        self.prompts = [self.lm.tokenizer.encode(turn)[:BEGINNING] for turn in chosen]

    def ours(self, prompt: list[int], search: str | None = None, **settings: Any) -> list[list[int]]:
        """Texts by `LM.search`, or one by `LM.generate`, past the end of text."""
        request = self.lm.request(prompt, drafter=None, max_new_tokens=self.tokens, ignore_eos=True, **settings)
        engine = self.lm.engine()
        if search is not None:
            from decodery.core.registry import resolve

            return [seq.generated for seq in resolve("search", search).run(engine, request)]
        seq = engine.submit(request)
        engine.run([seq])
        return [seq.generated]

    @torch.inference_mode()
    def other(self, prompt: list[int], **settings: Any) -> list[list[int]]:
        """Texts by transformers."""
        rows = self.theirs.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=self.tokens, do_sample=False, **settings,
        )  # fmt: skip
        return [row[len(prompt) :].tolist() for row in rows]


def copied(model: Any) -> Any:
    """A `LlamaForCausalLM` with the weights of our model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config, weights = model.config, model.weights
    sizes = [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size, hidden_size=config.hidden_size, num_hidden_layers=config.num_layers,
            intermediate_size=config.intermediate_size, num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads, rms_norm_eps=config.norm_eps, rope_theta=config.rope.theta,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
            max_position_embeddings=config.max_positions, tie_word_embeddings=config.tie_embeddings,
            bos_token_id=None, eos_token_id=None, pad_token_id=0,
        )
    )  # fmt: skip
    tensors = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.norm}
    tensors["lm_head.weight"] = weights.head.weight
    for number, layer in enumerate(weights.layers):
        parts = dict(zip("qkv", layer.qkv.weight.split(sizes), strict=True)) | {"o": layer.output.weight}
        halves = dict(zip(("gate", "up"), layer.gate_up.weight.chunk(2), strict=True)) | {"down": layer.down.weight}
        named = {f"self_attn.{name}_proj": each for name, each in parts.items()}
        named |= {f"mlp.{name}_proj": each for name, each in halves.items()}
        named |= {"input_layernorm": layer.attention_norm, "post_attention_layernorm": layer.mlp_norm}
        tensors |= {f"model.layers.{number}.{name}.weight": each for name, each in named.items()}
    theirs.load_state_dict(tensors)
    return theirs.eval()


def _penalised(**settings: float) -> Any:
    from decodery.sampling import Sampler

    return Sampler.from_settings(**settings)


METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({}, {}),
    "repetition penalty 1.2": ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
    "no-repeat-ngram 3": ({"no_repeat_ngram": 3}, {"no_repeat_ngram_size": 3}),
    "guidance, scale 1.5": ({"logits_source": "guidance:scale=1.5"}, {"guidance_scale": 1.5}),
    "beam, width 4": ({"search": "beam:width=4"}, {"num_beams": 4, "num_return_sequences": 4}),
    "diverse-beam, 4 groups of one": (
        {"search": "diverse-beam:width=4,groups=4,diversity=0.5"},
        {"num_beams": 4, "num_beam_groups": 4, "diversity_penalty": 0.5, "num_return_sequences": 4},
    ),
    "diverse-beam, 2 groups of two": (
        {"search": "diverse-beam:width=4,groups=2,diversity=0.5"},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "num_return_sequences": 4},
    ),
    "contrastive-search, k 4, alpha 0.6": (
        {"search": "contrastive-search:k=4,alpha=0.6"},
        {"penalty_alpha": 0.6, "top_k": 4},
    ),
    "dola, low, published": (
        {"logits_source": "dola:published=yes", "repetition_penalty": 1.2},
        {"dola_layers": "low", "repetition_penalty": 1.2},
    ),
    "dola, high, published": (
        {"logits_source": "dola:layers=high,published=yes", "repetition_penalty": 1.2},
        {"dola_layers": "high", "repetition_penalty": 1.2},
    ),
}
"""Our settings and theirs. Lists of texts are compared without their order: diverse beams are ranked by another sum."""


def texts(bench: Bench) -> Iterator[tuple[str, dict[str, int]]]:
    """How many texts of all are the same."""
    for name, (ours, theirs) in METHODS.items():
        same = total = 0
        try:
            for prompt in bench.prompts:
                expected = sorted(bench.other(prompt, **theirs))
                got = sorted(bench.ours(prompt, **ours))
                total += len(expected)
                same += sum(text in got for text in expected)
        except (ValueError, OSError, NotImplementedError) as error:
            print(f"{name}: not in this version ({str(error).splitlines()[0][:100]})", flush=True)
            continue
        yield name, {"texts": total, "same": same}


def _warps() -> Iterator[tuple[str, str, Callable[[Any], Any]]]:
    yield "top-k 50", "top-k:k=50", lambda hf: hf.TopKLogitsWarper(50)
    yield "top-p 0.9", "top-p:p=0.9", lambda hf: hf.TopPLogitsWarper(0.9)
    yield "min-p 0.1", "min-p:p=0.1", lambda hf: hf.MinPLogitsWarper(0.1)
    yield "typical 0.9", "typical:mass=0.9", lambda hf: hf.TypicalLogitsWarper(0.9)
    yield "epsilon 9e-4", "epsilon:cutoff=9e-4", lambda hf: hf.EpsilonLogitsWarper(9e-4)
    yield "eta 2e-3", "eta:cutoff=2e-3", lambda hf: hf.EtaLogitsWarper(2e-3, device="cpu")
    yield "top-h 0.4, partial", "top-h:bound=partial", lambda hf: hf.TopHLogitsWarper(0.4)


def laws(bench: Bench) -> Iterator[tuple[str, dict[str, int]]]:
    """Of the model's own laws along its greedy texts, how many are left the same by a truncation, bit for bit."""
    from transformers.generation import logits_process

    from decodery.core.registry import resolve
    from decodery.models.batch import Batch, Segment

    rows = []
    for prompt in bench.prompts:
        tokens = [*prompt, *bench.ours(prompt)[0]]
        with torch.inference_mode():
            segment = Segment.chunk(tokens, bench.lm.model.new_cache())
            rows.append(bench.lm.model.forward(Batch([segment])).logits[len(prompt) - 1 :])
    logits = torch.cat(rows)
    for name, spec, make in _warps():
        if not hasattr(logits_process, "TopHLogitsWarper") and name.startswith("top-h"):
            continue
        ids = torch.zeros(len(logits), 1, dtype=torch.long)
        # One row at a time: theirs of Top-H looks at a single one.
        expected = torch.cat([make(logits_process)(ids[:1], row[None].clone()) for row in logits])
        got = resolve("logits-processor", spec).process(logits, [])
        yield name, {"laws": len(logits), "same": int((expected == got).all(dim=-1).sum())}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("groups", nargs="*", choices=[[], "texts", "laws"], metavar="GROUP", help="texts, laws")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--transformers", type=Path, help="a folder with another version")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(arguments)
    if options.transformers is not None:
        sys.path.insert(0, str(options.transformers))
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    np.random.seed(0)
    path = options.out / "agreement.json"
    bench = Bench(options.prompts, options.tokens)
    result = begun_result(path)
    result |= {"model": "smollm2, float32", "prompts": len(bench.prompts), "tokens": options.tokens}
    for group in options.groups or ("texts", "laws"):
        for name, facts in {"texts": texts, "laws": laws}[group](bench):
            result["summary"].setdefault(group, {})[name] = facts | {"transformers": transformers.__version__}
            write_result(path, result)
            print(name, facts, flush=True)


if __name__ == "__main__":
    main()
