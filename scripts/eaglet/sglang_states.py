"""Hidden states from SGLang, for targets that transformers cannot hold: its official flags, its HTTP interface, two servers.

`--enable-return-aux-hidden-states` makes a server return the auxiliary layers *in place of* the last hidden state, so one
server gives the auxiliary layers of all rows, and after it another gives the last states (after the final norm).  What the
first gave waits in the store's staging folder, where an interrupted capture finds it again.

Traps that this module handles: a row that is partly served from the prefix cache or prefilled in chunks comes back with
positions missing, so both are switched off and positions are counted; explicit layer ids name outputs in most of
SGLang's models (1 is added), and in its DeepSeek family only if the first id is 1.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from eaglet.client import Client, RowRefused
from eaglet.errors import CaptureError, ConfigError
from eaglet.files import write_bytes
from eaglet.hidden_store import HiddenStore

WHOLE_ROWS = {"disable-radix-cache": True, "chunked-prefill-size": -1}
LAST = {**WHOLE_ROWS, "return-hidden-states-mode": "full"}
IDS_ARE_INPUTS = ("Deepseek", "Kimi")  # architectures whose explicit ids are inputs unless the first is 1


def aux_arguments(layers: Sequence[int], num_layers: int, architecture: str) -> dict[str, Any]:
    """SGLang's flags that make it return the inputs of `layers`.  Raises ConfigError where it cannot name them."""
    arguments = {**WHOLE_ROWS, "speculative-algorithm": "EAGLE3", "enable-return-aux-hidden-states": True}
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
