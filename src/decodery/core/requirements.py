"""What a part needs of those beside it, and what it gives them: one table per part, which composites merge.

Nothing is checked here: `decodery.engine.validation` lays the tables of a request's parts side by side.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal

Origin = Literal["deterministic", "sampled", "without-replacement"]
"""How siblings in a draft tree may arise."""
Tap = int | str
"""Where hidden states are read: a layer's number or the name of a hook point, see `decodery.models.hooks`."""


@dataclass(frozen=True)
class Requirements:
    """What a part must find.

    Of the model, or of the source in its place: `taps`, where it wants the hidden states of every row, see
    `decodery.models.hooks`; `prompt`, whether it is shown the prompt's rows too, `prompt_taps`, their hidden states
    without their logits; `keys`, that a text's cache is one model's; `costs`, what passes take, which is
    learned from the steps; and capabilities, see `decodery.models.protocol`.
    Of the drafter: `drafts`, how siblings may have arisen, None where that is all the same; `laws`, the distributions
    that drafts were drawn from, where they were drawn; `pauses`, to be asked before each draw whether to go on;
    `draft_states`, the draft model's hidden states at that time.
    Of the sampler: `greedy`, nothing left to chance; `chance`, something left to it; `law`, the probabilities of tokens
    and not their order alone; `plain`, no masks and penalties.
    Of the rule: `checked`, that nothing becomes text that the target would not have written; `mask`, that the mask is
    applied where there is a constraint. Of the request: `ends`, that a text ends nowhere but where it is complete;
    `alone`, that there is no drafter; `source`, that an encoder reads a source before the text.
    """

    taps: tuple[Tap, ...] = ()
    prompt: bool = False
    prompt_taps: bool = False
    keys: bool = False
    costs: bool = False
    trees: bool = False
    states: bool = False
    changes: bool = False
    layer_plans: bool = False
    policies: bool = False
    parts: bool = False
    exact_rows: bool = False
    gradients: bool = False
    rows: bool = False
    logprobs: bool = False
    continues: bool = False
    source: bool = False
    drafts: tuple[Origin, ...] | None = None
    laws: bool = False
    pauses: bool = False
    draft_states: bool = False
    law: bool = False
    greedy: bool = False
    chance: bool = False
    plain: bool = False
    checked: bool = False
    mask: bool = False
    ends: bool = False
    alone: bool = False

    @classmethod
    def merged(cls, tables: Iterable[Requirements]) -> Requirements:
        """What all of these need together."""
        # Steps ask for it again and again, always of the same few.
        return cls._of(tuple(tables))

    @classmethod
    @cache
    def _of(cls, found: tuple[Requirements, ...]) -> Requirements:
        values: dict[str, Any] = {each.name: any(getattr(one, each.name) for one in found) for each in fields(cls)}
        values["taps"] = tuple(dict.fromkeys(tap for one in found for tap in one.taps))
        kinds = [one.drafts for one in found if one.drafts is not None]
        values["drafts"] = tuple(kind for kind in kinds[0] if all(kind in other for other in kinds)) if kinds else None
        return cls(**values)


@dataclass(frozen=True)
class Provides:
    """What others find in a part; the fields mean what they mean in `Requirements`.

    A drafter gives `drafts`, all that its siblings may arise from, `pauses` and `draft_states`; a rule `checked` and
    `mask`; a constraint `mask`, where asking about all tokens at once is cheaper than one by one; a processor `law`; a
    source what of the model can still be had through it.
    """

    taps: bool = False
    keys: bool = False
    states: bool = False
    changes: bool = False
    layer_plans: bool = False
    policies: bool = False
    parts: bool = False
    exact_rows: bool = False
    gradients: bool = False
    drafts: tuple[Origin, ...] = ()
    pauses: bool = False
    draft_states: bool = False
    law: bool = False
    checked: bool = False
    mask: bool = False
    source: bool = False

    @classmethod
    def merged(cls, tables: Iterable[Provides]) -> Provides:
        """What drafters give that draft in turns or together; states where all of them that pause give states."""
        found = list(tables)
        values: dict[str, Any] = {each.name: any(getattr(one, each.name) for one in found) for each in fields(cls)}
        values["drafts"] = tuple(dict.fromkeys(kind for one in found for kind in one.drafts))
        values["draft_states"] = values["pauses"] and all(one.draft_states for one in found if one.pauses)
        return cls(**values)


WORDS = {
    "taps": "hidden states of every token",
    "prompt": "the prompt's rows",
    "prompt_taps": "hidden states of the prompt",
    "keys": "the keys and values of one model",
    "costs": "what passes cost",
    "trees": "rows that branch",
    "states": "rows given as embeddings",
    "changes": "rows that are changed between layers",
    "layer_plans": "passes through some of the layers",
    "policies": "caches that are read as a policy says",
    "parts": "the final norm and the head by themselves",
    "exact_rows": "rows that are the same whatever shares their pass",
    "gradients": "gradients",
    "rows": "rows scored one by one",
    "logprobs": "the log-probabilities of likely tokens",
    "continues": "texts that go on from their middle",
    "source": "a source that an encoder reads",
    "drafts": "drafts",
    "laws": "the distributions that drafts come from",
    "pauses": "a question before each draw",
    "draft_states": "a draft model's hidden states",
    "greedy": "temperature 0",
    "chance": "a temperature above 0",
    "law": "the probabilities of tokens",
    "plain": "the model's own probabilities",
    "checked": "every token checked",
    "mask": "the mask of a constraint",
    "ends": "texts that end where they are complete",
    "alone": "passes without drafts",
}
"""What the fields are called in sentences and tables."""

USUAL = ("law", "checked", "mask")
"""What processors and rules give that say nothing else."""


def in_words(name: str, value: Any) -> str:
    """A field and its value, as in "deterministic or sampled drafts"."""
    if name != "drafts" or not value:
        return WORDS[name]
    *first, last = value
    return f"{', '.join(first)} or {last} drafts" if first else f"{last} drafts"


def said(table: Requirements | Provides) -> tuple[str, ...]:
    """All of a table in words; without what nearly every part gives."""
    found = {each.name: getattr(table, each.name) for each in fields(table)}
    usual = USUAL if isinstance(table, Provides) else ()
    return tuple(in_words(name, value) for name, value in found.items() if value and name not in usual)
