"""What `auto` begins with: the tokens a model expects after the contexts that it meets most often."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from decodery.core.errors import SettingsError
from decodery.extras.superposed.ngrams import save_ngrams
from decodery.models.loaders.drafts import CONTEXTS as FILE
from decodery.models.loaders.drafts import NGRAMS
from decodery.models.loaders.store import Progress, silent
from decodery.speculative.stores.contexts import Contexts
from decodery.speculative.stores.expectations import CONTEXTS, Expectations, SuccessorRates
from decodery.speculative.stores.ngrams import Occurrences
from decodery.speculative.stores.warm import WarmContexts

from .corpus import Corpus, TrainingText
from .held_out import HeldOut, Measured
from .kind import Run, kind
from .kind_data import OwnTexts, Seed, own_texts

_COUNTED = 8
"""Of the most likely tokens after each place this many are counted."""
_MOST = 1 << 16
"""Contexts kept per length."""
_BITS = 20
"""Enough for a token of any vocabulary; three of them share an integer."""


def learn_contexts(
    corpus: Corpus, *, width: int = 6, vocabulary: str = "", progress: Progress = silent
) -> WarmContexts:
    """The contexts the target of `corpus` met most often, and what it expected after them.

    Expected is what it gave most probability over all places where the context stood; contexts of more than one token
    count only where they stood twice.

    Args:
        width: Tokens kept per context. Every twentieth text is held out: the rates are counted on one half of these,
            and the report in the facts is of the other.
    """
    vocab_size = int(corpus.facts["vocab_size"])
    learned, held = corpus.split_for(vocab_size, "its target")
    if vocab_size > 1 << _BITS:
        raise SettingsError(f"contexts are learned for vocabularies of up to {1 << _BITS} tokens, not {vocab_size}")
    texts, likely, chances = _places(corpus, learned, progress)
    contexts, rows = {}, {}
    for order in CONTEXTS:
        contexts[order], rows[order] = _ranked(texts, likely, chances, order, width)
        progress("ranking", len(contexts), len(CONTEXTS))
    # A text that ended at once has no share of its own.
    held = [number for number in held if _written(corpus[number])] or held
    known, store = HeldOut.of(held, corpus.prompts(held)), _filled(contexts, rows, width)
    rates = SuccessorRates(len(CONTEXTS), width)
    for number in known.choosing:
        _hits(corpus[number], store, rates)
    random = np.random.default_rng(0)
    mixed = _filled(contexts, {order: random.permutation(each) for order, each in rows.items()}, width)
    often = np.argsort(-np.bincount(texts[:, -1]), kind="stable")[:width].tolist()

    def tested(hits: Callable[[TrainingText], np.ndarray]) -> Measured:
        by_text = {number: hits(corpus[number]) for number in known.tested}

        def shares(numbers: Sequence[int]) -> dict[str, float]:
            first, among = np.concatenate([by_text[number] for number in numbers]).mean(axis=0).tolist()
            return {"first": first, "among": among}

        return known.measured(shares, "first", lambda number: float(len(by_text[number])))

    def ranked(of: Contexts) -> Measured:
        return tested(lambda text: _hits(text, of, SuccessorRates(len(CONTEXTS), width, rates.of)))

    usual = tested(lambda text: np.array([_hit(often, each) for each in _written(text)], dtype=bool).reshape(-1, 2))
    report = known.report(ranked(store), {"the most frequent tokens": usual}, control=ranked(mixed))
    facts = {"corpus": corpus.facts, "tokens": len(texts), "report": report}
    return WarmContexts(contexts, rows, np.array(rates.of), vocab_size, vocabulary, facts)


def _places(corpus: Corpus, numbers: list[int], progress: Progress) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every place the target scored: its last tokens [n, longest], -1 before the text's begin, and what was likely.

    Likely: ids and chances, both [n, `_COUNTED`].
    """
    longest = CONTEXTS[0]
    parts = []
    for done, number in enumerate(numbers, start=1):
        text = corpus[number]
        if text.likely is None or text.logprobs is None:
            raise SettingsError(f"{corpus.folder} has no predictions of the target: write its texts again")
        tokens = np.concatenate((np.full(longest - 1, -1), text.tokens))
        asked = np.isfinite(text.logprobs[:, 0])
        before = np.lib.stride_tricks.sliding_window_view(tokens, longest)[asked]
        chances = np.exp(text.logprobs[asked, :_COUNTED].astype(np.float32))
        parts.append((before, text.likely[asked, :_COUNTED], chances))
        progress("reading texts", done, len(numbers))
    texts, likely, chances = (np.concatenate(part) for part in zip(*parts, strict=True))
    return texts, likely, chances


def _ranked(
    texts: np.ndarray, likely: np.ndarray, chances: np.ndarray, order: int, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """The contexts of `order` tokens [m, order], most frequent first, and the tokens expected after them [m, width]."""
    whole = texts[:, -order] >= 0
    keys = np.zeros(int(whole.sum()), dtype=np.int64)
    for column in texts[whole, -order:].T:
        keys = keys << _BITS | column
    known, which, counts = np.unique(keys, return_inverse=True, return_counts=True)
    often = np.flatnonzero(counts >= (1 if order == 1 else 2))
    kept = often[np.argsort(-counts[often], kind="stable")[:_MOST]]
    place = np.full(len(known), -1)
    place[kept] = np.arange(len(kept))
    used = place[which] >= 0
    pairs = place[which][used][:, None] << _BITS | likely[whole][used]
    pairs, which = np.unique(pairs, return_inverse=True)
    weights = np.bincount(which.reshape(-1), weights=chances[whole][used].reshape(-1))
    owners, tokens = pairs >> _BITS, pairs & ((1 << _BITS) - 1)
    best = np.lexsort((tokens, -weights, owners))
    rank = np.arange(len(best)) - np.searchsorted(owners[best], owners[best])
    rows = np.full((len(kept), width), -1, dtype=np.int32)
    rows[owners[best][rank < width], rank[rank < width]] = tokens[best][rank < width]
    shifts = _BITS * np.arange(order - 1, -1, -1)
    return known[kept][:, None] >> shifts & ((1 << _BITS) - 1), rows


def _filled(contexts: dict[int, np.ndarray], rows: dict[int, np.ndarray], width: int) -> Contexts:
    store = Contexts(CONTEXTS, width)
    for order in CONTEXTS:
        store.fill(order, contexts[order], rows[order])
    return store


def _written(text: TrainingText) -> list[int]:
    """The tokens that are guessed: those after the first that was written."""
    return text.tokens[text.written + 1 :].tolist()


def _hit(guesses: list[int], token: int) -> tuple[bool, bool]:
    return guesses[:1] == [token], token in guesses


def _hits(text: TrainingText, store: Contexts, rates: SuccessorRates) -> np.ndarray:
    """[n, 2] whether the first and whether any of a ranking was each token; the rates learn from it."""
    expected, found = Expectations(Occurrences(()), store, rates), []
    tokens, wanted = text.tokens.tolist(), _written(text)
    for at, token in enumerate(wanted, start=text.written + 1):
        context = tokens[max(0, at - CONTEXTS[0]) : at]
        found.append(_hit([guess for _, guess, _ in expected.candidates(context, -1)], token))
        expected.learn(context, -1, token)
    return np.array(found, dtype=bool).reshape(-1, 2)


@kind(
    "The contexts are ready: --drafter auto:warm={out}/contexts.safetensors",
    (OwnTexts(), Seed()),
    "-m smollm2 --out cache",
    model="whose texts are learned",
)
def _ngram_cache(run: Run) -> dict[str, Any]:
    """Build the n-gram cache that the drafter auto starts with: --drafter auto:warm=DIR/contexts.safetensors.

    It holds what MODEL expects after its most frequent contexts.
    """
    vocabulary = run.loaded.model.config.vocabulary
    found = learn_contexts(own_texts(run), vocabulary=vocabulary, progress=run.progress)
    found.save(run.out / FILE)
    known = sum(map(len, found.contexts.values()))
    return {"contexts": known, "tokens": found.facts["tokens"], **found.facts["report"]}


@kind(
    "The n-grams are ready: {out}/ngrams.safetensors",
    (OwnTexts(), Seed()),
    "--out ngrams",
    model="whose texts are counted",
)
def _ngrams(run: Run) -> dict[str, Any]:
    """Count the n-grams of MODEL's own texts, for lm.suggestions(ngrams=load_ngrams(DIR/ngrams.safetensors)).

    lm.ngrams(texts) counts your own texts.
    """
    corpus, model = own_texts(run), run.loaded.model
    written = [text.tokens[text.written :] for text in corpus]
    facts = {"vocabulary": model.config.vocabulary, "corpus": corpus.facts}
    save_ngrams(run.out / NGRAMS, written, model.vocab_size, facts)
    return {"tokens": sum(map(len, written))}
