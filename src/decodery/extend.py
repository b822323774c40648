"""Everything that a method of your own needs, from one import.

A method is a frozen dataclass that derives from one of the base classes here and is named by `@register`:

    from decodery.extend import Drafter, DraftTree, register

The invariants that every method must keep are functions named `check_...`; `docs/extending.md` shows each kind.
"""

from __future__ import annotations

from .compression.base import ModelCompression
from .constraints.base import ConstraintSpec
from .core.errors import ConstraintError, SettingsError
from .core.registry import register
from .core.requirements import Provides, Requirements
from .core.threads import one_thread
from .core.topk import most_likely, topk
from .diffusion.base import DiffusionDecoder, UnmaskingPolicy
from .diffusion.cache.base import DiffusionCache
from .diffusion.canvas import Canvas
from .diffusion.experts.base import ExpertSharing
from .diffusion.run import filled
from .diffusion.view import Commit, View
from .engine.engine import Engine
from .engine.request import Request
from .extras.simultaneous.base import SimultaneousPolicy, StreamOutput
from .logits_sources.contexts import Blend, Member, Part
from .models.batch import Batch, Segment
from .models.cache.attention_policy import Attention, AttentionPolicy
from .models.cache.cache import KVCache
from .models.hooks import HookPoint, Intervention, Tap, hook_point
from .models.layer_plan import LayerPlan
from .models.loaders.store import Progress, silent
from .models.protocol import LanguageModel, Reader
from .models.tokenizers.tokenizer import Tokenizer
from .models.tokenizers.vocabulary import Vocabulary
from .sampling.constraint import Constrained, Constraint
from .sampling.logits_processor import Context, LogitsProcessor, Stage
from .sampling.sampler import Sampler
from .search.base import Branches, Search, choose
from .step.acceptance_rule import AcceptanceRule, Accepted, NodeDistributions
from .step.cache_policy import CachePolicy
from .step.draft_length_policy import Budget, DraftLengthPolicy, Outlook
from .step.draft_tree import MASK_TOKEN, DraftTree
from .step.drafter import Drafter, VerificationFeedback
from .step.forward_request import (
    ForwardCoroutine,
    ForwardRequest,
    ForwardResult,
    as_coroutine,
    gather,
    off_loop,
    run_sync,
    score,
    score_all,
)
from .step.logits_source import LogitsSource
from .step.monitor import Monitor, Regenerate, Rollback, Row, Stop
from .step.scorer import Candidates, Scorer
from .step.sequence import Sequence
from .step.tree_drafter import TreeDrafter
from .step.tree_policy import TreePolicy
from .testing import (
    OracleDenoiser,
    check_batch,
    check_cache,
    check_cache_policy,
    check_constraint,
    check_distribution,
    check_identical,
    check_logits_processor,
    check_predictions,
    check_scorer,
    check_search,
    check_state,
    decode,
    tiny_transformer,
)
