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
from decodery.models.loaders.origins import origin_of, same_model
from decodery.models.protocol import Reader

from ..drafters.adviser_record import record_of
from .checkpoint import CONFIG, weights_of
from .gguf_head import names_head
from .grown import DraftHead
from .head import HEAD, TrainedHead
from .own_mtp import gguf_mtp, own_layout, own_mtp

_MOST = 64
"""Folders that are looked at beside a model, and in the Hub's cache."""
_HUB_FOLDERS = "models--*/snapshots/*"
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
    the model's fingerprint, or where its configuration names the model as its verifier. In the model's own folder a
    head that names no model, as GGUF files of heads do, is one for this model where its shape fits.
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
    origin = origin_of(model)
    folder = Path(origin).expanduser() if origin else None
    if folder is not None and folder.exists():
        if (own := _read(folder, model, own=True)) is not None:
            yield f"in the model's own {'folder' if folder.is_dir() else 'file'}", own
        folder = folder if folder.is_dir() else folder.parent
        for each in (*_folders(folder, "*"), *_files(folder)):
            if (found := _read(each, model, inside=True)) is not None:
                yield f"in {each}", found
        for each in _folders(folder.parent, "*"):
            if (found := _read(each, model)) is not None:
                yield f"in {each}", found
    for each in _folders(_hub_cache(), _HUB_FOLDERS):
        if (found := _read(each, model)) is not None:
            yield f"in {each}", found
    path = drafts.shipped_head(drafts.HEAD, model.config.vocabulary)
    if path is not None:
        yield "shipped", TrainedHead.load(path)


def _folders(parent: Path, pattern: str) -> list[Path]:
    found: list[Path] = []
    try:
        for each in parent.glob(pattern):
            if len(found) == _MOST:
                break
            if (each / HEAD).is_file() or (each / CONFIG).is_file():
                found.append(each)
    except OSError:
        return []
    return sorted(found)


def _files(folder: Path) -> list[Path]:
    """The GGUF files of heads in a folder."""
    try:
        found = sorted(folder.glob("*.gguf"))[:_MOST]
        return [each for each in found if names_head(each)]
    except OSError:
        return []


def _read(folder: Path, model: Reader, *, own: bool = False, inside: bool = False) -> TrainedHead | None:
    """The head of a folder or file, None where it holds none for this model.

    Args:
        own: Whether the folder or file is the model's.
        inside: Whether it stands in the model's folder.
    """
    try:
        if own and folder.is_file():
            return gguf_mtp(folder) if folder.suffix == ".gguf" else None
        if own:
            return own_mtp(folder) if own_layout(folder) is not None else None
        if (folder / HEAD).is_file():
            trained = TrainedHead.load(folder)
            return trained if trained.model == model.fingerprint else None
        if folder.is_dir() and (weights_of(folder) is None or not _names(folder, origin_of(model), inside=inside)):
            return None
        return TrainedHead.load(folder)
    except (DecoderyError, OSError):
        return None


def _names(folder: Path, origin: str, *, inside: bool) -> bool:
    """Whether the configuration of a published head names a model as its verifier, or none inside its folder."""
    found = read_json(folder / CONFIG)
    if not isinstance(found, dict):
        return False
    speculators = found.get("speculators_config")
    verifier = speculators.get("verifier") if isinstance(speculators, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else found.get("target_model_name_or_path")
    if not name:
        return inside and any(each in found for each in _OF_HEADS)
    return isinstance(name, str) and same_model(name, origin)


def _hub_cache() -> Path:
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return Path()
    return Path(HF_HUB_CACHE)
