"""A tiny model with a SentencePiece tokenizer that puts a space before what begins a text, as Llama 2 has it."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, normalizers, processors

from decodery.llm.llm import LLM
from decodery.models.loaders.load import LoadedModel
from decodery.models.tokenizers.chat import ChatTemplate
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.testing import tiny_transformer

WORDS = ("▁their", "▁yes", "▁no", "▁The", "▁cache", "▁keeps", "their", "▁")
SPECIAL = ("<unk>", "<s>", "</s>")
LETTERS = "abcdefghijklmnopqrstuvwxyzT \n[]/<>|.é"


def prefixed_tokenizer() -> Tokenizer:
    """Greedy pieces of WORDS, then letters, then bytes; ids 0 to 2 are special."""
    vocab = {piece: id for id, piece in enumerate((*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))))}
    for piece in (*LETTERS, *WORDS):
        vocab.setdefault(piece, len(vocab))
    merges = list[tuple[str, str]]()
    for word in WORDS:
        made = word[0]
        for letter in word[1:]:
            vocab.setdefault(made + letter, len(vocab))
            if (made, letter) not in merges:
                merges.append((made, letter))
            made += letter
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(list(SPECIAL))
    return Tokenizer(backend, bos_id=1, eos_ids=(2,))


def prefixed_lm(template: str | None = None) -> LLM:
    """A tiny model in float64 over these tokens; what it writes is noise."""
    tokenizer = prefixed_tokenizer()
    model = tiny_transformer(3, vocab_size=tokenizer.vocab_size, max_positions=256)
    return LLM(LoadedModel(model, tokenizer, None if template is None else ChatTemplate(template), "tiny", "float64"))
