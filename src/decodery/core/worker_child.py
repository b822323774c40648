"""The process behind a `Worker`: a question per line of standard input, an answer per line of what was its output.

It is run as a file with the job's file, the bytes of address space it may take, and the job's arguments.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys


def main() -> None:
    # What is imported or looked at may print: that must not get between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    job, memory, arguments = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    except (ImportError, ValueError, OSError):
        pass  # Windows and macOS have no such limit.
    spec = importlib.util.spec_from_file_location("job", job)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.start(*arguments)
    answers.write(b"{}\n")
    answers.flush()
    for line in sys.stdin.buffer:
        answers.write(json.dumps(module.answer(json.loads(line))).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    # Who presses Ctrl-C means the process that asks, which then ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main()
