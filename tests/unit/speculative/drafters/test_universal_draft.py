"""Draft models of another vocabulary: what they read and write is the target's text, and drafts change nothing."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from decodery.core.errors import SettingsError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.tokenizers.token_bytes import byte_alphabet
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.models.tokenizers.vocabularies import speaks
from decodery.models.torch.transformer import Transformer
from decodery.speculative.drafters.follower import Follower
from decodery.speculative.drafters.universal_draft import UniversalDraft, UniversalReading
from decodery.testing import check_identical, decode, tiny_transformer

MERGES = [("a", "b"), ("ab", "c"), ("Ġ", "a"), ("Ġa", "b"), ("Ã", "©"), ("1", "2")]


def tokenizer(merges: list[tuple[str, str]], special: list[str], *, reverse: bool = False) -> Tokenizer:
    """Bytes, in one order or the other, and merges of them."""
    letters = sorted(byte_alphabet(), reverse=reverse)
    vocabulary = {letter: id for id, letter in enumerate(letters)}
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    return Tokenizer(backend, eos_ids=(len(vocabulary),))


def model(own: Tokenizer, layers: int) -> Transformer:
    made = tiny_transformer(0, vocab_size=own.backend.get_vocab_size(), num_layers=layers)
    found = Transformer(replace(made.config, vocabulary=own.fingerprint(), eos_ids=own.eos_ids), made.weights)
    speaks(found, own)
    return found


OWN, OTHER = tokenizer([], ["<end>"]), tokenizer(MERGES, ["<stop>", "<turn>"], reverse=True)
TARGET, DRAFT = model(OWN, 2), model(OTHER, 1)
PROMPTS = ["abc ab 12 é", "x", " ab ab ab"]


def reading(target: Tokenizer, draft: Tokenizer) -> UniversalReading:
    return UniversalReading(target, draft, Follower(DRAFT, DRAFT.new_cache()))


@pytest.mark.parametrize("pair", [(OWN, OTHER), (OTHER, OWN)])
def test_the_text_is_the_same_in_both_vocabularies_as_it_grows(pair: tuple[Tokenizer, Tokenizer]) -> None:
    target, draft = pair
    text = "abc abab é 12 ab 1212 ünd abc" * 3
    ids, read = target.encode(text), reading(*pair)
    for end in range(1, len(ids) + 1):
        found = deepcopy(read).text(ids[:end])
        whole = b"".join(map(target.piece, ids[:end]))
        if whole.decode("utf-8", "ignore").encode() != whole:
            assert not found
            continue
        assert read.text(ids[:end]) == found
        assert b"".join(map(draft.piece, found)) == whole
    assert read.tokens == draft.encode(text)
    # A text that was taken back is read anew.
    assert read.text(ids[:3]) == draft.encode(target.decode(ids[:3]))


def test_what_is_written_is_cut_as_the_target_cuts_it() -> None:
    read = reading(OTHER, OWN)
    read.text(OTHER.encode("12 ab"))
    # With the end of the text the letter would be one token; what stands there is not tokenised again.
    assert read.drafted(OWN.encode("c ab")) == OTHER.encode("c ab")
    assert read.drafted(OWN.encode(" abc")) == OTHER.encode(" abc")
    # Half a character is left out.
    assert read.drafted(OWN.encode("1é")[:-1]) == OTHER.encode("1")
    assert read.drafted([]) == []


@pytest.mark.parametrize("swapped", [False, True])
def test_texts_are_those_of_plain_decoding(swapped: bool) -> None:
    target, draft, own = (DRAFT, TARGET, OTHER) if swapped else (TARGET, DRAFT, OWN)
    prompts = [own.encode(prompt) for prompt in PROMPTS]
    check_identical(target, prompts, drafter=UniversalDraft(draft), max_new_tokens=12, seeds=(0,), tested="drafted")


def test_drafts_are_what_the_draft_model_writes() -> None:
    prompt, length = OWN.encode("abc ab"), 4
    drafter = UniversalDraft(DRAFT, length=length)
    engine = Engine(TARGET)
    seq = engine.submit(Request(prompt, max_new_tokens=12, drafter=drafter, return_draft_trees=True))
    engine.run([seq])
    drafts = [list(step.tree.tokens) for step in seq.trace.steps if step.tree and len(step.tree.tokens) > 1]
    # The first token after the prompt is the target's own; what follows it is the draft model's.
    root, *drafted = drafts[0]
    place = next(end for end, token in enumerate(seq.tokens) if end >= len(prompt) and token == root) + 1
    text = OTHER.encode(OWN.decode(seq.tokens[:place]))
    (alone,) = decode(DRAFT, [text], seeds=(0,), max_new_tokens=length)
    assert b"".join(map(OTHER.piece, alone.generated)).startswith(b"".join(map(OWN.piece, drafted)))


def test_models_without_tokenizers_are_refused() -> None:
    with pytest.raises(SettingsError, match="needs the tokenizers of both models"):
        Engine(tiny_transformer(1)).submit(Request([1], drafter=UniversalDraft(DRAFT)))
    with pytest.raises(SettingsError, match="length >= 1, not 0"):
        UniversalDraft(DRAFT, length=0)
