"""llama.cpp in a process of its own, through `xllamacpp`, which has its server."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

SERVER = """
import sys, xllamacpp
path, threads, texts, room, kind, draft = sys.argv[1:]
params = xllamacpp.CommonParams()
params.model.path, params.port, params.n_parallel = path, 0, int(texts)
params.n_ctx = int(room) * params.n_parallel
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
params.warmup, params.use_jinja = False, True
if kind:
    params.speculative.types = [getattr(xllamacpp.common_speculative_type, "COMMON_SPECULATIVE_TYPE_" + kind)]
if draft:
    second = params.speculative.draft
    second.mparams.path = draft
    second.cpuparams.n_threads = second.cpuparams_batch.n_threads = int(threads)
server = xllamacpp.Server(params)
print("at", server.listening_address, flush=True)
sys.stdin.read()
"""


class LlamaCppServer:
    """A server with one model.

    Args:
        python: An interpreter that has `xllamacpp`.
        path: A GGUF file.
        threads: How many it uses.
        texts: How many it decodes together.
        room: Tokens of context per text.
        kind: Of its speculative decoding, as llama.cpp names them, such as "NGRAM_SIMPLE"; "" for none.
        draft: The file of a draft model.

    Raises:
        RuntimeError: llama.cpp cannot open the file.
    """

    def __init__(
        self,
        python: str,
        path: Path,
        threads: int,
        texts: int = 1,
        room: int = 2048,
        kind: str = "",
        draft: Path | None = None,
    ) -> None:
        settings = [str(path), str(threads), str(texts), str(room), kind, str(draft or "")]
        quiet, pipe = subprocess.DEVNULL, subprocess.PIPE
        command = [python, "-c", SERVER, *settings]
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=quiet, text=True)
        assert self._process.stdout is not None
        lines = (line.split() for line in self._process.stdout)
        self._address = next((words[1] for words in lines if words[:1] == ["at"]), None)
        if self._address is None:
            self.close()
            raise RuntimeError(f"llama.cpp does not open {path}: look at what it says when {python} opens it")

    def _answer(self, path: str, body: dict[str, Any]) -> Any:
        """The answer to a request, open for reading."""
        assert self._address is not None
        request = Request(self._address + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            return urlopen(request)
        except HTTPError as error:
            raise RuntimeError(f"llama.cpp refuses the request: {error.read().decode()}") from error

    def ask(self, path: str, **body: Any) -> Any:
        """The whole answer to a request.

        Raises:
            RuntimeError: llama.cpp refuses it.
        """
        with self._answer(path, body) as answer:
            return json.load(answer)

    def complete(self, tokens: list[int], count: int, **settings: Any) -> Any:
        """What follows these tokens, the most likely ones unless `settings` say otherwise."""
        return self.ask("/completion", **_body(tokens, count, {"temperature": 0.0, **settings}))

    def stream(self, tokens: list[int], count: int, **settings: Any) -> Iterator[dict[str, Any]]:
        """The events of a text as they come: `tokens`, and `timings` with all tokens so far, drafted and accepted ones.

        Raises:
            RuntimeError: llama.cpp refuses the request, or fails at it.
        """
        settings |= {"stream": True, "return_tokens": True, "timings_per_token": True}
        with self._answer("/completion", _body(tokens, count, settings)) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise RuntimeError(f"llama.cpp failed: {event['error']}")
                    yield event

    @property
    def process(self) -> int:
        """Its process id."""
        return self._process.pid

    def close(self) -> None:
        """End it."""
        self._process.communicate()


def _body(tokens: list[int], count: int, settings: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": tokens, "n_predict": count, "repeat_penalty": 1.0, "cache_prompt": False, **settings}
