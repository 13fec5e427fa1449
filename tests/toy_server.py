"""A server for tests of the lease: slow to start, with a child in its group and one that escaped it, and faults on demand.

Its behaviour is set by TOY_* variables, so that servers of one command can differ.  Each start, SIGTERM and exit is a line of
$TOY_EVENTS.  All its processes carry TOY_TAG in their environment, by which tests count them.
"""

import argparse
import http.server
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

EVENTS = Path(os.environ["TOY_EVENTS"])


def event(what: str) -> None:
    with open(EVENTS, "a") as stream:
        print(f"{what} {os.getpid()}", file=stream)


def setting(name: str, default: float = 0.0) -> float:
    return float(os.environ.get(f"TOY_{name}", default))


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if Path(os.environ["TOY_EVENTS"]).with_name("hang").exists():
            time.sleep(3600)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"{os.getpid()} {self.headers.get('Authorization')}".encode())

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--flavour")  # something that changes the fingerprint
    args = parser.parse_args()
    event("start")

    def end(*_: object) -> None:
        event("term")
        time.sleep(setting("STOP"))
        event("exit")
        os._exit(0)

    signal.signal(signal.SIGTERM, signal.SIG_IGN if setting("IGNORE_TERM") else end)
    for escaped in (False, True):
        subprocess.Popen(["sleep", "600"], start_new_session=escaped)
    if setting("REFUSE"):
        sys.exit("toy: error: unrecognized arguments: --no-such-flag")
    time.sleep(setting("START", 0.2) if not setting("NEVER") else 3600)
    crash = Path(os.environ["TOY_EVENTS"]).with_name("crash")
    if setting("CRASH"):

        def crash_on_demand() -> None:
            while not crash.exists():
                time.sleep(0.02)
            if setting("CRASH") == 1:
                crash.unlink()
            event("crash")
            os._exit(7)

        threading.Thread(target=crash_on_demand, daemon=True).start()
    event("listening")
    http.server.ThreadingHTTPServer(("127.0.0.1", args.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
