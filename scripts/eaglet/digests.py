"""The one place that hashes: canonical JSON, files, keys, and the Merkle root of a shard's rows.

Every key of eaglet (request, hidden state, sample, journal) is the SHA-256 of canonical JSON, so two programs that
agree on a value agree on its key.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

CHUNK = 1 << 20
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def canonical_json(value: Any) -> bytes:
    """UTF-8 JSON with sorted keys and no white space; raises ValueError on NaN and on lone surrogates."""
    return _CANONICAL.encode(value).encode("utf-8")


def sha256(data: bytes) -> str:
    """64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def content_key(value: Any) -> str:
    """SHA-256 of the canonical JSON of `value`, 64 hex digits."""
    return sha256(canonical_json(value))


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file's bytes, 64 hex digits, read in chunks."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def tree_sha256(folder: str | Path) -> str:
    """SHA-256 over the relative names and contents of all files below a folder, in sorted order."""
    folder = Path(folder)
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return content_key([[p.relative_to(folder).as_posix(), file_sha256(p)] for p in files])


def merkle_root(leaves: Iterable[str]) -> str:
    """Root of a binary Merkle tree over hex digests, in the given order, by the hashing rule of RFC 6962.

    A leaf is hashed as SHA-256(0x00 ‖ leaf), a node as SHA-256(0x01 ‖ left ‖ right); an odd node moves up unchanged
    (the RFC's split at the largest power of two gives the same tree).  Of no leaves it is SHA-256 of nothing.
    """
    level = [hashlib.sha256(b"\x00" + bytes.fromhex(leaf)).digest() for leaf in leaves]
    if not level:
        return sha256(b"")
    while len(level) > 1:
        paired = [hashlib.sha256(b"\x01" + a + b).digest() for a, b in zip(level[::2], level[1::2], strict=False)]
        level = paired + level[len(paired) * 2 :]
    return level[0].hex()


def sample_id(messages: Sequence[Mapping], tools: Sequence | None, template_arguments: Mapping | None) -> str:
    """16 hex digits naming a conversation by its content: equal for duplicates, stable when other rows come and go."""
    return content_key([list(messages), tools, dict(template_arguments or {})])[:16]


def request_key(fingerprint: str, prompt_ids: Sequence[int], sampling: Mapping, seed: int) -> str:
    """Names one generation: the same target, prompt ids, sampling settings and row seed give the same key."""
    return content_key([fingerprint, list(prompt_ids), dict(sampling), seed])


def row_seed(seed: int, sample: str) -> int:
    """The sampling seed of one row, from the run's seed and the row's id: 0 ≤ seed < 2³¹, independent of file order."""
    return int(content_key([seed, sample])[:8], 16) >> 1


def hidden_key(fingerprint: str, layers: Sequence[int], dtype: str, token_ids: Sequence[int]) -> str:
    """Names the hidden states of one row: the same target, layers, dtype and tokens give the same key."""
    return content_key([fingerprint, list(layers), dtype, list(token_ids)])
