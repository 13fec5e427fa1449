"""The daemon that looks after one server: waits for its GPUs, starts it, watches it, starts it again, ends it.

Run by eaglet.lease as `python -m eaglet.server_daemon` with its order as JSON on standard input; standard output is the
server's log.  It belongs to no job.  Its claims are flocks, so whatever kills it lets everything go, and its guardian ends the
server then.  Exit status 0: it ended because it was not needed; 1: the server failed, and why is in the failure file.
"""

import json
import os
import random
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from eaglet.files import write_json
from eaglet.locks import EXCLUSIVE, Devices, LeaseFiles, acquire, directory, is_held, release, write_private
from eaglet.processes import MARK, become_subreaper, end_children, end_strays
from eaglet.server_command import KEY_VARIABLE, ServerCommand, Tuning

POLL = 0.2
STRAY_SECONDS = 5.0  # between searches for servers that nobody looks after, while their GPUs are wanted
HEALTH_TIMEOUT = 30.0  # /health generates a token, and is slow under load
HEALTH_PAUSE_STARTING, HEALTH_PAUSE_READY = 0.25, 5.0
STEADY = 600.0  # seconds of health after which a crash is a new one, with all restarts left
TAIL_LINES, TAIL_BYTES = 8, 8192
PORTS = range(20000, 30000)  # below the ephemeral range, so no client takes the port between two starts


class Failed(Exception):
    """The server cannot be had; the message is for people."""


class HealthProbe(threading.Thread):
    """Asks /health in a thread of its own, since an answer can take long.  `last_good`: monotonic seconds, or None."""

    def __init__(self, port: int):
        super().__init__(name="health probe", daemon=True)
        self.url = f"http://127.0.0.1:{port}/health"
        self.last_good: float | None = None
        self.closed = threading.Event()

    def run(self) -> None:
        while not self.closed.is_set():
            with suppress(OSError, URLError, ValueError), urlopen(self.url, timeout=HEALTH_TIMEOUT) as reply:
                if reply.status == 200 and not self.closed.is_set():
                    self.last_good = time.monotonic()
            self.closed.wait(HEALTH_PAUSE_READY if self.last_good else HEALTH_PAUSE_STARTING)


class Daemon:
    """One server's life.  `server_lock` is the daemon's claim to be its only daemon."""

    def __init__(self, files: LeaseFiles, command: ServerCommand, tuning: Tuning, log: Path, server_lock: int):
        self.files, self.command, self.tuning, self.log = files, command, tuning, log
        self.server_lock: int | None = server_lock
        self.devices = Devices(command.devices)
        self.claimed: list[int] = []
        self.terminated = False
        self.guardian: subprocess.Popen | None = None
        self.probe: HealthProbe | None = None
        self.started_at = 0.0
        self.log_start = log.stat().st_size if log.exists() else 0
        self.port = free_port()
        self.api_key = secrets.token_urlsafe(24)
        nonce = secrets.token_hex(4)
        self.alive_path = files.folder / f"{files.fingerprint[:16]}.{nonce}.alive"
        self.alive_lock = acquire(self.alive_path, EXCLUSIVE)
        self.key_path = files.folder / f"{files.fingerprint[:16]}.{nonce}.yaml"
        self.directory_lock = os.open(directory(), os.O_RDONLY | os.O_CLOEXEC)

    def run(self) -> int:
        """Returns the exit status."""
        signal.signal(signal.SIGTERM, self._terminate)
        become_subreaper()
        self.files.failure.unlink(missing_ok=True)
        failure = None
        try:
            if self._wait_for_devices():
                self._serve()
        except Failed as error:
            failure = str(error)
            say(f"FAILED: {failure}")
            write_json(
                self.files.failure, {"reason": failure, "log": str(self.log), "at": f"{datetime.now(UTC):%F %T}"}
            )
        self._let_go()
        self._end_server()
        release(self.claimed)
        self.key_path.unlink(missing_ok=True)
        self.alive_path.unlink(missing_ok=True)
        say("gone")
        return 1 if failure else 0

    def _terminate(self, *_: object) -> None:
        self.terminated = True

    def _publish(self, phase: str, detail: str) -> None:
        """Tell consumers where the server is; they believe it while this daemon holds the server lock."""
        state = {
            "pid": os.getpid(),
            "phase": phase,
            "detail": detail,
            "port": self.port,
            "api_key": self.api_key if self.command.takes_key else None,
            "log": str(self.log),
        }
        write_private(self.files.state, json.dumps(state))

    # ---- the GPUs ----------------------------------------------------------------------------------------------------

    def _wait_for_devices(self) -> bool:
        """Claim the GPUs; False if nobody needs the server any more.  Raises Failed after `gpu_timeout`."""
        for pid in end_strays(directory()):
            say(f"ended process {pid}, left over by a server whose daemon was killed")
        wanted = self.devices.want()
        began = searched = time.monotonic()
        last = None
        try:
            while (claimed := self.devices.claim(f"server {self.files.fingerprint[:16]}")) is None:
                holder = self.devices.holder()
                if holder != last:
                    say(f"waiting: {holder}")
                    self._publish("waiting", holder)
                    last = holder
                now = time.monotonic()
                if self.terminated:
                    raise Failed("its daemon was told to stop")
                if now - began > self.tuning.gpu_timeout:
                    raise Failed(
                        f"waited {self.tuning.gpu_timeout:g} s for the GPUs: {holder}. End that process, choose other GPUs "
                        "with CUDA_VISIBLE_DEVICES, or raise server.gpu_timeout"
                    )
                if not is_held(self.files.lease, shared=True):
                    return False
                if now - searched > STRAY_SECONDS:
                    end_strays(directory())
                    searched = now
                time.sleep(POLL)
        finally:
            release(wanted)
        self.claimed = claimed
        return True

    # ---- the server --------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Start the server and look after it until it is not needed.  Raises Failed."""
        restarts_left, ready = self.tuning.restarts, False
        self._start("starting")
        idle_since: float | None = None
        while True:
            select.select([self.guardian_ended], [], [], POLL)
            now = time.monotonic()
            trouble = self._trouble(now)
            if trouble:
                if now - self.started_at > STEADY:
                    restarts_left = self.tuning.restarts
                if not ready or not restarts_left:
                    spent = f", after {self.tuning.restarts} restarts" if ready else ""
                    raise Failed(f"{trouble}{spent}{self._log_tail()}")
                restarts_left -= 1
                say(f"{trouble}; starting it again on port {self.port}, {restarts_left} restarts left")
                self._end_server()
                self._start("restarting")
            elif self.probe.last_good and self.phase != "ready":
                ready = True
                say(f"ready after {now - self.started_at:.1f} s on port {self.port}")
                self._set_phase("ready", "")
            if self.terminated:
                raise Failed("its daemon was told to stop")
            lease = acquire(self.files.lease, EXCLUSIVE, wait=False)
            if lease is None:
                idle_since = None
                continue
            # No lease, and none can come while this one is held: the place to decide.
            idle_since = idle_since or now
            reason = self._why_stop(now - idle_since)
            if reason:
                say(f"stopping: {reason}")
                self._let_go()
                os.close(lease)
                return
            os.close(lease)

    def _why_stop(self, idle: float) -> str | None:
        if self.devices.wanted():
            return "the GPUs are wanted"
        if not is_held(self.files.workflow, shared=True):
            return "the workflow has gone"
        return "not needed any more" if idle > self.tuning.linger else None

    def _trouble(self, now: float) -> str | None:
        """What is wrong with the server: it ended, never became healthy, or answers no more."""
        status = self.guardian.poll()
        if status is not None:
            return f"the server ended with status {status}"
        good = self.probe.last_good
        if good is None and now - self.started_at > self.tuning.start_timeout:
            return f"the server was not healthy within {self.tuning.start_timeout:g} s"
        if good is not None and now - good > self.tuning.hang_timeout:
            return f"the server has not answered /health for {self.tuning.hang_timeout:g} s"
        return None

    def _set_phase(self, phase: str, detail: str) -> None:
        self.phase = phase
        self._publish(phase, detail)

    def _start(self, phase: str) -> None:
        say(f"{phase} on port {self.port}:\n{self.command.told()}")
        write_private(self.key_path, json.dumps({"api-key": self.api_key}) + "\n")  # JSON is YAML
        order = {
            "argv": self.command.started(self.port, self.key_path),
            "environment": {
                **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
                KEY_VARIABLE: self.api_key,
                **self.command.environment,
                MARK: str(self.alive_path),
            },
            "descriptors": self.claimed,
            "grace": self.tuning.stop_timeout,
        }
        self.guardian = subprocess.Popen(
            [sys.executable, "-m", "eaglet.guardian"],
            stdin=subprocess.PIPE,
            start_new_session=True,
            pass_fds=[*self.claimed, self.alive_lock],
        )
        self.guardian.stdin.write(json.dumps(order).encode() + b"\n")
        self.guardian.stdin.flush()
        self.guardian_ended = os.pidfd_open(self.guardian.pid)
        self.started_at = time.monotonic()
        self.probe = HealthProbe(self.port)
        self.probe.start()
        self._set_phase(phase, f"see {self.log}")

    def _end_server(self) -> None:
        """Returns when no process of the server is left."""
        if self.guardian is None:
            return
        self.probe.closed.set()
        with suppress(BrokenPipeError):  # the guardian was killed
            self.guardian.stdin.close()
        self.guardian.wait()
        os.close(self.guardian_ended)
        end_children(self.tuning.stop_timeout)  # those that a killed guardian left
        self.guardian = None

    def _let_go(self) -> None:
        """Give up the claim before the server ends, so that nobody joins it and newcomers start another."""
        if self.server_lock is not None:
            self.files.state.unlink(missing_ok=True)
            os.close(self.server_lock)
            self.server_lock = None

    def _log_tail(self) -> str:
        """The last lines that the server wrote, indented, for the message."""
        with suppress(OSError), open(self.log, "rb") as stream:
            stream.seek(max(self.log_start, stream.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = [line for line in stream.read().decode(errors="replace").splitlines() if line.strip()]
            return "".join(f"\n    {line}" for line in lines[-TAIL_LINES:])
        return ""


def free_port() -> int:
    while True:
        with socket.socket() as trial, suppress(OSError):
            port = random.choice(PORTS)
            trial.bind(("127.0.0.1", port))
            return port


def say(message: str) -> None:
    print(f"{datetime.now(UTC):%F %T} daemon {os.getpid()}: {message}", flush=True)


def main() -> int:
    order = json.load(sys.stdin)
    files = LeaseFiles(Path(order["folder"]), order["fingerprint"])
    server_lock = acquire(files.server, EXCLUSIVE, wait=False)
    if server_lock is None:
        return 0  # another daemon was faster
    files.state.unlink(missing_ok=True)
    given = order["command"]
    command = ServerCommand(**{**given, **{name: tuple(given[name]) for name in ("argv", "devices", "tuning_argv")}})
    return Daemon(files, command, Tuning(**order["tuning"]), Path(order["log"]), server_lock).run()


if __name__ == "__main__":
    sys.exit(main())
