"""A server of the OpenAI protocol that answers as it is told, over a real socket."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]


@contextmanager
def scripted(
    *replies: Reply,
    models: tuple[str, ...] = ("m",),
    probed: Callable[[dict[str, Any]], dict[str, Any]] = lambda body: {},
    accepts: Callable[[dict[str, Any]], bool] = lambda body: True,
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that answers the probes, and then each chat as it is told; what it was asked.

    probed: what an answer to a probe says beside its choice.
    accepts: whether it takes the fields of a probe.
    """
    left, asked, lock = list(replies), list[dict[str, Any]](), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *said: Any) -> None:
            pass

        def do_GET(self) -> None:
            say(self, 200, {"data": [{"id": model} for model in models]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if not body.get("stream"):
                known = "messages" in body and "logprobs" not in body and accepts(body)
                say(self, 200 if known else 400, {"choices": [{}], **(probed(body) if known else {})})
                return
            with lock:
                asked.append(body)
                reply = left.pop(0)
            reply(self, body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def say(handler: BaseHTTPRequestHandler, status: int, body: Any, **headers: str) -> None:
    data = json.dumps(body).encode()
    handler.send_response(status)
    for name, value in {"content-length": str(len(data)), **headers}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(data)


def stream(*texts: str, whole: bool = True, last: str = "") -> Reply:
    """A stream of pieces, which ends in the middle unless it is whole; last: what is sent in place of an end."""

    def reply(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        handler.send_response(200)
        handler.end_headers()
        for text in texts:
            handler.wfile.write(f"data: {json.dumps({'choices': [{'delta': {'content': text}}]})}\n\n".encode())
        if last:
            handler.wfile.write(last.encode())
        elif whole:
            handler.wfile.write(b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n')

    return reply
