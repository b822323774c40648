"""`decodery batch`: files of requests, answered without a server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from ..errors import SettingsError
from .decoding import leave_if_terminated, note, stop_on_interrupt
from .options import Command, model_options, server_option

_INTERRUPTED = 130


@click.command(cls=Command, short_help="Answer a file of requests in OpenAI's batch format.")
@click.argument("source", metavar="IN.jsonl", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("out", metavar="OUT.jsonl", type=click.Path(dir_okay=False, path_type=Path))
@model_options
@server_option("--max-running", type=click.IntRange(min=1), default=64, show_default=True, help="Texts at a time.")
@server_option("--kv-gib", type=float, metavar="G", help="Memory for keys and values (a quarter of the machine's).")
@server_option("--trust", is_flag=True, help="Let requests name files, models and programs.")
def batch(source: Path, out: Path, model: str, dtype: str, max_running: int, kv_gib: float | None, trust: bool) -> None:
    """Answer the requests of IN.jsonl in OUT.jsonl, each with one line, in the order in which they end.

    Whatever ends it, a kill included: the same command goes on where it was.
    """
    try:
        from ..serve.app import Front
        from ..serve.batch import Batch
    except ImportError as error:
        raise SettingsError("batches need some packages: pip install 'decodery[serve]'") from error
    from .. import load
    from ..bench.terminal import progress_bar
    from ..serve.settings import ServerSettings, kv_bytes

    at_once = 2 * max_running
    most = ServerSettings.max_texts * at_once
    settings = ServerSettings(
        name=Path(model).name or model,
        max_running=max_running,
        max_queue=most,
        max_texts_per_key=most,
        kv_bytes=kv_bytes(kv_gib),
        seconds=float("inf"),
        trust=trust,
    )
    front = Front(load(model, dtype=dtype), settings)
    front.service.start()
    try:
        with stop_on_interrupt() as stopped, progress_bar() as report:
            totals = asyncio.run(
                Batch(front, source, out, at_once).run(lambda done, total: report("requests", done, total), stopped)
            )
    finally:
        front.service.stop()
    for line in totals.named:
        note(line)
    if totals.failed > len(totals.named):
        note(f"and {totals.failed - len(totals.named)} more")
    counts = f"{totals.done} answered, {totals.failed} of them with an error"
    before = f", {totals.earlier} earlier" if totals.earlier else ""
    note(f"{out}: {counts}{before}, of {totals.total}")
    if not totals.complete:
        note("interrupted; the same command goes on from here")
        leave_if_terminated()
        raise click.exceptions.Exit(_INTERRUPTED)
