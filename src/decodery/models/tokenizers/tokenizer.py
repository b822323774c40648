"""Text to token ids and back, with the exact bytes after every token."""

from __future__ import annotations

import codecs
import copy
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from decodery.core.errors import CorruptFile, DecoderyError, PromptError

from .content import ContentEncoder, Encoded, Span, merged, overlaps
from .reasoning import MARKS
from .token_bytes import TokenBytes

if TYPE_CHECKING:
    import tokenizers

_GAPS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "", ""),
)
"""What stands before a text, between it and the one after a gap, and after both, where the gap is to be filled; what
stands before a repository's name, and before each file's.
"""
_REPOSITORY, _FILE, _SNIPPET = "myproject\n", "filename\n", "\n\n--- snippet ---\n\n"
"""Names of what has none, and what separates files where a model has no token for that, as llama.cpp writes them."""
_MARK = "\x02"


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turn any error of the tokenizers library, panics included, into a CorruptFile that says `what`."""
    try:
        yield
    except DecoderyError:
        raise
    except BaseException as error:
        # A panic of compiled code derives from nothing but BaseException, as a key pressed to stop us does.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CorruptFile(f"{what}: {(str(error).strip() or type(error).__name__).splitlines()[0][:200]}") from error


@dataclass(frozen=True)
class TextFacts:
    """What a checkpoint says of texts beside its tokenizer.

    Attributes:
        bos_id, eos_ids: Ids that begin (None: none) and end a text.
        special: Texts of the special tokens by name, such as "bos_token".
        chat_template: Source of the Jinja template, None where there is none.
    """

    bos_id: int | None
    eos_ids: tuple[int, ...]
    special: dict[str, str]
    chat_template: str | None


@contextmanager
def _prompt_errors() -> Iterator[None]:
    """What the library cannot read as text is the prompt's fault, and anything else the tokenizer's."""
    try:
        with library_errors("the model's tokenizer fails at this prompt"):
            yield
    except CorruptFile as error:
        if isinstance(error.__cause__, TypeError | UnicodeError):
            advice = "it has surrogates (half characters): give UTF-8"
            raise PromptError(f"the prompt is not valid text: {advice}") from error
        raise


class Tokenizer:
    """Wraps a `tokenizers.Tokenizer` of byte-level, SentencePiece or word tokens.

    Args:
        backend: A `tokenizers.Tokenizer`.
        bos_id: The id that begins one, None where the model has none.
        eos_ids: Every id that ends a text.
        control_ids: Those that tell the model something and are no text: special tokens and ends.
        mark_ids: Those that mark what a model thinks, which texts show though some models have them as special tokens.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, *, bos_id: int | None = None, eos_ids: Sequence[int] = ()
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.bos_id = bos_id
        self.eos_ids = tuple(eos_ids)
        self._added = {id: token.content for id, token in backend.get_added_tokens_decoder().items()}
        self.special_ids = frozenset(id for id, token in backend.get_added_tokens_decoder().items() if token.special)
        self.control_ids = self.special_ids | {id for id in self.eos_ids if id in self._added}
        self.mark_ids = frozenset(id for id, content in self._added.items() if any(content in marks for marks in MARKS))
        self._decoder = TokenBytes(backend)
        self._pieces: dict[int, bytes] = {}

    @classmethod
    def from_file(
        cls, path: Path, *, bos_id: int | None = None, eos_ids: Sequence[int] = (), tried: bool = False
    ) -> Tokenizer:
        """Read a tokenizer.json.

        Args:
            path: The file.
            bos_id, eos_ids: See `Tokenizer`.
            tried: See `read_tokenizer`.
        """
        from .tokenizer_file import read_tokenizer

        backend = read_tokenizer(path, tried=tried)
        return cls(backend, bos_id=bos_id, eos_ids=eos_ids)

    @property
    def vocab_size(self) -> int:
        """How many tokens have a text; a model's vocabulary may be padded beyond it."""
        return self.backend.get_vocab_size()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of `text`.

        Texts of special tokens are recognised inside `text` either way; a first token that is written there already is
        not added. `encode_content` reads texts of others, in which nothing is special.

        Args:
            text: Any text.
            special: Add what the model wants around a text, such as its first token.
        """
        return self.encoding(text, special=special).ids

    def encoding(self, text: str, *, special: bool = False) -> Encoded:
        """As `encode`, with the characters of `text` that every token stands for."""
        with _prompt_errors():
            found = self.backend.encode(text, add_special_tokens=special)
        ids, spans = list(found.ids), list(found.offsets)
        # A text that a template has made begins with the first token by itself.
        if special and self.bos_id is not None and ids[:2] == [self.bos_id, self.bos_id] and spans[0][1] == 0:
            ids, spans = ids[1:], spans[1:]
        return Encoded(ids, spans)

    def encode_content(self, text: str, content: Sequence[Span], *, special: bool = False) -> Encoded:
        """Tokens of a text of which others wrote the parts in `content`: those hold no control tokens.

        Args:
            text: all of it.
            content: the characters that others wrote. A control token that is spelled there, or reaches in, is text.
            special: as in `encode`.

        Returns:
            The tokens, those of `encode` where the content spells no control token.

        Raises:
            PromptError: the text is no valid text, or the model has no other tokens for what it spells.
        """
        found, content = self.encoding(text, special=special), merged(content)
        spelled = (span for id, span in zip(*found, strict=True) if id in self.control_ids and span[1] > span[0])
        if not any(overlaps(span, content) for span in spelled):
            return found
        with _prompt_errors():
            return self._content.encode(text, found, content, special=special)

    @cached_property
    def spelled(self) -> re.Pattern[str] | None:
        """Matches what control tokens are spelled as, in letters of either case; None where there are none."""
        spelled = sorted((re.escape(self._added[id]) for id in self.control_ids), key=len, reverse=True)
        return re.compile("|".join(spelled), re.IGNORECASE) if spelled else None

    @cached_property
    def _content(self) -> ContentEncoder:
        return ContentEncoder(self)

    def encode_after(self, text: str) -> list[int]:
        """Token ids of a text that follows another one: nothing is put before it, not even a space."""
        return self.encode_all_after([text])[0]

    def encode_all_after(self, texts: Sequence[str]) -> list[list[int]]:
        """As `encode_after`, of several texts at once."""
        mark = _MARK if self._decoder.strips_first_space else ""
        with _prompt_errors():
            found = self.backend.encode_batch([mark + text for text in texts], add_special_tokens=False)
        if not mark:
            return [each.ids for each in found]
        # Where the mark has no tokens of its own, the text is one that begins.
        ends = [
            next((n for n in range(1, len(each)) if self.decode(each.ids[:n]).lstrip() == mark), 0) for each in found
        ]
        return [
            each.ids[n:] if n else self.encode(text, special=False)
            for each, n, text in zip(found, ends, texts, strict=True)
        ]

    def infill(self, before: str, after: str, files: Sequence[tuple[str, str]] = ()) -> list[int] | None:
        """Token ids of a gap between two texts, for a model to fill; None where it has no tokens for that.

        Nothing in the texts is a special token.

        Args:
            before, after: The text before and after the gap.
            files: Name and text of others that the model reads first.
        """
        for prefix, suffix, middle, repository, separator in _GAPS:
            if any(self.token_id(sign) is None for sign in (prefix, suffix, middle)):
                continue
            signs = [(prefix, before), (suffix, after), (middle, "")]
            if files and separator and self.token_id(separator) is not None:
                known = bool(repository) and self.token_id(repository) is not None
                opened = [(separator, f"{name}\n{text}") for name, text in files]
                signs = [*[(repository, _REPOSITORY)] * known, *opened, (separator, _FILE), *signs]
            else:
                signs = [*((_SNIPPET, text) for _, text in files), *signs]
            written, content = "", list[Span]()
            for sign, text in signs:
                content.append((len(written) + len(sign), len(written) + len(sign) + len(text)))
                written += sign + text
            return self.encode_content(written, content, special=True).ids
        return None

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of `ids`.

        Args:
            ids: Token ids.
            special: Show special tokens instead of leaving them out.
        """
        stream = self.stream(special=special)
        return stream.push(ids) + stream.finish()

    def stream(self, *, special: bool = False, begins: bool = True) -> TokenStream:
        """A decoder that is fed piece by piece.

        Args:
            begins: With a text's beginning, where the first space is dropped.
        """
        return TokenStream(self, special, begins and self._decoder.strips_first_space)

    def piece(self, id: int) -> bytes:
        """The bytes that token `id` stands for inside a text; none for an id without a text."""
        found = self._pieces.get(id)
        if found is None:
            found = self._pieces[id] = self._bytes_of(id)
        return found

    def unknown(self, size: int) -> np.ndarray:
        """The ids below `size` that are no token and end no text, such as the padding of a vocabulary.

        Args:
            size: how many ids the model has.

        Returns:
            [n] int64 ascending.
        """
        spelling, number = self.backend.id_to_token, self.backend.token_to_id
        # As many tokens as ids, and none after them: each id is one, or what converters to GGUF pad a vocabulary with.
        whole = self.backend.get_vocab_size(with_added_tokens=True) == size and spelling(size) is None
        found = (
            (id for id in range(size) if number(f"[PAD{id}]") == id)
            if whole
            else (id for id in range(size) if (token := spelling(id)) is None or token == f"[PAD{id}]")
        )
        return np.array([id for id in found if id not in self.eos_ids], dtype=np.int64)

    def fingerprint(self) -> str:
        """SHA-256 of what every id stands for and which ids are special: equal only for one space of tokens."""
        digest = hashlib.sha256()
        for id in range(self.backend.get_vocab_size(with_added_tokens=True)):
            piece = self.piece(id)
            digest.update(len(piece).to_bytes(4, "little") + piece + bytes([id in self.special_ids]))
        return digest.hexdigest()

    def token_id(self, token: str) -> int | None:
        """The id of a token by its own spelling, such as "<|im_end|>"."""
        return self.backend.token_to_id(token)

    def _bytes_of(self, id: int) -> bytes:
        if id in self._added:
            return self._decoder.between + self._added[id].encode()
        token = self.backend.id_to_token(id) if id >= 0 else None
        return b"" if token is None else self._decoder.of(token)


class TokenStream:
    """Turns ids into text as they come.

    What `push` and `finish` return joins to `Tokenizer.decode` of all ids.

    Bytes of an unfinished character are held back; bytes that are no character become U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, special: bool, strip_first_space: bool) -> None:
        self._tokenizer = tokenizer
        self._hidden = frozenset() if special else tokenizer.special_ids - tokenizer.mark_ids
        self._strip = strip_first_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __copy__(self) -> TokenStream:
        clone = object.__new__(TokenStream)
        clone.__dict__.update(self.__dict__)
        # The only part that is changed in place.
        clone._decoder = copy.copy(self._decoder)
        return clone

    def push(self, ids: Iterable[int]) -> str:
        """Take further ids; returns the text that is complete."""
        piece = self._tokenizer.piece
        return self._trim(self._decoder.decode(b"".join(piece(id) for id in ids if id not in self._hidden)))

    def finish(self) -> str:
        """No id will follow: returns what was held back."""
        return self._trim(self._decoder.decode(b"", True))

    def _trim(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


def add_beginning(backend: tokenizers.Tokenizer, bos_id: int | None) -> None:
    """Make `encode` begin every text with token `bos_id`; None: with nothing."""
    from tokenizers import processors

    first = None if bos_id is None else backend.id_to_token(bos_id)
    if first is None:
        backend.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B")
    else:
        backend.post_processor = processors.TemplateProcessing(
            single=[first, "$A"], pair=[first, "$A", "$B"], special_tokens=[(first, bos_id)]
        )
