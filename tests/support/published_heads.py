"""Published heads of draft layers: small checkpoints, and what heads say beside what the public formulas say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decodery.models.batch import Batch, Segment
from decodery.speculative.heads.drafter import head_kind
from decodery.speculative.heads.grown import DraftHead
from decodery.speculative.heads.head import Heard, TrainedHead
from decodery.speculative.heads.reading import HeadReading
from decodery.step.draft_tree import DraftTree
from published import TARGET, TEXT, tensors_of
from published_blocks import block_rows, eagle_rows, enter, sizes_of

VOCAB, OUTPUTS, TAPS, MASK = 64, 20, [1, 3, 5], 63
QWEN: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2, "vocab_size": VOCAB, "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0, "max_position_embeddings": 512, "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip
SLIDING: dict[str, Any] = {
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 4,
    "use_sliding_window": True,
}
LLAMA = QWEN | {"model_type": "llama", "head_dim": 8}
SPOKEN = torch.arange(0, 3 * OUTPUTS, 3)
TREE = DraftTree(np.array([TEXT[-1], 9, 12, 3, 30, 9]), np.array([-1, 0, 0, 1, 1, 2]))
"""Two branches of two levels below the last token of `TEXT`."""
METHOD = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}]}


def speculators(kind: str, layers: dict[str, Any], **settings: Any) -> dict[str, Any]:
    verifier = {"verifier": {"name_or_path": "some/model", "architectures": []}}
    return {
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": kind, **METHOD, **verifier},
        "transformer_layer_config": layers,
        **settings,
    }


def eagle_tensors(layers: dict[str, Any], settings: dict[str, Any], *, width: int = 32, own: bool = False) -> Any:
    hidden, first = layers["hidden_size"], settings.get("prefix", "layers.0.")
    sizes = sizes_of(layers, first, 2 * hidden) | {f"{first}hidden_norm.weight": (hidden,)}
    for number in range(1, layers["num_hidden_layers"]):
        sizes |= sizes_of(layers, f"layers.{number}.", hidden)
    sizes |= {"fc.weight": (hidden, 3 * width), "norm.weight": (hidden,), "lm_head.weight": (OUTPUTS, hidden)}
    if settings.get("norm_before_fc"):
        sizes["input_norm.weight"] = (3 * width,)
    if settings.get("fc_norm"):
        sizes |= {f"fc_norm.{number}.weight": (width,) for number in range(3)}
    if own:
        sizes["embed_tokens.weight"] = (VOCAB, hidden)
    if settings.get("mask"):
        sizes["mask_hidden"] = (1, 1, 3 * width)
    told = torch.zeros(VOCAB, dtype=torch.bool)
    told[SPOKEN] = True
    return tensors_of(sizes) | {"d2t": SPOKEN - torch.arange(OUTPUTS), "t2d": told}


def block_tensors(layers: dict[str, Any], *, outputs: int = VOCAB, rank: int = 0, variant: str = "vanilla") -> Any:
    hidden = layers["hidden_size"]
    sizes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 3 * 32), "hidden_norm.weight": (hidden,)}
    sizes["norm.weight"] = (hidden,)
    for number in range(layers["num_hidden_layers"]):
        sizes |= sizes_of(layers, f"layers.{number}.", hidden)
    if rank:
        sizes |= {"markov_head.markov_w1.weight": (VOCAB, rank), "markov_head.markov_w2.weight": (outputs, rank)}
        sizes |= {"confidence_head.proj.weight": (1, hidden + rank), "confidence_head.proj.bias": (1,)}
        if variant == "gated":
            sizes |= {"markov_head.gate_proj.weight": (rank, hidden + rank), "markov_head.gate_proj.bias": (rank,)}
        if variant == "rnn":
            wide = (3 * rank, hidden + 2 * rank)
            sizes |= {"markov_head.joint_proj.weight": wide, "markov_head.joint_proj.bias": (3 * rank,)}
    if outputs == VOCAB:
        return tensors_of(sizes)
    return tensors_of(sizes | {"lm_head.weight": (outputs, hidden)}) | {"d2t": SPOKEN - torch.arange(outputs)}


def ids() -> dict[str, Any]:
    return {"eagle_aux_hidden_state_layer_ids": TAPS}


def embedding(weights: dict[str, torch.Tensor]) -> Callable[[list[int]], torch.Tensor]:
    own = weights.get("embed_tokens.weight")
    return lambda tokens: (
        TARGET.embed_tokens(torch.tensor(tokens)) if own is None else own[torch.tensor(tokens)]
    ).double()


def states_of(tokens: list[int], taps: list[Any]) -> list[torch.Tensor]:
    hidden = TARGET.forward(Batch([Segment.chunk(tokens, TARGET.new_cache())]), taps=taps).hidden
    return [hidden[tap] for tap in taps]


def found_logits(folder: Path, pieces: list[int], nodes: list[int]) -> tuple[DraftHead, torch.Tensor]:
    """The head's logits [1 + nodes, vocab] after TEXT and after nodes of TREE, the text read in pieces."""
    trained = TrainedHead.load(folder)
    head = head_kind(trained.kind)(trained, TARGET)
    assert isinstance(head, DraftHead)
    states = TARGET.forward(Batch([Segment.chunk(TEXT[:-1], TARGET.new_cache())]), taps=head.taps).hidden
    memory, first, logits = head.begin(), 0, torch.empty(0)
    for end in pieces:
        own = {tap: rows[first:end] for tap, rows in states.items()}
        logits = head.read(memory, own, torch.tensor(TEXT[first + 1 : end + 1]), np.arange(first, end))
        first = end
    reading = HeadReading(head, memory, root=Heard(logits))
    # A tree that was given up leaves nothing.
    reading.after(DraftTree.chain(TEXT[-1], [40, 41]), [1, 2])
    reading.rows.clear()
    return head, head.spread(torch.cat((logits[None], reading.after(TREE, nodes))))


def check(folder: Path, wanted: Callable[[list[int]], torch.Tensor], depths: int = 2) -> None:
    """Compare after the text and after nodes of the tree with the formula of a path below the text."""
    nodes = [node for node in range(1, len(TREE)) if TREE.depths[node] <= depths]
    paths = [[], *(TREE.tokens[TREE.path(node)].tolist() for node in nodes)]
    expected = torch.stack([wanted(path) for path in paths])
    for pieces in ([8], [3, 4, 8]):
        _, found = found_logits(folder, pieces, nodes)
        spoken = expected > -torch.inf
        assert torch.equal(found > -torch.inf, spoken)
        # The frequencies of positions are read in float32 by some layers.
        assert float((found - expected)[spoken].abs().max()) < 1e-9


def spread(logits: torch.Tensor) -> torch.Tensor:
    if len(logits) == VOCAB:
        return logits
    return torch.full((VOCAB,), -torch.inf, dtype=torch.float64).index_copy(0, SPOKEN, logits)


def eagle_formula(
    weights: dict[str, torch.Tensor], layers: dict[str, Any], settings: dict[str, Any], path: list[int]
) -> torch.Tensor:
    embed, tokens = embedding(weights), TEXT[1:]
    features = enter(weights, settings, states_of(TEXT[:-1], TAPS))
    fed, last = eagle_rows(weights, layers, settings, embed(tokens), features)
    for token in path:
        tokens, features = [*tokens, token], torch.cat((features, fed[-1:]))
        fed, last = eagle_rows(weights, layers, settings, embed(tokens), features)
    return spread(last[-1] @ weights["lm_head.weight"].T)


def block_config(kind: str, of_speculators: bool, layers: dict[str, Any], **settings: Any) -> dict[str, Any]:
    if of_speculators:
        return speculators(kind, layers, block_size=4, mask_token_id=MASK, aux_hidden_state_layer_ids=TAPS, **settings)
    own = {"mask_token_id": MASK, "target_layer_ids": [tap - 1 for tap in TAPS], **settings}
    return layers | {"block_size": 4, "num_target_layers": 6, "dflash_config": own, "auto_map": {"AutoModel": "x.Y"}}


def rows_of(weights: dict[str, torch.Tensor], layers: dict[str, Any], settings: dict[str, Any], own: bool) -> Any:
    block = embedding(weights)([TEXT[-1], MASK, MASK, MASK])
    return block_rows(weights, layers, settings, states_of(TEXT[:-1], TAPS), block, of_speculators=own)


def projected(weights: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
    own = weights.get("lm_head.weight")
    return TARGET.project(row[None])[0].double() if own is None else row @ own.T
