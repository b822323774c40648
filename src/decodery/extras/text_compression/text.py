"""Compress a text with a language model, and get it back.

Both sides need the same distributions to the bit. Models in int8 and int4 give them: a row's logits depend on that row
alone, whatever shares its pass, and every kernel rounds alike. So the text is read in large passes when it is
compressed, and written by whatever passes a drafter makes possible when it is decompressed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from decodery.core.errors import CorruptFile, SettingsError, UnsupportedModel
from decodery.core.trace import Trace
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.store import Progress, silent
from decodery.models.protocol import LanguageModel
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.models.torch.transformer import Transformer
from decodery.step.acceptance_rule import AcceptanceRule, Accepted, NodeDistributions
from decodery.step.draft_tree import DraftTree
from decodery.step.sequence import Sequence as Text

from .coder import ArithmeticDecoder, ArithmeticEncoder
from .counts import TOTAL, check_vocabulary, frequencies
from .file import MOST_BYTES, Header, check_text, digest, pack, unpack

WINDOW = 1024
"""How many tokens the model sees at most; a quarter of them is read again when that is full."""
_ROWS = 64
"""Rows of a pass that reads, each with the logits of the whole vocabulary."""


class TextModel(Protocol):
    """What is needed of an `LLM`."""

    @property
    def model(self) -> LanguageModel: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    def engine(self) -> Engine: ...


def compress(
    lm: TextModel, text: bytes, *, window: int = WINDOW, overlap: int | None = None, progress: Progress = silent
) -> bytes:
    """Any bytes as a file that `decompress` restores with the same model.

    It takes as many bits as the model's surprise.

    Args:
        window: Tokens that the model sees at most, no more than its context has.
        overlap: Of these read again when that is full, a quarter if None.

    Raises:
        SettingsError: For a model whose passes are not exact, or a text of more than 16 MiB.
    """
    model = _exact(lm)
    if len(text) > MOST_BYTES:
        raise SettingsError(
            f"a text of {len(text):,} bytes is too long: compress parts of at most {MOST_BYTES:,} bytes"
        )
    window = min(window, model.config.max_positions)
    overlap = window // 4 if overlap is None else overlap
    if not 0 < overlap < window:
        raise SettingsError(f"an overlap of {overlap} tokens does not fit a window of {window}")
    tokens = tokens_of(lm.tokenizer, text)
    header = Header(fingerprint(lm), digest(text), len(text), len(tokens), window, overlap)
    # A token of no bytes would let a file promise more than its text holds.
    payload = coded(lm, tokens, window, overlap, progress) if 0 < len(tokens) <= len(text) else text
    if len(payload) >= len(text):
        # The text as it is is no longer.
        return pack(Header(header.model, header.text, len(text), 0, window, overlap), text)
    return pack(header, payload)


def coded(lm: TextModel, tokens: Sequence[int], window: int, overlap: int, progress: Progress = silent) -> bytes:
    """The bits of tokens, as bytes."""
    encoder, done = ArithmeticEncoder(), 0
    for part, logits in read_laws(lm, tokens, window, overlap):
        ends = frequencies(logits).cumsum(axis=1)
        for row, token in zip(ends, part, strict=True):
            encoder.push(int(row[token - 1]) if token else 0, int(row[token]), TOTAL)
        done += len(part)
        progress("compressing", done, len(tokens))
    return encoder.finish()


def read_laws(
    lm: TextModel, tokens: Sequence[int], window: int = WINDOW, overlap: int = WINDOW // 4
) -> Iterator[tuple[Sequence[int], torch.Tensor]]:
    """The tokens, some at a time, and the logits [n, vocab] that they are coded with."""
    model = _exact(lm)
    for context, part in _windows(tokens, _root(lm), window, overlap):
        cache = model.new_cache()
        # The last token has no successor to be told of.
        read = [*context, *part[:-1]]
        known = len(context) - 1
        if known:
            model.forward(Batch([Segment.chunk(read[:known], cache, logit_rows=[])]))
            cache.keep(range(known))
        for first in range(0, len(part), _ROWS):
            rows = read[known + first : known + first + _ROWS]
            logits = model.forward(Batch([Segment.chunk(rows, cache)])).logits
            cache.keep(range(len(rows)))
            yield part[first : first + len(rows)], logits


def decompress(
    lm: TextModel, data: bytes, *, drafter: Any = None, trace: Trace | None = None, progress: Progress = silent
) -> bytes:
    """The text that `compress` made `data` of.

    Args:
        drafter: An instance or a name, as in "prompt-lookup"; it makes for fewer passes and never for another text.
        trace: Where given, it gets the steps of all that was written.

    Raises:
        CorruptFile: For a damaged file.
        SettingsError: If it was made with another model.
    """
    model = _exact(lm)
    header, payload = unpack(data)
    if header.model != fingerprint(lm):
        raise SettingsError("this text was compressed with another model, or in another precision: give that one")
    if not header.tokens:
        check_text(header, payload)
        return payload
    if header.window > model.config.max_positions:
        raise CorruptFile("the compressed text is damaged: the model's context is shorter than its window")
    engine, rule = lm.engine(), _DecodedText(ArithmeticDecoder(payload))
    tokens: list[int] = []
    while len(tokens) < header.tokens:
        context = tokens[-header.overlap :] if tokens else [_root(lm)]
        rule.left = count = min(header.window - len(context), header.tokens - len(tokens))
        request = Request(context, max_new_tokens=count, acceptance_rule=rule, drafter=drafter)
        seq = engine.submit(request)
        engine.run([seq])
        if seq.error is not None:
            raise seq.error
        tokens += seq.generated
        if trace is not None:
            trace.steps += seq.trace.steps
        progress("decompressing", len(tokens), header.tokens)
    text = b"".join(map(lm.tokenizer.piece, tokens))
    check_text(header, text)
    return text


class _DecodedText(AcceptanceRule):
    """Lets the coder's bits decide what becomes text. left: tokens that this text still gets."""

    def __init__(self, decoder: ArithmeticDecoder) -> None:
        self.decoder = decoder
        self.left = 0

    def choose(self, tree: DraftTree, laws: NodeDistributions, seq: Text) -> Accepted:
        path: list[int] = []
        node = 0
        while True:
            token = self._read(laws.row(node))
            self.left -= 1
            child = tree.child(node, token)
            if child is None or self.left == 0:
                return Accepted(path, token)
            path.append(child)
            node = child

    def _read(self, logits: torch.Tensor) -> int:
        if self.decoder.beyond:
            raise CorruptFile("the compressed text ends too early: get the file again, or compress the text again")
        ends = frequencies(logits[None])[0].cumsum()
        token = int(np.searchsorted(ends, self.decoder.target(TOTAL), side="right"))
        begin = int(ends[token - 1]) if token else 0
        self.decoder.pull(begin, int(ends[token]), TOTAL)
        return token


def fingerprint(lm: TextModel) -> bytes:
    """First bytes of a hash over all of a model's weights and its vocabulary."""
    model = _exact(lm)
    weights, made = model.weights, hashlib.sha256(lm.tokenizer.fingerprint().encode())
    parts = [weights.embedding, weights.norm, *weights.head.tensors().values()]  # type: ignore[attr-defined]
    for layer in weights.layers:
        for name, part in sorted(vars(layer).items()):
            if part is not None:
                tensors = [part] if isinstance(part, torch.Tensor) else part.tensors().values()
                made.update(name.encode())
                parts += tensors
    for tensor in parts:
        made.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
    made.update(repr(model.config).encode())
    return digest(made.digest())


def _exact(lm: TextModel) -> Transformer:
    model = lm.model
    if not isinstance(model, Transformer) or not model.capabilities.exact_rows:
        raise UnsupportedModel("texts are compressed with models whose passes are exact: load this one with dtype int8")
    check_vocabulary(model.vocab_size)
    return model


def _root(lm: TextModel) -> int:
    """What stands before the first token."""
    ids = (lm.tokenizer.bos_id, *lm.tokenizer.eos_ids, 0)
    return next(id for id in ids if id is not None)


def _windows(
    tokens: Sequence[int], root: int, window: int, overlap: int
) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """What the model is given to begin with, and the tokens that it then tells the distributions of, part by part."""
    first = 0
    while first < len(tokens):
        context = tokens[max(0, first - overlap) : first] or [root]
        part = tokens[first : first + window - len(context)]
        yield context, part
        first += len(part)


def tokens_of(tokenizer: Tokenizer, text: bytes) -> list[int]:
    """Tokens whose bytes are `text`; none where the tokenizer cannot say it."""
    tokens: list[int] = []
    single = {tokenizer.piece(id): id for id in reversed(range(tokenizer.vocab_size)) if len(tokenizer.piece(id)) == 1}
    # Bytes that are no UTF-8 come out as surrogates, which no text has.
    for run in re.findall("[\udc80-\udcff]|[^\udc80-\udcff]+", text.decode("utf-8", "surrogateescape")):
        stands = run.encode("utf-8", "surrogateescape")
        if "\udc80" <= run[0] <= "\udcff":
            found = [single[stands]] if stands in single else []
        else:
            found = tokenizer.encode(run, special=False)
        if b"".join(map(tokenizer.piece, found)) != stands:
            return []
        tokens += found
    return tokens
