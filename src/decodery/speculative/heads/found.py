"""Draft heads that fit a model without being named: in its own folder, beside it, in the Hub's cache, shipped."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

from decodery.core.errors import DecoderyError
from decodery.models.loaders import drafts
from decodery.models.loaders.fields import read_json
from decodery.models.loaders.nearby import Nearby, nearby, own_place
from decodery.models.loaders.origins import origin_of, same_model
from decodery.models.loaders.package_index import EMBEDDED
from decodery.models.protocol import Reader

from ..drafters.adviser_record import record_of
from .checkpoint import CONFIG, weights_of
from .gguf_head import gguf_targets, names_head
from .grown import DraftHead
from .head import HEAD, TrainedHead
from .own_mtp import gguf_mtp, own_layout, own_mtp

_OF_HEADS = ("dflash_config", "eagle_config", "draft_vocab_size")
"""What configurations of heads say and those of models do not."""
_known: WeakKeyDictionary[Reader, tuple[FoundHead, ...]] = WeakKeyDictionary()
_identities: WeakKeyDictionary[TrainedHead, str] = WeakKeyDictionary()


@dataclass(frozen=True)
class FoundHead:
    """A head that fits a model.

    Attributes:
        place: Where it was found, for people.
        trained: The head.
    """

    place: str
    trained: TrainedHead

    @property
    def name(self) -> str:
        """What it is called in a sentence."""
        return f"the head for {self.trained.kind} {self.place}"


def chosen_head(model: Reader) -> tuple[TrainedHead | None, list[str]]:
    """The head that pays most of those that fit a model, and a sentence about each of them.

    One that was hardly tried on this machine comes first, so that all are tried in turn; None where none pays.
    """
    known = [(each, record_of(model, identity(each.trained))) for each in found_heads(model)]
    notes = [record.explained(each.name) for each, record in known]
    fit = [(each, record) for each, record in known if record.pays]
    if not fit:
        return None, notes
    untried = [each for each, record in fit if not record.tried]
    best = untried[0] if untried else max(fit, key=lambda pair: pair[1].gain)[0]
    return best.trained, notes


def found_heads(model: Reader) -> tuple[FoundHead, ...]:
    """The heads that fit a model, those most likely made for it first.

    They are looked for once as long as the model lives. A folder holds a head for this model where its file names
    the model's fingerprint, or where its configuration names the model as its verifier; a GGUF file of a head, where
    it names the model as its base. In the model's own folder a head that names no model is one for this model where
    its shape fits, and `FoundHead.place` says so.
    """
    if model not in _known:
        _known[model] = tuple(_fitting(model))
    return _known[model]


def identity(trained: TrainedHead) -> str:
    """A text that two heads share only where their kind, names, shapes and some values are the same."""
    if trained not in _identities:
        _identities[trained] = _identity(trained)
    return _identities[trained]


def _identity(trained: TrainedHead) -> str:
    made = hashlib.sha256(trained.kind.encode())
    for name, each in sorted(trained.tensors.items()):
        values = each.flatten()
        some = values[:: max(1, len(values) // 64)].double().tolist()
        made.update(f"{name} {tuple(each.shape)} {some}".encode())
    return made.hexdigest()


def _fitting(model: Reader) -> Iterator[FoundHead]:
    from .drafter import bound, head_kind

    seen = set[int]()
    for place, trained in _candidates(model):
        if id(trained) in seen:
            continue
        seen.add(id(trained))
        try:
            kind = head_kind(trained.kind)
            if issubclass(kind, DraftHead):
                bound(kind, trained, model)
                yield FoundHead(place, trained)
        except DecoderyError:
            # It is for a model of another shape.
            continue


def _candidates(model: Reader) -> Iterator[tuple[str, TrainedHead]]:
    own = own_place(origin_of(model))
    # The embedded model has none, and its file takes long to read.
    known = origin_of(model) in EMBEDDED
    if own is not None and not known and own.exists() and (found := _own(own)) is not None:
        yield f"in the model's own {'folder' if own.is_dir() else 'file'}", found
    for each in nearby(own, (HEAD, CONFIG)):
        if (head := _read(each, model)) is not None:
            trained, named = head
            yield f"in {each.path}" if named else f"in {each.path}, by its shape alone, as it names no model", trained
    path = drafts.shipped_head(drafts.HEAD, model.config.vocabulary)
    if path is not None:
        yield "shipped", TrainedHead.load(path)


def _own(place: Path) -> TrainedHead | None:
    """The next-token layers in a model's own folder or file, None where it has none."""
    try:
        if place.is_file():
            return gguf_mtp(place) if place.suffix == ".gguf" else None
        return own_mtp(place) if own_layout(place) is not None else None
    except (DecoderyError, OSError):
        return None


def _read(near: Nearby, model: Reader) -> tuple[TrainedHead, bool] | None:
    """The head of a folder or file, and whether it names the model; None where there is none for this model.

    A head that names no model at all is one for the model in whose folder it stands.
    """
    place = near.path
    try:
        if (place / HEAD).is_file():
            trained = TrainedHead.load(place)
            return (trained, True) if trained.model == model.fingerprint else None
        named = _named_in_file(place) if place.suffix == ".gguf" else _named_in_folder(place)
        if named is None or not (named or near.inside):
            return None
        if named and not any(same_model(name, origin_of(model)) for name in named):
            return None
        return TrainedHead.load(place), bool(named)
    except (DecoderyError, OSError):
        return None


def _named_in_file(path: Path) -> list[str] | None:
    """The models that the head of a GGUF file names, None where the file holds no head."""
    return gguf_targets(path) if names_head(path) else None


def _named_in_folder(folder: Path) -> list[str] | None:
    """The model that the configuration of a published head names as its verifier, None where there is no head."""
    found = read_json(folder / CONFIG)
    if not isinstance(found, dict) or weights_of(folder) is None:
        return None
    speculators = found.get("speculators_config")
    verifier = speculators.get("verifier") if isinstance(speculators, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else found.get("target_model_name_or_path")
    if name:
        return [name] if isinstance(name, str) else None
    return [] if any(each in found for each in _OF_HEADS) else None
