"""Texts that hold what others wrote: none of it becomes a control token, whatever it spells."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from decodery.core.errors import PromptError

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

Span = tuple[int, int]
"""First and last character, the last not included."""


class Encoded(NamedTuple):
    """Tokens of a text.

    Attributes:
        spans: Of each the characters that it stands for; empty where it was added.
    """

    ids: list[int]
    spans: list[Span]


_ANCHOR = "\ufdd0\ufdd1"
"""Stands for a control token of the template, or parts what would become one; of characters that no text has."""


class ContentEncoder:
    """Encodes by a second tokenizer over the same model, which knows none of the special tokens.

    The control tokens that stand outside the content are taken out before and put back after. All that lies between
    two of them is encoded as it would be between them, so that nothing else differs from the whole text's tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        import tokenizers

        backend, self._tokenizer = tokenizer.backend, tokenizer
        # The model itself is shared: to read it again would take seconds.
        self._backend = tokenizers.Tokenizer(backend.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            if getattr(backend, part) is not None:
                setattr(self._backend, part, getattr(backend, part))
        added = {id: token for id, token in backend.get_added_tokens_decoder().items() if not token.special}
        self._backend.add_tokens([*added.values(), tokenizers.AddedToken(_ANCHOR, special=False, normalized=False)])
        self._anchor = self._backend.token_to_id(_ANCHOR)
        self._ids = {self._backend.token_to_id(token.content): id for id, token in added.items()}
        self._unknown = _unknown(tokenizer)

    def encode(self, text: str, whole: Encoded, content: Sequence[Span], *, special: bool) -> Encoded:
        """Tokens of `text`, whose parts in `content` are others'.

        Args:
            whole: Its tokens where all of it is the template's.

        Raises:
            PromptError: For content that cannot be told from control tokens.
        """
        if _ANCHOR in text:
            raise PromptError("the prompt holds the characters U+FDD0 and U+FDD1, which are no text: leave them out")
        control = self._tokenizer.control_ids
        kept = {
            span: id
            for id, span in zip(whole.ids, whole.spans, strict=True)
            if id in control and span[1] > span[0] and not overlaps(_core(text, span), content)
        }
        cuts = set[int]()
        while True:
            found, wrong = self._try(text, kept, cuts, special)
            if not wrong:
                return found
            if wrong <= cuts:
                raise PromptError("a part of the prompt always becomes a control token: leave it out")
            cuts |= wrong

    def _try(self, text: str, kept: dict[Span, int], cuts: set[int], special: bool) -> tuple[Encoded, set[int]]:
        """Tokens of a text, and where further cuts should part what became control tokens though it is content."""
        # Every anchor stands for a control token, or for nothing where it only parts a spelling in two.
        anchors = sorted([*kept, *((cut, cut) for cut in cuts)])
        parts, starts, shifts, at, size = list[str](), [0], [0], 0, 0
        for first, last in anchors:
            parts += [text[at:first], _ANCHOR]
            size += first - at + len(_ANCHOR)
            at = last
            starts.append(size)
            shifts.append(last - size)
        made = self._backend.encode("".join([*parts, text[at:]]), add_special_tokens=special)
        ids, spans, wrong, coming = list[int](), list[Span](), set[int](), iter(anchors)
        for id, (first, last) in zip(made.ids, made.offsets, strict=True):
            if id == self._anchor:
                span = next(coming)
                if span in kept:
                    ids.append(kept[span])
                    spans.append(span)
                continue
            id, shift = self._ids.get(id, id), shifts[bisect_right(starts, first) - 1]
            ids.append(id)
            spans.append((first + shift, last + shift) if last > first else (first, last))
            if id in self._tokenizer.control_ids and id != self._unknown and last > first:
                wrong.add(first + shift + 1)
        return Encoded(ids, spans), wrong


def merged(spans: Sequence[Span]) -> list[Span]:
    """The same characters as spans in order, none of which touches another."""
    found: list[Span] = []
    for first, last in sorted(spans):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        elif first < last:
            found.append((first, last))
    return found


def overlaps(span: Span, others: Sequence[Span]) -> bool:
    """Whether a span shares a character with one of `others`, which are `merged`."""
    before = bisect_left(others, span[1], key=lambda other: other[0])
    return before > 0 and others[before - 1][1] > span[0]


def _core(text: str, span: Span) -> Span:
    """A token's own characters, without the white space around it that some special tokens take in."""
    own = text[span[0] : span[1]]
    begin = span[0] + len(own) - len(own.lstrip())
    return (begin, begin + len(own.strip())) if own.strip() else span


def _unknown(tokenizer: Tokenizer) -> int | None:
    """The token of what the vocabulary has no token for, which is text though it counts as special."""
    model = tokenizer.backend.model
    if hasattr(model, "unk_token"):
        return None if model.unk_token is None else tokenizer.token_id(model.unk_token)
    found = json.loads(model.__getstate__()).get("unk_id")
    return found if isinstance(found, int) else None
