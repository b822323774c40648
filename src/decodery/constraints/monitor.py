"""Monitor-guided decoding: after a dot, only attributes that a static analyser finds on the object."""

from __future__ import annotations

import hashlib
import os
import re
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Generic, Literal, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.models.tokenizers.vocabulary import Vocabulary
from decodery.sampling.constraint import Constraint
from decodery.sampling.logits_processor import require_number

from .analyser import analyser
from .base import require_text
from .place import BREAKING, CodePosition
from .spelling import sorted_pieces

_REMEMBERED = 512
"""Answers of the analyser that one compiled monitor keeps."""
_MASKS = 64
_NAME_BEHIND_DOT = re.compile(r"\.(?=.)[\s\\]*(?:[^\W\d]|[\ufffd#]|\Z)", re.DOTALL)
"""A dot inside a token after which a name stands, or may stand without the dot having been seen last."""

T = TypeVar("T")


@register(
    "monitor",
    paper="Guiding Language Models of Code with Global Context using Monitors (2023)",
    guarantee="every attribute read is one the analyser finds on the object, where it finds any",
    requirements=("jedi",),
    local=True,
)
@dataclass(frozen=True)
class Monitor:
    """Allows Python code to use only attributes that exist, as far as `jedi` finds them.

    Other code is not restricted. The prompt is the file before the cursor, so it needs `apply_chat_template=False`.
    There is no mask in strings (fields of f-strings are code), nor after a `self` or `cls` at the start of a statement,
    where attributes are created. Cost: a query per attribute, in a separate process that runs no code of the project.
    Memory: 512 results.

    Attributes:
        project: The folder in which modules are searched, beside installed packages.
        path: Path of the file, for relative imports.
        prefix: Text of the file before the prompt.
        policy: "hard" masks; "soft" adds `bonus` to the logits of the names that were found. "off_if_any" masks too,
            except after objects with computed attributes (`__getattr__`), and it ignores argument types that are
            inferred from calls.
        bonus: Added to logits by the policy "soft".
        strict_dot: Whether to exclude tokens with a dot and a name, whose name would not be checked; false allows them,
            as published.
        underscores: Whether names that begin with an underscore are allowed.
        seconds: Time limit of a query; if it takes longer, all names are allowed.
    """

    project: str = "."
    path: str | None = None
    prefix: str = ""
    policy: Literal["hard", "soft", "off_if_any"] = "hard"
    bonus: float = 5.0
    strict_dot: bool = True
    underscores: bool = True
    seconds: float = 10.0

    def __post_init__(self) -> None:
        if self.policy not in ("hard", "soft", "off_if_any"):
            raise SettingsError(f"monitor: policy must be hard, soft or off_if_any, not {self.policy!r}")
        if not Path(self.project).is_dir():
            raise SettingsError(f"monitor: there is no folder {self.project!r}; give the project's root")
        require_number("the bonus of monitor", self.bonus, above=0)
        require_number("the seconds of monitor", self.seconds, above=0)
        require_text("prefix of monitor", self.prefix)

    def compile(self, vocabulary: Vocabulary) -> MonitorConstraint:
        """The same for a model's tokens.

        Raises:
            SettingsError: If jedi is not installed.
        """
        return MonitorConstraint(self, vocabulary)

    def names(self, code: str) -> list[str] | None:
        """The attributes that may stand after the dot `code` ends with, sorted.

        None where nothing is known of it.
        """
        question = {
            "code": code,
            "path": None if self.path is None else os.path.abspath(self.path),
            "project": os.path.abspath(self.project),
            "guess": self.policy != "off_if_any",
        }
        answer = analyser().ask(question, self.seconds)
        if answer is None or (self.policy == "off_if_any" and not answer["known"]):
            return None
        found = [name for name in answer["names"] if self.underscores or not name.startswith("_")]
        return found or None


class MonitorState:
    """A text.

    Args:
        text: All of the file so far.
        place: Where it stands.
        ended: An end token was written.
    """

    __slots__ = ("ended", "place", "text")

    def __init__(self, text: bytes, place: CodePosition, ended: bool = False) -> None:
        self.text = text
        self.place = place
        self.ended = ended


class MonitorConstraint(Constraint):
    """A monitor for one vocabulary. The analyser is asked when a mask is, and not for drafts."""

    @property
    def requirements(self) -> Requirements:
        return replace(super().requirements, ends=False)

    def __init__(self, monitor: Monitor, vocabulary: Vocabulary) -> None:
        analyser()
        self.monitor = monitor
        self.vocabulary = vocabulary
        self.bonus = monitor.bonus if monitor.policy == "soft" else None
        self._spellings = _spellings(vocabulary)
        self._ends = np.zeros(vocabulary.size, dtype=bool)
        self._ends[list(vocabulary.eos_ids)] = True
        self._prefix = monitor.prefix.encode()
        # Some tokenizers put a space before what begins a text.
        self._indented = vocabulary.bytes_of(vocabulary.encode("x")).startswith(b" ")
        self._found: _Recent[list[bytes]] = _Recent(_REMEMBERED)
        self._masks: _Recent[np.ndarray] = _Recent(_MASKS)

    def init(self, prompt: Sequence[int]) -> MonitorState:
        text = self.vocabulary.bytes_of(list(prompt))
        text = self._prefix + (text.removeprefix(b" ") if self._indented else text)
        return MonitorState(text, CodePosition().after(text))

    def advance(self, state: MonitorState, token: int) -> MonitorState:
        if state.ended or token in self.vocabulary.eos_ids:
            return MonitorState(state.text, state.place, ended=True)
        if token in self.vocabulary.special_ids or not (piece := self.vocabulary.pieces[token]):
            return state
        return MonitorState(state.text + piece, state.place.after(piece))

    def question(self, state: MonitorState) -> Callable[[], object] | None:
        since = state.place.since
        if state.ended or since is None or self._key(state, since) in self._found:
            return None
        return partial(self._rests, state)

    def idle(self, state: MonitorState) -> bool:
        return not state.ended and self._unseen(state) is None and not self._rests(state)

    def allowed(self, state: MonitorState) -> np.ndarray:
        if state.ended:
            return self._ends
        rests, unseen = self._rests(state), self._unseen(state)
        if not rests:
            return self._spellings.any if unseen is None else ~unseen
        return self._masks.get((frozenset(rests), unseen is None), lambda: self._mask(rests, unseen))

    def _mask(self, rests: list[bytes], unseen: np.ndarray | None) -> np.ndarray:
        mask = self._spellings.of(rests)
        if b"" in rests:
            mask |= self._ends
        if unseen is not None:
            mask &= ~unseen
        mask.flags.writeable = False
        return mask

    def is_complete(self, state: MonitorState) -> bool:
        if state.ended:
            return True
        rests = self._rests(state)
        return not rests or b"" in rests

    def permits(self, state: MonitorState, token: int) -> bool:
        # A draft is not worth a question: whether the token may come shows where the text gets there.
        return self.question(state) is not None or super().permits(state, token)

    def _unseen(self, state: MonitorState) -> np.ndarray | None:
        """[vocab] the tokens that would write a name after a dot unseen; None where there are none."""
        if not self.monitor.strict_dot:
            return None
        return self._spellings.dotted_behind_text if state.place.in_text else self._spellings.dotted

    def _rests(self, state: MonitorState) -> list[bytes]:
        """How the attribute's name that is being written may go on, b"" where it may end; empty: the monitor is idle.

        It is idle, too, where what is written already is no beginning of any name found: such a text is wrong whatever
        follows, and comes from the prompt or from a token that was let pass.
        """
        since = state.place.since
        if since is None:
            return []
        names = self._found.get(self._key(state, since), lambda: self._ask(state.text[: len(state.text) - len(since)]))
        return [name[len(since) :] for name in names if name.startswith(since)]

    def _key(self, state: MonitorState, since: bytes) -> bytes:
        return hashlib.sha256(state.text[: len(state.text) - len(since)]).digest()

    def _ask(self, code: bytes) -> list[bytes]:
        return [name.encode() for name in self.monitor.names(code.decode("utf-8", "replace")) or ()]


class _Recent(Generic[T]):
    """What was computed last, up to a number of entries. Safe to share between threads."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = Lock()
        self._values: OrderedDict[Hashable, T] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._values

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        value = self._values.get(key)
        if value is None:
            value = make()
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            if len(self._values) > self._most:
                self._values.popitem(last=False)
        return value


class _Spellings:
    """A vocabulary by what its tokens write. Special tokens write nothing.

    any: all ids. dotted: [vocab] bool, tokens with a name after a dot of theirs; dotted_behind_text: those of them
    that may leave a string or a comment before the dot; both None where there are none.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.any = np.ones(vocabulary.size, dtype=bool)
        self.any.flags.writeable = False
        self._pieces, ids = sorted_pieces(vocabulary)
        self._ids = np.array(ids, dtype=np.int64)
        self._with: dict[bytes, list[int]] = {}
        for piece, id in zip(self._pieces, ids, strict=True):
            self._with.setdefault(piece, []).append(id)
        self._breaking = self._where(lambda piece: piece[0] in BREAKING)
        dotted = self._where(lambda piece: b"." in piece and bool(_dots(piece)))
        behind = self._where(lambda piece: b"." in piece and any(map(_leaves, _dots(piece))))
        self.dotted = dotted if dotted.any() else None
        self.dotted_behind_text = behind if behind.any() else None

    def _where(self, holds: Callable[[bytes], bool]) -> np.ndarray:
        mask = np.zeros(len(self.any), dtype=bool)
        mask[[id for piece, id in zip(self._pieces, self._ids.tolist(), strict=True) if holds(piece)]] = True
        mask.flags.writeable = False
        return mask

    def of(self, rests: list[bytes]) -> np.ndarray:
        """[vocab] bool: tokens that are a beginning of one of `rests`, or one of them and a break after it."""
        mask = self._breaking.copy() if b"" in rests else np.zeros(len(self.any), dtype=bool)
        whole = [rest for rest in rests if rest]
        for part in {rest[:length] for rest in whole for length in range(1, len(rest) + 1)}:
            if part in self._with:
                mask[self._with[part]] = True
        for rest in whole:
            at = bisect_left(self._pieces, rest)
            while at < len(self._pieces) and self._pieces[at].startswith(rest):
                piece = self._pieces[at]
                if len(piece) > len(rest) and piece[len(rest)] in BREAKING:
                    mask[self._ids[at]] = True
                at += 1
        return mask


def _dots(piece: bytes) -> list[str]:
    """What stands before each dot of a token after which a name stands. Cut characters may be letters."""
    text = piece.decode("utf-8", "replace")
    return [text[: dot.start()] for dot in _NAME_BEHIND_DOT.finditer(text)]


def _leaves(before: str) -> bool:
    """Whether a string, a field's format or a comment may end in this."""
    return any(sign in before for sign in "'\"\n{}")


_known: WeakKeyDictionary[Vocabulary, _Spellings] = WeakKeyDictionary()


def _spellings(vocabulary: Vocabulary) -> _Spellings:
    found = _known.get(vocabulary)
    if found is None:
        found = _known[vocabulary] = _Spellings(vocabulary)
    return found
