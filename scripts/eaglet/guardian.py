"""The parent of one server process: starts it, and ends it and all its descendants when the daemon goes.

Run by the daemon as `python -m eaglet.guardian`, with one line of JSON on standard input, {argv, environment, descriptors,
grace}; the end of that input is the order to stop, given by a daemon that closes the pipe as well as by one that was killed.
Exits with the server's status.
"""

import json
import os
import select
import signal
import subprocess
import sys

from eaglet.processes import become_subreaper, die_with_parent, end_children


def main() -> int:
    order = json.loads(sys.stdin.readline())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the server would inherit
    become_subreaper()
    try:
        server = subprocess.Popen(
            order["argv"],
            env=order["environment"],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=order["descriptors"],  # the GPUs stay claimed until the last process of the server has ended
            preexec_fn=die_with_parent,
        )
    except OSError as error:
        print(f"{order['argv'][0]}: cannot be started ({error.strerror})", flush=True)
        return 127
    ended = os.pidfd_open(server.pid)
    select.select([ended, sys.stdin.fileno()], [], [])
    status = server.poll()
    end_children(order["grace"])
    return 0 if status is None else status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
