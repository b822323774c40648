"""What `auto` has learned from texts, in a folder, for later processes to begin with.

A file holds what was learned for one model, vocabulary and owner of texts. It is mapped into memory when a process
begins, and replaced as a whole: every some thousand tokens and when the process ends. So a process that is killed
loses what it learned last, and never leaves half a file. Of two processes that write one file the later one wins.
"""

from __future__ import annotations

import atexit
import hashlib
import warnings
from collections.abc import Sequence as Ordered
from pathlib import Path
from threading import Lock, Thread
from weakref import WeakSet

import numpy as np

from decodery.core.copied_pages import CopiedPages
from decodery.core.errors import DecoderyError, SettingsError
from decodery.models.loaders import store
from decodery.step.sequence import Sequence

from .contexts import Contexts
from .expectations import CONTEXTS, CopyRates, SuccessorRates
from .past import PastTexts

Tables = tuple[Contexts, SuccessorRates, PastTexts, CopyRates]
"""The contexts, how often they are right, earlier texts, and how often copies of those are."""

FILES = 16
"""Files that a folder holds at most: those used last stay."""
TOKENS = 1 << 18
"""Tokens of earlier texts in a file at most."""
_OFTEN = 4096
"""Tokens of ended texts after which a file is written."""
_MAGIC = b"decodery auto 1\n"
_HEAD = 4096
"""Bytes before the tables, whole pages: the magic, the identity and the digest of the rest."""

_open: WeakSet[KeptTexts] = WeakSet()
_writing = Lock()


class KeptTexts(PastTexts):
    """Earlier texts that are written to a file, with the tables beside them.

    Args:
        orders: See `PastTexts`.
        path: The file.
        identity: SHA-256 of what it is for.
    """

    def __init__(self, orders: Ordered[int], path: Path, identity: bytes) -> None:
        super().__init__(orders, TOKENS)
        self.path, self.identity, self.unwritten = path, identity, 0
        self.tables: Tables | None = None
        _open.add(self)

    def __deepcopy__(self, memo: dict[int, object]) -> KeptTexts:
        # A copy is for texts that are thrown away, and has no tables to write.
        clone = KeptTexts(self.orders, self.path, self.identity)
        clone.restore(self.tokens)
        return clone

    def add(self, text: Ordered[int]) -> None:
        super().add(text)
        self.unwritten += len(text)
        if self.unwritten >= _OFTEN:
            # Steps of texts do not wait for a disk, and the end of the process does.
            self.unwritten = 0
            Thread(target=self.write).start()

    def write(self) -> None:
        """Put a new file in the old one's place; a warning where that is not possible."""
        if self.tables is None:
            return
        contexts, rates, _, trusted = self.tables
        parts: list[np.ndarray] = [contexts.pages.bytes, rates.of, rates.seen, trusted.hits, trusted.seen]
        parts.append(np.array(self.tokens, dtype=np.int32))
        data = b"".join(each.tobytes() for each in parts)
        head = _MAGIC + self.identity + hashlib.sha256(data).digest()
        try:
            with _writing, store.locked(self.path.parent / ".lock"):
                with store.replacing(self.path) as temporary:
                    # Texts of one user are unreadable for others.
                    temporary.touch(mode=0o600)
                    temporary.write_bytes(head.ljust(_HEAD, b"\0") + data)
                self._remove_others()
        except (DecoderyError, OSError) as error:
            warnings.warn(f"what auto has learned is not kept: {error}", stacklevel=2)

    def _remove_others(self) -> None:
        files = sorted(self.path.parent.glob("*.tables"), key=lambda each: each.stat().st_mtime_ns)
        for each in files[:-FILES]:
            each.unlink(missing_ok=True)


def kept(folder: Path, seq: Sequence, fresh: Tables) -> Tables:
    """Tables that begin with what earlier processes have kept, and are kept in turn.

    Args:
        folder: Where files are.
        seq: A text, by whose model and owner the file is chosen.
        fresh: What they are where nothing is kept.

    Raises:
        SettingsError: For a model whose content is not known.
    """
    model, (contexts, rates, past, trusted) = seq.request.model, fresh
    if not model.fingerprint or not model.config.vocabulary:
        raise SettingsError(
            "auto:keep keeps what was learned of a model whose content is known, and this one's is not: load it with "
            "decodery.load, or leave keep out"
        )
    store.make_directory(folder)
    vocab_size, owner = seq.request.vocab_size, hashlib.sha256(seq.request.cache_namespace.encode()).hexdigest()
    names = [model.fingerprint, model.config.vocabulary, vocab_size, contexts.width, past.orders, owner]
    identity = hashlib.sha256(repr(names).encode()).digest()
    own = KeptTexts(past.orders, folder / f"{identity.hex()[:32]}.tables", identity)
    if own.path.exists():
        if (found := _read(own.path, identity, vocab_size, fresh)) is None:
            warnings.warn(f"{own.path} is damaged: what auto learns is kept anew", stacklevel=2)
        else:
            pages, tokens = found
            contexts = Contexts(CONTEXTS, contexts.width, begins=pages)
            own.restore(tokens)
    own.tables = contexts, rates, own, trusted
    return own.tables


def keep_all() -> None:
    """Write what this process has learned since files were written last."""
    for each in list(_open):
        if each.unwritten:
            each.unwritten = 0
            each.write()


def _read(path: Path, identity: bytes, vocab_size: int, fresh: Tables) -> tuple[CopiedPages, list[int]] | None:
    """The contexts and tokens of a file, whose rates become those of `fresh`; None where it is not whole."""
    contexts, rates, _, trusted = fresh
    size, numbers = len(contexts.pages.bytes), (rates.of, rates.seen, trusted.hits, trusted.seen)
    with path.open("rb") as file:
        head = file.read(_HEAD)
        if head[: len(_MAGIC) + 64] != _MAGIC + identity + hashlib.file_digest(file, "sha256").digest():
            return None
        file.seek(_HEAD + size)
        found = [np.frombuffer(file.read(each.nbytes), dtype=each.dtype) for each in numbers]
        tokens = np.frombuffer(file.read(), dtype=np.int32)
    pages = CopiedPages.of_file(path, _HEAD, size)
    # The digest is of the same file only if no other one has taken its name meanwhile.
    ranked = pages.copy().bytes[8 * size // (8 + 4 * contexts.width) :].view(np.int32)
    if any(len(each) and not (each.min() >= -1 and each.max() < vocab_size) for each in (ranked, tokens)):
        return None
    if not all(np.isfinite(values).all() and values.min() >= 0 for values in found):
        return None
    for each, values in zip(numbers, found, strict=True):
        each[...] = values.reshape(each.shape)
    return pages, tokens.tolist()


atexit.register(keep_all)
