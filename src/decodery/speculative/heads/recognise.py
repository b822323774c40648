"""Which drafter runs a trained or published head."""

from __future__ import annotations

from pathlib import Path

from decodery.core.errors import NotTrusted, SettingsError
from decodery.core.method_spec import is_untrusted
from decodery.core.registry import methods

from .drafter import TrainedDrafter
from .head import TrainedHead

PUBLISHED = "published"


def head_place(spec: str) -> str | None:
    """The folder, file or Hub id of a head that a text names, None where it names a method.

    Args:
        spec: "published:PLACE", or the path of a folder.
    """
    name, _, place = spec.partition(":")
    if name == PUBLISHED:
        if not place:
            raise SettingsError("published needs the folder or Hub id of a head, as in published:FOLDER")
        return place
    return spec if "/" in spec and Path(spec).expanduser().is_dir() else None


def published_drafter(place: str) -> TrainedDrafter:
    """The drafter of a head, with the settings that its method has by default.

    Args:
        place: The head's folder, file or Hub id.

    Raises:
        NotTrusted: For a request from a network.
        ModelNotFound, CorruptFile, UnsupportedModel: For what holds no head that can be run.
    """
    if is_untrusted():
        raise NotTrusted("a drafter named by its folder reads files, which is not for requests from a network")
    trained = TrainedHead.load(place)
    for method in methods("drafter"):
        if issubclass(method.cls, TrainedDrafter) and method.cls.kind.kind == trained.kind:
            found: TrainedDrafter = method.cls(head=trained)
            return found
    raise SettingsError(f"{place} holds a head for {trained.kind}, which is no drafter here")
