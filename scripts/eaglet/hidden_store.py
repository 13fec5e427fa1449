"""The hidden store: what the target computed for one sequence of tokens, in one file under its content key.

A key (`digests.hidden_key`) covers the target, the layers, the dtype and every token id, so a file is right wherever its
key is right: runs share the store, and an edited row misses it.  Files appear whole or not at all, are the same bytes
whenever they are written, and carry a digest of their tensors, so each can be checked without anything else.  The store
knows neither shards nor models; which rows a run uses stands in its index files.

`float8_e4m3fn` stores one scale for each token and captured layer (the row's largest magnitude maps to the format's
largest value); `read` gives bfloat16 back.  Every other dtype is read as stored, memory-mapped.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from eaglet.digests import canonical_json, hidden_key, sha256
from eaglet.errors import StoreError
from eaglet.files import write_bytes

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
AUX_LAYERS = 3
NORM = "after_final_norm"
SUFFIX = ".safetensors"
REMEDY = "remove the file (scripts/store.py verify --remove) and run hidden_states again; only this row is captured"


@dataclass(frozen=True)
class HiddenRow:
    """The target's states for T tokens, prompt and output.  H is the target's hidden size.

    `last` is *after* the final norm: the target's logits for the token after position t are lm_head(last[t]).
    """

    token_ids: torch.Tensor  # int32 [T]
    aux: torch.Tensor  # [T, 3H], the inputs of the three layers side by side, in the order of metadata["layers"]
    last: torch.Tensor  # [T, H]
    metadata: dict  # fingerprint, layers, dtype, last, data_sha256, and what the writer added


def bytes_per_token(hidden_size: int, dtype: str) -> int:
    """Stored bytes of one token: its id, (3 + 1)·H values, and for float8 the four scales."""
    scales = 4 * (AUX_LAYERS + 1) if dtype == "float8_e4m3fn" else 0
    return 4 + (AUX_LAYERS + 1) * hidden_size * DTYPES[dtype].itemsize + scales


class HiddenStore:
    """The files below `root` (results/store/hidden): {first two digits of the key}/{key}.safetensors."""

    def __init__(self, root: str | Path):
        self.root = Path(root)

    def path(self, key: str) -> Path:
        return self.root / key[:2] / f"{key}{SUFFIX}"

    def has(self, key: str) -> bool:
        return self.path(key).is_file()

    def keys(self) -> Iterator[str]:
        """Every key in the store, sorted."""
        return iter(sorted(p.stem for p in self.root.glob(f"[0-9a-f][0-9a-f]/*{SUFFIX}")))

    def write(
        self,
        key: str,
        token_ids: Sequence[int] | torch.Tensor,
        aux: torch.Tensor,
        last: torch.Tensor,
        metadata: Mapping[str, Any],
    ) -> str:
        """Store one row; returns the SHA-256 of the file.

        `aux` [T, 3H] and `last` [T, H] may have any floating dtype; they are stored as metadata["dtype"].
        metadata: fingerprint (of the target), layers, dtype, and whatever else the reader shall find.  Raises StoreError
        where the key does not belong to the first three and the tokens.
        """
        token_ids = torch.as_tensor(token_ids, dtype=torch.int32)
        _check_shapes(key, token_ids, aux, last)
        dtype = metadata["dtype"]
        tensors = {"token_ids": token_ids, **_encode("aux", aux, dtype, AUX_LAYERS), **_encode("last", last, dtype, 1)}
        described = {**metadata, "last": NORM, "data_sha256": _tensors_sha256(tensors)}
        _check_key(key, described, token_ids, self.path(key))
        # One metadata entry: safetensors writes several in no fixed order.
        data = save(tensors, {"eaglet": canonical_json(described).decode()})
        write_bytes(self.path(key), data)
        return sha256(data)

    def read(self, key: str) -> HiddenRow:
        """The row under `key`.  Raises StoreError if it is missing or its file cannot be parsed."""
        tensors, metadata = self._load(key)
        dtype = metadata["dtype"]
        return HiddenRow(
            tensors["token_ids"], _decode("aux", tensors, dtype), _decode("last", tensors, dtype), metadata
        )

    def metadata(self, key: str) -> dict:
        """The metadata under `key`, without the tensors' values."""
        return self._load(key)[1]

    def verify(self, key: str) -> None:
        """Recompute the tensors' digest and the key.  Raises StoreError with what was found and expected."""
        tensors, metadata = self._load(key)
        found = _tensors_sha256(tensors)
        if found != metadata["data_sha256"]:
            raise StoreError(
                f"{self.path(key)}: the tensors' SHA-256 is {found}, the file says {metadata['data_sha256']}; {REMEDY}"
            )
        _check_key(key, metadata, tensors["token_ids"], self.path(key))

    def _load(self, key: str) -> tuple[dict[str, torch.Tensor], dict]:
        path = self.path(key)
        try:
            with safe_open(path, framework="pt") as file:
                metadata = json.loads((file.metadata() or {})["eaglet"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        except FileNotFoundError as error:
            raise StoreError(f"{path}: missing; run hidden_states again, it captures what the store lacks") from error
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise StoreError(f"{path}: damaged ({error}); {REMEDY}") from error
        if (
            not {"token_ids", "aux", "last"} <= tensors.keys()
            or not {"fingerprint", "layers", "dtype", "data_sha256"} <= metadata.keys()
            or metadata.get("last") != NORM
        ):
            raise StoreError(
                f"{path}: holds {', '.join(sorted(tensors))} with {canonical_json(metadata).decode()}; expected token_ids, "
                f"aux and last with fingerprint, layers, dtype, data_sha256 and last: {NORM}; {REMEDY}"
            )
        _check_shapes(key, tensors["token_ids"], tensors["aux"], tensors["last"])
        return tensors, metadata


def _check_shapes(key: str, token_ids: torch.Tensor, aux: torch.Tensor, last: torch.Tensor) -> None:
    tokens, hidden = last.shape
    if token_ids.shape != (tokens,) or aux.shape != (tokens, AUX_LAYERS * hidden):
        raise StoreError(
            f"hidden state {key}: token_ids {list(token_ids.shape)}, aux {list(aux.shape)}, last {list(last.shape)}; "
            f"expected [T], [T, {AUX_LAYERS}H], [T, H]"
        )


def _check_key(key: str, metadata: Mapping, token_ids: torch.Tensor, path: Path) -> None:
    expected = hidden_key(metadata["fingerprint"], metadata["layers"], metadata["dtype"], token_ids.tolist())
    if key != expected:
        raise StoreError(f"{path}: its content belongs under the key {expected}; {REMEDY}")


def _encode(name: str, values: torch.Tensor, dtype: str, parts: int) -> dict[str, torch.Tensor]:
    """{name: values in `dtype`}, and for float8 {name}_scale float32 [T, parts], one scale for each part of a row."""
    values = values.detach().to("cpu")
    if dtype != "float8_e4m3fn":
        return {name: values.to(DTYPES[dtype]).contiguous()}
    split = values.float().unflatten(-1, (parts, -1))  # [T, parts, H]
    largest = split.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    scale = largest / torch.finfo(torch.float8_e4m3fn).max
    stored = (split / scale).to(torch.float8_e4m3fn).flatten(-2).contiguous()
    return {name: stored, f"{name}_scale": scale.squeeze(-1).contiguous()}


def _decode(name: str, tensors: Mapping[str, torch.Tensor], dtype: str) -> torch.Tensor:
    if dtype != "float8_e4m3fn":
        return tensors[name]
    scale = tensors[f"{name}_scale"]  # [T, parts]
    split = tensors[name].float().unflatten(-1, (scale.shape[-1], -1))
    return (split * scale.unsqueeze(-1)).flatten(-2).to(torch.bfloat16)


def _tensors_sha256(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over the tensors' bytes in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
