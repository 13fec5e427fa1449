"""An SGLang of one's own for a while: started with the flags that a job needs, asked, and ended.

It is a lease of `scripts/serve.py` as the workflow's servers are, so it waits for the GPUs and never outlives its job.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from eaglet.client import Client, Expected
from eaglet.endpoint import connect
from eaglet.errors import CaptureError
from eaglet.row_request import RESERVED_TOKENS
from eaglet.turn_format import TurnFormat

SERVE = Path(__file__).resolve().parents[1] / "serve.py"
ENDPOINT_SECONDS = 60

Item, Result = TypeVar("Item"), TypeVar("Result")


@contextmanager
def served(
    turn_format: Path, server: Mapping[str, Any], arguments: Mapping[str, Any], log: Path, *, longest: int = 0
) -> Iterator[Client]:
    """A client of an SGLang that is started for the body.

    server: the config's section, of which python, arguments, environment and the timeouts count; `arguments` are added.
    `longest`: tokens of the longest prompt; beyond what SGLang takes, its context is declared a little longer.
    """
    params = {name: server[name] for name in ("engine", "python", "environment") if name in server}
    params |= {"engine": "sglang", "arguments": {**server.get("arguments", {}), **arguments}}
    tuning = {"linger": 0, "start_timeout": server.get("start_timeout", 3600)}
    facts = TurnFormat.load(turn_format)
    if longest > facts.context_length - RESERVED_TOKENS - 1:
        params["context_length"] = longest + RESERVED_TOKENS + 1
        params["environment"] = {**params.get("environment", {}), "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    with tempfile.TemporaryDirectory(prefix="eaglet-") as folder:
        endpoint = Path(folder) / "endpoint.json"
        command = [sys.executable, SERVE, "hold", "--endpoint", endpoint, "--turn-format", turn_format, "--log", log]
        command += ["--params", json.dumps(params), "--tuning", json.dumps(tuning)]
        process = subprocess.Popen(list(map(str, command)))
        try:
            _wait_for(endpoint, process)
            with connect(endpoint=endpoint) as connection:
                yield Client(
                    connection,
                    Expected(facts.vocab_size, frozenset(facts.end_of_turn_ids)),
                    max_in_flight=server.get("max_in_flight", 32),
                    request_timeout=server.get("request_timeout", 1800),
                    give_up_after=server.get("give_up_after", 900),
                )
        finally:
            process.terminate()
            process.wait()


def _wait_for(endpoint: Path, process: subprocess.Popen) -> None:
    """Return once the file exists; the service writes it at once."""
    until = time.monotonic() + ENDPOINT_SECONDS
    while not endpoint.is_file():
        if process.poll() is not None or time.monotonic() > until:
            raise CaptureError("the inference server could not be started; the lines above say why")
        time.sleep(0.1)


def in_flight(work: Callable[[Item], Result], items: Sequence[Item], at_once: int) -> Iterator[tuple[Item, Result]]:
    """(item, work(item)) in order, with at most `at_once` under way or waiting to be taken."""
    pending: deque[tuple[Item, Future[Result]]] = deque()
    with ThreadPoolExecutor(max_workers=at_once) as pool:
        for item in items:
            pending.append((item, pool.submit(work, item)))
            if len(pending) >= at_once:
                done, future = pending.popleft()
                yield done, future.result()
        while pending:
            done, future = pending.popleft()
            yield done, future.result()
