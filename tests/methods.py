"""Every registered method that the conformance matrix runs, with settings that suit tiny models.

Adding a method means adding a line here; `test_conformance.py` fails while one is missing.
"""

from __future__ import annotations

from collections.abc import Callable

from decodery.draft.aggressive import Aggressive
from decodery.draft.auto import Auto
from decodery.draft.base import Drafter
from decodery.draft.draft_model import DraftModel
from decodery.draft.jacobi import Jacobi
from decodery.draft.lexical_unit import LexicalUnit
from decodery.draft.lookahead import Lookahead
from decodery.draft.prompt_lookup import PromptLookup
from decodery.draft.rapid import Rapid
from decodery.draft.token_recycling import TokenRecycling
from decodery.model.protocol import LanguageModel
from decodery.sample import Sampler
from decodery.verify.base import Rule
from decodery.verify.coupled import Coupled
from decodery.verify.lexical_unit import LexicalUnit as LexicalUnitRule
from decodery.verify.rapid import Rapid as RapidRule
from decodery.verify.rejection import Rejection
from decodery.verify.tolerance import Tolerance

DRAFTERS: dict[str, Callable[[LanguageModel], Drafter]] = {
    "auto": lambda other: Auto(),
    "prompt-lookup": lambda other: PromptLookup(length=5),
    "draft-model": lambda other: DraftModel(other, length=3),
    "aggressive": lambda other: Aggressive(source=tuple(range(2, 40)), max_draft=6),
    "jacobi": lambda other: Jacobi(window=4, fill="lookup"),
    "lexical-unit": lambda other: LexicalUnit(span=3, beta=0.0),
    "lookahead": lambda other: Lookahead(window=4, ngram=3, grams=3),
    "rapid": lambda other: Rapid(other, gamma=2, confidence=0.1, head=1, query=2, chunk=4, length=8),
    "token-recycling": lambda other: TokenRecycling(nodes=20, scope="request"),
}
"""By name: a drafter, given a model that is like the target but not equal to it."""

ADAPTIVE = {"auto"}
"""Drafters that weigh the machine's pass times and the rest of the batch: their drafts are not a function of the text
alone, which shows in the tokens only under rules that promise a distribution and not the seed's own text."""

RULES: dict[str, Rule] = {"coupled": Coupled(), "rejection": Rejection()}

LOSSY_RULES: dict[str, Rule] = {
    "lexical-unit": LexicalUnitRule(),
    "rapid": RapidRule(),
    "tolerance": Tolerance(),
}
"""Rules that change the output on purpose: what each promises instead is tested beside its drafter."""

SAMPLERS: dict[str, Sampler] = {
    "greedy": Sampler.from_settings(),
    "greedy-penalties": Sampler.from_settings(repetition_penalty=1.3, frequency_penalty=0.4, no_repeat_ngram=3),
    "plain": Sampler.from_settings(temperature=1.0),
    "nucleus": Sampler.from_settings(temperature=0.7, top_p=0.9),
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
