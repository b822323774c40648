"""Other programs measured beside this one: one file each, after one class."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from decodery.bench.subject import Peers

from .base import Order, Peer

PEERS = {
    "transformers": "transformers_generate",
    "transformers-lookup": "transformers_generate",
    "llama.cpp": "llama_cpp",
    "llama.cpp-q8": "llama_cpp",
    "llama.cpp-lookup": "llama_cpp",
    "llama.cpp-draft": "llama_cpp",
    "openvino": "openvino",
    "openvino-lookup": "openvino",
    "economize": "economize_decode",
    "economize-lookup": "economize_decode",
}
"""Names on the command line and the modules that know them."""

_PACKAGES = {
    "transformers": "transformers",
    "llama.cpp": "xllamacpp",
    "openvino": "openvino_genai",
    "economize": "economize",
}
_ASKED_FOR = ("llama.cpp-q8", "llama.cpp-draft")
"""What nobody gets without naming it: it needs another file."""


def open_peer(order: Order) -> Peer:
    """The peer in this process; raises UnavailableError, in one sentence, if it is missing or cannot run this."""
    return import_module(f".{PEERS[order.peer]}", __package__).open_peer(order)


def installed() -> list[str]:
    """Names of the peers whose packages are installed, without importing them."""
    return [
        name
        for name in PEERS
        if name not in _ASKED_FOR and find_spec(_PACKAGES[name.removesuffix("-lookup")]) is not None
    ]


def peers() -> Peers:
    """All of them, for a benchmark of methods, each in a process of its own."""
    from .apart import open_apart

    return Peers(tuple(PEERS), lambda method, lm, settings: open_apart(Order.of(method, lm, settings)))


__all__ = ["PEERS", "Order", "Peer", "installed", "open_peer", "peers"]
