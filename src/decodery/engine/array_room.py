"""Room for the next rows of the texts in arrays: pages are taken for all of them at once."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

import numpy as np

from decodery.models.cache.account import resident
from decodery.models.cache.open_rows import append
from decodery.models.cache.page_pool import SLOTS, PagePool
from decodery.models.step_arrays import StepArrays

from .array_text import ArrayText
from .text import expect

_AHEAD = 64
"""Rows that texts have room for when the batch begins, so that it lasts for many steps."""


def make_room(steps: StepArrays, texts: Ordered[ArrayText], places: Ordered[int], *, ahead: bool) -> bool:
    """Make room for the next steps of some texts; whether there is some.

    Args:
        steps: The batch.
        texts: Those in it.
        places: The numbers of the texts without room. Of one that lies in the arrays `ends` is 0 or more.
        ahead: Whether to take pages for many steps; under a limit they are taken when they are needed.
    """
    more = _AHEAD if ahead else 0
    opened = list[tuple[int, int]]()
    # A text that goes on with what another engine has read keeps that engine's pool.
    grown: dict[PagePool, tuple[list[int], list[int]]] = {}
    for place, end in zip(places, steps.ends[places].tolist(), strict=True):
        text = texts[place]
        rows = text.room + (more and max(min(more, text.most - text.length - text.room), 0))
        if end >= 0 and (count := text.rows.missing(rows)):
            those, counts = grown.setdefault(text.rows.pages.pool, ([], []))
            those.append(place)
            counts.append(count)
        else:
            opened.append((place, rows))
    try:
        for those, counts in grown.values():
            append([texts[place].rows for place in those], counts)
            steps.ends[those] += SLOTS * np.array(counts)
            for place, count in zip(those, counts, strict=True):
                text = texts[place]
                text.held += count * text.page_bytes
                if text.held > text.ledger.bytes:
                    text.ledger.bytes = text.held
        return all(_open(steps, place, texts[place], rows, more // 2) for place, rows in opened)
    except Exception:
        return False


def _open(steps: StepArrays, place: int, text: ArrayText, rows: int, least: int) -> bool:
    """Make room for the next rows of one text, whatever that takes, and write into the arrays where its cache lies.

    Args:
        steps: The batch.
        place: The text's number in it.
        text: The text.
        rows: How many rows there is to be room for.
        least: How many there may be room for already.
    """
    expect(text.seq)
    if not text.rows.has_room(max(text.room, least)):
        text.rows.open(rows)
    if not text.rows.has_room(text.room):
        return False
    steps.describe(place, text.rows)
    steps.next[place], steps.ends[place] = text.cache.next_position, text.rows.last_position(text.room)
    text.run.caches.add(text.cache)
    text.held = resident(text.run.caches)
    text.ledger.bytes = max(text.ledger.bytes, text.held)
    return True
