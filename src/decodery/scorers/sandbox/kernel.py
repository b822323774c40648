"""What the process of generated programs gives up for good, as far as the kernel it runs on takes it away.

Every measure is tried and none is relied upon: `probe` tells what holds in the end. Nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import struct
import sys
from typing import Any

_NEW_MOUNTS, _NEW_IPC, _NEW_USER, _NEW_NET = 0x20000, 0x8000000, 0x10000000, 0x40000000
_PRIVATE = 0x4000 | (1 << 18)
"""Changes of mounts, below as well, are not passed on."""
_PLAIN = 0x2 | 0x4 | 0x8
"""A mount without set-user-id bits, devices and programs."""
_SET_DUMPABLE, _SET_FILTER, _SET_NO_NEW_PRIVILEGES = 4, 22, 38
_OWN_USERS, _MOST_USERS = 61184, 4336
"""The range that systemd keeps for users who come and go."""
_MOST_FILES = 4096

_LANDLOCK = 444
"""System calls: create a set of rules, then add one to it, then take it on. As all from here on, with the same number
on every architecture."""
_MOUNT_SETATTR = 442
_READ = 0b1100
"""Landlock's rights to read files and folders."""
_WRITE = 0b10
_SPECIAL = 0b1 | 1 << 6 | 1 << 11
"""Its rights to execute, and to make devices, which no program is given."""
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""How many kinds of access there are, by version."""
_READABLE = (
    *("/usr", "/lib", "/lib64", "/nix/store", "/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/zero"),
    *("/dev/urandom", "/dev/random", "/proc/cpuinfo", "/proc/meminfo"),
)


def confine(folder: str, limits: dict[str, int], most_bytes: int) -> None:
    """Give up what can be given up, and go to `folder`, to which most_bytes may be written in all.

    Afterwards nothing of this is to be called: it is for a process's beginning.

    Args:
        limits: By name, those of `resource`.
    """
    fewest = dict(limits)
    if sys.platform == "linux":
        # Loaded here and bound to no name, so that programs do not find it.
        libc = ctypes.CDLL(None, use_errno=True)
        _part(libc, folder, most_bytes)
        libc.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        _restrict_files(libc, folder)
        _restrict_rights(libc)
        if _filter_calls(libc):
            # Threads may be had, which this would count among the processes.
            fewest.pop("RLIMIT_NPROC", None)
    for name, most in fewest.items():
        kind = getattr(resource, name, None)
        if kind is not None:
            resource.setrlimit(kind, (most, most))


def _part(libc: Any, folder: str, most_bytes: int) -> None:
    """Leave root, and the mounts, the network and the shared memory of others."""
    was_root = os.geteuid() == 0
    own = _own_user(folder) if was_root else os.getuid()
    group = own if was_root and own else os.getgid()
    spaces = _NEW_MOUNTS | _NEW_NET | _NEW_IPC
    parted = was_root and libc.unshare(spaces) == 0
    if parted:
        _mount(libc, folder, most_bytes, own, group)
    if was_root and own:
        os.setresgid(own, own, own)
        os.setresuid(own, own, own)
    if not parted:
        # One's own /proc is needed, which those who changed their user are refused.
        libc.prctl(_SET_DUMPABLE, 1, 0, 0, 0)
        if libc.unshare(spaces | _NEW_USER) == 0:
            _write("/proc/self/setgroups", "deny")
            _write("/proc/self/uid_map", f"{own} {own} 1")
            _write("/proc/self/gid_map", f"{group} {group} 1")
            _mount(libc, folder, most_bytes, own, group)


def _own_user(folder: str) -> int:
    """The number of a user of its own, who then owns `folder`; 0 where none could read Python and get there."""
    own, before = _OWN_USERS + os.getpid() % _MOST_USERS, (os.getegid(), os.geteuid())
    try:
        os.setgroups([])
        os.chown(folder, own, own)
        os.setegid(own)
        os.seteuid(own)
        os.listdir(os.path.dirname(os.__file__))
        os.listdir(folder)
    except OSError:
        own = 0
    for now, change, was in ((os.geteuid(), os.seteuid, before[1]), (os.getegid(), os.setegid, before[0])):
        if now != was:
            change(was)
    if not own:
        with contextlib.suppress(OSError):
            os.chown(folder, 0, 0)
    return own


def _mount(libc: Any, folder: str, most_bytes: int, user: int, group: int) -> None:
    """Make `folder` a place in memory that is gone with the process, and all else that is mounted read-only."""
    path = os.fsencode(folder)
    options = f"size={most_bytes},nr_inodes={_MOST_FILES},mode=0700,uid={user},gid={group}"
    libc.mount(None, b"/", None, _PRIVATE, None)
    if libc.mount(b"decodery", path, b"tmpfs", _PLAIN, options.encode()) == 0:
        size = ctypes.c_size_t(32)
        # Read-only is set of all, and then taken from this one.
        libc.syscall(_MOUNT_SETATTR, -100, b"/", 0x8000, struct.pack("QQQQ", 1, 0, 0, 0), size)
        libc.syscall(_MOUNT_SETATTR, -100, path, 0, struct.pack("QQQQ", 0, 1, 0, 0), size)
        os.chdir(folder)


def _restrict_files(libc: Any, folder: str) -> None:
    """By Landlock: write in `folder`, read there and what Python consists of, nothing else."""
    version = libc.syscall(_LANDLOCK, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return
    rights = (1 << _RIGHTS.get(version, 16)) - 1
    # The network's from version 4 on; signals and abstract sockets of others from 6 on.
    handled = struct.pack("QQQ", rights, 0b11, 0b11)[: 8 if version < 4 else 16 if version < 6 else 24]
    rules = libc.syscall(_LANDLOCK, handled, ctypes.c_size_t(len(handled)), 0)
    if rules < 0:
        return
    allowed = dict.fromkeys((*_READABLE, os.path.dirname(os.__file__), sys.base_prefix, sys.base_exec_prefix), _READ)
    allowed.pop("/", None)
    allowed |= {"/dev/null": _READ | _WRITE, folder: rights & ~_SPECIAL}
    for path, access in allowed.items():
        with contextlib.suppress(OSError):
            place = os.open(path, os.O_PATH)
            of_files = access if os.path.isdir(path) else access & ~0b1000
            libc.syscall(_LANDLOCK + 1, rules, 1, struct.pack("=Qi", of_files, place), 0)
            os.close(place)
    libc.syscall(_LANDLOCK + 2, rules, 0)
    os.close(rules)


def _restrict_rights(libc: Any) -> None:
    """Drop all capabilities, and let no process look into this one, itself included."""
    libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24))
    libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)


def _write(path: str, text: str) -> None:
    with contextlib.suppress(OSError), open(path, "w") as file:
        file.write(text)


_REFUSED = {
    # Further processes and programs.
    **{"fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281)},
    # Others' network, memory, priorities; clone and socketpair are looked at below.
    **{"socket": (41, 198), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271)},
    **{"pidfd_send_signal": (424, 424), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "kcmp": (312, 272)},
    **{"process_madvise": (440, 440), "setpriority": (141, 140), "ioprio_set": (251, 30)},
    **{"migrate_pages": (256, 238), "move_pages": (279, 239)},
    # What outlives the process.
    **{"shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180)},
    **{"add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219)},
    # What leads around all of this.
    **{"unshare": (272, 97), "setns": (308, 268), "io_uring_setup": (425, 425), "bpf": (321, 280)},
    **{"perf_event_open": (298, 241), "userfaultfd": (323, 282)},
}
"""System calls that fail, with their numbers on x86-64 and on 64-bit ARM; None where there is no such call."""
_OF_ITSELF = {
    **{"kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138)},
    **{"rt_tgsigqueueinfo": (297, 240), "prlimit64": (302, 261), "sched_setaffinity": (203, 122)},
    **{"sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274)},
}
"""System calls whose first argument is a process: 0 or the own one."""
_CLONE, _SOCKETPAIR, _CLONE3 = (56, 220), (53, 199), 435
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_THREAD = 0x10000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
"""Operations of classic BPF."""
_ALLOW, _NOT_PERMITTED, _NOT_THERE = 0x7FFF0000, 0x50001, 0x50026
_FIRST, _SECOND = 16, 24
"""Where the lower halves of a call's arguments lie; its number is at 0, the architecture at 4."""


def _filter_calls(libc: Any) -> bool:
    """By seccomp, for this process and all its threads: whether the kernel took the filter."""
    machine = platform.machine()
    if machine not in _ARCHITECTURES or sys.maxsize < 1 << 32:
        return False
    column, architecture = _ARCHITECTURES[machine]
    code = _filter(column, architecture, os.getpid())
    instructions = b"".join(struct.pack("HBBI", *each) for each in code)
    held = ctypes.create_string_buffer(instructions, len(instructions))
    program = struct.pack("H6xQ", len(code), ctypes.addressof(held))
    return bool(libc.prctl(_SET_FILTER, 2, program, 0, 0) == 0)


def _filter(column: int, architecture: int, process: int) -> list[tuple[int, int, int, int]]:
    """Instructions (operation, steps on if true, steps on if false, number)."""

    def when(number: int, *then: tuple[int, int, int, int]) -> list[tuple[int, int, int, int]]:
        return [(_EQUAL, 0, len(then), number), *then]

    refuse, allow = (_RETURN, 0, 0, _NOT_PERMITTED), (_RETURN, 0, 0, _ALLOW)
    code = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), refuse, (_LOAD, 0, 0, 0)]
    # Numbers from here on are those of another interface of x86-64, or none.
    code += [(_AT_LEAST, 0, 1, 0x40000000), refuse]
    for numbers in _REFUSED.values():
        if (number := numbers[column]) is not None:
            code += when(number, refuse)
    # Threads of this process only. The newer call hides its flags in memory; without it the older one is made.
    code += when(_CLONE3, (_RETURN, 0, 0, _NOT_THERE))
    code += when(_CLONE[column], (_LOAD, 0, 0, _FIRST), (_ANY_BIT, 1, 0, _THREAD), refuse, allow)
    # Pipes of two ends, as event loops use them: connected from the start, so that they lead nowhere else.
    code += when(
        _SOCKETPAIR[column],
        *((_LOAD, 0, 0, _FIRST), (_EQUAL, 1, 0, 1), refuse),
        *((_LOAD, 0, 0, _SECOND), (_AND, 0, 0, 0xF), (_EQUAL, 1, 0, 1), refuse, allow),
    )
    for numbers in _OF_ITSELF.values():
        code += when(numbers[column], (_LOAD, 0, 0, _FIRST), (_EQUAL, 2, 0, 0), (_EQUAL, 1, 0, process), refuse, allow)
    return [*code, allow]
