"""Units that answers have, and what one of each is in the base unit of its kind."""

from __future__ import annotations

import re

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
    "m/s": {1.0: "m/s", 1 / 3.6: "km/h", 0.44704: "mph"},
    "$": {1.0: "$ dollar dollars USD", 0.01: "cent cents"},
    "€": {1.0: "€ euro euros EUR"},
    "1": {0.01: "% percent"},
}
UNITS = {
    name: (factor, "" if base == "1" else base)
    for base, names in _KINDS.items()
    for factor, known in names.items()
    for name in known.split()
}
"""By name: how many base units it is, and the base unit; that of a share has no name."""
UNIT_NAMES = "|".join(map(re.escape, sorted(UNITS, key=lambda name: -len(name))))
