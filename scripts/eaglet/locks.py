"""Claims on things of this machine, held by flock: the kernel drops a claim when its last holder ends, however that is.

The lock files lie in one folder per user, /tmp/eaglet-{uid}: /tmp is local to the node, where flock is exact, and outlives
a login, which $XDG_RUNTIME_DIR does not.  The files are never removed while in use: whoever opened the removed
file and whoever made a new one would both hold "the" lock.

    device-{name}            exclusively by the server on that GPU, or by another GPU job; who it is stands inside
    device-{name}.wanted     shared by those who wait for it: cancels an idle server's linger
    {workflow}/              the hash of the working directory
      workflow               shared by Snakemake while it lives: permits the linger
      {fingerprint}.lease    shared by whoever needs that server; exclusively by a daemon that decides to stop it
      {fingerprint}.server   exclusively by the daemon of that server
      {holder}.holder        exclusively by one `serve.py hold`: tells its consumer that it is there
"""

import fcntl
import json
import os
import stat
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from eaglet.digests import sha256
from eaglet.errors import ServerError

SHARED, EXCLUSIVE = fcntl.LOCK_SH, fcntl.LOCK_EX


def acquire(path: Path, how: int, *, wait: bool = True) -> int | None:
    """A descriptor that holds the lock until it is closed; None if it is not to be had and `wait` is false."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, how if wait else how | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def is_held(path: Path, *, shared: bool = False) -> bool:
    """Whether anybody holds the lock exclusively; with `shared`, whether anybody holds it at all."""
    descriptor = acquire(path, EXCLUSIVE if shared else SHARED, wait=False)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None


def directory() -> Path:
    """The user's folder of locks; $EAGLET_LOCKS overrides it.  Raises ServerError when others could write to it."""
    path = Path(os.environ.get("EAGLET_LOCKS") or f"/tmp/eaglet-{os.getuid()}")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if path.is_symlink() or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ServerError(
            f"{path}: the folder of locks must belong to you alone (owner {found.st_uid}, mode "
            f"{stat.S_IMODE(found.st_mode):o} found); remove it, or name another with EAGLET_LOCKS"
        )
    return path


def workflow_folder() -> Path:
    """The locks of the workflow in the current working directory."""
    path = directory() / sha256(os.getcwd().encode())[:12]
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def workflow_alive() -> int:
    """For the Snakefile: keep what this returns; servers may linger for as long as it is held."""
    return acquire(workflow_folder() / "workflow", SHARED)


@dataclass(frozen=True)
class LeaseFiles:
    """The files of one server, named by its fingerprint."""

    folder: Path
    fingerprint: str

    def _file(self, suffix: str) -> Path:
        return self.folder / f"{self.fingerprint[:16]}.{suffix}"

    @cached_property
    def lease(self) -> Path:
        return self._file("lease")

    @cached_property
    def server(self) -> Path:
        return self._file("server")

    @cached_property
    def state(self) -> Path:
        """JSON by the daemon: phase, port, api_key, …; counts only while `server` is held and its process lives."""
        return self._file("state.json")

    @cached_property
    def failure(self) -> Path:
        """JSON by the daemon: why it gave up."""
        return self._file("failure.json")

    @cached_property
    def workflow(self) -> Path:
        return self.folder / "workflow"


@dataclass(frozen=True)
class Devices:
    """The GPUs that a job uses; claimed all at once or not at all, so that two jobs cannot each hold half."""

    names: tuple[str, ...]

    def _path(self, name: str) -> Path:
        return directory() / f"device-{name}"

    def want(self) -> list[int]:
        """Announce that somebody waits; close the descriptors to take it back."""
        return [acquire(Path(f"{self._path(name)}.wanted"), SHARED) for name in self.names]

    def wanted(self) -> bool:
        """Whether somebody waits for one of them."""
        return any(is_held(Path(f"{self._path(name)}.wanted"), shared=True) for name in self.names)

    def claim(self, what: str) -> list[int] | None:
        """Descriptors that hold all of them, with `what` told to whoever asks; None if one is taken."""
        claimed: list[int] = []
        for name in self.names:
            descriptor = acquire(self._path(name), EXCLUSIVE, wait=False)
            if descriptor is None:
                release(claimed)
                return None
            claimed.append(descriptor)
        told = {
            "pid": os.getpid(),
            "what": what,
            "folder": os.getcwd(),
            "since": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}",
        }
        for descriptor in claimed:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(told).encode(), 0)
        return claimed

    def holder(self) -> str:
        """Who holds the first one that is taken, for messages."""
        for name in self.names:
            if is_held(self._path(name)):
                found = read_json_or_none(self._path(name))
                if not found:
                    return f"GPU {name} is held by another process"
                return (
                    f"GPU {name} is held by process {found['pid']} ({found['what']}, in {found['folder']}, "
                    f"since {found['since']} UTC)"
                )
        return "the GPUs are free"


def release(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def read_json_or_none(path: Path) -> Any:
    """What a file that another process may be writing holds; None while it is absent or torn."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_private(path: Path, text: str) -> None:
    """Replace a file by one that only this user can read."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)
    os.replace(temporary, path)
