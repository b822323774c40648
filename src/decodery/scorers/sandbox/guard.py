"""What Python refuses by itself: a guard against accidents, with errors that say what it was about.

Who means to gets around it; what holds against that is in `kernel`. Nothing but the standard library.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

_DENIED = (
    *("socket.", "subprocess.", "ctypes.", "os.system", "os.exec", "os.spawn", "os.posix_spawn", "os.fork", "os.kill"),
    *("signal.pthread_kill", "pty.", "webbrowser.", "urllib.Request", "ftplib.", "http.client", "smtplib."),
    *("sqlite3.enable_load_extension", "sqlite3.load_extension", "resource.prlimit", "sys.addaudithook"),
    *("gc.get_", "sys._current_", "sys.monitoring."),
)
"""Audit events, by how they begin, that end in an error. The last three reveal what runs the program."""
_WRITING = {
    **{"os.remove": (0, 1), "os.rmdir": (0, 1), "os.mkdir": (0, 2), "os.truncate": (0, None), "os.utime": (0, 3)},
    **{"os.chmod": (0, 2), "os.chown": (0, 3), "os.chflags": (0, None), "os.symlink": (1, 2), "os.link": (1, 3)},
    **{"os.setxattr": (0, None), "os.removexattr": (0, None)},
}
"""Audit events that change files: where their arguments name the file, and the folder that a name starts from.
They are allowed in the program's own folder."""
_LOCAL = 1
"""The family of sockets that event loops wake themselves up with."""


def guard(folder: str) -> None:
    """Refuse from now on what programs under test do not need, such as writing outside of `folder`."""
    real = os.path.realpath

    def inside(path: Any, start: Any = None) -> bool:
        if isinstance(path, int):
            return True
        text = os.fsdecode(path)
        if isinstance(start, int) and start >= 0:
            try:
                text = os.path.join(os.readlink(f"/proc/self/fd/{start}"), text)
            except OSError:
                # Nothing tells what the folder is, except where there is no need to know.
                return os.path.basename(text) == text
        return (real(text) + "/").startswith(folder + "/")

    def written(event: str, arguments: tuple[Any, ...]) -> list[tuple[Any, Any]]:
        """Each file that is about to change, with the folder its name starts from."""
        if event == "open":
            path, _, flags = arguments
            changes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
            return [(path, None)] if flags & changes else []
        if event == "os.rename":
            return [(arguments[0], arguments[2]), (arguments[1], arguments[3])]
        if event == "sqlite3.connect":
            (database,) = arguments
            return [] if database in (":memory:", "", b":memory:", b"") else [(database, None)]
        if event in _WRITING:
            at, start = _WRITING[event]
            return [(arguments[at], None if start is None else arguments[start])]
        return []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "socket.__new__" and arguments[1] == _LOCAL:
            return
        if event.startswith(_DENIED):
            raise PermissionError(f"{event} is not allowed in the sandbox")
        for path, start in written(event, arguments):
            if not inside(path, start):
                raise PermissionError(f"the sandbox lets programs write in their own folder only, not {path!r}")

    _hide()
    sys.addaudithook(hook)


def _hide() -> None:
    """Take away what no audit event tells of."""
    for name in [each for each in sys.modules if each.partition(".")[0] in ("ctypes", "_ctypes", "kernel", "guard")]:
        del sys.modules[name]
    sys.modules["_ctypes"] = None  # type: ignore[assignment]

    def refused(*_: Any) -> NoReturn:
        raise PermissionError("processes are not allowed in the sandbox")

    import _posixsubprocess

    _posixsubprocess.fork_exec = refused
