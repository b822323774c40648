"""Numbers with units: what one of each unit is in the base unit of its kind, and what a text says in it."""

from __future__ import annotations

import re
from collections.abc import Iterator

NUMBER = r"(?:(?:(?<![\w).])-)?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
"""A number in a text, as a regular expression."""
_KINDS: dict[str, dict[float, str]] = {
    "m": {
        1.0: "m metre metres meter meters",
        1000.0: "km kilometre kilometres kilometer kilometers",
        0.01: "cm centimetre centimetres centimeter centimeters",
        0.001: "mm millimetre millimetres millimeter millimeters",
        0.0254: "inch inches",
        0.3048: "ft foot feet",
        0.9144: "yd yard yards",
        1609.344: "mi mile miles",
    },
    "kg": {
        1.0: "kg kilogram kilograms",
        0.001: "g gram grams",
        1e-6: "mg milligram milligrams",
        1000.0: "t tonne tonnes",
        0.45359237: "lb lbs pound pounds",
        0.028349523125: "oz ounce ounces",
    },
    "s": {
        1.0: "s sec secs second seconds",
        60.0: "min mins minute minutes",
        3600.0: "h hr hrs hour hours",
        86400.0: "day days",
        604800.0: "week weeks",
    },
    "l": {
        1.0: "l L litre litres liter liters",
        0.001: "ml mL millilitre millilitres milliliter milliliters",
        3.785411784: "gallon gallons",
    },
    "m/s": {
        1.0: "m/s metres_per_second meters_per_second",
        1 / 3.6: "km/h kmh kph km_per_hour kilometres_per_hour kilometers_per_hour",
        0.44704: "mph miles_per_hour",
    },
    "m²": {
        1.0: "m² m^2 square_metre square_metres square_meter square_meters",
        1e6: "km² km^2 square_kilometres square_kilometers",
        1e-4: "cm² cm^2 square_centimetres square_centimeters",
        0.09290304: "ft² ft^2 square_foot square_feet",
    },
    "m³": {
        1.0: "m³ m^3 cubic_metre cubic_metres cubic_meter cubic_meters",
        1e-6: "cm³ cm^3 cubic_centimetres cubic_centimeters",
    },
    "$": {1.0: "$ dollar dollars USD", 0.01: "¢ cent cents"},
    "€": {1.0: "€ euro euros EUR"},
    "1": {0.01: "% percent"},
}
UNITS = {
    name.replace("_", " "): (factor, "" if base == "1" else base)
    for base, names in _KINDS.items()
    for factor, known in names.items()
    for name in known.split()
}
"""By name: how many base units it is, and the base unit; that of a share has no name."""
_SCALES = {"hundred": 1e2, "thousand": 1e3, "million": 1e6, "billion": 1e9, "trillion": 1e12}
_NAMES = "|".join(re.escape(name) for name in sorted(UNITS, key=lambda name: -len(name)))
_QUANTITY = re.compile(
    rf"([$€£]?)\s?(?:((?>[0-9]+))\s+(?=[0-9]+/[0-9]))?((?>{NUMBER}))(?:/([0-9]{{1,9}})(?![\w.]))?"
    rf"(?:\s*({'|'.join(_SCALES)}))?(?:\s*({_NAMES})(?![A-Za-z²³^/]))?"
)
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([0-9]+)\}\s*\{([0-9]+)\}|([0-9])([0-9]))")
_DELIMITED = re.compile(r"(?<!\\)\$(?=\S)([^$\n]+?)(?<=[^\s\\])\$(?![0-9])")
"""A formula; dollars before numbers are none."""
_COMMAND = re.compile(r"\\(?:text|mathrm|textbf|mathbf|operatorname)\s*(?=\{)|\\[,;:!]|\\(?=[%$ ])|[{}~]")
_TOGETHER = re.compile(r"\s*(?:,|and|&)?\s*")
"""What stands between the parts of one quantity."""


def quantity_of(text: str) -> str | None:
    """The last number of a text in the base unit of its kind; alone where no known unit follows.

    Parts that follow each other in ever smaller units of a kind are one quantity, as in 1 hour and 30 minutes.
    """
    found = list(_quantities(text))
    return found[-1] if found else None


def _quantities(text: str) -> Iterator[str]:
    """All of them, those without a unit before the others."""
    plain = _DELIMITED.sub(r" \1 ", _FRACTION.sub(r" \1\3/\2\4", text))
    plain = _COMMAND.sub("", plain)
    bare, whole, total = list[str](), list[str](), 0.0
    end, kind, smallest = -1, "", 0.0
    for each in _QUANTITY.finditer(plain):
        sign, units, digits, below, scale, name = each.groups()
        value = float(digits.replace(",", ""))
        if below is not None and int(below):
            value /= int(below)
        value = (value + float(units or 0)) * _SCALES.get(scale, 1.0)
        if not sign and not name:
            bare.append(_shown(value, ""))
            end = -1
            continue
        factor, base = UNITS[name] if name and not sign else (1.0, sign)
        if end >= 0 and base == kind and factor < smallest and _TOGETHER.fullmatch(plain, end, each.start()):
            total += value * factor
            whole.pop()
        else:
            total = value * factor
        whole.append(_shown(total, base))
        end, kind, smallest = each.end(), base, factor
    yield from bare
    yield from whole


def _shown(value: float, base: str) -> str:
    return f"{value + 0.0:.9g} {base}".strip()
