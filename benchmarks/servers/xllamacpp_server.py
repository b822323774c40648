"""llama.cpp's own HTTP server, from xllamacpp's wheels, which need no compiler.

    python xllamacpp_server.py MODEL.gguf PORT CONTEXT SLOTS THREADS

Runs in an environment of its own, with xllamacpp; knows nothing of this project.
"""

from __future__ import annotations

import sys
import threading

import xllamacpp


def main() -> None:
    model, port, context, slots, threads = sys.argv[1], *map(int, sys.argv[2:])
    params = xllamacpp.CommonParams()
    params.model.path, params.port, params.warmup = model, port, True
    # The slots share the context.
    params.n_parallel, params.n_ctx, params.kv_unified = slots, context, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)
    print(f"listening at {server.listening_address}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
