"""Other programs measured beside this one: one file each, behind one class."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ...lm import LM
from .base import Peer, UnavailableError

if TYPE_CHECKING:
    from ..settings import Settings

PEERS = {
    "transformers": "transformers_generate",
    "transformers-lookup": "transformers_generate",
    "llama.cpp": "llama_cpp",
    "llama.cpp-q8": "llama_cpp",
    "llama.cpp-lookup": "llama_cpp",
    "economize": "economize_decode",
    "economize-lookup": "economize_decode",
}
"""Names on the command line and the modules that know them."""


def open_peer(name: str, lm: LM, settings: Settings) -> Peer:
    """The peer ready to decode; raises UnavailableError, in one sentence, if it is missing or cannot run this."""
    module = import_module(f".{PEERS[name]}", __package__)
    return module.open_peer(name, lm, settings)


def installed() -> list[str]:
    """Names of the peers whose packages are installed, without importing them."""
    from importlib.util import find_spec

    packages = {"transformers": "transformers", "llama.cpp": "llama_cpp", "economize": "economize"}
    return [
        name
        for name in PEERS
        if name != "llama.cpp-q8" and find_spec(packages[name.removesuffix("-lookup")]) is not None
    ]


__all__ = ["PEERS", "Peer", "UnavailableError", "installed", "open_peer"]
