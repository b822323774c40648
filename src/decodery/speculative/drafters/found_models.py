"""Draft models that fit a model without being named: in its folder, beside it, in the Hub's cache, shipped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import torch

from decodery.core.errors import DecoderyError
from decodery.core.machine import usable_memory
from decodery.models import footprint
from decodery.models.loaders import drafts
from decodery.models.loaders.description import Description
from decodery.models.loaders.load import described
from decodery.models.loaders.nearby import nearby, own_place
from decodery.models.loaders.origins import origin_of
from decodery.models.loaders.package_index import EMBEDDED, is_pulled
from decodery.models.loaders.source import content_key, weight_bytes
from decodery.models.protocol import LanguageModel, Reader

from ..heads.gguf_head import names_head
from .adviser_record import Record, record_of

_DEAREST = 1 / 3
"""The part of a pass that a token of a draft may take: at .42 even the best lengths bring nothing, see
docs/results/heads.md."""
_OF_MEMORY = 0.75
"""The part of this machine's memory that both models may take."""
_READ = 8
"""Models whose tokens are looked at, the nearest first: a tokenizer that was not read before takes seconds."""
_SIGNS = ("config.json", drafts.DESCRIPTION)
_known: WeakKeyDictionary[Reader, tuple[FoundModel, ...]] = WeakKeyDictionary()


@dataclass(frozen=True)
class FoundModel:
    """A smaller model of the same family and vocabulary.

    Attributes:
        name: What `decodery.load` knows it by.
        share: What a token of it takes, in units of a pass of the other model, by the bytes of both.
        identity: What its record is kept under: it changes with the files.
        refusal: Why it is not asked, "" where it may be.
    """

    name: str
    share: float
    identity: str
    refusal: str = ""

    @property
    def title(self) -> str:
        """What it is called in a sentence."""
        return f"the model {self.name}"


def chosen_model(model: Reader) -> tuple[FoundModel | None, list[str]]:
    """The draft model that pays most of those that fit a model, and a sentence about each of them.

    The cheapest one that was hardly tried on this machine comes first, so that all are tried in turn; None where none
    pays. None of them is loaded for that.
    """
    notes, fit = list[str](), list[tuple[FoundModel, Record]]()
    for each in found_models(model):
        record = record_of(model, each.identity)
        notes.append(each.refusal or record.explained(each.title))
        if record.pays and not each.refusal:
            fit.append((each, record))
    if not fit:
        return None, notes
    untried = [each for each, record in fit if not record.tried]
    best = untried[0] if untried else max(fit, key=lambda pair: pair[1].gain)[0]
    return best, notes


def found_models(model: Reader) -> tuple[FoundModel, ...]:
    """The smaller models of a model's family and vocabulary, the cheapest first, too dear ones as well.

    They are looked for once as long as the model lives.
    """
    if model not in _known:
        _known[model] = tuple(sorted(_fitting(model), key=lambda each: each.share))
    return _known[model]


def _fitting(model: Reader) -> Iterator[FoundModel]:
    config, read, size = model.config, 0, _bytes_of(model)
    if not config.vocabulary or not size:
        return
    for name in _candidates(model):
        try:
            own = weight_bytes(name)
            if not 0 < own < size:
                continue
            read += 1
            if read > _READ:
                return
            about = described(name)
        except (DecoderyError, OSError):
            # It is no model that runs natively, or a damaged one.
            continue
        if about.config.vocabulary == config.vocabulary and about.config.family == config.family:
            yield FoundModel(name, own / size, content_key(name), _refusal(model, name, about, own, size))


def _refusal(model: Reader, name: str, about: Description, own: int, size: int) -> str:
    begin = f"drafting with n-grams: the model {name}"
    if not about.config.causal:
        return f"{begin} does not write from left to right: not asked"
    if own / size > _DEAREST:
        return f"{begin} would take {own / size:.0%} of a pass a token: not asked"
    on_card = model.device.type == "cuda"
    usable = torch.cuda.get_device_properties(model.device).total_memory if on_card else usable_memory()
    if usable is not None and own + size > _OF_MEMORY * usable:
        return f"{begin} has no room in memory beside this one, with {own / 2**30:.1f} GiB: not asked"
    return ""


def _bytes_of(model: Reader) -> int:
    """Bytes of a model's files, or of what it holds where they are unknown."""
    own = own_place(origin_of(model))
    try:
        if own is not None and own.exists() and (found := weight_bytes(str(own))):
            return found
    except (DecoderyError, OSError):
        pass
    return footprint.weight_bytes(model) if isinstance(model, LanguageModel) else 0


def _candidates(model: Reader) -> Iterator[str]:
    """The names of models near a model, those that come along first."""
    yield from (name for name in EMBEDDED if is_pulled(name) and name != origin_of(model))
    if (shipped := drafts.shipped_for(model.config.vocabulary)) is not None:
        yield shipped
    for each in nearby(own_place(origin_of(model)), _SIGNS):
        if not _is_head(each.path):
            yield str(each.path)


def _is_head(path: Path) -> bool:
    try:
        return path.suffix == ".gguf" and names_head(path)
    except OSError:
        return True
