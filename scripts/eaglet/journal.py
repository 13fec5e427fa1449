"""The journal: what servers answered, one append-only JSON Lines file for each dataset of a target, found by request key.

A line is complete or it is not there: each is one write, ends with a checksum of its own, and a torn last line is cut
off when the journal is opened again.  Three kinds of lines:

    {"kind":"server","server":<digest>,"facts":{…},"time":…,"crc32":…}             before the first line that names it
    {"kind":"row","request_key":…,"sample_id":…,"output_ids":[…],"finish_reason":…,"matched_stop":…,"server":…,…}
    {"kind":"refused","request_key":…,"sample_id":…,"reason":…,"message":…,"server":…,…}

The index in memory is a key and a file position for each row (about 200 bytes), never the tokens.  This module knows
lines, checksums and locks; it does not know prompts, requests or what makes a server the right one.

One write per line, not one file per row or a database: a SIGKILL loses no line that was written, a loss of power at most
the last `SYNC_SECONDS`, and a person can read the file with the usual tools.
"""

import errno
import fcntl
import json
import os
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eaglet.digests import content_key
from eaglet.errors import CaptureError, StoreError

SYNC_SECONDS = 5.0
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_ROW, _REFUSED, _SERVER = (b'{"kind":"%s",' % kind for kind in (b"row", b"refused", b"server"))
_CHECK = b',"crc32":"'
_CHECK_LENGTH = len(_CHECK) + 8 + len(b'"}')
_KEY = slice(len(_ROW) + len(b'"request_key":"'), len(_ROW) + len(b'"request_key":"') + 64)


@dataclass(frozen=True, slots=True)
class Generation:
    """What a server answered to one request, every id as it came."""

    request_key: str
    sample_id: str
    output_ids: Sequence[int]
    finish_reason: str  # stop | length
    matched_stop: int | None  # the id that ended it; None when it ended at its length
    server: str  # digest of the facts of the server that answered


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that servers do not answer, for a reason that lies in the row."""

    request_key: str
    sample_id: str
    reason: str  # a code that reports count under
    message: str
    server: str


def facts_digest(facts: Mapping) -> str:
    """16 hex digits that name a server by its facts."""
    return content_key(dict(facts))[:16]


def encode_line(body: Mapping[str, Any]) -> bytes:
    """A journal line with its checksum: CRC-32 of the JSON before the checksum, which finds any single damaged byte."""
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=True).encode("ascii")[:-1]
    return b'%s%s%08x"}\n' % (text, _CHECK, zlib.crc32(text))


def damage(line: bytes) -> str | None:
    """What is wrong with a line (without its line break), or None."""
    text, check = line[:-_CHECK_LENGTH], line[-_CHECK_LENGTH:]
    if not line.startswith((_ROW, _REFUSED, _SERVER)) or not check.startswith(_CHECK) or not check.endswith(b'"}'):
        return f"not a journal line: {line[:60]!r}"
    found, wanted = check[len(_CHECK) : -2], b"%08x" % zlib.crc32(text)
    return None if found == wanted else f"its checksum is {wanted.decode()}, it says {found.decode('ascii', 'replace')}"


def scan(path: str | Path) -> Iterator[tuple[int, int, bytes]]:
    """(line number from 1, offset, line) of a journal, damaged lines included; a torn last line has no line break."""
    offset = 0
    with open(path, "rb") as stream:
        for number, line in enumerate(stream, 1):
            yield number, offset, line
            offset += len(line)


@dataclass(frozen=True)
class Damage:
    line: int
    offset: int  # in bytes
    what: str


def verify(path: str | Path) -> list[Damage]:
    """Every line that is not as it was written.  A torn last line, as a kill leaves it, is not damage."""
    return [
        Damage(number, offset, what)
        for number, offset, line in scan(path)
        if line.endswith(b"\n") and (what := damage(line[:-1]))
    ]


def entries(path: str | Path) -> Iterator[dict]:
    """The sound lines of a journal as dicts, in order, without their checksums; safe while a capture writes to it."""
    for _, _, line in scan(path):
        if line.endswith(b"\n") and not damage(line[:-1]):
            entry = json.loads(line)
            del entry["crc32"]
            yield entry


class Index:
    """The rows of one journal by request key.  Reads the whole file once, then single lines when they are wanted."""

    def __init__(self, path: str | Path, *, strict: bool = False):
        """`strict`: raise StoreError on a damaged line, else pass over it.  `end`: where the last whole line ends."""
        self.path = Path(path)
        self.end = 0
        self.servers: dict[str, dict] = {}
        self.refusals: dict[str, Refusal] = {}
        self._positions: dict[bytes, int] = {}  # offset << 32 | length
        self._descriptor = os.open(self.path, os.O_RDONLY)
        for number, offset, line in scan(self.path):
            if not line.endswith(b"\n"):
                break
            if (what := damage(line[:-1])) and strict:
                raise StoreError(
                    f"{self.path}:{number}: damaged line at byte {offset}: {what}. The disk or a person changed it. "
                    f"To have its row generated again, delete the line (sed -i {number}d {self.path}) and run again"
                )
            if not what:
                self.add(offset, line)
            self.end = offset + len(line)

    def add(self, offset: int, line: bytes) -> None:
        """Take up a sound line that stands at `offset`."""
        if line.startswith(_ROW):
            self._positions.setdefault(bytes.fromhex(line[_KEY].decode()), offset << 32 | len(line))
            return
        entry = json.loads(line)
        if entry["kind"] == "server":
            self.servers[entry["server"]] = entry["facts"]
        else:
            refusal = Refusal(*(entry[name] for name in Refusal.__slots__))
            self.refusals[refusal.request_key] = refusal

    def __contains__(self, request_key: str) -> bool:
        return bytes.fromhex(request_key) in self._positions

    def __len__(self) -> int:
        return len(self._positions)

    def get(self, request_key: str) -> Generation | None:
        """Raises StoreError when the line has changed since the index was made."""
        position = self._positions.get(bytes.fromhex(request_key))
        if position is None:
            return None
        offset, length = position >> 32, position & 0xFFFFFFFF
        line = os.pread(self._descriptor, length, offset)
        if what := damage(line[:-1]):
            raise StoreError(f"{self.path}: the line at byte {offset} changed while it was in use: {what}")
        entry = json.loads(line)
        return Generation(*(entry[name] for name in Generation.__slots__))

    def close(self) -> None:
        os.close(self._descriptor)


class Journal:
    """The journal that one process writes: `Index` plus `append`, held by an exclusive lock.  A context manager.

    `append` may be called from many threads.  After an error in writing the file ends with a whole line, and every
    further append raises the same StoreError.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._lock = threading.Lock()
        self._failure: StoreError | None = None
        self._synced = time.monotonic()

    def __enter__(self) -> "Journal":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._descriptor)
            raise CaptureError(
                f"{self.path}: another capture is writing to it; wait until that has ended, or stop it"
            ) from error
        self.index = Index(self.path, strict=True)
        os.ftruncate(self._descriptor, self.index.end)  # a torn last line goes
        return self

    def __exit__(self, *error: Any) -> None:
        with self._lock:
            self._failure = self._failure or StoreError(f"{self.path}: the journal is closed")
            os.fsync(self._descriptor)
            os.close(self._descriptor)  # lets go of the lock
            self.index.close()

    def append(self, entry: Generation | Refusal) -> None:
        """Write one line; when this returns, a kill of this process no longer loses it.  Raises StoreError."""
        kind = "row" if isinstance(entry, Generation) else "refused"
        self._append({"kind": kind, **{name: getattr(entry, name) for name in entry.__slots__}})

    def append_server(self, facts: Mapping) -> str:
        """Make a server known, once; returns the digest that rows name it by."""
        digest = facts_digest(facts)
        if digest not in self.index.servers:
            self._append({"kind": "server", "server": digest, "facts": dict(facts)})
        return digest

    def _append(self, body: Mapping[str, Any]) -> None:
        line = encode_line({**body, "time": int(time.time())})
        with self._lock:
            if self._failure:
                raise self._failure
            offset = self.index.end
            try:
                written = os.write(self._descriptor, line)
                while written < len(line):
                    written += os.write(self._descriptor, line[written:])
            except OSError as error:
                self._failure = self._repaired(offset, error)
                raise self._failure from error
            self.index.add(offset, line)
            self.index.end = offset + len(line)
            due = time.monotonic() - self._synced >= SYNC_SECONDS
            if due:
                self._synced = time.monotonic()
        if due:
            os.fsync(self._descriptor)  # outside the lock: other threads go on writing

    def _repaired(self, end: int, error: OSError) -> StoreError:
        """Cut the file back to its last whole line, and say what happened."""
        os.ftruncate(self._descriptor, end)
        what = "no room is left on the disk" if error.errno in NO_ROOM else error.strerror
        return StoreError(
            f"{self.path}: an answer could not be written: {what}. The journal is sound up to there ({end:,} bytes, "
            f"{len(self.index):,} rows); make room and run again, and the capture goes on where it stopped"
        )


class Generations:
    """All journals of one target: the dataset's own is written, the others are looked up.  A context manager.

    `folder` is results/store/generations/{target fingerprint}.
    """

    def __init__(self, folder: str | Path, dataset: str):
        self.folder = Path(folder)
        self.journal = Journal(self.folder / f"{dataset}.jsonl")

    def __enter__(self) -> "Generations":
        self.journal.__enter__()
        others = (p for p in sorted(self.folder.glob("*.jsonl")) if p != self.journal.path)
        self.others = [Index(path) for path in others]
        return self

    def __exit__(self, *error: Any) -> None:
        for other in self.others:
            other.close()
        self.journal.__exit__(*error)

    def borrowed(self, request_key: str) -> tuple[Generation, dict] | None:
        """A row of another dataset's journal, with the facts of the server that answered it."""
        for other in self.others:
            if (found := other.get(request_key)) and found.server in other.servers:
                return found, other.servers[found.server]
        return None
