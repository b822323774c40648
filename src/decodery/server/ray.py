"""A Ray Serve application: replicas of the server at one address, more of them as more requests wait.

    serve run decodery.server.ray:application model=smollm2 replicas=1-4

A gate reads each request and hands it to a replica, by what it begins with: a conversation, and prompts that begin
alike, find there what was read of them. Every replica is the whole server of this package without its socket.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, ReplicaUnavailableError
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from decodery.core.errors import SettingsError

from .affinity import beginning, ranked
from .dialect import dumps
from .errors import ApiError, overloaded
from .settings import ServerSettings, kv_bytes, quarter_of_memory
from .wire import Json

_HEADERS = ("authorization", "content-type", "host", "x-api-key")
_STREAMS = ("text/event-stream", "application/x-ndjson")
_GONE = (RayActorError, ReplicaUnavailableError)
"""What is raised where a replica has ended before its answer has."""
_TRIES = 4
_PAUSE = 0.5
"""Seconds before a request is given to another replica."""
_GATES = 2
"""Gates of a fleet, so that requests come in where one of them is lost."""


@dataclass(frozen=True)
class Fleet:
    """Replicas of one server.

    Attributes:
        least, most: Of them.
        cpus, gpus: Of each.
        host: Where their gates listen.
    """

    settings: ServerSettings
    model: str = "smollm2"
    dtype: str = "auto"
    least: int = 1
    most: int = 4
    cpus: float = 1.0
    gpus: float = 0.0
    host: str = "0.0.0.0"

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise SettingsError(f"replicas must be N or LEAST-MOST from 1 on, not {self.least}-{self.most}")


class Router(RequestRouter):
    """Sends requests that begin alike to the same replica, as long as that is not far busier than others."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        name = "" if pending_request is None else pending_request.kwargs.get("begins", "")
        if not name:
            # Among equally busy ones the first is taken.
            return [random.sample(candidate_replicas, len(candidate_replicas))]
        known = {each.replica_id.unique_id: each for each in candidate_replicas}
        busy = {key: self.replica_queue_len_cache.get(each.replica_id) or 0 for key, each in known.items()}
        return [[known[key]] for key in ranked(name, busy)]


class Replica:
    """One engine, and the application in front of it."""

    def __init__(self, fleet: Fleet) -> None:
        from decodery import load

        from .app import Front

        self.front = Front(load(fleet.model, dtype=fleet.dtype), fleet.settings)
        self.app = self.front.app(host=fleet.host)
        self.name = serve.get_replica_context().replica_id.unique_id
        self.front.service.start()

    def check_health(self) -> None:
        """Ray replaces a replica whose engine has failed."""
        if not self.front.service.alive:
            raise RuntimeError("the engine failed")

    def __del__(self) -> None:
        if hasattr(self, "front"):
            self.front.service.stop()

    async def answer(
        self, method: str, path: str, headers: dict[str, str], body: bytes, *, begins: str
    ) -> AsyncIterator[Any]:
        """Status and headers of the application's answer, then its bytes as they come.

        Who stops reading has left.
        """
        said: asyncio.Queue[Any] = asyncio.Queue()
        given = [{"type": "http.request", "body": body, "more_body": False}]
        gone = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if given:
                return given.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        scope = {
            **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "root_path": ""},
            **{"method": method, "path": path, "raw_path": path.encode(), "query_string": b"", "server": None},
            **{"headers": [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]},
        }
        running = asyncio.ensure_future(self.app(scope, receive, said.put))
        running.add_done_callback(lambda done: said.put_nowait(None))
        try:
            while (message := await said.get()) is not None:
                if message["type"] == "http.response.start":
                    pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in message["headers"]]
                    yield message["status"], [*pairs, ("x-replica", self.name)]
                elif message.get("body"):
                    yield message["body"]
            await running
        finally:
            gone.set()
            running.cancel()


class Gate:
    """Where requests come in.

    Args:
        replicas: Handle of their deployment.
    """

    def __init__(self, replicas: Any, body_bytes: int) -> None:
        self.replicas = replicas.options(stream=True)
        self.most = body_bytes

    async def __call__(self, request: Request) -> Response:
        parts, size = list[bytes](), 0
        try:
            async for part in request.stream():
                size += len(part)
                if size > self.most:
                    message = f"the request is larger than {self.most} bytes, the most this server takes"
                    return _refused(ApiError(413, message))
                parts.append(part)
        except ClientDisconnect:
            return Response(status_code=499)
        body = b"".join(parts)
        headers = {name: request.headers[name] for name in _HEADERS if name in request.headers}
        begins = beginning(headers, body)
        for _ in range(_TRIES):
            stream = self.replicas.answer.remote(request.method, request.url.path, headers, body, begins=begins)
            try:
                return await _answer(stream)
            except BackPressureError:
                return _refused(overloaded("all replicas are busy, and as many requests wait as may", 2))
            except _GONE:
                # The client has got nothing yet, and the seed decides the text: another replica answers the same.
                await asyncio.sleep(_PAUSE)
            except BaseException:
                stream.cancel()
                raise
        return _refused(_lost())


async def _answer(stream: Any) -> Response:
    """The answer of a replica: a stream once its first part is there, anything else once all of it is."""
    status, pairs = await anext(stream)
    kinds = [value for name, value in pairs if name == "content-type"]
    streams = any(kind.startswith(_STREAMS) for kind in kinds)
    answer: Response
    if streams:
        first = await anext(stream, b"")
        answer = StreamingResponse(_rest(first, stream, kinds[0]), status_code=status)
    else:
        answer = Response(b"".join([part async for part in stream]), status_code=status)
    answer.raw_headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs]
    return answer


async def _rest(first: bytes, stream: Any, kind: str) -> AsyncIterator[bytes]:
    """A stream from its first part on; where the replica is lost it ends with an error event."""
    over = False
    try:
        yield first
        async for part in stream:
            yield part
        over = True
    except _GONE:
        over = True
        body = dumps(_lost().body)
        yield b"data: " + body + b"\n\n" if kind.startswith("text/event-stream") else body + b"\n"
    finally:
        if not over:
            stream.cancel()


def _lost() -> ApiError:
    return ApiError(
        503,
        "the replica of this request was lost: send it again",
        kind="server_error",
        code="replica_lost",
        retry_after=1,
    )


def _refused(error: ApiError) -> Response:
    return Json(error.body, error.status, headers=error.headers)


def fleet_application(fleet: Fleet) -> serve.Application:
    """The application of a fleet, for `server.run`."""
    settings = fleet.settings
    replicas = serve.deployment(
        Replica,
        name="replica",
        max_ongoing_requests=settings.max_running,
        max_queued_requests=settings.max_queue,
        autoscaling_config=AutoscalingConfig(
            min_replicas=fleet.least,
            max_replicas=fleet.most,
            target_ongoing_requests=max(1, settings.max_running // 2),
        ),
        request_router_config=RequestRouterConfig(request_router_class=Router),
        ray_actor_options={"num_cpus": fleet.cpus, "num_gpus": fleet.gpus},
        graceful_shutdown_timeout_s=settings.drain_seconds,
        health_check_period_s=5,
    )
    # It only waits: its cores are the replicas'.
    gate = serve.deployment(
        Gate,
        name="gate",
        num_replicas=_GATES,
        max_ongoing_requests=10 * (settings.max_queue + settings.max_running * fleet.most),
    ).options(ray_actor_options={"num_cpus": 0})
    return gate.bind(replicas.bind(fleet), settings.body_bytes)


def application(given: dict[str, str]) -> serve.Application:
    """The application for `serve run`, from settings by name.

    Settings: model, dtype, replicas (N or LEAST-MOST), cpus, gpus, kv_gib, max_running, max_queue and api_key_file.

    Raises:
        SettingsError: For others.
    """
    from .keys import read_keys

    left = dict(given)
    least, most = replica_range(left.pop("replicas", "1-4"))
    model = left.pop("model", "smollm2")
    limits: dict[str, Any] = {"name": Path(model).name or model, "kv_bytes": quarter_of_memory() // most}
    try:
        limits |= {name: int(left.pop(name)) for name in ("max_running", "max_queue") if name in left}
        if "kv_gib" in left:
            limits["kv_bytes"] = kv_bytes(float(left.pop("kv_gib")), elsewhere=True)
        numbers: dict[str, Any] = {name: float(left.pop(name)) for name in ("cpus", "gpus") if name in left}
    except (ValueError, OverflowError) as error:
        raise SettingsError(f"the application's settings: {error}") from error
    if "api_key_file" in left:
        limits["keys"], limits["defaults"] = read_keys(Path(left.pop("api_key_file")))
    settings, dtype = ServerSettings(**limits), left.pop("dtype", "auto")
    if left:
        raise SettingsError(f"the application has no setting {sorted(left)[0]!r}")
    return fleet_application(Fleet(settings, model, dtype, least, most, **numbers))


def replica_range(text: str) -> tuple[int, int]:
    """Least and most of "2" or "1-4". Raises SettingsError."""
    least, _, most = text.partition("-")
    try:
        return int(least), int(most or least)
    except ValueError:
        raise SettingsError(f"replicas must be N or LEAST-MOST, such as 1-4, not {text!r}") from None


def fleet_of(settings: ServerSettings, model: str, dtype: str, replicas: str, *, shared: bool) -> Fleet:
    """The fleet a command asks for.

    Raises SettingsError.

    Args:
        replicas: As `replica_range` reads them.
        shared: They may all be on one machine, whose memory has to do for them together.
    """
    least, most = replica_range(replicas)
    if shared:
        settings = replace(settings, kv_bytes=settings.kv_bytes // most)
    return Fleet(settings, model, dtype, least, most)


def run(fleet: Fleet, host: str, port: int, on_ready: Any) -> None:
    """Serve a fleet on the Ray cluster at hand, or on one of this machine, until a signal comes."""
    import signal
    import threading

    import ray

    ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level="warning")
    over = threading.Event()
    previous = {kind: signal.signal(kind, lambda *_: over.set()) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        serve.start(http_options={"host": host, "port": port})
        serve.run(fleet_application(replace(fleet, host=host)))
        on_ready(f"http://{host}:{port}")
        over.wait()
    finally:
        serve.shutdown()
        ray.shutdown()
        for kind, handler in previous.items():
            signal.signal(kind, handler)
