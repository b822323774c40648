"""`decodery batch`: files of requests, answered without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from decodery.core.errors import SettingsError

from .command import command
from .decode import leave_if_terminated, note, stop_on_interrupt
from .options import OUT_FILE, model_options, server_option

if TYPE_CHECKING:
    from decodery.server.batch_file import Totals
    from decodery.server.settings import ServerSettings

_FAILED, _INTERRUPTED = 1, 130


@command(example="batch requests.jsonl answers.jsonl -m smollm2")
@click.argument("source", metavar="IN.jsonl", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("out", metavar="OUT.jsonl", type=OUT_FILE)
@model_options
@server_option(
    "--max-running", type=click.IntRange(min=1), default=64, show_default=True, help="Texts decoded at the same time."
)
@server_option(
    "--kv-gib",
    type=float,
    metavar="G",
    show_default="a quarter of the GPU's, without one of the machine's",
    help="Memory of the KV cache in GiB.",
)
@server_option("--trust", is_flag=True, help="Allow requests to name files, models and programs.")
@server_option(
    "--ray", is_flag=True, help="Run on a Ray cluster with Ray Data, or on this machine if there is no cluster."
)
@server_option(
    "--replicas", metavar="N-M", show_default="1-4", help="Number of engines, or minimum and maximum. Needs --ray."
)
def batch(
    source: Path,
    out: Path,
    model: str,
    dtype: str,
    max_running: int,
    kv_gib: float | None,
    trust: bool,
    ray: bool,
    replicas: str | None,
) -> None:
    """Answer the requests of IN.jsonl and write one line each to OUT.jsonl, in the order in which they finish.

    An interrupted run continues if the same command runs again. The exit status is 1 if a line of OUT.jsonl is an
    error.
    """
    from decodery.bench.terminal import progress_bar
    from decodery.server.settings import ServerSettings, kv_bytes

    if replicas is not None and not ray:
        raise click.UsageError("--replicas needs --ray")
    at_once = 2 * max_running
    most = ServerSettings.max_texts * at_once
    settings = ServerSettings(
        name=Path(model).name or model,
        max_running=max_running,
        max_queue=most,
        max_texts_per_key=most,
        kv_bytes=kv_bytes(kv_gib, elsewhere=ray),
        seconds=float("inf"),
        trust=trust,
    )
    with stop_on_interrupt() as stopped, progress_bar() as report:

        def told(done: int, total: int) -> None:
            report("requests", done, total)

        if ray:
            totals = _by_ray(
                settings, model, dtype, replicas or "1-4", source, out, told, stopped, shared=kv_gib is None
            )
        else:
            totals = _here(settings, model, dtype, source, out, at_once, told, stopped)
    _tell(totals, out)
    if not totals.complete:
        note("interrupted; the same command continues")
        leave_if_terminated()
        raise click.exceptions.Exit(_INTERRUPTED)
    if totals.failed or totals.failed_earlier:
        raise click.exceptions.Exit(_FAILED)


def _here(
    settings: ServerSettings,
    model: str,
    dtype: str,
    source: Path,
    out: Path,
    at_once: int,
    report: Callable[[int, int], None],
    stopped: Callable[[], bool],
) -> Totals:
    try:
        from decodery.server.app import Front
        from decodery.server.batch import answer_batch
        from decodery.server.batch_file import BatchFile
    except ImportError as error:
        raise SettingsError("batch needs more packages: pip install 'decodery[serve]'") from error
    from decodery import load

    front = Front(load(model, dtype=dtype), settings)
    front.service.start()
    try:
        with BatchFile(source, out, settings.body_bytes, front.service.fingerprint) as batch:
            asyncio.run(answer_batch(front, batch, at_once, report, stopped))
        return batch.totals
    finally:
        front.service.stop()


def _by_ray(
    settings: ServerSettings,
    model: str,
    dtype: str,
    replicas: str,
    source: Path,
    out: Path,
    report: Callable[[int, int], None],
    stopped: Callable[[], bool],
    *,
    shared: bool,
) -> Totals:
    """shared: engines may be on one machine, whose memory has to do for all."""
    try:
        from decodery.server.ray import fleet_of
        from decodery.server.ray_batch import answer_by_ray
    except ImportError as error:
        raise SettingsError("--ray needs a package: pip install 'decodery[ray]'") from error
    fleet = fleet_of(settings, model, dtype, replicas, shared=shared)
    return answer_by_ray(fleet, source, out, report, stopped)


def _tell(totals: Totals, out: Path) -> None:
    for line in totals.named:
        note(line)
    if totals.failed > len(totals.named):
        note(f"and {totals.failed - len(totals.named)} more")
    counts = f"{totals.done} answered, {totals.failed} of them with an error"
    before = f", {totals.earlier} earlier" if totals.earlier else ""
    before += f" ({totals.failed_earlier} of them with an error)" if totals.failed_earlier else ""
    note(f"{out}: {counts}{before}, of {totals.total}")
