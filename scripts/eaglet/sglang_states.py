"""Hidden states from SGLang, for targets that transformers cannot hold: its official flags, its HTTP interface, two servers.

`--enable-return-aux-hidden-states` makes a server return the auxiliary layers *in place of* the last hidden state, so one
server gives the auxiliary layers of all rows, and after it another gives the last states (after the final norm).  What the
first gave waits in the store's staging folder, where an interrupted capture finds it again.

Traps that this module handles: a row that is partly served from the prefix cache or prefilled in chunks comes back with
positions missing, so both are switched off and positions are counted; explicit layer ids name outputs in most of
SGLang's models (1 is added), and in its DeepSeek family only if the first id is 1.
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

import torch
from safetensors.torch import load_file, save

from eaglet.client import Client, Expected, RowRefused
from eaglet.endpoint import connect
from eaglet.errors import CaptureError, ConfigError
from eaglet.files import write_bytes
from eaglet.hidden_store import HiddenStore
from eaglet.turn_format import TurnFormat

SERVE = Path(__file__).resolve().parents[1] / "serve.py"
WHOLE_ROWS = {"disable-radix-cache": True, "chunked-prefill-size": -1}
LAST = {"return-hidden-states-mode": "full"}
IDS_ARE_INPUTS = ("Deepseek", "Kimi")  # architectures whose explicit ids are inputs unless the first is 1
ENDPOINT_SECONDS = 60

Item, Result = TypeVar("Item"), TypeVar("Result")


def aux_arguments(layers: Sequence[int], num_layers: int, architecture: str) -> dict[str, Any]:
    """SGLang's flags that make it return the inputs of `layers`.  Raises ConfigError where it cannot name them."""
    arguments = {"speculative-algorithm": "EAGLE3", "enable-return-aux-hidden-states": True}
    if list(layers) == [2, num_layers // 2, num_layers - 3]:
        return arguments  # its own default, whatever the family's way of counting
    if architecture.startswith(IDS_ARE_INPUTS) and layers[0] != 2:
        ids, possible = list(layers), layers[0] != 1
    else:
        ids, possible = [layer - 1 for layer in layers], layers[0] >= 1
    if not possible:
        raise ConfigError(
            f"hidden_states.layers: SGLang cannot return the inputs of layers {list(layers)} of {architecture}; set auto"
        )
    return {**arguments, "return-aux-hidden-state-layer-ids": ids}


@contextmanager
def served(turn_format: Path, server: Mapping[str, Any], arguments: Mapping[str, Any], log: Path) -> Iterator[Client]:
    """A client of a server that is started for the body with the config's server section and these flags added."""
    params = {name: server[name] for name in ("engine", "python", "environment") if name in server}
    params |= {"engine": "sglang", "arguments": {**server.get("arguments", {}), **WHOLE_ROWS, **arguments}}
    tuning = {"linger": 0, "start_timeout": server.get("start_timeout", 3600)}
    facts = TurnFormat.load(turn_format)
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


def states(client: Client, token_ids: Sequence[int], width: int) -> torch.Tensor:
    """float32 [T, width]: what the server returns for each token of a row.  Raises CaptureError unless it is whole."""
    # One token must be generated; the state that would predict the next one is then the last position's.
    body = {
        "input_ids": list(token_ids),
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_hidden_states": True,
    }
    try:
        meta = client.ask(body)["meta_info"]
    except RowRefused as refused:
        raise CaptureError(f"a row of {len(token_ids)} tokens was refused: {refused.message}") from refused
    found = torch.tensor(meta["hidden_states"][0])
    if tuple(found.shape) != (len(token_ids), width):
        raise CaptureError(
            f"{client.connection.describe()} returned hidden states {list(found.shape)} for {len(token_ids)} tokens, expected "
            f"{[len(token_ids), width]} ({meta.get('cached_tokens')} tokens came from its cache); prefix cache and chunked prefill "
            "must be off: remove server.arguments that switch them on"
        )
    return found


class Staging:
    """Auxiliary states that wait for their last state: one file for each row, below the store."""

    def __init__(self, store: HiddenStore):
        self.folder = store.root / "staging"

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"

    def has(self, key: str) -> bool:
        return self.path(key).is_file()

    def write(self, key: str, aux: torch.Tensor) -> None:
        write_bytes(self.path(key), save({"aux": aux}))

    def read(self, key: str) -> torch.Tensor:
        return load_file(self.path(key))["aux"]

    def remove(self, key: str) -> None:
        self.path(key).unlink()


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
