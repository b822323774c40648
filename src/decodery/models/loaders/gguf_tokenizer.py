"""A tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from decodery.core.errors import CorruptFile, UnsupportedModel

from ..config import TOKENS
from ..tokenizers.tokenizer import TextFacts, add_beginning, library_errors
from .fields import Array, Fields, Flag, Kind, Listed, Text, Whole

if TYPE_CHECKING:
    import tokenizers

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_TEKKEN_UPPER, _TEKKEN_LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# How a byte-level tokenizer cuts text into words before merging; the names are GGUF's.
_PATTERNS = {
    "llama-bpe": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_TAIL}",
    "qwen2": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_TAIL}",
    "tekken": (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_TEKKEN_UPPER}*{_TEKKEN_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_TEKKEN_UPPER}+{_TEKKEN_LOWER}*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
_ALIASES = {
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "falcon-h1"), "llama-bpe"),
    **dict.fromkeys(("default", "mpt", "olmo"), "gpt-2"),
    "deepseek-r1-qwen": "qwen2",
}
"""Names under which files have one of these: that of Mamba-2's is mpt."""
_KINDS = (*_PATTERNS, "gpt-2", "smollm")
_VOCABULARIES: dict[str, dict[int, str]] = {
    "qwen2": {151643: "<|endoftext|>", 151644: "<|im_start|>", 151645: "<|im_end|>"},
    "llama-bpe": {128000: "<|begin_of_text|>", 128001: "<|end_of_text|>", 128009: "<|eot_id|>"},
    "smollm": {0: "<|endoftext|>", 1: "<|im_start|>", 2: "<|im_end|>", 4: "<reponame>", 49151: "ectable"},
    "gpt-2": {0: "!", 50255: "Ġgazed", 50256: "<|endoftext|>"},
    "tekken": {3: "[INST]", 4: "[/INST]", 5: "[AVAILABLE_TOOLS]", 9: "[TOOL_CALLS]"},
}
"""Tokens by which a vocabulary is known, of a file that does not say how it cuts texts."""
# Tokens that end a turn or a text in the families read here, whatever the file declares as its one end token.
_ENDINGS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>")

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPECIAL = re.compile(r"<[|｜].+[|｜]>|<(?:start|end)_of_turn>|<(?:s|/s|bos|eos|pad)>")
"""How tokens are spelled that stand for no text."""
_MOST_CHARACTERS, _MOST_ADDED, _LONGEST_MERGED = 1 << 24, 1 << 20, 256

_METADATA: dict[str, Kind] = {
    "tokenizer.chat_template": Text(1 << 20),
    **{f"tokenizer.ggml.{name}": kind for name, kind in {
        "model": Text(64),
        "pre": Text(64),
        "tokens": Listed(Text(), TOKENS.most),
        "token_type": Array(TOKENS.most),
        "scores": Array(TOKENS.most),
        "merges": Listed(Text(), TOKENS.most),
        "add_bos_token": Flag(),
        "add_space_prefix": Flag(),
        **{f"{name}_token_id": Whole(0, 2**32 - 1) for name in ("bos", "eos", "eot", "eom", "unknown", "padding")},
    }.items()},
}  # fmt: skip


def read_texts(metadata: dict[str, Any], origin: str) -> tuple[tokenizers.Tokenizer, TextFacts]:
    """The tokenizer that the metadata describes and what goes with it."""
    fields = Fields(metadata, origin, _METADATA)
    kind, tokens = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.tokens")
    if not tokens:
        raise CorruptFile(f"{origin} holds no tokenizer: it has no list tokenizer.ggml.tokens")
    if sum(map(len, tokens)) > _MOST_CHARACTERS:
        raise CorruptFile(f"{origin}: the tokens are longer than any tokenizer's: the file is damaged")
    types = _mended(fields, _numbers(fields, "tokenizer.ggml.token_type", len(tokens)))
    bos = _token(fields, "bos", tokens)
    with library_errors(f"{origin}: the tokenizer in the metadata is damaged"):
        if kind == "gpt2":
            backend = _byte_level(fields, tokens)
        elif kind in ("llama", "gemma4"):
            backend = _sentencepiece(fields, tokens, types, merged=kind == "gemma4")
        else:
            raise UnsupportedModel(
                f"{origin}: a tokenizer of kind {kind!r} is not supported, only gpt2, llama and gemma4"
            )
        _add_special(backend, tokens, types, sentencepiece=kind != "gpt2")
        # Llama 3 files say nothing of it and need it all the same.
        default = kind != "gpt2" or _pre_tokenizer(fields) == "llama-bpe"
        if fields.get("tokenizer.ggml.add_bos_token", default):
            add_beginning(backend, bos)
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {f"{name}_token": _token(fields, key, tokens) for name, key in names.items()}
    special = {name: tokens[id] for name, id in ids.items() if id is not None}
    return backend, TextFacts(bos, _endings(fields, tokens, types), special, fields.get("tokenizer.chat_template"))


def _endings(fields: Fields, tokens: list[str], types: np.ndarray | None) -> tuple[int, ...]:
    ids = [_token(fields, name, tokens) for name in ("eos", "eot", "eom")]
    if types is not None:
        special = np.flatnonzero(np.isin(types, (_CONTROL, _USER_DEFINED)))
        ids += [int(id) for id in special if tokens[id] in _ENDINGS]
    return tuple(dict.fromkeys(id for id in ids if id is not None))


def _token(fields: Fields, name: str, tokens: Sequence[str]) -> int | None:
    # Files write 2^32 - 1 and the like where they mean that there is none.
    id = fields.get(f"tokenizer.ggml.{name}_token_id")
    return id if id is not None and id < len(tokens) else None


def _numbers(fields: Fields, key: str, length: int) -> np.ndarray | None:
    values = fields.get(key)
    if values is not None and len(values) != length:
        raise CorruptFile(f"{fields.origin}: {key} should hold {length} numbers, one for each token")
    return values


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    """Spelling -> id; of two tokens with one spelling the first is the one that text can reach."""
    return {token: id for id, token in reversed(list(enumerate(tokens)))}


def _mended(fields: Fields, types: np.ndarray | None) -> np.ndarray | None:
    """The types of the tokens, with those corrected that are damaged beyond doubt, which is said.

    A token that is spelled like a special one and that no merge makes cannot be reached by text: it is a control token.
    """
    tokens = fields.need("tokenizer.ggml.tokens")
    merges = {merge.replace(" ", "", 1) for merge in fields.get("tokenizer.ggml.merges", [])}
    pieces = set() if merges else set(tokens)

    def reached(token: str) -> bool:
        return token in merges or any(token[:cut] in pieces and token[cut:] in pieces for cut in range(1, len(token)))

    plain = range(len(tokens)) if types is None else np.flatnonzero(types == _NORMAL).tolist()
    wrong = [id for id in plain if _SPECIAL.fullmatch(tokens[id]) and not reached(tokens[id])]
    if not wrong:
        return types
    shown = ", ".join(tokens[id] for id in wrong[:4])
    warnings.warn(
        f"{fields.origin}: {len(wrong)} special tokens are typed as text ({shown}): they are read as control tokens; "
        "convert the model again to mend the file",
        stacklevel=2,
    )
    mended = np.full(len(tokens), _NORMAL) if types is None else types.copy()
    mended[wrong] = _CONTROL
    return mended


def _pre_tokenizer(fields: Fields) -> str:
    name = fields.get("tokenizer.ggml.pre")
    if name is not None:
        return _ALIASES.get(name, name)
    tokens = fields.need("tokenizer.ggml.tokens")
    for known, places in _VOCABULARIES.items():
        if all(id < len(tokens) and tokens[id] == token for id, token in places.items()):
            return known
    raise UnsupportedModel(
        f"{fields.origin} does not say how its tokenizer cuts texts (tokenizer.ggml.pre), and its vocabulary is none "
        "that is known: convert the model again, or give the safetensors folder that the file was made from"
    )


def _byte_level(fields: Fields, tokens: list[str]) -> tokenizers.Tokenizer:
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    pre = _pre_tokenizer(fields)
    if pre not in _KINDS:
        raise UnsupportedModel(f"{fields.origin}: the pre-tokenizer {pre!r} is not supported, only {', '.join(_KINDS)}")
    merges = fields.get("tokenizer.ggml.merges")
    if merges is None:
        raise CorruptFile(f"{fields.origin} holds no merges for its byte-level tokenizer")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    model = models.BPE(_vocabulary(tokens), pairs, ignore_merges=pre == "llama-bpe")
    backend = tokenizers.Tokenizer(model)
    if pre in _PATTERNS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(_PATTERNS[pre]), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
        backend.pre_tokenizer = pre_tokenizers.Sequence([*digits, words])
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(
    fields: Fields, tokens: list[str], types: np.ndarray | None, *, merged: bool
) -> tokenizers.Tokenizer:
    """A tokenizer of characters. merged: its file lists merges, which end at line breaks, in place of scores."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    scores = _numbers(fields, "tokenizer.ggml.scores", len(tokens))
    listed = fields.get("tokenizer.ggml.merges")
    if merged and listed is not None:
        pairs = [(first, last) for first, _, last in (merge.partition(" ") for merge in listed)]
    elif scores is not None and not merged:
        pairs = _merges(tokens, scores, types)
    else:
        what = "merges" if merged else "scores"
        raise CorruptFile(f"{fields.origin} holds no {what} for its SentencePiece tokenizer")
    unknown = _token(fields, "unknown", tokens)
    if unknown is None and types is not None and (types == _UNKNOWN).any():
        unknown = int(np.argmax(types == _UNKNOWN))
    backend = tokenizers.Tokenizer(
        models.BPE(
            _vocabulary(tokens),
            pairs,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = fields.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    if merged:
        backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"\n+"), "isolated")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _merges(tokens: list[str], scores: np.ndarray, types: np.ndarray | None) -> list[tuple[str, str]]:
    """SentencePiece merges the neighbours whose union scores highest: every split of every token, best first."""
    ids = _vocabulary(tokens)
    found: list[tuple[float, int, int, str, str]] = []
    for id, token in enumerate(tokens):
        if len(token) > _LONGEST_MERGED or (types is not None and types[id] in (_UNKNOWN, _CONTROL)):
            continue
        score = -float(scores[id])
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                found.append((score, left, right, token[:cut], token[cut:]))
    found.sort(key=lambda merge: merge[:3])
    return [(left, right) for _, _, _, left, right in found]


def _add_special(
    backend: tokenizers.Tokenizer, tokens: list[str], types: np.ndarray | None, *, sentencepiece: bool
) -> None:
    """Declare control and user-defined tokens, which text is searched for before anything else."""
    from tokenizers import AddedToken

    if types is None:
        return
    added = np.flatnonzero(np.isin(types, (_UNKNOWN, _CONTROL, _USER_DEFINED)))
    if sum(len(tokens[id]) for id in added) > _MOST_ADDED:
        raise CorruptFile("the special tokens are longer than any tokenizer's")
    hidden = np.flatnonzero(np.isin(types, (_UNKNOWN, _CONTROL)))
    backend.add_special_tokens([AddedToken(tokens[id], special=True, normalized=False) for id in hidden if tokens[id]])
    # A run of spaces is a user-defined token of SentencePiece, spelled as the text looks after normalization.
    shown = np.flatnonzero(types == _USER_DEFINED)
    backend.add_tokens([AddedToken(tokens[id], special=False, normalized=sentencepiece) for id in shown if tokens[id]])
