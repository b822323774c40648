"""A tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import CorruptFile, UnsupportedModel
from .tokenizer import TextFacts, add_beginning

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
_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2", "default": "gpt-2"}
_KINDS = (*_PATTERNS, "gpt-2", "smollm")
# Tokens that end a turn or a text in the families read here, whatever the file declares as its one end token.
_ENDINGS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>")

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_MOST_CHARACTERS, _LONGEST_MERGED = 1 << 24, 256


def read_texts(metadata: dict[str, Any], origin: str) -> tuple[tokenizers.Tokenizer, TextFacts]:
    """The tokenizer that the metadata describes and what goes with it."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise CorruptFile(f"{origin} holds no tokenizer: it has no list tokenizer.ggml.tokens")
    types = _numbers(metadata, "tokenizer.ggml.token_type", len(tokens), origin)
    try:
        if kind == "gpt2":
            backend = _byte_level(metadata, tokens, origin)
        elif kind == "llama":
            backend = _sentencepiece(metadata, tokens, types, origin)
        else:
            raise UnsupportedModel(f"{origin}: a tokenizer of kind {kind!r} is not supported, only gpt2 and llama")
        _add_special(backend, tokens, types, sentencepiece=kind == "llama")
    except (UnsupportedModel, CorruptFile):
        raise
    except Exception as error:  # the library raises bare Exception
        raise CorruptFile(f"{origin}: the tokenizer in the metadata is damaged: {error}") from error
    bos = _token(metadata, "bos", tokens)
    # Llama 3 files say nothing of it and need it all the same.
    default = kind == "llama" or _pre_tokenizer(metadata) == "llama-bpe"
    if metadata.get("tokenizer.ggml.add_bos_token", default):
        add_beginning(backend, bos)
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {f"{name}_token": _token(metadata, key, tokens) for name, key in names.items()}
    special = {name: tokens[id] for name, id in ids.items() if id is not None}
    template = metadata.get("tokenizer.chat_template")
    return backend, TextFacts(
        bos, _endings(metadata, tokens, types), special, template if isinstance(template, str) else None
    )


def _endings(metadata: dict[str, Any], tokens: list[str], types: np.ndarray | None) -> tuple[int, ...]:
    ids = [_token(metadata, name, tokens) for name in ("eos", "eot", "eom")]
    if types is not None:
        special = np.flatnonzero(np.isin(types, (_CONTROL, _USER_DEFINED)))
        ids += [int(id) for id in special if tokens[id] in _ENDINGS]
    return tuple(dict.fromkeys(id for id in ids if id is not None))


def _token(metadata: dict[str, Any], name: str, tokens: Sequence[str]) -> int | None:
    id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return id if isinstance(id, int) and 0 <= id < len(tokens) else None


def _numbers(metadata: dict[str, Any], key: str, length: int, origin: str) -> np.ndarray | None:
    values = metadata.get(key)
    if values is not None and (not isinstance(values, np.ndarray) or len(values) != length):
        raise CorruptFile(f"{origin}: {key} should hold {length} numbers, one for each token")
    return values


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    """Spelling -> id; of two tokens with one spelling the first is the one that text can reach."""
    return {token: id for id, token in reversed(list(enumerate(tokens)))}


def _pre_tokenizer(metadata: dict[str, Any]) -> str:
    name = str(metadata.get("tokenizer.ggml.pre", "default"))
    return _ALIASES.get(name, name)


def _byte_level(metadata: dict[str, Any], tokens: list[str], origin: str) -> tokenizers.Tokenizer:
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    pre = _pre_tokenizer(metadata)
    if pre not in _KINDS:
        raise UnsupportedModel(f"{origin}: the pre-tokenizer {pre!r} is not supported, only {', '.join(_KINDS)}")
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise CorruptFile(f"{origin} holds no merges for its byte-level tokenizer")
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
    metadata: dict[str, Any], tokens: list[str], types: np.ndarray | None, origin: str
) -> tokenizers.Tokenizer:
    import tokenizers
    from tokenizers import decoders, models, normalizers

    scores = _numbers(metadata, "tokenizer.ggml.scores", len(tokens), origin)
    if scores is None:
        raise CorruptFile(f"{origin} holds no scores for its SentencePiece tokenizer")
    unknown = _token(metadata, "unknown", tokens)
    if unknown is None and types is not None and (types == _UNKNOWN).any():
        unknown = int(np.argmax(types == _UNKNOWN))
    backend = tokenizers.Tokenizer(
        models.BPE(
            _vocabulary(tokens),
            _merges(tokens, scores, types, origin),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _merges(tokens: list[str], scores: np.ndarray, types: np.ndarray | None, origin: str) -> list[tuple[str, str]]:
    """SentencePiece merges the neighbours whose union scores highest: every split of every token, best first."""
    if sum(map(len, tokens)) > _MOST_CHARACTERS:
        raise CorruptFile(f"{origin}: the tokens are longer than any tokenizer's: the file is damaged")
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
    hidden = np.flatnonzero(np.isin(types, (_UNKNOWN, _CONTROL)))
    backend.add_special_tokens([AddedToken(tokens[id], special=True, normalized=False) for id in hidden if tokens[id]])
    # A run of spaces is a user-defined token of SentencePiece, spelled as the text looks after normalization.
    shown = np.flatnonzero(types == _USER_DEFINED)
    backend.add_tokens([AddedToken(tokens[id], special=False, normalized=sentencepiece) for id in shown if tokens[id]])
