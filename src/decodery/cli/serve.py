"""`decodery serve`: the engine behind an OpenAI endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from decodery.core.errors import SettingsError

from .command import command
from .options import kv_dtype_option, model_options, server_option

if TYPE_CHECKING:
    from decodery.server.settings import ServerSettings

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@command(example="serve -m model.gguf --port 8000")
@model_options
@kv_dtype_option
@server_option("--host", default="127.0.0.1", show_default=True, help="The address to listen at.")
@server_option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@server_option(
    "--api-key-file", type=_FILE, metavar="FILE", help="Who may use it: a key per line, or a name and a key."
)
@server_option("--max-queue", type=click.IntRange(min=0), metavar="N", help="Texts that may wait (256).")
@server_option("--max-running", type=click.IntRange(min=1), metavar="N", help="Texts in progress at a time (64).")
@server_option("--kv-gib", type=float, metavar="G", help="Memory for keys and values (a quarter of the machine's).")
@server_option("--seconds", type=float, metavar="S", help="For one request, from its arrival (600).")
@server_option("--pass-seconds", type=float, metavar="S", help="A pass while somebody writes, about (0.25).")
@server_option("--trust", is_flag=True, default=None, help="Let requests name files, models and programs.")
@server_option("--strict", is_flag=True, default=None, help="Refuse fields that are not known.")
@server_option("--ray", is_flag=True, help="Run replicas on Ray Serve: on the cluster at hand, or on this machine.")
@server_option("--replicas", metavar="N-M", help="With --ray: how many, or at least and at most (1-4).")
def serve(
    model: str,
    dtype: str,
    kv_dtype: str,
    host: str,
    port: int,
    api_key_file: Path | None,
    kv_gib: float | None,
    ray: bool,
    replicas: str | None,
    **limits: Any,
) -> None:
    """Serve a model at /v1/chat/completions and /v1/completions, to many users at once.

    SIGTERM or Ctrl-C lets what is in progress end within 30 seconds; a second one ends at once.
    """
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise SettingsError("the server needs some packages: pip install 'decodery[serve]'") from error
    from decodery.server.address import require_free
    from decodery.server.keys import read_keys
    from decodery.server.settings import ServerSettings, kv_bytes

    given = {name: value for name, value in limits.items() if value is not None}
    settings = ServerSettings(
        name=Path(model).name or model,
        kv_bytes=kv_bytes(kv_gib),
        keys={} if api_key_file is None else read_keys(api_key_file),
        **given,
    )
    if replicas is not None and not ray:
        raise click.UsageError("--replicas belongs to --ray")
    require_free(host, port)
    if ray:
        if kv_dtype != "auto":
            raise click.UsageError("--kv-dtype goes without --ray")
        _fleet(settings, model, dtype, host, port, replicas or "1-4", shared=kv_gib is None)
        return
    from decodery import load
    from decodery.server.run import Server
    from decodery.server.run import serve as run

    from .decode import note

    loaded = load(model, dtype=dtype, kv_dtype=kv_dtype)
    server = Server(loaded, settings, host=host, port=port, told=lambda url: _tell(url, settings, note))
    run(server)
    if not server.started:
        raise SettingsError(f"cannot listen at {host}, port {port}: choose another one with --port")


def _fleet(
    settings: ServerSettings, model: str, dtype: str, host: str, port: int, replicas: str, *, shared: bool
) -> None:
    """Serve replicas. shared: they may be on one machine, whose memory has to do for all."""
    try:
        from decodery.server.ray import fleet_of, run
    except ImportError as error:
        raise SettingsError("replicas need a package: pip install 'decodery[ray]'") from error
    from .decode import note

    fleet = fleet_of(settings, model, dtype, replicas, shared=shared)
    run(fleet, host, port, told=lambda url: _tell(url, settings, note))


def _tell(url: str, settings: Any, note: Any) -> None:
    note(f"{settings.name} is served at {url}/v1")
    note(f"its page is at {url}/")
    if not settings.keys and "127.0.0.1" not in url and "[::1]" not in url:
        note("everybody who reaches this address may use it: ask for keys with --api-key-file")
