"""llama.cpp in a process of its own, through `xllamacpp`, which has its server."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

SERVER = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port, params.n_parallel = sys.argv[1], 0, int(sys.argv[3])
params.n_ctx = 2048 * params.n_parallel
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[2])
params.warmup, params.use_jinja = False, True
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
    """

    def __init__(self, python: str, path: Path, threads: int, texts: int = 1) -> None:
        command = [python, "-c", SERVER, str(path), str(threads), str(texts)]
        quiet, pipe = subprocess.DEVNULL, subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=quiet, text=True)
        assert self._process.stdout is not None
        lines = (line.split() for line in self._process.stdout)
        self._address = next((words[1] for words in lines if words[:1] == ["at"]), None)
        if self._address is None:
            raise RuntimeError(f"llama.cpp does not open {path}: look at what it says when {python} opens it")

    def ask(self, path: str, **body: Any) -> Any:
        """What it answers."""
        assert self._address is not None
        asked = Request(self._address + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urlopen(asked) as answer:
            return json.load(answer)

    def complete(self, tokens: list[int], count: int, **settings: Any) -> Any:
        """The most likely tokens after these."""
        greedy = {"temperature": 0.0, "repeat_penalty": 1.0, "cache_prompt": False}
        return self.ask("/completion", prompt=tokens, n_predict=count, **greedy, **settings)

    def close(self) -> None:
        """End it."""
        self._process.communicate()
