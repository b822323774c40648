"""`decodery serve`: the engine on an OpenAI endpoint."""

from __future__ import annotations

import logging
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from decodery.core.errors import SettingsError
from decodery.core.registry import methods, resolve

from .command import command
from .options import import_option, loading_options, model_options, server_option

if TYPE_CHECKING:
    from decodery.server.served import ModelSource
    from decodery.server.settings import ServerSettings

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@command(example="serve -m model.gguf --port 8000")
@model_options
@loading_options
@import_option
@server_option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@server_option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="Port to listen on. 0: any free port.",
)
@server_option(
    "--api-key-file", type=_FILE, metavar="FILE", help="File of API keys, one key, or a name and a key, a line."
)
@server_option(
    "--max-queue", type=click.IntRange(min=0), metavar="N", show_default="256", help="Maximum number of waiting texts."
)
@server_option(
    "--max-running",
    type=click.IntRange(min=1),
    metavar="N",
    show_default="64",
    help="Maximum number of texts decoded at the same time.",
)
@server_option(
    "--kv-gib",
    type=float,
    metavar="G",
    show_default="a quarter of the GPU's, without one of the machine's",
    help="Memory of the KV cache in GiB.",
)
@server_option("--seconds", type=float, metavar="S", show_default="600", help="Time limit of a request in seconds.")
@server_option(
    "--pass-seconds",
    type=float,
    metavar="S",
    show_default="0.25",
    help="Target duration of a forward pass while texts stream, in seconds.",
)
@server_option(
    "--max-texts",
    type=click.IntRange(min=1),
    metavar="N",
    show_default="128",
    help="Maximum number of texts of one request at a time, branches of its search included.",
)
@server_option(
    "--max-texts-per-key",
    type=click.IntRange(min=1),
    metavar="N",
    show_default="256",
    help="Maximum number of texts of all requests of one key at a time.",
)
@server_option(
    "--side-seconds",
    type=float,
    metavar="S",
    show_default="60",
    help="Time limit for scorers, program tests, patterns and grammars of one request, in seconds.",
)
@server_option("--trust", is_flag=True, default=None, help="Allow requests to name files, models and programs.")
@server_option("--strict", is_flag=True, default=None, help="Refuse unknown request fields.")
@server_option(
    "--served-model-name",
    metavar="NAME",
    show_default="the model's file or folder",
    help="Name of the model in requests.",
)
@server_option(
    "--extra-model",
    multiple=True,
    metavar="NAME=MODEL",
    help="Further model, loaded when a request names it and unloaded when idle. Repeatable.",
)
@server_option(
    "--memory-gib",
    type=float,
    metavar="G",
    show_default="three quarters of the GPU's, without one of the machine's",
    help="Memory of all loaded models, weights and KV caches, in GiB. Needs --extra-model.",
)
@server_option(
    "--idle-seconds",
    type=float,
    metavar="S",
    show_default="300",
    help="Time after which an unused model of --extra-model is unloaded, in seconds.",
)
@server_option(
    "--scorer",
    metavar="SCORER",
    show_default="question-likelihood",
    help="Scorer of /v1/rerank and /score.",
)
@server_option(
    "--guard",
    multiple=True,
    metavar="METHOD",
    help="Monitor or constraint of every text, which requests cannot leave out. Monitors repeat, constraints do not.",
)
@server_option(
    "--search",
    metavar="SPEC",
    help="Answer every request by this search, such as best-of-n:scorer=self-evaluation,n=8; clients give n for its n "
    "best texts.",
)
@server_option(
    "--allow-host",
    multiple=True,
    metavar="NAME",
    show_default="local names on a local address, else any",
    help="Host name under which the server is reached. Repeatable; '*' is any.",
)
@server_option(
    "--allow-origin", multiple=True, metavar="URL", help="Web page that may use the server from a browser. Repeatable."
)
@server_option("--metrics-key", is_flag=True, default=None, help="Require an API key for /metrics.")
@server_option("--tls-cert", type=_FILE, metavar="FILE", help="Certificate for HTTPS, with --tls-key.")
@server_option("--tls-key", type=_FILE, metavar="FILE", help="Private key of the certificate.")
@server_option(
    "--log-level",
    type=click.Choice(["error", "warning", "info", "debug"]),
    default="warning",
    show_default=True,
    help="What is logged. info: a line of JSON per request, without its text.",
)
@server_option(
    "--ray",
    is_flag=True,
    help="Run replicas on a Ray cluster with Ray Serve, or on this machine if there is no cluster.",
)
@server_option(
    "--replicas", metavar="N-M", show_default="1-4", help="Number of replicas, or minimum and maximum. Needs --ray."
)
def serve(
    model: str,
    dtype: str,
    kv_dtype: str,
    masking: str | None,
    host: str,
    port: int,
    api_key_file: Path | None,
    kv_gib: float | None,
    ray: bool,
    replicas: str | None,
    served_model_name: str | None,
    extra_model: tuple[str, ...],
    memory_gib: float | None,
    scorer: str | None,
    guard: tuple[str, ...],
    allow_host: tuple[str, ...],
    allow_origin: tuple[str, ...],
    tls_cert: Path | None,
    tls_key: Path | None,
    search: str | None,
    log_level: str,
    **limits: Any,
) -> None:
    """Serve a model to many users at once, to clients of OpenAI, Anthropic and Ollama.

    SIGTERM or Ctrl-C waits up to 30 seconds for running requests. A second one stops at once.
    """
    if not extra_model and (memory_gib is not None or limits["idle_seconds"] is not None):
        raise click.UsageError("--memory-gib and --idle-seconds need --extra-model")
    if (tls_cert is None) != (tls_key is None):
        raise click.UsageError("--tls-cert and --tls-key go together")
    if replicas is not None and not ray:
        raise click.UsageError("--replicas needs --ray")
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise SettingsError("serve needs more packages: pip install 'decodery[serve]'") from error
    from decodery.server.address import require_certificate, require_free
    from decodery.server.hosts import require_hosts, require_origins
    from decodery.server.keys import read_keys
    from decodery.server.settings import ServerSettings, kv_bytes, memory_bytes

    given = {name: value for name, value in limits.items() if value is not None}
    if scorer is not None:
        given["scorer"] = resolve("scorer", scorer)
    monitors, constraint = _guards(guard)
    secrets, defaults = read_keys(api_key_file) if api_key_file is not None else ({}, {})
    settings = ServerSettings(
        # Clients see this name: a user name and a password in the address of a server are left out.
        name=served_model_name or Path(re.sub(r"^(https?://)[^/]*@", r"\1", model)).name or model,
        kv_bytes=kv_bytes(kv_gib, elsewhere=ray),
        keys=secrets,
        defaults=defaults,
        hosts=allow_host,
        origins=allow_origin,
        guards=monitors,
        constraint=constraint,
        memory_bytes=memory_bytes(memory_gib),
        search=None if search is None else resolve("search", search),
        **given,
    )
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    require_hosts(allow_host)
    require_origins(allow_origin)
    if tls_cert is not None and tls_key is not None:
        require_certificate(tls_cert, tls_key)
    require_free(host, port)
    if ray:
        if kv_dtype != "auto":
            raise click.UsageError("--kv-dtype and --ray exclude each other")
        if masking is not None:
            raise click.UsageError("--masking and --ray exclude each other")
        if tls_cert is not None or guard or extra_model or search is not None:
            raise click.UsageError("--tls-cert, --guard, --extra-model, --search and --ray exclude each other")
        _fleet(settings, model, dtype, host, port, replicas or "1-4", shared=kv_gib is None)
        return
    from decodery import load
    from decodery.server.run import Server
    from decodery.server.run import serve as run

    from .decode import note

    more = _more(extra_model, settings.name, dtype, kv_dtype)
    loaded = load(model, dtype=dtype, kv_dtype=kv_dtype, masking=masking)
    if scorer is not None:
        resolve("scorer", scorer).bind(loaded.tokenizer).fits(loaded.model)
    tls = None if tls_cert is None or tls_key is None else (tls_cert, tls_key)
    where: dict[str, Any] = {"host": host, "port": port, "tls": tls}
    size = _size(model) if more else 0
    server = Server(loaded, settings, more, size, **where, on_ready=lambda url: _tell(url, settings, note))
    run(server)
    if not server.started:
        raise SettingsError(f"cannot listen at {host}, port {port}: choose another one with --port")


def _guards(given: tuple[str, ...]) -> tuple[list[Any], Any]:
    """The monitors and the constraint of --guard. Raises SettingsError for two constraints."""
    monitors, constraints = ({method.name for method in methods(each)} for each in ("monitor", "constraint"))
    bound = [each for each in given if each.partition(":")[0] in constraints - monitors]
    if len(bound) > 1:
        raise SettingsError(f"a text follows one constraint: give one of --guard {' and '.join(bound)}")
    watching = [resolve("monitor", each) for each in given if each not in bound]
    return watching, resolve("constraint", bound[0]) if bound else None


def _more(given: tuple[str, ...], first: str, dtype: str, kv_dtype: str) -> list[ModelSource]:
    """The models of --extra-model. Raises SettingsError for two of one name, and for what is not NAME=MODEL."""
    from decodery import load
    from decodery.server.served import ModelSource

    found: dict[str, ModelSource] = {}
    for each in given:
        name, _, model = each.partition("=")
        if not name or not model:
            raise SettingsError(f"--extra-model is NAME=MODEL, such as coder=coder.gguf, not {each!r}")
        if name in found or name == first:
            raise SettingsError(f"two models are served as {name!r}: give each --extra-model a name of its own")
        loaded = partial(load, model, dtype=dtype, kv_dtype=kv_dtype)
        found[name] = ModelSource(name, partial(_size, model), loaded)
    return list(found.values())


def _size(model: str) -> int:
    """Bytes of a model's weights; none for one that another server runs."""
    from decodery.models.loaders.source import weight_bytes

    return 0 if model.startswith(("http://", "https://")) else weight_bytes(model)


def _fleet(
    settings: ServerSettings, model: str, dtype: str, host: str, port: int, replicas: str, *, shared: bool
) -> None:
    """Serve replicas. shared: they may be on one machine, whose memory has to do for all."""
    try:
        from decodery.server.ray import fleet_of, run
    except ImportError as error:
        raise SettingsError("--ray needs a package: pip install 'decodery[ray]'") from error
    from .decode import note

    fleet = fleet_of(settings, model, dtype, replicas, shared=shared)
    run(fleet, host, port, on_ready=lambda url: _tell(url, settings, note))


def _tell(url: str, settings: Any, note: Any) -> None:
    note(f"{settings.name} is served at {url}/v1")
    note(f"its page is at {url}/")
    if not settings.keys and "127.0.0.1" not in url and "[::1]" not in url:
        note("anyone who reaches this address can use it: require keys with --api-key-file")
