"""Find beforehand which sublayers `swift` should skip, on texts that the model has written.

The search is the one of SWIFT: On-the-Fly Self-Speculative Decoding for LLM Inference Acceleration (2024), over several
texts at a time, and measured by what the model itself found most likely, whatever token was drawn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.models.batch import Batch, Segment
from decodery.models.cache.cache import KVCache
from decodery.models.layer_plan import LayerPlan, sublayers
from decodery.models.loaders.store import write_text
from decodery.models.protocol import LanguageModel
from decodery.models.trained.skips import SkipSet
from decodery.models.trained.skips import sublayers as named
from decodery.speculative.stores.skip_search import SkipSearch

from .corpus import Corpus, TrainingText
from .kind import COUNT, SHARE, Bounded, Run, bounded, kind, option
from .kind_data import OwnTexts, own_texts
from .loop import known_figures

TRIED = "tried.json"
_EVERY = 10
"""Sets between two writings of what was tried."""


@dataclass(frozen=True)
class SkipRecipe(Bounded):
    """How a set is looked for."""

    ratio: float = bounded(0.45, SHARE, "Share of sublayers to skip, of all but those of the first and the last layer.")
    proposals: int = bounded(200, COUNT, "Number of sets to try.")
    bayes: int = bounded(25, COUNT, "Every so many sets a promising one is tried, by a model of what was tried.")
    read: int = bounded(16, COUNT, "Texts that rate a set.")
    window: int = bounded(32, COUNT, "Tokens of a text that are read.")
    seed: int = option(0, "Random seed of texts and sets.")


class TextWindow:
    """The first tokens of texts after prompts, and the whole model's most likely tokens there."""

    def __init__(self, model: LanguageModel, texts: Sequence[TrainingText], window: int) -> None:
        self.model, self.cases = model, list[tuple[KVCache, np.ndarray, np.ndarray]]()
        for text in texts:
            if text.likely is None:
                raise SettingsError("the texts have no predictions of the model: write them again, with top=20")
            # After its last token nothing was asked.
            rows = slice(text.written, min(text.written + window, len(text.tokens) - 1))
            cache = model.new_cache()
            model.forward(Batch([Segment.chunk(text.tokens[: text.written], cache, logit_rows=[])]))
            cache.keep(range(text.written))
            self.cases.append((cache, text.tokens[rows].astype(np.int64), text.likely[rows, 0]))

    @torch.no_grad()
    def matchness(self, skip: frozenset[str]) -> float:
        """The share of all places at which the model without these sublayers finds the same token most likely."""
        segments = [Segment.chunk(tokens, cache.fork()) for cache, tokens, _ in self.cases]
        said = self.model.forward(Batch(segments), layer_plan=LayerPlan(skip=skip)).logits.argmax(dim=-1).cpu().numpy()
        return float((said == np.concatenate([right for _, _, right in self.cases])).mean())


@torch.no_grad()
def find_skips(run: Run, corpus: Corpus) -> SkipSet:
    """Search the sublayers that the model can skip best, for `swift`.

    Interrupted, it goes on from the sets tried so far: which set is tried next follows from these alone.
    """
    target, out, recipe = run.loaded, run.out, run.of(SkipRecipe)
    model, layers = target.model, target.model.config.num_layers
    if not model.capabilities.layer_plans:
        raise SettingsError(f"{target.name} cannot skip sublayers: use a model that this package runs itself")
    corpus.of_vocabulary(model.vocab_size, target.name)
    search = SkipSearch(layers, recipe.ratio, bayes=recipe.bayes, seed=recipe.seed)
    if not 0 < search.count < search.size:
        raise SettingsError(f"a ratio of {recipe.ratio:g} leaves nothing to choose among {search.size} sublayers")
    learned, others = corpus.split()
    seen, held = (
        TextWindow(model, [corpus[number] for number in numbers[: recipe.read]], recipe.window)
        for numbers in (learned, others)
    )
    first, settings = search.skip, {"recipe": asdict(recipe), "corpus": corpus.facts, "model": model.fingerprint}
    before = seen.matchness(first), held.matchness(first)
    known = known_figures(out / TRIED, settings).get("matchness", [])
    for number in range(recipe.proposals):
        chosen = search.propose()
        found = known[number] if number < len(known) else seen.matchness(named(chosen, layers))
        search.register(chosen, found)
        done = number + 1
        if done > len(known) and (done % _EVERY == 0 or done == recipe.proposals):
            write_text(out / TRIED, json.dumps({**settings, "matchness": search.history}) + "\n")
        run.progress("trying sets", done, recipe.proposals)
    after = search.matchness, held.matchness(search.skip)
    facts: dict[str, Any] = {
        **run.facts,
        "recipe": asdict(recipe),
        "skipped": sorted(search.skip),
        "kept": sublayers(LayerPlan(skip=search.skip), layers) / (2 * layers),
        "first": dict(zip(("matchness", "held_out"), before, strict=True)),
        "best": dict(zip(("matchness", "held_out"), after, strict=True)),
        "best_after": {str(n): max(search.history[:n]) for n in (50, 100, 200, 400, 800) if n <= recipe.proposals},
    }
    result = SkipSet(search.skip, layers, facts, model.fingerprint)
    result.save(out / SkipSet.FILE)
    return result


@kind(
    "The sublayers are ready: --drafter swift:skip={out}",
    (OwnTexts(400, max_new_tokens=64), SkipRecipe()),
    "--ratio 0.45 --out skip",
    model="that drafts for itself",
    file=SkipSet.FILE,
)
def _swift(run: Run) -> dict[str, Any]:
    """Find the sublayers that MODEL can skip when it drafts for itself: --drafter swift:skip=DIR.

    Nothing is trained. The set of sublayers that changes the most likely token least often is kept.
    """
    found = find_skips(run, own_texts(run))
    return {name: found.facts[name] for name in ("first", "best")}
