"""Merged tokens: the text stays, the counts are those of counting anew, and no merges are the prompt itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from commands import inside
from decodery.compression import NMSparsity
from decodery.compression.base import transformed
from decodery.compression.folder import save
from decodery.core.errors import CorruptFile, PromptError, SettingsError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Batch, Segment
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.models.torch.transformer import Transformer
from decodery.models.trained.artifact import Artifact
from decodery.models.trained.merge_nets import MergeNet
from decodery.models.trained.merges import Merged, _Merging, merged
from decodery.step.dynamic_tokens import dynamic, means
from decodery.step.embedded import Embeddings
from decodery.testing import check_identical, tiny_transformer
from decodery.training.kind import Run
from decodery.training.merges import MergeRecipe, MergeTrainee
from decodery.training.one_by_one import train_beside
from tiny_models import make_tokenizer, tiny_loaded

TOKENIZER = Tokenizer(make_tokenizer(), bos_id=256, eos_ids=(257,))
TEXTS = ["the cat and the other cat sat, then the hat", "aaaa aaa banana bananas", "héé 汉字 汉字! Yes. No\nno"]
MODEL = tiny_transformer(1, vocab_size=260)


def ids_of(texts: Sequence[str]) -> list[list[int]]:
    return [[256, *TOKENIZER.encode(text, special=False)] for text in texts]


def words(text: Merged) -> list[bytes]:
    return [b"".join(map(TOKENIZER.piece, text.tokens[first:stop])) for first, stop in text.spans]


def counted_anew(texts: Sequence[Sequence[int]], merges: int, within: str) -> list[list[bytes]]:
    """The same, slowly: every pair counted from the beginning for every merge."""
    rules = _Merging([], TOKENIZER, within)  # type: ignore[arg-type]
    rows = [[b"" if id == 256 else TOKENIZER.piece(id) for id in text] for text in texts]
    for _ in range(merges):
        counts = Counter(pair for row in rows for pair in pairwise(row) if all(pair) and rules._fits(pair))
        if not counts:
            break
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        for number, row in enumerate(rows):
            made, at = list[bytes](), 0
            while at < len(row):
                both = tuple(row[at : at + 2]) == best
                made.append(b"".join(best) if both else row[at])
                at += 1 + both
            rows[number] = made
    return rows


class Careless(_Merging):
    """Counts pairs that are gone."""

    def _forget(self, place: int) -> None:
        pass


@pytest.mark.parametrize("within", ["word", "sentence"])
def test_merges_are_those_of_counting_anew_and_the_text_stays(within: str) -> None:
    texts, draws = ids_of(TEXTS), np.random.default_rng(0)
    # Words of two letters run into each other, which is where neighbours change at once.
    texts += [[97 + int(letter) for letter in draws.integers(0, 2, 60)] for _ in range(3)]
    before = None
    for merges in (0, 1, 2, 5, 11, 30, 200):
        found = merged(texts, TOKENIZER, merges=merges, within=within)  # type: ignore[arg-type]
        # The first token of a text is special, and no bytes.
        rows = [[b"" if word == b"<s>" else word for word in words(text)] for text in found]
        assert rows == counted_anew(texts, merges, within)
        for text, ids in zip(found, texts, strict=True):
            assert list(text.tokens) == ids and text.spans[-1][1] == len(ids)
            assert [stop for _, stop in text.spans[:-1]] == [first for first, _ in text.spans[1:]]
        assert (before is None) == (found == merged(texts, TOKENIZER, merges=0, within=within))  # type: ignore[arg-type]
        before = found
    careless = Careless(texts, TOKENIZER, within)  # type: ignore[arg-type]
    for _ in range(30):
        careless.step()
    assert careless.texts() != merged(texts, TOKENIZER, merges=30, within=within)  # type: ignore[arg-type]
    half = merged(texts, TOKENIZER, shorter=0.3, within="sentence")
    rows_left = sum(len(text.spans) for text in half) / sum(map(len, texts))
    assert 0.6 < rows_left <= 0.7


def test_what_may_not_be_merged_stays_apart() -> None:
    (text,) = merged(ids_of(["the cat. The dog sat. A\ncat"]), TOKENIZER)
    assert words(text) == [b"<s>", b"the", b" cat", b".", b" The", b" dog", b" sat", b".", b" A", b"\n", b"cat"]
    (text,) = merged(ids_of(["the cat. The dog sat."]), TOKENIZER, within="sentence")
    assert words(text) == [b"<s>", b"the cat.", b" The dog sat."] and text.shorter == pytest.approx(1 - 3 / 22)
    # A character of several bytes is one word, its parts are not text.
    (text,) = merged([TOKENIZER.encode("汉", special=False)], TOKENIZER)
    assert words(text) == ["汉".encode()]
    for settings in ({"merges": -1}, {"shorter": 1.0}, {"within": "page"}):
        with pytest.raises(SettingsError, match="merges need"):
            merged([[1]], TOKENIZER, **settings)  # type: ignore[arg-type]


def test_without_merges_the_prompt_is_the_prompt_and_with_them_it_has_embeddings() -> None:
    (ids,) = ids_of(TEXTS[:1])
    (plain,), (few,) = merged([ids], TOKENIZER, merges=0), merged([ids], TOKENIZER, merges=6)
    assert dynamic(MODEL, plain) == (ids, None)
    tokens, embeddings = dynamic(MODEL, few)
    assert isinstance(embeddings, Embeddings) and len(tokens) == len(few.spans) < len(ids)
    at = [few.spans[place] for place in embeddings.places]
    for row, (first, stop) in zip(embeddings.rows, at, strict=True):
        own = MODEL.weights.embedding[torch.tensor(ids[first:stop])]
        assert torch.allclose(row, own.mean(dim=0)) and stop - first > 1
    assert torch.allclose(means(MODEL, [ids[:3], ids[:1]])[1], MODEL.weights.embedding[ids[0]])
    # The text after it is that of reading these rows by hand.
    rows = MODEL.embed_tokens(torch.tensor(tokens)).clone()
    rows[torch.from_numpy(embeddings.places)] = embeddings.rows
    first = MODEL.forward(Batch([Segment(np.arange(len(tokens)), states=rows)])).logits[-1]
    engine = Engine(MODEL)
    seq = engine.submit(Request(tokens, prompt_embeds=embeddings, max_new_tokens=8, drafter="token-recycling"))
    engine.run([seq])
    assert seq.generated[0] == int(first.argmax())
    alone = engine.submit(Request(tokens, prompt_embeds=embeddings, max_new_tokens=8))
    engine.run([alone])
    assert alone.generated == seq.generated
    check_identical(MODEL, [ids], drafter="prompt-lookup", max_new_tokens=6, tested="nothing")


@pytest.mark.integration
def test_a_network_begins_as_the_mean_and_learns_what_the_whole_prompt_says(tmp_path: Path) -> None:
    """On texts held out, the model goes on after merged tokens more nearly as after all of them."""
    (ids,) = ids_of(TEXTS[:1])
    (few,) = merged([ids], TOKENIZER, merges=6)
    plain = dynamic(MODEL, few)[1]
    nothing = dynamic(MODEL, few, MergeNet.initial(MODEL.config.hidden_size, 4))[1]
    assert plain is not None and nothing is not None and torch.equal(plain.rows, nothing.rows)

    target = tiny_loaded()
    words = ("the cat", "a hat", "other bats", "banana", "sat on", "mats")
    draws = np.random.default_rng(0)
    texts = [TOKENIZER.encode(" ".join(draws.choice(words, 12)), special=False)[:40] for _ in range(32)]
    recipe = MergeRecipe(steps=120, lr=1e-2, width=64, most=0.2)
    net = train_beside(Run(target, tmp_path / "net"), MergeTrainee(target, recipe), texts)
    # Of those held out, the ones that chose nothing.
    held = texts[7::8][1::2]
    trainee = MergeTrainee(target, recipe)
    mean, learned = trainee.apart(held), trainee.apart(held, net)
    assert learned < 0.9 * mean and net.facts["mean"] == pytest.approx(mean, abs=1e-3)
    # The same numbers for other tokens are worth nothing.
    shuffled = MergeNet({**net.tensors, "second": net.tensors["second"].flip(0)})
    assert trainee.apart(held, shuffled) > mean

    again = MergeNet.load(tmp_path / "net")
    assert trainee.apart(held, again) == learned
    with pytest.raises(SettingsError, match="another model"):
        dynamic(MODEL, few, again)
    with pytest.raises(SettingsError, match="another width"):
        dynamic(MODEL, few, MergeNet.initial(8, 4))
    Artifact("network of merged tokens", {"first": torch.zeros(2, 3)}).save(tmp_path / "net" / MergeNet.FILE)
    with pytest.raises(CorruptFile, match="holds no network"):
        MergeNet.load(tmp_path / "net")
    with pytest.raises(PromptError, match="too few or too short"):
        train_beside(Run(target, tmp_path / "none"), MergeTrainee(target, recipe), [[1, 2]])


def test_the_command_makes_the_network(tmp_path: Path) -> None:
    target, text, model = tiny_loaded(), tmp_path / "text.txt", str(tmp_path / "model")
    assert isinstance(target.model, Transformer)
    save(tmp_path / "model", *transformed(target.model, [NMSparsity(n=4)]), target)
    text.write_text("The tide comes in and goes out again. " * 40)
    some = ["--texts", "8", "--length", "24", "--steps", "2", "--out", str(tmp_path / "net")]
    code, output, errors = inside("train", "merges", str(text), "-m", model, *some)
    assert code == 0 and "MergeNet.load" in output, errors
    assert MergeNet.load(tmp_path / "net").facts["texts"] == 8
