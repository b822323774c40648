"""Decoding for the checks: an engine that works alike on any machine, and a rule that computes rows in two ways."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.engine.schedule import Limits
from decodery.models.protocol import LanguageModel
from decodery.sampling.constraint import constrained
from decodery.sampling.sampler import Sampler
from decodery.speculative.acceptance.coupled import Coupled
from decodery.step.acceptance_rule import AcceptanceRule, Accepted, NodeDistributions
from decodery.step.cache_policy import CachePolicy
from decodery.step.draft_length_policy import DraftLengthPolicy
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter
from decodery.step.logits_source import LogitsSource
from decodery.step.monitor import Monitor
from decodery.step.sequence import Sequence


class LawBroken(AssertionError):
    """An invariant of exact decoding does not hold, or it was not tested."""


@dataclass(frozen=True)
class BothWays(Coupled):
    """The coupled rule, which compares distributions requested node by node and for the tree at once.

    Without this, a CPU uses the first way and an accelerator the second. So a processor whose result depends on other
    rows of its call, or whose states are not separate per node, would fail on only one of them.
    """

    def choose(self, tree: DraftTree, laws: NodeDistributions, seq: Sequence) -> Accepted:
        # Every third step is enough, because all steps work alike.
        if len(seq.trace.steps) % 3:
            return super().choose(tree, laws, seq)
        noting = _Noting(laws)
        accepted = super().choose(tree, noting, seq)
        # After a token that a constraint forbids there is no law; what was accepted has one. Accelerators may round
        # a call of several rows differently.
        forbids = constrained(seq.request.sampler.processors) is not None
        visited = [0, *accepted.path]
        asked = visited if forbids else list(range(len(tree)))
        if len(asked) > 1 and laws.logits.device.type == "cpu":
            together = noting.rows(asked)
            for node in visited:
                if not torch.equal(noting.alone[node], together[asked.index(node)]):
                    raise LawBroken(
                        f"{seq.request.sampler} gives another law after {len(seq.tokens)} tokens where all "
                        f"{len(asked)} nodes are asked about together: see check_warp"
                    )
        return accepted


class _Noting(NodeDistributions):
    """Laws that note what they said of nodes that were asked about one by one. alone: {node: [vocab]}."""

    def __init__(self, laws: NodeDistributions) -> None:
        vars(self).update(vars(laws))
        self.alone: dict[int, torch.Tensor] = {}

    def rows(self, nodes: Ordered[int]) -> torch.Tensor:
        found = super().rows(nodes)
        if len(nodes) == 1:
            self.alone[nodes[0]] = found[0]
        return found

    def picks(self, nodes: Ordered[int]) -> list[int]:
        # Where nothing processors the logits, picks alone ask for no law.
        for node in nodes:
            self.rows([node])
        return super().picks(nodes)


def law_engine(model: LanguageModel, prefill_chunk: int) -> Engine:
    """Make an engine in which all passes have one price, and drafts of many texts are not shortened."""
    return Engine(model, prefill_chunk=prefill_chunk, pass_seconds=_even_passes, limits=Limits(rows=1 << 20))


def _even_passes(context: int) -> np.ndarray:
    """Equal prices, with which drafters that use prices draft as much as they can, on any machine."""
    return np.ones(1024)


def submit(engine: Engine, request: Request, like: Sequence | None = None) -> Sequence:
    """Submit a request to an engine; if its rule is the coupled one, it is replaced by `BothWays`."""
    seq = engine.submit(request, like=like)
    if seq.request.acceptance_rule == Coupled():
        seq.rebind(acceptance_rule=BothWays())
    return seq


def decode(
    model: LanguageModel,
    prompts: Ordered[Ordered[int]],
    *,
    drafter: Drafter | str | None = None,
    draft_length: DraftLengthPolicy | str | None = None,
    acceptance_rule: AcceptanceRule | str | None = None,
    sampler: Sampler | None = None,
    logits_source: LogitsSource | str | None = None,
    cache_policy: CachePolicy | str | None = None,
    monitors: Ordered[Monitor | str] = (),
    seeds: Ordered[int] = (0,),
    max_new_tokens: int = 24,
    eos_ids: Ordered[int] = (),
    prefill_chunk: int = 512,
    together: bool = True,
) -> list[Sequence]:
    """Decode texts for every prompt and seed, in one batch or one after another.

    Args:
        model: The target.
        prompts: Token ids of each prompt.
        drafter: The drafter, an instance or a text; None for none.
        draft_length: The draft length policy, an instance or a text; None for none.
        acceptance_rule: The acceptance rule, an instance or a text; None for the default.
        sampler: The sampler, by default greedy.
        logits_source: The logits source, an instance or a text; None for none.
        cache_policy: The KV cache policy, an instance or a text; None for none.
        monitors: The monitors, instances or texts.
        seeds: Seeds of the texts of each prompt.
        max_new_tokens: Maximum number of tokens of a text.
        eos_ids: End tokens.
        prefill_chunk: Maximum number of prompt tokens that one pass reads.
        together: Whether all texts share passes.
    """
    engine = law_engine(model, prefill_chunk)
    finished: list[Sequence] = []
    # Names are for the request to resolve.
    parts: dict[str, Any] = {
        "drafter": drafter,
        "draft_length": draft_length,
        "acceptance_rule": acceptance_rule or Coupled(),
        "logits_source": logits_source,
        "cache_policy": cache_policy,
        "monitors": monitors,
    }
    for prompt, seed in itertools.product(prompts, seeds):
        request = Request(
            prompt,
            max_new_tokens=max_new_tokens,
            sampler=sampler or Sampler.from_settings(),
            seed=seed,
            eos_ids=eos_ids,
            **parts,
        )
        finished.append(submit(engine, request))
        if not together:
            engine.run(finished[-1:])
    engine.run(finished)
    return finished
