"""What every program of scripts/ has in common: its parser, its --params, and how it ends."""

import argparse
import json
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence

from eaglet.errors import EagletError

WORKFLOW_PID = "EAGLET_WORKFLOW_PID"  # set by the Snakefile: the Snakemake process that this program works for


def parser(description: str | None, *, params: str | None = None) -> argparse.ArgumentParser:
    """An argparse parser with `--provenance FILE` and, if `params` describes it, a required `--params JSON`."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if params:
        made.add_argument("--params", type=json_object, required=True, metavar="JSON", help=params)
    made.add_argument(
        "--provenance", metavar="FILE", help="where to say what was done, from what; not written if absent"
    )
    return made


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Of a program that may start an SGLang of its own: `--server` and `--server-tuning`, both parts of one section."""
    parts = {
        "--server": "the config's server section: engine, python, arguments, environment",
        "--server-tuning": "of the same section what changes no result: time-outs, max_in_flight",
    }
    for flag, what in parts.items():
        parser.add_argument(flag, type=json_object, default={}, metavar="JSON", help=what)


def json_object(text: str) -> dict:
    """For argparse: a JSON object given as text."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, found {type(value).__name__}")
    return value


def run(main: Callable[[Sequence[str] | None], int | None]) -> None:
    """Run `main` and end the process: an `EagletError` becomes one message on stderr and its exit status.

    SIGTERM ends the program as Ctrl-C does, so that `finally` blocks and context managers run.  So does the end of
    the workflow: Snakemake killed outright tells its jobs nothing, and none may be left behind.
    """

    def terminate(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, terminate)
    if pid := os.environ.get(WORKFLOW_PID):
        end_with(int(pid))
    try:
        sys.exit(main(None))
    except EagletError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        sys.exit(130)


def end_with(pid: int) -> None:
    """Send this process SIGTERM when the process `pid` ends, whatever ended it."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGTERM)
        return

    def wait() -> None:
        select.select([descriptor], [], [])  # a pidfd is readable once its process has ended
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="workflow watch", daemon=True).start()
