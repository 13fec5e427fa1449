"""Sharing one server between the jobs of a workflow: the first lease starts it, later ones find it, the last lets it go.

A lease is a shared flock (eaglet.locks), so a killed job gives its lease back.  The server is looked after by a daemon
(eaglet.server_daemon), which no job owns: it outlives the job that started it, and ends when nobody has a lease and the linger
is over, the workflow has gone, or somebody else wants the GPUs.  Two sides meet here: `hold`, the Snakemake service of
one dataset, and `attach`, its consumer.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eaglet.digests import sha256
from eaglet.errors import EagletError, ServerError
from eaglet.files import write_json
from eaglet.locks import (
    EXCLUSIVE,
    SHARED,
    Devices,
    LeaseFiles,
    acquire,
    is_held,
    read_json_or_none,
    release,
    workflow_folder,
)
from eaglet.program import WORKFLOW_PID
from eaglet.server_command import SCRIPTS, ServerCommand, Tuning

POLL = 0.2
ENDPOINT_PATIENCE = 15.0  # seconds for another holder of the same endpoint to go away


def hold(
    prepare: Callable[[], ServerCommand], tuning: Tuning, endpoint: Path, log: Path, when_wanted: bool = False
) -> None:
    """Write the endpoint file at once, then keep a lease until this process is ended.  Raises ServerError, ConfigError.

    `prepare` makes the command; it looks for GPUs and packages and may take longer than Snakemake waits for the file.  So
    the file names this holder, and the holder's own file names the server once it is known, or says why there is none.
    With `when_wanted` no server is started before a consumer attaches: a job whose rows are all in the journal needs none.
    """
    folder = workflow_folder()
    holder = folder / f"{sha256(str(endpoint).encode())[:16]}.holder"
    held = _acquire_within(holder, ENDPOINT_PATIENCE)
    if held is None:
        raise ServerError(f"{endpoint}: another serve.py holds this endpoint; end it first")
    try:
        os.ftruncate(held, 0)
        _wanted(holder).unlink(missing_ok=True)
        write_json(endpoint, {"folder": str(folder), "holder": str(holder), "log": str(log)})
        command = prepare()
        files = LeaseFiles(folder, command.fingerprint)
        _tell(held, fingerprint=files.fingerprint)
        while when_wanted and not _wanted(holder).exists():
            time.sleep(POLL)
        lease = _join(files, command, tuning, log)
        say(f"lease on server {files.fingerprint[:16]}, log {log}")
        while is_held(files.server):
            time.sleep(POLL)
        os.close(lease)
        raise _lost(files, log)
    except EagletError as error:
        _tell(held, failure=str(error))
        raise
    finally:
        os.close(held)


def _wanted(holder: Path) -> Path:
    """The file by which a consumer says that it needs the server of a holder."""
    return holder.with_suffix(".wanted")


def _tell(holder: int, **facts: str) -> None:
    """Replace what a holder's file says to its consumer."""
    os.ftruncate(holder, 0)
    os.pwrite(holder, json.dumps({"pid": os.getpid(), **facts}).encode(), 0)


def _join(files: LeaseFiles, command: ServerCommand, tuning: Tuning, log: Path) -> int:
    """Take a lease, and start a daemon if there is none.  Returns the descriptor that is the lease."""
    lease = acquire(files.lease, SHARED)  # waits only while a daemon makes up its mind
    daemon: subprocess.Popen | None = None
    while not is_held(files.server):
        status = daemon.poll() if daemon else 0
        if status:
            raise _lost(files, log)
        if status == 0:  # none yet, or another daemon was faster and has gone again
            daemon = _start_daemon(files, command, tuning, log)
        time.sleep(POLL / 4)
    return lease


def _start_daemon(files: LeaseFiles, command: ServerCommand, tuning: Tuning, log: Path) -> subprocess.Popen:
    log.parent.mkdir(parents=True, exist_ok=True)
    order = {
        "folder": str(files.folder),
        "fingerprint": files.fingerprint,
        "command": asdict(command),
        "tuning": asdict(tuning),
        "log": str(log),
    }
    # Snakemake exports the rule's threads, which are 0 for a service, as thread counts of every library; and the daemon
    # ends with the last workflow that needs it, not with the one that started it.
    environment = {
        name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS") and name != WORKFLOW_PID
    }
    with open(log, "ab") as stream:
        os.fchmod(stream.fileno(), 0o600)  # SGLang writes its key there with its other settings
        daemon = subprocess.Popen(
            [sys.executable, "-m", "eaglet.server_daemon"],
            env={**environment, "PYTHONPATH": str(SCRIPTS)},
            stdin=subprocess.PIPE,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    with daemon.stdin as pipe:
        pipe.write(json.dumps(order).encode())
    return daemon


def _acquire_within(path: Path, seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    while (descriptor := acquire(path, EXCLUSIVE, wait=False)) is None and time.monotonic() < deadline:
        time.sleep(POLL)
    return descriptor


def _lost(files: LeaseFiles, log: Path) -> ServerError:
    failure = read_json_or_none(files.failure)
    return ServerError(
        f"the server is lost: {failure['reason'] if failure else 'its daemon was ended'}; its log is {log}"
    )


@dataclass
class Lease:
    """A consumer's own lease on a running server, so that it is served even if the holder is killed.  Close it."""

    files: LeaseFiles
    log: Path
    descriptor: int
    port: int
    api_key: str | None = field(repr=False)

    def alive(self) -> bool:
        """False once the server has ended and will not come back; during a restart it counts as alive."""
        return is_held(self.files.server)

    def close(self) -> None:
        os.close(self.descriptor)


def attach(endpoint: Path, told: Callable[[str], None]) -> Lease:
    """Wait until the server of an endpoint file is healthy.  `told` is given each new thing that is waited for.

    Raises ServerError when the holder has gone or the server could not be started.
    """
    found = _read_endpoint(endpoint)
    log, holder = Path(found["log"]), Path(found["holder"])
    while (files := _server_of(found)) is None:
        if not is_held(holder):
            named = read_json_or_none(holder) or {}
            raise ServerError(named.get("failure") or f"{endpoint}: its `serve.py hold` was ended; start it again")
        time.sleep(POLL)
    descriptor, last = acquire(files.lease, SHARED), None
    try:
        while (state := current_state(files)) is None or state["phase"] != "ready":
            _wanted(holder).touch()  # each time: a holder that has just begun removes what an earlier one was told
            if not is_held(holder):
                raise _lost(files, log)
            waits = f"{state['phase']}: {state['detail']}" if state else "waits for its daemon"
            if waits != last:
                told(f"server {waits}")
                last = waits
            time.sleep(POLL)
    except BaseException:
        os.close(descriptor)
        raise
    return Lease(files, log, descriptor, state["port"], state["api_key"])


def _read_endpoint(endpoint: Path) -> dict[str, Any]:
    found = read_json_or_none(endpoint)
    if not isinstance(found, dict) or not {"folder", "holder", "log"} <= set(found):
        raise ServerError(f"{endpoint}: not an endpoint file; it is written by `serve.py hold`, which must be running")
    return found


def _server_of(endpoint: Mapping[str, Any]) -> LeaseFiles | None:
    """The files of the server that an endpoint's holder names; None until it does."""
    named = read_json_or_none(Path(endpoint["holder"]))
    if not named or "fingerprint" not in named or not Path(f"/proc/{named['pid']}").exists():
        return None  # what a holder that is gone has left does not count
    return LeaseFiles(Path(endpoint["folder"]), named["fingerprint"])


def current_state(files: LeaseFiles) -> dict[str, Any] | None:
    """What the server's daemon says; None while there is no daemon."""
    state = read_json_or_none(files.state)
    return state if state and is_held(files.server) and Path(f"/proc/{state['pid']}").exists() else None


def state_of_endpoint(endpoint: Path) -> dict[str, Any] | None:
    """For an onlooker that must not keep the server: `current_state` behind an endpoint file."""
    files = _server_of(_read_endpoint(endpoint))
    return current_state(files) if files else None


def become_gpu_job(argv: list[str], devices: Devices, timeout: float) -> None:
    """Wait for the GPUs, then become `argv`, which holds them until it and its children have ended."""
    wanted = devices.want()
    deadline, last = time.monotonic() + timeout, None
    while (claimed := devices.claim(" ".join(argv)[:200])) is None:
        holder = devices.holder()
        if holder != last:
            say(f"waiting: {holder}")
            last = holder
        if time.monotonic() > deadline:
            raise ServerError(
                f"waited {timeout:g} s for the GPUs: {holder}. End that process, or raise server.gpu_timeout"
            )
        time.sleep(POLL)
    release(wanted)
    for descriptor in claimed:
        os.set_inheritable(descriptor, True)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        raise ServerError(f"{argv[0]}: cannot be run ({error.strerror})") from error


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
