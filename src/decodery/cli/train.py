"""`decodery train`: the commands that train what a method needs."""

from __future__ import annotations

import click

from .command import Entry, Group

SECTIONS = {
    "Drafters": {
        "draft": Entry("Train a small draft model.", "train_drafts"),
        "nested": Entry("Train a draft model with exits at several depths.", "train_drafts"),
        "deer": Entry("Train a diffusion model that drafts blocks.", "train_drafts"),
        "head": Entry("Train a draft head, such as eagle-3 or medusa.", "train_head"),
        "hmm": Entry("Distil a hidden Markov model that drafts.", "train_own_texts"),
        "ppd": Entry("Train prompt tokens for the drafter ppd.", "train_own_texts"),
        "hidden-transfer": Entry("Train maps between hidden states.", "train_own_texts"),
        "lexical-units": Entry("Train placeholders for the drafter lexical-unit.", "train_own_texts"),
        "swift": Entry("Find the sublayers that a self-drafting model skips.", "train_own_texts"),
        "del": Entry("Find the exit layers of the drafter del.", "train_exits"),
        "cppd": Entry("Train slots that draft short texts at once.", "train_cppd"),
        "datastore": Entry("Index text files for the drafter rest.", "train_datastore"),
        "ngram-cache": Entry("Build the n-gram cache of the drafter auto.", "train_own_texts"),
        "ngrams": Entry("Count n-grams for suggestions.", "train_own_texts"),
        "kv-bottleneck": Entry("Fit keys for the drafter discrete-key-value.", "train_codes"),
        "acceptance": Entry("Train a head for the draft length policy specdec++.", "train_own_texts"),
    },
    "Models": {
        "lora": Entry("Train a LoRA adapter.", "train_copies"),
        "s2ft": Entry("Train an S2FT adapter: some heads and channels.", "train_copies"),
        "orpo": Entry("Train a LoRA adapter on pairs of texts.", "train_preferences"),
        "grpo": Entry("Train a LoRA adapter on rewards of its own texts.", "train_preferences"),
        "hyperfit": Entry("Overfit a copy on a few texts, for greedy decoding.", "train_copies"),
        "bitnet": Entry("Train a ternary copy of a model.", "train_copies"),
        "nm-sparsity": Entry("Train a copy with N:M sparsity.", "train_copies"),
        "lq-lora": Entry("Train the low-rank part of a low-bit copy.", "train_copies"),
        "diffusion": Entry("Train a small masked diffusion model.", "train_diffusion"),
        "to-diffusion": Entry("Adapt a causal model to masked diffusion.", "train_to_diffusion"),
        "dscd": Entry("Distil a diffusion model for fewer passes.", "train_dscd"),
        "r2": Entry("Tune a diffusion model to the decoder r2.", "train_r2"),
    },
    "Monitors": {
        "los": Entry("Train LOS-Net, which detects wrong answers.", "train_monitors"),
        "probe": Entry("Train a probe that detects wrong answers.", "train_monitors"),
        "sequential": Entry("Train a probe of whole conversations.", "train_states"),
        "direction": Entry("Find a direction of hidden states.", "train_states"),
        "sae": Entry("Find the attention heads of a behaviour.", "train_codes"),
        "codebook": Entry("Train codebooks of hidden states.", "train_codes"),
        "autoencoder": Entry("Train a sparse autoencoder of hidden states.", "train_codes"),
        "threshold": Entry("Set the threshold of any monitor on your texts.", "train_monitors"),
    },
    "Scorers": {
        "value": Entry("Train a head that predicts the reward of a text.", "train_value"),
        "text-prm": Entry("Train a process reward model on judged texts.", "train_text_prm"),
        "step-labels": Entry("Label the steps of solutions by reference solutions.", "train_text_prm"),
        "router": Entry("Train a router for the search arbitrage.", "train_router"),
    },
    "Samplers": {
        "judge": Entry("Train a head for the acceptance rule judge.", "train_acceptance_rules"),
        "adadec-thresholds": Entry("Fit the threshold of the acceptance rule adadec.", "train_acceptance_rules"),
        "calm": Entry("Calibrate early exit for the source calm.", "train_exits"),
        "sec": Entry("Train early-exit checks for the source sec.", "train_exits"),
        "ftp": Entry("Train routers that prune prompt tokens.", "train_ftp"),
        "hamburger": Entry("Train a model to write groups of tokens.", "train_hamburger"),
        "sven": Entry("Train prefixes that steer code generation.", "train_logits_sources"),
        "partial": Entry("Train an attention to the prompt alone.", "train_logits_sources"),
        "learn2pd": Entry("Train the filter of the decoder learn2pd.", "train_learn2pd"),
    },
    "Caches": {
        "kv": Entry("Train or calibrate a KV cache policy (five commands).", "train_kv"),
        "merges": Entry("Train embeddings of merged prompt tokens.", "train_merges"),
    },
}
"""The commands as the help of `decodery train` lists them."""


@click.group(cls=Group, sections=SECTIONS, example="train head --kind eagle-3 -m smollm2 --out head")
def train() -> None:
    """Train what a method needs, such as a draft model, a head or a probe.

    Most commands learn from texts that the model writes first. An interrupted command continues if it is run again.
    """
