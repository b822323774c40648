"""What was trained for a model, kept in a file: tensors, facts about them, and which model they belong to."""

from __future__ import annotations

import functools
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, ParamSpec, Self, TypeVar, cast

import torch

from decodery.core.errors import CorruptFile, ModelNotFound, SettingMissing, SettingsError

from ..loaders.drafts import given_or_shipped
from ..loaders.fields import Fields, Kind, Record, Text, parse_json
from ..loaders.store import contents, replacing

if TYPE_CHECKING:
    from ..protocol import Reader

FORMAT = "decodery artifact 1"
_MOST_BYTES, _MOST_TENSORS = 1 << 30, 1 << 16
_ABOUT = "artifact"
_KINDS: dict[str, Kind] = {"format": Text(64), "kind": Text(64), "model": Text(128), "facts": Record({})}
_READ = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_SAMPLED = 256

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Artifact:
    """A trained thing as a safetensors file holds it.

    Attributes:
        kind: What it is, such as "judge".
        tensors: By name.
        facts: What else it needs, and how it was made, as plain JSON.
        model: `fingerprint` of the model it was trained for, "" where it goes with every model that it fits.
    """

    kind: str
    tensors: Mapping[str, torch.Tensor]
    facts: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        from safetensors.torch import save_file

        tensors = {name: tensor.detach().contiguous() for name, tensor in self.tensors.items()}
        # One entry: several are written in any order, and the same content should make the same file.
        about = {"format": FORMAT, "kind": self.kind, "model": self.model, "facts": dict(self.facts)}
        with replacing(path) as temporary:
            save_file(tensors, temporary, metadata={_ABOUT: json.dumps(about)})

    @classmethod
    def read(cls, path: Path, kind: str, made: str, facts: Mapping[str, Kind] | None = None) -> Artifact:
        """Read what `save` wrote; numbers are finite, and `facts` of the kinds named are there.

        Args:
            made: How to make one, for errors.

        Raises:
            ModelNotFound: If there is no such file.
            CorruptFile: If it is something else or damaged.
        """
        if not path.is_file():
            raise ModelNotFound(f"there is no {kind} at {path}: {made}, or correct the path")
        wrong = f"{path} holds no {kind}, or is damaged: {made}"
        try:
            tensors, metadata = read_tensors(path, most=_MOST_BYTES)
            about = Fields(parse_json(metadata.get(_ABOUT, ""), str(path)), str(path), _KINDS)
            known = Fields(about.need("facts"), str(path), facts or {})
            for name in known.kinds:
                known.need(name)
        except CorruptFile as error:
            raise CorruptFile(wrong) from error
        if about.get("format") != FORMAT or about.get("kind") != kind:
            raise CorruptFile(wrong)
        if not all(bool(each.isfinite().all()) for each in tensors.values() if each.is_floating_point()):
            raise CorruptFile(f"{path} holds numbers that are not finite: {made}")
        return cls(kind, tensors, known.raw, about.get("model", ""))


class TrainedPart(ABC):
    """A part that was trained for a model and is kept in one file.

    The base of dataclasses with `facts` and `model`.

    Attributes:
        KIND: What it is, such as "judge", as its file and errors say.
        FILE: How its file is called in the folder it was trained in.
        MADE: How one is made, for errors.
        FACTS: The facts that its file needs to have.
    """

    KIND: ClassVar[str]
    FILE: ClassVar[str] = ""
    MADE: ClassVar[str]
    FACTS: ClassVar[Mapping[str, Kind]] = {}
    _kept: ClassVar[Callable[[str | Path], TrainedPart]]
    model: str

    def __init_subclass__(cls) -> None:
        cls._kept = staticmethod(remembered(cls.read))

    @abstractmethod
    def artifact(self) -> Artifact:
        """What a file keeps of it."""

    @classmethod
    @abstractmethod
    def from_artifact(cls, found: Artifact) -> Self:
        """What `artifact` gave.

        Raises:
            ValueError, TypeError, KeyError, IndexError, RuntimeError: The tensors are others, or do not fit each other.
        """

    def save(self, path: Path) -> None:
        """Write a safetensors file, whole or not at all."""
        self.artifact().save(path)

    @classmethod
    def load(cls, given: Self | str | Path | None, setting: str = "") -> Self:
        """The part that a setting names.

        Args:
            given: The part itself, the file that `save` wrote, or the folder it is in.
            setting: The setting, such as "lserve:gates", for the error where it names none.

        Raises:
            SettingsError: `given` is None.
            ModelNotFound: There is no such file.
            CorruptFile: The file holds something else, or is damaged.
        """
        if isinstance(given, cls):
            return given
        if given is None:
            method = setting.partition(":")[0]
            raise SettingMissing(f"{method} needs its {cls.KIND}: {cls.MADE}, and name it as in {setting}=DIR")
        path = Path(str(given)).expanduser()
        return cast(Self, cls._kept(path / cls.FILE if cls.FILE and path.is_dir() else path))

    @classmethod
    def load_or_shipped(cls, given: Self | str | None, model: Reader, *, file: str, setting: str, command: str) -> Self:
        """The part that a setting names, or the shipped one for models of this vocabulary.

        Args:
            given: The part itself, its file or its folder; None for the one that comes along.
            model: The model that it is for.
            file: How its file is called in a folder.
            setting: The setting, such as "ppd:ppd", for errors.
            command: The command of `decodery train` that makes one, for errors.

        Raises:
            SettingsError: None comes along for this model.
        """
        if isinstance(given, cls):
            return given
        path = given_or_shipped(cast("str | None", given), file, model.config.vocabulary)
        if path is None:
            raise SettingsError(
                f"no {cls.KIND} comes along for this model: make one with `decodery train {command} -m MODEL --out DIR`"
                f", and name it as in {setting}=DIR"
            )
        return cls.load(path)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file anew. Raises what `load` raises."""
        found = Artifact.read(path, cls.KIND, cls.MADE, cls.FACTS)
        try:
            return cls.from_artifact(found)
        except (ValueError, TypeError, KeyError, IndexError, RuntimeError) as error:
            raise CorruptFile(f"{path} holds no {cls.KIND}, or is damaged: {cls.MADE}") from error

    def refuse_other(self, model: Reader, advice: str = "") -> None:
        """Raise SettingsError where it was trained for another model.

        Args:
            advice: What to do, `MADE` by default.
        """
        refuse_other(f"this {self.KIND}", self.model, model, advice or self.MADE)


def expect(sound: bool) -> None:
    """Raise ValueError where what a file holds is not sound, see `TrainedPart.from_artifact`."""
    if not sound:
        raise ValueError


def read_tensors(
    path: Path, *, most: int = 1 << 42, device: str = "cpu"
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors of a safetensors file of at most `most` bytes, mapped if possible, and its metadata.

    Raises CorruptFile, which says what is wrong with the file and not what to do.
    """
    from safetensors import SafetensorError, safe_open

    try:
        if path.stat().st_size > most:
            raise CorruptFile(f"{path} is larger than what it should hold")
        with safe_open(path, framework="pt", device=device) as file:
            names = list(file.keys())
            if len(names) > _MOST_TENSORS:
                raise CorruptFile(f"{path} holds {len(names)} tensors, more than it should")
            for name in names:
                if (kind := file.get_slice(name).get_dtype()) not in _READ:
                    raise CorruptFile(f"{path}: tensor {name} is of type {kind}, which is not read here")
            return {name: file.get_tensor(name) for name in names}, dict(file.metadata() or {})
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise CorruptFile(f"{path} is truncated or no safetensors file: {error!s:.200}") from error


def sampled(device: torch.device, vocab: int) -> torch.Tensor:
    """Which rows of an embedding `digest` reads."""
    return torch.arange(0, vocab, max(1, vocab // _SAMPLED), device=device)


def digest(embedding: torch.Tensor, *norms: torch.Tensor) -> str:
    """SHA-256 of some rows of an embedding [vocab, hidden] and of norms [hidden].

    They are compared in bfloat16, the coarsest precision that is kept.
    """
    made = hashlib.sha256()
    for part in (embedding[:: max(1, len(embedding) // _SAMPLED)], *norms):
        made.update(part.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def refuse_other(what: str, made_for: str, model: Reader, advice: str) -> None:
    """Raise SettingsError where something trained for the model of one fingerprint meets another model."""
    found = model.fingerprint
    if made_for and found and made_for != found:
        raise SettingsError(f"{what} was trained for another model, or for another file of this one: {advice}")


def remembered(read: Callable[Concatenate[Path, P], T]) -> Callable[Concatenate[str | Path, P], T]:
    """`read` of a file or folder, done again only when its `contents` are others."""

    @functools.lru_cache(maxsize=8)
    def kept(path: Path, known: object, *args: P.args, **kwargs: P.kwargs) -> T:
        return read(path, *args, **kwargs)

    @functools.wraps(read)
    def current(path: str | Path, *args: P.args, **kwargs: P.kwargs) -> T:
        path = Path(path).expanduser()
        try:
            known = contents(path)
        except OSError:
            return read(path, *args, **kwargs)
        return kept(path, known, *args, **kwargs)  # type: ignore[arg-type]

    return current
