"""What is sent, where to, and by whom."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Address:
    """Where somebody lives."""

    addressee: str
    road: str
    house_no: int
    postcode: str

    @property
    def label_text(self) -> str:
        return f"{self.addressee}, {self.road} {self.house_no:03d}, {self.postcode.upper()}"

    def is_near(self, other: Address) -> bool:
        return self.postcode[:2] == other.postcode[:2]


@dataclass
class Parcel:
    """A thing that is sent."""

    barcode: str
    grams: int
    destination: Address
    fragile_flag: bool = False
    history: list[str] = field(default_factory=list)

    MAX_GRAMS = 31_500

    @property
    def kilos(self) -> float:
        return self.grams / 1000

    def note(self, text: str) -> None:
        self.history.append(text.strip())

    def too_heavy(self) -> bool:
        return self.grams > self.MAX_GRAMS

    @classmethod
    def sample(cls) -> Parcel:
        return cls("A1", 1200, Address("Ann", "Elm Road", 7, "ab12"))


class Depot:
    """A house full of parcels."""

    def __init__(self, town: str, shelf_count: int) -> None:
        self.town = town
        self.shelf_count = shelf_count
        self._stored: dict[str, Parcel] = {}

    def take_in(self, parcel: Parcel) -> None:
        parcel.note("in " + self.town.title())
        self._stored[parcel.barcode] = parcel

    def hand_out(self, barcode: str) -> Parcel:
        parcel = self._stored.pop(barcode)
        parcel.note("out " + self.town)
        return parcel

    def total_grams(self) -> int:
        return sum(each.grams for each in self._stored.values())

    def is_crowded(self) -> bool:
        return len(self._stored) > self.shelf_count * 4
