"""Where a parcel is."""

from __future__ import annotations

import math
from enum import Enum

from .models import Depot, Parcel


class Stage(Enum):
    """How far a parcel has come."""

    BOOKED = 1
    EN_ROUTE = 2
    HANDED_OVER = 3

    @property
    def is_final(self) -> bool:
        return self is Stage.HANDED_OVER


class Courier:
    """Somebody who brings parcels."""

    def __init__(self, badge_no: int, van_plate: str) -> None:
        self.badge_no = badge_no
        self.van_plate = van_plate
        self.tour: list[Parcel] = []

    def load_van(self, depot: Depot, barcodes: list[str]) -> int:
        for barcode in barcodes:
            self.tour.append(depot.hand_out(barcode.lower()))
        return len(self.tour)

    def next_stop(self) -> str:
        return self.tour[0].destination.label_text

    def drop_off(self) -> Parcel:
        parcel = self.tour.pop(0)
        parcel.note(f"dropped off by {self.badge_no}")
        return parcel


class Beacon:
    """A place on the map."""

    def __init__(self, lat_deg: float, lon_deg: float) -> None:
        self.lat_deg = lat_deg
        self.lon_deg = lon_deg

    def metres_to(self, other: Beacon) -> float:
        across = math.cos(math.radians(self.lat_deg)) * (self.lon_deg - other.lon_deg)
        return 111_320 * math.hypot(self.lat_deg - other.lat_deg, across)

    def as_pair(self) -> tuple[float, float]:
        return self.lat_deg, self.lon_deg
