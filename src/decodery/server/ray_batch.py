"""Files of requests answered by many machines, through Ray Data.

The process that was started reads the requests and writes the answers; workers of the cluster, each with an engine of
its own, answer them a few at a time. Whatever ends a worker, Ray has its requests answered by another.
"""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.data import ActorPoolStrategy
from ray.exceptions import RayTaskError

from decodery.core.errors import DecoderyError

from .app import Front
from .batch import respond
from .batch_file import BatchFile, BatchRequest, Totals
from .ray import Fleet
from .service import fingerprint

_TOGETHER = 8
"""Requests of a task: what is answered again where a worker is lost."""
_LOOKS_EVERY = 0.2


class Answerer:
    """A worker: one engine."""

    def __init__(self, fleet: Fleet) -> None:
        self.front = _front(fleet)
        self.front.service.start()

    async def __call__(self, asked: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """asked: columns number, url and body, of some requests; gives number, status and body of their answers."""
        answers = await asyncio.gather(
            *(
                respond(self.front, str(url), json.loads(body))
                for url, body in zip(asked["url"], asked["body"], strict=True)
            )
        )
        yield {
            "number": asked["number"],
            "status": [status for status, _ in answers],
            "body": [json.dumps(body) for _, body in answers],
        }


def answer_by_ray(
    fleet: Fleet, source: Path, out: Path, report: Callable[[int, int], None], stopped: Callable[[], bool]
) -> Totals:
    """Answer all requests on the Ray cluster at hand, or on one of this machine; see `answer_batch`."""
    ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level="warning")
    try:
        settings = ray.data.DataContext.get_current()
        settings.enable_progress_bars = settings.print_on_execution_start = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        # Of the model as the workers have it, which this machine may not be able to load.
        found = ray.remote(_fingerprint).options(num_cpus=fleet.cpus, num_gpus=fleet.gpus).remote(fleet)
        try:
            salt = ray.get(found)
        except RayTaskError as error:
            # What went wrong there is said as it would be here, without the worker's traceback.
            raise error.cause from None
        with BatchFile(source, out, fleet.settings.body_bytes, salt) as batch:
            rows, asked = list[dict[str, Any]](), dict[int, BatchRequest]()
            for each in batch.unanswered():
                rows.append({"number": each.line.number, "url": each.url, "body": json.dumps(each.body)})
                asked[each.line.number] = replace(each, body={})
            report(batch.over, batch.totals.total)
            for found in _answers(fleet, rows, stopped):
                batch.add(asked[int(found["number"])], int(found["status"]), json.loads(found["body"]))
                report(batch.over, batch.totals.total)
            batch.totals.complete = batch.over == batch.totals.total
        return batch.totals
    finally:
        ray.shutdown()


def _answers(fleet: Fleet, rows: list[dict[str, Any]], stopped: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """The workers' answers as they come, until `stopped`. Raises DecoderyError where the cluster fails."""
    if not rows:
        return
    said: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def listen() -> None:
        try:
            for found in _dataset(fleet, rows).iter_rows():
                said.put(found)
            said.put(None)
        except Exception as error:
            said.put(error)

    # Ray waits as long as an answer takes, and an interruption should not.
    threading.Thread(target=listen, daemon=True).start()
    while not stopped():
        try:
            found = said.get(timeout=_LOOKS_EVERY)
        except queue.Empty:
            continue
        if found is None:
            return
        if isinstance(found, Exception):
            why = str(found).strip().splitlines()[-1:] or [type(found).__name__]
            raise DecoderyError(f"the Ray cluster failed, and what was answered is kept: {why[0]}") from found
        yield found


def _dataset(fleet: Fleet, rows: list[dict[str, Any]]) -> Any:
    tasks = -(-len(rows) // _TOGETHER)
    at_once = max(1, 2 * fleet.settings.max_running // _TOGETHER)
    return ray.data.from_items(rows, override_num_blocks=tasks).map_batches(
        Answerer,
        fn_constructor_args=(fleet,),
        batch_size=None,
        compute=ActorPoolStrategy(min_size=fleet.least, max_size=fleet.most, max_tasks_in_flight_per_actor=at_once),
        num_cpus=fleet.cpus,
        num_gpus=fleet.gpus,
        ray_remote_args_fn=lambda: {"max_concurrency": at_once},
    )


def _front(fleet: Fleet) -> Front:
    from decodery import load

    return Front(load(fleet.model, dtype=fleet.dtype), fleet.settings)


def _fingerprint(fleet: Fleet) -> str:
    from decodery import load

    return fingerprint(load(fleet.model, dtype=fleet.dtype))
