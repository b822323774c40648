"""The process of a `WorkerPool`: a question per line of standard input, an answer per line of its output.

It is run as a file and imports nothing but the standard library, and what the file does that it is given.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import os
import signal
import sys

_GRACE = 1.0
"""Seconds that the other process has to end this one before it does so itself."""


def main() -> None:
    file, memory, *arguments = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What code that is imported prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (int(memory), int(memory)))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, ValueError, OSError):
        pass  # Windows and macOS have no such limit: there the other process looks.
    spec = importlib.util.spec_from_file_location("work", file)
    assert spec is not None and spec.loader is not None
    work = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(work)
    answer = work.begin(*arguments)
    answers.write(b"{}\n")
    answers.flush()
    for line in sys.stdin.buffer:
        try:
            question, seconds = json.loads(line)
            # Should whoever asks be gone by then: a thread without Python, which no long operation holds up.
            faulthandler.dump_traceback_later(seconds + _GRACE, exit=True)
            reply = json.dumps({"answer": answer(question)}).encode()
            faulthandler.cancel_dump_traceback_later()
        except MemoryError:
            answers.write(b"{}\n")
            answers.flush()
            # What is left of this memory is no place for the next question.
            return
        answers.write(reply + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
