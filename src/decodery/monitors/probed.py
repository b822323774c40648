"""What monitors have in common whose score a trained probe reads off hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from decodery.core.errors import SettingMissing
from decodery.core.registry import method_of
from decodery.models.protocol import Reader
from decodery.step.monitor import Monitor
from decodery.step.sequence import Sequence

from .probe import Probe


@dataclass(frozen=True)
class Probed(Monitor):
    """A monitor with a probe, or the file or folder of one.

    Attributes:
        pool: Which rows of a text its probes read.
        made: The sentence that says how one is made.
    """

    pool: ClassVar[str]
    made: ClassVar[str]
    probe: Probe | str | None = None

    def __post_init__(self) -> None:
        if self.probe is None:
            method = method_of(self)
            name = type(self).__name__ if method is None else method.name
            raise SettingMissing(f"{name} needs a trained probe, as in {name}:probe=DIR: {self.made}")
        object.__setattr__(self, "probe", Probe.load(self.probe))

    @property
    def trained(self) -> Probe:
        assert isinstance(self.probe, Probe)
        return self.probe

    @property
    def limit(self) -> float:
        return self.trained.threshold.value if self.threshold is None else self.threshold

    def fits(self, model: Reader) -> None:
        self.trained.require(model, self.pool, self.made)

    def check(self, seq: Sequence) -> None:
        name = type(self).__name__ if (method := method_of(self)) is None else method.name
        self.trained.threshold.check(seq, name, self.made, own=self.threshold is not None)
