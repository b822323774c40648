"""Options that commands of the benchmarks share which train something."""

from __future__ import annotations

from decodery.cli.command import option
from decodery.cli.options import Decorator
from decodery.cli.train_common import check_seed


def model_option(what: str) -> Decorator:
    """`-m`. what: what is done with the model."""
    return option("-m", "--model", default="smollm2", show_default=True, help=f"The model {what}.")


def seed_option(what: str, default: int = 0) -> Decorator:
    """`--seed`. what: what hangs on it."""
    return option("--seed", default=default, show_default=True, callback=check_seed, help=f"Random seed of {what}.")
