"""Where a server listens, and what it shows for HTTPS."""

from __future__ import annotations

import socket
import ssl
import sys
from pathlib import Path

from decodery.core.errors import SettingsError


def require_free(host: str, port: int) -> None:
    """Find out whether a server can listen at an address, before a model is loaded for it.

    Args:
        host: A name, or an address of version 4 or 6.
        port: 0 for any free one.

    Raises:
        SettingsError: Nothing can listen there, or something does.
    """
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with socket.socket(family, kind, protocol) as tried:
                # As servers do: what a closed one left waiting is no obstacle. On Windows it would allow to share it.
                if sys.platform != "win32":
                    tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    tried.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                tried.bind(address)
                tried.listen(1)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise SettingsError(
            f"cannot listen at {host}, port {port} ({why}): choose another one with --port or --host"
        ) from error


def require_certificate(certificate: Path, key: Path) -> None:
    """Find out whether a server can use a certificate, before a model is loaded for it.

    Args:
        certificate: A file.
        key: The file of its private key.

    Raises:
        SettingsError: These are no such files, or do not belong together.
    """
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except OSError as error:
        raise SettingsError(
            f"cannot serve HTTPS with {certificate} and {key} ({error.strerror or error}): give a certificate and its "
            "private key, both in PEM"
        ) from error
