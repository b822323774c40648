"""What sending costs."""

from __future__ import annotations

from .models import Parcel


class Tariff:
    """Prices by weight."""

    def __init__(self, base_cents: int, cents_per_kilo: int) -> None:
        self.base_cents = base_cents
        self.cents_per_kilo = cents_per_kilo
        self.surcharges: dict[str, int] = {"fragile": 250}

    def quote_for(self, parcel: Parcel) -> Quote:
        cents = self.base_cents + round(parcel.kilos * self.cents_per_kilo)
        if parcel.fragile_flag:
            cents += self.surcharges.get("fragile", 0)
        return Quote(cents, parcel)

    def raise_by(self, percent: int) -> None:
        self.base_cents = self.base_cents * (100 + percent) // 100


class Quote:
    """A price that was named."""

    def __init__(self, cents: int, parcel: Parcel) -> None:
        self.cents = cents
        self.parcel = parcel
        self.valid_days = 14

    def in_euros(self) -> str:
        return f"{self.cents / 100:.2f} EUR"

    def is_cheaper_than(self, other: Quote) -> bool:
        return self.cents < other.cents


class Ledger:
    """Who owes what."""

    def __init__(self) -> None:
        self.open_quotes: list[Quote] = []
        self.paid_cents = 0

    def enter(self, quote: Quote) -> None:
        self.open_quotes.append(quote)

    def settle(self, quote: Quote) -> int:
        self.open_quotes.remove(quote)
        self.paid_cents += quote.cents
        return self.paid_cents

    def outstanding(self) -> int:
        return sum(quote.cents for quote in self.open_quotes)
