"""Ending every process of a server, whatever became of those who looked after it (Linux).

Three layers, since each process can be killed outright: the guardian ends the server when its parent goes (end of file
on a pipe); the server is sent SIGKILL by the kernel when the guardian goes; and both daemon and guardian are "subreapers",
so that processes orphaned below them become their children and can be ended too.  What is left after both were killed
carries a mark in its environment, by which the next daemon finds it.
"""

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from eaglet.locks import is_held

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
MARK = "EAGLET_SERVER"  # in a server's environment: the lock that its daemon and guardian hold while they live
POLL = 0.05


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


def become_subreaper() -> None:
    """Orphans among this process's descendants become its children."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """For a fork before exec: SIGKILL when the parent thread ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_children(grace: float) -> None:
    """SIGTERM to every child, SIGKILL to those left after `grace` seconds; returns when there are none.

    SIGTERM goes to the children only, not to their groups: a server that shuts its workers down itself takes a signalled
    worker for a crash.  Grandchildren that a child leaves behind become children, and follow.
    """
    asked: set[int] = set()
    deadline = time.monotonic() + grace
    while _reap():
        for pid in _children():
            late = time.monotonic() > deadline
            if late or pid not in asked:
                _signal(pid, signal.SIGKILL if late else signal.SIGTERM)
                asked.add(pid)
        time.sleep(POLL)


def _reap() -> bool:
    """Collect children that have ended; whether there are others."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _children() -> list[int]:
    me = os.getpid()
    return [int(pid) for task in Path(f"/proc/{me}/task").iterdir() for pid in (task / "children").read_text().split()]


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it ended by itself meanwhile


def end_strays(root: Path) -> list[int]:
    """SIGKILL servers whose daemon and guardian are both gone; returns their process ids.  `root`: the folder of locks."""
    strays = [pid for pid, lock in _marked(root) if not lock.exists() or not is_held(lock)]
    for pid in strays:
        _signal(pid, signal.SIGKILL)
    return strays


def _marked(root: Path) -> Iterator[tuple[int, Path]]:
    """(process id, lock named in its mark) of this user's marked processes."""
    prefix = f"{MARK}={root}/".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # another user's, or gone meanwhile
            continue
        for variable in variables:
            if variable.startswith(prefix):
                yield int(entry.name), Path(os.fsdecode(variable.split(b"=", 1)[1]))
