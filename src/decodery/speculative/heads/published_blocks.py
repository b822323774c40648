"""Published heads that fill in blocks: DFlash's and DSpark's, of z-lab, SpecForge, DeepSpec and speculators."""

from __future__ import annotations

from typing import Any

import torch

from decodery.core.errors import CorruptFile
from decodery.models.loaders.fields import Fields

from .checkpoint import Tensors
from .published_fields import SPECULATORS, draft_taps, mask_token
from .published_layers import DraftLayers, slides

Read = tuple[dict[str, torch.Tensor], dict[str, Any]]
"""Tensors and settings of a head."""


def dflash(settings: Fields, layers: DraftLayers, tensors: Tensors, *, anchored: bool | None = None) -> Read:
    """Tensors and settings of a DFlash head.

    Args:
        settings: What the head's configuration says beside its layers.
        layers: Its layers.
        tensors: Its checkpoint, from which what is used is taken.
        anchored: Whether the row of a block's first token predicts, too, and so every row what follows its place; None:
            as the configuration says.
    """
    hidden, speculators = layers.hidden, settings.get(SPECULATORS) is not None
    taps, width = draft_taps(settings, len(layers.shapes)), settings.get("target_hidden_size", hidden)
    found: dict[str, torch.Tensor] = {}
    for number in range(len(layers.shapes)):
        found |= layers.take(tensors, f"layers.{number}.", f"layer_{number}.")
    found |= tensors.linear("fc", {"fc": hidden}, len(taps) * width)
    for name in ("hidden_norm", "norm"):
        found[f"{name}.weight"] = tensors.take(f"{name}.weight", hidden)
    outputs = settings.get("draft_vocab_size", layers.config.vocab_size)
    found |= layers.words(tensors, outputs, needed=outputs != layers.config.vocab_size)
    size = settings.need("block_size")
    anchored = settings.get("sample_from_anchor", False) if anchored is None else anchored
    if size < 2 - anchored:
        raise CorruptFile(f"{settings.origin}: block_size = {size} leaves no token to draft")
    about = {
        "taps": taps,
        "mask_token": mask_token(settings, layers.config.vocab_size),
        "block": size,
        "heads": size if anchored else size - 1,
        "from_anchor": anchored,
        # A window is counted from the block's first token in one project's training and from every row in the other's.
        "window_from_anchor": speculators,
        "bidirectional": _bidirectional(settings, layers),
        "target_layers": settings.get("num_target_layers"),
    }
    return found, about


def _bidirectional(settings: Fields, layers: DraftLayers) -> bool:
    """Whether rows of a block see those after them in sliding layers, as they do in others."""
    causal = settings.get("is_causal", settings.get("causal"))
    if causal and any(shape.sliding is None for shape in layers.shapes):
        raise settings.unsupported("causal" if settings.get("is_causal") is None else "is_causal")
    # Windows that are said beside layers that see everything change nothing else.
    beside = settings.get("use_swa", False) and not slides(settings.raw)
    return bool(settings.get("sliding_window_non_causal", beside) if causal is None else not causal)


def dspark(settings: Fields, layers: DraftLayers, tensors: Tensors) -> Read:
    """Tensors and settings of a DSpark head, as `dflash` has them."""
    speculators = settings.get(SPECULATORS) is not None
    # Files of speculators from before there was this field have rows that predict their own places.
    name = "sample_from_anchor"
    anchored: bool = settings.need(name) if speculators else settings.get(name, True)
    found, about = dflash(settings, layers, tensors, anchored=anchored)
    hidden, rank = layers.hidden, settings.get("markov_rank", 256 if speculators else 0)
    variant = str(settings.get("markov_head_type", "vanilla")).lower()
    if variant not in ("vanilla", "gated", "rnn"):
        raise settings.unsupported("markov_head_type")
    if rank:
        markov = "markov_head."
        outputs = settings.get("draft_vocab_size", layers.config.vocab_size)
        found["markov_in.weight"] = tensors.take(f"{markov}markov_w1.weight", layers.config.vocab_size, rank)
        found |= tensors.linear("markov_out", {f"{markov}markov_w2": outputs}, rank)
        if variant == "gated":
            found |= tensors.linear("markov_gate", {f"{markov}gate_proj": rank}, hidden + rank)
        elif variant == "rnn":
            found |= tensors.linear("markov_step", {f"{markov}joint_proj": 3 * rank}, hidden + 2 * rank)
    if settings.get("enable_confidence_head", speculators or bool(settings.get("confidence_head_alpha"))):
        after = rank if settings.get("confidence_head_with_markov", speculators) else 0
        found |= tensors.linear("confidence", {"confidence_head.proj": 1}, hidden + after)
    # Of a recurrent Markov head one project runs the row of the block's first token, too.
    primed = variant == "rnn" and speculators and not anchored
    return found, about | {"markov": variant if rank else None, "primed": primed}
