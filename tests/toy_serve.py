"""`serve.py hold` for the toy server, and a consumer: what the mini workflows of test_lease.py run.

toy_serve.py hold|lazy ENDPOINT LOG TUNING [FLAVOUR] [DEVICE…]     toy_serve.py consume ENDPOINT SECONDS OUTPUT [fail]
"""

import json
import os
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import requests

from eaglet import program
from eaglet.endpoint import connect
from eaglet.lease import hold
from eaglet.server_command import PORT, ServerCommand, Tuning

TOY = str(Path(__file__).with_name("toy_server.py"))


def command(flavour: str = "plain", devices: tuple[str, ...] = ()) -> ServerCommand:
    return ServerCommand(
        argv=(sys.executable, TOY, "--port", PORT, "--flavour", flavour), environment={}, identity={}, devices=devices
    )


def main(argv: list[str] | None = None) -> int:
    mode, endpoint, *rest = sys.argv[1:]
    if mode in ("hold", "lazy"):
        log, tuning, *more = rest
        flavour, *devices = more or ["plain"]
        prepare = partial(command, flavour, tuple(devices))
        hold(prepare, Tuning(**json.loads(tuning)), Path(endpoint), Path(log), when_wanted=mode == "lazy")
        return 0
    seconds, output, *fails = rest
    with connect(Path(endpoint)) as connection:
        reply = requests.get(connection.url, headers=connection.headers, timeout=5)
        with open(os.environ["TOY_EVENTS"], "a") as stream:
            print(f"served {os.getpid()}", file=stream)
        time.sleep(float(seconds))
        if fails:
            return 3
        Path(output).write_text(reply.text)
    return 0


if __name__ == "__main__":
    program.run(main)
