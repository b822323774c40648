"""Every registered method that the conformance matrix runs, with settings that suit tiny models.

Adding a method means adding a line here; `test_conformance.py` fails while one is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

from covering import FULL
from decodery.core.noise import draw
from decodery.kv_cache.actqkv import ActQKV
from decodery.kv_cache.coprocessor import Coprocessor
from decodery.kv_cache.d2o import D2O
from decodery.kv_cache.dapq import DapQ
from decodery.kv_cache.double_sparsity import DoubleSparsity
from decodery.kv_cache.expected_attention import ExpectedAttention
from decodery.kv_cache.h2o import H2O
from decodery.kv_cache.localist import Localist
from decodery.kv_cache.lserve import LServe
from decodery.kv_cache.meta_soft import MetaSoft
from decodery.kv_cache.pyramid_kv import PyramidKV
from decodery.kv_cache.quantized import Quantized
from decodery.kv_cache.quest import Quest
from decodery.kv_cache.snapkv import SnapKV
from decodery.kv_cache.streaming_llm import StreamingLLM
from decodery.kv_cache.tova import TOVA
from decodery.kv_cache.write_gate import WriteGate
from decodery.logits_sources.adapter import Tuned
from decodery.logits_sources.calm import CALM
from decodery.logits_sources.controlled_decoding import ControlledDecoding
from decodery.logits_sources.dola import DoLa
from decodery.logits_sources.entropy_adaptive import EntropyAdaptive
from decodery.logits_sources.ftp import FTP
from decodery.logits_sources.guidance import Guidance
from decodery.logits_sources.hamburger import Hamburger
from decodery.logits_sources.partial_attention import PartialAttention, PartialWeights
from decodery.logits_sources.prefix_lm import PrefixLM
from decodery.logits_sources.sec import SEC
from decodery.logits_sources.sven import SVEN
from decodery.logits_sources.transfer_q import TransferQ
from decodery.logits_sources.uscd import USCD
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.adapters import Adapter, Columns
from decodery.models.protocol import LanguageModel
from decodery.models.torch.transformer import Transformer
from decodery.models.trained.coprocessors import CoprocessorWeights
from decodery.models.trained.exits import ExitHeads
from decodery.models.trained.head_gates import HeadGates
from decodery.models.trained.key_channels import KeyChannels
from decodery.models.trained.meta_tokens import MetaTokens
from decodery.models.trained.micro_steps import MicroSteps, shapes
from decodery.models.trained.placeholders import Placeholders
from decodery.models.trained.prefix import KVPrefix, Prefixes
from decodery.models.trained.skips import SkipSet
from decodery.models.trained.token_routers import TokenRouters
from decodery.models.trained.transfer import Transfer
from decodery.models.trained.write_gates import WriteGates
from decodery.monitors.codebook import Codebook, Codebooks
from decodery.monitors.confidence import Confidence as Doubt
from decodery.monitors.context_awareness import ContextAwareness
from decodery.monitors.factcheckmate import FactCheckmate, Shift
from decodery.monitors.feature import Feature
from decodery.monitors.los import LOS, LOSHead, LOSNet
from decodery.monitors.neurofeedback import Neurofeedback
from decodery.monitors.probe import Probe
from decodery.monitors.program_probe import ProgramProbe
from decodery.monitors.sae import SAE, HeadCodes
from decodery.monitors.sequential import Sequential
from decodery.monitors.sparse_autoencoder import SparseAutoencoder
from decodery.monitors.threshold import Threshold
from decodery.monitors.truthprint import TruthPrInt
from decodery.sampling import (
    DRY,
    XTC,
    Epsilon,
    Eta,
    FrequencyPenalty,
    LogitBias,
    LogitsProcessor,
    MinNewTokens,
    MinP,
    Mirostat,
    Momentum,
    NoCitation,
    NoRepeatNGram,
    PresencePenalty,
    RepetitionPenalty,
    Sampler,
    Temperature,
    TopH,
    TopK,
    TopP,
    Typical,
)
from decodery.sampling.no_citation import Citations
from decodery.scorers.budgeted import Budgeted
from decodery.scorers.corrupted import Corrupted
from decodery.scorers.curiosity import Curiosity
from decodery.scorers.infalign import InfAlign
from decodery.scorers.length_normalised import LengthNormalised
from decodery.scorers.llm_judge import LLMJudge
from decodery.scorers.log_probability import LogProbability
from decodery.scorers.process_reward import ProcessHead, ProcessReward
from decodery.scorers.product import Product
from decodery.scorers.program_tests import ProgramTests
from decodery.scorers.question_likelihood import QuestionLikelihood
from decodery.scorers.rating import Rating
from decodery.scorers.reward_model import RewardModel
from decodery.scorers.self_evaluation import SelfEvaluation
from decodery.scorers.text import TextScore
from decodery.scorers.value_head import LinearValue, ValueHead
from decodery.search.a_star import AStar
from decodery.search.adaptive_sampling import AdaptiveSampling
from decodery.search.allocation import Allocation
from decodery.search.arbitrage import Arbitrage
from decodery.search.archon import Archon
from decodery.search.base import Search
from decodery.search.beam import Beam
from decodery.search.best_of_n import BestOfN
from decodery.search.budget_forcing import BudgetForcing
from decodery.search.compute_optimal import ComputeOptimal
from decodery.search.contrastive_search import ContrastiveSearch
from decodery.search.controlled_blocks import ControlledBlocks
from decodery.search.coupling import Coupling
from decodery.search.diverse_beam import DiverseBeam
from decodery.search.documents import Documents
from decodery.search.drag import DRAG
from decodery.search.dvts import DVTS
from decodery.search.early_pruning import EarlyPruning
from decodery.search.edge import Edge
from decodery.search.entropic_particle_filter import EntropicParticleFilter
from decodery.search.exact_extract import ExactExtract
from decodery.search.feature_vote import FeatureVote
from decodery.search.first_finish import FirstFinish
from decodery.search.iad import IAD
from decodery.search.iter_drag import IterDRAG
from decodery.search.lookahead import Lookahead as LookaheadSearch
from decodery.search.mcts import MCTS
from decodery.search.pairwise import Pairwise
from decodery.search.parallel_tempering import ParallelTempering
from decodery.search.particle_filter import ParticleFilter
from decodery.search.particle_gibbs import ParticleGibbs
from decodery.search.pg_td import PGTD
from decodery.search.phase_handoff import PhaseHandoff
from decodery.search.revisions import Revisions
from decodery.search.self_consistency import SelfConsistency
from decodery.search.self_refine import SelfRefine
from decodery.search.smc import SMC
from decodery.search.spec_reason import SpecReason
from decodery.search.step_beam import StepBeam
from decodery.search.tree_of_thoughts import TreeOfThoughts
from decodery.search.value_guided import ValueGuided
from decodery.search.ved import VED
from decodery.search.weighted_vote import WeightedVote
from decodery.speculative.acceptance.adadec import AdaDec
from decodery.speculative.acceptance.cntp import CNTP
from decodery.speculative.acceptance.coupled import Coupled
from decodery.speculative.acceptance.judge import Head, Judge
from decodery.speculative.acceptance.k_seq import KSeq
from decodery.speculative.acceptance.lexical_unit import LexicalUnit as LexicalUnitRule
from decodery.speculative.acceptance.rapid import Rapid as RapidRule
from decodery.speculative.acceptance.recursive_rejection import RecursiveRejection
from decodery.speculative.acceptance.rejection import Rejection
from decodery.speculative.acceptance.tolerance import Tolerance
from decodery.speculative.acceptance.typical import Typical as TypicalRule
from decodery.speculative.draft_length.confidence import Confidence
from decodery.speculative.draft_length.fixed import Fixed
from decodery.speculative.draft_length.goodput import Goodput
from decodery.speculative.draft_length.hardware import Hardware
from decodery.speculative.draft_length.memory import MemoryBound
from decodery.speculative.draft_length.specdec_pp import AcceptanceHead, SpecDecPP
from decodery.speculative.drafters.aded import ADED
from decodery.speculative.drafters.aggressive import Aggressive
from decodery.speculative.drafters.auto import Auto
from decodery.speculative.drafters.chimera import Chimera, ChimeraHead
from decodery.speculative.drafters.clover import Clover, CloverHead
from decodery.speculative.drafters.combine import Cascade, Router, Union
from decodery.speculative.drafters.compressed_cache import CompressedCache
from decodery.speculative.drafters.copyspec import CopySpec
from decodery.speculative.drafters.deer import Deer
from decodery.speculative.drafters.dflash import DFlash, DFlashHead
from decodery.speculative.drafters.discrete_key_value import DiscreteKeyValue
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.drafters.dspark import DSpark, DSparkHead
from decodery.speculative.drafters.dynamic_exit import DEL
from decodery.speculative.drafters.eagle import EAGLE, EAGLEHead
from decodery.speculative.drafters.eagle_3 import EAGLE3, EAGLE3Head
from decodery.speculative.drafters.easyspec import EasySpec
from decodery.speculative.drafters.falcon import Falcon, FalconHead
from decodery.speculative.drafters.forced import Forced
from decodery.speculative.drafters.fspad import FSPAD, FSPADHead
from decodery.speculative.drafters.graft import Graft
from decodery.speculative.drafters.hidden_transfer import HiddenTransfer
from decodery.speculative.drafters.hierarchical import Hierarchical
from decodery.speculative.drafters.hmm import HiddenMarkov
from decodery.speculative.drafters.hydra import Hydra, HydraHead
from decodery.speculative.drafters.jacobi import Jacobi
from decodery.speculative.drafters.kangaroo import Kangaroo, KangarooHead
from decodery.speculative.drafters.lexical_unit import LexicalUnit
from decodery.speculative.drafters.longspec import LongSpec, LongSpecHead
from decodery.speculative.drafters.lookahead import Lookahead
from decodery.speculative.drafters.medusa import Medusa, MedusaHead
from decodery.speculative.drafters.msd import MSD, MSDHead
from decodery.speculative.drafters.mtp import MTP, MTPHead
from decodery.speculative.drafters.nested import Nested
from decodery.speculative.drafters.ngram import NGram
from decodery.speculative.drafters.p_eagle import PEAGLE, PEAGLEHead
from decodery.speculative.drafters.pearl import Pearl
from decodery.speculative.drafters.ppd import PPD
from decodery.speculative.drafters.predicted_output import PredictedOutput
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.speculative.drafters.rapid import Rapid
from decodery.speculative.drafters.rasd import RASD
from decodery.speculative.drafters.rest import REST
from decodery.speculative.drafters.stand import STAND
from decodery.speculative.drafters.suffix_automaton import SuffixAutomaton
from decodery.speculative.drafters.suffix_tree import SuffixTree
from decodery.speculative.drafters.swift import Swift
from decodery.speculative.drafters.token_recycling import TokenRecycling
from decodery.speculative.heads.head import BoundHead, TrainedHead
from decodery.speculative.stores.bottleneck import KeySet
from decodery.speculative.stores.datastore import Datastore
from decodery.speculative.stores.hmm import HMM
from decodery.speculative.trees.caterpillar import Caterpillar
from decodery.speculative.trees.clover import Selection
from decodery.speculative.trees.dyspec import DySpec
from decodery.speculative.trees.eagle_2 import EAGLE2
from decodery.speculative.trees.fixed_tree import FixedTree
from decodery.speculative.trees.k_chains import KChains
from decodery.speculative.trees.rsd_c import RSDC
from decodery.speculative.trees.rsd_s import RSDS
from decodery.speculative.trees.sequoia import Sequoia
from decodery.speculative.trees.specinfer import SpecInfer
from decodery.step.acceptance_rule import AcceptanceRule
from decodery.step.cache_policy import CachePolicy
from decodery.step.draft_length_policy import DraftLengthPolicy
from decodery.step.drafter import Drafter
from decodery.step.logits_source import LogitsSource
from decodery.step.monitor import Monitor
from decodery.step.scorer import Candidates, Scorer
from decodery.step.tree_policy import TreePolicy
from decodery.testing.models import Counted, tiny_transformer
from decodery_benchmarks.puzzles.chain import Chain
from decodery_benchmarks.scorers.puzzle_examples import PuzzleExamples
from decodery_benchmarks.scorers.puzzle_oracle import PuzzleOracle


@cache
def _corpus(vocab_size: int) -> Datastore:
    """A datastore of texts in which every token is followed by one of two others."""
    texts = [[(start + step * number) % vocab_size for number in range(60)] for step in (1, 3) for start in (0, 2)]
    return Datastore.build(texts, separator=0, vocab_size=vocab_size)


class Even(Scorer):
    """A reward: the share of even tokens."""

    bounds = 0.0, 1.0

    def score(self, candidates: Candidates) -> torch.Tensor:
        shares = [sum(token % 2 == 0 for token in output) / max(len(output), 1) for output in candidates.outputs]
        return torch.tensor(shares, dtype=torch.float64)


def _numbers(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


class _Numbers(Chain):
    """A puzzle of any numbers: right texts have an even count of them, and open ones a one among them."""

    def verify(self, prompt: str, text: str) -> bool:
        return len(text.split()) % 2 == 0

    def open(self, prompt: str, text: str) -> bool:
        return "1" in text


def _head() -> ValueHead:
    return ValueHead(LinearValue(torch.linspace(-1, 1, 32, dtype=torch.float64), torch.tensor(0.0), tap=1))


def _process() -> ProcessReward:
    draws = torch.Generator().manual_seed(0)
    shapes = {"inner.weight": (8, 32), "inner.bias": (8,), "outer.weight": (8,), "outer.bias": ()}
    return ProcessReward(ProcessHead({name: torch.randn(shape, generator=draws) for name, shape in shapes.items()}, 2))


_RATES = torch.tensor([[0.4, 0.2, 0.1], [0.3, 0.2, 0.1]])


def _placeholders(other: LanguageModel) -> Placeholders:
    """Two that nothing was learned for."""
    return Placeholders(torch.ones(2, other.config.hidden_size), rates=_RATES)


@cache
def _keys_of(hidden: int, vocab: int) -> KeySet:
    """Random keys; all of them are found by some state."""
    chance = torch.Generator().manual_seed(4)
    sizes = (hidden,), (3, 4, hidden), (3, 8, 4), (12, vocab)
    return KeySet(*(torch.randn(size, generator=chance) / size[-1] ** 0.25 for size in sizes))


def _keys(other: LanguageModel) -> KeySet:
    return _keys_of(other.config.hidden_size, other.vocab_size)


def _hidden(other: LanguageModel) -> HMM:
    """States that each say one token, and follow one another as the model says of a token alone."""
    own = other.model if isinstance(other, Counted) else other
    tokens = range(other.vocab_size)
    alone = own.forward(Batch([Segment.chunk([token], own.new_cache()) for token in tokens])).logits.cpu()
    said = torch.eye(len(tokens), len(tokens) + 1, dtype=torch.float64)
    even = torch.full((len(tokens),), 1 / len(tokens), dtype=torch.float64)
    return HMM(even, alone.double().softmax(dim=1), said, torch.arange(len(tokens)), 0 * even)


def _transfer(other: LanguageModel) -> Transfer:
    """Maps that change nothing, after the embeddings and after a layer."""
    return Transfer(torch.eye(other.config.hidden_size).repeat(2, 1, 1), (0, 1), _RATES)


def _untrained(
    kind: type[BoundHead], other: LanguageModel, shape: Mapping[str, Any] | None = None, **settings: Any
) -> TrainedHead:
    """A head that nothing was learned for, shaped as one for `other` would be; it speaks some of the tokens only."""
    own = other.model if isinstance(other, Counted) else other
    assert isinstance(own, Transformer)
    tensors, about = kind.untrained(own, 0, **(shape or {}))
    tensors["vocabulary"] = torch.arange(0, other.vocab_size, 2, dtype=torch.int32)
    return TrainedHead(kind.kind, tensors, about | settings)


ENCODED = {"cppd", "tli", "universal-draft"}
"""Drafters for models with an encoder alone, or with tokenizers, which have tests of their own."""


def blocked(other: LanguageModel) -> LanguageModel:
    """The same model, whose last tokens but two stand for what is not written yet and for the end of a block."""
    own = other.model if isinstance(other, Counted) else other
    assert isinstance(own, Transformer)
    return Transformer(replace(own.config, mask_id=own.vocab_size - 4), own.weights)


DRAFTERS: dict[str, Callable[[LanguageModel], Drafter]] = {
    "auto": lambda other: Auto(head=_untrained(EAGLE3Head, other) if isinstance(other, Transformer) else None),
    # One whose size is not known, so that asking it is believed to be cheap.
    "auto:model": lambda other: Auto(warm=None, model=Counted(other)),
    "discrete-key-value": lambda other: DiscreteKeyValue(_keys(other), lr=4.0),
    "ppd": lambda other: PPD(length=14, ppd=_placeholders(other)),
    "prompt-lookup": lambda other: PromptLookup(length=5),
    "draft-model": lambda other: DraftModel(other, length=3),
    "easyspec": lambda other: EasySpec(other, length=3, layers=2),
    "hierarchical": lambda other: Hierarchical(
        DraftModel(other), NGram(width=6, scope="request", tree_policy=RSDC((2, 1))), length=3
    ),
    # It drafts only after a first guess that was right, which a model of one layer hardly ever makes.
    "pearl": lambda other: Pearl(
        other if isinstance(other, Counted) else tiny_transformer(0, vocab_size=other.vocab_size), length=3
    ),
    "nested": lambda other: Nested(other, exits=(1,), length=3),
    "deer": lambda other: Deer(blocked(other), length=3),
    "eagle": lambda other: EAGLE(_untrained(EAGLEHead, other), tree_policy=EAGLE2(nodes=5, width=2, depth=2)),
    "msd": lambda other: MSD(_untrained(MSDHead, other), tree_policy=EAGLE2(nodes=5, width=2, depth=2)),
    "eagle-3": lambda other: EAGLE3(_untrained(EAGLE3Head, other), tree_policy=EAGLE2(nodes=5, width=2, depth=2)),
    "p-eagle": lambda other: PEAGLE(_untrained(PEAGLEHead, other), tree_policy=EAGLE2(nodes=5, width=2, depth=3)),
    "dflash": lambda other: DFlash(
        _untrained(DFlashHead, other, {"block": 5}), tree_policy=EAGLE2(nodes=5, width=2, depth=3)
    ),
    "dspark": lambda other: DSpark(
        _untrained(DSparkHead, other, {"block": 4, "markov": "rnn", "rank": 8}),
        tree_policy=EAGLE2(nodes=5, width=2, depth=3),
    ),
    "mtp": lambda other: MTP(_untrained(MTPHead, other), length=3),
    "del": lambda other: DEL((0, 1), length=4),
    "medusa": lambda other: Medusa(_untrained(MedusaHead, other), tree_policy=FixedTree(branching=(3, 2))),
    "hydra": lambda other: Hydra(
        _untrained(HydraHead, other, {"prefix": True}), tree_policy=EAGLE2(nodes=5, width=2, depth=3)
    ),
    "clover": lambda other: Clover(_untrained(CloverHead, other), tree_policy=Selection(nodes=5)),
    "chimera": lambda other: Chimera(_untrained(ChimeraHead, other), tree_policy=EAGLE2(nodes=5, width=2, depth=3)),
    "falcon": lambda other: Falcon(_untrained(FalconHead, other), tree_policy=EAGLE2(nodes=9, width=2, depth=4)),
    "fspad": lambda other: FSPAD(_untrained(FSPADHead, other), tree_policy=EAGLE2(nodes=5, width=2, depth=2)),
    "kangaroo": lambda other: Kangaroo(_untrained(KangarooHead, other), eta=0.05, length=3),
    "longspec": lambda other: LongSpec(_untrained(LongSpecHead, other), tree_policy=EAGLE2(nodes=5, width=2, depth=2)),
    "aggressive": lambda other: Aggressive(
        source=tuple(token % other.vocab_size for token in range(2, 40)), max_draft=6, ambiguous="nearest"
    ),
    "hidden-transfer": lambda other: HiddenTransfer(length=14, transfer=_transfer(other)),
    "hmm": lambda other: HiddenMarkov(_hidden(other), length=3),
    "jacobi": lambda other: Jacobi(window=4, fill="lookup"),
    "lexical-unit": lambda other: LexicalUnit(span=3, beta=0.0, units=_placeholders(other)),
    "lookahead": lambda other: Lookahead(window=4, ngram=3, grams=3),
    "ngram": lambda other: NGram(width=6, scope="request", tree_policy=RSDC((2, 1))),
    "rapid": lambda other: Rapid(other, gamma=2, confidence=0.1, head=1, query=2, chunk=4, length=8),
    "token-recycling": lambda other: TokenRecycling(nodes=20, scope="request"),
    "compressed-cache": lambda other: CompressedCache(cache_policy="streaming-llm:budget=12", length=3),
    "copyspec": lambda other: CopySpec(gamma=1),
    "aded": lambda other: ADED(simulations=30, scope="request"),
    "stand": lambda other: STAND(nodes=20, scope="request"),
    "suffix-automaton": lambda other: SuffixAutomaton(length=8),
    "suffix-tree": lambda other: SuffixTree(factor=3.0, scope="request"),
    "rest": lambda other: REST(_corpus(other.vocab_size), shortest=1, nodes=12),
    "rasd": lambda other: RASD(DraftModel(other), width=3, depth=2, retrieved=6, nodes=16),
    "graft": lambda other: Graft(DraftModel(other), width=3, depth=3, nodes=16, kept=(3, 6, 10), scope="request"),
    "union": lambda other: Union((CopySpec(gamma=1), DraftModel(other, length=3))),
    "forced": lambda other: Forced(PromptLookup(length=5)),
    "cascade": lambda other: Cascade((CopySpec(), DraftModel(other, length=3))),
    "predicted-output": lambda other: PredictedOutput(
        tuple(token % other.vocab_size for token in range(2, 40)), drafter=DraftModel(other, length=3)
    ),
    "swift": lambda other: Swift(
        SkipSet(frozenset({"attention.0"}), 1), tree_policy=Caterpillar(length=4, stop=0.1, nodes=9)
    ),
    "router": lambda other: Router((SuffixAutomaton(), TokenRecycling(nodes=8, scope="request")), match=3),
}
"""By name, and what it asks where there is a choice: a drafter, given a model like the target but not equal to it."""


def _kinds() -> list[str]:
    found: dict[Any, str] = {}
    other = tiny_transformer(0, num_layers=1)
    for name, make in DRAFTERS.items():
        drafter = make(other)
        found.setdefault((type(drafter).__mro__[1], drafter.provides.drafts), name)
    return sorted(found.values())


KINDS = sorted(DRAFTERS) if FULL else _kinds()
"""Drafters that stand for all where a law is about the loop and not about drafts: one of each base and origin."""

GROWTHS: dict[str, TreePolicy] = {
    "fixed-tree": FixedTree(branching=(3, 2)),
    "specinfer": SpecInfer((3, 2, 1)),
    "k-chains": KChains(k=3, length=3),
    "sequoia": Sequoia(nodes=9, depth=4),
    "eagle-2": EAGLE2(nodes=9, width=3, depth=4),
    "caterpillar": Caterpillar(length=3, stop=0.05, nodes=9),
    "clover": Selection(nodes=9),
    "dyspec": DySpec(nodes=9),
    "rsd-c": RSDC((3, 2)),
    "rsd-s": RSDS(width=3, depth=3),
}
"""Growth policies, which the matrix runs over a draft model."""

ADAPTIVE = {"auto", "auto:model"}
"""Drafters that weigh the machine's pass times and the rest of the batch: their drafts are not a function of the text
alone, which shows in the tokens only under rules that promise a distribution and not the seed's own text."""

CHAINS = {
    "easyspec",
    "pearl",
    "hierarchical",
    "nested",
    "deer",
    "rapid",
    "jacobi",
    "cascade",
    "predicted-output",
    "kangaroo",
}
"""Drafters that draw single chains; rules about several draws treat them as they treat draft-model."""


def fits(drafter: Drafter, rule: AcceptanceRule) -> bool:
    """Whether a rule verifies all that a drafter may draft."""
    return rule.requirements.drafts is None or set(drafter.provides.drafts) <= set(rule.requirements.drafts)


RULES: dict[str, AcceptanceRule] = {
    "coupled": Coupled(),
    "rejection": Rejection(),
    "recursive-rejection": RecursiveRejection(),
    "k-seq": KSeq(),
}

CHECKING_RULES = {"awrs"}
"""Rules that give the coupled rule's tokens and ask constraints about single ones; they are tested with constraints."""

CONTINUOUS_RULES = {"density-ratio"}
"""Rules for models of continuous values; they verify no tokens, and are tested with such models."""

LOSSY_RULES: dict[str, AcceptanceRule] = {
    "adadec": AdaDec(tau=2.5, length=3),
    "cntp": CNTP(most=3, high=3.0, length=5, stops=(9, 20, 31)),
    "judge": Judge(Head(torch.linspace(-1, 1, 32), 0.1, layer=2)),
    "lexical-unit": LexicalUnitRule(),
    "rapid": RapidRule(),
    "tolerance": Tolerance(),
    "typical": TypicalRule(),
}
"""Rules that change the output on purpose: what each promises instead is tested beside its drafter."""


class Erratic(AcceptanceHead):
    """A head whose judgement is any function of the state: whatever it says, the law must stay."""

    def acceptance(self, hidden: torch.Tensor) -> float:
        return draw(int(hidden.double().sum() * 1e6), 0)


BUDGETS: dict[str, Callable[[LanguageModel], DraftLengthPolicy]] = {
    "fixed": lambda other: Fixed(nodes=3, depth=2),
    "confidence": lambda other: Confidence(probability=0.2, entropy=3.0, longest=5),
    "specdec++": lambda other: SpecDecPP(
        Erratic.random(other.config.hidden_size, other.vocab_size), threshold=0.6, shortest=0, longest=5
    ),
    "goodput": lambda other: Goodput(longest=4, probe=3),
    "hardware": lambda other: Hardware(probe=3),
    "memory": lambda other: MemoryBound(mib=0.06),
}
"""By name: a budget policy, given the model that drafts."""

_UNCITED = NoCitation(Citations.of([np.arange(40) % 24, np.arange(40) * 7 % 64]), 2)

WARPS: dict[str, LogitsProcessor] = {
    "temperature": Temperature(0.7),
    "top-k": TopK(20),
    "top-p": TopP(0.9),
    "min-p": MinP(0.05),
    "typical": Typical(0.9),
    "epsilon": Epsilon(3e-4),
    "eta": Eta(3e-4),
    "repetition-penalty": RepetitionPenalty(1.2),
    "presence-penalty": PresencePenalty(0.5),
    "frequency-penalty": FrequencyPenalty(0.5),
    "no-citation": _UNCITED,
    "no-repeat-ngram": NoRepeatNGram(2),
    "logit-bias": LogitBias(((3, 1.5),)),
    "min-new-tokens": MinNewTokens(20, (3,)),
    "top-h": TopH(0.6),
    "xtc": XTC(0.9, 0.01),
    "mirostat": Mirostat(1.0),
    "dry": DRY(allowed=1),
    "momentum": Momentum(),
}
"""Every registered processor, set so that it does something."""

SAMPLERS: dict[str, Sampler] = {
    "greedy": Sampler.from_settings(),
    "greedy-penalties": Sampler.from_settings(repetition_penalty=1.3, frequency_penalty=0.4, no_repeat_ngram=3),
    "plain": Sampler.from_settings(temperature=1.0),
    "nucleus": Sampler.from_settings(temperature=0.7, top_p=0.9),
    "steered": Sampler([_UNCITED, DRY(allowed=1), XTC(0.5, 0.05), Temperature(0.9), TopH(0.9), Mirostat(2.0, 0.5)]),
    "everything": Sampler.from_settings(
        temperature=1.3,
        top_k=30,
        top_p=0.95,
        min_p=0.02,
        typical=0.95,
        epsilon=1e-3,
        eta=1e-3,
        presence_penalty=0.3,
        repetition_penalty=1.1,
        logit_bias={3: 1.0},
        min_new_tokens=5,
        eos_ids=(0,),
    ),
}

CHOOSING = {"momentum": Sampler([Momentum()])}
"""Warps that rank tokens and leave no law, which some rules and all searches refuse."""

SCORERS: dict[str, Scorer] = {
    "budgeted": Budgeted(Even(), most=2, spare=5),
    "corrupted": Corrupted(Even(), confidence=2.0, optimism=1.0, noise=1.0, exploit=3.0, pattern=(7, 3), length=8),
    "curiosity": Curiosity(Even(), peak=3.0, width=2.0),
    "length-normalised": LengthNormalised(LogProbability("sum"), penalty=0.7),
    "log-probability": LogProbability("mean"),
    "process-reward": _process(),
    "product": Product((LogProbability("sum"), Even()), (0.5, 2.0)),
    "program-tests": ProgramTests(
        tests=("assert n % 2", "assert n > 20"), head="n = ", decode=lambda ids: str(sum(ids))
    ),
    "reward-model": RewardModel(LogProbability("mean"), model=tiny_transformer(2)),
    "rating": Rating(question=(9, 8, 7), words=((1, 2), (3,), (4,))),
    "puzzle-examples": PuzzleExamples(_Numbers(), decode=_numbers),
    "puzzle-oracle": PuzzleOracle(_Numbers(), decode=_numbers),
    "self-evaluation": SelfEvaluation(question=(9, 8, 7), yes=(1, 2, 3), no=(4,)),
    "text": TextScore(lambda text: len(text) % 5, lambda text: text.count("1"), decode=_numbers),
    "value-head": _head(),
}

_TABLE = Allocation(
    "log-probability(of=mean)",
    2,
    (-1.0,),
    (4,),
    ("best-of-n(scorer=log-probability,n=3)", "value-guided(scorer=log-probability,step_tokens=4,n=2,choose=best)"),
    ((0,), (1,)),
)

SEARCHES: dict[str, Search] = {
    "a-star": AStar(Even(), delimiter=(7,), step_tokens=3, k=2),
    "adaptive-sampling": AdaptiveSampling(Even(), n=3, threshold=1e9, schedule="constant"),
    "arbitrage": Arbitrage(Even(), delimiter=(7,), step_tokens=3, model=tiny_transformer(1)),
    "beam": Beam(width=3),
    "best-of-n": BestOfN(LogProbability("sum"), n=3),
    "budget-forcing": BudgetForcing((9,), (5, 6), ignore=1, most=5),
    "contrastive-search": ContrastiveSearch(k=5),
    "coupling": Coupling(message="a", ending="eos"),
    "controlled-blocks": ControlledBlocks(_head(), samples=3, block=4),
    "diverse-beam": DiverseBeam(width=6, groups=3),
    "dvts": DVTS(Even(), delimiter=(7,), step_tokens=3, n=4, m=2),
    "entropic-particle-filter": EntropicParticleFilter(
        Even(), delimiter=(7,), step_tokens=3, particles=2, annealing="entropy", lookahead="fresh"
    ),
    "early-pruning": EarlyPruning(Even(), n=4, after=4, keep=0.5),
    "compute-optimal": ComputeOptimal(_TABLE, n=4),
    "edge": Edge(Even(), n=3, most=4, end=(7, 8), cue=(6,), choose="best"),
    "exact-extract": ExactExtract(),
    "feature-vote": FeatureVote(n=5, drop=0.2),
    "first-finish": FirstFinish(n=4, k=2),
    "lookahead": LookaheadSearch(StepBeam(Even(), delimiter=(7,), step_tokens=3, n=4, m=2)),
    "mcts": MCTS(Even(), delimiter=(7,), step_tokens=3, n=2, simulations=2),
    "smc": SMC(3, 2, "powered", 2.0, lookahead=1, moves=1, threshold=1.0),
    "parallel-tempering": ParallelTempering(Even(), delimiter=(7,), step_tokens=3, particles=2, sweeps=2),
    "particle-filter": ParticleFilter(Even(), delimiter=(7,), step_tokens=3, particles=3),
    "particle-gibbs": ParticleGibbs(Even(), delimiter=(7,), step_tokens=3, particles=2, sweeps=2),
    "pg-td": PGTD(Even(), budget=12),
    "phase-handoff": PhaseHandoff(step_tokens=3, rounds=3, model=tiny_transformer(1)),
    "self-consistency": SelfConsistency(n=4),
    "spec-reason": SpecReason(Even(), delimiter=(7,), step_tokens=2, model=tiny_transformer(1), threshold=0.5, first=1),
    "step-beam": StepBeam(Even(), delimiter=(7,), step_tokens=3, n=4, m=2),
    "tree-of-thoughts": TreeOfThoughts(Even(), delimiter=(7,), step_tokens=3, n=2, b=2),
    "value-guided": ValueGuided(Even(), step_tokens=4, n=4, choose="best"),
    "ved": VED(Even(), k=3, width=3, budget=40),
    "weighted-vote": WeightedVote(Even(), n=4),
}

PIPELINES: dict[str, Search] = {
    "archon": Archon((("generator(n=2)",), ("critic(tries=2)",), ("ranker(top_k=1)",), ("fuser",))),
    "drag": DRAG(Documents(("the sky is blue", "grass is green")), k=1),
    "iad": IAD(LLMJudge(), n=2, rounds=1),
    "iter-drag": IterDRAG(Documents(("the sky is blue", "grass is green")), k=1, n=1),
    "pairwise": Pairwise(n=2),
    "revisions": Revisions(LLMJudge(), n=2, length=2),
    "self-refine": SelfRefine(iterations=1),
}
"""Searches by prompts of their own, which are searched for through an `LLM`; cheatsheet, with a file, is not here."""

ASKING = {
    "infalign": InfAlign(LLMJudge(), samples=2),
    "llm-judge": LLMJudge(),
    "question-likelihood": QuestionLikelihood(),
}
"""Scorers by prompts of their own."""

SAMPLED = {"adaptive-sampling", "best-of-n", "feature-vote", "first-finish", "self-consistency", "weighted-vote"}
"""Searches that choose among n samples."""

STEPPED = {"dvts", "step-beam"}
"""Searches whose texts grow by steps."""

WEIGHED = {"a-star", "entropic-particle-filter", "parallel-tempering", "particle-filter", "particle-gibbs"}
"""Searches whose texts grow by steps, as their rewards weigh."""

TREES = {"lookahead", "mcts", "tree-of-thoughts", "value-guided"}
"""Searches over steps whose trees have forms of their own."""

TWO_MODELS = {"arbitrage", "phase-handoff", "spec-reason"}
"""Searches whose texts a second model writes as well."""

WRITTEN_BY_THE_LOOP = {
    *SAMPLED,
    *STEPPED,
    *WEIGHED,
    *TREES,
    *TWO_MODELS,
    "budget-forcing",
    "compute-optimal",
    "early-pruning",
    "edge",
}
"""Searches whose texts the loop writes, so that they take any drafter, budget, rule and processor."""

DRAWING = {"smc", "compute-optimal", "early-pruning", "edge", *SAMPLED, *STEPPED, *WEIGHED, *TREES}
"""Searches that draw, so that their requests have a temperature."""


@cache
def _partial_weights() -> PartialWeights:
    """Weights that fit the tiny model and do something."""
    weights = PartialWeights.initial(tiny_transformer(0))
    for layer in weights.layers:
        layer["output"].copy_(layer["bend"] / 3)
    return weights


@cache
def _prefixes() -> Prefixes:
    """Two that fit the tiny model and do something."""
    empty, generator = KVPrefix.zeros(tiny_transformer(0).config, 3).data, torch.Generator().manual_seed(0)
    return Prefixes({name: KVPrefix(torch.randn(empty.shape, generator=generator)) for name in ("secure", "unsafe")})


@cache
def _adapter() -> Adapter:
    """One that fits the tiny model and does something."""
    draws = torch.Generator().manual_seed(0)
    delta = torch.randn(32, 3, generator=draws)
    return Adapter({"layers.0.down": Columns(torch.tensor([1, 5, 30]), delta)})


@cache
def _exit_heads() -> ExitHeads:
    """Heads that fit the tiny model and do something, for the check after its first layer."""
    generator = torch.Generator().manual_seed(0)
    classifier, down, up = (torch.randn(*shape, generator=generator) for shape in ((3, 32), (1, 3, 32), (1, 32, 3)))
    return ExitHeads(1, classifier, down / 6, up)


@cache
def random_micro_steps(seed: int = 0, most: int = 4) -> MicroSteps:
    """Some that fit the tiny model, whose groups end here and there."""
    draws, sizes = torch.Generator().manual_seed(seed), dict(shapes(32, 1, most, 64, (4, 2, 8)))
    tensors = {name: torch.randn(shape, generator=draws) * shape[-1] ** -0.5 for name, shape in sizes.items()}
    tensors["stop.2.weight"] *= 8
    return MicroSteps(tensors, (1, 2), 4, 2, 1e4)


SOURCES: dict[str, Callable[[LanguageModel], LogitsSource]] = {
    "guidance": lambda other: Guidance(scale=1.7, negative=(9, 8, 7, 6, 5)),
    "uscd": lambda other: USCD((4, 3, 2), confident=0.5, deferred=True),
    "controlled-decoding": lambda other: ControlledDecoding(_head(), strength=2.0, k=5),
    "calm": lambda other: CALM(0.5, "softmax", every=1),
    "ftp": lambda other: FTP(TokenRouters((0.0, 0.9)), sinks=1),
    "hamburger": lambda other: Hamburger(random_micro_steps(), confidence=0.4),
    "dola": lambda other: DoLa(layers=(0, 1)),
    "transfer-q": lambda other: TransferQ(Even(), other, k=2, length=2, weight=2.0),
    "partial-attention": lambda other: PartialAttention(_partial_weights()),
    "prefix-lm": lambda other: PrefixLM(),
    "entropy-adaptive": lambda other: EntropyAdaptive(other, threshold=2.4, window=3, stay=2),
    "sec": lambda other: SEC(_exit_heads(), t_exit=0.3, t_stop=1.0),
    "sven": lambda other: SVEN("unsafe", _prefixes()),
    "adapter": lambda other: Tuned(_adapter()),
}
"""By name: a logit source, given a model that is like the one it is put over but not equal to it."""


def _coprocessor() -> CoprocessorWeights:
    """One that fits the tiny model and does something."""
    config, generator = tiny_transformer(0).config, torch.Generator().manual_seed(0)
    made = CoprocessorWeights.initial(config, torch.randn(3, config.hidden_size, generator=generator), 4)
    made.tensors["up"].normal_(generator=generator)
    return made


_CHANNELS = torch.arange(8).flip(0).repeat(2, 2, 1)
"""Of tiny models: two layers, two key-value heads, eight channels."""

_HEADS = torch.tensor([[0.2, 0.9], [0.8, 0.1]])
"""Of tiny models: two layers, two key-value heads, of which each layer has one that streams."""

KVS: dict[str, CachePolicy] = {
    "actqkv": ActQKV(0.4, block=3, window=8, representatives=2, sinks=2),
    "coprocessor": Coprocessor(_coprocessor()),
    "d2o": D2O(0.4, dense=0, sinks=2),
    "dapq": DapQ(0.5, queries=4, recent=2),
    "double-sparsity": DoubleSparsity(0.3, channels=0.5, dense_layers=0, calibration=KeyChannels(_CHANNELS)),
    "expected-attention": ExpectedAttention(0.5, future=6),
    "h2o": H2O(0.4),
    "localist": Localist(0.8, block=7, sinks=2),
    "lserve": LServe(0.3, window=0.3, sinks=2, gates=HeadGates(_HEADS), page=4, logical=2, reuse=2, least=1),
    "meta-soft": MetaSoft(0.5, MetaTokens.initial(tiny_transformer(0).config, 1.0, 6, 3, 2), sinks=1),
    "pyramid-kv": PyramidKV(0.5, window=3),
    "quantized": Quantized(4, group=4, residual=6),
    "quest": Quest(0.3, page=4, dense_layers=0, least=1),
    "snapkv": SnapKV(0.4, window=3),
    "streaming-llm": StreamingLLM(0.4, sinks=2),
    "tova": TOVA(0.3),
    "write-gate": WriteGate(0.4, WriteGates.initial(tiny_transformer(0).config, 1, (6,))),
}
"""Cache policies, set so that texts of a few dozen tokens lose something."""

OF_MIXTURES = ["mc-moe"]
"""Specs of transformations that change mixtures of experts alone."""

OF_FILES = ["s2ft"]
"""Specs of transformations that need a trained part, and make nothing smaller."""

TRANSFORMS = [
    "bitnet",
    "evopress:generations=2,children=2,tokens=16/24",
    "ffn-split:experts=4,active=2",
    "fp4:points=4",
    "fp4:points=2,activations=4,rounds=1",
    "int4",
    "int8",
    "jlcm:bits=2,steps=20",
    "lq-lora:rank=2",
    "nm-sparsity:by=activation",
    "slicegpt",
]
"""Specs; what they do is in the tests of the package."""


def untrained_probe(rows: str, bias: float = 0.0, model: str = "") -> Probe:
    """One that nothing was learned for."""
    draws = torch.Generator().manual_seed(3)
    width = 32 * (2 if rows == "prompt" else 1)
    tensors = {
        "mean": torch.zeros(width),
        "scale": torch.ones(width),
        "weight.0": torch.randn(8, width, generator=draws) / width**0.5,
        "bias.0": torch.zeros(8),
        "weight.1": torch.randn(1, 8, generator=draws),
        "bias.1": torch.full((1,), bias),
    }
    return Probe(tensors, "resid_post.1", rows, Threshold(0.5, 0.1, 20, "draws"), model=model)


def untrained_shift(size: float) -> Shift:
    draws = torch.Generator().manual_seed(4)
    weights = {f"weight.{at}": torch.randn(32, 32, generator=draws) * 0.3 for at in range(3)}
    weights["weight.2"] *= size
    return Shift(weights | {f"bias.{at}": torch.zeros(32) for at in range(3)})


def _los() -> LOSHead:
    torch.manual_seed(0)
    net, facts = LOSNet(8, 16), {"k": 8, "width": 16, "layers": 1, "every": 1}
    return LOSHead(net.state_dict(), Threshold(0.5, 0.1, 20, "draws"), facts)


def untrained_fields() -> Probe:
    """Reads three fields off a row."""
    one = untrained_probe("new")
    weights = {"weight.1": torch.randn(9, 8, generator=torch.Generator().manual_seed(6)), "bias.1": torch.zeros(9)}
    facts = {"fields": {"x": 3, "y": 4, "facing": 2}, "always": one.threshold.facts()}
    return Probe({**one.tensors, **weights}, one.site, "new", one.threshold, facts)


def untrained_codes() -> HeadCodes:
    draws = torch.Generator().manual_seed(7)
    shape = {"weight": (6, 8), "bias": (6,), "mean": (8,)}
    tensors = {name: torch.randn(size, generator=draws) for name, size in shape.items()} | {"scale": torch.ones(8)}
    tensors |= {"own": torch.rand(8, 6, generator=draws) < 0.5, "score": torch.linspace(0, 1, 8)}
    return HeadCodes(tensors, Threshold(0.5, 0.1, 20, "draws"), {"layers": 2, "heads": 4, "dim": 8})


def untrained_codebooks(k: int = 2) -> Codebooks:
    draws = torch.Generator().manual_seed(8)
    tensors = {"codes.0": torch.randn(4, 12, 8, generator=draws), "codes.1": torch.randn(1, 12, 32, generator=draws)}
    return Codebooks(tensors, ("head_out.0", "mlp_out.1"), k)


def untrained_autoencoder() -> SparseAutoencoder:
    draws = torch.Generator().manual_seed(9)
    shapes = ((32, 12), (12,), (12, 32), (32,))
    return SparseAutoencoder(*(torch.randn(shape, generator=draws) for shape in shapes), site="resid_post.0")


MONITORS: dict[str, Monitor] = {
    "codebook": Codebook(untrained_codebooks(), ((0, 1, 3), (1, 0, 2)), ((1, 0, 5),), action="switch"),
    "confidence": Doubt("worst", threshold=5.5, action="stop"),
    "context-awareness": ContextAwareness(layer=1),
    "factcheckmate": FactCheckmate(untrained_probe("prompt"), untrained_shift(1.0), action="switch", threshold=0.0),
    "feature": Feature(untrained_autoencoder(), (1, 4), 2.0, action="switch"),
    "los": LOS(_los(), every=3),
    "neurofeedback": Neurofeedback(
        Probe(untrained_probe("new").tensors, "resid_post.1", "answer", Threshold(9, 0.1, 20, ""))
    ),
    "program-probe": ProgramProbe(untrained_fields(), (2, 0, 1), "always"),
    "sae": SAE(untrained_codes(), 4, action="switch", threshold=0.3),
    "sequential": Sequential(untrained_probe("prompt"), threshold=0.0, action="flag"),
    "truthprint": TruthPrInt(untrained_probe("new", 0.3), most=4, share=0.01),
}
"""Monitors, each with an action that texts of a few tokens see, but for those of `READING`."""
READING = {"context-awareness", "los", "neurofeedback", "program-probe", "sequential"}
