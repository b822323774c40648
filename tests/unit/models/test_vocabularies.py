"""Models that read each other's tokens: what differs in padding goes together, what differs in a token is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from decodery.core.errors import VocabularyMismatch
from decodery.logits_sources.entropy_adaptive import EntropyAdaptive
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.load import LoadedModel
from decodery.models.tokenizers.token_bytes import byte_alphabet
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.models.tokenizers.vocabularies import Fitted, fitted
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.drafters.rapid import Rapid
from decodery.step.drafter import Drafter
from decodery.step.sequence import Sequence
from decodery.testing import check_identical, decode, tiny_transformer
from far import Devices, moved
from tiny_models import SPECIAL

PROMPTS = [[1, 2, 3], [5, 6, 7, 5, 6, 7, 5, 6]]
TOKENS = 64
NAME = "one tokenizer"
_plain = tiny_transformer(0, vocab_size=TOKENS)
TARGET = Transformer(replace(_plain.config, vocabulary=NAME), _plain.weights)


def resized(tokens: int, vocabulary: str = NAME) -> Transformer:
    """The target with fewer tokens, or with others that it finds likelier than any it had."""
    weights = TARGET.weights
    more = max(0, tokens - TOKENS)
    embedding = torch.cat((weights.embedding[:tokens], torch.ones(more, weights.embedding.shape[1])))
    head = weights.head.weight[:tokens]
    head = torch.cat((head, 40 * torch.ones(more, head.shape[1], dtype=head.dtype).cumsum(0)))
    config = replace(TARGET.config, vocab_size=tokens, vocabulary=vocabulary)
    return Transformer(config, replace(weights, embedding=embedding, head=Dense(head)))


def spoken(extra: str = "", changed: str = "") -> Tokenizer:
    """One token per byte and the special ones. extra: a further one; changed: takes the place of the byte 65."""
    alphabet = byte_alphabet()
    vocabulary = {changed if changed and id == 65 else text: id for text, id in alphabet.items()}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*SPECIAL, *([extra] if extra else [])])
    return Tokenizer(backend)


def loaded(tokenizer: Tokenizer, tokens: int = 288) -> LoadedModel:
    model = tiny_transformer(1, vocab_size=tokens, num_layers=1)
    config = replace(model.config, vocabulary=tokenizer.fingerprint())
    return LoadedModel(Transformer(config, model.weights), tokenizer, None, "tiny", "float64")


@pytest.mark.parametrize("tokens", [TOKENS - 8, TOKENS + 8])
@pytest.mark.parametrize("drafter", [DraftModel(length=3), Rapid(gamma=3, head=1, query=2, chunk=4, length=8)])
def test_models_that_differ_in_padding_draft_for_each_other(drafter: Drafter, tokens: int) -> None:
    other = replace(drafter, model=resized(tokens))
    runs = check_identical(TARGET, PROMPTS, drafter=other, seeds=(0,), max_new_tokens=40)
    # Texts of noise hold tokens that the smaller model has not, after which it reads another text.
    assert any(max(seq.tokens) >= TOKENS - 8 for seq in runs)
    least = 1.1 if tokens < TOKENS else 3
    assert isinstance(drafter, Rapid) or all(seq.trace.tokens_per_pass > least for seq in runs)


def test_what_a_model_lacks_is_never_said_and_read_as_something_else() -> None:
    for tokens in (TOKENS - 8, TOKENS + 8):
        other = resized(tokens)
        made = fitted(other, TARGET)
        assert isinstance(made, Fitted) and made == fitted(other, TARGET) and made.config.vocab_size == TOKENS
        # Read by the model itself, with the token that is put in the place of those it has not.
        read = [1, 60, 62, 3] if tokens > TOKENS else [1, 0, 0, 3]
        logits = made.forward(Batch([Segment.chunk([1, 60, 62, 3], made.new_cache())])).logits
        own = other.forward(Batch([Segment.chunk(read, other.new_cache())])).logits
        shared = min(tokens, TOKENS)
        assert logits.shape == (4, TOKENS) and torch.equal(logits[:, :shared], own[:, :shared])
        assert (logits[:, shared:] == -torch.inf).all()
        with Devices():
            far = fitted(Transformer(other.config, moved(other.weights, "meta:0")), TARGET)
            segment = Segment.chunk([0] * 4, far.new_cache())
            rows = replace(segment, chosen=torch.tensor([1, 60, 62, 3]).to("meta:0"))
            there = far.forward(Batch([rows])).logits.cpu()
        assert torch.allclose(there, logits)
    assert fitted(TARGET, resized(TOKENS)) is TARGET


def test_sources_take_models_that_differ_in_padding() -> None:
    source = EntropyAdaptive(resized(TOKENS + 8), threshold=0.0, stay=1)
    (seq,) = decode(TARGET, PROMPTS[:1], logits_source=source)
    assert isinstance(seq, Sequence) and max(seq.tokens) < TOKENS + 8


def test_the_first_token_that_differs_is_named() -> None:
    ours, theirs = loaded(spoken()), loaded(spoken(changed="AA"), tokens=272)
    # Byte-level tokenizers number their bytes as byte_alphabet does.
    text = next(character for character, id in byte_alphabet().items() if id == 65)
    for _ in range(2):
        with pytest.raises(VocabularyMismatch, match=f"token 65 is 'AA' to one model and '{text}' to the other"):
            decode(ours.model, PROMPTS[:1], drafter=DraftModel(theirs.model))
    with pytest.raises(VocabularyMismatch, match="token 65"):
        decode(ours.model, PROMPTS[:1], logits_source=EntropyAdaptive(theirs.model))


def test_a_token_that_only_one_has_is_no_difference() -> None:
    for extra in (loaded(spoken("<pad>")), loaded(spoken("<pad>"), tokens=272)):
        ours = loaded(spoken())
        assert ours.model.config.vocabulary != extra.model.config.vocabulary
        assert fitted(extra.model, ours.model).vocab_size == 288


def test_models_of_which_nothing_is_known_must_be_of_one_size() -> None:
    known, unknown = resized(TOKENS - 8, ""), resized(TOKENS, "")
    assert fitted(unknown, TARGET) is unknown
    with pytest.raises(VocabularyMismatch, match="56 tokens and the other 64"):
        fitted(known, TARGET)
    with pytest.raises(VocabularyMismatch, match="although there may be as many"):
        fitted(resized(TOKENS, "another"), TARGET)
